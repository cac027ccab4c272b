"""What every worker does, be it a process, a thread or an actor: begin, begin an epoch, make batches.

`worker`, `thread_pool` and `ray_pool` are transports: they call `begin` once, `begin_epoch` for each epoch
and `make` for each index, in the worker, and take the replies away. Every index gets a reply: after an error
at the start, this error is the reply to all of them. Without workers, `inline_pool` opens the dataset, and
asks for the replies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

import torch

from fastload.augmentation import ends
from fastload.batch.collate import install_slot_rules
from fastload.batch.dataset_state import DatasetState
from fastload.batch.fetch import Fetcher
from fastload.rng import seeding
from fastload.rng.entry_points import set_worker_streams
from fastload.rng.sample_rng import SampleSeeder
from fastload.system.cache_counts import cache_counts
from fastload.system.remote_error import RemoteError
from fastload.system.torch_private import set_thread_name, set_worker_info
from fastload.system.worker_memory import keep_freed_memory
from fastload.workers.messages import BatchReply, ReplyKind, WorkerCounters

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.batch.plan import Plan
    from fastload.memory.lease import BumpAllocator
    from fastload.rng.keys import BatchKey

AT_START = "at its start"  # the place of an error that is the reply to every request


class BatchMaker:
    """Makes the batches of one worker: its dataset, its pipelines, its fetcher.

    Args:
        worker_id: 0 to num_workers - 1; None without workers.
        load_plan: Returns the worker's plan; called in the worker. A thread's plan has the thread's copies of
            the dataset and the collate_fn.
        allocator: The memory of batches; the transport begins and ends it around each reply.
        to_payload: Called with each batch; returns the payload of its reply. Its errors are those of the
            batch. None: the batch itself.
        role: What it is. A `"thread"` leaves to its process what all threads share; a `"process"` is its own,
            and its libraries are seeded. `"local"` is the consumer: there StopIteration ends any epoch.

    Attributes:
        where: The worker, as torch's errors name it.
    """

    def __init__(
        self,
        worker_id: int | None,
        load_plan: Callable[[], Plan],
        allocator: BumpAllocator,
        to_payload: Callable[[Any], Any] | None,
        *,
        role: Literal["process", "thread", "local"] = "process",
    ) -> None:
        self.where = "in this process" if worker_id is None else f"in DataLoader worker {role} {worker_id}"
        self._id = worker_id
        self._load_plan = load_plan
        self._allocator = allocator
        self._to_payload = to_payload
        self._role: Literal["process", "thread", "local"] = role
        # What ends a process must not end a thread silently.
        self._caught = BaseException if role == "thread" else Exception
        self._plan: Plan | None = None  # once the worker has begun
        self._fetcher: Fetcher | None = None
        self._can_end = False  # whether StopIteration ends the epoch, and is no error
        self._keeps_states = False  # whether each reply has the state of the dataset
        self._hits = self._misses = 0  # at the previous reply
        # The reply to every index while there is no fetcher; None: the epoch has ended.
        self._error: RemoteError | None = None

    def begin(self) -> None:
        """Take the first steps, once, in the worker itself."""
        # In torch's order (torch/utils/data/_utils/worker.py), so random streams and `get_worker_info()` are
        # the same as torch's.
        try:
            worker_id, is_thread = self._id or 0, self._role == "thread"
            if not is_thread:
                _be_quiet()
            plan = self._load_plan()
            seed = plan.base_seed + worker_id
            if is_thread:
                seeding.work_as(seeding.WorkerInfo(worker_id, plan.num_workers, seed, plan.dataset, "thread"))
            else:
                keep_freed_memory(plan.num_workers, plan.kept_bytes)
                seeding.seed_libraries(plan.base_seed, worker_id)
                # torch documents get_worker_info(), and MONAI, timm and others call torch's own function.
                set_worker_info(worker_id, plan.num_workers, seed, plan.dataset)
                install_slot_rules()
            streams = seeding.WorkerStreams(seed, self._role) if plan.seeds_pipelines else None
            set_worker_streams(streams, is_thread=is_thread)
            if plan.worker_init_fn is not None:
                plan.worker_init_fn(worker_id)
            self._plan = plan
        except self._caught:  # the reply to every index
            self._error = RemoteError.current(self.where, AT_START)
        self._take_counters(0)  # those of the start belong to no batch

    def is_busy_when_idle(self) -> bool:
        """Do now what nobody waits for; returns whether some of it is left, as others are at it."""
        cache = None if self._plan is None else self._plan.file_cache
        return cache is not None and not cache.flush()

    def _take_counters(self, busy_us: int) -> WorkerCounters:
        """What the worker did since the last call."""
        hits, self._hits = self._hits, cache_counts.hits
        misses, self._misses = self._misses, cache_counts.misses
        return WorkerCounters(busy_us, self._hits - hits, self._misses - misses, cache_counts.take_reasons())

    def begin_epoch(self, epoch: int | None, dataset_state: DatasetState | None) -> None:
        """Begin an epoch: iterable datasets start over, or resume from the state.

        Args:
            epoch: For a dataset that has a set_epoch(); None: it knows it, or the user set none.
            dataset_state: Where the copy of an iterable dataset goes on; None: it is not asked for its state.
        """
        plan = self._plan
        if plan is None:
            return
        self._fetcher = None
        try:
            if epoch is not None and callable(getattr(plan.dataset, "set_epoch", None)):
                plan.dataset.set_epoch(epoch)
            self.open(plan, dataset_state)
        except self._caught:
            self._error = RemoteError.current(self.where, AT_START)

    def open(self, plan: Plan, dataset_state: DatasetState | None) -> None:
        """Begin to read the dataset, from its beginning or from a state; errors of it are raised."""
        seeder = None
        if plan.seeds_samples:
            seeder = SampleSeeder(plan.dataset, plan.collate_fn, role=self._role)
        self._fetcher = Fetcher(
            plan,
            self._allocator,
            in_worker=self._role == "process",
            seeder=seeder,
            dataset_state=dataset_state,
            worker_id=self._id,
            reading=ends.met if plan.file_cache is None else plan.file_cache.reading,
        )
        self._keeps_states = dataset_state is not None
        self._can_end = plan.is_iterable or self._role == "local"

    def make(self, index: Any, key: BatchKey | None) -> BatchReply:
        """Make the batch of ``index``; the reply has what was counted since the last one.

        Args:
            index: The index, or list of indices, from the sampler.
            key: With `seeding="sample"`, `on_error` or a `batch_transform`: their draws depend on it.
        """
        began_ns = time.perf_counter_ns()
        reply = self.reply_to(index, key)
        reply.counters = self._take_counters((time.perf_counter_ns() - began_ns) // 1000)
        return reply

    def reply_to(self, index: Any, key: BatchKey | None) -> BatchReply:
        """As `make`, without the counters."""
        fetcher = self._fetcher
        if fetcher is None:
            return BatchReply(ReplyKind.ERROR if self._error else ReplyKind.ENDED, self._error)
        reply = BatchReply(ReplyKind.BATCH)
        try:
            batch = fetcher.fetch(index, key)
            if self._to_payload is not None:
                batch = self._to_payload(batch)
            reply.payload = batch
            if fetcher.replacer is not None:
                reply.failed = tuple(fetcher.replacer.failed)
        except self._caught as error:  # every error of user code is sent to the consumer
            if isinstance(error, StopIteration) and self._can_end:
                reply.kind = ReplyKind.ENDED
                self._fetcher = self._error = None  # as in torch, which asks the dataset no more
            else:
                reply.kind, place = ReplyKind.ERROR, fetcher.place_of_error(index, error)
                is_sent = self._role == "process"
                reply.payload = (
                    RemoteError.current(self.where, place) if is_sent else RemoteError(error, place)
                )
        if self._keeps_states:
            reply.dataset_state = self._state_of(fetcher)
        reply.num_samples = fetcher.num_samples
        return reply

    def _state_of(self, fetcher: Fetcher) -> DatasetState | None:
        """How far an iterable dataset was read; its error fails no batch, but the loader's `state_dict()`."""
        try:
            return None if fetcher.stream is None else fetcher.stream.state()
        except Exception:  # noqa: BLE001  # as above
            return DatasetState(error=RemoteError.current(self.where))


def _be_quiet() -> None:
    """Use one thread in this worker: thread pools that compete for busy cores are up to ten times slower."""
    set_thread_name("pt_data_worker")
    torch.set_num_threads(1)
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # else its import looks for a newer version on the network
    os.environ.setdefault("OPENCV_FOR_THREADS_NUM", "1")  # in case OpenCV is imported later
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(0)
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # it is closed
            faulthandler.enable(sys.__stderr__)
