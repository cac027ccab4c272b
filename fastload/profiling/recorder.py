"""`fastload.profile`: records loaders in the process that iterates over them, and their workers.

A recorded loader returns the same batches, in the same order, with the same errors. Only the outermost
`__iter__` and `__next__` of a thread count, because a loader can wrap another one. What is replaced meanwhile
is `__iter__`, whose iterators are wrapped, and the main functions of worker processes while a recorded loader
starts its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

from torch.utils.data import dataloader as torch_loader

from fastload.device.devices import uses_cuda
from fastload.profiling.counter import Counter
from fastload.profiling.loader_info import LoaderRecord, Step, name_of, settings_of
from fastload.profiling.measures import Machine, measured
from fastload.profiling.report import ProfileReport
from fastload.profiling.sampler import CONSUMER_INTERVAL_S, INTERVAL_S, Sampler, read_sums
from fastload.readers import patches
from fastload.readers.decode_cache import activate
from fastload.system.budget import available_bytes
from fastload.system.cpus import CpuTimes, busy_share, others_share, worthwhile_cpus
from fastload.system.torch_private import torch_worker, worker_loop
from fastload.workers import process as own_process
from fastload.workers import worker as own_worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

# Where pools find the main function of worker processes, and that function.
_MAINS: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "torch": (torch_worker, "_worker_loop", worker_loop),
    "fastload": (own_process, "main", own_worker.main),
}


class _Thread(threading.local):
    is_inside = False  # a recorded `__iter__` or `__next__`


_thread = _Thread()


def _recorded_main(
    kind: str, folder: str, interval_s: float, loader: int, counts: bool, *args: Any, **kwargs: Any
) -> None:
    """The main function of a worker process of a recorded loader."""
    sampler = Sampler(folder, interval_s)
    if counts:
        sampler.counters.append(Counter(folder, loader))
        sampler.counters[0].begin()
    sampler.threads[threading.get_ident()] = loader, time.perf_counter_ns()
    try:
        _MAINS[kind][2](*args, **kwargs)
    finally:
        sampler.stop()


def _set_mains(*args: Any) -> None:
    """Let worker processes that start from now on be recorded, by these arguments; or, without any, not."""
    for kind, (owner, name, main) in _MAINS.items():
        # It is pickled with its arguments: any start method brings the sampler to the worker.
        setattr(owner, name, functools.partial(_recorded_main, kind, *args) if args else main)


class Profile:
    """The recording of loaders from `start()` to `stop()`, or in a with block; see `profile`."""

    _current: Profile | None = None

    def __init__(self, loaders: tuple[Any, ...]) -> None:
        self._loaders = loaders
        self._records: dict[Any, LoaderRecord] = {}
        self._pid = os.getpid()
        self._starting = threading.RLock()  # threads start the workers of their loaders one after another
        self._undo = contextlib.ExitStack()
        self._sampler: Sampler | None = None
        self._before: CpuTimes | None = None
        self._report = ProfileReport([], Machine(worthwhile_cpus()), 0)

    def start(self) -> Self:
        """Begin to record.

        Raises:
            RuntimeError: Another profile is running in this process.
        """
        if Profile._current is not None:
            raise RuntimeError(
                "a profile is running in this process already: end its with block first, or "
                "run the script with python instead of `fastload profile`"
            )
        self._folder = tempfile.mkdtemp(prefix="fastload-profile-")
        Profile._current = self
        patches.retain(self)
        own = sys.modules.get("fastload.loader")
        for kind in (torch_loader.DataLoader, *([own.DataLoader] if own else [])):
            original = kind.__iter__
            self._undo.callback(setattr, kind, "__iter__", original)
            kind.__iter__ = self._recorded_iter(original)
        self._before = CpuTimes.now()
        return self

    def stop(self) -> None:
        """Stop recording; a second call does nothing. Loaders in use continue, unrecorded."""
        before, self._before = self._before, None
        if before is None:
            return
        after, Profile._current = CpuTimes.now(), None
        self._undo.close()
        if self._sampler is not None:
            self._sampler.stop()
        for holder in (self, *(record.counter for record in self._records.values())):
            if holder is not None:
                patches.release(holder)
        machine = Machine(worthwhile_cpus(), busy_share(before, after), others_share(before, after))
        try:
            sums, counts = read_sums(self._folder)
            loaders = [measured(record, sums, counts, machine) for record in self._records.values()]
            self._report = ProfileReport(loaders, machine, available_bytes())
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def report(self) -> ProfileReport:
        """What was measured.

        Raises:
            RuntimeError: The profile has not ended.
        """
        if self._before is not None:
            raise RuntimeError("the profile is still running: ask after its with block")
        return self._report

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _recorded_iter(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def __iter__(loader: Any) -> Any:  # noqa: N807  # its name in tracebacks
            is_recorded = not self._loaders or any(loader is other for other in self._loaders)
            # A process that was forked from this one is not recorded.
            if _thread.is_inside or not is_recorded or os.getpid() != self._pid:
                return original(loader)
            return self._begin_epoch(original, loader)

        return __iter__

    def _begin_epoch(self, original: Callable[[Any], Any], loader: Any) -> Any:
        with self._starting:
            record, start_ns = self._record_of(loader), time.perf_counter_ns()
            threads = set(threading.enumerate())
            interval_s = INTERVAL_S * max(1.0, record.settings["num_workers"] / worthwhile_cpus())
            _set_mains(self._folder, interval_s, record.number, record.counter is not None)
            _thread.is_inside = True
            try:
                iterator = original(loader)
            finally:
                _thread.is_inside = False
                _set_mains()
            if record.settings["worker_type"] == "thread":
                for thread in set(threading.enumerate()) - threads:
                    self._watch(record, thread.ident or 0)
            record.epochs.append([start_ns, 0])
            return _Iterator(self, record, len(record.epochs) - 1, iterator)

    def _record_of(self, loader: Any) -> LoaderRecord:
        name, settings = name_of(loader, sys._getframe(2)), settings_of(loader)
        key = name, *(settings[each] for each in ("dataset", "num_samples", "batch_size", "num_workers"))
        if key not in self._records:  # a loader recreated for each epoch is one loader
            number = len(self._records)
            counter = None if settings["has_cache"] else Counter(self._folder, number)
            self._records[key] = LoaderRecord(number, name, settings, counter=counter)
        return self._records[key]

    def _watch(self, record: LoaderRecord, thread: int) -> None:
        """Sample a thread of this process."""
        with self._starting:
            self._sampler = self._sampler or Sampler(self._folder, CONSUMER_INTERVAL_S)
            if record.counter is not None and record.counter not in self._sampler.counters:
                self._sampler.counters.append(record.counter)
        self._sampler.threads[thread] = record.number, time.perf_counter_ns()

    def _next(self, record: LoaderRecord, epoch: int, loop: Any) -> Any:
        """The next batch of an iterator, in an epoch by its number."""
        makes = record.settings["num_workers"] == 0
        start_ns, before_ns = time.perf_counter_ns(), getattr(loop, "device_wait_ns", 0)
        _thread.is_inside = True
        if makes:
            self._watch(record, threading.get_ident())
            if record.counter is not None:
                record.counter.begin()
        try:
            batch = next(loop)
        except StopIteration:
            record.epochs[epoch][1] = start_ns
            if record.counter is not None:
                record.counter.end()
            raise
        finally:
            _thread.is_inside = False
            if makes:
                activate(None)
                if self._sampler is not None:
                    self._sampler.threads.pop(threading.get_ident(), None)
        end_ns = time.perf_counter_ns()
        start_ns += getattr(loop, "device_wait_ns", 0) - before_ns  # the device's pace is the step's
        record.steps.append(Step(epoch, start_ns, end_ns, time.process_time_ns()))
        record.num_steps += 1
        if uses_cuda():  # copies to the device show in the loop
            self._watch(record, threading.get_ident())
        return batch


class _Iterator:
    """An iterator of a recorded loader, in all but its class and the time that is taken."""

    def __init__(self, profile: Profile, record: LoaderRecord, epoch: int, iterator: Any) -> None:
        self._fastload_profile = profile, record, epoch, iterator

    def __iter__(self) -> Self:
        return self

    def __len__(self) -> int:
        return len(self._fastload_profile[-1])

    def __next__(self) -> Any:
        profile, record, epoch, iterator = self._fastload_profile
        if _thread.is_inside or profile is not Profile._current:
            return next(iterator)
        return profile._next(record, epoch, iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fastload_profile[-1], name)


def profile(*loaders: Any) -> Profile:
    """Measure how long training loops wait for data, where loading spends its time, and what would help.

    ```python
    with fastload.profile(loader) as profile:
        for images, labels in loader:
            train_step(images, labels)
    print(profile.report())
    ```

    Loaders of torch's class and of fastload's are recorded alike. Batches, their order and errors stay the
    same. Workers started before the block are not recorded; use it around `iter(loader)`.

    Args:
        loaders: The loaders to record; none: all loaders of this process.

    Returns:
        A context manager; `report()` is what was measured.

    Raises:
        TypeError: One of `loaders` is no DataLoader.
    """
    for loader in loaders:
        if not isinstance(loader, torch_loader.DataLoader):
            raise TypeError(f"profile() takes DataLoaders, but got {type(loader).__name__}")
    return Profile(loaders)
