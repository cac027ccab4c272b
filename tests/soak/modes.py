"""Modes: ways in which a consumer uses loaders and batches."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import fastload
from tests.kit.jobs import Job
from tests.soak.case import Case, settled
from tests.soak.compare import SoakError, spoil

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.soak.subject import Reader, Received, Subject


class Held:
    """The batches that a consumer holds, in one thread or in several; none of them may change."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._most = rng.choice([0, 2, 8, 8, 200])
        self._drops_early = rng.random() < 0.3
        self._lock = threading.Lock()
        self.received: list[Received] = []

    def check(self, when: str) -> None:
        """Compare all held batches; `when` is for the message."""
        for received in self.received:
            received.check(when)

    def add(self, received: Received) -> None:
        """Hold one more batch, compare up to eight of the held ones, and perhaps drop some."""
        with self._lock:
            self.received.append(received)
            for other in self._rng.sample(self.received, min(len(self.received), 8)):
                other.check("while it was held")
            while len(self.received) > self._most or (self._drops_early and self._rng.random() < 0.4):
                if not self.received:
                    return
                self.received.pop(self._rng.randrange(len(self.received)))

    def rest(self, reader: Reader) -> None:
        """Read to the end of an epoch."""
        for received in reader:
            self.add(received)

    def some(self, reader: Reader) -> None:
        """Read a part of an epoch, of random length."""
        for _ in range(self._rng.randrange(len(reader.due) + 1)):
            try:
                self.add(next(reader))
            except StopIteration:  # the last ones of those that are due were errors
                return


def reads(subject: Subject, rng: random.Random) -> None:
    """The consumer drops, holds or overwrites batches, longer than their epoch and than the loader.

    It may read single samples meanwhile.
    """
    loader, case = subject.loader(), subject.case
    held = Held(rng)
    # seeding="sample" sets the generators for samples that a loader reads.
    num_samples = 0 if case.is_stream or case.kind == "draws" else rng.choice([0, 0, 2])
    # Worker and consumer share a batch that the collate function keeps.
    spoils = 0.0 if case.collate == "keeps" else rng.choice([0.0, 0.0, 0.5])
    spoilt: list[Any] = []
    for _ in range(case.epochs + (spoils > 0)):
        for received in subject.read(loader):
            for one in (received, *subject.samples(num_samples, rng)):
                if rng.random() < spoils:
                    spoil(one.batch)
                    spoilt.append(one.batch)
                    del spoilt[: rng.randrange(len(spoilt) + 1)]
                else:
                    held.add(one)
        held.check("after the epoch")
    loader.close()
    held.check("after close()")


def breaks(subject: Subject, rng: random.Random) -> None:
    """Epochs are left in the middle: iterators go at once, later, in a reference cycle, or by close()."""
    loader = subject.loader()
    held = Held(rng)
    left: list[Reader] = []
    for _ in range(rng.randrange(1, 4)):
        reader = subject.read(loader)
        held.some(reader)
        where = rng.choice(["nowhere", "kept", "cycle", "closed", "closed"])
        if where == "kept":
            left.append(reader)
        elif where == "cycle":
            reader.cycle = reader
        elif where == "closed":
            loader.close()
            held.check("after close()")
            try:
                next(reader.iterator)
            except (fastload.errors.LoaderClosedError, StopIteration):  # StopIteration after its end
                pass
            else:
                raise SoakError("an iterator gave a batch after close()")
        del reader
    held.check("after its epoch was left")
    if rng.random() < 0.5:
        left.clear()
    held.rest(subject.read(loader))


def interleaves(subject: Subject, rng: random.Random) -> None:
    """The consumer uses two iterators at once, of one loader or of two with different workers."""
    loaders = [subject.loader()]
    if subject.case.is_persistent or rng.random() < 0.5:
        loaders.append(subject.loader(**other_workers(subject.case, rng)))
    held = Held(rng)
    readers = [subject.read(loaders[0]), subject.read(loaders[-1])]
    while readers:
        reader = rng.choice(readers)
        try:
            held.add(next(reader))
        except StopIteration:
            readers.remove(reader)


def resumes(subject: Subject, rng: random.Random) -> None:
    """The consumer takes a state in mid-epoch, and another loader resumes there."""
    loader = subject.loader()
    held = Held(rng)
    for _ in range(subject.case.epochs - 1):
        held.rest(subject.read(loader))
    reader = subject.read(loader)
    held.some(reader)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    due, is_within_epoch = list(reader.due), not reader.has_ended
    if rng.random() < 0.5:
        loader.close()
    else:
        held.some(reader)  # the first loader may go on, too
        reader.due[:] = due
    other = subject.loader(**other_workers(subject.case, rng))
    other.load_state_dict(state)
    other.has_resumed = True  # type: ignore[attr-defined]
    if is_within_epoch:
        held.rest(subject.read(other, goes_on_from=reader))
    held.rest(subject.read(other))


def other_workers(case: Case, rng: random.Random) -> dict[str, Any]:
    """Other settings of the workers, which change nothing in the batches."""
    # The state of a stream is that of its copies in the workers.
    num_workers = case.num_workers if case.is_stream and case.mode == "resumes" else rng.randrange(4)
    methods = ["fork", "fork", "forkserver"]
    if case.kind != "draws" or case.method == "thread":  # threads cannot repeat the draws of processes
        methods.append("thread")
    changes: dict[str, Any] = {
        "num_workers": num_workers,
        "method": rng.choice(methods),
        "prefetch_factor": rng.choice([1, 2, 4]),
        "is_persistent": case.is_persistent and num_workers > 0,
        "max_prefetch_memory": rng.choice(["auto", "1B", "64KB"]),
    }
    other = settled(dataclasses.replace(case, **changes))
    return {name: getattr(other, name) for name in (*changes, "timeout_s", "in_order")}


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
        changes = {"is_persistent": False, "timeout_s": 0}
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


MODES: dict[str, Callable[[Subject, random.Random], None]] = {
    "reads": reads,
    "breaks": breaks,
    "interleaves": interleaves,
    "resumes": resumes,
    "threads": threads,
    "forks": forks,
}
