"""Turns samples into the values of an LMDB file, in workers, and passes them on in reused shared memory.

Rules:

1. Workers read, encode and compute checksums; the parent only copies values from shared memory to the file.
2. A task owns its slot: the parent takes a free slot when it hands the task out, the answer names the slot,
   and the parent frees it after it has stored the values.
3. Values of a task without a slot, and values that do not fit into the slot, are sent in the answer, through
   torch's queue.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import Dataset, get_worker_info

from fastload.batch.failed_sample import FailedSample
from fastload.batch.read_ahead import read_tasks_ahead
from fastload.cache.codecs import SOURCE
from fastload.cache.encoded import check_headers
from fastload.cache.lmdb.format import value_parts
from fastload.cache.record import record_parts
from fastload.errors import SegmentError, UnsupportedSampleError
from fastload.memory.segment import Segment, why_unsupported
from fastload.nested.spec import flatten
from fastload.system.logs import log
from fastload.system.sent_error import text_of

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Mapping, Sequence

TASKS_A_WORKER = 4  # tasks in flight per worker: workers continue while the parent waits for the disk
_LEAST_SLOT_BYTES = 4 << 20  # pages are allocated as they are used; a task aims at half a slot
_MOST_SLOT_BYTES = 128 << 20
_MOST_TASK_SAMPLES = 64
_TASKS_EACH = 8  # at least, so that workers finish at about the same time


@dataclass(frozen=True)
class Failed:
    """A sample that could not be read, which ends the build; from a worker with the text of the error."""

    index: int
    error: Exception
    trace: str


# The bytes themselves, or their offset in the slot and their number.
Value = bytes | tuple[int, int] | FailedSample | Failed


class Slots:
    """Memory that workers write and the parent reads; pickles as a handle.

    Only the parent takes and frees slots.

    Args:
        num_slots: Number of slots of equal size; with 0, all values are sent in the answers.
        slot_bytes: Size of a slot.

    Raises:
        SegmentError: The system refused the memory.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._free = list(range(num_slots))
        self._segment = Segment.create(num_slots * slot_bytes, name="fastload-build") if num_slots else None
        self._mapping: mmap.mmap | None = None

    def take(self) -> int | None:
        """A slot that belongs to the caller's task until `free`; None if all slots are taken."""
        return self._free.pop() if self._free else None

    def free(self, slot: int | None) -> None:
        """Take back a task's slot, if it has one, once its values are stored."""
        if slot is not None:
            self._free.append(slot)

    def memory(self, slot: int | None) -> memoryview:
        """The bytes of a task's slot; empty if the task has none."""
        if slot is None or self._segment is None:
            return memoryview(b"")
        if self._mapping is None:
            self._mapping = self._segment.map(writable=True)
        start = slot * self.slot_bytes
        return memoryview(self._mapping)[start : start + self.slot_bytes]

    def close(self) -> None:
        """Release this process's mapping and segment."""
        self._mapping = None
        if self._segment is not None:
            self._segment.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapping": None}


class Order(NamedTuple):
    """The number of a task, and the slot for its values."""

    task: int
    slot: int | None  # None: the values are sent in the answer


class Answer(NamedTuple):
    """The values of one task, in the order of its samples; fewer values if the last one failed."""

    values: list[Value]
    slot: int | None


@dataclass(eq=False)
class RecordTasks(Dataset[Answer]):
    """Reads ranges of samples, and returns their values; indexed by the order for a task.

    Args:
        dataset: Map-style.
        ranges: Ranges of indices, one per task.
        probed: Samples that were already read, by index.
        codec: How images are encoded, one of `codecs.CACHE_CODECS`.
        quality: Of a lossy codec.
        skips: Leave out samples that cannot be read.
        slots: Memory for the values.
    """

    dataset: Any
    ranges: Sequence[range]
    probed: Mapping[int, Any]
    codec: str
    quality: int
    skips: bool
    slots: Slots

    def orders(self) -> Iterator[Order]:
        """An order for each task, made by the parent when a worker can get it."""
        for task in range(len(self.ranges)):
            yield Order(task, self.slots.take())

    def __getitem__(self, order: Order) -> Answer:
        values: list[Value] = []
        memory = self.slots.memory(order.slot)
        used = 0
        read_tasks_ahead(self.dataset, self.ranges, order.task, known=self.probed)
        for index in self.ranges[order.task]:
            try:
                sample = self.probed[index] if index in self.probed else self.dataset[index]
                if self.codec == SOURCE:
                    check_headers(sample)
            except Exception as error:  # noqa: BLE001 - of the user's code; the parent reports or raises it
                if not self.skips:
                    values.append(_failed(index, error))
                    break
                values.append(skipped(index, error))
                continue
            try:
                codec = "raw" if self.codec == SOURCE else self.codec
                parts, _ = record_parts(*flatten(sample), codec, self.quality)
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
        return Answer(values, order.slot)


def skipped(index: int, error: Exception) -> FailedSample:
    """The report about a sample that could not be read in this process."""
    worker = get_worker_info()
    return FailedSample.of(index, error, None if worker is None else worker.id)


def _failed(index: int, error: Exception) -> Failed:
    if get_worker_info() is None:
        return Failed(index, error, "")
    trace = text_of(error)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - send its text instead, with the type that torch's loader uses
        error = RuntimeError(f"{type(error).__name__}, which cannot be pickled: {error}")
    return Failed(index, error, trace)


def plan_tasks(ranges: Sequence[range], example_bytes: int, num_workers: int) -> tuple[list[range], Slots]:
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
    num_slots = TASKS_A_WORKER * num_workers + 1  # the values of one more task are being stored
    try:
        return tasks, Slots(num_slots if num_workers and why_unsupported() is None else 0, slot_bytes)
    except SegmentError as error:
        log.info("values are sent through torch's queue, which is slower: %s", str(error))
        return tasks, Slots(0, slot_bytes)
