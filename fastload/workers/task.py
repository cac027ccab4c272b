"""The task class: the request for one batch to a worker process or thread, and the worker's answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastload.batch.failed_sample import FailedSample
    from fastload.batch.iterable_state import IterableState
    from fastload.batch.replacing import BatchId
    from fastload.memory.ring import Slot
    from fastload.rng.sample_streams import StreamOrigin
    from fastload.workers.worker import Kind, Reply


class Task:
    """The request for one batch, and its answer. A worker process gets it as soon as a slot is free.

    Args:
        number: The number of the batch in its epoch.
        index: The index, or list of indices, from the sampler.
        origin: The origin of the random streams of its samples.
        batch_id: With `on_error`: identifies the batch, so that replacements follow from it.

    Attributes:
        serial: The number of the message to a worker process; ascends over all epochs. 0 until it is sent.
        slot: The slot into which a worker process writes the batch.
        reply: The answer of a worker process.
        lease: Keeps the slot's memory while the batch is opened.
        kind: The kind of `payload`; None until the answer has arrived and was opened.
        payload: The batch, or the error as a SentError, until the caller takes it.
        failed: Samples that could not be read and were replaced.
        dataset_state: The state of the worker's iterable dataset after this task.
        size: The samples of the batch, and the bytes of its tensors and arrays (None: unknown).
        is_stale: Whether it belongs to an abandoned epoch; its answer is dropped.
    """

    __slots__ = (
        "batch_id",
        "dataset_state",
        "failed",
        "index",
        "is_stale",
        "kind",
        "lease",
        "number",
        "origin",
        "payload",
        "reply",
        "serial",
        "size",
        "slot",
    )

    def __init__(
        self, number: int, index: Any, origin: StreamOrigin | None, batch_id: BatchId | None
    ) -> None:
        self.number = number
        self.index = index
        self.origin = origin
        self.batch_id = batch_id
        self.failed: tuple[FailedSample, ...] = ()
        self.serial = 0
        self.slot: Slot | None = None
        self.reply: Reply | None = None
        self.lease: Any = None
        self.kind: Kind | None = None
        self.payload: Any = None
        self.dataset_state: IterableState | None = None
        self.size: tuple[int, int | None] = (0, 0)
        self.is_stale = False
