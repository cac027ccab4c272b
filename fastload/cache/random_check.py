"""The guard: read a sample twice under different seeds, and refuse to cache the dataset if it differs.

A cache would freeze one draw of a random dataset for ever, which trains worse and says nothing. All random
state is put back afterwards.
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.cache.record import decode, encode
from fastload.errors import RandomDatasetError
from fastload.nested.tree import first_difference
from fastload.rng.pipelines import find_pipelines, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# Under these seeds the first uniform draw of `random`, of `numpy.random` and of torch is below 0.02 and above
# 0.98: a coin tossed once a sample falls differently, however biased it is between these.
_SEEDS = (114642, 101306)


def probe(dataset: Any, indices: list[int], rechecked: list[int]) -> dict[int, Any]:
    """Read the samples at `indices`, and those at `rechecked` once more, under another seed.

    Raises:
        RandomDatasetError: The second reading differs from the first; names the leaf.
        UnsupportedSampleError: A sample holds something that cannot be cached.
    """
    samples = {}
    transforms = [
        transform
        for transform in parts_of(find_pipelines(dataset)).values()
        if hasattr(transform, "py_random") and hasattr(transform, "random_generator")
    ]
    with _random_state_kept(transforms):
        for index in indices:
            # Through bytes: a dataset may hand out the same buffer again at its next access.
            samples[index] = decode(encode(_read(dataset, index, transforms, _SEEDS[0])))
            if index in rechecked:
                path = first_difference(samples[index], _read(dataset, index, transforms, _SEEDS[1]))
                if path is not None:
                    raise RandomDatasetError(
                        f"{type(dataset).__name__}[{index}] gives another sample at each access: {path} "
                        "differs. Caching would freeze one draw for ever. Move the random part out of the "
                        "dataset, to CachedDataset(dataset, transform=...), which runs it at every access"
                    )
    return samples


def _read(dataset: Any, index: int, transforms: list[Any], seed: int) -> Any:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    for transform in transforms:
        transform.py_random.seed(seed)
    return dataset[index]


@contextlib.contextmanager
def _random_state_kept(transforms: list[Any]) -> Iterator[None]:
    own = [(t, t.py_random.getstate(), t.random_generator.bit_generator.state) for t in transforms]
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(pytorch)
        for transform, py_state, np_state in own:
            transform.py_random.setstate(py_state)
            transform.random_generator.bit_generator.state = np_state
