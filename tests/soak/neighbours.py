"""A mode in which another process uses the same cache in RAM and is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import select
import signal
import time
from typing import TYPE_CHECKING, Any

import fastload
from tests.soak import datasets
from tests.soak.compare import SoakError, difference
from tests.soak.modes import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.soak.case import Case
    from tests.soak.subject import Subject

_READY_S = 40.0  # the fork server may have to start first


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


NEIGHBOURS: dict[str, Callable[[Subject, random.Random], None]] = {"neighbour": neighbour_dies}
