"""A cache built with `--codec jpeg` changes the photograph of a sample alone; masks and ids are exact.

$ python masks_and_lossy_codecs.py
"""

import pathlib
import subprocess
import sys

import numpy as np

import fastload

pathlib.Path("my_masks.py").write_text("""
import numpy as np
COLOURS = np.array([[128, 64, 128], [244, 35, 232], [70, 70, 70], [0, 0, 142]], np.uint8)
class Scenes:
    def __len__(self): return 6
    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        ids = np.kron(rng.integers(0, 4, (12, 12)), np.ones((8, 8), int))
        image = rng.integers(0, 256, (96, 96, 3), np.uint8)
        return {"mask": COLOURS[ids], "image": image, "ids": ids.astype(np.uint8)}
train = Scenes()
""")
build = [sys.executable, "-m", "fastload", "cache", "build", "my_masks:train"]
build += ["scenes.lmdb", "--codec", "jpeg", "--lossy-leaf", "image", "--workers", "0"]
subprocess.run(build, check=True, capture_output=True)
sys.path.insert(0, "")
import my_masks  # noqa: E402

for index, sample in enumerate(fastload.CachedDataset.from_cache("scenes.lmdb")):
    source = my_masks.train[index]
    assert np.array_equal(sample["mask"], source["mask"])
    assert np.array_equal(sample["ids"], source["ids"])
    assert not np.array_equal(sample["image"], source["image"])
    if index == 5:
        break
