"""The worker process: receive indices, fetch, collate into a slot, reply.

All code here runs in the worker. A worker communicates only with the parent, through one pipe:

    parent -> worker   Begin(epoch, ...), and then Fetch(slot, ..., index) for each batch
    worker -> parent   Reply(kind, ...) [+ the descriptor of new slot memory], one for each Fetch

The steps at the start come in torch's order (torch/utils/data/_utils/worker.py), so that random streams and
`get_worker_info()` are the same as torch's. Rules:

1. Messages of the parent have ascending numbers, and a reply has the number of its Fetch. If a message
   arrives a second time, the worker drops it.
2. Every Fetch gets a reply: if a batch cannot be sent, an error that is short enough for the pipe.
3. A worker exits when the parent hangs up or dies.
4. The parent's signal handlers never run in a worker.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data._utils import worker as torch_worker

from fastload.batch.fetch import Fetcher
from fastload.batch.iterable_state import LOST, IterableState
from fastload.batch.packing import Packed, pack
from fastload.batch.stacking import install_slot_rule
from fastload.errors import add_note
from fastload.memory.lease import Arena, Memory
from fastload.memory.segment import Segment, populate
from fastload.rng import seeding
from fastload.rng.sample_rng import SampleRng
from fastload.system.freed_memory import keep_freed_memory
from fastload.system.limits import too_many_files
from fastload.system.sent_error import SentError
from fastload.workers.tally import Meter, Work

if TYPE_CHECKING:
    from fastload.batch.failed_sample import FailedSample
    from fastload.batch.replacing import BatchId
    from fastload.rng.sample_streams import StreamOrigin
    from fastload.workers.channel import Channel, ChannelEnd, Received
    from fastload.workers.job import Job, PickledJob


class Fetch(NamedTuple):
    """Parent to worker: fetch the batch of ``index`` into ``slot``."""

    began_at: int  # the number of the message that began its epoch
    slot: int
    has_memory: bool  # False: the worker must not use its memory for this slot again
    num_slots: int  # the worker frees the memory of slots from this number on
    index: Any
    origin: StreamOrigin | None
    batch_id: BatchId | None

    def to_plain(self) -> tuple[Any, ...]:
        """This message as built-in types, which pickle faster: it is sent for each batch."""
        return tuple(self)


class Begin(NamedTuple):
    """Parent to worker: an epoch begins; iterable datasets start over, or resume from the state."""

    epoch: int | None  # for datasets that have a set_epoch(); None: they know it, or the user set none
    dataset_state: IterableState | None  # from which its copy of the dataset continues; None: it has none


class Kind(enum.IntEnum):
    """The kind of a reply."""

    BATCH = 0
    ERROR = 1  # error: a SentError
    ENDED = 2  # the worker's share of an iterable dataset is used up


class Reply(NamedTuple):
    """Worker to parent: the answer to one Fetch."""

    kind: Kind
    packed: Packed | None = None
    error: SentError | None = None
    dataset_state: IterableState | None = None  # of the worker's copy of the dataset, after this batch
    failed: tuple[FailedSample, ...] = ()  # samples that were replaced
    work: Work = Work()  # of the worker since its previous reply

    def to_plain(self) -> tuple[Any, ...]:
        """This message as built-in types, which pickle faster: it is sent for each batch."""
        packed = None if self.packed is None else self.packed.to_plain()
        return int(self.kind), packed, self.error, self.dataset_state, self.failed, *self.work

    @classmethod
    def of_plain(cls, plain: tuple[Any, ...]) -> Reply:
        """Undo `to_plain`."""
        kind, packed, error, dataset_state, failed, *work = plain
        packed = None if packed is None else Packed.of_plain(packed)
        return cls(Kind(kind), packed, error, dataset_state, failed, Work(*work))


@dataclass
class Setup:
    """The arguments with which one worker is started."""

    worker_id: int
    job: Job | PickledJob
    end: ChannelEnd
    parent_pid: int
    inherited: list[Channel]  # the parent's ends, which a forked worker must close
    signal_mask: set[Any]  # the signals that it blocks once it has its own handlers: those of its parent


def main(setup: Setup) -> None:
    """Run the worker from start to end."""
    try:
        drop_signal_handlers()
        signal.pthread_sigmask(signal.SIG_SETMASK, setup.signal_mask)
        for channel in setup.inherited:
            channel.abandon()
        channel = setup.end.open()
        leave_with(setup.parent_pid)
        _Worker(setup, channel).serve()
    except KeyboardInterrupt:
        pass  # the parent gets the signal too, and raises
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent hung up while we were replying


def drop_signal_handlers() -> None:
    """Remove the signal handlers that a fork copied from the parent; signals then act as in a new process."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, _SIGNALS_OF_A_WORKER.get(number, signal.SIG_DFL))


# Batch systems send these to every process of a job. If the parent handles them, a worker must not die.
_SIGNALS_OF_A_WORKER: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    # Windows lacks these three.
    **{
        getattr(signal, name): signal.SIG_IGN
        for name in ("SIGHUP", "SIGUSR1", "SIGUSR2")
        if hasattr(signal, name)
    },
}


def leave_with(parent_pid: int) -> None:
    """End this process as soon as the parent is gone, even if this process is busy.

    PR_SET_PDEATHSIG would watch the thread that forked; a pidfd watches the whole process.
    """
    try:
        pidfd = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="fastload-parent-watch", daemon=True).start()


class _Worker:
    """One worker's state: its dataset, its slots, its fetcher."""

    def __init__(self, setup: Setup, channel: Channel) -> None:
        self._id = setup.worker_id
        self._channel = channel
        self._slots: dict[int, Memory] = {}
        self._arena = Arena(self._make_memory)
        self._new_segment: Segment | None = None
        self._fetcher: Fetcher | None = None
        self._keeps_states = False  # whether each reply has the state of the dataset
        self._init_error: SentError | None = None
        self._job: Job | None = None
        self._last_number = -1  # the number of the last message received
        self._began_at = 0  # the number of the last `Begin`
        self._unread = ""  # why the last message that could not be read could not
        self._last_announced = -1  # the number of the last message whose samples the dataset knows of
        try:
            be_quiet()
            self._job = job = setup.job.load()
            keep_freed_memory(job.num_workers)
            seed = seeding.seed_libraries(job.base_seed, self._id)
            # torch documents get_worker_info(), and MONAI, timm and others call torch's own function.
            torch_worker._worker_info = torch_worker.WorkerInfo(
                id=self._id, num_workers=job.num_workers, seed=seed, dataset=job.dataset
            )
            install_slot_rule()
            if job.seed_pipelines:
                seeding.seed_pipelines(job.dataset, seed, job.collate_fn)
            if job.worker_init_fn is not None:
                job.worker_init_fn(self._id)
        except Exception:  # noqa: BLE001  # it is sent to the parent as the answer to every task
            self._init_error = self._sent_error(AT_START)
        self._meter = Meter()

    def serve(self) -> None:
        """Answer messages until the parent hangs up."""
        while (received := self._next_message()) is not None:
            if self._channel.is_hung_up():
                return  # nobody waits for more batches
            number = received.number
            message = self._read(received)
            self._channel.take_out()
            if number <= self._last_number:
                continue  # the parent was interrupted while sending this message, and sent it again
            self._last_number = number
            if isinstance(message, str):
                self._unread = message
                self._send(number, self._text_reply(f"the index {message}"))
            elif isinstance(message, Fetch):
                self._answer(number, message)
            else:
                self._began_at = number
                self._begin_epoch(message)

    def _next_message(self) -> Received | None:
        since_ns = time.perf_counter_ns()
        received = self._channel.peek()
        self._meter.waited(since_ns)
        return received

    def _read(self, received: Received) -> Fetch | Begin | str:
        """The message, or the reason why it cannot be read."""
        if received.is_cut:
            return f"did not arrive in the worker, {too_many_files()}"
        try:
            message = received.load()
        except Exception as error:  # noqa: BLE001  # indices may be the user's objects
            return f"could not be unpickled in the worker: {error!r}"
        return message if isinstance(message, Begin) else Fetch(*message)

    def _begin_epoch(self, message: Begin) -> None:
        epoch = message.epoch
        if self._job is None or self._init_error is not None:
            return
        try:
            if epoch is not None and callable(getattr(self._job.dataset, "set_epoch", None)):
                self._job.dataset.set_epoch(epoch)
            if message.dataset_state is not None:
                _expect_known(message.dataset_state)
            self._make_fetcher(self._job, message.dataset_state)
        except Exception:  # noqa: BLE001  # as above
            self._init_error = self._sent_error(AT_START)

    def _make_fetcher(self, job: Job, dataset_state: IterableState | None) -> None:
        self._keeps_states = dataset_state is not None
        sample_rng = None
        if job.seeds_samples:
            sample_rng = SampleRng(
                job.dataset, job.collate_fn, with_pipelines=job.seed_pipelines, is_guest=False
            )
        self._fetcher = Fetcher(
            job,
            job.dataset,
            self._arena,
            in_worker=True,
            sample_rng=sample_rng,
            dataset_state=dataset_state,
            worker_id=self._id,
        )

    def _answer(self, number: int, message: Fetch) -> None:
        self._begin(message)
        if message.began_at != self._began_at:
            reply = self._text_reply(f"the message that began the epoch {self._unread}")
        elif self._init_error is not None or self._fetcher is None:
            reply = Reply(Kind.ERROR, error=self._init_error)
        else:
            reply = self._fetch(message, self._fetcher)
            if self._keeps_states:
                reply = self._with_state(reply, self._fetcher)
        num_samples = 0 if self._fetcher is None else self._fetcher.num_samples
        reply = reply._replace(work=self._meter.work(num_samples))
        segment, self._new_segment = self._new_segment, None
        memory = None if reply.packed is None else self._arena.memory
        is_sent = self._send(number, reply, None if segment is None or memory is None else segment.fd)
        if is_sent and memory is not None:
            # Only after the reply was sent: without it the parent keeps the slot's old memory, and the worker
            # must do so too.
            self._slots[message.slot] = memory
        if segment is not None:
            segment.close()  # the mapping stays
        self._arena.begin(None)

    def _text_reply(self, text: str) -> Reply:
        return Reply(Kind.ERROR, error=SentError.of_text(text, _where(self._id)))

    def _send(self, number: int, reply: Reply, fd: int | None = None) -> bool:
        """Send a reply; if it cannot be sent, send an error instead and return False."""
        try:
            self._channel.send(reply.to_plain(), fd, number=number)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # noqa: BLE001  # no memory or descriptors left, or an index cannot be pickled
            state = None if reply.dataset_state is None else LOST
            short = Reply(Kind.ERROR, error=short_error(reply, error, self._id), dataset_state=state)
            self._channel.send(short.to_plain(), number=number)
            return False
        return True

    def _begin(self, message: Fetch) -> None:
        for number in [number for number in self._slots if number >= message.num_slots]:
            del self._slots[number]
        memory = self._slots.get(message.slot) if message.has_memory else None
        if memory is not None and memory.is_leased:
            memory = None  # user code in this process still holds the slot's last batch: keep it unchanged
        self._new_segment = None
        self._arena.begin(memory)

    def _announce(self, message: Fetch, fetcher: Fetcher) -> None:
        """Tell a dataset that reads ahead about this batch, and those whose messages are here already."""
        fetcher.announce(message.index)
        for received in self._channel.waiting():
            if received.number > self._last_announced:
                self._last_announced = received.number
                coming = self._read(received)
                if isinstance(coming, Fetch):
                    fetcher.announce(coming.index)

    def _fetch(self, message: Fetch, fetcher: Fetcher) -> Reply:
        try:
            if fetcher.reads_ahead:
                self._announce(message, fetcher)
            batch = fetcher.fetch(message.index, message.origin, message.batch_id)
            failed = () if fetcher.replacer is None else tuple(fetcher.replacer.failed)
            return Reply(Kind.BATCH, pack(batch, self._arena), failed=failed)
        except StopIteration as error:
            if self._job is not None and self._job.is_iterable:
                return Reply(Kind.ENDED)
            return Reply(Kind.ERROR, error=self._sent_error(fetcher.place_of_error(message.index, error)))
        except Exception as error:  # noqa: BLE001  # every error of user code is sent to the parent
            return Reply(Kind.ERROR, error=self._sent_error(fetcher.place_of_error(message.index, error)))

    def _with_state(self, reply: Reply, fetcher: Fetcher) -> Reply:
        try:
            return reply._replace(dataset_state=fetcher.dataset_state())
        except Exception:  # noqa: BLE001  # fails no batch; raised when the loader's state is requested
            return reply._replace(dataset_state=IterableState("unknown", error=self._sent_error()))

    def _make_memory(self, nbytes: int) -> Memory:
        segment = Segment.create(nbytes, name="fastload-slot")
        try:
            mapping = segment.map(writable=True)
            populate(mapping)
        except BaseException:
            segment.close()  # frees the pages that were allocated
            raise
        if self._new_segment is not None:
            self._new_segment.close()
        self._new_segment = segment
        return Memory(mapping, shared=True)

    def _sent_error(self, place: str = "") -> SentError:
        """The current exception, ready for a reply."""
        return SentError.current(_where(self._id), place)


AT_START = "at its start"  # the place of an error that is the answer to every task


def _expect_known(state: IterableState) -> None:
    try:
        state.raise_error()
    except Exception as error:
        add_note(
            error,
            "fastload: the worker is a new one instead of one that died, and its copy of the dataset cannot "
            "go on, because the state after the last batch is missing; start a new iterator, or set "
            "restart_workers=0",
        )
        raise


_SHORT_BYTES = 3800  # leaves room in the pipe's message for the rest of the reply


def short_error(reply: Reply, error: Exception, worker_id: int) -> SentError:
    """The error to send instead of a reply that could not be sent; short enough for the pipe.

    Args:
        reply: The reply that could not be sent.
        error: The error of sending it.
        worker_id: The worker that replies.
    """
    if reply.error is None:
        reason = str(error) or repr(error)  # a MemoryError raised by the interpreter has no text
        return SentError.of_text(f"the batch could not be sent: {reason}", _where(worker_id))
    return reply.error.shortened(_SHORT_BYTES, _where(worker_id))


def _where(worker_id: int) -> str:
    return f"in DataLoader worker process {worker_id}"


def be_quiet() -> None:
    """Use one thread in this worker: thread pools that compete for busy cores are up to ten times slower."""
    torch.multiprocessing._set_thread_name("pt_data_worker")
    torch.set_num_threads(1)
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # else its import looks for a newer version on the network
    os.environ.setdefault("OPENCV_FOR_THREADS_NUM", "1")  # in case OpenCV is imported later
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(0)
    for file in (sys.stderr, sys.__stderr__):
        if file is None or faulthandler.is_enabled():
            continue
        # A user's or a notebook's replacement of stderr may be closed or have no descriptor.
        with contextlib.suppress(AttributeError, OSError, ValueError, RuntimeError):
            faulthandler.enable(file)
