"""Turns samples into the values of an LMDB file, in workers, and passes them on in reused shared memory.

Rules:

1. Workers read, encode and compute checksums; the parent only copies values from shared memory to the file.
2. Task k writes to slot k mod `num_slots`. When torch's loader returns the answer to task k to the parent, it
   hands out task k + 4 W, and the parent has already stored the answer to task k - 1: with 4 W + 2 slots,
   tasks never collide. If they did, the checksum of the record would show it at the first read.
3. Values that do not fit into the slot are sent in the answer, through torch's queue.
"""

from __future__ import annotations

import logging
import pickle
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, get_worker_info

from fastload.batch.failed_sample import FailedSample
from fastload.cache.lmdb.format import value_parts
from fastload.cache.record import record_parts
from fastload.errors import SegmentError, UnsupportedSampleError
from fastload.memory.segment import Segment, is_supported
from fastload.nested.spec import flatten

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping, Sequence

    from fastload.cache.build.build_lock import BuildLock

log = logging.getLogger("fastload")

TASKS_A_WORKER = 4  # tasks in flight per worker: workers continue while the parent waits for the disk
_SPARE_SLOTS = 2
_LEAST_SLOT_BYTES = 4 << 20  # pages are allocated as they are used; a task aims at half a slot
_MOST_SLOT_BYTES = 128 << 20
_MOST_TASK_SAMPLES = 64
_TASKS_EACH = 8  # at least, so that workers finish at about the same time


@dataclass(frozen=True)
class Failed:
    """A sample that could not be read, which ends the build."""

    index: int
    error: Exception
    trace: str


# The bytes themselves, or their offset in the slot and their number.
Value = bytes | tuple[int, int] | FailedSample | Failed


class Slots:
    """Memory that workers write and the parent reads; pickles as a handle.

    Args:
        num_slots: Number of slots of equal size.
        slot_bytes: Size of a slot.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._segment = Segment.create(num_slots * slot_bytes, name="fastload-build")
        self._mapping: mmap.mmap | None = None

    def memory(self, task: int) -> memoryview:
        """The slot of a task."""
        if self._mapping is None:
            self._mapping = self._segment.map(writable=True)
        start = task % self.num_slots * self.slot_bytes
        return memoryview(self._mapping)[start : start + self.slot_bytes]

    def close(self) -> None:
        """Release this process's mapping and segment."""
        self._mapping = None
        self._segment.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapping": None}


class RecordTasks(Dataset[list[Value]]):
    """Reads ranges of samples; returns their values, in order.

    Args:
        dataset: Map-style.
        ranges: Ranges of indices, one per task.
        probed: Samples that were already read, by index.
        codec: How images are encoded.
        quality: Of a lossy codec.
        skips: Leave out samples that cannot be read.
        slots: Memory for the values; None to return them in the answer.
        lock: The lock of the build, which workers close.
    """

    def __init__(
        self,
        dataset: Any,
        ranges: Sequence[range],
        probed: Mapping[int, Any],
        *,
        codec: str,
        quality: int,
        skips: bool,
        slots: Slots | None,
        lock: BuildLock,
    ) -> None:
        self.dataset = dataset
        self.ranges = ranges
        self.probed = probed
        self._codec = codec
        self._quality = quality
        self._skips = skips
        self._slots = slots
        self._lock = lock

    def __len__(self) -> int:
        return len(self.ranges)

    def __getitem__(self, task: int) -> list[Value]:
        self._lock.leave_in_worker()
        values: list[Value] = []
        memory = memoryview(b"") if self._slots is None else self._slots.memory(task)
        used = 0
        for index in self.ranges[task]:
            try:
                sample = self.probed[index] if index in self.probed else self.dataset[index]
            except Exception as error:  # noqa: BLE001 - of the user's code; the parent reports or raises it
                if not self._skips:
                    values.append(_failed(index, error))
                    break
                values.append(skipped(index, error))
                continue
            try:
                parts, _ = record_parts(*flatten(sample), self._codec, self._quality)
            except UnsupportedSampleError as error:  # the cause is the dataset, not a damaged file
                values.append(_failed(index, error))
                break
            parts = value_parts(index, parts)
            nbytes = sum(len(part) for part in parts)
            if used + nbytes > len(memory):
                values.append(b"".join(parts))
                continue
            values.append((used, nbytes))
            for part in parts:
                memory[used : used + len(part)] = memoryview(part).cast("B")
                used += len(part)
        return values


def skipped(index: int, error: Exception) -> FailedSample:
    """The report about a sample that could not be read in this process."""
    worker = get_worker_info()
    return FailedSample.of(index, error, None if worker is None else worker.id)


def _failed(index: int, error: Exception) -> Failed:
    trace = "".join(traceback.format_exception(error))
    if get_worker_info() is None:
        return Failed(index, error, trace)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - send its text instead, with the type that torch's loader uses
        error = RuntimeError(f"{type(error).__name__}, which cannot be pickled: {error}")
    return Failed(index, error, trace)


def plan_tasks(
    ranges: Sequence[range], example_bytes: int, num_workers: int
) -> tuple[list[range], Slots | None]:
    """Cut ranges of indices into tasks, and make the shared memory for their values.

    Args:
        ranges: Ranges of indices; a task never crosses the end of a range.
        example_bytes: Approximate size of a sample.
        num_workers: Processes; without workers no memory is needed.
    """
    slot_bytes = min(max(_LEAST_SLOT_BYTES, 2 * example_bytes), _MOST_SLOT_BYTES)
    total = sum(map(len, ranges))
    size = min(slot_bytes // 2 // max(1, example_bytes), total // (_TASKS_EACH * max(1, num_workers)))
    size = max(1, min(_MOST_TASK_SAMPLES, size))
    tasks = [
        range(start, min(start + size, span.stop))
        for span in ranges
        for start in range(span.start, span.stop, size)
    ]
    if not num_workers or not is_supported():
        return tasks, None
    try:
        return tasks, Slots(TASKS_A_WORKER * num_workers + _SPARE_SLOTS, slot_bytes)
    except SegmentError as error:
        log.info("values are sent through torch's queue, which is slower: %s", str(error))
        return tasks, None
