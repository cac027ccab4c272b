"""Records loaders in the process that iterates over them: epochs, waits and computing.

A recorded loader returns the same batches, in the same order, with the same errors. Only the outermost
`__iter__` and `__next__` of a thread count, because a loader can wrap another one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import dataloader as torch_loader

from fastload.profiling.hooks import (
    NO_LOADER,
    ProcessRecorder,
    hook_copies,
    hook_new_workers,
    hook_process,
    unhook_new_workers,
)
from fastload.profiling.loader_info import batch_info, loader_info
from fastload.profiling.spans import this_thread

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_STEPS = 200_000  # per loader: about 40 MB


class Step(NamedTuple):
    """One call of `__next__` that returned a batch.

    Attributes:
        epoch: The number of the epoch within the profile, from 0.
        start_ns: When the consumer asked for the batch.
        end_ns: When it got the batch.
        cpu_ns: CPU time of the consumer's thread in between.
        process_cpu_ns: CPU time of the consumer's process until then, with all threads.
    """

    epoch: int
    start_ns: int
    end_ns: int
    cpu_ns: int
    process_cpu_ns: int


@dataclass
class Epoch:
    """One iteration over a loader.

    Attributes:
        start_ns: When `iter()` was called.
        end_ns: When the loop asked for a batch after the last one; 0 if it was left early or continues.
    """

    start_ns: int
    end_ns: int = 0


@dataclass
class LoaderRecord:
    """What is recorded of one loader in the consumer's process.

    Attributes:
        number: Its number among the recorded loaders.
        info: Its settings, and what is known of its batches; see `loader_info`.
        epochs: Its epochs.
        steps: The last `MAX_STEPS` batches that the consumer got.
        num_steps: How many it got in all.
    """

    number: int
    info: dict[str, Any]
    epochs: list[Epoch] = field(default_factory=list)
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    num_steps: int = 0


class Recorder:
    """Records loaders from `start()` to `stop()`.

    Args:
        directory: Where recordings are written.
        loaders: The loaders to record; None for every loader of the process.

    Attributes:
        records: What was recorded of each loader, in the order of first use.
    """

    def __init__(self, directory: str, loaders: tuple[Any, ...] | None = None) -> None:
        self.directory = directory
        self.records: list[LoaderRecord] = []
        self.is_on = False
        self._pid = os.getpid()
        self._starting = threading.RLock()  # threads start the workers of their loaders one after another
        self._loaders = loaders
        self._by_loader: weakref.WeakKeyDictionary[Any, LoaderRecord] = weakref.WeakKeyDictionary()
        self._by_info: dict[tuple[Any, ...], LoaderRecord] = {}
        self._undo = contextlib.ExitStack()
        self._hooked_types: set[type] = set()

    def start(self) -> None:
        """Put the hooks in place."""
        if ProcessRecorder.current is not None:
            raise RuntimeError(
                "a profile is running in this process already: end its with block first, or "
                "run the script with python instead of `fastload profile`"
            )
        self.is_on = True
        ProcessRecorder.current = ProcessRecorder(self.directory, NO_LOADER)
        self._undo.callback(ProcessRecorder.end)
        hook_process(self._undo)
        self._undo.callback(unhook_new_workers)
        kinds = [torch_loader.DataLoader]
        module = sys.modules.get("fastload.loader")
        if module is not None:
            kinds.append(module.DataLoader)
        for kind in kinds:
            self._replace(kind, "__iter__", self._recorded_iter(kind.__iter__))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        original = vars(owner)[name]
        setattr(owner, name, value)
        self._undo.callback(setattr, owner, name, original)

    def stop(self) -> None:
        """Put the originals back; loaders in use continue, unrecorded."""
        self.is_on = False
        self._undo.close()

    def _recorded_iter(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        recorder = self

        def __iter__(loader: Any) -> Any:  # noqa: N807  # its name in tracebacks
            if os.getpid() != recorder._pid:  # a forked process is not recorded, nor are its workers
                unhook_new_workers()
                return original(loader)
            loaders = recorder._loaders
            is_recorded = loaders is None or any(loader is other for other in loaders)
            if this_thread.loader is not None or not recorder.is_on or not is_recorded:
                return original(loader)
            return recorder._begin_epoch(original, loader)

        return __iter__

    def _begin_epoch(self, original: Callable[[Any], Any], loader: Any) -> Any:
        record = self._record_of(loader)
        hook_copies(self._undo)  # of modules that were imported since
        start_ns = time.perf_counter_ns()
        with self._starting:
            hook_new_workers(self.directory, record.number)
            this_thread.loader = record.number
            try:
                iterator = original(loader)
            finally:
                this_thread.loader = None
            record.epochs.append(Epoch(start_ns))
            # An iterator without attributes, such as a subclass's generator, is not recorded: its source is.
            with contextlib.suppress(AttributeError):
                iterator._fastload_recorder = StepRecorder(self, record)
                kind = next(base for base in type(iterator).__mro__ if "__next__" in vars(base))
                if kind not in self._hooked_types:
                    self._hooked_types.add(kind)
                    self._replace(kind, "__next__", _recorded_next(vars(kind)["__next__"]))
        return iterator

    def _record_of(self, loader: Any) -> LoaderRecord:
        record = self._by_loader.get(loader)
        if record is None:
            info = loader_info(loader, sys._getframe(2))
            names = ("name", "dataset", "num_samples", "batch_size", "num_workers")
            key = tuple(info[name] for name in names)
            record = self._by_info.get(key)  # a loader recreated for each epoch is one loader
            if record is None:
                record = self._by_info[key] = LoaderRecord(len(self.records), info)
                self.records.append(record)
            self._by_loader[loader] = record
        return record


class StepRecorder:
    """Records the steps of one iterator."""

    def __init__(self, recorder: Recorder, record: LoaderRecord) -> None:
        self.recorder = recorder
        self._record = record
        self._epoch = len(record.epochs) - 1

    def next(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        """The next batch of an iterator whose `__next__` is ``original``."""
        record = self._record
        start_cpu_ns, start_ns = time.thread_time_ns(), time.perf_counter_ns()
        before_ns = getattr(iterator, "device_wait_ns", 0)
        this_thread.loader = record.number
        try:
            batch = original(iterator)
        except StopIteration:
            record.epochs[self._epoch].end_ns = start_ns
            raise
        finally:
            this_thread.loader = None
        end_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns() - start_cpu_ns
        start_ns += getattr(iterator, "device_wait_ns", 0) - before_ns  # the device's pace is the step's
        record.steps.append(Step(self._epoch, start_ns, end_ns, cpu_ns, time.process_time_ns()))
        record.num_steps += 1
        if record.num_steps == 1:
            record.info |= batch_info(batch)
        return batch


def _recorded_next(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def __next__(iterator: Any) -> Any:  # noqa: N807  # its name in tracebacks
        steps: StepRecorder | None = iterator.__dict__.get("_fastload_recorder")
        if steps is None or this_thread.loader is not None or not steps.recorder.is_on:
            return original(iterator)
        return steps.next(original, iterator)

    return __next__
