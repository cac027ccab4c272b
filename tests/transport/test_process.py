"""One worker process as its parent sees it: waited for, signalled and cleaned up after."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import fastload
from fastload.workers import process as process_module
from fastload.workers import process as starting
from fastload.workers.process import WorkerProcess, wait_for_all
from tests.kit import datasets

if TYPE_CHECKING:
    from collections.abc import Iterator


class Watched:
    """Stands for a process: its descriptor is readable once it has ended."""

    def __init__(self) -> None:
        self._readable, self._writable = os.pipe()

    def fileno(self) -> int:
        return self._readable

    def end(self) -> None:
        os.close(self._writable)
        self._writable = -1

    def close(self) -> None:
        for fd in (self._readable, self._writable):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def watched() -> Iterator[list[Any]]:
    """Three processes that are waited for."""
    processes = [Watched() for _ in range(3)]
    yield processes
    for process in processes:
        process.close()


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    """The one worker of a loader, which is closed after the test."""
    loader = fastload.DataLoader(datasets.Made(datasets.image, 8), 2, num_workers=1, persistent_workers=True)
    iterator: Any = iter(loader)
    yield iterator._pool._workers[0].process
    loader.close()


# --- starting --------------------------------------------------------------------------------------------


def test_where_no_signal_can_be_blocked_processes_start_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: nothing was blocked before, and nothing is."""
    monkeypatch.delattr(signal, "pthread_sigmask")
    with starting.without_handlers() as mask:
        pass

    assert mask == set()


# --- waiting ---------------------------------------------------------------------------------------------


def test_a_wait_without_time_tells_what_has_ended_by_now(watched: list[Any]) -> None:
    """All of them, and not some."""
    found = []
    for process in watched:
        found.append(wait_for_all(watched, 0.0))
        process.end()

    assert [*found, wait_for_all(watched, 0.0)] == [False, False, False, True]


def test_the_limit_of_a_wait_is_one_for_all(watched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of it after each end is the limit of the next wait, and never below zero."""
    times = iter([100.0, 100.5, 101.0, 104.0])
    limits = []

    def end_of_first(processes: list[Any], limit_s: float) -> list[Any]:
        limits.append(limit_s)
        return processes[:1]

    monkeypatch.setattr(process_module.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(process_module, "_ended", end_of_first)
    have_ended = wait_for_all(watched, 3.0)
    monkeypatch.undo()

    assert (have_ended, limits) == (True, [2.5, 2.0, 0.0])


def test_a_wait_is_for_as_many_seconds_as_it_says(
    watched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """poll(2) takes milliseconds."""
    waits_ms = []

    class Poller:
        def register(self, fd: int, events: int) -> None:
            pass

        def poll(self, wait_ms: float) -> list[Any]:
            waits_ms.append(wait_ms)
            return [(watched[1].fileno(), 1)]

    monkeypatch.setattr(process_module.select, "poll", Poller)
    ended = process_module._ended(watched, 0.25)
    monkeypatch.undo()

    assert (ended, waits_ms) == ([watched[1]], [250])


# --- ends ------------------------------------------------------------------------------------------------


def test_a_process_that_was_cleaned_up_is_left_alone(worker: WorkerProcess) -> None:
    """It has ended for all who ask, and before that too; signals and further clean-ups do nothing."""
    assert not worker.has_ended
    os.kill(worker.process.pid, signal.SIGKILL)
    ended = wait_for_all([worker], 30)
    assert worker.has_ended
    worker.send_signal(signal.SIGTERM)  # its exit code was not taken from the system yet
    assert worker.exitcode == -signal.SIGKILL
    worker.clean_up()
    worker.send_signal(signal.SIGTERM)
    worker.clean_up()
    worker.abandon()

    assert (ended, worker.has_ended, worker.fileno()) == (True, True, -1)
    assert wait_for_all([worker], 0.0)


def test_an_exit_code_that_comes_later_than_the_end_is_waited_for(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork server tells it a moment after the pidfd has told the end."""

    class Late:
        exitcode: int | None = None

        def join(self, limit_s: float) -> None:
            self.exitcode = 7

    os.kill(worker.process.pid, signal.SIGKILL)
    wait_for_all([worker], 30)
    monkeypatch.setattr(worker, "process", Late())
    code = worker.exitcode
    monkeypatch.undo()

    assert code == 7


def test_a_process_whose_exit_code_others_took_is_cleaned_up_after_all_the_same(
    worker: WorkerProcess,
) -> None:
    """Its code is not known, and no process is left for multiprocessing to wait for."""
    os.kill(worker.process.pid, signal.SIGKILL)
    os.waitpid(worker.process.pid, 0)
    wait_for_all([worker], 30)
    code = worker.exitcode

    worker.clean_up()

    assert (code, worker.fileno()) == (None, -1)
    assert worker.process not in multiprocessing.active_children()


def test_a_worker_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is left for its pidfd: the system's error, and no process stays behind."""
    parent, original = os.getpid(), os.pidfd_open
    started: list[int] = []

    def refuse(pid: int) -> int:
        if os.getpid() != parent:
            return original(pid)  # a worker watches its parent
        started.append(pid)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(starting, "why_no_processes", lambda: None)

    with pytest.raises(OSError, match="Too many open files"):
        iter(fastload.DataLoader(datasets.Made(datasets.image, 8), 2, num_workers=1))

    (pid,) = started
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_pidfd_may_be_descriptor_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has closed its standard input gets such ones."""
    open_pidfd = process_module._pidfd_of
    standard_input = os.dup(0)

    def open_as_0(pid: int) -> int:
        pidfd = open_pidfd(pid)
        os.dup2(pidfd, 0)
        os.close(pidfd)
        return 0

    monkeypatch.setattr(process_module, "_pidfd_of", open_as_0)
    try:
        batches = list(fastload.DataLoader(datasets.Made(datasets.image, 8), 2, num_workers=1))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)
    finally:
        os.dup2(standard_input, 0)
        os.close(standard_input)

    assert len(batches) == 4


# --- what a forked worker inherits -----------------------------------------------------------------------


def _blocked_signals(index: int) -> list[int]:
    return sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))


def test_signals_with_a_handler_wait_while_a_worker_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer: the handler runs in this process afterwards."""
    fork = os.fork
    masks = []

    def fork_and_look() -> int:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return fork()

    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        monkeypatch.setattr(os, "fork", fork_and_look)
        batches = list(fastload.DataLoader(datasets.Made(datasets.image, 8), 2, num_workers=1))
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    finally:
        signal.signal(signal.SIGUSR2, before)

    assert [signal.SIGUSR2 in mask for mask in masks] == [True, False]
    assert len(batches) == 4


def _num_sockets(index: int = 0) -> int:
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("socket:") for link in links if link.is_symlink())


@pytest.mark.slow
def test_a_forked_worker_keeps_no_end_of_a_pipe_but_its_own() -> None:
    """Neither the parent's end of it nor those of workers that were started before."""
    before = _num_sockets()

    found = list(fastload.DataLoader(datasets.Made(_num_sockets, 3), None, num_workers=3))

    assert found == [before + 1] * 3


# --- the end of an epoch ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_end_with_their_last_batch() -> None:
    """They do not wait for the caller to take it, who gets all batches nevertheless."""
    loader = fastload.DataLoader(datasets.Made(datasets.image, 8), 2, num_workers=2)
    iterator: Any = iter(loader)
    batches = [next(iterator), next(iterator)]

    sentinels = {process.sentinel for process in iterator._workers}
    ended: set[Any] = set()
    while sentinels - ended:
        found = multiprocessing.connection.wait(list(sentinels - ended), 60)
        assert found, "a worker waits for tasks that never come"
        ended |= set(found)
    batches += iterator

    expected = list(fastload.DataLoader(datasets.Made(datasets.image, 8), 2))
    assert str(batches) == str(expected)
