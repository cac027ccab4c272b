"""`samples` and `targets` of an ImageFolder that are set, filtered or added to are what is read and cached."""

import fastload

photos = fastload.ImageFolder("photos")
photos.samples = [(path, 1 - label) for path, label in photos.samples if not path.endswith("0.png")]
assert len(photos) == 36
assert photos.targets.count(1) == 18
relabelled = fastload.CachedDataset(photos, cache="ram")
plain = fastload.CachedDataset(fastload.ImageFolder("photos"), cache="ram")
for dataset, values in (
    (relabelled, [value for value in range(0, 240, 6) if value % 60]),
    (plain, range(0, 240, 6)),
):
    loader = fastload.DataLoader(dataset, batch_size=9, num_workers=2)
    pairs = [
        pair
        for images, labels in loader
        for pair in zip(images[:, 0, 0, 0].tolist(), labels.tolist(), strict=True)
    ]
    assert pairs == [(value, int((value >= 120) == (dataset is plain))) for value in values]
