"""A loader that is pickled in the middle of its epoch, or sent to a pool, begins anew with the same settings."""

import pickle
from concurrent.futures import ProcessPoolExecutor

import fastload


def count(loader):
    return [images[0, 0, 0, 0].item() for images, labels in loader]


if __name__ == "__main__":
    dataset = fastload.CachedDataset(fastload.ImageFolder("photos"))
    loader = fastload.DataLoader(
        dataset, batch_size=10, num_workers=1, persistent_workers=True, seeding="sample"
    )
    iterator = iter(loader)
    next(iterator)
    same = pickle.loads(pickle.dumps(loader))
    assert (same.seeding, same.num_workers, same.batch_size) == ("sample", 1, 10)
    assert count(same) == [0, 60, 120, 180]
    with ProcessPoolExecutor(1) as pool:
        assert pool.submit(count, loader).result() == [0, 60, 120, 180]
    assert [images[0, 0, 0, 0].item() for images, labels in iterator] == [60, 120, 180]
