"""Two users of one machine read the same photos: each has a cache of its own, and neither stops the other."""

import os
import shutil
import sys

import fastload

if os.geteuid() != 0:
    sys.exit(print("skip: only root can become another user"))
for name in ("FASTLOAD_RUNTIME_DIR", "HOME"):  # the defaults, below /tmp
    os.environ.pop(name)
place = shutil.copytree("photos", f"/tmp/situation-{os.getpid()}/photos")
mine = fastload.CachedDataset(fastload.ImageFolder(place), cache="ram")
assert (
    len(list(fastload.DataLoader(mine, batch_size=10, num_workers=1))) == 4
)  # imports what the child cannot
child = os.fork()
if child == 0:
    os.setgid(65534)
    os.setuid(65534)
    theirs = fastload.CachedDataset(fastload.ImageFolder(place), cache="ram")
    assert theirs.cache_info().num_cached < 40
    loader = fastload.DataLoader(theirs, batch_size=10, num_workers=2)
    assert sum(labels.sum().item() for images, labels in loader) == 20
    assert theirs.cache_info().num_cached == 40
    os._exit(0)
status = os.waitpid(child, 0)[1]
shutil.rmtree(os.path.dirname(place))
shutil.rmtree("/tmp/fastload-65534", ignore_errors=True)
assert status == 0
assert fastload.CachedDataset(fastload.ImageFolder("photos"))[39][1] == 1
