"""Three loaders with persistent workers are alive at once, and one is read in the middle of another."""

import fastload

photos = fastload.ImageFolder("photos")
options = {"batch_size": 10, "num_workers": 1, "persistent_workers": True}
train, val, test = (fastload.DataLoader(fastload.CachedDataset(photos), **options) for _ in range(3))
for epoch in range(2):
    for step, (images, labels) in enumerate(train):
        if step == 2:  # validate within the epoch
            assert sum(len(labels) for images, labels in val) == 40
        assert (
            images[:, 0, 0, 0].tolist() == [6 * number for number in range(10 * step, 10 * step + 10)]
            or step == 2
        )
    assert step == 3
    assert sum(labels.sum().item() for images, labels in test) == 20
