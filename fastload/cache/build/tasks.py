"""Turns samples into the values of an LMDB file, in worker processes; the parent only stores them."""

from __future__ import annotations

import pickle
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torch.utils.data import Dataset, get_worker_info

from fastload.batch.failures import FailedSample, path_of
from fastload.batch.source import expect_tasks
from fastload.cache.lmdb.format import PADDING
from fastload.cache.records import record_parts
from fastload.errors import NondeterministicDatasetError, UnsupportedSampleError
from fastload.nested.spec import flatten
from fastload.rng.draws import DrawWatch
from fastload.system.notes import add_note
from fastload.system.remote_error import text_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


TASKS_A_WORKER = 4  # tasks in flight per worker: workers continue while the parent waits for the disk
_TASK_BYTES = 2 << 20
_MAX_TASK_SAMPLES = 64
_NEVER_LEFT_OUT = (
    UnsupportedSampleError,
    NondeterministicDatasetError,
)  # the dataset is the cause, not a file
_TASKS_EACH = 8  # at least, so workers finish at about the same time


class Value(NamedTuple):
    """The value of a sample in the file, and the checksum of the record in it."""

    data: bytes
    crc32: int


class Failure(NamedTuple):
    """The error of a sample, which ends the build, and notes about it; picklable."""

    error: Exception
    notes: list[str]

    @classmethod
    def of(cls, index: int, error: Exception) -> Failure:
        """The failure of a sample in this process."""
        notes = [", ".join(filter(None, (f"in sample {index} of the dataset", path_of(error))))]
        if get_worker_info() is not None:
            notes.append(f"raised in a worker process:\n{text_of(error)}")
        if not isinstance(error, _NEVER_LEFT_OUT):
            notes.append('on_error="skip" leaves out samples that cannot be read')
        if get_worker_info() is not None:
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # noqa: BLE001 - send its text instead, with the type that torch's loader uses
                error = RuntimeError(f"{type(error).__name__}, which cannot be pickled: {error}")
        return cls(error, notes)

    def reraise(self) -> NoReturn:
        """Raise the error, with the notes."""
        for note in self.notes:
            add_note(self.error, note)
        raise self.error


@dataclass(eq=False)
class RecordTasks(Dataset[list[Value | FailedSample | Failure]]):
    """Reads ranges of samples; each item is the values of one range, which end with the first `Failure`.

    Args:
        dataset: Map-style.
        ranges: Ranges of indices.
        probed: Samples that were already read, by index.
        skips: Leave out samples that cannot be read.
    """

    dataset: Any
    ranges: Sequence[range]
    probed: Mapping[int, Any]
    skips: bool

    def __post_init__(self) -> None:
        self._watch = DrawWatch(self.dataset)

    def __getitem__(self, number: int) -> list[Value | FailedSample | Failure]:
        values: list[Value | FailedSample | Failure] = []
        expect_tasks(self.dataset, self.ranges, number, skipped=self.probed)
        for index in self.ranges[number]:
            try:
                sample = self.probed[index] if index in self.probed else self._read(index)
            except Exception as error:  # noqa: BLE001 - of the user's code; the parent reports or raises it
                if not self.skips or isinstance(error, NondeterministicDatasetError):
                    return [*values, Failure.of(index, error)]
                worker = get_worker_info()
                values.append(FailedSample.of(index, error, None if worker is None else worker.id))
                continue
            try:
                parts, _ = record_parts(*flatten(sample))
            except UnsupportedSampleError as error:  # the cause is the dataset, not a damaged file
                return [*values, Failure.of(index, error)]
            data = b"".join((PADDING, *parts))
            values.append(Value(data, zlib.crc32(memoryview(data)[len(PADDING) :])))
        return values

    def _read(self, index: int) -> Any:
        """A sample; raises NondeterministicDatasetError if it draws random numbers."""
        sample, drawn = self._watch.read(self.dataset, index)
        if drawn:
            raise NondeterministicDatasetError(
                f"the sample is random (drawn from {', '.join(drawn)}), unlike those that were checked "
                "first. A cache would freeze one draw: move the random part of the dataset to the transform"
            )
        return sample


def cut(num_samples: int, example_bytes: int, num_workers: int) -> list[range]:
    """Cut the indices into tasks."""
    maximum = num_samples // (_TASKS_EACH * max(1, num_workers))
    size = max(1, min(_TASK_BYTES // max(1, example_bytes), maximum, _MAX_TASK_SAMPLES))
    return [range(start, min(start + size, num_samples)) for start in range(0, num_samples, size)]
