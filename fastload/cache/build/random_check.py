"""Detects random datasets: reads a sample twice under different seeds, and raises if the results differ.

A cache would silently freeze one draw of a random dataset, which makes training worse. All random state is
restored afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.cache.build.sources import MappedDataset
from fastload.cache.format.record import decode, encode
from fastload.errors import CacheError, NondeterministicDatasetError, UnsupportedSampleError
from fastload.images.folder import ImageFolder
from fastload.nested.tree import first_difference
from fastload.rng.entry_points import RandomSource, seeded_by
from fastload.system.logs import log
from fastload.system.notes import add_note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.rng.entry_points import Pair

# Under these seeds the first uniform draw of `random`, of `numpy.random` and of torch is below 0.02 and above
# 0.98: the result of one coin flip per sample differs, for any probability between these values.
_SEEDS = (114642, 101306)

_PROBED = 3  # samples that are read
_TRIED = 10  # at most, if some of them cannot be read


def spread_indices(length: int, count: int) -> list[int]:
    """At most `count` indices of a dataset, evenly from the first to the last: classes can be sorted."""
    count = min(length, count)
    return [-(-number * (length - 1) // max(1, count - 1)) for number in range(count)]


def probe(dataset: Any, look: Callable[[Any], None] | None = None) -> dict[int, Any]:
    """Read the first, the middle and the last sample, all but the middle one again, under another seed.

    Other samples take the place of those that cannot be read, because `on_error` can allow these.

    Args:
        dataset: Map-style.
        look: Called with each sample as the dataset returns it; the result has copies.

    Raises:
        NondeterministicDatasetError: Reading a sample twice gave different results; names the leaf.
        UnsupportedSampleError: A value in a sample cannot be cached.
        Exception: The error of the first sample, if none of ten samples can be read.
    """
    once = spread_indices(len(dataset), _PROBED)[1:-1]
    samples = readable(dataset, lambda index: read_checked(dataset, index, look, twice=index not in once))
    return dict(itertools.islice(samples, _PROBED))


def readable(dataset: Any, read: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
    """Indices of samples that can be read, from the whole dataset, each with what `read` returns for it.

    Raises:
        NondeterministicDatasetError: Raised by `read`.
        UnsupportedSampleError: Raised by `read`.
        Exception: The error of the first sample, if none of ten samples can be read.
    """
    indices = list(
        dict.fromkeys(spread_indices(len(dataset), _PROBED) + spread_indices(len(dataset), _TRIED))
    )
    indices, errors = indices[:_TRIED], []
    for index in indices:
        try:
            sample = read(index)
        except (NondeterministicDatasetError, UnsupportedSampleError):
            raise
        except Exception as error:  # noqa: BLE001 - any error of the user's dataset
            log.debug("sample %d cannot be read, so another one is probed: %r", index, error)
            errors.append(error)
            continue
        yield index, sample
    if errors and len(errors) == len(indices):
        listed = ", ".join(map(str, indices))
        add_note(errors[0], f"none of the {len(indices)} samples that were probed can be read: {listed}")
        raise errors[0]


def read_checked(
    dataset: Any, index: int, look: Callable[[Any], None] | None = None, *, twice: bool = True
) -> Any:
    """A copy of a sample, after it was read again under another seed.

    Args:
        dataset: Map-style.
        index: Of the sample.
        look: Called with the sample as the dataset returns it.
        twice: False to read it once, without the check.

    Raises:
        NondeterministicDatasetError: The results differ; names the leaf.
        UnsupportedSampleError: A value in the sample cannot be cached.
    """
    with _random_state_kept():
        # Copied as bytes: a dataset can reuse its buffer on the next access.
        fresh = _read(dataset, index, _SEEDS[0])
        if look is not None:
            look(fresh)
        sample = decode(encode(fresh))
        path = first_difference(sample, _read(dataset, index, _SEEDS[1])) if twice else None
    if path is not None:
        of_user = dataset.dataset if isinstance(dataset, MappedDataset) else dataset
        raise NondeterministicDatasetError(
            f"{type(of_user).__name__}[{index}] returns a different sample on every access: {path} differs. "
            "A cache would freeze one draw. Move the random part out of the dataset, to "
            "CachedDataset(dataset, transform), which runs it on every access"
        )
    return sample


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
            results. Others take the place of samples that cannot be read.
        UnsupportedSampleError: One of these samples cannot be cached.
    """
    if isinstance(dataset, ImageFolder) and dataset.transform is None:
        return

    def read(index: int) -> Any:
        try:
            return read_checked(dataset, index)
        except CacheError as error:
            add_note(error, f"in sample {index} of the dataset")
            raise

    try:
        for _ in itertools.islice(readable(dataset, read), _PROBED):
            pass
    except (NondeterministicDatasetError, UnsupportedSampleError):
        raise
    except Exception:  # noqa: BLE001 - none can be read: the build reads them again, and reports the error
        return
