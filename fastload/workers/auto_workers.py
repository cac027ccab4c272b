"""`num_workers="auto"`: measure which number of workers has the shortest epochs, before the first epoch.

The trial runs in its own process. It iterates over a loader with the same arguments and several numbers of
workers, for a fraction of a second each. Rules:

1. The trial reads, draws and changes nothing in the consumer's process. The samples that it reads fill shared
   caches.
2. The trial measures each number as the loader will use it: through the transport, and with the start of the
   workers if these are not persistent.
3. Before the first epoch, the time that the consumer computes between two batches is unknown. The loader then
   uses the number with the best worst case. From the first epoch on, the consumer's time is measured.
4. If the trial fails, hangs or is killed, no error is raised: the loader uses as many workers as CPUs.
5. The trial ends when this process ends, and its workers end with it. On a system without pidfd_open, whose
   workers are torch's, the trial ends when it has measured.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from multiprocessing import process
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils.data

from fastload.system.cpus import worthwhile_cpus
from fastload.system.logs import log
from fastload.workers.worker import drop_signal_handlers, leave_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.connection import Connection

_LIMIT_S = 60.0  # the time limit of the trial
_MOST_DEFAULT = 16  # the most workers if nothing was measured
_WORTH = 0.9  # doubling goes on while it cuts the time of an epoch to less than this share
_WAITS = 2  # a call that takes this many times as long as for a ready batch counts as a wait for workers
_ALIKE = 1.03  # epochs whose times differ by a smaller factor count as equal
_UNKNOWN_LENGTH = 1000  # batches of an epoch, if the loader has no length


class Effort(NamedTuple):
    """How thoroughly a trial measures.

    Attributes:
        window_s: The time over which batches are counted.
        slow_s: Upper bound for one measurement of slow batches, from the first batch on.
        enough_s: Once the trial has taken this long, no number is measured a second time.
        long_s: Once the trial has taken this long, no larger number is tried.
        most_workers: The largest number that is tried.
    """

    window_s: float = 0.25
    slow_s: float = 2.0
    enough_s: float = 6.0
    long_s: float = 20.0
    most_workers: int = 64


_EFFORT = Effort()


class Timing(NamedTuple):
    """The times measured with one number of workers.

    Attributes:
        first_s: From the start of an epoch to its first batch.
        batch_s: From one batch to the next, if the consumer does nothing between them.
        receive_s: The time that the consumer needs to receive a batch that is ready.
        num_batches: The number of batches in an epoch.
        has_workers: Whether batches are made while the consumer computes.
    """

    first_s: float
    batch_s: float
    receive_s: float
    num_batches: int
    has_workers: bool

    def epoch_s(self, step_s: float) -> float:
        """Seconds of an epoch whose consumer computes for ``step_s`` between two batches."""
        own_s = step_s + self.batch_s
        if self.has_workers:
            own_s = max(step_s + self.receive_s, self.batch_s)
        return self.first_s + step_s + (self.num_batches - 1) * own_s

    def corrected(self, step_s: float, wait_s: float) -> Timing:
        """These times corrected by an epoch, which is longer than a measurement.

        Args:
            step_s: How long the consumer computed between two batches.
            wait_s: How long the consumer waited for a batch, not counting the first.
        """
        if not self.has_workers:
            return self._replace(batch_s=wait_s)
        if wait_s > _WAITS * self.receive_s:
            return self._replace(batch_s=step_s + wait_s)
        return self._replace(batch_s=min(self.batch_s, step_s + wait_s))  # batches were ready early


class AutoWorkers:
    """Chooses the number of workers for the first epoch, and again when more is known.

    Args:
        make_loader: Makes a loader with a given number of workers; picklable if processes are spawned.
        context: How the workers are started; None for torch's default.
        least: The fewest workers that the other arguments allow.
    """

    def __init__(self, make_loader: Callable[[int], Any], context: Any, least: int) -> None:
        self._make_loader = make_loader
        self._context = context
        self._least = least
        self._timings: dict[int, Timing] = {}
        self._has_tried = False
        self._was_filling = False
        self._num_workers = least
        self._step_s: float | None = None

    def choose(self, dataset: Any) -> int:
        """The number of workers for the next epochs."""
        before = self._num_workers
        if not self._has_tried or (self._was_filling and not _is_filling(dataset)):
            self._has_tried, self._was_filling = True, _is_filling(dataset)
            self._measure()
        elif self._timings and self._step_s is not None:
            self._num_workers = fastest(self._timings, self._step_s, current=before)
            if self._num_workers != before:
                self._explain(f"now that the consumer computes for {1e3 * self._step_s:.3g} ms a batch")
        return self._num_workers

    def note_epoch(self, num_workers: int, step_s: float, wait_s: float) -> None:
        """Record the times of an epoch; see `Timing.corrected`."""
        self._step_s = step_s
        if num_workers in self._timings:
            self._timings[num_workers] = self._timings[num_workers].corrected(step_s, wait_s)

    def _measure(self) -> None:
        default = max(self._least, min(worthwhile_cpus(), _MOST_DEFAULT))
        current: Any = process.current_process()
        if current.daemon or getattr(current, "_inheriting", False):
            log.info('num_workers="auto": %d, because this process may not start workers', self._least)
            return
        started_s = time.perf_counter()
        timings = self._try(default)
        if isinstance(timings, str):
            log.warning('num_workers="auto": %d, because the trial failed: %s', default, timings)
            self._num_workers = default
            return
        self._timings = timings
        if self._step_s is None:
            self._num_workers = safest(timings)
        else:
            self._num_workers = fastest(timings, self._step_s, current=self._num_workers)
        self._explain(f"measured in {time.perf_counter() - started_s:.1f} s")

    def _explain(self, condition: str) -> None:
        step_s = self._step_s or 0.0
        epochs = ", ".join(
            f"{number}: {self._timings[number].epoch_s(step_s):.3g} s" for number in sorted(self._timings)
        )
        kind = "of loading alone" if self._step_s is None else "of these steps"
        log.info(
            'num_workers="auto": %d, %s; time of an epoch %s for each number of workers: %s',
            *(self._num_workers, condition, kind, epochs),
        )

    def _try(self, default: int) -> dict[int, Timing] | str:
        """The timing of each number of workers, or the reason why the trial failed, as a clause."""
        context = self._context or torch.multiprocessing.get_context()
        receiver, sender = context.Pipe(duplex=False)
        try:
            pid = process.current_process().pid
            child = context.Process(
                target=_run, args=(sender, self._make_loader, default, self._least, _EFFORT, pid)
            )
            try:
                child.start()
            except Exception as error:  # noqa: BLE001  # the first epoch raises it again if it matters
                return f"its process could not be started: {error!r}"
            sender.close()
            try:
                if not receiver.poll(_LIMIT_S):
                    return f"it took more than {_LIMIT_S:.0f} s"
                answer: dict[int, Timing] | str = receiver.recv()
                return answer
            except EOFError:
                child.join()
                return f"its process ended with exit code {child.exitcode}"
            finally:
                child.kill()  # its work is done
                child.join()
        finally:
            sender.close()
            receiver.close()


def check_countable(dataset: Any) -> None:
    """Refuse a dataset whose samples depend on the number of workers.

    Raises:
        ValueError: The dataset is iterable-style.
    """
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise ValueError(
            f'num_workers="auto" needs a map-style dataset, but the dataset is a {type(dataset).__name__}: '
            "the samples that each worker reads from an iterable dataset depend on the number of workers; "
            "give num_workers as a number"
        )


def fastest(timings: dict[int, Timing], step_s: float, current: int) -> int:
    """The number of workers with the shortest epochs; the current number if it is as good."""
    epochs_s = {number: timing.epoch_s(step_s) for number, timing in timings.items()}
    alike = _alike(epochs_s)
    return current if current in alike else min(alike)


def safest(timings: dict[int, Timing]) -> int:
    """The number of workers whose worst case, over all step times of the consumer, is closest to the best.

    With workers, the consumer computes while batches are made; without workers, batches need no transport. So
    the best number depends on how long the consumer computes. For each number this function takes the step
    time at which the number loses the most against the best one. Of several equal numbers it chooses the
    smallest, but not 0.
    """
    steps_s = {0.0, *(timing.batch_s for timing in timings.values())}
    worst = dict.fromkeys(timings, 1.0)
    for step_s in steps_s:
        epochs_s = {number: timing.epoch_s(step_s) for number, timing in timings.items()}
        least_s = min(epochs_s.values())
        for number, seconds in epochs_s.items():
            worst[number] = max(worst[number], seconds / least_s)
    alike = _alike(worst)
    return min((number for number in alike if number), default=0)


def _alike(costs: dict[int, float]) -> list[int]:
    """The numbers whose costs are the lowest, or within the factor `_ALIKE` of it."""
    least = min(costs.values())
    return [number for number, cost in costs.items() if cost <= _ALIKE * least]


def _is_filling(dataset: Any) -> bool:
    """Whether a dataset has a cache that does not hold every sample."""
    cache_info = getattr(dataset, "cache_info", None)
    if not callable(cache_info):
        return False
    info = cache_info()
    return bool(info.num_cached < info.num_samples)


# --- in the process of the trial --------------------------------------------------------------------------


def _run(
    sender: Connection,
    make_loader: Callable[[int], Any],
    default: int,
    least: int,
    effort: Effort,
    parent_pid: int,
) -> None:
    """Send the timing of each number of workers, or the reason why the trial failed, as a clause."""
    try:
        drop_signal_handlers()
        with contextlib.suppress(AttributeError, OSError):  # a system without pidfd_open: rule 5
            leave_with(parent_pid)
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        warnings.simplefilter("ignore")
        logging.disable()
        sender.send(measure_all(make_loader, default, least, effort))
    except KeyboardInterrupt:
        pass  # the parent gets the signal too, and raises
    except Exception as error:  # noqa: BLE001  # the first epoch raises it for the user
        sender.send(_in_a_line(error))


def _in_a_line(error: Exception) -> str:
    """An error's class and the last line of its text, which comes from the user's code."""
    lines = str(error).split("\n")
    last = next((line for line in reversed(lines) if line.strip(" )")), "")
    return f"{type(error).__name__}: {last:.200}"


def measure_all(
    make_loader: Callable[[int], Any], default: int, least: int, effort: Effort
) -> dict[int, Timing]:
    """The timings of ``default`` workers, half of it, twice and more times as many, and no workers."""
    began_s = time.perf_counter()
    numbers = {max(least, default // 2), default} - {0}
    found = {number: measure(make_loader, number, effort) for number in sorted(numbers, reverse=True)}
    more, before = 2 * default, default
    while more <= effort.most_workers and time.perf_counter() - began_s < effort.long_s:
        found[more] = measure(make_loader, more, effort)
        if found[more].epoch_s(0.0) > _WORTH * found[before].epoch_s(0.0):
            break
        more, before = 2 * more, more
    for number in list(found):
        if time.perf_counter() - began_s < effort.enough_s:
            found[number] = _better(found[number], measure(make_loader, number, effort))
    if least == 0:  # comes last: a fork must not copy files that the dataset opens in this process
        found[0] = _better(measure(make_loader, 0, effort), measure(make_loader, 0, effort))
    return found


def _better(one: Timing, other: Timing) -> Timing:
    """The lower times of two measurements: a disturbance only makes a measurement slower."""
    return one._replace(
        first_s=min(one.first_s, other.first_s),
        batch_s=min(one.batch_s, other.batch_s),
        receive_s=min(one.receive_s, other.receive_s),
    )


def measure(make_loader: Callable[[int], Any], num_workers: int, effort: Effort) -> Timing:
    """The timing of one number of workers, from some batches of an epoch, or from several short epochs."""
    with make_loader(num_workers) as loader:
        num_ahead = num_workers * (loader.prefetch_factor or 0)  # made during the wait for the first batch
        firsts_s: list[float] = []
        calls_s: list[float] = []
        counted_s, num_counted = 0.0, 0
        while True:
            epoch_s = list(_calls(loader, num_ahead, num_workers, effort))
            firsts_s += epoch_s[:1]
            calls_s += epoch_s[1:]
            is_cut = len(epoch_s) < _length(loader)
            rest_s = epoch_s[1 + num_ahead :] if is_cut else epoch_s[1:]
            counted_s, num_counted = counted_s + sum(rest_s), num_counted + len(rest_s)
            if is_cut or sum(firsts_s) + sum(calls_s) >= effort.window_s:
                break
        batch_s = counted_s / num_counted if num_counted else 0.0
        # Persistent workers start once, not in each epoch.
        first_s = batch_s if loader.persistent_workers else min(firsts_s, default=0.0)
        receive_s = min(calls_s, default=0.0)
        return Timing(first_s, batch_s, receive_s, _length(loader), num_workers > 0)


def _calls(loader: Any, num_ahead: int, num_workers: int, effort: Effort) -> Iterable[float]:
    """Seconds of the start and of each call for a batch, until enough of an epoch was measured."""
    before_s = window_s = first_s = time.perf_counter()
    for number, _ in enumerate(loader):
        now_s = time.perf_counter()
        yield now_s - before_s
        before_s = time.perf_counter()
        if number == 0:
            first_s = now_s
        if number <= num_ahead:
            window_s = now_s
        is_enough = now_s - window_s >= effort.window_s and number - num_ahead >= 2 * num_workers
        if is_enough or (number > num_ahead and now_s - first_s >= effort.slow_s):
            return


def _length(loader: Any) -> int:
    try:
        return max(1, len(loader))
    except TypeError:  # a batch sampler without a length
        return _UNKNOWN_LENGTH
