"""Modes in which a worker is killed, is stopped, or is too late."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import fastload
from tests.kit import leaks
from tests.soak.compare import SoakError
from tests.soak.modes import Held, some

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from tests.soak.subject import Reader, Subject

DEATH_S = 2.0  # after which the consumer must have the error about a dead worker
_SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "segfault": signal.SIGSEGV}


def worker_dies(subject: Subject, rng: random.Random) -> None:
    """A worker is killed. All batches before WorkerDiedError are right, and the next epoch is complete."""
    loader = subject.loader()
    held = Held(rng)
    with _sigterm_handler(subject.case.handles_sigterm):
        reader, workers = _start(subject, loader)
        some(reader, rng, held)
        victim = rng.choice(workers)
        death = _Death(reader, victim, _SIGNALS[subject.case.mode], rng.choice([0, 0, rng.uniform(0, 0.05)]))
        is_error = _is_death_an_error(reader, death, held)
        held.check("after the death of a worker")
        del reader
        if not is_error and subject.case.is_persistent:
            # The killed worker had no task left, and it may have no task in the next epoch either.
            _is_death_an_error(subject.read(loader), death, held)
            loader.close()
        for received in subject.read(loader):
            held.add(received)


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


class _Death:
    """Sends a fatal signal to a worker, at once or while the consumer iterates.

    Args:
        reader: The reader of the epoch.
        victim: The worker's pid.
        number: The signal.
        after_s: Seconds until the signal is sent.
    """

    def __init__(self, reader: Reader, victim: int, number: signal.Signals, after_s: float) -> None:
        self._reader = reader
        self._number = number
        self.victim = victim
        self.sent_s = math.inf
        self._timer = threading.Timer(after_s, self._happen)
        if after_s:
            self._timer.start()
        else:
            self._happen()

    def _happen(self) -> None:
        self.sent_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            _send(self._reader, self.victim, self._number)

    def call_off(self) -> None:
        """Do not send the signal any more, because the worker may have ended with its epoch."""
        self._timer.cancel()
        if self._timer.ident is not None:
            self._timer.join()


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
    more = list(reader.iterator)
    if more:
        raise SoakError(f"{len(more)} batches came after the death of a worker was an error")
    return True


@contextlib.contextmanager
def _sigterm_handler(is_there: bool) -> Iterator[None]:
    """Install a handler for SIGTERM in the consumer's process; no worker may run it."""
    if not is_there:
        yield
        return
    read, write = os.pipe()
    os.set_blocking(read, False)
    before = signal.signal(signal.SIGTERM, lambda *_: os.write(write, b"."))
    try:
        yield
        with contextlib.suppress(BlockingIOError):
            if os.read(read, 1):
                raise SoakError("a worker ran the consumer's handler for SIGTERM")
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(read)
        os.close(write)


def worker_stops(subject: Subject, rng: random.Random) -> None:
    """A worker is stopped and continued a moment later; all batches come."""
    loader = subject.loader()
    held = Held(rng)
    victims: list[int] = []
    for _ in range(subject.case.epochs):
        reader, workers = _start(subject, loader)
        some(reader, rng, held)
        victims = workers or victims  # persistent workers start in the first epoch only
        timer = threading.Timer(rng.uniform(0.01, 0.3), _continue, [victim := rng.choice(victims)])
        _send(reader, victim, signal.SIGSTOP)
        timer.start()
        try:
            for received in reader:
                held.add(received)
        finally:
            timer.join()


def worker_is_late(subject: Subject, rng: random.Random) -> None:
    """A worker is stopped until the loader has timed out, and then continued; all batches come, in order."""
    loader = subject.loader()
    held = Held(rng)
    reader, workers = _start(subject, loader)
    some(reader, rng, held)
    victim = rng.choice(workers)
    _send(reader, victim, signal.SIGSTOP)
    try:
        for _ in range(3):  # batches that are ready come first
            held.add(_next_or_timeout(reader))
    except StopIteration:
        pass
    except TimeoutError:
        held.check("after a time-out")
    finally:
        _continue(victim)
    for received in reader:
        held.add(received)


def _next_or_timeout(reader: Reader) -> Any:
    reader.raises_timeouts = True
    try:
        return next(reader)
    finally:
        reader.raises_timeouts = False


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


FAULTS: dict[str, Callable[[Subject, random.Random], None]] = {
    "kill": worker_dies,
    "terminate": worker_dies,
    "segfault": worker_dies,
    "stop": worker_stops,
    "times out": worker_is_late,
}
