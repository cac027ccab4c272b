"""Finds datasets that hold their samples in memory already: a cache in RAM would duplicate them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastload.nested.tree import leaves

_SHARE = 0.5  # of all samples; less can be a buffer of a few samples


def held_bytes(sample: Any, num_samples: int) -> int:
    """The bytes of the array that holds the samples of a dataset; 0 if none is found.

    Arrays over foreign memory do not count: a mapped file (np.memmap, torch.load) might not be in memory.

    Args:
        sample: One sample, as the dataset returned it.
        num_samples: How many it has.
    """
    arrays = [leaf for leaf in leaves(sample) if isinstance(leaf, np.ndarray)]
    whole: Any = max(arrays, key=lambda array: array.nbytes, default=None)
    if whole is None or num_samples < 2:
        return 0
    min_bytes = _SHARE * num_samples * max(1, whole.nbytes)
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    return int(whole.nbytes) if whole.base is None and whole.nbytes >= min_bytes else 0
