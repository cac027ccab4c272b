"""The guard: read a sample twice under different seeds, and refuse to cache the dataset if it differs.

Called by `dataset` in the parent, at construction. A cache would freeze one draw of a random dataset for
ever, which trains worse and says nothing. All random state is put back afterwards.
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.cache.nests import first_difference
from fastload.cache.record import decode, encode
from fastload.errors import RandomDatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Under these seeds the first uniform draw of `random`, of `numpy.random` and of torch is below 0.02 and above
# 0.98: a coin tossed once a sample falls differently, however biased it is between these.
_SEEDS = (114642, 101306)
_SEARCH_DEPTH = 5  # a pipeline lies in an attribute of the dataset, or of one that it wraps
_SEARCH_ITEMS = 64  # of a container; pipelines do not hide behind ten thousand paths


def probe(dataset: Any, indices: list[int], rechecked: list[int]) -> dict[int, Any]:
    """Read the samples at `indices`, and those at `rechecked` once more, under another seed.

    Raises:
        RandomDatasetError: The second reading differs from the first; names the leaf.
        UnsupportedSampleError: A sample holds something that cannot be cached.
    """
    samples = {}
    with _random_state_kept(dataset):
        for index in indices:
            # Through bytes: a dataset may hand out the same buffer again at its next access.
            samples[index] = decode(encode(_read(dataset, index, _SEEDS[0])))
            if index in rechecked:
                path = first_difference(samples[index], _read(dataset, index, _SEEDS[1]))
                if path is not None:
                    raise RandomDatasetError(
                        f"{type(dataset).__name__}[{index}] gives another sample at each access: {path} "
                        "differs. Caching would freeze one draw for ever. Move the random part out of the "
                        "dataset, to CachedDataset(dataset, transform=...), which runs it at every access"
                    )
    return samples


def _read(dataset: Any, index: int, seed: int) -> Any:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    for pipeline in find_pipelines(dataset):
        pipeline.py_random.seed(seed)
    return dataset[index]


@contextlib.contextmanager
def _random_state_kept(dataset: Any) -> Iterator[None]:
    pipelines = [
        (pipeline, pipeline.py_random.getstate(), pipeline.random_generator.bit_generator.state)
        for pipeline in find_pipelines(dataset)
    ]
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(pytorch)
        for pipeline, py_state, np_state in pipelines:
            pipeline.py_random.setstate(py_state)
            pipeline.random_generator.bit_generator.state = np_state


def is_albumentations(value: Any) -> bool:
    """Whether a value is an albumentations pipeline or transform, without importing albumentations."""
    return any(base.__module__.partition(".")[0] == "albumentations" for base in type(value).__mro__)


def find_pipelines(dataset: Any) -> list[Any]:
    """The albumentations pipelines and transforms that a dataset's attributes lead to, each once."""
    found: dict[int, Any] = {}
    seen: set[int] = set()

    def search(value: Any, depth: int) -> None:
        if depth > _SEARCH_DEPTH or id(value) in seen or isinstance(value, (str, bytes, int, float, type)):
            return
        seen.add(id(value))
        if is_albumentations(value) and hasattr(value, "py_random") and hasattr(value, "random_generator"):
            found[id(value)] = value
        if isinstance(value, dict):
            children = list(value.values())[:_SEARCH_ITEMS]
        elif isinstance(value, (list, tuple)):
            children = list(value[:_SEARCH_ITEMS])
        else:
            children = list(getattr(value, "__dict__", {}).values())
        for child in children:
            search(child, depth + 1)

    search(dataset, 0)
    return list(found.values())
