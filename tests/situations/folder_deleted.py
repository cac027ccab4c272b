"""The working folder is deleted while a loader runs: what was opened by an absolute path is still read."""

import os
import shutil

import fastload

photos = fastload.ImageFolder(os.path.abspath("photos"))
os.mkdir("scratch")
os.chdir("scratch")
dataset = fastload.CachedDataset(photos, cache="ram")
loader = fastload.DataLoader(dataset, batch_size=10, num_workers=2, persistent_workers=True)
for epoch in range(3):
    assert [images[0, 0, 0, 0].item() for images, labels in loader] == [0, 60, 120, 180]
    shutil.rmtree("../scratch", ignore_errors=True)
again = fastload.DataLoader(fastload.CachedDataset(photos), batch_size=10, num_workers=1)
assert len(list(again)) == 4
os.chdir("/")
