"""Two users of one machine read the same photos: each has a cache of its own, and neither stops the other."""

import os
import shutil
import sys
import tempfile

import fastload

if os.geteuid() != 0:
    sys.exit(print("skip: only root can become another user"))
os.environ.pop("FASTLOAD_RUNTIME_DIR", None)
was_there = os.path.exists("/tmp/fastload-65534")
with tempfile.TemporaryDirectory(dir="/tmp") as folder:
    os.chmod(folder, 0o755)  # the test's own folder is root's alone
    place = shutil.copytree("photos", f"{folder}/photos")
    mine = fastload.CachedDataset(fastload.ImageFolder(place), cache="ram")
    loader = fastload.DataLoader(mine, batch_size=10, num_workers=1)
    assert len(list(loader)) == 4  # and imports what the other user may not be allowed to read
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        theirs = fastload.CachedDataset(fastload.ImageFolder(place), cache="ram")
        assert theirs.cache_info().num_cached < 40
        loader = fastload.DataLoader(theirs, batch_size=10, num_workers=2)
        assert sum(labels.sum().item() for images, labels in loader) == 20
        os._exit(theirs.cache_info().num_cached != 40)
    assert os.waitpid(child, 0)[1] == 0
    assert os.path.exists("/tmp/fastload-65534")
    shutil.rmtree("/tmp/fastload-65534") if not was_there else None
    again = fastload.CachedDataset(fastload.ImageFolder(place), cache="ram")
    assert again.cache_info().num_cached == 40
    assert again[39][1] == 1
