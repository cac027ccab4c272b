"""`~` in a root means the home folder, archives open by their names, and the names of their samples open again."""

import os
import shutil
import zipfile

import fsspec

import fastload

shutil.copytree("photos", os.path.expanduser("~/photos"))
with zipfile.ZipFile("photos.zip", "w") as archive:
    for folder, _, names in os.walk("photos"):
        for name in names:
            archive.write(os.path.join(folder, name))
for root in ("~/photos", "zip://photos::photos.zip"):
    photos = fastload.ImageFolder(root)
    assert (len(photos), photos.classes) == (40, ["cat", "dog"])
    loader = fastload.DataLoader(fastload.CachedDataset(photos), batch_size=10, num_workers=1)
    assert [images[0, 0, 0, 0].item() for images, labels in loader] == [0, 60, 120, 180]
with fsspec.open(photos.samples[39][0]) as file:
    assert len(file.read()) == os.path.getsize("photos/dog/39.png")
dataset = fastload.CachedDataset(fastload.ImageFolder("~/photos"), cache="lmdb:~/photos.lmdb")
assert fastload.CachedDataset.from_cache("~/photos.lmdb")[39][1] == 1
