"""Fetch the samples of a list of indices and collate them into a batch (torch calls this a fetcher).

Runs in a worker, or in the parent without workers. The choice of samples, their order, and the StopIteration
that ends an epoch follow torch's rules (torch/utils/data/_utils/fetch.py); the memory is fastload's.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch

from fastload.batch.access import batch_access_of, expect, expects, inside_subsets
from fastload.batch.collate import Collator, is_torch_default, to_channels_last
from fastload.batch.collate_errors import explain, is_of_torch
from fastload.batch.dataset_state import Stream
from fastload.batch.failures import Replacer, path_of
from fastload.errors import ResumeError
from fastload.memory.lease import BufferPool, allocating_in, current_allocator
from fastload.nested.deferred import computed
from fastload.nested.tree import map_leaves, private_copy
from fastload.rng.batch_draws import BatchDraws, drawing_from
from fastload.rng.keys import SampleKey
from fastload.system.notes import add_note, short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from fastload.batch.access import BatchAccess
    from fastload.batch.dataset_state import DatasetState
    from fastload.batch.plan import Plan
    from fastload.memory.lease import BumpAllocator
    from fastload.rng.keys import BatchKey
    from fastload.rng.sample_rng import SampleSeeder


# Kept for batches before their transform; a larger batch gets its own memory.
_SCRATCH_BYTES = 256 << 20
# The occurrence of the key with which a batch transform draws: no sample of the epoch has it.
_OF_BATCH = -(1 << 62)


def _get_of(dataset: Any) -> Callable[[Any], Any]:
    """``dataset[index]`` as a function."""
    return functools.partial(operator.getitem, dataset)


def _computed(sample: Any) -> Any:
    """The sample with the results of what is deferred."""
    return map_leaves(sample, computed)


class Fetcher:
    """Fetches and collates batches of one dataset.

    Args:
        plan: How batches are made; this calls ``iter`` on an iterable dataset.
        allocator: The memory of batches; the caller begins and ends it around each fetch.
        in_worker: Whether this is a worker process.
        seeder: Sets the generators before each sample; None lets them continue.
        dataset_state: Where an iterable dataset goes on; None: it begins, and is not asked for its state.
        worker_id: The worker, process or thread; None without workers.
        reading: Makes what samples are read and collated in; None, or a result of None: nothing.

    Attributes:
        stream: The dataset, if it is iterable.
        replacer: Replaces samples that cannot be read; None if their errors are raised.
        num_samples: How many samples the last batch has; meaningless after an error.
    """

    def __init__(
        self,
        plan: Plan,
        allocator: BumpAllocator,
        *,
        in_worker: bool,
        seeder: SampleSeeder | None,
        dataset_state: DatasetState | None = None,
        worker_id: int | None = None,
        reading: Callable[[], AbstractContextManager[None] | None] | None = None,
    ) -> None:
        self._dataset = dataset = plan.dataset
        self._reading = reading
        self._seeder = seeder
        self.stream: Stream | None = None
        if plan.is_iterable:
            self.stream = Stream(dataset, dataset_state, drop_last=plan.drop_last)
        self._auto_collation = plan.auto_collation
        self._collate_fn = plan.collate_fn
        self._transform = plan.batch_transform
        if self._transform is not None:  # only its results go to the memory of the batch
            self._results = allocating_in(allocator)
            allocator.scratch = self._scratch = allocator.scratch or BufferPool(_SCRATCH_BYTES)
            allocator = self._scratch
        self._allocator = allocator
        self._channels_last = plan.channels_last
        self._is_default = False  # whether torch's default_collate makes the current batch
        self._collator = Collator(allocator, in_worker=in_worker, channels_last=plan.channels_last)
        self._stack_memory = allocator if in_worker else None
        self._stacking = allocating_in(self._stack_memory)
        self._access = None if plan.is_iterable else batch_access_of(dataset)
        self._expects = not plan.is_iterable and expects(dataset)
        self.replacer: Replacer | None = None
        if plan.on_error != "raise":
            self.replacer = Replacer(plan.on_error, plan.replacements, worker_id)
        self.num_samples = 0
        self._indices: Sequence[Any] = ()  # the indices of the batch whose samples are being read one by one
        self._left: Iterator[Any] = iter(())  # the indices after the one being read

    def fetch(self, index: Any, key: BatchKey | None = None) -> Any:
        """Fetch the batch of ``index``.

        Args:
            index: The index, or list of indices, from the sampler.
            key: With a `seeder`, a `replacer` or a batch transform: their draws depend on it.

        Raises:
            StopIteration: An iterable dataset has ended.
        """
        self._indices = ()
        if self._transform is not None:
            self._scratch.begin()
        if self.replacer is not None and key is not None:
            if self._auto_collation and not hasattr(index, "__getitem__"):
                index = list(index)
            self.replacer.begin(key, index if self._auto_collation else [index])
        stream = self.stream
        if stream is not None and stream.num_to_read_again:
            self._read_again(stream, index)
        if self._expects and (not self._auto_collation or hasattr(index, "__getitem__")):
            expect(self._dataset, index if self._auto_collation else [index])  # an iterator is read only once
        try:
            reading = None if self._reading is None else self._reading()
            if reading is None:
                batch = self._fetch(index, key)
            else:
                with reading:
                    batch = self._fetch(index, key)
            if self._channels_last:
                batch = to_channels_last(batch)
            if self._transform is not None:
                batch = self._transformed(self._transform, batch, index, key)
            if stream is not None:
                stream.num_batches += 1
        except BaseException as error:
            if stream is not None and isinstance(error, Exception) and not isinstance(error, StopIteration):
                stream.num_batches += 1  # a caller who continues after an error gets the next batch
            raise
        finally:
            if self._seeder is not None:
                self._seeder.end()
        return batch

    def place_of_error(self, index: Any, error: BaseException) -> str:
        """The sample at which the last `fetch` failed, in words; its whole index if the sample is unknown.

        Args:
            index: The index that `fetch` got.
            error: The error that `fetch` raised; the text includes its `path_of`.
        """
        num_left = operator.length_hint(self._left)
        if num_left < len(self._indices):  # else a signal handler raised before the first sample was read
            index = self._indices[-1 - num_left]
        place = f"dataset index {short_repr(index)}"
        path = path_of(error)
        return place if path is None else f"{place}, {path}"

    # --- which samples are read, and how ---

    def _fetch(self, index: Any, key: BatchKey | None) -> Any:
        self._is_default = self._auto_collation and is_torch_default(self._collate_fn)
        if self.stream is not None:
            return self._fetch_next(self.stream, index)
        if not self._auto_collation:
            return self._stacked(self._fetch_whole, index, key)  # the dataset can return whole batches
        if self._access is not None and self._is_default:
            return self._fetch_from(self._access, list(index), key)
        return self._collated(self._samples(index, key))

    def _fetch_whole(self, index: Any, key: BatchKey | None) -> Any:
        self._indices, self._left = (index,), iter(())
        self.num_samples = 1
        get = self._getter(None, (index,), key)
        return self._collate_fn(self._dataset[index] if get is None else get(index))

    def _fetch_from(self, access: BatchAccess, indices: list[Any], key: BatchKey | None) -> Any:
        try:
            dataset, positions = inside_subsets(self._dataset, indices)
        except Exception:  # noqa: BLE001  # of an index: reading the samples raises it, too
            return self._collated(self._samples(indices, key))
        self.num_samples = len(positions)
        batch = access.gather(positions, self._allocator.array)
        if batch is not None:
            return batch
        lend = access.lend
        if lend is not None:  # it draws nothing, so no generator is set
            # torch warns about read-only arrays, and a dataset can reuse the memory of those that it lends.
            get = self._getter(lend, indices, None)
            return self._collated(self._read(get, indices, positions, own=private_copy))
        defer = access.defer if self._collator.takes_deferred else None
        get = self._getter(_get_of(dataset) if defer is None else defer, indices, key)
        return self._collated(self._read(get, indices, positions, own=None if defer is None else _computed))

    def _fetch_next(self, stream: Stream, index: Any) -> Any:
        stream.expect_more()
        if not self._auto_collation:
            self.num_samples = 1
            return self._stacked(lambda: self._collate_fn(next(stream.samples)))
        size = len(index)
        samples = stream.take(size, lambda items: self._taken(items, size))
        self.num_samples = len(samples)
        return self._collated(samples)

    def _read_again(self, stream: Stream, index: Any) -> None:
        """Bring a stream without a state to where it was: read the batches that the caller has received.

        A custom `collate_fn` is called, because it can draw from the generators that the stream draws from.
        """
        count, stream.num_to_read_again = stream.num_to_read_again, 0
        for number in range(count):
            try:
                samples = stream.take(len(index) if self._auto_collation else 1)
                if not is_torch_default(self._collate_fn):
                    self._collate_fn(samples if self._auto_collation else samples[0])
            except StopIteration:
                raise ResumeError(
                    f"a stream without a state is resumed by reading {count} batches again, but it ended "
                    f"after {number}: it must return the same samples in the same order as before"
                ) from None
            except Exception:  # noqa: BLE001  # the caller got this error instead of the batch
                continue

    def _samples(self, indices: Any, key: BatchKey | None) -> Any:
        """Read the samples of a batch."""
        dataset = self._dataset
        if self._seeder is None and not self._expects and getattr(dataset, "__getitems__", None):
            self.num_samples = operator.length_hint(indices)  # 0 if a custom sampler hides it
            try:
                samples = dataset.__getitems__(indices)
            except Exception:
                if self.replacer is None:
                    raise
            else:
                is_list = isinstance(samples, (list, tuple))
                return self._taken(iter(samples), len(samples)) if is_list and self._is_default else samples
        if type(indices) is not list:
            indices = list(indices)
        return self._read(self._getter(None, indices, key), indices, indices)

    def _read(
        self,
        get: Callable[[Any], Any] | None,
        indices: list[Any],
        positions: Sequence[Any],
        *,
        own: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """Read each position, by ``get`` if it is given; ``indices`` are the sampler's, for errors."""
        self.num_samples = len(indices)
        self._indices, self._left = indices, iter(positions)
        taken = self._taken(self._left, len(indices), self._dataset, get, own)
        self._indices = ()
        return taken

    def _taken(self, items: Iterator[Any], count: int, *more: Any) -> list[Any]:
        return self._collator.take(items, count if self._is_default else 0, *more)

    def _getter(
        self, get: Callable[[Any], Any] | None, indices: Any, key: BatchKey | None
    ) -> Callable[[Any], Any] | None:
        """``get`` for the samples of ``indices`` in order; sets generators, and replaces unreadable ones.

        None: ``dataset[index]`` does the same.
        """
        if self._seeder is not None and key is not None:
            get = self._seeder.seeded(get or _get_of(self._dataset), key, indices)
        if self.replacer is not None:
            get = self.replacer.replacing(
                get or _get_of(self._dataset), functools.partial(self._read_at, key)
            )
        return get

    def _read_at(self, key: BatchKey | None, index: Any, occurrence: int) -> Any:
        if self._seeder is not None and key is not None:
            self._seeder.begin(SampleKey(key.seed, key.epoch, index, occurrence))
        return self._dataset[index]

    # --- how a batch is made of them ---

    def _collated(self, samples: Any) -> Any:
        if self._is_default:
            return self._stacked(self._collator.collate, samples)
        try:
            return self._stacked(self._collate_fn, samples)
        except Exception as error:
            if is_of_torch(error):
                explain(samples, error)
            raise

    def _stacked(self, collate: Callable[..., Any], *args: Any) -> Any:
        """Call ``collate``; in a worker, default_collate within it stacks into the slot."""
        if current_allocator() is self._stack_memory:
            return collate(*args)
        with self._stacking:
            return collate(*args)

    def _transformed(
        self, transform: Callable[[Any], Any], batch: Any, index: Any, key: BatchKey | None
    ) -> Any:
        if key is None:
            raise AssertionError("a batch that is transformed has a key")
        indices = index if self._auto_collation else (index,)
        if self._seeder is not None and len(indices):
            self._seeder.begin(SampleKey(key.seed, key.epoch, indices[-1], _OF_BATCH))
        try:
            with drawing_from(BatchDraws(key, indices)), self._results, torch.no_grad():
                batch = transform(batch)
        except Exception as error:
            add_note(error, "fastload: raised by batch_transform, which gets whole batches in the worker")
            raise
        return batch
