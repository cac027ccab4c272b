"""Watch loaders in the process that iterates over them: epochs, waits, computing, and replayed batches.

Rules:

1. A watched loader returns the same batches, in the same order, with the same errors.
2. `Watch.stop()` puts every original back; a loader that is in use continues unwatched.
3. Only the outermost `__iter__` and `__next__` of a thread count: a loader can wrap a different one.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from torch.utils.data import dataloader as torch_loader

from fastload.device.devices import finish_all_work
from fastload.profiling.facts import facts_of, facts_of_batch, worker_facts
from fastload.profiling.hooks import (
    NO_LOADER,
    Process,
    forget_new_workers,
    hook_copies,
    hook_process,
    in_use,
    watch_new_workers,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NEW, AHEAD, REPLAYED = "new", "ahead", "replayed"  # the kinds of steps
MAX_STEPS = 200_000  # per loader: about 40 MB


class Step(NamedTuple):
    """One call of `__next__` that returned a batch.

    Attributes:
        epoch: The number of the epoch within the profile, from 0.
        start_ns: When the consumer asked for the batch.
        end_ns: When it got the batch.
        cpu_ns: CPU time of the consumer's thread in between.
        process_cpu_ns: CPU time of the consumer's process until then, with all threads.
        kind: `NEW`; `REPLAYED` if the batch was held in memory; `AHEAD` if it is new, but workers had time to
            prepare it during held batches.
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
        asked_ns: When the loop asked for one more batch after the last; 0 if it was left early or continues.
    """

    start_ns: int
    ready_ns: int
    asked_ns: int = 0


@dataclass
class LoaderWatch:
    """What is recorded of one loader in the consumer's process.

    Attributes:
        number: Its number among the watched loaders.
        facts: What is known of the loader and its batches; see `facts_of`.
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


class Watch:
    """Watches loaders from `start()` to `stop()`.

    Args:
        directory: Where recordings are written.
        loaders: The loaders to watch; None watches every loader of the process.
        replay: How many batches to hold and to return again instead of new ones; 0: none.

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
        if Process.current is not None:
            raise RuntimeError(
                "a profile is running in this process already: end its with block first, or "
                "run the script with python instead of `fastload profile`"
            )
        self.is_on = True
        Process.current = Process(self.directory, NO_LOADER)
        self._undo.callback(Process.end)
        hook_process(self._undo)
        self._undo.callback(forget_new_workers)
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
                forget_new_workers()
                return original(loader)
            is_watched = watch._only is None or any(loader is one for one in watch._only)
            if in_use.loader is not None or not watch.is_on or not is_watched:
                return original(loader)
            return watch._begin_epoch(original, loader)

        return __iter__

    def _begin_epoch(self, original: Callable[[Any], Any], loader: Any) -> Any:
        watched = self._watch_of(loader)
        hook_copies(self._undo)  # of modules that were imported since
        start_ns = time.perf_counter_ns()
        with self._starting:
            watch_new_workers(self.directory, watched.number)
            in_use.loader = watched.number
            try:
                iterator = original(loader)
            finally:
                in_use.loader = None
            watched.facts |= worker_facts(loader)
            watched.epochs.append(Epoch(start_ns, time.perf_counter_ns()))
            # An iterator without attributes, of a subclass, is not watched: its own source is.
            with contextlib.suppress(AttributeError):
                iterator._fastload_watched = _Watched(self, watched, iterator)
                kind = next(base for base in type(iterator).__mro__ if "__next__" in vars(base))
                if kind not in self._patched:
                    self._patched.add(kind)
                    self._replace(kind, "__next__", _watched_next(vars(kind)["__next__"]))
        return iterator

    def _watch_of(self, loader: Any) -> LoaderWatch:
        known = self._known.get(loader)
        if known is None:
            facts = facts_of(loader, sys._getframe(2))
            key = tuple(
                facts[name] for name in ("name", "dataset", "num_samples", "batch_size", "num_workers")
            )
            known = self._by_facts.get(key)  # a loader recreated for each epoch is one loader
            if known is None:
                known = self._by_facts[key] = LoaderWatch(len(self.loaders), facts)
                self.loaders.append(known)
            self._known[loader] = known
        return known


class _Watched:
    """One iterator: its steps, and whether the next one is replayed.

    Stretches of new batches and of `replay` held ones take turns. After a stretch of held batches the workers
    are ahead, so the first new batches cost no wait; these are not counted. An epoch keeps its number of
    steps: its last new batches are skipped.
    """

    def __init__(self, watch: Watch, watched: LoaderWatch, iterator: Any) -> None:
        self.watch = watch
        self._watched = watched
        self._epoch = len(watched.epochs) - 1
        self._num_steps = 0
        self._num_ahead: int = watched.facts["num_workers"] * (1 + (watched.facts["prefetch_factor"] or 0))
        self._num_new: int = 2 * watch.replay + self._num_ahead
        self._num_total: float = float("inf")
        if watch.replay:
            with contextlib.suppress(TypeError, NotImplementedError):  # a stream without a length
                self._num_total = len(iterator)

    def next(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        """The next batch of an iterator whose `__next__` is ``original``, or a held one."""
        watched, replay = self._watched, self.watch.replay
        place = self._num_steps % (self._num_new + replay) if replay else 0
        is_replayed = place >= self._num_new > 0
        if replay and self._num_steps and place in (0, self._num_new):
            finish_all_work()  # or this stretch would pay for the one before
        start_cpu_ns, start_ns = time.thread_time_ns(), time.perf_counter_ns()
        before_ns = getattr(iterator, "device_wait_ns", 0)
        try:
            if self._num_steps >= self._num_total:
                raise StopIteration
            if is_replayed:
                batch = watched.held[place - self._num_new]
            else:
                in_use.loader = watched.number
                try:
                    batch = original(iterator)
                finally:
                    in_use.loader = None
        except StopIteration:
            watched.epochs[self._epoch].asked_ns = start_ns
            raise
        end_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns() - start_cpu_ns
        start_ns += getattr(iterator, "device_wait_ns", 0) - before_ns  # the device's pace is the step's
        is_ahead = bool(replay) and self._num_steps > self._num_new and place < self._num_ahead
        kind = REPLAYED if is_replayed else AHEAD if is_ahead else NEW
        watched.steps.append(Step(self._epoch, start_ns, end_ns, cpu_ns, time.process_time_ns(), kind))
        self._num_steps += 1
        watched.num_steps += 1
        if watched.num_steps == 1:
            watched.facts |= facts_of_batch(batch)
        if len(watched.held) < replay:
            watched.held.append(copy.deepcopy(batch))
        if watched.facts["small_objects"] and self._num_steps.bit_count() == 1:  # after 1, 2, 4, 8, ... steps
            with contextlib.suppress(AttributeError, IndexError, psutil.Error):  # there is no worker process
                own_bytes = psutil.Process(iterator._workers[0].pid).memory_full_info().uss
                watched.facts["own_bytes"] = max(watched.facts["own_bytes"], own_bytes)
        return batch


def _watched_next(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def __next__(iterator: Any) -> Any:  # noqa: N807  # its name in tracebacks
        watched: _Watched | None = iterator.__dict__.get("_fastload_watched")
        if watched is None or in_use.loader is not None or not watched.watch.is_on:
            return original(iterator)
        return watched.next(original, iterator)

    return __next__
