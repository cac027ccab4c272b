"""The work of one worker, whatever transports its indices and batches: begin, begin an epoch, make batches.

`worker` (a process) and `threads` are transports: they call `begin` once, `begin_epoch` for each epoch and
`answer` for each index, in the worker, and take the answers away. Rules:

1. The steps at the start come in torch's order (torch/utils/data/_utils/worker.py). So random streams and
   `get_worker_info()` are the same as torch's.
2. Every index gets an answer. After an error at the start, this error is the answer to all of them.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import itertools
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data._utils import worker as torch_worker

from fastload.batch.fetch import Fetcher
from fastload.batch.iterable_state import IterableState
from fastload.batch.stacking import install_slot_rule
from fastload.errors import add_note
from fastload.rng import seeding
from fastload.rng.sample_rng import SampleRng
from fastload.rng.worker_info import WorkerInfo, work_as
from fastload.system.freed_memory import keep_freed_memory
from fastload.system.sent_error import SentError
from fastload.workers.tally import Meter, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fastload.batch.failed_sample import FailedSample
    from fastload.batch.replacing import BatchId
    from fastload.memory.lease import Arena
    from fastload.rng.sample_streams import StreamOrigin
    from fastload.workers.job import Job, PickledJob

AT_START = "at its start"  # the place of an error that is the answer to every task


_NO_WORK = Work()


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
        payload: The batch, in the form that the transport's ``finish`` gave it; or the error, as a SentError.
        dataset_state: The state of the worker's copy of the dataset after this batch; None if it has none.
        failed: Samples that could not be read and were replaced.
        num_samples: The samples of the batch.
        nbytes: The bytes of the batch; 0 until the transport knows them, None if they cannot be known.
        work: The work of the worker since its previous answer.
    """

    kind: Kind
    payload: Any = None
    dataset_state: IterableState | None = None
    failed: tuple[FailedSample, ...] = ()
    num_samples: int = 0
    nbytes: int | None = 0
    work: Work = _NO_WORK


class WorkerCore:
    """One worker: its dataset, its pipelines, its fetcher.

    Args:
        worker_id: 0 to num_workers - 1.
        job: Its job; a thread's has the thread's copies of the dataset and the collate_fn.
        arena: The memory of batches; the transport begins and ends it around each answer.
        finish: Called with each batch; returns the payload of its answer. Its errors are those of the batch.
        is_thread: Whether it is a thread, which leaves to its process what all threads share; else it has a
            process of its own, whose libraries it seeds.

    Attributes:
        where: The worker, as torch's errors name it.
        meter: Measures its work; the transport tells it how long it waited.
    """

    def __init__(
        self,
        worker_id: int,
        job: Job | PickledJob,
        arena: Arena,
        finish: Callable[[Any], Any],
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
        # What ends a process must not end a thread in silence.
        self._caught = BaseException if is_thread else Exception
        self._loaded: Job | None = None  # once the worker has begun
        self._fetcher: Fetcher | None = None
        self._keeps_states = False  # whether each answer has the state of the dataset
        self._error: SentError | None = None  # the answer to every index while there is no fetcher

    def begin(self) -> None:
        """Take the first steps, once, in the worker itself."""
        try:
            if not self._is_thread:
                be_quiet()
            job = self._job.load()
            seed = job.base_seed + self._id
            if self._is_thread:  # torch's get_worker_info() is None here
                work_as(WorkerInfo(self._id, job.num_workers, seed, job.dataset, "thread"))
            else:
                self._take_process(job, seed)
            if job.seed_pipelines:
                seeding.seed_pipelines(job.dataset, seed, job.collate_fn)
            if job.worker_init_fn is not None:
                job.worker_init_fn(self._id)
            self._loaded = job
        except self._caught:  # the answer to every index
            self._error = SentError.current(self.where, AT_START)
        self.meter = Meter()

    def _take_process(self, job: Job, seed: int) -> None:
        keep_freed_memory(job.num_workers)
        seeding.seed_libraries(job.base_seed, self._id)
        # torch documents get_worker_info(), and MONAI, timm and others call torch's own function.
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=self._id, num_workers=job.num_workers, seed=seed, dataset=job.dataset
        )
        install_slot_rule()

    def begin_epoch(self, epoch: int | None, dataset_state: IterableState | None) -> None:
        """Begin an epoch: iterable datasets start over, or resume from the state.

        Args:
            epoch: For a dataset that has a set_epoch(); None: it knows it, or the user set none.
            dataset_state: From which the copy of the dataset goes on; None: it has no state.
        """
        job = self._loaded
        if job is None:
            return
        self._fetcher = None
        try:
            if epoch is not None and callable(getattr(job.dataset, "set_epoch", None)):
                job.dataset.set_epoch(epoch)
            if dataset_state is not None:
                _expect_known(dataset_state)
            self._fetcher = self._make_fetcher(job, dataset_state)
        except self._caught:
            self._error = SentError.current(self.where, AT_START)

    def _make_fetcher(self, job: Job, dataset_state: IterableState | None) -> Fetcher:
        self._keeps_states = dataset_state is not None
        sample_rng = None
        if job.seeds_samples:
            sample_rng = SampleRng(
                job.dataset,
                job.collate_fn,
                with_pipelines=job.seed_pipelines,
                is_guest=False,
                with_globals=not self._is_thread,
            )
        return Fetcher(
            job,
            job.dataset,
            self._arena,
            in_worker=not self._is_thread,
            sample_rng=sample_rng,
            dataset_state=dataset_state,
            worker_id=self._id,
        )

    def fail_epoch(self, text: str) -> None:
        """Make an error the answer to every index of the epoch, which could not begin."""
        if self._loaded is not None:
            self._fetcher, self._error = None, SentError.of_text(text, self.where)

    def answer(
        self, index: Any, origin: StreamOrigin | None, batch_id: BatchId | None, coming: Iterable[Any] = ()
    ) -> Answer:
        """Make the batch of ``index``.

        Args:
            index: The index, or list of indices, from the sampler.
            origin: The origin of the random streams of its samples.
            batch_id: With `on_error`: identifies the batch, so that replacements depend on it.
            coming: The indices of later batches; consumed if the dataset reads ahead.
        """
        job, fetcher = self._loaded, self._fetcher
        if job is None or fetcher is None:
            return Answer(Kind.ERROR, self._error, work=self.meter.work())
        try:
            if fetcher.reads_ahead:
                for ahead in itertools.chain([index], coming):
                    fetcher.announce(ahead)
            answer = Answer(Kind.BATCH, self._finish(fetcher.fetch(index, origin, batch_id)))
            if fetcher.replacer is not None:
                answer.failed = tuple(fetcher.replacer.failed)
        except self._caught as error:  # every error of user code is sent to the consumer
            if isinstance(error, StopIteration) and job.is_iterable:
                answer = Answer(Kind.ENDED)
            else:
                answer = Answer(Kind.ERROR, self._sent(error, fetcher.place_of_error(index, error)))
        if self._keeps_states:
            answer.dataset_state = self._dataset_state(fetcher)
        answer.num_samples, answer.nbytes = fetcher.num_samples, fetcher.gathered_bytes
        answer.work = self.meter.work()
        return answer

    def _sent(self, error: BaseException, place: str) -> SentError:
        if self._is_thread:
            return SentError.itself(error, place)
        return SentError.current(self.where, place)

    def _dataset_state(self, fetcher: Fetcher) -> IterableState:
        try:
            return fetcher.dataset_state()
        except Exception:  # noqa: BLE001  # fails no batch; raised when the loader's state is requested
            return IterableState("unknown", error=SentError.current(self.where))


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
