"""Modes in which a consumer uses loaders and batches in several threads, and in forked children."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import threading
import traceback
from typing import TYPE_CHECKING, Any

from tests.soak.compare import SoakError, spoil
from tests.soak.modes import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.soak.subject import Reader, Received, Subject


def hands_over(subject: Subject, rng: random.Random) -> None:
    """One thread makes the iterator, another reads a part, this one the rest; a fourth compares and drops."""
    loader = subject.loader()
    handed: queue.Queue[Received | None] = queue.Queue(maxsize=5)
    errors: list[BaseException] = []

    def look() -> None:
        held = Held(rng)
        while (received := handed.get()) is not None:
            if not errors:
                with _collected(errors):
                    held.add(received)

    thread = threading.Thread(target=look, name="soak-looks")
    thread.start()
    held = Held(random.Random(rng.random()))
    readers: list[Reader] = []
    try:
        for _ in range(subject.case.epochs):
            _in_threads([lambda: readers.append(subject.read(loader))])
            _in_threads([lambda: held.some(readers[-1])])
            for received in readers[-1]:
                handed.put(received)
    finally:
        handed.put(None)
        thread.join()
    held.check("after it was moved between threads")
    if errors:
        raise errors[0]


def side_by_side(subject: Subject, rng: random.Random) -> None:
    """Two threads iterate over one dataset, each with a loader of its own."""

    def read(seed: float) -> None:
        own = random.Random(seed)
        loader = subject.loader()
        held = Held(own)
        for _ in range(subject.case.epochs):
            (held.some if own.random() < 0.3 else held.rest)(subject.read(loader))
        held.check("beside another thread")

    seeds = [rng.random(), rng.random()]
    _in_threads([lambda: read(seeds[0]), lambda: read(seeds[1])])


def forks(subject: Subject, rng: random.Random) -> None:
    """Forked children hold the batches of their parent; later batches in the parent do not change them."""
    loader = subject.loader()
    held = Held(rng)
    children: list[tuple[int, int]] = []
    try:
        for _ in range(subject.case.epochs):
            for received in subject.read(loader):
                if rng.random() < 0.3:
                    spoil(received.batch)  # no child holds it yet: parent and child share the memory
                    continue
                held.add(received)
                if len(children) < 3 and rng.random() < 0.3:
                    children.append(_fork(subject, held, reads=rng.random() < 0.4))
        for child, wake in children:
            with contextlib.suppress(BrokenPipeError):  # the child has ended already
                os.write(wake, b".")
            if os.waitpid(child, 0)[1] != 0:
                raise SoakError("a forked child has failed; standard error has its traceback")
    finally:
        for child, wake in children:
            os.close(wake)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it was waited for
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _fork(subject: Subject, held: Held, *, reads: bool) -> tuple[int, int]:
    """Fork a child that compares the held batches when it is woken: its pid, and the descriptor to write to.

    If it `reads`, it first reads an epoch with a loader of its own, and closes all loaders.
    """
    read, wake = os.pipe()
    child = os.fork()
    if child:
        os.close(read)
        return child, wake
    status = 1
    try:
        os.close(wake)
        if reads:
            changes = {"is_persistent": False, "timeout_s": 0, "in_order": True}
            loader = subject.loader(num_workers=len(held.received) % 2, method="fork", **changes)
            for _ in subject.read(loader):
                pass
            subject.close()
        os.read(read, 1)
        held.check("in a forked child")
        status = 0
    except BaseException:  # noqa: BLE001  # the child must not return into the code of its parent
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


@contextlib.contextmanager
def _collected(errors: list[BaseException]) -> Iterator[None]:
    """Append the exception of a thread to a list, for the thread that joins it."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001  # the other thread raises it
        errors.append(error)


def _in_threads(works: list[Callable[[], Any]]) -> None:
    """Call all functions at the same time, each in its own thread, and raise the first error of a thread."""
    errors: list[BaseException] = []

    def run(work: Callable[[], Any]) -> None:
        with _collected(errors):
            work()

    threads = [threading.Thread(target=run, args=[work], name="soak-works") for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


TOGETHER: dict[str, Callable[[Subject, random.Random], None]] = {
    "hands over": hands_over,
    "side by side": side_by_side,
    "forks": forks,
}
