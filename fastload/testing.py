"""Checks for your own tests: is a dataset deterministic, do two loaders agree, does a cache change nothing?

Each check raises an AssertionError that says where the first difference is. Afterwards, all random generators
have the state of before.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.cache.build.random_check import spread_indices
from fastload.cache.dataset import CachedDataset
from fastload.cache.lmdb.lmdb_dataset import LMDBDataset
from fastload.cache.transform import TransformCaller
from fastload.rng.draws import DrawWatch
from fastload.rng.generators import LIBRARY_GENERATORS
from fastload.rng.rng_scope import RngScope, state_restorer
from fastload.system.checks import as_int, check_iterable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["check_cached", "check_deterministic", "check_same_batches"]

_NUM_SAMPLES = 10
_SEEDS = (114642, 101306)  # the first draws differ as much as they can; see `cache.build.random_check`
_END = object()


def __dir__() -> list[str]:
    return __all__


def check_deterministic(dataset: Any, indices: Sequence[int] | None = None) -> None:
    """Check that a dataset returns the same sample, bit for bit, each time it is asked for it.

    Each sample is read twice, the second time under another seed and in the reverse order. So what depends
    on random numbers, or on what was read before, is found; a dataset that draws random numbers fails even
    if the samples are equal by chance.

    Args:
        dataset: Map-style.
        indices: Which samples; by default ten, evenly from the first to the last.

    Raises:
        AssertionError: A sample differs, or drew random numbers; the message names its index, the leaf and
            the generators.
        Exception: An error of the dataset.
    """
    chosen = spread_indices(len(dataset), _NUM_SAMPLES) if indices is None else indices
    check_iterable("indices", chosen, "ints")
    watch = DrawWatch(dataset)
    with RngScope(watch.generators):  # those that the dataset holds run on from sample to sample
        first = {index: _read(watch, dataset, index, _SEEDS[0]) for index in chosen}
        second = {index: _read(watch, dataset, index, _SEEDS[1]) for index in reversed(chosen)}
    for index, (sample, changes) in first.items():
        again, changes_again = second[index]
        drawn = sorted(name for name in changes if changes_again.get(name, changes[name]) != changes[name])
        difference = _difference(sample, again)
        if difference or drawn:
            facts = [f"on the second access, {difference}"] * bool(difference)
            facts += [f"it drew random numbers from {', '.join(drawn)}"] * bool(drawn)
            raise AssertionError(
                f"{type(dataset).__name__}[{index}] is not deterministic: {'; '.join(facts)}"
            )
    if not first:
        raise AssertionError("check_deterministic was given no samples: nothing was checked")


def check_same_batches(
    loader: Iterable[Any], other: Iterable[Any], *, num_epochs: int = 1, seed: int = 0
) -> None:
    """Check that two loaders give the same batches, bit for bit: as many, in the same order.

    Such as torch's loader and fastload's, or one with a cache and one without. Both are read side by side, so
    no epoch is held in memory. Each loader sees generators of `random`, NumPy and torch that start from the
    seed, as if it ran alone. A loader with a `generator=` needs one of its own.

    Args:
        loader: A loader, or any other iterable of batches.
        other: Another one.
        num_epochs: How often each is read to its end.
        seed: Of the generators.

    Raises:
        AssertionError: They differ; the message names the epoch, the batch and the leaf.
        Exception: An error of a loader.
    """
    if loader is other:
        raise AssertionError("check_same_batches was given one loader twice: nothing was checked")
    check_iterable("loader", loader, "batches")
    check_iterable("other", other, "batches")
    num_epochs, seed = as_int("num_epochs", num_epochs), as_int("seed", seed)
    alone, other_alone = _Alone(seed), _Alone(seed)
    num_batches = 0
    for epoch in range(num_epochs):
        iterator: Iterator[Any] = alone.call(iter, loader)
        other_iterator: Iterator[Any] = other_alone.call(iter, other)
        number = 0
        while True:
            batch, other_batch = (
                alone.call(next, iterator, _END),
                other_alone.call(next, other_iterator, _END),
            )
            if batch is _END or other_batch is _END:
                break
            difference = _difference(batch, other_batch)
            if difference:
                raise AssertionError(f"batch {number} of epoch {epoch} differs: in the other, {difference}")
            number += 1
        if batch is not other_batch:
            which = "first" if batch is _END else "second"
            raise AssertionError(f"in epoch {epoch}, only the {which} loader ended after {number} batches")
        num_batches += number
    if not num_batches:
        raise AssertionError("check_same_batches saw no batch: nothing was checked")


def check_cached(cached: CachedDataset, dataset: Any = None, indices: Sequence[int] | None = None) -> None:
    """Check that a cache returns what the dataset does, bit for bit, also through the transform.

    Each sample is read once without the cache and twice with it: the first time it can be decoded and stored,
    the second time it comes from the cache. All three accesses see the same random numbers.

    Args:
        cached: The dataset with the cache.
        dataset: What the cache was made of; needed for `CachedDataset.from_cache`, which does not know it.
        indices: Which samples; by default ten, evenly from the first to the last.

    Raises:
        AssertionError: A sample differs; the message names its index and the leaf.
        TypeError: `cached` is no CachedDataset, or `dataset` is needed.
        Exception: An error of the dataset.
    """
    if not isinstance(cached, CachedDataset):
        raise TypeError(f"cached should be a CachedDataset, but got {type(cached).__name__}")
    source = cached.dataset if dataset is None else dataset
    if isinstance(source, LMDBDataset):
        raise TypeError("a CachedDataset.from_cache does not know its source: pass dataset=, too")
    if len(source) != len(cached):
        raise AssertionError(f"the cache has {len(cached):,} samples, and the dataset {len(source):,}")
    chosen = spread_indices(len(cached), _NUM_SAMPLES) if indices is None else indices
    check_iterable("indices", chosen, "ints")
    watch, uncached = DrawWatch(cached), _Uncached(cached, source)

    def read(samples: Any, index: int) -> Any:
        with RngScope(watch.generators):
            return _read(watch, samples, index, _SEEDS[0])[0]

    for index in chosen:
        expected = read(uncached, index)
        for access in ("when it is stored", "when it comes from the cache"):
            difference = _difference(expected, read(cached, index))
            if difference:
                raise AssertionError(f"sample {index} differs from the dataset's {access}: {difference}")
    if not len(chosen):
        raise AssertionError("check_cached was given no samples: nothing was checked")


class _Uncached:
    """The samples of a CachedDataset without its cache.

    Args:
        cached: The dataset with the cache.
        dataset: The one behind it.
    """

    def __init__(self, cached: CachedDataset, dataset: Any) -> None:
        if cached.cache.layout == "files":
            self._read: Callable[[int], Any] = dataset.__getitem__
            if cached.transform is not None:
                caller = TransformCaller(cached.transform)
                self._read = lambda index: caller(dataset.__getitem__, index)
        else:
            pre_transform = cached.pre_transform
            plain = CachedDataset(dataset, cached.transform, cache=None, pre_transform=pre_transform)
            self._read = plain.__getitem__

    def __getitem__(self, index: int) -> Any:
        return self._read(index)


# --- random numbers --------------------------------------------------------------------------------------


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def _read(watch: DrawWatch, dataset: Any, index: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """A copy of a sample under a seed, and the generators that reading it changed, with their states then."""
    _seed(seed)
    watch.seed = seed
    sample, changes = watch.access(dataset, index)
    return copy.deepcopy(sample), changes  # a dataset can reuse its buffer


class _Alone:
    """Calls functions that draw from the generators of the libraries as if nobody else did."""

    def __init__(self, seed: int) -> None:
        with RngScope(list(LIBRARY_GENERATORS)):
            _seed(seed)
            self._keep()

    def _keep(self) -> None:
        self._restores = [state_restorer(generator) for generator in LIBRARY_GENERATORS]

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the function returns."""
        with RngScope(list(LIBRARY_GENERATORS)):
            for restore in self._restores:
                restore()
            try:
                return function(*args)
            finally:
                self._keep()


# --- comparison ------------------------------------------------------------------------------------------


def _difference(one: Any, other: Any, path: str = "$") -> str:
    """Where and how the second value differs from the first; empty if they are equal, bit for bit."""
    if type(one) is not type(other):
        return f"{path} is of type {type(other).__name__}, not {type(one).__name__}"
    if isinstance(one, (np.ndarray, np.generic, torch.Tensor)):
        return _difference_of_arrays(one, other, path)
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{path} has {len(other)} items, not {len(one)}"
        parts = [(f"{path}[{place}]", *pair) for place, pair in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, Mapping):
        if list(one) != list(other):
            return f"{path} has the keys {list(other)!r:.200}, not {list(one)!r:.200}"
        parts = [(f"{path}[{key!r}]", one[key], other[key]) for key in one]
    elif getattr(one, "__dict__", None) and (is_dataclass(one) or _has_no_equality(type(one))):
        return _difference(vars(one), vars(other), path)
    else:
        # Of floats, NaN equals itself, and 0.0 is not -0.0.
        is_equal = repr(one) == repr(other) if isinstance(one, float) else one is other or bool(one == other)
        return "" if is_equal else f"{path} is {other!r:.100}, not {one!r:.100}"
    return next((text for name, first, second in parts if (text := _difference(first, second, name))), "")


def _has_no_equality(cls: Any) -> bool:
    return bool(cls.__eq__ is object.__eq__)


def _difference_of_arrays(one: Any, other: Any, path: str) -> str:
    is_tensor = isinstance(one, torch.Tensor)
    for fact in ("dtype", "shape", *(("layout", "device") if is_tensor else ())):
        if getattr(one, fact) != getattr(other, fact):
            return f"{path} has the {fact} {getattr(other, fact)}, not {getattr(one, fact)}"
    if is_tensor and type(one) is not torch.Tensor and vars(one) != vars(other):
        return f"{path} has the attributes {vars(other)!r:.200}, not {vars(one)!r:.200}"
    if getattr(one.dtype, "hasobject", False):
        return _difference(one.tolist(), other.tolist(), path)
    differs = np.frombuffer(_bytes_of(one), np.uint8) != np.frombuffer(_bytes_of(other), np.uint8)
    if not differs.any():
        return ""
    position = np.unravel_index(int(differs.argmax()) // one.itemsize, tuple(one.shape))
    place = tuple(map(int, position))
    where = f" at {place}" if place else ""
    return f"{path} is {other[place]}{where}, not {one[place]}"


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        plain = dense.as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg()
        value = plain.contiguous().reshape(-1).view(torch.uint8).numpy()
    return bytes(value.tobytes())
