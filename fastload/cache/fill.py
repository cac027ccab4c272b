"""Reads the missing samples of a cache, in worker processes that store them themselves.

Rules:

1. No sample travels between processes. A worker is sent indices, and answers how many of these samples are
   stored and which could not be read.
2. The parent starts no thread and shares no lock with its workers, so Ctrl-C ends it at any point, and its
   workers at once. What they have stored stays.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
import traceback
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, cast

import numpy as np
import torch
from torch.utils.data import get_worker_info

from fastload.batch.failures import FailedSample, check_left_out, check_max_errors, path_of
from fastload.batch.source import expect, expects
from fastload.errors import NondeterministicDatasetError, UnsupportedSampleError, WorkerDiedError
from fastload.system.checks import as_int, check_arguments, integer, one_of, optional
from fastload.system.child_process import enter_child, handlers_blocked
from fastload.system.cpus import worthwhile_cpus
from fastload.system.notes import add_note
from fastload.system.progress import Progress
from fastload.system.torch_private import set_worker_info
from fastload.system.worker_memory import freeze_inherited, keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence


_MAX_CHUNK_SAMPLES = 64  # an answer costs about 50 us, so small samples are read in chunks
_CHUNKS_A_WORKER = 16  # at least, so workers finish at about the same time
_CHUNKS_AHEAD = 2  # that each worker has
_FLUSH_EVERY_S = 1.0  # so much work is lost at most when a worker is killed
_ENOUGH_REJECTED = 64  # if the cache rejects this many samples in a row, it is full
_MAX_IDLE_ROUNDS = 3
_MAX_WORKERS = 16
_WORTH_WORKERS = 64  # samples; fewer are read before workers have started
# The dataset is the cause, not a file.
_NEVER_LEFT_OUT = (UnsupportedSampleError, NondeterministicDatasetError)


class Filled(Protocol):
    """A dataset whose samples a cache stores."""

    @property
    def cache(self) -> Any:
        """The cache, which has `num_samples`, `nbytes`, `missing()` and `flush()` as a `SampleCache` does."""
        ...

    def _store(self, index: int) -> bool:
        """Read a sample and store it; whether it is stored now."""


class Failure(NamedTuple):
    """The error of a sample, which ends the work, and notes about it; picklable."""

    error: Exception
    notes: list[str]

    @classmethod
    def of(cls, index: int, error: Exception) -> Failure:
        """The failure of a sample in this process."""
        notes = [", ".join(filter(None, (f"in sample {index} of the dataset", path_of(error))))]
        if get_worker_info() is not None:
            notes.append(f"raised in a worker process:\n{''.join(traceback.format_exception(error))}")
        if not isinstance(error, _NEVER_LEFT_OUT):
            notes.append('on_error="skip" leaves out samples that cannot be read')
        if get_worker_info() is not None:
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # noqa: BLE001 - send its text instead, with the type that torch's loader uses
                error = RuntimeError(f"{type(error).__name__}, which cannot be pickled: {error}")
        return cls(error, notes)

    def reraise(self) -> NoReturn:
        """Raise the error, with the notes."""
        for note in self.notes:
            add_note(self.error, note)
        raise self.error


class _Answer(NamedTuple):
    """What became of a chunk: how many samples are stored, which are left out, and an error that ends it."""

    num_samples: int
    num_stored: int
    left_out: list[FailedSample]
    failure: Failure | None = None


def check_options(num_workers: int | None, on_error: str, max_errors: int | float) -> None:
    """Check the user's arguments of `fill`.

    Raises:
        TypeError, ValueError: One of them is invalid.
    """
    number = None if num_workers is None else as_int("num_workers", num_workers)
    options = {"num_workers": number, "on_error": on_error}
    check_arguments(options, {"num_workers": optional(integer(0)), "on_error": one_of("raise", "skip")})
    check_max_errors(max_errors, on_error, '"skip"')


def fill(
    dataset: Filled,
    left_out: list[FailedSample],
    *,
    num_workers: int | None,
    on_error: str,
    max_errors: int | float,
    advice: str,
    title: str,
    shown: bool,
) -> None:
    """Read every missing sample that the cache might accept; stop when it accepts no more.

    Args:
        dataset: Whose cache is filled.
        left_out: Receives the samples that cannot be read.
        num_workers: Processes; None for one per usable CPU, 0 for none.
        on_error: `"raise"`, or `"skip"` to leave out samples that cannot be read.
        max_errors: How many samples `"skip"` can leave out, as a number or a share.
        advice: What to say if too many samples cannot be read: what stays, or what to do.
        title: Of the progress.
        shown: Draw a bar, if standard error is a terminal.
    """
    check_options(num_workers, on_error, max_errors)
    cache = dataset.cache
    missing, nbytes = cache.missing().tolist(), cache.nbytes
    if not missing:
        return
    done = cache.num_samples - len(missing)
    with Progress(title, cache.num_samples, shown=shown, done=done) as progress:

        def count(answer: _Answer) -> None:
            nonlocal nbytes
            nbytes, before = cache.nbytes, nbytes
            progress.advance(nbytes - before, answer.num_stored + len(answer.left_out))
            if answer.left_out:
                left_out.extend(answer.left_out)
                check_left_out(left_out, max_errors, cache.num_samples, advice)

        # Samples rejected because workers wanted space at the same moment get a second round.
        rounds_left = _MAX_IDLE_ROUNDS
        while missing and rounds_left and not _read(dataset, missing, num_workers, count, on_error):
            unreadable = {sample.index for sample in left_out}
            left = [index for index in cache.missing().tolist() if index not in unreadable]
            rounds_left = rounds_left - 1 if len(left) == len(missing) else _MAX_IDLE_ROUNDS
            missing = left


def _read(
    dataset: Filled,
    indices: list[int],
    num_workers: int | None,
    count: Callable[[_Answer], None],
    on_error: str,
) -> bool:
    """Read these samples once; returns whether that is all: they are stored, or the cache accepts no more."""
    num_processes = choose_workers(num_workers, len(indices))
    # A chunk of a dataset at a URL is fetched in one call: fewer, larger ones wait less.
    num_chunks = max(1, num_processes) * (1 if expects(dataset) else _CHUNKS_A_WORKER)
    size = max(1, min(_MAX_CHUNK_SAMPLES, len(indices) // num_chunks))
    chunks = [indices[start : start + size] for start in range(0, len(indices), size)]
    num_rejected, rejected = 0, 0  # in all, and in a row
    with contextlib.closing(_answers(dataset, chunks, num_processes, on_error == "skip")) as answers:
        for answer in answers:
            if answer.failure is not None:
                answer.failure.reraise()
            count(answer)
            num_refused = answer.num_samples - answer.num_stored - len(answer.left_out)
            num_rejected += num_refused
            rejected = 0 if answer.num_stored else rejected + num_refused
            if rejected >= _ENOUGH_REJECTED:
                return True
    return num_rejected == 0


def _answers(
    dataset: Filled, chunks: Sequence[list[int]], num_workers: int, skips: bool
) -> Generator[_Answer]:
    if not num_workers:
        yield from (_read_chunk(dataset, chunk, skips) for chunk in chunks)
        dataset.cache.flush()
        return
    with _Workers(dataset, min(num_workers, len(chunks)), skips) as workers:
        yield from workers.read(chunks)


def _read_chunk(dataset: Filled, indices: list[int], skips: bool) -> _Answer:
    num_stored, left_out = 0, list[FailedSample]()
    worker = get_worker_info()
    expect(dataset, indices)
    for index in indices:
        try:
            num_stored += dataset._store(index)
        except Exception as error:  # noqa: BLE001 - of the user's code; the parent reports or raises it
            if not skips or isinstance(error, _NEVER_LEFT_OUT):
                return _Answer(len(indices), num_stored, left_out, Failure.of(index, error))
            left_out.append(FailedSample.of(index, error, None if worker is None else worker.id))
    return _Answer(len(indices), num_stored, left_out)


# --- workers ----------------------------------------------------------------------------------------------


def choose_workers(num_workers: int | None, num_samples: int) -> int:
    """The user's number of workers, or by default one per CPU's worth of time that this process can use.

    The default is no workers if starting them takes longer than it saves, or is not allowed.
    """
    if num_workers is not None:
        return as_int("num_workers", num_workers)
    # A worker of torch's loader is a daemon process, which cannot have child processes.
    if num_samples < _WORTH_WORKERS or multiprocessing.current_process().daemon:
        return 0
    return min(worthwhile_cpus(), _MAX_WORKERS)


class _Workers:
    """Worker processes, each at the other end of a pipe; they end with the `with` block."""

    def __init__(self, dataset: Filled, num_workers: int, skips: bool) -> None:
        self._processes: dict[Any, Any] = {}  # by this process's end of the pipe
        context = multiprocessing.get_context()
        try:
            for number in range(num_workers):
                here, there = context.Pipe()
                with handlers_blocked(context.get_start_method() != "forkserver") as mask, there:
                    self._processes[here] = context.Process(
                        target=_work,
                        args=(dataset, skips, number, num_workers, there, os.getpid(), mask),
                        daemon=True,
                    )
                    self._processes[here].start()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> _Workers:
        return self

    def read(self, chunks: Sequence[list[int]]) -> Iterator[_Answer]:
        """The answers, in any order; after the last one, all that was stored is there for others.

        Raises:
            WorkerDiedError: A worker has ended.
        """
        tasks = iter([*chunks, *[None] * (_CHUNKS_AHEAD * len(self._processes))])  # None: flush
        with contextlib.suppress(BrokenPipeError):  # what has ended is found below
            for _ in range(_CHUNKS_AHEAD):
                for pipe in self._processes:
                    pipe.send(next(tasks))
        busy = set(self._processes)
        left = dict.fromkeys(busy, _CHUNKS_AHEAD)
        while busy:
            for pipe in cast("list[Any]", wait(list(busy))):
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    process = self._processes[pipe]
                    process.join()
                    raise WorkerDiedError(
                        f"a worker process (id {process.pid}) ended with exit code {process.exitcode} while "
                        "it read samples. -9 is often the system's answer to a lack of memory: use fewer "
                        "workers; its standard error has more"
                    ) from None
                if answer is None:
                    left[pipe] -= 1
                    if not left[pipe]:
                        busy.discard(pipe)
                    continue
                with contextlib.suppress(BrokenPipeError):
                    pipe.send(next(tasks))
                yield answer

    def __exit__(self, *_: object) -> None:
        for pipe, process in self._processes.items():
            if process.pid is not None:
                process.kill()  # nothing that they hold needs an orderly end, and a decoder can take long
                process.join()
            process.close()
            pipe.close()


def _work(
    dataset: Filled, skips: bool, number: int, num_workers: int, pipe: Any, parent_pid: int, mask: set[Any]
) -> None:
    """Run a worker: answer each chunk, and None with None once all is stored for others to find."""
    # Ctrl-C reaches all processes, and the parent ends this one. First: it can be waiting to be delivered.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(AttributeError, OSError):  # a system without pidfd_open
        enter_child(parent_pid, mask)
    freeze_inherited()
    keep_freed_memory(num_workers)
    torch.set_num_threads(1)  # one thread per worker: thread pools that compete for cores are much slower
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)
    random.seed(number)  # as in torch's workers, no two processes draw the same
    np.random.seed(number)
    torch.manual_seed(number)
    set_worker_info(number, num_workers, number, dataset)
    flushed_s = time.monotonic()
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has ended
        while True:
            chunk = pipe.recv()
            answer = None if chunk is None else _read_chunk(dataset, chunk, skips)
            if chunk is None or time.monotonic() - flushed_s > _FLUSH_EVERY_S:
                dataset.cache.flush()
                flushed_s = time.monotonic()
            pipe.send(answer)
