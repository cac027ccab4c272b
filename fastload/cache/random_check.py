"""Detects random datasets: watches what a few samples draw, and reads them again under another seed.

A cache would silently freeze one draw of a random dataset, which makes training worse. The generators are
restored afterwards. A copy of the dataset is read: what it keeps or opens at the first access stays out of
the original, which forked workers share.
"""

from __future__ import annotations

import collections
import copy
import itertools
import random
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch.utils.data import Dataset

from fastload.cache.records import decode, encode
from fastload.cache.sources import MappedDataset
from fastload.errors import NondeterministicDatasetError, UnsupportedSampleError
from fastload.nested.attributes import attributes
from fastload.nested.tree import first_difference
from fastload.rng.draws import DrawWatch, drawn_by_both
from fastload.rng.entry_points import seeded_by
from fastload.rng.states import LIBRARY_GENERATORS
from fastload.system.logs import log
from fastload.system.notes import add_note, short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Under these seeds the first uniform draw of `random`, of `numpy.random` and of torch is below 0.02 and above
# 0.98: the result of one coin flip per sample differs, for any probability between these values.
_SEEDS = (114642, 101306)
_PROBED = 3  # samples that are read
_CONTAINERS = (dict, list, set, collections.OrderedDict, collections.defaultdict, collections.deque)
_MAX_PARTS = 1_000  # datasets in one list
_TRIED = 10  # at most, if some of them cannot be read


def spread_indices(length: int, count: int) -> list[int]:
    """At most `count` indices of a dataset, evenly from the first to the last: classes can be sorted."""
    count = min(length, count)
    return [-(-number * (length - 1) // max(1, count - 1)) for number in range(count)]


def probe(dataset: Any, *, indices: list[int] | None = None) -> dict[int, Any]:
    """Read the first, the middle and the last sample twice.

    Other samples take the place of those that cannot be read, because `on_error` can allow these.

    Args:
        dataset: Map-style.
        indices: Samples that can be read, to be read instead.

    Raises:
        NondeterministicDatasetError: A sample draws random numbers, or reading it twice gave different
            results; names the generators, or the leaf.
        UnsupportedSampleError: A value in a sample cannot be cached.
        Exception: The error of the first sample, if none of ten samples can be read.
    """
    watch, changes, drawn = DrawWatch(dataset), dict[int, dict[str, Any]](), dict[int, list[str]]()
    twin = _twin(dataset)

    def read(index: int) -> Any:
        fresh, changes[index] = watch.access(twin, index)
        try:
            return decode(encode(fresh))  # as bytes: a dataset can reuse its buffer on the next access
        except UnsupportedSampleError as error:
            if changes[index] and (names := drawn_by_both(changes[index], watch.access(twin, index)[1])):
                _reject(dataset, index, "returns a random sample", names)  # it would be the next error
            add_note(error, f"in sample {index} of the dataset")
            raise

    with seeded_by(None, watch.generators.values()):
        _seed(watch, _SEEDS[0])
        if indices is None:
            samples = dict(itertools.islice(readable(dataset, read), _PROBED))
        else:
            samples = {index: read(index) for index in indices}
        twin = _twin(dataset)  # another copy, so a dataset that keeps its finished samples reads them again
        _seed(watch, _SEEDS[1])
        for index, sample in samples.items():
            fresh, again = watch.access(twin, index)
            names = drawn_by_both(changes[index], again)
            if (path := first_difference(sample, fresh)) is not None:
                _reject(dataset, index, f"returns a different sample on every access: {path} differs", names)
            if names:
                drawn[index] = names
    # What draws on the first access alone can be what is made or imported for all others.
    if len(drawn) > 1 or (drawn and (len(samples) == 1 or next(iter(samples)) not in drawn)):
        index = max(drawn)
        _reject(dataset, index, "returns a random sample", drawn[index])
    return samples


def readable(dataset: Any, read: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
    """Indices of samples that can be read, from the whole dataset, each with what `read` returns for it.

    Raises:
        NondeterministicDatasetError: Raised by `read`.
        UnsupportedSampleError: Raised by `read`.
        Exception: The error of the first sample, if none of ten samples can be read.
    """
    spread = spread_indices(len(dataset), _PROBED) + spread_indices(len(dataset), _TRIED)
    indices, errors = list(dict.fromkeys(spread))[:_TRIED], []
    for index in indices:
        try:
            sample = read(index)
        except (NondeterministicDatasetError, UnsupportedSampleError):
            raise
        except Exception as error:  # noqa: BLE001 - any error of the user's dataset
            log.debug("sample %d cannot be read, so another one is probed: %s", index, short_repr(error))
            errors.append(error)
            continue
        yield index, sample
    if errors and len(errors) == len(indices):
        listed = ", ".join(map(str, indices))
        add_note(errors[0], f"none of the {len(indices)} samples that were probed can be read: {listed}")
        raise errors[0]


def _reject(dataset: Any, index: int, problem: str, generators: list[str]) -> NoReturn:
    of_user = dataset.dataset if isinstance(dataset, MappedDataset) else dataset
    after, cure = "", "Move the random part out of the dataset, to CachedDataset(dataset, transform)"
    if isinstance(dataset, MappedDataset) and dataset.is_pre_transformed:
        after, cure = " after pre_transform", "Pass random transforms as transform="
    source = f" (drawn from {', '.join(generators)})" if generators else ""
    raise NondeterministicDatasetError(
        f"{type(of_user).__name__}[{index}]{after} {problem}{source}. A cache would freeze one draw. {cure}, "
        "which runs on every access; or cache files instead of samples: "
        'DataLoader(dataset, cache="ram"), or fastload run --cache ram'
    )


def _seed(watch: DrawWatch, seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    watch.seed = seed


def _twin(dataset: Any) -> Any:
    """A dataset with the attributes of another one, but containers of its own, also in the datasets inside.

    None of the dataset's code runs; a dataset that cannot be made this way is read itself.
    """
    cls: Any = type(dataset)
    values = getattr(dataset, "__dict__", None)
    # A `__del__` would close files that both use.
    if cls.__new__ is not object.__new__ or hasattr(cls, "__del__") or attributes(dataset) != values:
        return dataset
    twin = object.__new__(cls)
    for name, value in values.items():
        own = copy.copy(value) if type(value) in _CONTAINERS else value
        if isinstance(value, Dataset) or name == "dataset":
            own = _twin(value)
        elif own is not value and isinstance(own, list) and len(own) <= _MAX_PARTS:
            own = [_twin(part) if isinstance(part, Dataset) else part for part in own]
        vars(twin)[name] = own
    return twin


def read_unnoticed(dataset: Any, index: int) -> Any:
    """One sample; generators of the libraries and of pipelines stay as they were, and so does the dataset."""
    with seeded_by(DrawWatch(twin := _twin(dataset)), LIBRARY_GENERATORS):
        return twin[index]
