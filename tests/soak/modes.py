"""What the consumer does with loaders and batches. Each mode reads the whole of at least one epoch."""

from __future__ import annotations

import dataclasses
import os
import pickle
import queue
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import fastload
from tests.soak.case import Case, settled
from tests.soak.compare import SoakError, spoil

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.soak.subject import Reader, Received, Subject

_MOST_HELD = 8


class Held:
    """Batches that the consumer keeps; none of them may ever change."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.received: list[Received] = []

    def check(self, when: str = "while it was held") -> None:
        for received in self.received:
            received.check(when)

    def add(self, received: Received) -> None:
        """Keep one more, look at all, and let some go."""
        self.received.append(received)
        self.check()
        while len(self.received) > _MOST_HELD or (self.received and self._rng.random() < 0.4):
            self.received.pop(self._rng.randrange(len(self.received)))


def some(reader: Reader, rng: random.Random, held: Held) -> None:
    """A part of an epoch: from nothing to nearly all of it."""
    for _ in range(rng.randrange(len(reader.due) + 1)):
        try:
            held.add(next(reader))
        except StopIteration:  # errors are batches that are due, too
            return


def plain(subject: Subject, rng: random.Random) -> None:
    loader = subject.loader()
    for _ in range(subject.case.epochs):
        for _ in subject.read(loader):
            pass


def holds(subject: Subject, rng: random.Random) -> None:
    """Batches outlive those that came after them, their epoch, and their loader."""
    loader = subject.loader()
    held = Held(rng)
    for _ in range(subject.case.epochs):
        for received in subject.read(loader):
            held.add(received)
    loader.close()
    held.check("after close()")


def writes(subject: Subject, rng: random.Random) -> None:
    """The consumer writes into half of the batches; it reaches no cache and no other batch."""
    loader = subject.loader()
    held = Held(rng)
    spoilt: list[Any] = []
    for _ in range(subject.case.epochs + 1):
        for received in subject.read(loader):
            if rng.random() < 0.5:
                spoil(received.batch)
                spoilt.append(received.batch)
                del spoilt[: rng.randrange(len(spoilt) + 1)]
            else:
                held.add(received)
            held.check("after other batches were written to")


def breaks(subject: Subject, rng: random.Random) -> None:
    """Epochs are left in the middle; the iterators are forgotten at once, or later."""
    loader = subject.loader()
    held = Held(rng)
    left: list[Reader] = []
    for _ in range(rng.randrange(1, 4)):
        reader = subject.read(loader)
        some(reader, rng, held)
        if rng.random() < 0.3:
            left.append(reader)
        del reader
    held.check("after its epoch was left")
    if rng.random() < 0.5:
        left.clear()
    for received in subject.read(loader):
        held.add(received)


def interleaves(subject: Subject, rng: random.Random) -> None:
    """Two iterators at once: of one loader, or of two that have other workers."""
    loaders = [subject.loader()]
    if subject.case.is_persistent or rng.random() < 0.5:
        loaders.append(subject.loader(**_other_workers(subject.case, rng)))
    held = Held(rng)
    readers = [subject.read(loaders[0]), subject.read(loaders[-1])]
    while readers:
        reader = rng.choice(readers)
        try:
            held.add(next(reader))
        except StopIteration:
            readers.remove(reader)


def resumes(subject: Subject, rng: random.Random) -> None:
    """A state is taken in mid-epoch, and another loader goes on from there."""
    loader = subject.loader()
    held = Held(rng)
    for _ in range(subject.case.epochs - 1):
        for received in subject.read(loader):
            held.add(received)
    reader = subject.read(loader)
    some(reader, rng, held)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    due, is_within_epoch = list(reader.due), not reader.has_ended
    if rng.random() < 0.5:
        loader.close()
    else:
        some(reader, rng, held)  # the first loader may go on as well
        reader.due[:] = due
    other = subject.loader(**_other_workers(subject.case, rng))
    other.load_state_dict(state)
    if is_within_epoch:
        for received in subject.read(other, goes_on_from=reader):
            held.add(received)
    for received in subject.read(other):
        held.add(received)


def closes(subject: Subject, rng: random.Random) -> None:
    """close() in mid-epoch; then the loader begins anew."""
    loader = subject.loader()
    held = Held(rng)
    for _ in range(rng.randrange(1, 3)):
        reader = subject.read(loader)
        some(reader, rng, held)
        loader.close()
        held.check("after close()")
        _expect_closed(reader)
    for received in subject.read(loader):
        held.add(received)


def _expect_closed(reader: Reader) -> None:
    try:
        next(reader.iterator)
    except (fastload.LoaderClosedError, StopIteration):  # the latter if the epoch had ended
        return
    raise SoakError("an iterator gave a batch after close()")


def hands_over(subject: Subject, rng: random.Random) -> None:
    """Another thread looks at the batches, and lets them go, while this one reads on."""
    loader = subject.loader()
    handed: queue.Queue[Received | None] = queue.Queue(maxsize=5)

    def look() -> None:
        held = Held(rng)
        while (received := handed.get()) is not None:
            if not errors:
                with _collected(errors):
                    held.add(received)

    errors: list[BaseException] = []
    thread = threading.Thread(target=look, name="soak-looks")
    thread.start()
    try:
        for _ in range(subject.case.epochs):
            for received in subject.read(loader):
                handed.put(received)
    finally:
        handed.put(None)
        thread.join()
    if errors:
        raise errors[0]


def moves_between_threads(subject: Subject, rng: random.Random) -> None:
    """One thread begins the epoch, another goes on, this one ends it."""
    loader = subject.loader()
    held = Held(rng)
    readers: list[Reader] = []
    _in_thread(lambda: readers.append(subject.read(loader)))
    _in_thread(lambda: some(readers[0], rng, held))
    for received in readers[0]:
        held.add(received)
    held.check("after it was moved between threads")


def two_threads(subject: Subject, rng: random.Random) -> None:
    """Two threads ask one iterator without workers: each batch comes once, to one of them."""
    reader = subject.read(subject.loader())
    batches: list[Any] = []
    errors: list[BaseException] = []

    def take() -> None:
        with _collected(errors):
            while True:
                try:
                    batches.append(next(reader.iterator))
                except StopIteration:
                    return
                except ValueError as error:
                    if "already executing" not in str(error):  # torch's sampler is a generator, of one thread
                        errors.append(error)

    due = reader.due
    threads = [threading.Thread(target=take, name=f"soak-takes-{number}") for number in range(2)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns in the middle of a batch, too
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    for error in errors:
        if not isinstance(error, ValueError):
            raise error
        reader._take_error(error)
    reader.case = dataclasses.replace(reader.case, in_order=False)  # threads overtake each other
    for batch in batches:
        reader.take(batch)
    if due:
        raise SoakError(f"{len(due)} batches never came")


def forks(subject: Subject, rng: random.Random) -> None:
    """Children of this process hold the same batches; nothing that happens here later changes them there."""
    loader = subject.loader()
    held = Held(rng)
    children: list[tuple[int, int]] = []
    try:
        for _ in range(subject.case.epochs):
            for received in subject.read(loader):
                if rng.random() < 0.3:
                    spoil(received.batch)  # no child has seen it: parent and child share the pages
                    continue
                held.add(received)
                if len(children) < 3 and rng.random() < 0.3:
                    children.append(_fork(held))
        for child, wake in children:
            os.write(wake, b".")
            if os.waitpid(child, 0)[1] != 0:
                raise SoakError("a batch that a forked child held has changed there; its stderr says which")
    finally:
        for child, wake in children:
            os.close(wake)
            _end(child)


def _fork(held: Held) -> tuple[int, int]:
    """A child that looks at these batches when it is woken; its pid, and what wakes it."""
    read, wake = os.pipe()
    child = os.fork()
    if child:
        os.close(read)
        return child, wake
    status = 1
    try:
        os.close(wake)
        os.read(read, 1)
        held.check("in a forked child")
        status = 0
    except BaseException as error:  # noqa: BLE001  # nothing may leave this branch of the program
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(status)


def _end(child: int) -> None:
    try:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        pass  # it was waited for


class _collected:  # reads like a function of contextlib
    """Keeps an exception of a thread for the one that joins it."""

    def __init__(self, errors: list[BaseException]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if error is not None:
            self._errors.append(error)
        return True


def _in_thread(work: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        with _collected(errors):
            work()

    thread = threading.Thread(target=run, name="soak-works")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _other_workers(case: Case, rng: random.Random) -> dict[str, Any]:
    """Other settings that change nothing in the batches."""
    num_workers = case.num_workers if case.is_stream else rng.randrange(4)
    methods = ["fork", "fork", "forkserver"]
    if case.kind != "draws" or case.method == "thread":  # threads cannot reproduce what others draw
        methods.append("thread")
    other = settled(
        dataclasses.replace(
            case,
            num_workers=num_workers,
            method=rng.choice(methods),
            prefetch_factor=rng.choice([1, 2, 4]),
            is_persistent=case.is_persistent and num_workers > 0,
            ring_bytes=rng.choice(["auto", 1, "64KB"]),
        )
    )
    names = ("num_workers", "method", "prefetch_factor", "is_persistent", "ring_bytes")
    return {name: getattr(other, name) for name in (*names, "timeout_s", "in_order")}


MODES: dict[str, Callable[[Subject, random.Random], None]] = {
    "plain": plain,
    "holds": holds,
    "writes": writes,
    "breaks": breaks,
    "interleaves": interleaves,
    "resumes": resumes,
    "closes": closes,
    "hands over": hands_over,
    "moves between threads": moves_between_threads,
    "two threads": two_threads,
    "forks": forks,
}
