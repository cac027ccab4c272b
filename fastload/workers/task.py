"""One batch on its way through a worker process or thread: the request and the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastload.batch.failed_sample import FailedSample
    from fastload.batch.replacing import Place
    from fastload.batch.stream_state import StreamState
    from fastload.memory.ring import Slot
    from fastload.rng.draws import Draw
    from fastload.workers.worker import Kind, Reply


class Task:
    """A task that a worker has been given, or will be as soon as a slot is free.

    Args:
        number: Of the batch in its epoch.
        index: What the sampler gave.
        draw: What the random streams of its samples follow from.
        at: What replacements of its samples follow from.

    Attributes:
        serial: Of the message to a worker process; ascends over all epochs. 0 until it is sent.
        slot: Where a worker process writes the batch.
        reply: What a worker process has answered.
        lease: Keeps the slot's memory while the batch is opened.
        kind: What `payload` is; None until the answer is there and opened.
        payload: The batch, or the error, until the caller takes it.
        place: Of the error, in words; empty where the worker did not say.
        notes: To be added to the error.
        failed: Samples that could not be read and were replaced.
        dataset_state: Of the worker's stream, after this task.
        is_stale: Whether it belongs to an epoch that was left; its answer is dropped.
    """

    __slots__ = (
        "at",
        "dataset_state",
        "draw",
        "failed",
        "index",
        "is_stale",
        "kind",
        "lease",
        "notes",
        "number",
        "payload",
        "place",
        "reply",
        "serial",
        "slot",
    )

    def __init__(self, number: int, index: Any, draw: Draw | None, at: Place | None) -> None:
        self.number = number
        self.index = index
        self.draw = draw
        self.at = at
        self.failed: tuple[FailedSample, ...] = ()
        self.serial = 0
        self.slot: Slot | None = None
        self.reply: Reply | None = None
        self.lease: Any = None
        self.kind: Kind | None = None
        self.payload: Any = None
        self.place = ""
        self.notes: tuple[str, ...] = ()
        self.dataset_state: StreamState | None = None
        self.is_stale = False
