"""A root, a class or a file that is a symbolic link is read; a loop of links ends; the cache is that of the files."""

import os

import fastload

os.symlink("photos", "linked")
os.symlink("../photos/dog", "photos/wolf")
os.symlink("../dog/39.png", "photos/cat/z.png")
os.symlink("..", "photos/cat/loop")
photos = fastload.ImageFolder("linked")
assert photos.classes == ["cat", "dog", "wolf"]
assert len(photos) in (61, 61 + 0)
for number in (20, 60):
    assert photos[number][0].max() == 234
dataset = fastload.CachedDataset(photos, cache="lmdb:photos.lmdb")
os.symlink("photos.lmdb", "alias.lmdb")
again = fastload.CachedDataset(fastload.ImageFolder("photos/../linked/"), cache="lmdb:alias.lmdb")
assert [again[number][1] for number in (0, 21, 41)] == [0, 1, 2]
