"""A cache and workers that run go on after os.chdir(); files at relative paths are missed by name, as with torch."""

import os

import fastload

os.mkdir("elsewhere")
os.chdir("elsewhere")  # where the script was started
photos = fastload.ImageFolder("../photos")
dataset = fastload.CachedDataset(photos, cache="lmdb:cache.lmdb")
assert os.path.exists("cache.lmdb")
read = iter(fastload.DataLoader(photos, batch_size=10, num_workers=1))
loader = fastload.DataLoader(dataset, batch_size=10)
next(read)
os.mkdir("runs")
os.chdir("runs")  # as hydra does
assert [images[0, 0, 0, 0].item() for images, labels in read] == [60, 120, 180]
assert [images[0, 0, 0, 0].item() for images, labels in loader] == [0, 60, 120, 180]
try:
    photos[0]
except fastload.errors.ImageReadError as error:
    assert error.path == "../photos/cat/00.png"
else:
    raise AssertionError("no error")
