"""Modes in which a worker dies or stops."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import fastload
from tests.kit import leaks
from tests.soak.compare import SoakError
from tests.soak.modes import Held

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.soak.subject import Reader, Subject

DEATH_S = 2.0  # after which the consumer must have the error about a dead worker


def _start(subject: Subject, loader: fastload.DataLoader) -> tuple[Reader, list[int]]:
    """Begin an epoch; gives its reader and the pids of the workers that it started."""
    before = leaks.children()
    reader = subject.read(loader)
    return reader, sorted(leaks.children() - before)


def _send(reader: Reader, worker: int, number: signal.Signals) -> None:
    """Send a signal to a worker, unless it has ended with its last batch."""
    if not reader.has_ended or reader.case.is_persistent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, number)


def worker_dies(subject: Subject, rng: random.Random) -> None:
    """A worker is killed. All batches before WorkerDiedError are right, and the next epoch is complete."""
    loader = subject.loader()
    held = Held(rng)
    reader, workers = _start(subject, loader)
    held.some(reader)
    if not workers:  # all have ended already, because an epoch of one batch has no task for them
        held.rest(reader)
        return
    number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
    death = _Death(reader, rng.choice(workers), number, rng.choice([0, 0, rng.uniform(0, 0.05)]))
    is_error = _is_death_an_error(reader, death, held)
    held.check("after the death of a worker")
    del reader
    if not is_error and subject.case.is_persistent:
        # The killed worker had no task left, and it may have no task in the next epoch either.
        with contextlib.suppress(
            fastload.errors.WorkerDiedError
        ):  # iter(loader) can be the first to notice it
            _is_death_an_error(subject.read(loader), death, held)
        loader.close()
    held.rest(subject.read(loader))


class _Death(threading.Timer):
    """Sends a fatal signal to a worker after some seconds, while the consumer iterates."""

    def __init__(self, reader: Reader, victim: int, number: signal.Signals, after_s: float) -> None:
        super().__init__(after_s, self._happen)
        self._reader, self._number = reader, number
        self.victim, self.sent_s = victim, math.inf
        self.start()

    def _happen(self) -> None:
        self.sent_s = time.monotonic()
        _send(self._reader, self.victim, self._number)

    def call_off(self) -> None:
        """Do not send the signal any more, because the worker may have ended with its epoch."""
        self.cancel()
        self.join()


def _is_death_an_error(reader: Reader, death: _Death, held: Held) -> bool:
    """Iterate until WorkerDiedError comes; False if the epoch ends first, as the worker had no task left."""
    while True:
        asked_s = time.monotonic()
        try:
            held.add(next(reader))
        except StopIteration:
            death.call_off()
            return False
        except fastload.errors.WorkerDiedError as error:
            waited_s = time.monotonic() - max(asked_s, death.sent_s)
            death.call_off()
            if waited_s > DEATH_S:
                raise SoakError(f"a worker's death was an error after {waited_s:.1f} s: {error}") from error
            if str(death.victim) not in str(error):
                raise SoakError(f"an error that does not name process {death.victim}: {error}") from error
            break
    if more := list(reader.iterator):
        raise SoakError(f"{len(more)} batches came after the death of a worker was an error")
    return True


def worker_stops(subject: Subject, rng: random.Random) -> None:
    """A worker is stopped and continued, later if the loader times out first; all batches come, in order."""
    loader = subject.loader()
    held = Held(rng)
    victims: list[int] = []
    for _ in range(subject.case.epochs):
        reader, workers = _start(subject, loader)
        held.some(reader)
        victims = workers or victims  # persistent workers start in the first epoch only
        if not victims:  # of an epoch without batches they can have ended before they were looked for
            held.rest(reader)
            continue
        victim = rng.choice(victims)
        timer = threading.Timer(rng.uniform(0.01, 0.3), _continue, [victim])
        _send(reader, victim, signal.SIGSTOP)
        reader.raises_timeouts = subject.case.timeout_s == 0.2
        if not reader.raises_timeouts:
            timer.start()
        try:
            for _ in range(3):  # batches that are ready come first
                held.add(next(reader))
        except (StopIteration, TimeoutError):
            held.check("after a time-out")
        finally:
            if reader.raises_timeouts:
                _continue(victim)
            else:
                timer.join()
        reader.raises_timeouts = False
        held.rest(reader)


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


FAULTS: dict[str, Callable[[Subject, random.Random], None]] = {"dies": worker_dies, "stops": worker_stops}
