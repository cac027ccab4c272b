"""File names that are no UTF-8, under the locale C, and paths of over 3,000 characters are read and cached.

$ LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 python names_of_files.py
"""

import os
import shutil

import fastload

names = [b"caf\xe9", "ж 画像".encode(), b"a\nline", b'it\'s "quoted" $HOME']
for name in names:
    os.mkdir(b"photos/" + name)
    shutil.copy("photos/dog/39.png", os.fsdecode(b"photos/" + name + b"/" + name + b".png"))
here = os.getcwd()
for _ in range(20):  # deeper than one call can name
    os.mkdir("d" * 150)
    os.chdir("d" * 150)
deep = os.getcwd() + "/photos"
os.makedirs("photos/cat")
shutil.copy(here + "/photos/dog/39.png", "photos/cat/39.png")
os.chdir(here)
for root, expected in (("photos", 44), (deep, 1)):
    photos = fastload.ImageFolder(root)
    assert len(photos) == expected
    for cache in ("ram", f"lmdb:{expected}.lmdb"):
        dataset = fastload.CachedDataset(photos, cache=cache)
        loader = fastload.DataLoader(dataset, batch_size=10, num_workers=1)
        values = [value for images, labels in loader for value in images[:, 0, 0, 0].tolist()]
        assert sorted(values) == sorted(
            [*range(0, 240, 6), 234, 234, 234, 234] if root == "photos" else [234]
        )
        str(dataset.explain())
