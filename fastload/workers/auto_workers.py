"""`num_workers="auto"`: choose the number of workers from the time that a batch takes.

On the first `iter(loader)`, a trial makes some batches in its own process, without workers. It measures how
long they take and how much of that is CPU time. A model of an epoch then predicts the best number of workers.
After each epoch, the measured times correct the model. Rules:

1. The trial reads, draws and changes nothing in the consumer's process. The samples that it reads fill shared
   caches. It ends before the epoch begins.
2. From the start of its process, the trial takes at most 2 s or a tenth of the first epoch, whichever is
   longer.
3. The CPUs of this rank share the CPU time, and all workers the waiting. The number exceeds the CPUs only if
   batches wait for more than a third of their time. Time in which other processes have the CPU is neither.
4. Before the first epoch, the time that the consumer computes between two batches is unknown; see `safest`.
5. The model proposes each number once. If epochs then take longer than with an earlier number, the loader
   returns to that number.
6. If the trial fails, hangs or is killed, no error is raised: the loader uses one worker per CPU.
7. A trial interrupted by an exception in this process, for example from a signal handler, is repeated.
   Signals that have a handler are blocked while its process starts, as in `process`.
8. The trial ends with this process. Without pidfd_open, it ends when it has measured.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math
import os
import signal
import time
import warnings
from multiprocessing import process
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data._utils import worker as torch_worker

from fastload.batch.iterable_state import keeps_state
from fastload.system.cpus import rank_cpus
from fastload.system.linux import queued_s
from fastload.system.logs import log
from fastload.system.sizes import readable_time
from fastload.workers.core import be_quiet
from fastload.workers.process import start_helpers, start_process, without_handlers
from fastload.workers.worker import drop_signal_handlers, leave_with

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

_START_LIMIT_S = 60.0  # for the start of the trial's process
_MIN_LIMIT_S = 2.0  # for the trial, however short the epochs are
_SHARE_OF_EPOCH = 0.1  # for the trial, if that is longer
_ENOUGH_S = 0.25  # of measured batches
_PIECES_S = 1.0  # of measured parts of the first batch: whole batches would take too long
_MAX_UNMEASURED = 16  # workers, if nothing was measured
_MAX_WORKERS = 64
_WAITS = 1.5  # batches that take this many times their CPU time wait
_RECEIVE_S = 3e-4  # to receive a finished batch: measured with small batches on two cores
_ALIKE = 1.03  # epochs whose times differ by a smaller factor count as equal
_WORSE = 1.1  # a number whose epochs take this many times as long as with an earlier one is dropped
_UNKNOWN_LENGTH = 1000  # batches of an epoch, if the loader has no length


class Cost(NamedTuple):
    """What a batch costs where it is made.

    Attributes:
        make_s: Seconds from its start to its end, without those in which other processes had the CPU.
        busy_s: Seconds of CPU time, of all threads.
    """

    make_s: float
    busy_s: float

    def times(self, factor: float) -> Cost:
        """The cost of that many batches."""
        return Cost(self.make_s * factor, self.busy_s * factor)


class Model(NamedTuple):
    """Predicts how long an epoch takes with each number of workers.

    Attributes:
        cost: What a batch costs.
        num_batches: Of an epoch; at least 2.
        num_cpus: Of this rank.
        start_s: How long a worker takes to start.
    """

    cost: Cost
    num_batches: int
    num_cpus: int
    start_s: float = 0.0

    def numbers(self, minimum: int) -> range:
        """The candidate numbers of workers."""
        make_s, busy_s = self.cost
        maximum = math.ceil(self.num_cpus * make_s / busy_s) if make_s > _WAITS * busy_s else self.num_cpus
        return range(minimum, max(1, min(maximum, self.num_batches, _MAX_WORKERS)) + 1)

    def batch_s(self, number: int) -> float:
        """From one batch to the next, if the consumer computes nothing."""
        make_s, busy_s = self.cost
        if number == 0:
            return make_s
        rounds = math.ceil(self.num_batches / number)  # of one batch per worker; the first is waited for
        return max(busy_s / self.num_cpus, make_s * (rounds - 1) / (self.num_batches - 1))

    def epoch_s(self, number: int, step_s: float) -> float:
        """Seconds of an epoch whose consumer computes for ``step_s`` after each batch."""
        make_s, busy_s = self.cost
        if number == 0:
            return self.num_batches * (make_s + step_s)
        share = max(1.0, number / self.num_cpus)  # the workers that share a CPU
        first_s = share * (self.start_s + busy_s) + max(0.0, make_s - busy_s)
        between_s = max(step_s + _RECEIVE_S, self.batch_s(number))
        return first_s + step_s + (self.num_batches - 1) * between_s

    def fastest(self, minimum: int, step_s: float, current: int = -1) -> int:
        """The number of workers with the shortest epochs; the current number on a tie."""
        epochs_s = {number: self.epoch_s(number, step_s) for number in self.numbers(minimum)}
        best_s = min(epochs_s.values())
        alike = [number for number, epoch_s in epochs_s.items() if epoch_s <= _ALIKE * best_s]
        return current if current in alike else min(alike)

    def safest(self, minimum: int) -> int:
        """The number of workers before the consumer's step is known.

        The fastest number of workers for a consumer that computes nothing; or 0, if workers lose more there
        than they save at best, which is with steps as long as a batch.
        """
        number, make_s = self.fastest(1, 0.0), self.cost.make_s
        lost = self.epoch_s(number, 0.0) / self.epoch_s(0, 0.0)
        saved = self.epoch_s(0, make_s) / self.epoch_s(number, make_s)
        return number if minimum or lost <= saved else 0

    def corrected(self, number: int, step_s: float, wait_s: float) -> Model:
        """This model after an epoch: all costs scale with the ratio of measured to predicted times.

        Args:
            number: The number of workers.
            step_s: How long the consumer computed between two batches, on average.
            wait_s: How long it waited for a batch, not counting the first.
        """
        seen_s = wait_s if number == 0 else step_s + wait_s
        was_ready = number > 0 and wait_s <= 2 * _RECEIVE_S  # who knows how early
        if was_ready and seen_s > self.batch_s(number):
            return self
        return self._replace(cost=self.cost.times(seen_s / self.batch_s(number)))

    def facts(self, step_s: float | None) -> str:
        """The figures behind the choice, in words."""
        make_s, busy_s = map(readable_time, self.cost)
        step = "" if step_s is None else f", a step of the consumer {readable_time(step_s)}"
        cpus = f"an epoch has {self.num_batches} batches, this rank {self.num_cpus} CPUs"
        return f"a batch takes {make_s}, CPU time {busy_s}{step}; {cpus}"


class AutoWorkers:
    """Chooses the number of workers for the first epoch, and again when more is known.

    Args:
        minimum: The minimum number of workers that the other arguments allow.

    Attributes:
        number: The current choice; before anything is known, one worker per CPU.
    """

    def __init__(self, minimum: int) -> None:
        self.number = max(1, min(rank_cpus(), _MAX_UNMEASURED))
        self._minimum = minimum
        self._model: Model | None = None
        self._is_due = True  # whether the next epoch begins with a trial
        self._was_filling = False
        self._step_s: float | None = None
        self._epochs_s: dict[int, float] = {}  # the last epoch with each number
        self._said = ""

    def keep(self, number: int) -> None:
        """Use this number from now on: a saved state needs it."""
        self._is_due, self._model = False, None
        self._say(max(self._minimum, number), "as many as the state has copies of the dataset")

    def choose(self, loader: Any) -> int:
        """The number of workers for the next epochs of a loader."""
        is_filling = _is_filling(loader.dataset)
        if self._is_due or (self._was_filling and not is_filling):
            self._measure(loader)
            self._was_filling = is_filling
        elif self._model is not None and self._epochs_s and not keeps_state(loader.dataset):
            self._improve(self._model, self._step_s or 0.0)
        return self.number

    def note_epoch(self, number: int, step_s: float, wait_s: float, epoch_s: float) -> None:
        """Record an epoch: its number of workers, the means of `Model.corrected`, and all its seconds."""
        self._step_s = step_s
        self._epochs_s[number] = epoch_s
        if self._model is not None:
            self._model = self._model.corrected(number, step_s, wait_s)

    def _improve(self, model: Model, step_s: float) -> None:
        epochs_s = self._epochs_s
        before = min(epochs_s, key=epochs_s.__getitem__)
        if _WORSE * epochs_s[before] < epochs_s.get(self.number, 0.0):
            self._say(before, f"because epochs took {epochs_s[self.number]:.3g} s with {self.number}")
            return
        number = model.fastest(self._minimum, step_s, self.number)
        if number not in epochs_s:
            self._say(number, model.facts(step_s))

    def _measure(self, loader: Any) -> None:
        length = _length(loader)
        if length < 2:  # tried again later: a sampler can change its length
            self._say(self._minimum, f"an epoch has {length} batches")
            return
        if process.current_process().daemon:
            self._is_due = False
            number = self._minimum if loader.worker_type == "process" else self.number
            self._say(number, "not measured, because this process is a daemon, which cannot start processes")
            return
        began_s = time.perf_counter()
        found = self._try(loader, length)
        self._is_due = False
        self._epochs_s.clear()
        if isinstance(found, str):
            self._model = None
            number = max(1, min(rank_cpus(), _MAX_UNMEASURED))
            self._say(number, f"one per CPU of this rank: the trial failed: {found}", logging.WARNING)
            return
        self._model = found
        step_s = self._step_s
        number = (
            found.safest(self._minimum)
            if step_s is None
            else found.fastest(self._minimum, step_s, self.number)
        )
        self._say(number, f"{found.facts(step_s)} (measured in {time.perf_counter() - began_s:.2g} s)")

    def _say(self, number: int, why: str, level: int = logging.INFO) -> None:
        self.number = number
        text = f'num_workers="auto": {number}, {why}'
        if text != self._said:
            self._said = text
            log.log(level, "%s", text)

    def _try(self, loader: Any, length: int) -> Model | str:
        """The model, or why the trial failed, as a clause."""
        context = loader.multiprocessing_context or torch.multiprocessing.get_context()
        method = context.get_start_method()
        if method != "fork":
            start_helpers(method)
        receiver, sender = context.Pipe(duplex=False)
        child: Any = None
        try:
            began_s = time.perf_counter()
            # Also with a fork server: the exception of a handler would look like an error of the start.
            # A fork raises nothing else by itself, but a signal handler can.
            expected: type[Exception] = OSError if method == "fork" else Exception
            with without_handlers() as mask:
                arguments = sender, _twin_of(loader), self._minimum > 0, process.current_process().pid, mask
                child = context.Process(target=_run, args=arguments, name="fastload-auto", daemon=True)
                try:
                    start_process(child, method)
                except expected as error:  # the first epoch raises it again if it matters
                    return f"its process could not be started: {error!r}"
            sender.close()
            if not receiver.poll(_START_LIMIT_S):
                return f"its process took more than {_START_LIMIT_S:.0f} s to start"
            receiver.recv()
            is_free = loader.worker_type == "thread" or loader.persistent_workers
            start_s = 0.0 if is_free else time.perf_counter() - began_s
            return self._follow(receiver, Model(Cost(0.0, 0.0), length, rank_cpus(), start_s))
        except EOFError:
            child.join()
            return f"its process ended with exit code {child.exitcode}"
        finally:
            sender.close()
            receiver.close()
            if child is not None and child.pid is not None:
                child.kill()  # its work is done
                child.join()

    def _follow(self, receiver: Connection, model: Model) -> Model | str:
        """The model with the last cost that the trial sends in its time."""
        began_s = time.perf_counter()
        limit_s = max(_MIN_LIMIT_S, _SHARE_OF_EPOCH * max(self._epochs_s.values(), default=0.0))
        found: Model | None = None
        while receiver.poll(max(0.0, began_s + limit_s - time.perf_counter())):
            message = receiver.recv()
            if not isinstance(message, Cost):
                return found or str(message)
            found = model._replace(cost=message)
            epoch_s = min(found.epoch_s(number, 0.0) for number in found.numbers(self._minimum))
            limit_s = max(_MIN_LIMIT_S, _SHARE_OF_EPOCH * epoch_s)
        return found or f"the first sample took more than {limit_s:.0f} s"


def _is_filling(dataset: Any) -> bool:
    """Whether a dataset has a cache that does not hold every sample."""
    cache_info = getattr(dataset, "cache_info", None)
    if not callable(cache_info):
        return False
    info = cache_info()
    return bool(info.num_cached < info.num_samples)


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:  # a batch sampler without a length
        return _UNKNOWN_LENGTH


def _twin_of(loader: Any) -> Any:
    """A copy of the loader that makes the same batches without workers, in pageable memory."""
    twin = copy.copy(loader)
    twin.multiprocessing_context = None
    # Set directly, past torch's check of attributes: this loader is a copy.
    nothing = "_auto_workers", "_iterator", "device", "device_transform", "prefetch_factor"
    vars(twin).update(dict.fromkeys(nothing))
    vars(twin).update(num_workers=0, timeout=0, persistent_workers=False, pin_memory=False)
    vars(twin).pop("_recorder", None)
    return twin


# --- in the process of the trial --------------------------------------------------------------------------


def _run(sender: Connection, twin: Any, as_worker: bool, parent_pid: int, signal_mask: set[Any]) -> None:
    """Send "" at once, then the cost of a batch again and again, finally "" or why it failed, as a clause."""
    try:
        drop_signal_handlers()
        if hasattr(signal, "pthread_sigmask"):  # not on Windows
            signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        with contextlib.suppress(AttributeError, OSError):  # a system without pidfd_open: rule 8
            leave_with(parent_pid)
        be_quiet()
        warnings.simplefilter("ignore")
        logging.disable()
        sender.send("")
        if as_worker:  # the dataset can need one
            torch_worker._worker_info = torch_worker.WorkerInfo(
                id=0, num_workers=1, seed=torch.initial_seed(), dataset=twin.dataset
            )
            if twin.worker_init_fn is not None:
                twin.worker_init_fn(0)
        for cost in costs(twin):
            sender.send(cost)
        sender.send("the sampler returned no batch")
    except KeyboardInterrupt:
        pass  # the parent gets the signal too, and raises
    except Exception as error:  # noqa: BLE001  # the first epoch raises it for the user
        sender.send(f"{type(error).__name__}: {error!s:.500}")


def costs(loader: Any) -> Iterator[Cost]:
    """Ever better estimates of what a batch costs, from the first samples of an epoch without workers.

    The first batch is made in parts of 1, 2, 4 and more samples, so something is known of slow samples before
    a batch is complete. The parts also open files and warm caches.
    """
    parts: list[list[Any]] = []
    first: list[Any] = []
    if loader.batch_sampler is not None:
        batches = iter(loader.batch_sampler)
        first = list(next(batches, ()))
        while sum(map(len, parts)) < len(first):
            begin = 2 ** len(parts) - 1
            parts.append(first[begin : 2 * begin + 1])
        vars(loader)["batch_sampler"] = itertools.chain(parts, batches)
    iterator = iter(loader._get_iterator())
    began_s = time.perf_counter()
    for part in parts:
        with contextlib.suppress(Exception):  # a collate_fn can need whole batches; these raise again
            yield _next_cost(iterator).times(len(first) / len(part))
        if time.perf_counter() - began_s > _PIECES_S:
            return
    sums, number = Cost(0.0, 0.0), 0
    while sums.make_s < _ENOUGH_S:
        try:
            cost = _next_cost(iterator)
        except StopIteration:
            return
        sums, number = Cost(sums.make_s + cost.make_s, sums.busy_s + cost.busy_s), number + 1
        yield sums.times(1 / number)


def _next_cost(iterator: Iterator[Any]) -> Cost:
    before_s = _clocks()
    next(iterator)
    passed_s, thread_s, busy_s = (after - before for after, before in zip(_clocks(), before_s, strict=True))
    return Cost(max(passed_s, thread_s, 1e-9), max(busy_s, 1e-9))


def _clocks() -> tuple[float, float, float]:
    """Seconds in which this thread ran or waited, its CPU seconds, those of this process and its children."""
    process_s = time.process_time() + sum(os.times()[2:4])
    return time.perf_counter() - queued_s(), time.thread_time(), process_s
