"""Modes: ways in which a consumer uses loaders and batches, in one thread."""

from __future__ import annotations

import dataclasses
import pickle
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils.data as tud

import fastload
from tests.soak import datasets, order
from tests.soak.case import Case, settled
from tests.soak.compare import SoakError, difference, leaves, spoil

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.soak.subject import Reader, Received, Subject


class Held:
    """The batches that a consumer holds; none of them may change.

    Args:
        rng: Decides how many batches are held, and which ones are dropped.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._most = rng.choice([2, 8, 8, 200])
        self._drops_early = rng.random() < 0.3
        self.received: list[Received] = []

    def check(self, when: str) -> None:
        """Compare all held batches; `when` is for the message."""
        for received in self.received:
            received.check(when)

    def add(self, received: Received) -> None:
        """Hold one more batch, compare up to eight of the held ones, and perhaps drop some."""
        self.received.append(received)
        for other in self._rng.sample(self.received, min(len(self.received), 8)):
            other.check("while it was held")
        while len(self.received) > self._most or (self._drops_early and self._rng.random() < 0.4):
            if not self.received:
                return
            self.received.pop(self._rng.randrange(len(self.received)))


def some(reader: Reader, rng: random.Random, held: Held) -> None:
    """Read a part of an epoch, of random length."""
    for _ in range(rng.randrange(len(reader.due) + 1)):
        try:
            held.add(next(reader))
        except StopIteration:  # the last ones of those that are due were errors
            return


def plain(subject: Subject, rng: random.Random) -> None:
    """The consumer drops each batch before it asks for the next one."""
    loader = subject.loader()
    for _ in range(subject.case.epochs):
        for _ in subject.read(loader):
            pass


def holds(subject: Subject, rng: random.Random) -> None:
    """The consumer holds batches longer than later ones, longer than their epoch and than the loader."""
    loader = subject.loader()
    held = Held(rng)
    for _ in range(subject.case.epochs):
        for received in subject.read(loader):
            held.add(received)
    held.check("after the epoch")
    loader.close()
    held.check("after close()")


def writes(subject: Subject, rng: random.Random) -> None:
    """The consumer overwrites half of the batches; caches and other batches stay as they are."""
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
            held.check("after other batches were overwritten")


def reads_samples(subject: Subject, rng: random.Random) -> None:
    """The consumer reads single samples while it iterates, holds some of them and overwrites others."""
    loader = subject.loader()
    case, dataset = subject.case, subject.dataset
    held: list[tuple[Any, Any]] = []
    for received in subject.read(loader):
        for _ in range(2):
            index = rng.randrange(case.num_samples)
            if case.raises and datasets.raises_at(order.source_index(case, index)):
                continue
            sample, expected = dataset[index], subject.expected_sample(index)
            held.append((expected, sample))
            if rng.random() < 0.3:
                spoil(held.pop(rng.randrange(len(held)))[1])
        received.check("after samples were read")
        for expected, sample in held:
            if found := difference(expected, sample, "sample"):
                raise SoakError(f"a sample that the consumer read while it iterated: {found}")
        del held[:-20]
    if case.is_cached and case.num_samples and "subset" not in case.source:
        _look(dataset, rng.randrange(case.num_samples), case)


def _look(dataset: fastload.CachedDataset, index: int, case: Case) -> None:
    """CachedDataset._view() gives the sample before its transform, in read-only arrays."""
    sample = dataset._view(index)
    if found := difference(datasets.known_sample(case, index), sample, "view"):
        raise SoakError(f"view({index}): {found}")
    if any(isinstance(leaf, np.ndarray) and leaf.flags.writeable for leaf in leaves(sample)):
        raise SoakError(f"view({index}) gave a writable array")


def torch_reads(subject: Subject, rng: random.Random) -> None:
    """torch.utils.data.DataLoader reads the same dataset, before or after ours."""
    case = subject.case
    has_workers = case.num_workers > 0
    theirs = tud.DataLoader(
        subject.dataset,
        case.batch_size,
        drop_last=case.drop_last,
        num_workers=case.num_workers,
        collate_fn=datasets.COLLATES[case.collate].given,
        multiprocessing_context=case.method if has_workers else None,
    )
    ours = subject.loader()
    for is_ours in rng.choice([[True, False], [False, True], [False, True, False]]):
        if is_ours:
            for _ in subject.read(ours):
                pass
            continue
        in_order = dataclasses.replace(case, order="in order", channels_last=False)
        due = order.due_batches(in_order, 0, torch.Generator(), draws_base_seed=False)
        for batch, one in zip(theirs, due, strict=True):
            if found := difference(subject.expected(one, channels_last=False), batch):
                raise SoakError(f"torch's loader, indices {one.indices}: {found}")


def breaks(subject: Subject, rng: random.Random) -> None:
    """The consumer leaves epochs in the middle. Iterators go at once, later, or in a reference cycle."""
    loader = subject.loader()
    held = Held(rng)
    left: list[Reader] = []
    for _ in range(rng.randrange(1, 4)):
        reader = subject.read(loader)
        some(reader, rng, held)
        where = rng.choice(["nowhere", "nowhere", "kept", "cycle"])
        if where == "kept":
            left.append(reader)
        elif where == "cycle":
            reader.cycle = reader
        del reader
    held.check("after its epoch was left")
    if rng.random() < 0.5:
        left.clear()
    for received in subject.read(loader):
        held.add(received)


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
        for received in subject.read(loader):
            held.add(received)
    reader = subject.read(loader)
    some(reader, rng, held)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    due, is_within_epoch = list(reader.due), not reader.has_ended
    if rng.random() < 0.5:
        loader.close()
    else:
        some(reader, rng, held)  # the first loader may go on, too
        reader.due[:] = due
    other = subject.loader(**other_workers(subject.case, rng))
    other.load_state_dict(state)
    if is_within_epoch:
        for received in subject.read(other, goes_on_from=reader):
            held.add(received)
    for received in subject.read(other):
        held.add(received)


def closes(subject: Subject, rng: random.Random) -> None:
    """The consumer calls close() in mid-epoch, and then iterates again."""
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
    except (fastload.errors.LoaderClosedError, StopIteration):  # StopIteration after the end of the epoch
        return
    raise SoakError("an iterator gave a batch after close()")


class _InterruptedError(Exception):
    """The consumer's handler for SIGALRM raises it."""


class _Alarm:
    """A timer that sends SIGALRM again and again; the handler raises once each time that it is armed."""

    def __init__(self, rng: random.Random) -> None:
        self.is_armed = False
        self._before = signal.signal(signal.SIGALRM, self._handle)
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.02), rng.uniform(0.002, 0.05))

    def _handle(self, *_: Any) -> None:
        if self.is_armed:
            self.is_armed = False
            raise _InterruptedError

    def stop(self) -> None:
        self.is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)


def interrupts(subject: Subject, rng: random.Random) -> None:
    """A signal handler raises while the consumer waits for a batch, and the consumer iterates on.

    Each signal may cost one batch. The other batches come unchanged and in order, or the iterator is closed.
    """
    loader = subject.loader()
    held = Held(rng)
    reader = subject.read(loader)
    num_due = len(reader.due)
    alarm = _Alarm(rng)
    try:
        for _ in range(3 * num_due + 10):
            try:
                alarm.is_armed = True
                batch = next(reader.iterator)
                alarm.is_armed = False
            except _InterruptedError:
                reader.may_skip += 1
                continue
            except StopIteration:
                reader.expect_end()
                break
            except fastload.errors.LoaderClosedError:
                break
            held.add(reader.take(batch))
    finally:
        alarm.stop()
    held.check("after signals")
    loader.close()
    for received in subject.read(loader):
        held.add(received)


def other_workers(case: Case, rng: random.Random) -> dict[str, Any]:
    """Other settings of the workers, which change nothing in the batches."""
    # The state of a stream is that of its copies in the workers.
    num_workers = case.num_workers if case.is_stream and case.mode == "resumes" else rng.randrange(4)
    methods = ["fork", "fork", "forkserver"]
    if case.kind != "draws" or case.method == "thread":  # threads cannot repeat the draws of processes
        methods.append("thread")
    other = settled(
        dataclasses.replace(
            case,
            num_workers=num_workers,
            method=rng.choice(methods),
            prefetch_factor=rng.choice([1, 2, 4]),
            is_persistent=case.is_persistent and num_workers > 0,
            prefetch_memory=rng.choice(["auto", 1, "64KB"]),
        )
    )
    names = ("num_workers", "method", "prefetch_factor", "is_persistent", "prefetch_memory")
    return {name: getattr(other, name) for name in (*names, "timeout_s", "in_order")}


MODES: dict[str, Callable[[Subject, random.Random], None]] = {
    "plain": plain,
    "holds": holds,
    "writes": writes,
    "reads samples": reads_samples,
    "torch reads": torch_reads,
    "breaks": breaks,
    "interleaves": interleaves,
    "resumes": resumes,
    "closes": closes,
    "interrupts": interrupts,
}
