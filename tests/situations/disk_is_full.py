"""A build that meets a full disk says so and what to do, leaves the folder usable, and is done when there is room.

$ python disk_is_full.py
"""

import resource
import signal

import fastload

photos = fastload.ImageFolder("photos", size=(300, 300))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an error, as on a full disk
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
try:
    fastload.CachedDataset.build(photos, "photos.lmdb", num_workers=0, progress=False)
except fastload.FastloadError as error:
    assert "photos.lmdb" in str(error), error
else:
    raise AssertionError("no error")
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
fastload.CachedDataset.build(photos, "photos.lmdb", num_workers=0, progress=False)
dataset = fastload.CachedDataset.from_cache("photos.lmdb")
assert [int(dataset[number][0][0, 0, 0]) for number in range(40)] == list(range(0, 240, 6))
