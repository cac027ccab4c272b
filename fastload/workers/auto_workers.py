"""`num_workers="auto"`: how many workers make the shortest epochs, measured before the first one.

The trial runs in a process of its own, which iterates over a loader of the same arguments with several
numbers of workers, for a fraction of a second each. Rules:

1. Nothing is read, drawn or changed in the consumer's process. What the trial reads fills shared caches.
2. Each number is measured as it will be used: through the transport, and with the start of its workers where
   these do not persist.
3. How long the consumer computes between two batches is unknown before the first epoch. Until then the number
   is chosen for which the worst case is the best one, and measured from then on.
4. A trial that fails, hangs or is killed is no error: there are then as many workers as CPUs.
5. The trial ends with this process, and takes its workers with it.
"""

from __future__ import annotations

import logging
import time
import warnings
from multiprocessing import process
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils.data

from fastload.system.cpus import worthwhile_cpus
from fastload.workers.worker import drop_signal_handlers, leave_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.connection import Connection

log = logging.getLogger("fastload")

_LIMIT_S = 60.0  # after which the trial is given up
_MOST_DEFAULT = 16  # workers, where nothing was measured
_WORTH = 0.9  # twice as many workers are tried on while an epoch takes less than this share of the time
_WAITS = 2  # times what a batch costs that is ready: then the consumer waited for workers
_ALIKE = 1.03  # epochs whose times differ by less are taken for equal
_UNKNOWN_LENGTH = 1000  # batches, where the loader cannot tell


class Effort(NamedTuple):
    """How thoroughly a trial measures.

    Attributes:
        window_s: Over which batches are counted.
        slow_s: One measurement of slow batches takes no longer, once the first batch is there.
        enough_s: Of the trial, after which no number is measured a second time.
        long_s: Of the trial, after which no larger number is tried.
        most_workers: That are tried.
    """

    window_s: float = 0.25
    slow_s: float = 2.0
    enough_s: float = 6.0
    long_s: float = 20.0
    most_workers: int = 64


_EFFORT = Effort()


class Timing(NamedTuple):
    """What was measured with one number of workers.

    Attributes:
        first_s: From the start of an epoch to its first batch.
        batch_s: From one batch to the next, where the consumer only takes them.
        receive_s: What a batch that is ready costs the consumer.
        num_batches: Of an epoch.
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
        """The same after an epoch, which is longer than a measurement.

        Args:
            step_s: How long the consumer computed between two batches.
            wait_s: How long it waited for one, the first one left out.
        """
        if not self.has_workers:
            return self._replace(batch_s=wait_s)
        if wait_s > _WAITS * self.receive_s:
            return self._replace(batch_s=step_s + wait_s)
        return self._replace(batch_s=min(self.batch_s, step_s + wait_s))  # batches were ready before


class AutoWorkers:
    """Chooses a number of workers: for the first epoch, and anew when more is known.

    Args:
        make_loader: Makes the loader with a number of workers; must be picklable where processes are spawned.
        context: How the workers are started; None for torch's default.
        least: The fewest workers that the other arguments allow.
    """

    def __init__(self, make_loader: Callable[[int], Any], context: Any, least: int) -> None:
        self._make_loader = make_loader
        self._context = context
        self._least = least
        self._timings: dict[int, Timing] = {}
        self._was_filling = False
        self._num_workers = least
        self._step_s: float | None = None

    def choose(self, dataset: Any) -> int:
        """The number of workers for the epochs to come."""
        before = self._num_workers
        if not self._timings or (self._was_filling and not _is_filling(dataset)):
            self._was_filling = _is_filling(dataset)
            self._measure()
        elif self._step_s is not None:
            self._num_workers = fastest(self._timings, self._step_s, current=before)
            if self._num_workers != before:
                self._explain(f"where the consumer computes for {1e3 * self._step_s:.3g} ms a batch")
        return self._num_workers

    def note_epoch(self, num_workers: int, step_s: float, wait_s: float) -> None:
        """Take in what an epoch showed; see `Timing.corrected`."""
        self._step_s = step_s
        if num_workers in self._timings:
            self._timings[num_workers] = self._timings[num_workers].corrected(step_s, wait_s)

    def _measure(self) -> None:
        default = max(self._least, min(worthwhile_cpus(), _MOST_DEFAULT))
        current: Any = process.current_process()
        if current.daemon or getattr(current, "_inheriting", False):
            log.info('num_workers="auto": %d, as this process may start no workers', self._least)
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
            'num_workers="auto": %d, %s; an epoch %s by the number of workers: %s',
            *(self._num_workers, condition, kind, epochs),
        )

    def _try(self, default: int) -> dict[int, Timing] | str:
        """What was measured by the number of workers, or in a clause why nothing was."""
        context = self._context or torch.multiprocessing.get_context()
        receiver, sender = context.Pipe(duplex=False)
        try:
            pid = process.current_process().pid
            child = context.Process(
                target=_run, args=(sender, self._make_loader, default, self._least, _EFFORT, pid)
            )
            try:
                child.start()
            except Exception as error:  # noqa: BLE001  # what cannot be pickled is an error of the first epoch
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
                child.kill()  # it has nothing left to do
                child.join()
        finally:
            sender.close()
            receiver.close()


def check_countable(dataset: Any) -> None:
    """Refuse a dataset for which more workers are not simply faster.

    Raises:
        ValueError: The dataset is iterable-style.
    """
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise ValueError(
            f'num_workers="auto" needs a map-style dataset, but the dataset is a {type(dataset).__name__}: '
            "what each worker reads of an iterable dataset depends on the number of workers; give a number"
        )


def fastest(timings: dict[int, Timing], step_s: float, current: int) -> int:
    """The number of workers with the shortest epochs; the current one, where that is as good."""
    epochs_s = {number: timing.epoch_s(step_s) for number, timing in timings.items()}
    alike = _alike(epochs_s)
    return current if current in alike else min(alike)


def safest(timings: dict[int, Timing]) -> int:
    """The number of workers that is at most so many times as slow as the best, whatever the consumer does.

    With workers a consumer computes while batches are made; without, a batch takes no time on its way. So the
    best number depends on how long the consumer computes: for each number this function looks at the step for
    which it is the worst choice. Of several that are alike the smallest is chosen, but not 0.
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
    """The numbers whose costs are the lowest, or hardly more."""
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
    """Send what was measured by the number of workers, or in a clause why nothing was."""
    try:
        drop_signal_handlers()
        leave_with(parent_pid)
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        warnings.simplefilter("ignore")
        logging.disable()
        sender.send(measure_all(make_loader, default, least, effort))
    except KeyboardInterrupt:
        pass  # the parent gets one too, and says so
    except Exception as error:  # noqa: BLE001  # the first epoch raises it for the user
        sender.send(_in_a_line(error))


def _in_a_line(error: Exception) -> str:
    """An error's class and the last line of its text, which is that of the user's code."""
    lines = str(error).split("\n")
    last = next((line for line in reversed(lines) if line.strip(" )")), "")
    return f"{type(error).__name__}: {last:.200}"


def measure_all(
    make_loader: Callable[[int], Any], default: int, least: int, effort: Effort
) -> dict[int, Timing]:
    """Timings with as many workers as CPUs, half and twice as many and more, and none."""
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
    if least == 0:  # last: what the dataset opens in this process must not be copied to workers by a fork
        found[0] = _better(measure(make_loader, 0, effort), measure(make_loader, 0, effort))
    return found


def _better(one: Timing, other: Timing) -> Timing:
    """The lower figures of two measurements: what disturbs one only makes it slower."""
    return one._replace(
        first_s=min(one.first_s, other.first_s),
        batch_s=min(one.batch_s, other.batch_s),
        receive_s=min(one.receive_s, other.receive_s),
    )


def measure(make_loader: Callable[[int], Any], num_workers: int, effort: Effort) -> Timing:
    """The timing of one number of workers, from some batches of an epoch, or from several short epochs."""
    with make_loader(num_workers) as loader:
        num_ahead = num_workers * (loader.prefetch_factor or 0)  # made while the first one is waited for
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
        # Workers that persist start once, not in each epoch.
        first_s = batch_s if loader.persistent_workers else min(firsts_s, default=0.0)
        receive_s = min(calls_s, default=0.0)
        return Timing(first_s, batch_s, receive_s, _length(loader), num_workers > 0)


def _calls(loader: Any, num_ahead: int, num_workers: int, effort: Effort) -> Iterable[float]:
    """Seconds of the start and of each call for a batch, until enough of an epoch was seen."""
    began_s = before_s = time.perf_counter()
    window_s = first_s = began_s
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
