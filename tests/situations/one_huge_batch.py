"""One huge batch among small ones arrives whole, and a limit that it exceeds stops no training."""

import numpy as np

import fastload


class Clips:
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return np.full(((40 if index == 9 else 1), 1 << 20), index, np.uint8)


for limit in ("auto", "8MB"):
    options = {"num_workers": 2, "max_prefetch_memory": limit, "persistent_workers": True}
    loader = fastload.DataLoader(Clips(), batch_size=1, **options)
    for epoch in range(2):
        for index, clips in enumerate(loader):
            assert clips.shape == (1, 40 if index == 9 else 1, 1 << 20)
            assert clips[0, 0, 0] == clips[0, -1, -1] == index
    loader.close()
