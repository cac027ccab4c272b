"""Record the batches that a watched process makes, and their transport.

Runs in the consumer's process and in its workers. Rules:

1. A hooked function returns and raises what the original does.
2. Worker processes get their hooks through the function that they start with (`WatchedMain`),
   which is pickled with the directory of the recordings: this works for fork, spawn and forkserver alike.
3. A process forked from a watched one that is not its worker records nothing.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.queues
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from fastload.batch import fetch as own_fetch
from fastload.batch.loader_collate import LoaderCollate, own_collate
from fastload.batch.stacking import is_torch_default
from fastload.profiling import probes
from fastload.profiling.line_sampler import LineSampler
from fastload.profiling.recording import Moment, Recording
from fastload.profiling.spans import BatchWatch, here, probe
from fastload.rng.seeding import get_worker_info
from fastload.system.torch_private import (
    DATASET_FETCHERS,
    pin_memory,
    torch_pin_memory,
    torch_worker,
    worker_loop,
)
from fastload.workers import process as own_process
from fastload.workers import thread_pool
from fastload.workers import worker as own_worker

if TYPE_CHECKING:
    from collections.abc import Callable

# Functions of the consumer's process that pin batches or copy them to a device. Tensor.to() itself is not
# among them: torch.compile would trace into its replacement.
_COPIES = (
    ("fastload.epochs.with_workers", "pin_batch", probes.PIN),
    ("fastload.epochs.without_workers", "pin_batch", probes.PIN),
    ("accelerate.data_loader", "send_to_device", probes.COPY),
    ("lightning.pytorch.core.hooks", "move_data_to_device", probes.COPY),
    ("lightning.fabric.fabric", "move_data_to_device", probes.COPY),
    ("lightning.fabric.wrappers", "move_data_to_device", probes.COPY),
)
FOLDER = os.path.join(os.path.dirname(__file__), "")  # of the frames that tracebacks do not show
_LOADER = "_fastload_loader"  # an attribute of worker threads
NO_LOADER = -1  # the loader number of what belongs to no loader: pinning, receiving, copying


class _InUse(threading.local):
    loader: int | None = None  # the loader whose `__iter__` or `__next__` runs in this thread
    is_timed = False  # whether a function of `_timed` runs


in_use = _InUse()


class Process:
    """What this process records while it is watched.

    Args:
        directory: Where its recording goes.
        loader: The number of the loader whose worker this is; `NO_LOADER` in the consumer's process.

    Attributes:
        current: The one of this process; None if the process is not watched.
    """

    current: Process | None = None

    def __init__(self, directory: str, loader: int) -> None:
        self._loader = loader
        self._is_consumer = loader == NO_LOADER
        self._recording = Recording(directory)
        self._probes = probes.Probes()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._watches: dict[tuple[int, int, int], BatchWatch] = {}  # by loader, worker and thread
        self._making: dict[int, tuple[int, int]] = {}  # the loader and the worker, by thread
        self._lines: LineSampler | None = None  # from the first batch on

    @classmethod
    def begin_worker(cls, directory: str, loader: int) -> None:
        """Begin to watch a worker process; a forked one has copies of the consumer's objects."""
        here.spans, here.is_making = None, False
        in_use.loader = None
        cls.current = cls(directory, loader)
        hook_process(contextlib.ExitStack())  # for as long as the process lives

    @classmethod
    def end(cls) -> None:
        """End the watch of this process."""
        process, cls.current = cls.current, None
        if process is not None:
            if process._lines is not None:
                process._lines.stop()
            process._recording.close()

    def measure(self, fetcher: Any, make: Callable[..., Any], index: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``make``, which makes a batch, and record it under its loader."""
        loader: int | None = self._loader
        worker, thread = _worker_number(), threading.get_ident()
        if self._is_consumer:  # a worker thread knows its loader since it was made
            loader = in_use.loader if worker < 0 else vars(threading.current_thread()).get(_LOADER)
        # A loader inside the dataset is part of the outer batch.
        if loader is None or here.is_making or os.getpid() != self._pid:
            return make(fetcher, index, *args, **kwargs)
        watch = self._watches.get((loader, worker, thread)) or self._begin(loader, worker, thread, fetcher)
        self._making[thread] = loader, worker
        try:
            size = len(index) if isinstance(index, (list, tuple)) else 1
            return watch.measure(functools.partial(make, fetcher, index, *args, **kwargs), size)
        finally:
            del self._making[thread]

    def _begin(self, loader: int, worker: int, thread: int, fetcher: Any) -> BatchWatch:
        watch = BatchWatch(self._recording, loader, worker, self._probes.switch)
        with self._lock:
            if self._lines is None:
                self._lines = LineSampler(self._recording, self._making)
            self._watches[loader, worker, thread] = watch
        held = vars(fetcher)  # torch's name and fastload's; its truth would ask for the dataset's length
        self._probes.add_dataset(held["dataset"] if "dataset" in held else held.get("_dataset"))
        return watch

    def add(self, stage: str, name: str, wall_ns: int, cpu_ns: int) -> None:
        """Add time outside of making a batch, such as sending one."""
        if os.getpid() == self._pid:
            loader = self._loader if in_use.loader is None else in_use.loader
            self._recording.add(Moment(loader, _worker_number(), stage, name, wall_ns, cpu_ns))


def _worker_number() -> int:
    info = get_worker_info()
    return -1 if info is None else info.id


# Where worker processes are told what to run, and what that is.
_MAINS: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "torch": (torch_worker, "_worker_loop", worker_loop),
    "fastload": (own_process, "main", own_worker.main),
}


class WatchedMain:
    """The function that worker processes run, with hooks; it is pickled for spawned processes."""

    def __init__(self, kind: str, directory: str, loader: int) -> None:
        self._kind = kind
        self._directory = directory
        self._loader = loader

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the worker."""
        Process.begin_worker(self._directory, self._loader)
        _MAINS[self._kind][2](*args, **kwargs)


def watch_new_workers(directory: str, loader: int) -> None:
    """Assign worker processes that start from now on to this loader."""
    for kind, (owner, name, _) in _MAINS.items():
        setattr(owner, name, WatchedMain(kind, directory, loader))


def forget_new_workers() -> None:
    """Start worker processes as without a profile again."""
    for owner, name, original in _MAINS.values():
        setattr(owner, name, original)


def hook_process(undo: contextlib.ExitStack) -> None:
    """Measure, in this process, each batch where it is made, and the transport of batches."""
    replace = functools.partial(_hook, undo)
    for kind in (*DATASET_FETCHERS, own_fetch.Fetcher):
        replace(kind, "fetch", _watched_fetch(vars(kind)["fetch"]))
    replace(multiprocessing.queues, "_ForkingPickler", _watched_pickler())
    replace(torch_pin_memory, "pin_memory", _timed(probes.PIN, pin_memory))
    replace(thread_pool._WorkerThread, "__init__", _watched_thread(thread_pool._WorkerThread.__init__))
    hook_copies(undo)


def _hook(undo: contextlib.ExitStack, owner: Any, name: str, watched: Any) -> None:
    original = vars(owner)[name]
    if not hasattr(original, "_is_watched"):  # a forked worker has the hooks already
        watched._is_watched = True
        setattr(owner, name, watched)
        undo.callback(setattr, owner, name, original)


def hook_copies(undo: contextlib.ExitStack) -> None:
    """Hooks in the modules of `_COPIES` that are imported by now."""
    for module, name, stage in _COPIES:
        owner = sys.modules.get(module)
        if owner is not None and name in vars(owner):
            _hook(undo, owner, name, _timed(stage, vars(owner)[name]))


def _watched_thread(original: Callable[..., None]) -> Callable[..., None]:
    """A worker thread remembers the loader that makes it."""

    def __init__(worker: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # its name in tracebacks
        original(worker, *args, **kwargs)
        vars(worker.thread)[_LOADER] = in_use.loader

    return __init__


def _watched_fetch(original: Callable[..., Any]) -> Callable[..., Any]:
    def fetch(fetcher: Any, index: Any, *args: Any, **kwargs: Any) -> Any:
        process = Process.current
        if process is None:
            return original(fetcher, index, *args, **kwargs)
        for attribute in ("collate_fn", "_collate_fn"):  # torch's name and fastload's
            collate = vars(fetcher).get(attribute)
            if collate is not None and not hasattr(collate, "_is_watched") and not _is_ours(fetcher, collate):
                setattr(fetcher, attribute, _watched_collate(collate))
        return process.measure(fetcher, original, index, *args, **kwargs)

    return fetch


def _watched_collate(collate: Any) -> Any:
    """A probed collate_fn.

    The collate_fn of a loader that a framework built from ours looks at its caller, torch's fetcher. It stays
    the outermost function, around a probed one.
    """
    if type(collate) is LoaderCollate:
        lost, channels_last = collate._fastload_note
        return LoaderCollate(_watched_collate(own_collate(collate)), lost, channels_last=channels_last)
    name = getattr(collate, "__qualname__", type(collate).__qualname__)
    watched = probe(collate, (probes.COLLATE, name))
    watched._is_watched = True
    return watched


def _is_ours(fetcher: Any, collate: Any) -> bool:
    """Whether fastload's fetcher replaces this function with its own rows, which it tells by identity."""
    return isinstance(fetcher, own_fetch.Fetcher) and is_torch_default(collate)


def _watched_pickler() -> Any:
    """The pickler of multiprocessing's queues, which measures the time of sending and receiving."""
    original: Any = multiprocessing.queues._ForkingPickler  # type: ignore[attr-defined]

    class WatchedPickler(original):  # type: ignore[misc]
        @classmethod
        def dumps(cls, value: Any, protocol: int | None = None) -> Any:
            return _timed(probes.SEND, original.dumps)(value, protocol)

        loads = staticmethod(_timed(probes.RECEIVE, original.loads))

    return WatchedPickler


def _timed(stage: str, function: Callable[..., Any]) -> Any:
    """A function whose time is added to a stage outside of batches; calls within calls count once."""

    @functools.wraps(function, updated=())
    def timed(*args: Any, **kwargs: Any) -> Any:
        process = Process.current
        if process is None or in_use.is_timed:
            return function(*args, **kwargs)
        in_use.is_timed = True
        start_ns, start_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        try:
            return function(*args, **kwargs)
        finally:
            in_use.is_timed = False
            wall_ns, cpu_ns = time.perf_counter_ns() - start_ns, time.thread_time_ns() - start_cpu_ns
            process.add(stage, function.__name__, wall_ns, cpu_ns)

    return timed
