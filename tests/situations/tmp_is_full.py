"""A temporary folder without a free byte stops no training and no cache in RAM; a file there is refused with its path."""

import ctypes
import os
import subprocess
import sys
import tempfile

import fastload

NEW_MOUNTS = 0x00020000  # CLONE_NEWNS: what is mounted from here on is this process's alone
os.mkdir("small")
private = ["mount", "--make-rprivate", "/"]
small = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "small"]
if ctypes.CDLL(None).unshare(NEW_MOUNTS) or subprocess.call(private) or subprocess.call(small):
    sys.exit(print("skip: this user cannot mount"))
here = os.path.abspath("small")
os.environ.update(TMPDIR=here, HOME=here, FASTLOAD_RUNTIME_DIR=here + "/runtime")
tempfile.tempdir = here
with open("small/full", "wb") as file:
    file.write(bytes(os.statvfs("small").f_bavail * os.statvfs("small").f_frsize))
dataset = fastload.CachedDataset(fastload.ImageFolder("photos"), cache="ram")
loader = fastload.DataLoader(dataset, batch_size=10, num_workers=2)
for epoch in range(2):
    assert [int(images[0, 0, 0, 0]) for images, labels in loader] == [0, 60, 120, 180]
try:
    fastload.CachedDataset.build(dataset.dataset, "small/photos.lmdb", num_workers=0, progress=False)
except fastload.FastloadError as error:
    assert "small/photos.lmdb" in str(error), error
else:
    raise AssertionError("no error")
assert os.path.exists("small/photos.lmdb") is False
