"""copy, deepcopy and pickle of a cached dataset and of its loader give the same samples, also after close()."""

import copy
import pickle

import fastload


def only_the_image(sample):
    return sample[0]


dataset = fastload.CachedDataset(fastload.ImageFolder("photos"), transform=only_the_image)
loader = fastload.DataLoader(dataset, batch_size=8)
expected = [images[:, 0, 0, 0].tolist() for images in loader]
for same in (
    copy.copy(loader),
    copy.deepcopy(loader),
    fastload.DataLoader(copy.deepcopy(dataset), 8, num_workers=1),
):
    assert [images[:, 0, 0, 0].tolist() for images in same] == expected
dataset.transform = None
again = pickle.loads(pickle.dumps(dataset))
dataset.cache.close()
later = pickle.loads(pickle.dumps(dataset))
for same in (again, later):
    assert same[39][1] == 1
    assert same[39][0].max() == 234
