"""What the consumer's process tells a worker process or thread: make this batch, or begin an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fastload.batch.iterable_state import IterableState
    from fastload.batch.replacing import BatchId
    from fastload.memory.ring import Slot
    from fastload.rng.sample_streams import StreamOrigin
    from fastload.workers.core import Answer


@dataclass(slots=True, eq=False)
class Task:
    """The request for one batch, and its answer.

    Attributes:
        number: The number of the batch in its epoch.
        index: The index, or list of indices, from the sampler.
        origin: The origin of the random streams of its samples.
        batch_id: With `on_error`: identifies the batch, so that replacements depend on it.
        answer: None until the worker has answered.
        is_stale: Whether it belongs to an abandoned epoch; its answer is dropped.
        serial: The number of the message to a worker process; ascends over all epochs.
        slot: The slot into which a worker process writes the batch.
    """

    number: int
    index: Any
    origin: StreamOrigin | None = None
    batch_id: BatchId | None = None
    answer: Answer | None = None
    is_stale: bool = False
    serial: int = 0
    slot: Slot | None = None


class Begin(NamedTuple):
    """An epoch begins; the arguments are those of `WorkerCore.begin_epoch`."""

    epoch: int | None
    dataset_state: IterableState | None
