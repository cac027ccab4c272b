"""What the consumer asks of a worker process, thread or actor, and what the worker replies."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fastload.batch.packing import Packed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastload.batch.dataset_state import DatasetState
    from fastload.batch.failures import FailedSample
    from fastload.memory.ring import Slot
    from fastload.rng.keys import BatchKey


@dataclass(slots=True, eq=False)
class PendingBatch:
    """The consumer's record of a batch that it has requested from a worker.

    Attributes:
        number: The number of the batch in its epoch.
        worker: The worker of which it was requested.
        index: The index, or list of indices, from the sampler.
        key: With `seeding="sample"`, `on_error` or a `batch_transform`: their draws depend on it.
        reply: None until the worker has replied.
        is_stale: Whether it belongs to an abandoned epoch; its reply is dropped.
        slot: The slot for the bytes of the batch.
        call: Of the method of a Ray actor, as a `concurrent.futures.Future`.
    """

    number: int
    worker: int
    index: Any
    key: BatchKey | None = None
    reply: BatchReply | None = None
    is_stale: bool = False
    slot: Slot | None = None
    call: Any = None


class BeginEpoch(NamedTuple):
    """An epoch begins; the arguments are those of `BatchMaker.begin_epoch`."""

    epoch: int | None
    dataset_state: DatasetState | None


class FetchRequest(NamedTuple):
    """The request to a worker process for the batch of ``index``. Sent as a tuple, which pickles faster."""

    slot: int  # the number of the slot for the batch
    has_memory: bool  # False: the worker must not use its memory for this slot again
    num_slots: int  # the worker frees the memory of slots from this number on
    index: Any
    key: BatchKey | None


# The last counters are the consumer's own, and workers send the others.
_NUM_OF_CONSUMER = 2
_NO_REASONS: Mapping[str, int] = {}


class WorkerCounters(NamedTuple):
    """The counters of one worker since its previous reply, or their sums over all workers.

    Attributes:
        busy_us: Microseconds in which the worker made batches.
        cache_hits: Samples found in a cache; also of batches that no caller received.
        cache_misses: Samples read from the source of a cache.
        miss_reasons: Why files were decoded, and how often.
        num_copies: Batches copied because their slot could not be lent.
        num_restarts: Workers that replaced dead ones.
    """

    busy_us: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    miss_reasons: Mapping[str, int] = _NO_REASONS
    num_copies: int = 0
    num_restarts: int = 0


class ReplyKind(enum.IntEnum):
    """What a reply holds."""

    BATCH = 0
    ERROR = 1
    ENDED = 2  # the worker's share of an iterable dataset is used up


_KINDS = tuple(ReplyKind)


@dataclass(slots=True)
class BatchReply:
    """What a worker made of one index.

    Attributes:
        kind: What `payload` is.
        payload: The batch, as the worker's ``to_payload`` returned it; or the error, as a RemoteError.
        dataset_state: The state of the worker's copy of the dataset after this batch; None if it has none.
        failed: Samples that could not be read and were replaced.
        num_samples: The samples of the batch.
        counters: What the worker counted since its previous reply.
    """

    kind: ReplyKind
    payload: Any = None
    dataset_state: DatasetState | None = None
    failed: tuple[FailedSample, ...] = ()
    num_samples: int = 0
    counters: WorkerCounters = WorkerCounters()  # noqa: RUF009

    def to_plain(self) -> tuple[Any, ...]:
        """The reply as built-in types, which pickle faster."""
        payload = tuple(self.payload) if self.kind is ReplyKind.BATCH else self.payload
        counters = self.counters[:-_NUM_OF_CONSUMER]
        return int(self.kind), payload, self.dataset_state, self.failed, self.num_samples, *counters

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> BatchReply:
        """The reply of which ``plain`` is the `to_plain`."""
        number, payload, dataset_state, failed, num_samples, *counters = plain
        kind = _KINDS[number]  # in a tenth of the time of ReplyKind(number)
        if kind is ReplyKind.BATCH:
            payload = Packed(*payload)
        return cls(kind, payload, dataset_state, failed, num_samples, counters=WorkerCounters(*counters))
