"""Reads the missing samples of a cache, in worker processes that store them themselves.

Rules:

1. No sample travels between processes. A worker is sent indices, and answers how many of these samples are
   stored and which could not be read.
2. The parent starts no thread and shares no lock with its workers, so Ctrl-C ends it at any point, and its
   workers at once. What they have stored stays.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, cast

import torch
from torch.utils.data import get_worker_info

from fastload.batch.access import expect, expects
from fastload.batch.failures import FailedSample, check_left_out, check_max_errors, path_of
from fastload.errors import NondeterministicDatasetError, UnsupportedSampleError, WorkerDiedError
from fastload.rng.seeding import seed_libraries
from fastload.system.checks import as_int, check_arguments, integer, one_of, optional
from fastload.system.child_process import enter_child, handlers_blocked
from fastload.system.cpus import worthwhile_cpus
from fastload.system.notes import add_note
from fastload.system.progress import Progress
from fastload.system.torch_private import set_worker_info
from fastload.system.worker_memory import freeze_inherited, keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

_MAX_CHUNK_SAMPLES = 64  # an answer costs about 50 us, so small samples are read in chunks
_CHUNKS_A_WORKER = 16  # at least, so workers finish at about the same time
_CHUNKS_AHEAD = 2  # that each worker has
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
            notes.append(
                'on_error="skip" (in a command, --on-error skip) leaves out samples that cannot be read'
            )
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


@dataclass(frozen=True)
class FillOptions:
    """The user's options of `fill`.

    Attributes:
        num_workers: Processes that read; None for one per usable CPU, at most 16; 0 for none.
        on_error: `"raise"`, or `"skip"` to leave out samples that cannot be read.
        max_errors: How many samples `"skip"` can leave out, as a number or a share.
        progress: Draw a bar, if standard error is a terminal.

    Raises:
        TypeError, ValueError: One of them is invalid.
    """

    num_workers: int | None = None
    on_error: str = "raise"
    max_errors: int | float = 0.01
    progress: bool = True

    def __post_init__(self) -> None:
        if self.on_error == "replace":  # the word of DataLoader
            raise ValueError('a cache replaces no samples: write on_error="skip", which leaves them out')
        number = None if self.num_workers is None else as_int("num_workers", self.num_workers)
        options = {"num_workers": number, "on_error": self.on_error}
        check_arguments(options, {"num_workers": optional(integer(0)), "on_error": one_of("raise", "skip")})
        check_max_errors(self.max_errors, self.on_error, '"skip"')


def fill(
    dataset: Filled, left_out: list[FailedSample], options: FillOptions, *, advice: str, title: str
) -> None:
    """Read every missing sample that the cache might accept; stop when it accepts no more.

    Args:
        dataset: Whose cache is filled.
        left_out: Receives the samples that cannot be read.
        options: Of the user.
        advice: What to say if too many samples cannot be read: what stays, or what to do.
        title: Of the progress.
    """
    cache = dataset.cache
    missing, nbytes = cache.missing().tolist(), cache.nbytes
    if not missing:
        return
    done = cache.num_samples - len(missing)
    with Progress(title, cache.num_samples, shown=options.progress, done=done) as progress:

        def count(answer: _Answer) -> None:
            nonlocal nbytes
            nbytes, before = cache.nbytes, nbytes
            progress.advance(nbytes - before, answer.num_stored + len(answer.left_out))
            if answer.left_out:
                left_out.extend(answer.left_out)
                check_left_out(left_out, options.max_errors, cache.num_samples, advice)

        # Samples rejected because workers wanted space at the same moment get a second round.
        rounds_left = _MAX_IDLE_ROUNDS
        while missing and rounds_left and not _read(dataset, missing, options, count):
            unreadable = {sample.index for sample in left_out}
            left = [index for index in cache.missing().tolist() if index not in unreadable]
            rounds_left = rounds_left - 1 if len(left) == len(missing) else _MAX_IDLE_ROUNDS
            missing = left


def _read(
    dataset: Filled, indices: list[int], options: FillOptions, count: Callable[[_Answer], None]
) -> bool:
    """Read these samples once; returns whether that is all: they are stored, or the cache accepts no more."""
    num_processes = choose_workers(options.num_workers, len(indices))
    # A chunk of a dataset at a URL is fetched in one call: fewer, larger ones wait less.
    num_chunks = max(1, num_processes) * (1 if expects(dataset) else _CHUNKS_A_WORKER)
    size = max(1, min(_MAX_CHUNK_SAMPLES, len(indices) // num_chunks))
    chunks = [indices[start : start + size] for start in range(0, len(indices), size)]
    num_rejected, rejected = 0, 0  # in all, and in a row
    skips = options.on_error == "skip"
    with contextlib.closing(_answers(dataset, chunks, num_processes, skips)) as answers:
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


def _read_chunk(dataset: Filled, indices: list[int], skips: bool) -> _Answer:
    num_stored, left_out, failure, worker = 0, list[FailedSample](), None, get_worker_info()
    expect(dataset, indices)
    for index in indices:
        try:
            num_stored += dataset._store(index)
        except Exception as error:  # noqa: BLE001 - of the user's code; the parent reports or raises it
            if not skips or isinstance(error, _NEVER_LEFT_OUT):
                failure = Failure.of(index, error)
                break
            left_out.append(FailedSample.of(index, error, None if worker is None else worker.id))
    dataset.cache.flush()
    return _Answer(len(indices), num_stored, left_out, failure)


# --- workers ----------------------------------------------------------------------------------------------


def choose_workers(num_workers: int | None, num_samples: int) -> int:
    """The user's number of workers, or by default one per CPU's worth of time that this process can use.

    The default is no workers if starting them takes longer than it saves, or is not allowed.
    """
    if num_workers is not None:
        return num_workers
    # A worker of torch's loader is a daemon process, which cannot have child processes.
    if num_samples < _WORTH_WORKERS or multiprocessing.current_process().daemon:
        return 0
    return min(worthwhile_cpus(), _MAX_WORKERS)


def _answers(
    dataset: Filled, chunks: Sequence[list[int]], num_workers: int, skips: bool
) -> Generator[_Answer]:
    """The answers for some chunks, in any order, each when its samples are there for others.

    Workers end with the generator.

    Raises:
        WorkerDiedError: A worker has ended.
    """
    if not num_workers:
        yield from (_read_chunk(dataset, chunk, skips) for chunk in chunks)
        return
    tasks, num_left = iter(chunks), len(chunks)
    context, processes = multiprocessing.get_context(), dict[Any, Any]()  # by this process's ends of pipes
    try:
        for number in range(min(num_workers, num_left)):
            here, there = context.Pipe()
            with handlers_blocked(context.get_start_method() != "forkserver") as mask, there:
                arguments = dataset, skips, number, num_workers, there, os.getpid(), mask
                processes[here] = context.Process(target=_work, args=arguments, daemon=True)
                processes[here].start()
            for chunk in itertools.islice(tasks, _CHUNKS_AHEAD):
                with contextlib.suppress(BrokenPipeError):  # what has ended is found below
                    here.send(chunk)
        while num_left:
            for pipe in cast("list[Any]", wait(list(processes))):
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    process = processes[pipe]
                    process.join()
                    raise WorkerDiedError(
                        f"a worker process (id {process.pid}) ended with exit code {process.exitcode} while "
                        "it read samples. -9 is often the system's answer to a lack of memory: use fewer "
                        "workers; its standard error has more"
                    ) from None
                num_left -= 1
                for chunk in itertools.islice(tasks, 1):
                    with contextlib.suppress(BrokenPipeError):
                        pipe.send(chunk)
                yield answer
    finally:
        for process in processes.values():
            if process.pid is not None:
                process.kill()  # nothing that they hold needs an orderly end, and a decoder can take long
        for pipe, process in processes.items():
            if process.pid is not None:
                process.join()
            process.close()
            pipe.close()


def _work(
    dataset: Filled, skips: bool, number: int, num_workers: int, pipe: Any, parent_pid: int, mask: set[Any]
) -> None:
    """Run a worker: answer each chunk."""
    # Ctrl-C reaches all processes, and the parent ends this one. First: it can be waiting to be delivered.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(AttributeError, OSError):  # a system without pidfd_open
        enter_child(parent_pid, mask)
    freeze_inherited()
    keep_freed_memory(num_workers)
    torch.set_num_threads(1)  # one thread per worker: thread pools that compete for cores are much slower
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)
    seed_libraries(0, number)  # as in torch's workers, no two processes draw the same
    set_worker_info(number, num_workers, number, dataset)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has ended
        while True:
            pipe.send(_read_chunk(dataset, pipe.recv(), skips))
