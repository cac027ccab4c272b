"""The worker process: a `BatchMaker` that gets indices through a pipe and writes batches to shared memory.

All code here runs in the worker. A worker communicates only with the parent, through one pipe:

    parent -> worker   BeginEpoch(epoch, ...), and then FetchRequest(slot, ..., index) for each batch
    worker -> parent   BatchReply [+ the descriptor of new slot memory], one for each FetchRequest

Rules:

1. Every request gets a reply, in order: if a batch cannot be sent, an error short enough for the pipe.
2. A worker exits when the parent hangs up or dies.
3. The parent's signal handlers never run in a worker, and Ctrl-C is the parent's alone.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from fastload.batch.packing import Packed, pack
from fastload.memory.lease import BumpAllocator, Memory
from fastload.memory.segment import Segment, create_slot_segment
from fastload.system.child_process import enter_child
from fastload.system.remote_error import RemoteError
from fastload.system.worker_memory import freeze_inherited
from fastload.workers.batch_maker import BatchMaker
from fastload.workers.channel import Channel
from fastload.workers.messages import BatchReply, BeginEpoch, FetchRequest, ReplyKind

_IDLE_WAIT_S = 0.001  # until what is to be done when idle is tried again

if TYPE_CHECKING:
    import socket

    from fastload.batch.plan import Plan
    from fastload.workers.sent_plan import PickledPlan


def main(
    worker_id: int,
    plan: Plan | PickledPlan,
    end: socket.socket,
    parent_pid: int,
    inherited: list[Channel],
    signal_mask: set[Any],
) -> None:
    """Run the worker from start to end.

    Args:
        worker_id: Its number.
        plan: What it runs.
        end: Its end of the pipe.
        parent_pid: Its parent.
        inherited: The parent's ends, which a forked worker must close.
        signal_mask: The signals that it blocks once it has its own handlers: those of its parent.
    """
    try:
        freeze_inherited()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # terminals and notebooks send Ctrl-C to workers, too
        enter_child(parent_pid, signal_mask)
        for channel in inherited:
            channel.abandon()
        channel = Channel(end, blocking=True)
        _Worker(worker_id, plan, channel).serve()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent hung up during a reply


class _Worker:
    """The transport of one worker: its pipe and its slots."""

    def __init__(self, worker_id: int, plan: Plan | PickledPlan, channel: Channel) -> None:
        self._channel = channel
        self._slots: dict[int, Memory] = {}
        self._allocator = BumpAllocator(self._make_memory)
        self._new_segment: Segment | None = None
        self._maker = BatchMaker(worker_id, plan.load, self._allocator, self._pack)

    def _pack(self, batch: Any) -> Packed:
        return pack(batch, self._allocator)

    def serve(self) -> None:
        """Reply to messages until the parent hangs up."""
        self._maker.begin()
        while (message := self._next_message()) is not None:
            if self._channel.is_hung_up():
                return  # nothing waits for more batches
            if isinstance(message, BeginEpoch):
                self._maker.begin_epoch(*message)
            else:
                self._reply(FetchRequest(*message))

    def _next_message(self) -> Any:
        """The next message, or None; an error of it ends this process, with a traceback on stderr."""
        while not self._channel.has_message() and self._maker.is_busy_when_idle():
            self._channel.has_message(_IDLE_WAIT_S)
        received = self._channel.receive()
        return None if received is None else received[0]

    def _reply(self, message: FetchRequest) -> None:
        self._take_memory(message)
        reply = self._maker.make(message.index, message.key)
        segment, self._new_segment = self._new_segment, None
        memory = self._allocator.memory if reply.kind is ReplyKind.BATCH else None
        fd = None if segment is None or memory is None else segment.fd
        is_sent = self._send(reply, fd)
        if is_sent and memory is not None:
            # Only after the reply was sent: without it the parent keeps the slot's old memory, and so must
            # the worker.
            self._slots[message.slot] = memory
        if segment is not None:
            segment.close()  # the mapping stays
        self._allocator.begin()

    def _take_memory(self, message: FetchRequest) -> None:
        for number in [number for number in self._slots if number >= message.num_slots]:
            del self._slots[number]
        memory = self._slots.get(message.slot) if message.has_memory else None
        if memory is not None and memory.is_leased:
            memory = None  # user code in this process still holds the slot's last batch: keep it unchanged
        self._new_segment = None
        self._allocator.begin(memory)

    def _make_memory(self, nbytes: int) -> Memory:
        segment, mapping = create_slot_segment(nbytes)
        if self._new_segment is not None:
            self._new_segment.close()
        self._new_segment = segment
        return Memory(mapping, shared=True)

    def _send(self, reply: BatchReply, fd: int | None) -> bool:
        """Send a reply; if it cannot be sent, send an error instead and return False."""
        try:
            self._channel.send(reply.to_plain(), fd)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # noqa: BLE001  # no memory or descriptors left, or an index cannot be pickled
            what, place = "batch", ""
            if reply.kind is ReplyKind.ERROR:
                what, place = "error of a batch", reply.payload.place
            text = f"the {what} could not be sent: {error!r}"
            short = BatchReply(ReplyKind.ERROR, RemoteError.of_text(text, self._maker.where, place))
            self._channel.send(short.to_plain())
            return False
        return True
