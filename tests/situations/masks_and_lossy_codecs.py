"""A cache built with `--codec jpeg` changes the photograph of a sample alone; masks and ids are exact.

$ fastload cache build masks_and_lossy_codecs:train scenes.lmdb --codec jpeg --lossy-leaf image --num-workers 0
$ python masks_and_lossy_codecs.py
"""

import numpy as np

import fastload

COLOURS = np.array([[128, 64, 128], [244, 35, 232], [70, 70, 70], [0, 0, 142]], np.uint8)


class Scenes:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        ids = np.kron(rng.integers(0, 4, (12, 12)), np.ones((8, 8), int))
        image = rng.integers(0, 256, (96, 96, 3), np.uint8)
        return {"mask": COLOURS[ids], "image": image, "ids": ids.astype(np.uint8)}


train = Scenes()
if __name__ == "__main__":
    cached = fastload.CachedDataset.from_cache("scenes.lmdb")
    for index in range(6):
        sample, source = cached[index], train[index]
        assert np.array_equal(sample["mask"], source["mask"])
        assert np.array_equal(sample["ids"], source["ids"])
        assert not np.array_equal(sample["image"], source["image"])
