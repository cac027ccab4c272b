"""`~` in a root, and in the path of a cache, means the home folder."""

import os
import shutil

import fastload

shutil.copytree("photos", os.path.expanduser("~/photos"))
photos = fastload.ImageFolder("~/photos")
assert (len(photos), photos.classes) == (40, ["cat", "dog"])
loader = fastload.DataLoader(fastload.CachedDataset(photos), batch_size=10, num_workers=1)
assert [images[0, 0, 0, 0].item() for images, labels in loader] == [0, 60, 120, 180]
dataset = fastload.CachedDataset(photos, cache="lmdb:~/photos.lmdb")
assert fastload.CachedDataset.from_cache("~/photos.lmdb")[39][1] == 1
