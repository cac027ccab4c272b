"""Workers that die: seen whatever else holds their pipes, replaced as often as max_worker_restarts allows."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import io
import itertools
import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import fastload
from fastload.workers import process_pool
from tests.faults import zoo
from tests.faults.zoo import rows
from tests.kit import datasets

if TYPE_CHECKING:
    from tests.kit.processes import Gate

EXPECTED = [list(range(start, start + 4)) for start in range(0, 40, 4)]


def test_a_worker_that_died_is_replaced_and_logged(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """At the last sample; batches that are held stay. test_table.py has other deaths."""
    make = zoo.DiesOnce(str(tmp_path / "died"), 39)
    loader = fastload.DataLoader(datasets.Made(make, 40), 4, num_workers=2, max_worker_restarts=2)
    with caplog.at_level(logging.WARNING, "fastload"):
        held = list(loader)

    assert rows(held) == EXPECTED
    assert all((batch == batch[:, :1]).all() for batch in held)
    assert "was killed by SIGKILL" in caplog.text
    assert "max_worker_restarts allows 1 more" in caplog.text


def test_a_worker_that_dies_each_time_ends_the_epoch_after_the_last_restart() -> None:
    """The error is that of the last death."""
    options: dict[str, Any] = {"num_workers": 2, "max_worker_restarts": 2, "prefetch_factor": 1}
    iterator = iter(fastload.DataLoader(datasets.Made(zoo.exits_at_14, 40), 4, **options))
    got = rows(itertools.islice(iterator, 3))
    told = r"worker 1 exited with code 7 .*It was working on batch 3"

    with pytest.raises(fastload.errors.WorkerDiedError, match=told):
        next(iterator)

    assert got == EXPECTED[:3]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_new_worker_goes_on_behind_answers_that_nobody_took(
    tmp_path: Any, method: str, monkeypatch: Any
) -> None:
    """Worker 0 is killed with an answer on its way, while the caller waits for worker 1."""
    held = multiprocessing.get_context(method).Event()
    replace = process_pool.ProcessPool._replace

    def replace_and_let_go(self: Any, worker_id: int) -> None:
        replace(self, worker_id)
        held.set()

    monkeypatch.setattr(process_pool.ProcessPool, "_replace", replace_and_let_go)
    options: dict[str, Any] = {"max_worker_restarts": 1, "multiprocessing_context": method}
    loader = fastload.DataLoader(zoo.Held(held), 2, num_workers=2, **options)
    iterator = iter(loader)
    first = next(iterator)
    worker = iterator._pool._workers[0]
    answered = select.poll()
    answered.register(worker.channel, select.POLLIN)
    assert answered.poll(60_000)
    os.kill(worker.process.process.pid, signal.SIGKILL)

    batches = [first, *iterator]

    assert torch.cat(batches).tolist() == list(range(24))


def test_a_restart_that_fails_ends_the_iterator(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's error comes first, and every later call says that the iterator is closed."""
    make = zoo.DiesOnce(str(tmp_path / "died"), 2)
    loader = fastload.DataLoader(datasets.Made(make, 40), 4, num_workers=1, max_worker_restarts=1)
    iterator = iter(loader)

    def refuse(*_: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(process_pool, "make_channel", refuse)

    with pytest.raises(BlockingIOError):
        next(iterator)
    with pytest.raises(fastload.errors.LoaderClosedError):
        next(iterator)


def test_after_a_death_the_state_lies_within_the_epoch(tmp_path: Any) -> None:
    """Also for a caller who goes on after the error; the rest of the epoch can be read later."""
    make = zoo.DiesOnce(str(tmp_path / "died"), 10)
    loader = fastload.DataLoader(datasets.Made(make, 40), 4, num_workers=2)
    iterator = iter(loader)
    got: list[Any] = []
    with pytest.raises(fastload.errors.WorkerDiedError):
        got.extend(iter(iterator.__next__, None))
    with pytest.raises(StopIteration):
        next(iterator)

    loader.load_state_dict(loader.state_dict())
    got += list(loader)

    assert [[zoo.value_of(sample) for sample in batch] for batch in got] == EXPECTED


def _reap(*_: object) -> None:
    """A handler of SIGCHLD that waits for all children, as some servers have it."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hidden_by", ["a child", "a handler", "nothing"])
def test_a_death_is_always_seen(hidden_by: str, gate: Gate) -> None:
    """Though a child holds the worker's pipe, or a handler takes the exit code."""
    make = functools.partial(zoo.killed_with_child, gate) if hidden_by == "a child" else datasets.killed
    cause = "was killed by SIGKILL .*out-of-memory"
    told = rf"worker 0 {'.*' if hidden_by == 'a handler' else cause}.* working on batch 6,"
    before = signal.signal(signal.SIGCHLD, _reap if hidden_by == "a handler" else signal.SIG_DFL)
    try:
        with pytest.raises(fastload.errors.WorkerDiedError, match=told):
            list(fastload.DataLoader(datasets.Made(make, 40), 2, num_workers=1))
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.timeout(60)
def test_a_death_is_seen_though_another_loader_was_started_at_the_same_time() -> None:
    """Workers that two threads fork at once hold each other's pipes."""
    begin = threading.Barrier(2)
    iterators: dict[int, Any] = {}

    def start(number: int) -> None:
        make = zoo.array if number else datasets.killed
        begin.wait()
        iterators[number] = iter(fastload.DataLoader(datasets.Made(make, 24), 4, num_workers=2))

    for _ in range(2):
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            list(threads.map(start, range(2)))

        with pytest.raises(fastload.errors.WorkerDiedError, match="SIGKILL"):
            list(iterators[0])
        assert len(list(iterators[1])) == 6
        iterators.clear()


@pytest.mark.parametrize("stream", [None, object(), io.StringIO()])
def test_any_object_may_stand_for_standard_error(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start, though it has no descriptor."""
    monkeypatch.setattr(sys, "stderr", stream)

    assert rows(fastload.DataLoader(datasets.Made(zoo.array, 4), 2, num_workers=1)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("name", ["fastload-worker-2", "fastload-pin"])
def test_threads_that_cannot_be_started(name: str, monkeypatch: Any, pretend_accelerator: Any) -> None:
    """The system has no more threads: its error, and what was started before is ended."""
    pretend_accelerator()
    original = threading.Thread.start

    def start_or_refuse(self: threading.Thread) -> None:
        if self.name == name:
            raise RuntimeError("can't start new thread")
        original(self)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    method: Any = "process" if name == "fastload-pin" else "thread"
    loader = fastload.DataLoader(datasets.Made(zoo.array, 24), 4, num_workers=3, worker_type=method)
    num_threads = torch.get_num_threads()

    with pytest.raises(RuntimeError, match="can't start new thread"):
        iter(loader)
    assert torch.get_num_threads() == num_threads
