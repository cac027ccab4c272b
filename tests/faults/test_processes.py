"""Deaths, children and streams of workers: what multiprocessing's own pipes and flushes would miss."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import fastload
from fastload.workers import process as starting
from tests.faults import zoo
from tests.kit import datasets

if TYPE_CHECKING:
    from tests.kit.processes import Gate


@pytest.mark.timeout(60)
def test_a_death_is_seen_though_a_child_of_the_worker_lives_on(gate: Gate) -> None:
    """The child holds the pipe by which multiprocessing would know."""
    iterator = iter(fastload.DataLoader(datasets.Made(zoo.KilledWithChild(8, gate), 40), 2, num_workers=1))

    with pytest.raises(fastload.errors.WorkerDiedError, match=r"worker 0 was killed by SIGKILL .*batch 4"):
        list(iterator)


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
        threads = [threading.Thread(target=start, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        with pytest.raises(fastload.errors.WorkerDiedError, match="SIGKILL"):
            list(iterators[0])
        assert len(list(iterators[1])) == 6
        iterators.clear()


@pytest.mark.parametrize("name", zoo.STREAMS)
def test_any_object_may_stand_for_standard_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start, though it has no descriptor."""
    monkeypatch.setattr(sys, "stderr", zoo.STREAMS[name]())

    batches = list(fastload.DataLoader(datasets.Made(zoo.array, 8), 2, num_workers=1))

    assert [zoo.value_of(batch) for batch in batches] == [0, 2, 4, 6]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_nested_tensors_of_the_older_kind_come_from_workers(num_workers: int) -> None:
    """Their layout is that of plain tensors, and they have no sizes."""
    loader = fastload.DataLoader(
        datasets.Made(zoo.ragged, 4), 2, num_workers=num_workers, collate_fn=zoo.nested_collate
    )

    batches = list(loader)

    assert all(batch.is_nested for batch in batches)
    parts = [part.tolist() for batch in batches for part in batch.unbind()]
    assert parts == [torch.as_tensor(zoo.ragged(index)).tolist() for index in range(4)]


@pytest.mark.parametrize("name", ["fastload-worker-2", "fastload-pin"])
def test_threads_that_cannot_be_started_leave_none_behind(
    name: str, monkeypatch: pytest.MonkeyPatch, pretend_accelerator: Any
) -> None:
    """The system has no more threads: its error, and what was started before is ended."""
    pretend_accelerator()
    original = threading.Thread.start

    def start_or_refuse(self: threading.Thread) -> None:
        if self.name == name:
            raise RuntimeError("can't start new thread")
        original(self)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    method = "process" if name == "fastload-pin" else "thread"
    loader = fastload.DataLoader(datasets.Made(zoo.array, 24), 4, num_workers=3, worker_type=method)
    num_threads = torch.get_num_threads()

    with pytest.raises(RuntimeError, match="can't start new thread"):
        iter(loader)

    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_worker_that_ended_before_it_could_be_watched_is_a_death(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server may have waited for it, and its number then names no process."""
    parent, original = os.getpid(), os.pidfd_open

    def gone(pid: int) -> int:
        if os.getpid() != parent:
            return original(pid)  # a worker watches its parent
        os.kill(pid, signal.SIGKILL)
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(os, "pidfd_open", gone)
    monkeypatch.setattr(starting, "why_no_processes", lambda: None)
    loader = fastload.DataLoader(
        datasets.Made(zoo.array, 8), 2, num_workers=1, multiprocessing_context=method
    )

    with pytest.raises(fastload.errors.WorkerDiedError, match="worker 0 was killed by SIGKILL"):
        list(loader)
