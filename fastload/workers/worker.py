"""The worker process: a `BatchMaker` that gets indices through a pipe and writes batches to shared memory.

All code here runs in the worker. A worker communicates only with the parent, through one pipe:

    parent -> worker   Begin(epoch, ...), and then Fetch(slot, ..., index) for each batch
    worker -> parent   the answer [+ the descriptor of new slot memory], one for each Fetch

Rules:

1. A reply has the number of its Fetch.
2. Every Fetch gets a reply: if a batch cannot be sent, an error short enough for the pipe.
3. A worker exits when the parent hangs up or dies.
4. The parent's signal handlers never run in a worker.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from fastload.batch.dataset_state import LOST
from fastload.batch.packing import Packed, pack
from fastload.memory.lease import BumpAllocator, Memory
from fastload.memory.segment import Segment, create_slot_segment
from fastload.system.limits import too_many_files
from fastload.system.linux import open_process
from fastload.system.remote_error import RemoteError
from fastload.system.worker_memory import freeze_inherited
from fastload.workers.batch_maker import BatchMaker
from fastload.workers.channel import Channel
from fastload.workers.messages import INTERRUPTED, Answer, Begin, Fetch, Kind, to_plain

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from fastload.workers.channel import Received
    from fastload.workers.worker_spec import Job, PickledJob


def main(
    worker_id: int,
    job: Job | PickledJob,
    end: socket.socket,
    parent_pid: int,
    inherited: list[Channel],
    signal_mask: set[Any],
) -> None:
    """Run the worker from start to end.

    Args:
        worker_id: Its number.
        job: Its job.
        end: Its end of the pipe.
        parent_pid: Its parent.
        inherited: The parent's ends, which a forked worker must close.
        signal_mask: The signals that it blocks once it has its own handlers: those of its parent.
    """
    try:
        freeze_inherited()
        drop_signal_handlers()
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        for channel in inherited:
            channel.abandon()
        channel = Channel(end, blocking=True)
        leave_with(parent_pid)
        _Worker(worker_id, job, channel).serve()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None  # the parent gets the signal too, and raises
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent hung up while we were replying


def drop_signal_handlers() -> None:
    """Remove the signal handlers that a fork copied from the parent; signals then act as in a new process.

    Batch systems send some to every process of a job: if the parent handles them, a worker must not die.
    """
    signal.set_wakeup_fd(-1)
    ignored = {getattr(signal, name, None) for name in ("SIGHUP", "SIGUSR1", "SIGUSR2")}  # not on Windows
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            action = signal.SIG_IGN if number in ignored else signal.SIG_DFL
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else action)


def leave_with(parent_pid: int) -> None:
    """Exit as soon as the parent is gone, even if this process is busy.

    PR_SET_PDEATHSIG would watch the thread that forked; a pidfd watches the whole process.
    """
    try:
        pidfd = open_process(parent_pid)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="fastload-parent-watch", daemon=True).start()


class _Worker:
    """The transport of one worker: its pipe and its slots."""

    def __init__(self, worker_id: int, job: Job | PickledJob, channel: Channel) -> None:
        self._channel = channel
        self._messages: deque[tuple[int, Begin | Fetch]] = deque()  # that have arrived, with their numbers
        self._slots: dict[int, Memory] = {}
        self._arena = BumpAllocator(self._make_memory)
        self._new_segment: Segment | None = None
        self._core = BatchMaker(worker_id, job, self._arena, self._pack)

    def _pack(self, batch: Any) -> Packed:
        return pack(batch, self._arena)

    def serve(self) -> None:
        """Answer messages until the parent hangs up."""
        self._core.begin()
        while (numbered := self._next_message()) is not None:
            if self._channel.is_hung_up():
                return  # nothing waits for more batches
            number, message = numbered
            if isinstance(message, Fetch):
                self._answer(number, message)
            else:
                self._core.begin_epoch(message.epoch, message.dataset_state)

    def _next_message(self) -> tuple[int, Begin | Fetch] | None:
        if not self._messages:
            since_ns = time.perf_counter_ns()
            received = self._channel.receive()
            self._core.meter.waited(since_ns)
            if received is None:
                return None
            self._read(received)
        return self._messages.popleft()

    def _read(self, received: Received) -> Begin | Fetch:
        """Note and return a message; an error of it ends this process, with a traceback on stderr."""
        if received.is_cut:
            raise OSError(f"a message did not arrive in the worker: {too_many_files()}")
        loaded = received.load()
        message = loaded if isinstance(loaded, Begin) else Fetch(*loaded)
        received.close()
        self._messages.append((received.number, message))
        return message

    def _coming(self) -> Iterator[Any]:
        """The indices of batches whose messages have arrived since the last call."""
        while (received := self._channel.receive(waits=False)) is not None:
            message = self._read(received)
            if isinstance(message, Fetch):
                yield message.index

    def _answer(self, number: int, message: Fetch) -> None:
        self._take_memory(message)
        answer = self._core.answer(message.index, message.key, self._coming())
        segment, self._new_segment = self._new_segment, None
        memory = self._arena.memory if answer.kind is Kind.BATCH else None
        is_sent = self._send(number, answer, None if segment is None or memory is None else segment.fd)
        if is_sent and memory is not None:
            # Only after the reply was sent: without it the parent keeps the slot's old memory, and so must
            # the worker.
            self._slots[message.slot] = memory
        if segment is not None:
            segment.close()  # the mapping stays
        self._arena.begin()

    def _take_memory(self, message: Fetch) -> None:
        for number in [number for number in self._slots if number >= message.num_slots]:
            del self._slots[number]
        memory = self._slots.get(message.slot) if message.has_memory else None
        if memory is not None and memory.is_leased:
            memory = None  # user code in this process still holds the slot's last batch: keep it unchanged
        self._new_segment = None
        self._arena.begin(memory)

    def _make_memory(self, nbytes: int) -> Memory:
        segment, mapping = create_slot_segment(nbytes)
        if self._new_segment is not None:
            self._new_segment.close()
        self._new_segment = segment
        return Memory(mapping, shared=True)

    def _send(self, number: int, answer: Answer, fd: int | None = None) -> bool:
        """Send an answer; if it cannot be sent, send an error instead and return False."""
        try:
            self._channel.send(to_plain(answer), fd, number=number)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # noqa: BLE001  # no memory or descriptors left, or an index cannot be pickled
            state = None if answer.dataset_state is None else LOST
            short = Answer(Kind.ERROR, short_error(answer, error, self._core.where), state)
            self._channel.send(to_plain(short), number=number)
            return False
        return True


def short_error(answer: Answer, error: Exception, where: str) -> RemoteError:
    """The error to send, short enough for the pipe, if ``error`` kept an answer from being sent."""
    if answer.kind is not Kind.ERROR:
        return RemoteError.of_text(f"the batch could not be sent: {error!r}", where)
    short: RemoteError = answer.payload.shortened(3800, where)  # leaves room for the rest of the reply
    return short
