"""Train, validation and test caches of three kinds in one script give what the folder has, and share nothing."""

import fastload

photos = fastload.ImageFolder("photos")
train = fastload.CachedDataset(photos, cache="ram")
val = fastload.CachedDataset(photos, cache=None)
test = fastload.CachedDataset(photos, cache="lmdb:test.lmdb")
small = fastload.CachedDataset(fastload.ImageFolder("photos", size=(8, 8)), cache="lmdb:small.lmdb")
for epoch in range(2):
    for dataset, shape in ((train, (48, 64, 3)), (val, (48, 64, 3)), (test, (48, 64, 3)), (small, (8, 8, 3))):
        loader = fastload.DataLoader(dataset, batch_size=8, num_workers=epoch)
        values = []
        for images, labels in loader:
            assert images.shape[1:] == shape
            assert (labels == (images[:, 0, 0, 0] >= 120)).all()
            values += images[:, 0, 0, 0].tolist()
        assert values == [6 * number for number in range(40)]
assert [one.cache_info().num_cached for one in (train, val, test, small)] == [40, 0, 40, 40]
