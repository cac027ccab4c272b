"""Detects random datasets: reads a sample twice under different seeds, and raises if the results differ.

A cache would silently freeze one draw of a random dataset, which makes training worse. All random state is
restored afterwards.
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.cache.build.sources import MappedDataset
from fastload.cache.format.record import decode, encode
from fastload.errors import CacheError, NondeterministicDatasetError
from fastload.images.folder import ImageFolder
from fastload.nested.tree import first_difference
from fastload.rng.entry_points import RandomSource, seeded_by
from fastload.system.notes import add_note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.rng.entry_points import Pair

# Under these seeds the first uniform draw of `random`, of `numpy.random` and of torch is below 0.02 and above
# 0.98: the result of one coin flip per sample differs, for any probability between these values.
_SEEDS = (114642, 101306)


def spread_indices(length: int, count: int) -> list[int]:
    """At most `count` indices of a dataset, evenly from the first to the last: classes can be sorted."""
    count = min(length, count)
    return [-(-number * (length - 1) // max(1, count - 1)) for number in range(count)]


def probe(
    dataset: Any, indices: list[int], rechecked: list[int], look: Callable[[Any], None] | None = None
) -> dict[int, Any]:
    """Read the samples at `indices`, and those at `rechecked` again, under another seed.

    Args:
        dataset: Map-style.
        indices: Of the samples.
        rechecked: Those to read again.
        look: Called with each sample as the dataset returns it; the result has copies.

    Raises:
        NondeterministicDatasetError: Reading a sample twice gave different results; names the leaf.
        UnsupportedSampleError: A value in a sample cannot be cached.
    """
    samples = {}
    with _random_state_kept():
        for index in indices:
            # Copied as bytes: a dataset can reuse its buffer on the next access.
            fresh = _read(dataset, index, _SEEDS[0])
            if look is not None:
                look(fresh)
            samples[index] = decode(encode(fresh))
            if index in rechecked:
                path = first_difference(samples[index], _read(dataset, index, _SEEDS[1]))
                if path is not None:
                    of_user = dataset.dataset if isinstance(dataset, MappedDataset) else dataset
                    raise NondeterministicDatasetError(
                        f"{type(of_user).__name__}[{index}] returns a different sample on every access: "
                        f"{path} differs. A cache would freeze one draw. Move the random part out of the "
                        "dataset, to CachedDataset(dataset, transform), which runs it on every access"
                    )
    return samples


def read_unnoticed(dataset: Any, index: int) -> Any:
    """One sample; the generators of the libraries and of pipelines stay as they were."""
    with _random_state_kept(), seeded_by(_Probe(_SEEDS[0])):
        return dataset[index]


class _Probe(RandomSource):
    """Each transform draws from generators of its own that start from the same seed, so all coins differ.

    Args:
        seed: One of `_SEEDS`.
    """

    groups = False

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._made: dict[int, tuple[Any, Any]] = {}  # by id of a transform, which is kept alive

    def pair(self, pipeline: Any) -> Pair:
        """The generators of one transform."""
        make = lambda: (np.random.default_rng(self._seed), random.Random(self._seed))  # noqa: E731
        return self._generators_of(pipeline, make)  # type: ignore[no-any-return]

    def state(self, randomizable: Any) -> np.random.RandomState:
        """The generator of one of MONAI's objects."""
        return self._generators_of(randomizable, lambda: np.random.RandomState(self._seed))  # type: ignore[no-any-return]

    def _generators_of(self, transform: Any, make: Callable[[], Any]) -> Any:
        if id(transform) not in self._made:
            self._made[id(transform)] = transform, make()
        return self._made[id(transform)][1]


def _read(dataset: Any, index: int, seed: int) -> Any:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    with seeded_by(_Probe(seed)):
        return dataset[index]


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(pytorch)


def reject_random(dataset: Any) -> None:
    """Reject a dataset that returns a different sample on every access; a cache would freeze one draw.

    An `ImageFolder` without a transform is known not to; none of its files is read.

    Raises:
        NondeterministicDatasetError: Reading the first, the middle or the last sample twice gave different
            results.
        UnsupportedSampleError: One of these samples cannot be cached.
    """
    if isinstance(dataset, ImageFolder) and dataset.transform is None:
        return
    for index in spread_indices(len(dataset), 3):
        try:
            probe(dataset, [index], rechecked=[index])
        except CacheError as error:
            add_note(error, f"in sample {index} of the dataset")
            raise
        except Exception:  # noqa: BLE001 - the build reads this sample again, and reports its error
            continue
