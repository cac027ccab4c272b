"""`num_workers="auto"`: as many workers as the consumer needs, by the figures that `stats()` counts.

The first epoch has this rank's share of the CPUs, at most 16 workers, and none where the share is one CPU.
Every later epoch has the number of `best_number`, as soon as enough batches were counted.
"""

from __future__ import annotations

import math
from multiprocessing import process
from typing import NamedTuple

from fastload.system.cpus import rank_cpus
from fastload.system.humanize import readable_time
from fastload.system.logs import log

ENOUGH_BATCHES = 16  # for a choice; the first batches of epochs do not count
_MAX_FIRST = 16  # workers of the first epoch
_MAX_WORKERS = 64
_MIN_NEEDED, _GOOD, _MAX_NEEDED = 1.1, 1.25, 2.0  # workers, in units of those that suffice on average
_RECEIVE_S = 3e-4  # to receive a batch from a worker: measured with small batches on two cores
_SHORT = 0.1  # of a step: shorter waits are no sign that workers are missing


class Pace(NamedTuple):
    """How batches were made and used: means per batch, in seconds.

    Attributes:
        busy_s: How long a worker was busy with a batch; without workers, the same as `wait_s`.
        step_s: How long the consumer used it.
        wait_s: How long the consumer waited for it.
        start_s: The wait for the workers to start, divided by the batches of an epoch.
    """

    busy_s: float
    step_s: float
    wait_s: float
    start_s: float = 0.0


def best_number(pace: Pace, num_cpus: int, minimum: int, current: int) -> int:
    """The number of workers for the next epoch.

    With n workers, each on its own CPU, a batch is ready every busy / n seconds, and the consumer takes one
    every step seconds. So it never waits from n = busy / step on. Because batches vary, a new number is 1.25
    times that, and the current number stays if it is between 1.1 and 2 times. A consumer can wait all the
    same, for example if the mean of its steps contains a long validation. Its workers then count as busy all
    the time, for n * (step + wait) seconds per batch.

    Without workers, the consumer would wait for busy seconds per batch; with them, it waits as measured, or
    for max(0, busy / n - step) seconds if n changes. The difference has to be twice what they cost, which is
    the time to receive a batch, and to start, if they do so in each epoch. Else there are none: a worker
    takes up to twice as long for a cheap batch as the consumer, whose memory stays warm. Where there are
    none, the difference has to be four times their cost.

    Args:
        pace: Measured with the current number.
        num_cpus: The maximum, at least 1.
        minimum: 0, or 1 if there must be workers.
        current: The number of workers so far.
    """
    busy_s, step_s, wait_s, start_s = needed_s, *_ = pace
    if wait_s > _SHORT * step_s + _RECEIVE_S:
        needed_s = max(busy_s, current * (step_s + wait_s))

    def workers(factor: float) -> int:
        return max(1, math.ceil(min(num_cpus, factor * needed_s / max(step_s, 1e-9))))

    number = current if workers(_MIN_NEEDED) <= current <= workers(_MAX_NEEDED) else workers(_GOOD)
    if number != current:  # with more workers, the consumer never waits longer
        predicted_s = max(0.0, busy_s / number - step_s)
        wait_s = min(wait_s, predicted_s) if number > current else max(wait_s, predicted_s)
    pays = busy_s - wait_s > (2 if current else 4) * (_RECEIVE_S + start_s)
    return number if minimum or pays else 0


class AutoWorkers:
    """Chooses the number of workers of each epoch.

    Args:
        minimum: 0, or 1 if the loader has other arguments that need workers.

    Attributes:
        number: The current choice.
    """

    def __init__(self, minimum: int) -> None:
        num_cpus = _num_cpus()
        self.number = max(minimum, min(num_cpus, _MAX_FIRST) if num_cpus > 1 else 0)
        self.minimum = minimum
        self._start_s = 0.0  # of the last pace with workers
        self._has_spoken = False

    def keep(self, number: int) -> int:
        """Use this number, because each worker's copy of the dataset has a state."""
        return self._use(max(self.minimum, number), "each copy of the dataset has a state")

    def choose(self, pace: Pace | None, num_batches: int | None) -> int:
        """The number of workers for the next epoch.

        Args:
            pace: Measured with the current number; None: in too few batches to choose again.
            num_batches: Of the next epoch; None if unknown.
        """
        num_cpus = _num_cpus()
        if num_cpus == 0:
            return self._use(self.minimum, "this process is a daemon, which cannot start processes")
        if num_batches is not None and num_batches < 2:
            return self._use(self.minimum, "an epoch has fewer than 2 batches")
        facts = f"CPUs of this rank: {num_cpus}"
        if num_batches is not None and num_batches < num_cpus:
            num_cpus, facts = num_batches, f"batches of an epoch: {num_batches}"
        if pace is None:
            return self._use(min(self.number, num_cpus), facts)
        start_s = self._start_s
        if self.number:
            start_s = min(start_s, pace.start_s)  # the first start of all contains more, such as CUDA's
            self._start_s = pace.start_s
        pace = pace._replace(start_s=start_s)
        number = best_number(pace, num_cpus, self.minimum, self.number)
        busy, step, wait = map(readable_time, pace[:3])
        return self._use(
            number, f"making a batch takes {busy}, using it {step}, waiting for it {wait}; {facts}"
        )

    def _use(self, number: int, why: str) -> int:
        if number != self.number or not self._has_spoken:
            log.info('num_workers="auto": %s (%s)', number, why)
        self.number, self._has_spoken = number, True
        return number


def _num_cpus() -> int:
    """The maximum number of workers: this rank's CPUs; 0 in a daemon, such as a worker of another loader."""
    return 0 if process.current_process().daemon else min(rank_cpus(), _MAX_WORKERS)
