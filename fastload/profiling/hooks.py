"""Records the batches that a process makes, and their transport: in the consumer and in its workers.

A hooked function returns and raises what the original does.
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
from fastload.epochs.torch_path import WholeBatches
from fastload.profiling import probes
from fastload.profiling.line_sampler import LineSampler
from fastload.profiling.recording import Event, Recording
from fastload.profiling.spans import BatchRecorder, probe, this_thread
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

# Functions of the consumer's process that pin batches or copy them to a device: module, name, stage.
# Tensor.to() itself is not among them: torch.compile would trace into its replacement.
COPIES = (
    ("fastload.device.pinning", "pin_batch", probes.PIN),
    ("accelerate.data_loader", "send_to_device", probes.COPY),
    ("lightning.pytorch.core.hooks", "move_data_to_device", probes.COPY),
    ("lightning.fabric.fabric", "move_data_to_device", probes.COPY),
    ("lightning.fabric.wrappers", "move_data_to_device", probes.COPY),
)
FOLDER = os.path.join(os.path.dirname(__file__), "")  # of the frames that tracebacks do not show
_LOADER = "_fastload_loader"  # an attribute of worker threads
NO_LOADER = -1  # the loader number of what belongs to no loader: pinning, receiving, copying


class ProcessRecorder:
    """Records the batches of all loaders in one process.

    Args:
        directory: Where its recording goes.
        loader: The number of the loader whose worker this is; `NO_LOADER` in the consumer's process.

    Attributes:
        current: The recorder of this process; None if nothing is recorded.
    """

    current: ProcessRecorder | None = None

    def __init__(self, directory: str, loader: int) -> None:
        self._loader = loader
        self._is_consumer = loader == NO_LOADER
        self._recording = Recording(directory)
        self._probes = probes.Probes()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._recorders: dict[tuple[int, int, int], BatchRecorder] = {}  # by loader, worker and thread
        self._making: dict[int, tuple[int, int]] = {}  # the loader and the worker, by thread
        self._lines: LineSampler | None = None  # from the first batch on

    @classmethod
    def begin_worker(cls, directory: str, loader: int) -> None:
        """Begin to record in a worker process."""
        # A forked worker has copies of the consumer's objects, among them the state of the forking thread.
        this_thread.spans, this_thread.is_making, this_thread.loader = None, False, None
        cls.current = cls(directory, loader)
        hook_process(contextlib.ExitStack())  # for as long as the process lives

    @classmethod
    def end(cls) -> None:
        """End the recording of this process."""
        recorder, cls.current = cls.current, None
        if recorder is not None:
            if recorder._lines is not None:
                recorder._lines.stop()
            recorder._recording.close()

    def measure(self, fetcher: Any, make: Callable[..., Any], index: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``make``, which makes a batch, and record it under its loader."""
        loader: int | None = self._loader
        worker, thread = _worker_number(), threading.get_ident()
        if self._is_consumer:  # a worker thread knows its loader since it was made
            loader = this_thread.loader if worker < 0 else vars(threading.current_thread()).get(_LOADER)
        # A loader inside the dataset is part of the outer batch. A process that was forked from a recorded
        # one, and is not its worker, records nothing.
        if loader is None or this_thread.is_making or os.getpid() != self._pid:
            return make(fetcher, index, *args, **kwargs)
        recorder = self._recorders.get((loader, worker, thread)) or self._begin(
            loader, worker, thread, fetcher
        )
        self._making[thread] = loader, worker
        try:
            size = len(index) if isinstance(index, (list, tuple)) else 1
            return recorder.measure(functools.partial(make, fetcher, index, *args, **kwargs), size)
        finally:
            del self._making[thread]

    def _begin(self, loader: int, worker: int, thread: int, fetcher: Any) -> BatchRecorder:
        recorder = BatchRecorder(self._recording, loader, worker, self._probes.switch)
        with self._lock:
            if self._lines is None:
                self._lines = LineSampler(self._recording, self._making)
            self._recorders[loader, worker, thread] = recorder
        attributes = vars(fetcher)  # torch's name or fastload's; `or` would ask for the dataset's length
        dataset = attributes["dataset"] if "dataset" in attributes else attributes.get("_dataset")
        self._probes.add_dataset(dataset)
        return recorder

    def add(self, stage: str, wall_ns: int) -> None:
        """Add time outside of making a batch, such as sending one."""
        if os.getpid() == self._pid:
            loader = self._loader if this_thread.loader is None else this_thread.loader
            self._recording.add(Event(loader, _worker_number(), stage, wall_ns))


def _worker_number() -> int:
    info = get_worker_info()
    return -1 if info is None else info.id


# Where pools find the main function of worker processes, and that function, by the kind of loader.
_MAINS: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "torch": (torch_worker, "_worker_loop", worker_loop),
    "fastload": (own_process, "main", own_worker.main),
}


def _recorded_main(kind: str, directory: str, loader: int, *args: Any, **kwargs: Any) -> None:
    """The main function of worker processes while a profile runs."""
    ProcessRecorder.begin_worker(directory, loader)
    _MAINS[kind][2](*args, **kwargs)


def hook_new_workers(directory: str, loader: int) -> None:
    """Let worker processes that start from now on record, for this loader."""
    for kind, (owner, name, _) in _MAINS.items():
        # It is pickled with its arguments: fork, spawn and forkserver all bring the hooks to the worker.
        setattr(owner, name, functools.partial(_recorded_main, kind, directory, loader))


def unhook_new_workers() -> None:
    """Start worker processes as without a profile again."""
    for owner, name, original in _MAINS.values():
        setattr(owner, name, original)


def hook_process(undo: contextlib.ExitStack) -> None:
    """Measure, in this process, each batch where it is made, and the transport of batches."""
    for kind in (*DATASET_FETCHERS, own_fetch.Fetcher):
        _hook(undo, kind, "fetch", _hooked_fetch(vars(kind)["fetch"]))
    _hook(undo, multiprocessing.queues, "_ForkingPickler", _hooked_pickler())
    _hook(undo, torch_pin_memory, "pin_memory", _timed(probes.PIN, pin_memory))
    thread_init = thread_pool._WorkerThread.__init__
    _hook(undo, thread_pool._WorkerThread, "__init__", _hooked_thread(thread_init))
    hook_copies(undo)


def _hook(undo: contextlib.ExitStack, owner: Any, name: str, hooked: Any) -> None:
    original = vars(owner)[name]
    if not hasattr(original, "_is_hooked"):  # a forked worker has the hooks already
        hooked._is_hooked = True
        setattr(owner, name, hooked)
        undo.callback(setattr, owner, name, original)


def hook_copies(undo: contextlib.ExitStack) -> None:
    """Measure copies in the modules of `COPIES` that are imported by now."""
    for module, name, stage in COPIES:
        owner = sys.modules.get(module)
        if owner is not None and name in vars(owner):
            _hook(undo, owner, name, _timed(stage, vars(owner)[name]))


def _hooked_thread(original: Callable[..., None]) -> Callable[..., None]:
    """A worker thread remembers the loader that makes it."""

    def __init__(worker: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # its name in tracebacks
        original(worker, *args, **kwargs)
        vars(worker.thread)[_LOADER] = this_thread.loader

    return __init__


def _hooked_fetch(original: Callable[..., Any]) -> Callable[..., Any]:
    def fetch(fetcher: Any, index: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = ProcessRecorder.current
        # torch's fetcher asks `WholeBatches` for batches, which fastload's fetcher makes.
        if recorder is None or isinstance(vars(fetcher).get("dataset"), WholeBatches):
            return original(fetcher, index, *args, **kwargs)
        for attribute in ("collate_fn", "_collate_fn"):  # torch's name and fastload's
            collate = vars(fetcher).get(attribute)
            if (
                collate is not None
                and not hasattr(collate, "_is_hooked")
                and not _is_replaced(fetcher, collate)
            ):
                setattr(fetcher, attribute, _hooked_collate(collate))
        reading = vars(fetcher).get("_reading") or contextlib.nullcontext
        # Before the probes, which would keep readers from meeting the libraries.
        with reading() or contextlib.nullcontext():
            return recorder.measure(fetcher, original, index, *args, **kwargs)

    return fetch


def _hooked_collate(collate: Any) -> Any:
    """A probed collate_fn.

    A `LoaderCollate`, which a framework got from fastload's loader, checks that torch's fetcher calls it. So
    it stays the outermost function, around a probed one.
    """
    if type(collate) is LoaderCollate:
        return LoaderCollate(_hooked_collate(own_collate(collate)), collate._fastload_lost)
    name = getattr(collate, "__qualname__", type(collate).__qualname__)
    hooked = probe(collate, (probes.COLLATE, name))
    hooked._is_hooked = True
    return hooked


def _is_replaced(fetcher: Any, collate: Any) -> bool:
    """Whether fastload's fetcher replaces this function with its own rows, which it tells by identity."""
    return isinstance(fetcher, own_fetch.Fetcher) and is_torch_default(collate)


def _hooked_pickler() -> Any:
    """The pickler of multiprocessing's queues, which measures the time of sending and receiving."""
    original: Any = multiprocessing.queues._ForkingPickler  # type: ignore[attr-defined]

    class HookedPickler(original):  # type: ignore[misc]
        @classmethod
        def dumps(cls, value: Any, protocol: int | None = None) -> Any:
            return _timed(probes.SEND, original.dumps)(value, protocol)

        loads = staticmethod(_timed(probes.RECEIVE, original.loads))

    return HookedPickler


def _timed(stage: str, function: Callable[..., Any]) -> Any:
    """A function whose time is added to a stage outside of batches; calls within calls count once."""

    @functools.wraps(function, updated=())
    def timed(*args: Any, **kwargs: Any) -> Any:
        recorder = ProcessRecorder.current
        if recorder is None or this_thread.is_timed:
            return function(*args, **kwargs)
        this_thread.is_timed = True
        start_ns = time.perf_counter_ns()
        try:
            return function(*args, **kwargs)
        finally:
            this_thread.is_timed = False
            recorder.add(stage, time.perf_counter_ns() - start_ns)

    return timed
