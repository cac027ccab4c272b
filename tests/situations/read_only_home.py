"""A user who cannot write into the home folder, nor into the folder of temporary files, caches in RAM."""

import os
import tempfile
import warnings

import fastload

os.environ.update(
    HOME="/proc", TMPDIR="/proc", FASTLOAD_RUNTIME_DIR="/proc/fastload"
)  # not even root writes there
tempfile.tempdir = "/proc"
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    dataset = fastload.CachedDataset(fastload.ImageFolder("photos"), cache="ram")
    for epoch in range(2):
        loader = fastload.DataLoader(dataset, batch_size=8, num_workers=1)
        assert [images[0, 0, 0, 0].item() for images, labels in loader] == [0, 48, 96, 144, 192]
assert dataset.cache_info().num_cached == 40, told
