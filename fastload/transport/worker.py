"""The worker process: receive indices, fetch, collate into a slot, reply.

Everything here runs in the worker. It talks to the parent through one pipe and to nobody else:

    parent -> worker   Fetch(task, slot, ..., index) | Restart(epoch)
    worker -> parent   Reply(task, kind, ...) [+ the descriptor of new slot memory], one for each Fetch

The order of what happens at start is torch's (torch/utils/data/_utils/worker.py), so that random streams
and `get_worker_info()` are torch's too. A worker leaves when the parent hangs up or dies.
"""

from __future__ import annotations

import enum
import faulthandler
import os
import pickle
import select
import signal
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker

from fastload.rng import seeding
from fastload.rng.sample_rng import SampleRng
from fastload.transport.collate import stack_into
from fastload.transport.fetch import Fetcher
from fastload.transport.memory import Arena, Memory
from fastload.transport.packing import Packed, pack
from fastload.transport.segment import Segment, populate
from fastload.transport.stream_state import StreamState

if TYPE_CHECKING:
    from fastload.rng.draws import Draw
    from fastload.transport.channel import Channel, ChannelEnd
    from fastload.transport.job import Job, PickledJob


class Fetch(NamedTuple):
    """Parent to worker: fetch the batch of ``index`` into ``slot``."""

    task: int
    slot: int
    has_memory: bool  # False: whatever memory the worker has for this slot is no longer to be used
    num_slots: int  # memory of slots from this number on is given up
    index: Any
    draw: Draw | None


class Restart(NamedTuple):
    """Parent to worker: a new epoch of a persistent worker begins; iterable datasets start anew."""

    epoch: int | None  # what the user set, for datasets that have a set_epoch()
    dataset_state: StreamState | None  # where a stream goes on; None: at its beginning


class Kind(enum.IntEnum):
    """What a reply brings."""

    BATCH = 0
    ERROR = 1  # payload: a pickled ExceptionWrapper
    ENDED = 2  # the worker's share of an iterable dataset is used up


class Reply(NamedTuple):
    """Worker to parent: the answer to one Fetch."""

    task: int
    kind: Kind
    packed: Packed | None
    error: bytes | None
    dataset_state: StreamState | None = None  # of a stream that can tell


@dataclass
class Setup:
    """What one worker is started with."""

    worker_id: int
    job: Job | PickledJob
    end: ChannelEnd
    parent_pid: int
    inherited: list[Channel]  # the parent's ends, which a forked worker must not keep


def main(setup: Setup) -> None:
    """The worker's whole life."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held back by the parent until here
        for channel in setup.inherited:
            channel.abandon()
        channel = setup.end.open()
        _leave_with(setup.parent_pid)
        _Worker(setup, channel).serve()
    except KeyboardInterrupt:
        pass  # the parent gets one too, and says so
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent hung up while we were replying


def _leave_with(parent_pid: int) -> None:
    """End this process as soon as the parent is gone, however busy it is.

    PR_SET_PDEATHSIG would follow the thread that forked, not the process; a pidfd follows the process.
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
        self._init_error: bytes | None = None
        self._job: Job | None = None
        _be_quiet()
        try:
            self._job = job = setup.job.load()
            seed = seeding.seed_libraries(job.base_seed, self._id)
            # torch documents this function, and MONAI, timm and others read the real thing.
            torch_worker._worker_info = torch_worker.WorkerInfo(
                id=self._id, num_workers=job.num_workers, seed=seed, dataset=job.dataset
            )
            stack_into(self._arena)
            if job.seed_pipelines:
                seeding.seed_pipelines(job.dataset, seed)
            if job.worker_init_fn is not None:
                job.worker_init_fn(self._id)
            states = job.dataset_states
            self._make_fetcher(job, None if states is None else states[self._id])
        except Exception:  # noqa: BLE001  # it is sent to the parent as the answer to every task
            self._init_error = self._wrap_error()

    def serve(self) -> None:
        """Answer until the parent hangs up."""
        while (received := self._channel.receive()) is not None:
            message, _ = received
            if self._channel.is_hung_up():
                return  # do not fetch what nobody waits for
            if isinstance(message, Fetch):
                self._answer(message)
            else:
                self._restart(message)

    def _restart(self, message: Restart) -> None:
        epoch = message.epoch
        if self._job is None or self._init_error is not None:
            return
        try:
            if epoch is not None and callable(getattr(self._job.dataset, "set_epoch", None)):
                self._job.dataset.set_epoch(epoch)
            self._make_fetcher(self._job, message.dataset_state)
        except Exception:  # noqa: BLE001  # as above
            self._init_error = self._wrap_error()

    def _make_fetcher(self, job: Job, dataset_state: StreamState | None) -> None:
        sample_rng = None
        if job.seeds_samples:
            sample_rng = SampleRng(job.dataset, with_pipelines=job.seed_pipelines, is_guest=False)
        self._fetcher = Fetcher(
            job,
            job.dataset,
            self._arena,
            in_worker=True,
            sample_rng=sample_rng,
            dataset_state=dataset_state,
        )

    def _answer(self, message: Fetch) -> None:
        self._begin(message)
        if self._init_error is not None or self._fetcher is None:
            reply = Reply(message.task, Kind.ERROR, None, self._init_error)
        else:
            reply = self._fetch(message, self._fetcher)
            if self._job is not None and self._job.dataset_states is not None:
                reply = self._with_state(reply, self._fetcher)
        segment, self._new_segment = self._new_segment, None
        memory = self._arena.memory
        if reply.packed is None or memory is None:
            segment_fd = None
        else:
            self._slots[message.slot] = memory
            segment_fd = None if segment is None else segment.fd
        self._channel.send(reply, segment_fd)
        if segment is not None:
            segment.close()  # the mapping stays
        self._arena.begin(None)

    def _begin(self, message: Fetch) -> None:
        for number in [number for number in self._slots if number >= message.num_slots]:
            del self._slots[number]
        memory = self._slots.get(message.slot) if message.has_memory else None
        if memory is not None and memory.is_leased:
            memory = None  # user code in this process still holds what the slot held: leave that alone
        self._new_segment = None
        self._arena.begin(memory)

    def _fetch(self, message: Fetch, fetcher: Fetcher) -> Reply:
        try:
            batch = fetcher.fetch(message.index, message.draw)
            return Reply(message.task, Kind.BATCH, pack(batch, self._arena), None)
        except StopIteration:
            if self._job is not None and self._job.is_iterable:
                return Reply(message.task, Kind.ENDED, None, None)
            return Reply(message.task, Kind.ERROR, None, self._wrap_error())
        except Exception:  # noqa: BLE001  # every error of the user's code goes to the parent
            return Reply(message.task, Kind.ERROR, None, self._wrap_error())

    def _with_state(self, reply: Reply, fetcher: Fetcher) -> Reply:
        try:
            return reply._replace(dataset_state=fetcher.dataset_state())
        except Exception:  # noqa: BLE001  # it costs no batch: it is raised when the loader's state is asked for
            return reply._replace(dataset_state=StreamState("unknown", error=self._wrap_error()))

    def _make_memory(self, nbytes: int) -> Memory:
        segment = Segment.create(nbytes, name="fastload-slot")
        try:
            mapping = segment.map(writable=True)
            populate(mapping)
        except BaseException:
            segment.close()  # or it would keep what pages there were
            raise
        if self._new_segment is not None:
            self._new_segment.close()
        self._new_segment = segment
        return Memory(mapping, shared=True)

    def _wrap_error(self) -> bytes:
        """The current exception as torch sends it, or its text if it cannot be pickled."""
        wrapper = ExceptionWrapper(where=f"in DataLoader worker process {self._id}")
        try:
            data = pickle.dumps(wrapper)
            pickle.loads(data)
        except Exception as error:  # noqa: BLE001  # user-defined pickling may raise anything
            text = f"{wrapper.exc_msg}\n(the exception itself could not be pickled: {error!r})"
            fallback = ExceptionWrapper((RuntimeError, RuntimeError(text), None), wrapper.where)
            fallback.exc_msg = text
            data = pickle.dumps(fallback)
        return data


def _be_quiet() -> None:
    """One thread for this worker: pools that fight for busy cores cost up to ten times the work."""
    torch.multiprocessing._set_thread_name("pt_data_worker")
    torch.set_num_threads(1)
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # its import would ask the network for a newer version
    os.environ.setdefault("OPENCV_FOR_THREADS_NUM", "1")  # for an import of OpenCV later on
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(0)
    if not faulthandler.is_enabled() and sys.stderr is not None:
        faulthandler.enable()
