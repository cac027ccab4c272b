"""The work of one worker, independent of the transport: begin, begin an epoch, make batches.

`worker` (a process) and `threads` are transports: they call `begin` once, `begin_epoch` for each epoch and
`answer` for each index, in the worker, and take the answers away. Rules:

1. The steps at the start come in torch's order (torch/utils/data/_utils/worker.py). So random streams and
   `get_worker_info()` are the same as torch's.
2. Every index gets an answer. After an error at the start, this error is the answer to all of them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.utils.data._utils import worker as torch_worker

from fastload.batch.dataset_state import DatasetState
from fastload.batch.fetch import Fetcher
from fastload.batch.stacking import install_slot_rules
from fastload.cache.format.counts import counts
from fastload.rng import seeding
from fastload.rng.entry_points import set_worker_source
from fastload.rng.sample_rng import SampleSeeder
from fastload.rng.worker_info import WorkerInfo, work_as
from fastload.system.remote_error import RemoteError
from fastload.system.worker_memory import keep_freed_memory
from fastload.workers.messages import Answer, Kind, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fastload.memory.lease import BumpAllocator
    from fastload.rng.keys import BatchKey
    from fastload.workers.worker_spec import Job

AT_START = "at its start"  # the place of an error that is the answer to every task


class Loadable(Protocol):
    """A job, or the form in which a transport has sent it."""

    def load(self) -> Job:
        """The job."""


class Meter:
    """Measures the work of the calling thread, from its making on."""

    __slots__ = ("_hits", "_idle_ns", "_misses", "_since_ns")

    def __init__(self) -> None:
        self._idle_ns = 0
        self._since_ns = time.perf_counter_ns()  # of the previous answer
        self._hits, self._misses = counts.hits, counts.misses

    def waited(self, since_ns: int) -> None:
        """Record that the worker has waited for a task since ``since_ns`` (of `perf_counter_ns`)."""
        self._idle_ns += time.perf_counter_ns() - since_ns

    def work(self) -> Work:
        """The work since the last call."""
        before_ns, self._since_ns = self._since_ns, time.perf_counter_ns()
        idle_ns, self._idle_ns = self._idle_ns, 0
        hits, self._hits = self._hits, counts.hits
        misses, self._misses = self._misses, counts.misses
        busy_us = (self._since_ns - before_ns - idle_ns) // 1000
        return Work(busy_us, self._hits - hits, self._misses - misses)


class BatchMaker:
    """One worker: its dataset, its pipelines, its fetcher.

    Args:
        worker_id: 0 to num_workers - 1.
        job: Its job; a thread's has the thread's copies of the dataset and the collate_fn.
        arena: The memory of batches; the transport begins and ends it around each answer.
        finish: Called with each batch; returns the payload of its answer. Its errors are those of the batch.
            None: the batch itself.
        is_thread: Whether it is a thread, which leaves to its process what all threads share; else it has a
            process of its own, whose libraries it seeds.

    Attributes:
        where: The worker, as torch's errors name it.
        meter: Measures its work; the transport tells it how long it waited.
    """

    def __init__(
        self,
        worker_id: int,
        job: Loadable,
        arena: BumpAllocator,
        finish: Callable[[Any], Any] | None,
        *,
        is_thread: bool = False,
    ) -> None:
        self.where = f"in DataLoader worker {'thread' if is_thread else 'process'} {worker_id}"
        self.meter = Meter()
        self._id = worker_id
        self._job = job
        self._arena = arena
        self._finish = finish
        self._is_thread = is_thread
        # What ends a process must not end a thread silently.
        self._caught = BaseException if is_thread else Exception
        self._loaded: Job | None = None  # once the worker has begun
        self._fetcher: Fetcher | None = None
        self._keeps_states = False  # whether each answer has the state of the dataset
        self._error: RemoteError | None = None  # the answer to every index while there is no fetcher

    def begin(self) -> None:
        """Take the first steps, once, in the worker itself."""
        try:
            if not self._is_thread:
                _be_quiet()
            job = self._job.load()
            seed = job.base_seed + self._id
            if self._is_thread:  # torch's get_worker_info() is None here
                work_as(WorkerInfo(self._id, job.num_workers, seed, job.dataset, "thread"))
            else:
                self._take_process(job, seed)
            role: Literal["process", "thread"] = "thread" if self._is_thread else "process"
            streams = seeding.WorkerStreams(seed, role) if job.seed_albumentations else None
            set_worker_source(streams, is_thread=self._is_thread)
            if job.worker_init_fn is not None:
                job.worker_init_fn(self._id)
            self._loaded = job
        except self._caught:  # the answer to every index
            self._error = RemoteError.current(self.where, AT_START)
        self.meter = Meter()

    def _take_process(self, job: Job, seed: int) -> None:
        keep_freed_memory(job.num_workers)
        seeding.seed_libraries(job.base_seed, self._id)
        # torch documents get_worker_info(), and MONAI, timm and others call torch's own function.
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=self._id, num_workers=job.num_workers, seed=seed, dataset=job.dataset
        )
        install_slot_rules()

    def begin_epoch(self, epoch: int | None, dataset_state: DatasetState | None) -> None:
        """Begin an epoch: iterable datasets start over, or resume from the state.

        Args:
            epoch: For a dataset that has a set_epoch(); None: it knows it, or the user set none.
            dataset_state: From which the copy of the dataset continues; None: it has no state.
        """
        job = self._loaded
        if job is None:
            return
        self._fetcher = None
        try:
            if epoch is not None and callable(getattr(job.dataset, "set_epoch", None)):
                job.dataset.set_epoch(epoch)
            if dataset_state is not None:
                dataset_state.raise_error()  # of a worker that replaces a dead one
            self._keeps_states = dataset_state is not None
            self._fetcher = make_fetcher(
                job, self._arena, dataset_state, worker_id=self._id, is_thread=self._is_thread
            )
        except self._caught:
            self._error = RemoteError.current(self.where, AT_START)

    def answer(self, index: Any, key: BatchKey | None, coming: Iterable[Any] = ()) -> Answer:
        """Make the batch of ``index``.

        Args:
            index: The index, or list of indices, from the sampler.
            key: With `seeding="sample"`, `on_error` or a `batch_transform`: their draws depend on it.
            coming: The indices of later batches; consumed if the dataset reads ahead.
        """
        job, fetcher = self._loaded, self._fetcher
        if job is None or fetcher is None:
            return Answer(Kind.ERROR, self._error, work=self.meter.work())
        try:
            if fetcher.reads_ahead:
                for ahead in itertools.chain([index], coming):
                    fetcher.announce(ahead)
            batch = fetcher.fetch(index, key)
            answer = Answer(Kind.BATCH, batch if self._finish is None else self._finish(batch))
            if fetcher.replacer is not None:
                answer.failed = tuple(fetcher.replacer.failed)
        except self._caught as error:  # every error of user code is sent to the consumer
            if isinstance(error, StopIteration) and job.is_iterable:
                answer = Answer(Kind.ENDED)
            else:
                answer = Answer(Kind.ERROR, self._sent(error, fetcher.place_of_error(index, error)))
        if self._keeps_states:
            answer.dataset_state = dataset_state_of(fetcher, self.where)
        answer.num_samples, answer.nbytes = fetcher.num_samples, fetcher.gathered_bytes
        answer.work = self.meter.work()
        return answer

    def _sent(self, error: BaseException, place: str) -> RemoteError:
        if self._is_thread:
            return RemoteError.itself(error, place)
        return RemoteError.current(self.where, place)


def make_fetcher(
    job: Job,
    arena: BumpAllocator,
    dataset_state: DatasetState | None,
    *,
    worker_id: int | None = None,
    is_thread: bool = False,
) -> Fetcher:
    """The fetcher of a worker, or, without a ``worker_id``, of the consumer's own process."""
    seeder = None
    if job.seeds_samples:
        seeder = SampleSeeder(
            job.dataset,
            job.collate_fn,
            with_transforms=job.seed_albumentations,
            role="local" if worker_id is None else "thread" if is_thread else "process",
        )
    return Fetcher(
        job,
        job.dataset,
        arena,
        in_worker=worker_id is not None and not is_thread,
        seeder=seeder,
        dataset_state=dataset_state,
        worker_id=worker_id,
    )


def dataset_state_of(fetcher: Fetcher, where: str) -> DatasetState:
    """The state of a fetcher's dataset; an error of it fails no batch, but the loader's `state_dict()`."""
    try:
        return fetcher.reader.state()
    except Exception:  # noqa: BLE001  # as above
        return DatasetState("unknown", error=RemoteError.current(where))


def _be_quiet() -> None:
    """Use one thread in this worker: thread pools that compete for busy cores are up to ten times slower."""
    torch.multiprocessing._set_thread_name("pt_data_worker")
    torch.set_num_threads(1)
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # else its import looks for a newer version on the network
    os.environ.setdefault("OPENCV_FOR_THREADS_NUM", "1")  # in case OpenCV is imported later
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(0)
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # it is closed
            faulthandler.enable(sys.__stderr__)
