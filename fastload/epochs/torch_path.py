"""torch's own iterators, for loaders that fastload's cannot serve (see `DataLoader._why_torch`).

torch provides the workers and the transport, and fastload's fetcher makes the batches in them. Such an epoch
is counted, but cannot be resumed in the middle.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fastload.batch.failures import FailureCount
from fastload.epochs.iterator import EpochIterator, raise_remote
from fastload.epochs.position import Position
from fastload.epochs.runtime import file_cache_of, runtime_of
from fastload.memory.lease import BufferPool
from fastload.system import torch_private
from fastload.workers.batch_maker import BatchMaker
from fastload.workers.messages import PendingBatch, ReplyKind
from fastload.workers.settings import plan_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.batch.plan import Plan
    from fastload.workers.messages import BatchReply, WorkerCounters


def torch_iterator(
    loader: Any, reason: str, defaults: dict[str, Any], *, pins: bool = False
) -> TorchIterator:
    """Torch's iterator over the loader's batches.

    Args:
        loader: The loader to iterate over; the caller holds its lock.
        reason: Why it must use torch's iterator.
        defaults: Of the arguments that torch's loader lacks: the plan has the loader's own.
        pins: Whether batches come in pinned memory even without `pin_memory`; torch's thread copies them.
    """
    position = Position.begin(loader, "workers", reason)
    twin, file_cache = copy.copy(loader), file_cache_of(loader)
    plan = plan_of(loader, 0, file_cache)
    tasks, worker = _Tasks(position, torch_private.index_sampler(loader), plan), WholeBatches(plan)
    # Through vars(), because torch's loader allows most of these not to be set.
    vars(twin).update(defaults, dataset=worker, batch_sampler=None, sampler=tasks)
    vars(twin).update(pin_memory=pins or loader.pin_memory, _dataset_kind=torch_private.MAP_STYLE)
    twin.collate_fn, twin.worker_init_fn = _same, worker.begin
    twin.check_worker_number_rationality()
    iterator = TorchIterator(twin)
    iterator.owner, iterator.reason, iterator.file_cache = weakref.ref(loader), reason, file_cache
    iterator.failures = FailureCount(loader, runtime_of(loader).failed_samples)
    iterator.num_workers, iterator.count = loader.num_workers, runtime_of(loader).meter.add
    return iterator


class TorchIterator(EpochIterator, torch_private.MultiProcessingDataLoaderIter):
    """torch's iterator, which counts the batches that the caller has received.

    Attributes:
        reason: Why the loader must use torch's iterator.
        file_cache: What the loader's `cache` is.
        failures: Those of the epoch.
        count: Called with what workers count.
    """

    reason: str
    file_cache: Any = None
    failures: FailureCount
    count: Callable[[WorkerCounters], None]
    _shutdown = True  # torch's: until there is something to stop, or its __del__ would fail after an error

    def _next_data(self) -> Any:
        if self.file_cache is not None:
            self.file_cache.poll()
        while not self.position.has_ended:
            try:
                self.last, payload, reply = super()._next_data()  # type: ignore[no-untyped-call]
            except StopIteration:
                break
            except Exception:
                self.position.fetched(None)  # a caller who continues after an error gets the next batch
                raise
            self.count(reply.counters)
            if reply.kind is ReplyKind.ENDED:
                self._ended.add(self.last.worker)
                if len(self._ended) == self._num_workers:
                    break
                continue
            self.position.fetched(None)
            if reply.kind is ReplyKind.ERROR:
                raise_remote(payload, f"batch {self.last.number}, worker {self.last.worker}")
            self.failures.note(reply.failed)
            return payload, reply.num_samples
        self.position.has_ended = True
        if not self._persistent_workers:
            self.close()
        raise StopIteration

    def next_sized(self) -> tuple[Any, int]:
        """The next batch and how many samples it has."""
        batch_and_size: tuple[Any, int] = super(EpochIterator, self).__next__()
        return batch_and_size

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        tasks = self._index_sampler
        if not first_iter:  # the next epoch of persistent workers
            tasks.position = Position.begin(loader, "again", self.reason)
            self.failures = FailureCount(loader, runtime_of(loader).failed_samples)
        self.position = tasks.position
        self.position.base_seed = int(self._base_seed)
        self._ended: set[int] = set()  # the workers whose share of an iterable dataset is used up
        super()._reset(loader, first_iter)

    def close(self) -> None:
        """Stop the workers."""
        self._shutdown_workers()


_Task = tuple[int, int, Any, Any]  # the epoch, and the number, index and key of a batch


class _Tasks:
    """A sampler of tasks for `WholeBatches`, which draws from the loader's own at torch's moments."""

    def __init__(self, position: Position, sampler: Any, plan: Plan) -> None:
        self.position = position
        self._sampler = sampler
        self._needs_keys = plan.needs_keys

    def __iter__(self) -> Iterator[_Task]:
        return map(self._task, iter(self._sampler))

    def _task(self, index: Any) -> _Task:
        position = self.position
        number, key = position.next_number(), None
        if self._needs_keys:
            index, key = position.keyed(index, number)
        return position.epoch, number, index, key

    def __len__(self) -> int:
        return len(self._sampler)


class WholeBatches:
    """The dataset of one of torch's workers, whose items are whole batches."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._epoch: int | None = None

    def begin(self, worker_id: int) -> None:
        """Begin, as torch's `worker_init_fn`."""
        self._id = worker_id
        self._plan.base_seed = torch.initial_seed() - worker_id  # torch drew it after the plan was made
        self._buffers = BufferPool(self._plan.max_bytes // self._plan.num_workers)
        self._maker = BatchMaker(worker_id, self._plan.load, self._buffers, None)
        self._maker.begin()

    def __getitem__(self, task: _Task) -> tuple[PendingBatch, Any, BatchReply]:
        """What was asked for, and the reply, whose payload torch may pin."""
        epoch, number, index, key = task
        if self._epoch != epoch:
            self._maker.begin_epoch(None, None)
            self._epoch = epoch
        self._buffers.begin()
        reply = self._maker.make(index, key)
        self._buffers.end()
        payload, reply.payload = reply.payload, None
        return PendingBatch(number, self._id, index if key else None, key), payload, reply


def _same(batch: Any) -> Any:
    return batch
