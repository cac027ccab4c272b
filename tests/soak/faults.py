"""Modes in which a worker dies or stops, and one in which another process at the same cache dies."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import random
import select
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import fastload
from tests.kit import leaks
from tests.soak import datasets
from tests.soak.compare import SoakError, difference
from tests.soak.modes import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.soak.case import Case
    from tests.soak.subject import Reader, Subject

DEATH_S = 2.0  # after which the consumer must have the error about a dead worker
_READY_S = 40.0  # the fork server may have to start first


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


# --- workers that die ------------------------------------------------------------------------------------


def worker_dies(subject: Subject, rng: random.Random) -> None:
    """A worker is killed. All batches before WorkerDiedError are right, and the next epoch is complete."""
    loader = subject.loader()
    held = Held(rng)
    reader, workers = _start(subject, loader)
    held.some(reader)
    number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
    death = _Death(reader, rng.choice(workers), number, rng.choice([0, 0, rng.uniform(0, 0.05)]))
    is_error = _is_death_an_error(reader, death, held)
    held.check("after the death of a worker")
    del reader
    if not is_error and subject.case.is_persistent:
        # The killed worker had no task left, and it may have no task in the next epoch either.
        _is_death_an_error(subject.read(loader), death, held)
        loader.close()
    held.rest(subject.read(loader))


class _Death:
    """Sends a fatal signal to a worker, at once or after some seconds, while the consumer iterates."""

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


# --- workers that stop -----------------------------------------------------------------------------------


def worker_stops(subject: Subject, rng: random.Random) -> None:
    """A worker is stopped and continued, later if the loader times out first; all batches come, in order."""
    loader = subject.loader()
    held = Held(rng)
    victims: list[int] = []
    for _ in range(subject.case.epochs):
        reader, workers = _start(subject, loader)
        held.some(reader)
        victims = workers or victims  # persistent workers start in the first epoch only
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


# --- a process at the same cache -------------------------------------------------------------------------


def neighbour_dies(subject: Subject, rng: random.Random) -> None:
    """A process that fills and reads a shared cache is killed; all others read the right samples."""
    held = Held(rng)
    for epoch in range(subject.case.epochs):
        with _neighbour(subject.case, subject.key) as pid:
            if epoch == 0:
                if rng.random() < 0.5:
                    subject.open_again()  # only the neighbour holds the cache in between
                loader = subject.loader()
            reader = subject.read(loader)
            fatal = rng.randrange(len(reader.due) + 1)
            for number, received in enumerate(reader):
                held.add(received)
                if number == fatal:
                    os.kill(pid, signal.SIGKILL)
    with _neighbour(subject.case, subject.key, rounds=1):  # reads all that is there now, and leaves
        pass
    held.check("after its neighbours have gone")


@contextlib.contextmanager
def _neighbour(case: Case, key: str, rounds: int | None = None) -> Iterator[int]:
    """Another process that reads the same cache, for some rounds or until it is killed; gives its pid."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=read_again_and_again, args=(case, key, rounds, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        _expect(ours, "open")
        yield process.pid or 0
        if rounds is not None:
            _expect(ours, "done")
        elif ours.poll():  # its only further message is an error
            with contextlib.suppress(EOFError):
                raise SoakError(f"another process at the same cache: {ours.recv()}")
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def _expect(pipe: Any, word: str) -> None:
    said = pipe.recv() if pipe.poll(_READY_S) else f"nothing in {_READY_S:.0f} s"
    if said != word:
        raise SoakError(f"another process at the same cache said {said!r} in the place of {word!r}")


def read_again_and_again(case: Case, key: str, rounds: int | None, pipe: Any) -> None:
    """The neighbour's process: open the cache, and compare all samples in random order, round by round."""
    try:
        samples = datasets.Samples(case, case.num_samples, with_transform=False)
        dataset = fastload.CachedDataset(samples, cache_key=key, progress=False)
        pipe.send("open")
        rng = random.Random(time.monotonic_ns())
        watch = select.poll()
        watch.register(pipe, 0)  # reports that the consumer's process has ended
        while (rounds is None or rounds > 0) and not watch.poll(0):
            rounds = None if rounds is None else rounds - 1
            for index in rng.sample(range(case.num_samples), case.num_samples):
                found = difference(datasets.known_sample(case, index), dataset[index])
                if found is not None:
                    raise SoakError(f"sample {index}: {found}")
        pipe.send("done")
    except BaseException as error:  # noqa: BLE001  # the consumer's process raises it
        pipe.send(f"{type(error).__name__}: {error}")


FAULTS: dict[str, Callable[[Subject, random.Random], None]] = {
    "dies": worker_dies,
    "stops": worker_stops,
    "neighbour": neighbour_dies,
}
