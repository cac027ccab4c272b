"""Hooks into torch's and fastload's loaders: in the process that iterates over them, and in their workers.

Rules:

1. A watched loader returns the same batches, in the same order, with the same errors.
2. `Watch.stop()` puts every original back; a loader that is in use continues unwatched.
3. Worker processes get their hooks through the function that they start with, which is pickled with the
   directory of the recordings: this works for fork, spawn and forkserver alike.
4. Only the outermost `__iter__` and `__next__` of a thread count: a loader may use another one inside.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing.queues
import os
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, _utils
from torch.utils.data import dataloader as torch_loader

from fastload.batch import fetch as own_fetch
from fastload.batch.loader_collate import LoaderCollate, own_collate
from fastload.batch.stacking import is_torch_default
from fastload.profiling import probes
from fastload.profiling.hot_lines import HotLines, is_own_code
from fastload.profiling.recording import Recording, Sums
from fastload.profiling.spans import BatchWatch, here, probe
from fastload.rng.worker_info import get_worker_info
from fastload.workers import process as own_process
from fastload.workers import threads as own_threads
from fastload.workers import worker as own_worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

NEW, AHEAD, REPLAYED = "new", "ahead", "replayed"  # the kinds of steps
MAX_STEPS = 200_000  # per loader: about 40 MB

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
_GENERAL_NAMES = frozenset(("self", "loader", "dataloader", "data_loader", "iterable"))
_LOADER = "_fastload_loader"  # an attribute of worker threads
_PROCESS = -1  # the loader number of what belongs to no loader: pinning, receiving, copying


class Step(NamedTuple):
    """One call of `__next__` that returned a batch.

    Attributes:
        epoch: The number of the epoch within the profile, from 0.
        start_ns: When the consumer asked for the batch.
        end_ns: When it got the batch.
        cpu_ns: CPU time of the consumer's thread in between.
        process_cpu_ns: CPU time of the consumer's process until then, with all threads.
        kind: `NEW`; `REPLAYED` if the batch was held in memory; `AHEAD` if it is new, but the workers had
            time to prepare it while held batches were used.
    """

    epoch: int
    start_ns: int
    end_ns: int
    cpu_ns: int
    process_cpu_ns: int
    kind: str = NEW


@dataclass
class Epoch:
    """One iteration over a loader.

    Attributes:
        start_ns: When `iter()` was called.
        ready_ns: When `iter()` returned.
        asked_ns: When the loop asked for one more batch after the last; 0 if it was left early or goes on.
        end_ns: When it learnt that there is none; 0 likewise.
    """

    start_ns: int
    ready_ns: int
    asked_ns: int = 0
    end_ns: int = 0


@dataclass
class LoaderWatch:
    """What is recorded of one loader in the consumer's process.

    Attributes:
        number: Its number among the watched loaders.
        facts: What is known of the loader and its batches; see `_facts_of`.
        epochs: Its epochs.
        steps: The last `MAX_STEPS` batches that the consumer got.
        num_steps: How many it got in all.
        held: Copies of batches, for replaying.
    """

    number: int
    facts: dict[str, Any]
    epochs: list[Epoch] = field(default_factory=list)
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    num_steps: int = 0
    held: list[Any] = field(default_factory=list)


class _Here(threading.local):
    loader: int | None = None  # the loader whose `__iter__` or `__next__` runs in this thread


_here = _Here()


class Watch:
    """Watches loaders from `start()` to `stop()`.

    Args:
        directory: Where recordings are written.
        loaders: The loaders to watch; None watches every loader of the process.
        replay: How many batches to hold and to return again in place of new ones; 0: none.

    Attributes:
        loaders: What was recorded, in the order of first use.
    """

    def __init__(self, directory: str, loaders: tuple[Any, ...] | None = None, *, replay: int = 0) -> None:
        self.directory = directory
        self.loaders: list[LoaderWatch] = []
        self.is_on = False
        self.replay = replay
        self._pid = os.getpid()
        self._starting = threading.RLock()  # threads start the workers of their loaders one after another
        self._only = loaders
        self._known: weakref.WeakKeyDictionary[Any, LoaderWatch] = weakref.WeakKeyDictionary()
        self._by_facts: dict[tuple[Any, ...], LoaderWatch] = {}
        self._undo = contextlib.ExitStack()
        self._patched: set[type] = set()

    def start(self) -> None:
        """Put the hooks in place."""
        if _Process.current is not None:
            raise RuntimeError(
                "a profile is running in this process already: end its with block first, or "
                "run the script with python instead of `fastload profile`"
            )
        self.is_on = True
        _Process.current = _Process(self.directory, _PROCESS)
        self._undo.callback(_Process.end)
        _hook_process(self._undo)
        self._replace(_utils.worker, "_worker_loop", _torch_worker_loop)
        self._replace(own_process, "main", _own_main)
        kinds = [torch_loader.DataLoader]
        ours = sys.modules.get("fastload.loader")
        if ours is not None:
            kinds.append(ours.DataLoader)
        for kind in kinds:
            self._replace(kind, "__iter__", self._watched_iter(kind.__iter__))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        original = vars(owner)[name]
        setattr(owner, name, value)
        self._undo.callback(setattr, owner, name, original)

    def stop(self) -> None:
        """Put the originals back."""
        self.is_on = False
        self._undo.close()

    def _watched_iter(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        watch = self

        def __iter__(loader: Any) -> Any:  # noqa: N807  # its name in tracebacks
            if os.getpid() != watch._pid:  # a process that was forked is not watched, nor are its workers
                _utils.worker._worker_loop = _torch_worker_loop
                vars(own_process)["main"] = _own_main
                return original(loader)
            if _here.loader is not None or not watch._is_watched(loader):
                return original(loader)
            return watch._begin_epoch(original, loader)

        return __iter__

    def _is_watched(self, loader: Any) -> bool:
        return self.is_on and (self._only is None or any(loader is one for one in self._only))

    def _begin_epoch(self, original: Callable[[Any], Any], loader: Any) -> Any:
        watched = self._watch_of(loader)
        _hook_copies(self._undo)  # of modules that were imported since
        start_ns = time.perf_counter_ns()
        with self._starting:
            _utils.worker._worker_loop = _TorchWorker(self.directory, watched.number)
            vars(own_process)["main"] = _OwnWorker(self.directory, watched.number)
            _here.loader = watched.number
            try:
                iterator = original(loader)
            finally:
                _here.loader = None
            watched.epochs.append(Epoch(start_ns, time.perf_counter_ns()))
            self._watch_iterator(iterator, watched, len(watched.epochs) - 1)
        return iterator

    def _watch_of(self, loader: Any) -> LoaderWatch:
        known = self._known.get(loader)
        if known is None:
            facts = _facts_of(loader, sys._getframe(2))
            key = tuple(
                facts[name] for name in ("name", "dataset", "num_samples", "batch_size", "num_workers")
            )
            known = self._by_facts.get(key)  # a loader that is made anew for each epoch is one loader
            if known is None:
                known = self._by_facts[key] = LoaderWatch(len(self.loaders), facts)
                self.loaders.append(known)
            self._known[loader] = known
        return known

    def _watch_iterator(self, iterator: Any, watched: LoaderWatch, epoch: int) -> None:
        try:
            iterator._fastload_watched = _Progress(self, watched, epoch, iterator)
        except AttributeError:
            return  # an iterator without attributes, of a subclass: its own source is watched instead
        kind = next(base for base in type(iterator).__mro__ if "__next__" in vars(base))
        if kind not in self._patched:
            self._patched.add(kind)
            self._replace(kind, "__next__", _watched_next(vars(kind)["__next__"]))


class _Progress:
    """How far one iterator has come, and whether the next batch is a replayed one.

    Stretches of new batches and of `replay` held ones take turns. After a stretch of held batches the workers
    are ahead, so that the first new batches cost no wait; these are not counted. An epoch keeps its number of
    steps: its last new batches are left.
    """

    def __init__(self, watch: Watch, watched: LoaderWatch, epoch: int, iterator: Any) -> None:
        self.watch = watch
        self.watched = watched
        self.epoch = epoch
        self.num_steps = 0
        self._size = watch.replay
        self.num_ahead: int = watched.facts["num_workers"] * (1 + (watched.facts["prefetch_factor"] or 0))
        self._num_new: int = 2 * self._size + self.num_ahead
        self._num_total: int | None = None
        if self._size:
            with contextlib.suppress(TypeError, NotImplementedError):  # a stream without a length
                self._num_total = len(iterator)

    @property
    def _place(self) -> int:
        return self.num_steps % (self._num_new + self._size)

    @property
    def is_replayed(self) -> bool:
        """Whether the next batch is one of those that are held."""
        return bool(self._size) and self._place >= self._num_new

    @property
    def is_ahead(self) -> bool:
        """Whether the workers had time to run ahead while held batches were used."""
        return bool(self._size) and self.num_steps > self._num_new and self._place < self.num_ahead

    def held(self) -> Any:
        """The batch to return instead of a new one.

        Raises:
            StopIteration: The epoch has had all its steps.
        """
        return self.watched.held[self._place - self._num_new]

    def has_ended(self) -> bool:
        """Whether the epoch has had all its steps, some of them with held batches."""
        return self._num_total is not None and self.num_steps >= self._num_total

    def note(self, batch: Any) -> None:
        """Count a new batch, and hold a copy of it if there are too few."""
        if self._size and len(self.watched.held) < self._size:
            self.watched.held.append(copy.deepcopy(batch))
        self.num_steps += 1


def _watched_next(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def __next__(iterator: Any) -> Any:  # noqa: N807  # its name in tracebacks
        progress: _Progress | None = iterator.__dict__.get("_fastload_watched")
        if progress is None or _here.loader is not None or not progress.watch.is_on:
            return original(iterator)
        watched = progress.watched
        start_cpu_ns = time.thread_time_ns()
        start_ns = time.perf_counter_ns()
        is_replayed = progress.is_replayed
        try:
            if progress.has_ended():
                raise StopIteration
            if is_replayed:
                batch = progress.held()
            else:
                _here.loader = watched.number
                try:
                    batch = original(iterator)
                finally:
                    _here.loader = None
        except StopIteration:
            epoch = watched.epochs[progress.epoch]
            epoch.asked_ns, epoch.end_ns = start_ns, time.perf_counter_ns()
            raise
        end_ns = time.perf_counter_ns()
        cpu_ns = time.thread_time_ns() - start_cpu_ns
        kind = REPLAYED if is_replayed else AHEAD if progress.is_ahead else NEW
        watched.steps.append(Step(progress.epoch, start_ns, end_ns, cpu_ns, time.process_time_ns(), kind))
        watched.num_steps += 1
        if is_replayed:
            progress.num_steps += 1
        else:
            if watched.num_steps == 1:
                watched.facts.update(_facts_of_batch(batch))
            progress.note(batch)
        return batch

    return __next__


class _Process:
    """What this process records while it is watched.

    Args:
        directory: Where its recordings go.
        loader: The number of the loader whose worker this is; `_PROCESS` in the consumer's process.

    Attributes:
        current: The one of this process; None if the process is not watched.
        probes: Its probes.
    """

    current: _Process | None = None

    def __init__(self, directory: str, loader: int) -> None:
        self.loader = loader
        self.probes = probes.Probes()
        self._directory = directory
        self._pid = os.getpid()
        self._is_consumer = loader == _PROCESS
        self._lock = threading.Lock()
        # By loader, worker and thread; thread 0 for work outside of batches.
        self._recordings: dict[tuple[int, int, int], Recording] = {}
        self._watches: dict[tuple[int, int, int], BatchWatch] = {}
        self._lines: HotLines | None = None

    @classmethod
    def begin_worker(cls, directory: str, loader: int) -> None:
        """Begin to watch a worker process; a forked one has copies of the consumer's objects."""
        here.spans, here.is_making = None, False
        _here.loader = None
        cls.current = cls(directory, loader)
        _hook_process(contextlib.ExitStack())  # for as long as the process lives

    @classmethod
    def end(cls) -> None:
        """End the watch of this process."""
        process, cls.current = cls.current, None
        if process is not None and process._lines is not None:
            process._lines.stop()

    def measure(self, fetcher: Any, make: Callable[..., Any], index: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``make``, which makes a batch, and record it under the loader that it belongs to."""
        loader: int | None = self.loader
        worker = _worker_number()
        if self._is_consumer:  # a worker thread knows its loader since it was made
            loader = _here.loader if worker < 0 else vars(threading.current_thread()).get(_LOADER)
        if loader is None or os.getpid() != self._pid:
            return make(fetcher, index, *args, **kwargs)
        key = loader, worker, threading.get_ident()
        watch = self._watches.get(key) or self._begin(key, fetcher)
        lines = self._lines
        if lines is None:  # the profile has just ended
            return make(fetcher, index, *args, **kwargs)
        lines.begin(self._recordings[key])
        try:
            return watch.measure(functools.partial(make, fetcher), index, *args, **kwargs)
        finally:
            lines.end()

    def _begin(self, key: tuple[int, int, int], fetcher: Any) -> BatchWatch:
        with self._lock:
            if self._lines is None:
                self._lines = HotLines()
            self._recordings[key] = Recording(self._directory, key[0], key[1])
            watch = self._watches[key] = BatchWatch(self._recordings[key], self.probes.switch)
        held = vars(fetcher)  # torch's name and fastload's; its truth would ask for the dataset's length
        self.probes.add_dataset(held["dataset"] if "dataset" in held else held.get("_dataset"))
        return watch

    def add(self, stage: str, name: str, wall_ns: int, cpu_ns: int) -> None:
        """Add time that belongs to no batch that is being made, such as sending one."""
        if os.getpid() != self._pid:
            return
        loader = self.loader
        if self._is_consumer and _here.loader is not None:
            loader = _here.loader
        key = loader, _worker_number(), 0
        with self._lock:
            recording = self._recordings.get(key)
            if recording is None:
                recording = self._recordings[key] = Recording(self._directory, key[0], key[1])
        recording.add(stage, name, Sums(1, wall_ns, cpu_ns))


def _worker_number() -> int:
    info = get_worker_info()
    return -1 if info is None else info.id


_torch_worker_loop = _utils.worker._worker_loop
_own_main = own_worker.main


class _TorchWorker:
    """The function that torch's worker processes run, with hooks; it is pickled for spawned processes."""

    def __init__(self, directory: str, loader: int) -> None:
        self._directory = directory
        self._loader = loader

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        _Process.begin_worker(self._directory, self._loader)
        _torch_worker_loop(*args, **kwargs)


class _OwnWorker(_TorchWorker):
    """The function that fastload's worker processes run, likewise."""

    def __call__(self, setup: Any) -> None:
        _Process.begin_worker(self._directory, self._loader)
        _own_main(setup)


def _hook_process(undo: contextlib.ExitStack) -> None:
    """Measure, in this process, each batch where it is made, and the transport of batches."""
    replace = functools.partial(_hook, undo)
    for kind in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher, own_fetch.Fetcher):
        replace(kind, "fetch", _watched_fetch(vars(kind)["fetch"]))
    replace(multiprocessing.queues, "_ForkingPickler", _watched_pickler())
    replace(_utils.pin_memory, "pin_memory", _timed(probes.PIN, _utils.pin_memory.pin_memory))
    replace(own_threads._Worker, "__init__", _watched_thread(own_threads._Worker.__init__))
    _hook_copies(undo)


def _hook(undo: contextlib.ExitStack, owner: Any, name: str, watched: Any) -> None:
    original = vars(owner)[name]
    if not hasattr(original, "_is_watched"):  # a forked worker has the hooks already
        watched._is_watched = True
        setattr(owner, name, watched)
        undo.callback(setattr, owner, name, original)


def _hook_copies(undo: contextlib.ExitStack) -> None:
    """Hooks in the modules of `_COPIES` that are imported by now."""
    for module, name, stage in _COPIES:
        owner = sys.modules.get(module)
        if owner is not None and name in vars(owner):
            _hook(undo, owner, name, _timed(stage, vars(owner)[name]))


def _watched_thread(original: Callable[..., None]) -> Callable[..., None]:
    """A worker thread remembers the loader that makes it."""

    def __init__(worker: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # its name in tracebacks
        original(worker, *args, **kwargs)
        vars(worker.thread)[_LOADER] = _here.loader

    return __init__


def _watched_fetch(original: Callable[..., Any]) -> Callable[..., Any]:
    def fetch(fetcher: Any, index: Any, *args: Any, **kwargs: Any) -> Any:
        process = _Process.current
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
    """Whether fastload's fetcher replaces this function by its own rows, which it tells by identity."""
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


class _Depth(threading.local):
    value = 0


_depth = _Depth()


def _timed(stage: str, function: Callable[..., Any]) -> Any:
    """A function whose time is added to a stage outside of batches; calls within calls count once."""

    @functools.wraps(function, updated=())
    def timed(*args: Any, **kwargs: Any) -> Any:
        process = _Process.current
        if process is None or _depth.value:
            return function(*args, **kwargs)
        _depth.value = 1
        start_ns, start_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        try:
            return function(*args, **kwargs)
        finally:
            _depth.value = 0
            process.add(
                stage,
                function.__name__,
                time.perf_counter_ns() - start_ns,
                time.thread_time_ns() - start_cpu_ns,
            )

    return timed


def _facts_of(loader: Any, frame: FrameType | None) -> dict[str, Any]:
    """What is known of a loader before its first batch, as plain values."""
    dataset = loader.dataset
    is_iterable = isinstance(dataset, IterableDataset)
    num_samples = None
    if not is_iterable:
        with contextlib.suppress(Exception):  # whatever it raises, the loop may never ask for it
            num_samples = len(dataset)
    ours = sys.modules.get("fastload.loader")
    context = loader.multiprocessing_context or torch.multiprocessing
    return {
        "name": _name_of(loader, frame),
        "dataset": type(dataset).__name__,
        "is_cached": type(dataset).__name__ == "CachedDataset",
        "is_iterable": is_iterable,
        "num_samples": num_samples,
        "batch_size": loader.batch_size,
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "pin_memory": loader.pin_memory,
        "is_fastload": ours is not None and isinstance(loader, ours.DataLoader),
        "worker_method": getattr(loader, "worker_method", "process"),
        "start_method": context.get_start_method() if loader.num_workers else None,
        "device": None if getattr(loader, "device", None) is None else str(loader.device),
        "nbytes": 0,
        "image_dtype": None,
        "image_shape": None,
    }


def _facts_of_batch(batch: Any) -> dict[str, Any]:
    """The bytes of a batch's tensors, and the dtype and shape of the largest of them with 4 dimensions."""
    tensors: list[torch.Tensor] = []
    _collect(batch, tensors, 8)
    images = [tensor for tensor in tensors if tensor.dim() == 4]
    facts: dict[str, Any] = {"nbytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors)}
    if images:
        largest = max(images, key=torch.numel)
        facts["image_dtype"] = str(largest.dtype).removeprefix("torch.")
        facts["image_shape"] = list(largest.shape)
    return facts


def _collect(value: Any, tensors: list[torch.Tensor], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif depth and isinstance(value, dict):
        for part in value.values():
            _collect(part, tensors, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for part in value:
            _collect(part, tensors, depth - 1)


def _name_of(loader: Any, frame: FrameType | None) -> str:
    """The variable or attribute that holds the loader in the user's code that called us; else its class.

    Names in frameworks' functions, and names that many functions give to any loader, are the last choice.
    """
    general = ""
    while frame is not None:
        if is_own_code(frame.f_code.co_filename):
            owner = getattr(frame.f_locals.get("self"), "__dict__", None)
            spaces: list[dict[str, Any]] = [frame.f_locals, frame.f_globals]
            if isinstance(owner, dict):
                spaces.append(owner)
            for names in spaces:
                for name, value in list(names.items()):
                    if value is loader and name not in _GENERAL_NAMES and not name.startswith("_"):
                        return name
                    if value is loader and name in _GENERAL_NAMES:
                        general = general or name
        frame = frame.f_back
    return general if general not in ("", "self") else type(loader).__name__
