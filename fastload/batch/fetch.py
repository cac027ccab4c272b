"""Fetch the samples of a list of indices and collate them into a batch (torch calls this a fetcher).

Runs in a worker, or in the parent without workers. The choice of samples, their order, and the StopIteration
that ends an epoch follow torch's rules (torch/utils/data/_utils/fetch.py); the memory is fastload's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import pickle
import sys
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.batch.collate import RowCollate, to_channels_last
from fastload.batch.collate_errors import explain, is_of_torch
from fastload.batch.dataset_state import ENDED, DatasetState, keeps_state
from fastload.batch.failed_sample import path_of
from fastload.batch.read_ahead import inside_subsets, read_ahead, reads_ahead
from fastload.batch.replacing import Replacer
from fastload.batch.stacking import is_torch_default
from fastload.errors import ResumeError
from fastload.memory.lease import BufferPool, allocating_in
from fastload.rng.batch_draws import BatchStreams, drawing_from
from fastload.system.notes import add_note, short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fastload.memory.lease import BumpAllocator
    from fastload.rng.batch_draws import BatchId
    from fastload.rng.keys import StreamOrigin
    from fastload.rng.sample_rng import SampleRng


@dataclass(kw_only=True)
class FetchSettings:
    """How batches are made.

    Attributes:
        is_iterable: Whether the dataset is iterable-style.
        auto_collation: Whether batches are lists of samples that are collated.
        collate_fn: As in torch's loader.
        drop_last: Whether an iterable dataset's last batch is left out if it is short.
        channels_last: Whether batches of images are `(B, C, H, W)` with channels-last strides.
        on_error: `"raise"`, `"replace"`, or a function; see `replacing`.
        replacements: Indices that can replace an unreadable sample; empty: the indices of the same batch.
        batch_transform: Called with each batch; its result is the batch.
    """

    is_iterable: bool
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    channels_last: bool
    on_error: Any = "raise"
    replacements: Sequence[Any] = ()
    batch_transform: Callable[[Any], Any] | None = None


# Kept for batches before their transform; a larger batch gets its own memory.
_SCRATCH_BYTES = 256 << 20
# Numbers of a range: products and sums of larger ones would not fit into 64 bits.
_LARGEST = 1 << 61
# Stands for how often the index came before when a batch transform draws like the last sample of its batch.
_OF_BATCH = -(1 << 62)


def _rows_of(dataset: range, indices: list[Any]) -> torch.Tensor | None:
    """The batch of a range, as default_collate makes it from ints; None if not all indices are ints from 0.

    A range is the dataset of a loader whose samples lie on the device: there the 15 us that each sample takes
    to read and collate would be nearly all of the time.
    """
    try:
        numbers = np.asarray(indices)
    except ValueError:  # nested lists of different lengths
        return None
    if max(abs(dataset.start), abs(dataset.stop), abs(dataset.step)) > _LARGEST:
        return None
    if numbers.dtype != np.int64 or numbers.ndim != 1 or not len(numbers):
        return None
    if numbers.min() < 0 or numbers.max() >= len(dataset):
        return None  # the range itself raises the IndexError
    return torch.from_numpy(numbers * dataset.step + dataset.start)


def _reader_of(dataset: Any) -> Callable[[Any], Any]:
    """``dataset[index]`` as a function; a method that is called from Python saves 0.1 us a sample."""
    method = getattr(type(dataset), "__getitem__", None)
    if type(method) is types.FunctionType:
        return types.MethodType(method, dataset)
    return functools.partial(operator.getitem, dataset)


class Fetcher:
    """Fetches and collates batches of one dataset.

    Args:
        settings: How batches are made.
        dataset: The dataset to read; this calls ``iter`` on an iterable one.
        arena: The memory of batches; the caller begins and ends it around each fetch.
        in_worker: Whether this is a worker process.
        sample_rng: Sets the generators before each sample; None lets them continue.
        dataset_state: The state from which the dataset resumes; None: from its beginning.
        worker_id: The worker, process or thread; None without workers.

    Attributes:
        reads_ahead: Whether the dataset wants to know which samples are read next.
        replacer: Replaces samples that cannot be read; None if their errors are raised.
        num_samples: How many samples the last batch has; meaningless after an error.
        gathered_bytes: The bytes of the last batch, if it was gathered from a cache; 0 if it was not.
    """

    def __init__(
        self,
        settings: FetchSettings,
        dataset: Any,
        arena: BumpAllocator,
        *,
        in_worker: bool,
        sample_rng: SampleRng | None,
        dataset_state: DatasetState | None = None,
        worker_id: int | None = None,
    ) -> None:
        self._dataset = dataset
        self._sample_rng = sample_rng
        self._samples: Any = None  # the iterator of an iterable dataset
        if settings.is_iterable:
            self._samples = _iterator_at(dataset, dataset_state)
        elif dataset_state is not None and dataset_state.data:
            dataset.load_state_dict(dataset_state.load())
        # The dataset and its iterator, if their state is requested.
        owners = (dataset, None if self._samples is dataset else self._samples)
        self._owners = [
            owner if dataset_state is not None and keeps_state(owner) else None for owner in owners
        ]
        self._has_ended = dataset_state == ENDED
        self._num_batches = 0 if dataset_state is None else dataset_state.num_batches
        self._num_to_read_again = 0
        if settings.is_iterable and dataset_state is not None:
            self._num_to_read_again = dataset_state.num_to_read_again
        self._auto_collation = settings.auto_collation
        self._collate_fn = settings.collate_fn
        self._drop_last = settings.drop_last
        self._transform = settings.batch_transform
        if self._transform is not None:  # only its results go to the memory of the batch
            self._results, self._scratch = allocating_in(arena), BufferPool(_SCRATCH_BYTES)
            arena = self._scratch
        self._arena = arena
        self._channels_last = settings.channels_last
        self._writes_rows = False  # whether the current batch is written to rows
        self._rows = RowCollate(arena, in_worker=in_worker, channels_last=settings.channels_last)
        self._stacking = allocating_in(arena if in_worker else None)
        self._cache = _find_cache(dataset)
        self.reads_ahead = not settings.is_iterable and reads_ahead(dataset)
        self.replacer: Replacer | None = None
        if settings.on_error != "raise":
            self.replacer = Replacer(settings.on_error, settings.replacements, worker_id)
        self.num_samples = 0
        self.gathered_bytes = 0
        self._indices: Sequence[Any] = ()  # the indices of the batch whose samples are being read one by one
        self._left: Iterator[Any] = iter(())  # the indices after the one being read

    def dataset_state(self) -> DatasetState:
        """The current state of an iterable dataset, or of a map-style dataset that has a state_dict()."""
        if self._has_ended:
            return ENDED
        data, iterator = (
            b"" if owner is None else pickle.dumps(owner.state_dict()) for owner in self._owners
        )
        return DatasetState("begun", data, None, iterator, self._num_batches)

    @property
    def has_first_state(self) -> bool:
        """Whether the state before the first batch says more than that nothing was read.

        The state of a stream that makes an iterator without a state is not requested: it might not be valid
        before the first sample was read, and a new iterator starts at the same place.
        """
        dataset, iterator = self._owners
        is_own_iterator = self._samples is None or self._samples is self._dataset
        return not self._has_ended and (iterator is not None or (is_own_iterator and dataset is not None))

    def fetch(self, index: Any, origin: StreamOrigin | None = None, batch_id: BatchId | None = None) -> Any:
        """Fetch the batch of ``index``.

        Args:
            index: The index, or list of indices, from the sampler.
            origin: With a `sample_rng`: the origin of the samples' random streams.
            batch_id: With a `replacer` or a batch transform: identifies the batch; their draws depend on it.

        Raises:
            StopIteration: An iterable dataset has ended.
        """
        self._indices = ()
        self.gathered_bytes = 0
        if self._transform is not None:
            self._scratch.begin()
        if self.replacer is not None and batch_id is not None:
            if self._auto_collation and not hasattr(index, "__getitem__"):
                index = list(index)
            self.replacer.begin(batch_id, index if self._auto_collation else [index])
        if self._num_to_read_again:
            self._read_again(index)
        if self.reads_ahead:
            self.announce(index)
        try:
            batch = self._fetch(index, origin)
            if self._channels_last:
                batch = to_channels_last(batch)
            if self._transform is not None:
                batch = self._transformed(self._transform, batch, index, origin, batch_id)
            self._num_batches += 1
        except BaseException as error:
            self._rows.forget()
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                self._num_batches += 1  # a caller who continues after an error gets the next batch
            raise
        finally:
            if self._sample_rng is not None:
                self._sample_rng.end()
        return batch

    def _transformed(
        self,
        transform: Callable[[Any], Any],
        batch: Any,
        index: Any,
        origin: StreamOrigin | None,
        batch_id: BatchId | None,
    ) -> Any:
        indices = index if self._auto_collation else (index,)
        if batch_id is None:
            raise AssertionError("a batch that is transformed has an id")
        streams = BatchStreams.of_batch(batch_id)
        if origin is not None:
            streams = BatchStreams.of_samples(origin, indices)
            if self._sample_rng is not None and len(indices):
                self._sample_rng.begin(origin, indices[-1], _OF_BATCH)
        try:
            with drawing_from(streams), self._results, torch.no_grad():
                batch = transform(batch)
        except Exception as error:
            add_note(error, "fastload: raised by batch_transform, which gets whole batches in the worker")
            raise
        self.gathered_bytes = 0  # the size of the batch has changed
        return batch

    def announce(self, index: Any) -> None:
        """Tell a dataset that reads ahead that the batch of ``index`` will be fetched."""
        if not self._auto_collation:
            read_ahead(self._dataset, [index])
        elif hasattr(index, "__getitem__"):  # an iterator could not be read again
            read_ahead(self._dataset, index)

    def place_of_error(self, index: Any, error: BaseException) -> str:
        """The sample at which the last `fetch` failed, in words; its whole index if the sample is unknown.

        Args:
            index: The index that `fetch` got.
            error: The error that `fetch` raised; the text includes its ``path`` or ``filename``.
        """
        num_left = operator.length_hint(self._left)
        if num_left < len(self._indices):  # else a signal handler raised before the first sample was read
            index = self._indices[-1 - num_left]
        place = f"dataset index {short_repr(index)}"
        path = path_of(error)
        return place if path is None else f"{place}, {path}"

    def _fetch(self, index: Any, origin: StreamOrigin | None) -> Any:
        self._writes_rows = self._auto_collation and is_torch_default(self._collate_fn)
        if self._samples is not None:
            return self._fetch_next(self._samples, index)
        if not self._auto_collation:
            return self._stacked(self._fetch_whole, index, origin)  # the dataset can return whole batches
        if type(self._dataset) is range and self._writes_rows and type(index) is list:
            numbers = _rows_of(self._dataset, index)
            if numbers is not None:
                self.num_samples = len(index)
                return numbers
        if self._cache is not None and self._writes_rows:
            return self._fetch_cached(self._cache, list(index), origin)
        self._read_samples(index, origin)
        return self._collated()

    def _fetch_whole(self, index: Any, origin: StreamOrigin | None) -> Any:
        self._indices, self._left = (index,), iter(())
        self.num_samples = 1
        return self._collate_fn(self._getter(_reader_of(self._dataset), (index,), origin)(index))

    def _collated(self) -> Any:
        """Collate the samples read."""
        if self._writes_rows:
            return self._stacked(self._rows.finish)
        samples = self._rows.take()
        try:
            return self._stacked(self._collate_fn, samples)
        except Exception as error:
            if is_of_torch(error):
                explain(samples, "$", error)
            raise

    def _stacked(self, collate: Callable[..., Any], *args: Any) -> Any:
        """Call ``collate``; in a worker, default_collate within it stacks into the slot."""
        with self._stacking:
            return collate(*args)

    def _read_samples(self, indices: Any, origin: StreamOrigin | None) -> None:
        """Read the samples of a batch into its rows, or keep them."""
        dataset = self._dataset
        if origin is None and not self.reads_ahead and getattr(dataset, "__getitems__", None):
            self.num_samples = operator.length_hint(indices)  # 0 if a custom sampler hides it
            try:
                samples = dataset.__getitems__(indices)
            except Exception:
                if self.replacer is None:
                    raise
            else:
                self._rows.add_all(samples, keeps=not self._writes_rows)
                return
        if type(indices) is not list:
            indices = list(indices)
        self._read(self._getter(_reader_of(self._dataset), indices, origin), indices, indices)

    def _read(
        self,
        get: Callable[[Any], Any],
        indices: list[Any],
        positions: Sequence[Any],
        *,
        is_lent: bool = False,
        pends: bool = False,
    ) -> None:
        """Read ``get(position)`` for each position; ``indices`` are the sampler's, for errors."""
        self.num_samples = len(indices)
        self._rows.begin(len(indices), keeps=not self._writes_rows, is_lent=is_lent, pends=pends)
        self._indices, self._left = indices, iter(positions)
        self._rows.read(get, self._left)
        self._indices = ()

    def _getter(
        self, get: Callable[[Any], Any], indices: Any, origin: StreamOrigin | None
    ) -> Callable[[Any], Any]:
        """``get`` for the samples of ``indices`` in order; sets generators, and replaces unreadable ones."""
        if origin is not None and self._sample_rng is not None:
            get = self._sample_rng.seeded(get, indices, origin)
        if self.replacer is not None:
            get = self.replacer.replacing(get, functools.partial(self._read_at, origin))
        return get

    def _read_at(self, origin: StreamOrigin | None, index: Any, occurrence: int) -> Any:
        if origin is not None and self._sample_rng is not None:
            self._sample_rng.begin(origin, index, occurrence)
        return self._dataset[index]

    def _fetch_cached(self, dataset: Any, indices: list[Any], origin: StreamOrigin | None) -> Any:
        _, positions = inside_subsets(self._dataset, indices)
        self.num_samples = len(positions)
        batch = dataset._gather(positions, self._allocate)
        if batch is not None:
            return batch
        self.gathered_bytes = 0
        is_lent = dataset.transform is None
        pends = not is_lent and self._rows.takes_pending
        get = dataset._lend if is_lent else dataset._pend if pends else dataset.__getitem__
        get = self._getter(get, indices, None if is_lent else origin)
        self._read(get, indices, positions, is_lent=is_lent, pends=pends)
        return self._collated()

    def _fetch_next(self, samples: Iterator[Any], index: Any) -> Any:
        if self._has_ended:
            raise StopIteration
        if not self._auto_collation:
            self.num_samples = 1
            return self._stacked(lambda: self._collate_fn(next(samples)))
        rows, size = self._rows, len(index)
        rows.begin(size, keeps=not self._writes_rows)
        with contextlib.suppress(StopIteration):
            rows.read(next, itertools.repeat(samples, size))
        self.num_samples = len(rows)
        self._has_ended = len(rows) < size
        if not len(rows) or (self._drop_last and self._has_ended):
            raise StopIteration
        return self._collated()

    def _read_again(self, index: Any) -> None:
        """Read the batches of a stream without a state that the caller has received before the resume.

        A custom `collate_fn` is called, because it can draw from the generators that the stream draws from.
        """
        count, self._num_to_read_again = self._num_to_read_again, 0
        size = len(index) if self._auto_collation else 1
        for number in range(count):
            try:
                # islice would call iter() first: a stream that is its own iterator can go back to its start.
                samples = list(map(next, itertools.repeat(self._samples, size)))
            except Exception:  # noqa: BLE001  # the caller got this error instead of the batch
                continue
            if not samples or (self._drop_last and len(samples) < size):
                raise ResumeError(
                    f"a stream without a state is resumed by reading {count} batches again, but it ended "
                    f"after {number}: it must return the same samples in the same order as before"
                )
            self._has_ended = len(samples) < size
            if not is_torch_default(self._collate_fn):
                with contextlib.suppress(Exception):  # the caller got this error instead of the batch
                    self._collate_fn(samples if self._auto_collation else samples[0])

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        array = self._arena.array(shape, dtype)
        self.gathered_bytes += array.nbytes
        return array


def _iterator_at(dataset: Any, state: DatasetState | None) -> Iterator[Any]:
    """Call ``iter`` on an iterable dataset, and make the iterator continue at the state.

    The state of the dataset is loaded before ``iter``. If the dataset is its own iterator, and `__iter__`
    went back to the beginning or needs to come first, the state is loaded again after it.
    """
    if state is None or not state.has_state:
        return iter(dataset)
    early_error: Exception | None = None
    if state.data:
        try:
            dataset.load_state_dict(state.load())
        except Exception as error:  # noqa: BLE001  # raised below, unless `__iter__` has to come first
            early_error = error
    samples: Any = iter(dataset)
    if state.data and samples is dataset and (early_error is not None or not _is_at(dataset, state)):
        dataset.load_state_dict(state.load())
    elif early_error is not None:
        raise early_error
    if state.iterator:
        if not keeps_state(samples):
            raise ResumeError(
                "the state has the position of an iterator with a state_dict(), but iter(dataset) now "
                f"returns a {type(samples).__name__} without one: give the loader the same dataset as before"
            )
        samples.load_state_dict(state.load_iterator())
    iterator: Iterator[Any] = samples
    return iterator


def _is_at(dataset: Any, state: DatasetState) -> bool:
    """Whether the dataset says that it is at this state; False if the two cannot be compared."""
    try:
        return bool(dataset.state_dict() == state.load())
    except Exception:  # noqa: BLE001  # tensors and arrays, or a state_dict() that fails at this moment
        return False


def _find_cache(dataset: Any) -> Any | None:
    """The CachedDataset, also inside torch's Subset, if no subclass and no attribute replaces its methods."""
    dataset, _ = inside_subsets(dataset)
    # Importing it here would load Pillow and every cache into processes that use neither.
    ours = getattr(sys.modules.get("fastload.cache.dataset"), "CachedDataset", None)
    if ours is None or not isinstance(dataset, ours) or getattr(dataset, "__getitems__", None):
        return None
    replaced = (name for name in _READING if getattr(type(dataset), name) is not getattr(ours, name))
    return None if any(replaced) or _READING.intersection(vars(dataset)) else dataset


_READING = frozenset(("__getitem__", "_view", "_lend", "_read", "_gather"))  # the methods that read batches
