"""The iterator of a loader with `num_workers=0`. Runs in the consumer's process.

It is built on torch's own base iterator (see `iterator`). One thread fetches at a time, because rows and
buffers belong to the iterator; other threads wait for their turn.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from fastload.batch.failures import FailureCount
from fastload.batch.packing import nbytes_of
from fastload.device.pin_thread import pin_batch
from fastload.epochs.iterator import HostIterator
from fastload.epochs.loader_state import file_cache_of, recorder_of, state_of
from fastload.epochs.position import Position, why_unresumable
from fastload.errors import LoaderClosedError
from fastload.memory.lease import BufferPool
from fastload.rng.entry_points import THREAD, Streams, seeded_by
from fastload.rng.seeding import local_streams
from fastload.system.budget import parse_prefetch_memory
from fastload.system.cache_counts import cache_counts
from fastload.system.notes import add_place
from fastload.workers.batch_maker import dataset_state_of, make_fetcher
from fastload.workers.messages import WorkerCounters
from fastload.workers.settings import needs_keys, worker_spec

if TYPE_CHECKING:
    from fastload.batch.dataset_state import DatasetState
    from fastload.rng.keys import BatchKey
    from fastload.workers.settings import LoaderSettings


class LocalIterator(HostIterator):
    """Iterates over an epoch without workers: fetches samples here, into buffers that stay warm."""

    def __init__(self, loader: LoaderSettings) -> None:
        self.position = position = Position.begin(loader, "local", why_unresumable(loader))
        super().__init__(loader)
        self._pin_memory = self._pin_memory and loader.device is None  # with device=, copies ahead pin memory
        position.choose_base_seed(int(self._base_seed))
        self._sampler_iter = position.replay(loader, self._sampler_iter)
        if self._timeout != 0:  # as torch's _SingleProcessDataLoaderIter.__init__
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        self._has_ended = False
        self._buffers = self._take_buffers(loader)
        self._is_closed = False
        self._recorder = recorder_of(loader)
        self.turn = threading.RLock()
        self._is_fetching = False
        # The index of the batch being read, and its key; after Ctrl-C it is read again.
        self._due: tuple[Any, BatchKey | None] | None = None
        self._needs_keys = needs_keys(loader)
        self._number = 0  # of that batch
        self._failures = FailureCount(loader, state_of(loader).failed_samples)
        self._file_cache = file_cache_of(loader)
        spec = worker_spec(loader, position.base_seed, self._file_cache)
        states = position.dataset_states
        self._keeps_state = states is not None
        is_seeded = spec.seeds_pipelines and not spec.seeds_samples
        self._streams = local_streams(spec.base_seed) if is_seeded else None
        with seeded_by(self._streams):  # iter() of an iterable dataset can draw
            self._fetcher = make_fetcher(spec, self._buffers, None if states is None else states[0])
        is_first = not position.num_received
        if states is not None and is_first and self._fetcher.reader.has_first_state:
            states[0] = self._dataset_state()

    def _take_buffers(self, loader: LoaderSettings) -> BufferPool:
        state = state_of(loader)
        buffers, user = state.buffers or (None, None)
        other = None if user is None else user()
        if buffers is None or (other is not None and not other._has_ended):
            buffers = BufferPool(parse_prefetch_memory(loader.max_prefetch_memory))
        state.buffers = buffers, weakref.ref(self)
        return buffers

    def _next_data(self) -> Any:
        if self._file_cache is not None:
            self._file_cache.poll()
        with self.turn:
            if self._is_fetching or self._is_closed or self._has_ended:
                self._raise_instead()
            try:
                if self._due is None:
                    index = next(self._sampler_iter)
                    self._number = self.position.next_number()
                    has_key = self._needs_keys
                    self._due = self.position.keyed(index, self._number) if has_key else (index, None)
                batch = self._fetch(*self._due)
            except StopIteration:
                self._has_ended = self.position.has_ended = True
                raise
            if self._pin_memory:
                batch = pin_batch(batch, self._pin_memory_device)
            nbytes = self._fetcher.gathered_bytes or nbytes_of(batch)
            return batch, (self._fetcher.num_samples, nbytes)

    def _raise_instead(self) -> None:
        """Raise the error that the caller gets instead of a batch."""
        if self._is_fetching:
            raise RuntimeError(
                "the dataset requested a batch from the iterator that is reading it: make a second iterator "
                "with iter(loader)"
            )
        if self._is_closed:
            raise LoaderClosedError
        raise StopIteration  # the buffers may belong to another iterator now

    def _fetch(self, index: Any, key: BatchKey | None) -> Any:
        hits, misses = cache_counts.hits, cache_counts.misses
        if cache_counts.reasons:
            cache_counts.take_reasons()  # of what this thread has read outside of loaders
        outside = THREAD.streams
        try:
            self._is_fetching = True
            self._buffers.begin()
            if self._streams is not None:
                THREAD.streams = Streams(self._streams)
            batch = self._fetcher.fetch(index, key)
        except StopIteration:
            raise  # the iterable dataset has ended: there is no such batch
        except BaseException as error:
            if isinstance(error, Exception):
                self._fetched(index)  # a caller who continues after an error gets the next batch
            place = self._fetcher.place_of_error(index, error)
            add_place(error, f"batch {self._number}, {place}")
            raise
        finally:
            # These come first, and call nothing: a signal can interrupt any call.
            THREAD.streams = outside
            self._is_fetching = False
            self._buffers.end()
            if cache_counts.hits != hits or cache_counts.misses != misses:
                hits, misses = cache_counts.hits - hits, cache_counts.misses - misses
                self._recorder.add(WorkerCounters(0, hits, misses, cache_counts.take_reasons()))
        self._fetched(index)
        if self._fetcher.replacer is not None:
            self._failures.note(self._fetcher.replacer.failed)
        return batch

    def _fetched(self, index: Any) -> None:
        state = self._dataset_state() if self._keeps_state else None
        self._due = None
        self.position.fetched(index, 0, state, self._number)

    def _dataset_state(self) -> DatasetState:
        return dataset_state_of(self._fetcher, "in the dataset's state_dict()")

    def close(self) -> None:
        """Release the buffers; batches that the caller holds stay valid."""
        self._is_closed = True
        if self.turn.acquire(blocking=False):  # else another thread is writing a batch to them
            try:
                if not self._has_ended:
                    self._buffers.clear()
            finally:
                self.turn.release()
