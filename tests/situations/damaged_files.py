"""Damaged files among good ones, the first one too, are replaced in batches and named; a cache opens all the same."""

import logging

import fastload

logging.disable()
for number in (0, 20, 39):
    path = f"photos/{'cat' if number < 20 else 'dog'}/{number:02}.png"
    content = open(path, "rb").read()
    open(path, "wb").write(content[:60] if number else b"")
photos = fastload.ImageFolder("photos")
for cache in (None, "ram"):
    dataset = photos if cache is None else fastload.CachedDataset(photos, cache=cache)
    for num_workers in (0, 2):
        options = {"num_workers": num_workers, "on_error": "replace", "max_errors": 3}
        loader = fastload.DataLoader(dataset, batch_size=10, **options)
        images = [image for images, labels in loader for image in images[:, 0, 0, 0].tolist()]
        assert images[1:20] + images[21:39] == [
            6 * number for number in range(40) if number not in (0, 20, 39)
        ]
        assert [(failed.index, failed.path[-6:]) for failed in sorted(loader.failed_samples, key=lambda one: one.index)] == [
            (0, "00.png"), (20, "20.png"), (39, "39.png")]  # fmt: skip
try:
    list(fastload.DataLoader(photos, batch_size=10, num_workers=2))
except fastload.errors.ImageReadError as error:
    assert error.path.endswith("00.png")
