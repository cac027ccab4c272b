"""Datasets with faults, where started workers can import them. Sample i is an array full of i."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from tests.kit import datasets
from tests.kit.faults import limited

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kit.processes import Gate


def array(index: int) -> Any:
    return np.full(1000, index)


def grows_at(first: int) -> Any:
    """Samples that need more memory from one index on."""
    return lambda index: np.full(1000 if index < first else 100_000, index)


def many_arrays(index: int) -> list[Any]:
    """The list of where they lie is longer than a message of the pipe."""
    return [np.full(1, index) for _ in range(2000)]


def value_of(sample: Any) -> int:
    """The index that a sample was made of."""
    if isinstance(sample, str):
        return int(sample[:4])
    first = sample[0] if isinstance(sample, list) else sample
    return int(torch.as_tensor(first).reshape(-1)[0])


def rows(loader: Any) -> list[list[int]]:
    """The indices of all batches."""
    return [[value_of(sample) for sample in batch] for batch in loader]


class KeepsBatches:
    """A collate function that keeps what it made: each batch then needs new memory in its slot."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, samples: Any) -> Any:
        batch = default_collate([torch.as_tensor(sample) for sample in samples])
        self.kept.append(batch)
        return batch


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing can be opened in this process."""
    with contextlib.ExitStack() as opened, limited(resource.RLIMIT_NOFILE, 256):
        with contextlib.suppress(OSError):
            while True:
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


class EatsDescriptors:
    """Opens files at one sample until no more can be opened, which is an error of its own."""

    def __init__(self, index: int, depth: int = 0) -> None:
        self.index = index
        self.depth = depth
        self.files: list[Any] = []

    def __call__(self, index: int) -> Any:
        if index == self.index:
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            self._eat(self.depth)
        return array(index)

    def _eat(self, depth: int) -> None:
        if depth:
            self._eat_through_another_frame(depth - 1)
        while not depth:
            self.files.append(open(os.devnull))  # noqa: SIM115  # they are to stay open

    def _eat_through_another_frame(self, depth: int) -> None:
        """Two functions in turn, because a traceback leaves out lines that are alike."""
        self._eat(depth)


class EatsDescriptorsAndGoesOn(EatsDescriptors):
    """The same, without an error; samples are short texts, which need no memory of a slot."""

    def __call__(self, index: int) -> Any:
        with contextlib.suppress(OSError):
            super().__call__(index)
        return f"{index:04d}"


WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM)


def signal_state(index: int) -> str:
    """The handlers, the blocked signals and the wakeup descriptor of the process that reads this sample."""
    handlers = [_name_of(signal.getsignal(number)) for number in WATCHED]
    blocked = sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, []))
    wakeup = signal.set_wakeup_fd(-1)
    return f"{handlers} {blocked} {wakeup}"


def _name_of(handler: Any) -> str:
    if handler is signal.default_int_handler:
        return "interrupt"
    return {signal.SIG_DFL: "default", signal.SIG_IGN: "ignore"}.get(handler, "handler")


def killed_with_child(gate: Gate, index: int) -> Any:
    """At sample 13 the worker dies; a child of its own lives on, and holds what it inherited."""
    if index == 0 and os.fork() == 0:
        gate.wait()
        os._exit(0)
    return datasets.killed(index)


def blocks_at_4(index: int) -> Any:
    """One sample never ends; a signal that can be handled does not end it."""
    if index == 4:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        while True:
            signal.pause()
    return array(index)


BAD = frozenset({3, 8, 9, 14})


def some_bad(index: int) -> Any:
    """Four of the samples cannot be read."""
    if int(index) in BAD:
        raise OSError(5, "Input/output error", f"/photos/{index}.jpg")
    return np.full(4, int(index))


def all_bad(index: int) -> Any:
    raise ValueError(f"no sample {index}")


def draws(index: int) -> Any:
    """A random number beside the index, and the same four samples bad."""
    some_bad(index)
    return index, float(torch.rand(()))


def black(failed: Any) -> Any:
    """What a user may put in the place of a sample."""
    return np.full(4, -failed.index)


def refuses(failed: Any) -> Any:
    raise LookupError(f"not without sample {failed.index}")


class DiesOnce:
    """The worker that reads one sample is killed, the first time; a file remembers that."""

    def __init__(self, path: str, index: int, number: int = signal.SIGKILL) -> None:
        self.path = path
        self.index = index
        self.number = number

    def __call__(self, index: int) -> Any:
        if index == self.index and not os.path.exists(self.path):
            faulthandler.disable()  # its dump of all stacks would hide everything else in the test's log
            with open(self.path, "w"):
                os.kill(os.getpid(), self.number)
        return array(index)


class Held:
    """Samples that are their indices; the sample 2 is not read before an event."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index == 2:
            self.event.wait()
        return index


class Padded(IterableDataset[int]):
    """A stream whose state is long."""

    def __iter__(self) -> Any:
        return iter(range(24))

    def state_dict(self) -> Any:
        return "x" * 100_000

    def load_state_dict(self, state: Any) -> None:
        pass


def exits_at_14(index: int) -> Any:
    if index == 14:
        os._exit(7)
    return array(index)
