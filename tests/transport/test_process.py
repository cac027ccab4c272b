"""One worker process as its parent sees it: waited for, signalled and cleaned up after."""

from __future__ import annotations

import functools
import multiprocessing.connection
import os
import signal
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.utils.data as tud

import fastload
from fastload.workers import process as starting
from fastload.workers.process import WorkerProcess, wait_for_all
from tests.kit import datasets
from tests.kit.processes import still_running

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGES = datasets.Made(datasets.image, 8)


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    """The one worker of a loader, which is closed after the test."""
    with fastload.DataLoader(IMAGES, 2, num_workers=1, persistent_workers=True) as loader:
        yield iter(loader)._pool._workers[0].process  # type: ignore[attr-defined]


def test_a_wait_is_for_all_processes_and_its_limit_is_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time it tells what has ended by now."""
    clock, ends_s = [100.0], {1001: 100.5, 1002: 101.0, 1003: 103.0}

    def wait(processes: list[Any], limit_s: float) -> list[Any]:
        first_s = min(ends_s[process.fileno()] for process in processes)
        clock[0] = max(clock[0], min(clock[0] + limit_s, first_s))
        return [process for process in processes if ends_s[process.fileno()] <= clock[0]]

    monkeypatch.setattr(starting.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(starting.connection, "wait", wait)
    processes: list[Any] = [types.SimpleNamespace(fileno=functools.partial(int, fd)) for fd in ends_s]
    found = [(wait_for_all(processes, limit_s), clock[0]) for limit_s in (0.0, 0.75, 1.25, 9.0, 0.0)]
    monkeypatch.undo()

    assert found == [(False, 100.0), (False, 100.75), (False, 102.0), (True, 103.0), (True, 103.0)]


def test_a_late_exit_code_is_waited_for(worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork server tells it a moment after the pidfd has told the end."""

    class Late:
        exitcode: int | None = None

        def join(self, limit_s: float) -> None:
            self.exitcode = 7

    with monkeypatch.context() as patch:
        patch.setattr(worker, "process", Late())
        code = worker.exitcode

    assert code == 7


@pytest.mark.parametrize(
    ("method", "error", "told"),
    [
        ("fork", OSError(24, "Too many open files"), "Too many open files"),
        *(
            (method, ProcessLookupError(), "worker 0 was killed by SIGKILL")
            for method in ("fork", "forkserver")
        ),
    ],
)
def test_a_worker_that_cannot_be_watched_is_ended_and_one_that_ended_before_is_a_death(
    method: str, error: OSError, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left, or the fork server has waited for it, and its number names no process."""
    parent, original = os.getpid(), os.pidfd_open
    started: list[int] = []

    def refuse(pid: int) -> int:
        if os.getpid() != parent:
            return original(pid)  # a worker watches its parent
        started.append(pid)
        if isinstance(error, ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise error

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(starting, "why_no_processes", lambda: None)
    with pytest.raises((OSError, fastload.errors.WorkerDiedError), match=told):
        list(fastload.DataLoader(IMAGES, 2, num_workers=1, multiprocessing_context=method))

    assert still_running(started, 60) == []


def test_a_pidfd_may_be_descriptor_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has closed its standard input gets such ones."""
    open_pidfd, standard_input = starting._pidfd_of, os.dup(0)

    def open_as_0(pid: int) -> int:
        pidfd = open_pidfd(pid)
        os.dup2(pidfd, 0)
        os.close(pidfd)
        return 0

    monkeypatch.setattr(starting, "_pidfd_of", open_as_0)
    try:
        batches = list(fastload.DataLoader(IMAGES, 2, num_workers=1))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)
    finally:
        os.dup2(standard_input, 0)
        os.close(standard_input)

    assert len(batches) == 4


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
        iter(fastload.DataLoader(IMAGES, 2, num_workers=1))
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    finally:
        signal.signal(signal.SIGUSR2, before)

    assert [signal.SIGUSR2 in mask for mask in masks] == [True, False]


def _num_sockets(index: int = 0) -> int:
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("socket:") for link in links if link.is_symlink())


@pytest.mark.slow
def test_a_forked_worker_keeps_no_end_of_a_pipe_but_its_own() -> None:
    """Neither the parent's end of it nor those of workers that were started before."""
    before = _num_sockets()

    found = list(fastload.DataLoader(datasets.Made(_num_sockets, 3), None, num_workers=3))

    assert found == [before + 1] * 3


@pytest.mark.slow
def test_workers_end_with_their_last_batch() -> None:
    """They do not wait for the caller to take it, who gets all batches nevertheless."""
    iterator: Any = iter(fastload.DataLoader(IMAGES, 2, num_workers=2))
    batches = [next(iterator), next(iterator)]

    sentinels = {process.sentinel for process in iterator._workers}
    while sentinels:
        found = multiprocessing.connection.wait(list(sentinels), 60)
        assert found, "a worker waits for tasks that never come"
        sentinels -= set(found)
    batches += iterator

    assert str(batches) == str(list(fastload.DataLoader(IMAGES, 2)))


def iterator_of(**options: Any) -> Any:
    return iter(fastload.DataLoader(datasets.Made(datasets.image, 12), 2, **options))


@pytest.mark.parametrize("options", [{}, {"device": "cpu", "device_transform": list}], ids=["host", "device"])
def test_workers_of_an_iterator_lists_the_living_processes(options: dict[str, Any]) -> None:
    """One for each worker, with a pid, a name, no exit code, and alive."""
    iterator = iterator_of(num_workers=2, **options)
    next(iterator)
    workers = iterator._workers

    assert len({worker.pid for worker in workers} - {os.getpid()}) == 2
    assert [worker.ident for worker in workers] == [worker.pid for worker in workers]
    assert len({worker.name for worker in workers}) == 2
    assert {(worker.is_alive(), worker.exitcode, worker.daemon) for worker in workers} == {(True, None, True)}
    assert str(workers[0].pid) in repr(workers[0])
    iterator.close()


def test_the_list_of_workers_outlives_the_iterator() -> None:
    """Torch's own tests join the processes after the iterator is gone: they ended with exit code 0."""
    iterator = iterator_of(num_workers=2, multiprocessing_context="fork")
    next(iterator)
    workers = iterator._workers
    del iterator

    for worker in workers:
        worker.join(60)
        worker.terminate()  # has no effect any more
        worker.kill()
        assert not worker.is_alive()
        assert worker.exitcode == 0


@pytest.mark.parametrize(("method", "number"), [("terminate", signal.SIGTERM), ("kill", signal.SIGKILL)])
def test_a_process_can_be_stopped_and_one_in_its_place_is_listed(method: str, number: int) -> None:
    """`join` without a limit waits for its end, and `exitcode` is minus the signal, also after close()."""
    iterator = iterator_of(num_workers=1, max_worker_restarts=1)
    (worker,) = iterator._workers
    worker.join(0.0)
    assert worker.is_alive()
    getattr(worker, method)()
    worker.join()
    before = worker.exitcode
    assert len(list(iterator)) == 6
    assert iterator._workers[0].pid != worker.pid
    iterator.close()

    assert before == worker.exitcode == -number
    assert not worker.is_alive()


def test_threads_and_no_workers() -> None:
    """Threads are no processes: the list is empty. Without workers there is no attribute, as in torch."""
    iterator = iterator_of(num_workers=2, worker_type="thread")
    assert iterator._workers == []
    iterator.close()
    for local in (iterator_of(), iterator_of(device="cpu", device_transform=list), iter(tud.DataLoader([1]))):
        assert not hasattr(local, "_workers")


def test_a_worker_shows_as_much_of_its_errors_as_the_program_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """sys.tracebacklimit, which is lower while torch is seeded, is then what it was, or not there."""
    dataset = datasets.Made(traceback_limit, 1)
    assert (
        next(iter(fastload.DataLoader(dataset, num_workers=1, multiprocessing_context="fork"))).item() == -1
    )
    monkeypatch.setattr(sys, "tracebacklimit", 7, raising=False)
    assert next(iter(fastload.DataLoader(dataset, num_workers=1, multiprocessing_context="fork"))).item() == 7


def traceback_limit(_: int) -> int:
    return getattr(sys, "tracebacklimit", -1)
