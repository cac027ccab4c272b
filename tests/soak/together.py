"""Modes in which a consumer uses loaders and batches in several threads or in forked children."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.kit.jobs import Job
from tests.soak.compare import spoil
from tests.soak.modes import Held

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.soak.subject import Reader, Subject


def threads(subject: Subject, rng: random.Random) -> None:
    """Threads that end make two iterators over one dataset, others read from them, and this one the rest.

    All compare and drop the batches of all.
    """
    loaders = [subject.loader(), subject.loader()]
    held = Held(rng)
    for _ in range(subject.case.epochs):
        readers: list[Reader] = _in_threads([partial(subject.read, loader) for loader in loaders])
        _in_threads([partial(rng.choice([held.some, held.rest]), reader) for reader in readers])
        for reader in readers:
            if not reader.has_ended and rng.random() < 0.7:
                held.rest(reader)
    held.check("after it was moved between threads")


def forks(subject: Subject, rng: random.Random) -> None:
    """Forked children hold the batches of their parent; later batches in the parent do not change them."""
    loader = subject.loader()
    held = Held(rng)
    children: list[Job] = []
    try:
        for _ in range(subject.case.epochs):
            for received in subject.read(loader):
                if rng.random() < 0.3:
                    spoil(received.batch)  # no child holds it yet: parent and child share the memory
                    continue
                held.add(received)
                if len(children) < 3 and rng.random() < 0.3:
                    children.append(Job(_inherit, subject, held, rng.random() < 0.4))
        for child in children:
            child.answer()  # EOFError if the child has failed; standard error has its traceback
            child.ask(Held.check, "in a forked child")
    finally:
        for child in children:
            child.end()


def _inherit(subject: Subject, held: Held, reads: bool) -> tuple[Held, None]:
    """In a child: perhaps read an epoch with a loader of its own and close all loaders; keep the batches."""
    if reads:
        changes = {"is_persistent": False, "timeout_s": 0, "in_order": True}
        loader = subject.loader(num_workers=len(held.received) % 2, method="fork", **changes)
        for _ in subject.read(loader):
            pass
        subject.close()
    return held, None


def _in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """What functions give that are called at the same time, each in its own thread; or the first error."""
    errors: list[BaseException] = []
    results: list[Any] = []

    def run(work: Callable[[], Any]) -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  # this thread raises it
            errors.append(error)

    started = [threading.Thread(target=run, args=[work], name="soak-works") for work in works]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    return results


TOGETHER: dict[str, Callable[[Subject, random.Random], None]] = {"threads": threads, "forks": forks}
