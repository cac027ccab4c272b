"""What the consumer tells a worker process or thread, and what the worker answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fastload.batch.packing import Packed

if TYPE_CHECKING:
    from fastload.batch.dataset_state import DatasetState
    from fastload.batch.failures import FailedSample
    from fastload.memory.ring import Slot
    from fastload.rng.keys import BatchKey


@dataclass(slots=True, eq=False)
class Task:
    """The request for one batch, and its answer.

    Attributes:
        number: The number of the batch in its epoch.
        index: The index, or list of indices, from the sampler.
        key: With `seeding="sample"`, `on_error` or a `batch_transform`: their draws depend on it.
        answer: None until the worker has answered.
        is_stale: Whether it belongs to an abandoned epoch; its answer is dropped.
        serial: The number of the message to a worker process; ascends over all epochs.
        slot: The slot into which a worker process writes the batch.
    """

    number: int
    index: Any
    key: BatchKey | None = None
    answer: Answer | None = None
    is_stale: bool = False
    serial: int = 0
    slot: Slot | None = None


INTERRUPTED = 130  # the exit code of a worker that Ctrl-C has ended: 128 + SIGINT


class Begin(NamedTuple):
    """An epoch begins; the arguments are those of `BatchMaker.begin_epoch`."""

    epoch: int | None
    dataset_state: DatasetState | None


class Fetch(NamedTuple):
    """Parent to worker: fetch the batch of ``index`` into ``slot``. Sent as a tuple, which pickles faster."""

    slot: int
    has_memory: bool  # False: the worker must not use its memory for this slot again
    num_slots: int  # the worker frees the memory of slots from this number on
    index: Any
    key: BatchKey | None


class Work(NamedTuple):
    """The work of one worker since its previous answer, or the sums of all workers.

    Attributes:
        busy_us: Microseconds in which the worker did not wait for a task.
        cache_hits: Samples found in a cache; also of batches that no caller received.
        cache_misses: Samples read from the source of a cache.
        num_copies: Batches copied because their slot could not be lent.
        num_restarts: Workers that replaced dead ones.
    """

    busy_us: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    num_copies: int = 0
    num_restarts: int = 0


class Kind(enum.IntEnum):
    """The kind of an answer."""

    BATCH = 0
    ERROR = 1
    ENDED = 2  # the worker's share of an iterable dataset is used up


@dataclass(slots=True)
class Answer:
    """What a worker made of one index.

    Attributes:
        kind: The kind.
        payload: The batch, as the transport's ``finish`` returned it; or the error, as a RemoteError.
        dataset_state: The state of the worker's copy of the dataset after this batch; None if it has none.
        failed: Samples that could not be read and were replaced.
        num_samples: The samples of the batch.
        nbytes: The bytes of the batch; 0 until the transport knows them, None if they cannot be known.
        work: The work of the worker since its previous answer.
    """

    kind: Kind
    payload: Any = None
    dataset_state: DatasetState | None = None
    failed: tuple[FailedSample, ...] = ()
    num_samples: int = 0
    nbytes: int | None = 0
    work: Work = Work()  # noqa: RUF009


def to_plain(answer: Answer) -> tuple[Any, ...]:
    """An answer as built-in types, which pickle faster."""
    payload = tuple(answer.payload) if answer.kind is Kind.BATCH else answer.payload
    work = answer.work[:3]  # the rest is the parent's
    return int(answer.kind), payload, answer.dataset_state, answer.failed, answer.num_samples, *work


def of_plain(plain: tuple[Any, ...]) -> Answer:
    """Undo `to_plain`."""
    number, payload, dataset_state, failed, num_samples, *work = plain
    kind = Kind(number)
    if kind is Kind.BATCH:
        payload = Packed(*payload)
    return Answer(kind, payload, dataset_state, failed, num_samples, work=Work(*work))
