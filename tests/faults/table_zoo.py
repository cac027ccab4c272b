"""Faults by name and stages by name: a dataset, a transform, a collate function that has one at one place."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import resource
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

import fastload
from fastload.errors import ImageReadError
from fastload.workers.channel import Channel
from tests.kit import datasets
from tests.kit.faults import limited

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 40
BATCH = 4
FAULTY = 18  # a sample of batch 4, which worker 0 of 2 reads
FAULTY_REPLY = 2  # of the replies of worker 0, with batch 4


class OwnError(Exception):
    """What user code raises."""


class OwnBaseError(BaseException):
    """What no `except Exception` catches."""


def _raise(error: BaseException) -> None:
    raise error


def _kill(number: int) -> None:
    faulthandler.disable()  # its dump of all stacks would hide everything else in the test's log
    os.kill(os.getpid(), number)
    threading.Event().wait(30)  # a signal may take a moment; nothing after it is to run


def _no_memory() -> None:
    with limited(resource.RLIMIT_AS, 1 << 20):
        bytearray(1 << 30)


def _no_files() -> None:
    with contextlib.ExitStack() as opened, limited(resource.RLIMIT_NOFILE, 80):
        while True:
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def _no_room_in_a_file() -> None:
    with open(os.memfd_create("too-long"), "wb") as file, limited(resource.RLIMIT_FSIZE, 4096):
        file.truncate(1 << 20)


def _start_threads() -> None:
    for _ in range(2):
        threading.Thread(target=threading.Event().wait, args=(0.01,)).start()


def _own_handlers() -> None:
    for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)


def _close_stderr() -> None:
    os.close(2)
    sys.stderr = None


def _hang(*_: object) -> None:
    while True:
        signal.pause()


FAULTS: dict[str, Callable[[], Any]] = {
    "raises": lambda: _raise(OwnError("it is mine")),
    "raises an error of fastload": lambda: _raise(ImageReadError("/nowhere/1.jpg", "it is cut")),
    "raises a BaseException": lambda: _raise(OwnBaseError("it is mine")),
    "exits": lambda: sys.exit(3),
    "exits at once": lambda: os._exit(4),
    "SIGKILL": lambda: _kill(signal.SIGKILL),
    "SIGTERM": lambda: _kill(signal.SIGTERM),
    "SIGSEGV": lambda: _kill(signal.SIGSEGV),
    "no memory": _no_memory,
    "no files": _no_files,
    "no room in a file": _no_room_in_a_file,
    "forks": lambda: os.fork() or os._exit(0),
    "starts threads": _start_threads,
    "leaves a daemon thread": lambda: threading.Thread(target=threading.Event().wait, daemon=True).start(),
    "own signal handlers": _own_handlers,
    "closes stderr": _close_stderr,
    "hangs": _hang,
    "ignores SIGTERM": lambda: _hang(signal.signal(signal.SIGTERM, signal.SIG_IGN)),
    "blocks all signals": lambda: _hang(signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())),
    "is stopped": lambda: _kill(signal.SIGSTOP),
}


class Fault:
    """One fault at one stage, in a worker; it waits for one event of multiprocessing's, and sets another."""

    def __init__(self, name: str, stage: str) -> None:
        self.name = name
        self.stage = stage
        self.parent = os.getpid()
        self.begins: Any = None
        self.may_begin: Any = None
        self._has_happened: Any = None

    def happens_once(self, context: Any) -> None:
        """Have the fault in one worker, and not in the one that replaces it."""
        self._has_happened = context.Event()

    def at(self, stage: str, index: int = FAULTY) -> None:
        """Have the fault, if this is its stage, its sample, and a worker."""
        if stage != self.stage or index != FAULTY or os.getpid() == self.parent:
            return
        if self._has_happened is not None:
            if self._has_happened.is_set():
                return
            self._has_happened.set()
        if self.may_begin is not None:
            self.may_begin.wait()
        if self.begins is not None:
            self.begins.set()
        FAULTS[self.name]()


class Samples:
    """Sample i is full of i; one has the fault, and one may hang."""

    def __init__(self, fault: Fault, hangs_at: int | None = None) -> None:
        self.fault = fault
        self.hangs_at = hangs_at

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        self.fault.at("fetch", index)
        if index == self.hangs_at:
            _hang()
        return np.full((5, 5), index)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.fault.at("start")


class Nested(Samples):
    """The same samples, each the batches of a loader of its own, one row after the other."""

    def __getitem__(self, index: int) -> Any:
        def row(number: int) -> Any:
            if number == 3:
                self.fault.at("inner loader", index)
            return np.full(5, index)

        return torch.cat(list(fastload.DataLoader(datasets.Made(row, 5), 2)))


class Part:
    """What a loader calls, with the fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault


class Transform(Part):
    def __call__(self, sample: Any) -> Any:
        self.fault.at("transform", int(sample[0, 0]))
        return sample.copy()


class Init(Part):
    def __call__(self, worker_id: int) -> None:
        if worker_id == 0:
            self.fault.at("init")
            if self.fault.stage in ("reply", "replied"):
                _have_at_reply(self.fault)
            if self.fault.stage == "idle":
                threading.Thread(target=self.fault.at, args=("idle",), daemon=True).start()


def _have_at_reply(fault: Fault) -> None:
    """Have the fault before or after this worker sends one of its replies."""
    original = Channel.send
    numbers = itertools.count()

    def send(self: Channel, *args: Any, **options: Any) -> None:
        number = next(numbers)
        if number == FAULTY_REPLY:
            fault.at("reply")
        original(self, *args, **options)
        if number == FAULTY_REPLY:
            fault.at("replied")

    Channel.send = send  # type: ignore[method-assign]


class Collate(Part):
    padding = 0  # arrays that are sent with each batch

    def __call__(self, samples: Any) -> Any:
        for sample in samples:
            self.fault.at("collate", int(sample[0, 0]))
        return default_collate(samples), Packed(self.fault, int(samples[0][0, 0]), self.padding)


class Packed(Part):
    """The first sample of a batch; has the fault when it is pickled in the worker."""

    def __init__(self, fault: Fault, first: int, padding: int) -> None:
        super().__init__(fault)
        self.first = first
        self.padding = padding

    def __reduce__(self) -> tuple[Any, ...]:
        if self.first <= FAULTY < self.first + BATCH and get_worker_info() is not None:
            self.fault.at("pack")
        return _first, (self.first, [np.zeros(1) for _ in range(self.padding)])


def _first(first: int, _padding: list[Any]) -> int:
    return first


def make_loader(
    name: str, stage: str, method: Any = None, *, hangs_at: Any = None, **options: Any
) -> fastload.DataLoader:
    """A loader with two workers that has one fault at one stage, and may hang at another sample."""
    fault = Fault(name, stage)
    dataset: Any = Nested(fault) if stage == "inner loader" else Samples(fault, hangs_at)
    if stage == "transform":
        dataset = fastload.CachedDataset(dataset, transform=Transform(fault))
    return fastload.DataLoader(
        dataset,
        BATCH,
        num_workers=2,
        worker_init_fn=Init(fault),
        collate_fn=Collate(fault),
        prefetch_factor=1,
        multiprocessing_context=method,
        **options,
    )
