"""After an interruption, a time-out, an error or a death: what the caller gets next."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import fastload
from fastload.workers import pool, process_pool
from fastload.workers.pinned_pool import PinnedPool
from tests.kit import datasets
from tests.kit.batches import compare_with_torch
from tests.survival import zoo
from tests.survival.zoo import assert_numbered, assert_rest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kit.processes import Gate

NUMBERED = datasets.Made(zoo.numbered, 24)


@pytest.fixture(params=[False, True], ids=["plain", "pinned"])
def pinned(request: pytest.FixtureRequest, pretend_accelerator: Any) -> bool:
    """Whether a thread pins the batches."""
    if request.param:
        pretend_accelerator()
    return bool(request.param)


def _call_when_waited_for(call: Callable[[], None], monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    """Call `call` once the consumer is about to wait."""
    place: Any = PinnedPool if pinned else process_pool.ProcessPool
    wait = place.wait
    calls = [call]

    def call_and_wait(self: Any, *args: Any) -> Any:
        if calls:
            calls.pop()()
        return wait(self, *args)

    monkeypatch.setattr(place, "wait", call_and_wait)


@pytest.mark.parametrize("how", ["interrupt", "timeout"])
def test_a_wait_that_was_ended_may_be_taken_up_again(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, pinned: bool, how: str
) -> None:
    """By Ctrl-C, as in a notebook, or twice by a time-out: the batch that was waited for is the next one."""
    dataset = zoo.Held(gate, 9, interrupts=how == "interrupt")
    iterator: Any = iter(fastload.DataLoader(dataset, 4, num_workers=2, prefetch_factor=1, timeout=60))
    held = [next(iterator), next(iterator)]
    if how == "interrupt":
        _call_when_waited_for(gate.open, monkeypatch, pinned)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    else:
        iterator._timeout = 0.1
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.1 seconds"):
                next(iterator)
        iterator._timeout = 60  # what comes now must not be late on a busy machine
    gate.open()

    assert_rest(iterator, 8)
    assert_rest(held, 0, stop=8)


def test_after_a_timeout_a_new_epoch_has_nothing_old(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The late batch of the old epoch is dropped when it comes."""
    monkeypatch.setattr(process_pool, "GRACE_S", 0.2)  # the worker behind the gate does not leave by itself
    dataset = zoo.Held(gate, 9)
    loader = fastload.DataLoader(dataset, 4, num_workers=2, timeout=60, persistent_workers=True)
    iterator = iter(loader)
    held = [next(iterator), next(iterator)]
    iterator._timeout = 0.1
    for epoch in (iterator, loader):  # its first batch is due from the worker that is late
        with pytest.raises(RuntimeError, match=r"^DataLoader timed out after "):
            next(iter(epoch))
    iterator._timeout = 60
    gate.open(10)

    assert_rest(loader, 0)
    assert_numbered(held[1], 4, 8)
    loader.close()


def test_close_in_another_thread_ends_a_wait(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    """The waiting thread gets LoaderClosedError, whatever it was at."""
    loader = fastload.DataLoader(zoo.Held(gate, 1), 4, num_workers=2)
    iterator = iter(loader)
    is_waiting = threading.Event()
    _call_when_waited_for(is_waiting.set, monkeypatch, pinned)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(next, iterator)
        is_waiting.wait()
        gate.open()  # or its worker would be given its five seconds
        loader.close()

    assert isinstance(waiting.exception(), (fastload.errors.LoaderClosedError, type(None)))


@pytest.mark.timeout(60)
def test_a_new_epoch_takes_the_only_slot_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to the epoch that was left had the slot; nothing else would wake the one who waits."""
    monkeypatch.setattr(pool, "WATCH_INTERVAL_S", 1000.0)
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "max_prefetch_memory": "4096B"}
    with fastload.DataLoader(NUMBERED, 4, **options) as loader:
        for _ in range(3):
            assert_numbered(next(iter(loader)), 0, 4)

        assert_rest(iter(loader), 0)


@pytest.mark.parametrize(
    ("num_workers", "persistent", "position"), [(0, False, 0), (0, False, 3), (1, True, 0), (2, False, 4)]
)
def test_a_sampler_that_raises_is_as_in_torch(num_workers: int, persistent: bool, position: int) -> None:
    """The same batches before it, the same error at the same call, the same batches after it."""

    def make(loader: Any) -> Any:
        options = {"num_workers": num_workers, "persistent_workers": persistent}
        return loader(NUMBERED, batch_sampler=zoo.RaisingSampler(position), **options), None

    epochs = compare_with_torch(make)

    assert any(isinstance(part, ConnectionError) for part in epochs[0])


def test_an_index_that_cannot_be_sent_is_an_error_that_ends_the_epoch() -> None:
    """It names the batch; afterwards nobody waits for what will not come."""
    indices: list[Any] = [[0], [1], [2], [lambda: 3], [4]]
    iterator = iter(fastload.DataLoader(NUMBERED, batch_sampler=indices, num_workers=1))
    next(iterator)

    with pytest.raises(Exception, match="lambda") as caught:
        next(iterator)

    assert caught.value.__notes__ == ["fastload: the index of batch 3 could not be sent to worker 0"]
    with pytest.raises(fastload.errors.LoaderClosedError):
        next(iterator)


def test_a_batch_that_cannot_be_opened_costs_itself_alone() -> None:
    """Unpickling fails in this process: the error comes at its batch, and those behind it come whole."""
    dataset = datasets.Made(datasets.third_sealed, 6)
    iterator = iter(fastload.DataLoader(dataset, batch_size=None, num_workers=1, timeout=20))
    got = [int(next(iterator)), int(next(iterator))]
    with pytest.raises(ValueError, match="sealed") as caught:
        next(iterator)

    assert caught.value.__notes__ == ["fastload: batch 2, worker 0, dataset index 2"]
    assert [*got, *map(int, iterator)] == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_that_is_raised_again_names_its_last_batch_alone(num_workers: int) -> None:
    """A dataset keeps one error object and raises it at each access: its notes do not grow."""
    raised = ValueError("unreadable")
    raised.add_note("of the user's own")

    def read(index: int) -> Any:
        raise raised

    options: dict[str, Any] = {"num_workers": num_workers, "worker_type": "thread"}
    with fastload.DataLoader(datasets.Made(read, 6), 2, **options) as loader:
        iterator = iter(loader)
        for _ in range(3):
            with pytest.raises(ValueError, match="unreadable"):
                next(iterator)

    own, place = raised.__notes__
    assert own == "of the user's own"
    assert place.startswith("fastload: batch 2, ")


def test_ctrl_c_in_a_dataset_without_workers_loses_no_batch() -> None:
    """The batch comes next, also from a state that was saved when the interrupt was handled."""
    interrupts = [KeyboardInterrupt]

    def read(index: int) -> int:
        if index == 3 and interrupts:
            raise interrupts.pop()
        return index

    loader = fastload.DataLoader(datasets.Made(read, 8), 2)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    resumed = fastload.DataLoader(range(8), 2)
    resumed.load_state_dict(loader.state_dict())

    for rest in (iterator, resumed):
        assert [batch.tolist() for batch in rest] == [[2, 3], [4, 5], [6, 7]]


def test_ctrl_c_leaves_persistent_workers_alone() -> None:
    """A terminal and a notebook send it to the workers, too: they go on, and so does the loader."""
    with fastload.DataLoader(torch.arange(40), 4, num_workers=2, persistent_workers=True) as loader:
        iterator: Any = iter(loader)
        next(iterator)
        pids = [process.pid for process in iterator._workers]
        for pid in pids:
            os.kill(pid, signal.SIGINT)

        for _ in range(2):
            assert torch.equal(torch.cat(list(loader)), torch.arange(40))
        assert [process.pid for process in iterator._workers] == pids


def test_a_death_that_the_pin_thread_finds_first_is_still_a_death(
    monkeypatch: pytest.MonkeyPatch, pretend_accelerator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the consumer comes to it much later; the log has its text once, and a new epoch begins."""
    pretend_accelerator()
    is_found = threading.Event()
    report = process_pool.ProcessPool._handle_deaths

    def report_and_tell(self: Any, *args: Any) -> None:
        try:
            report(self, *args)
        finally:
            is_found.set()

    monkeypatch.setattr(process_pool.ProcessPool, "_handle_deaths", report_and_tell)
    dataset = datasets.Made(datasets.killed, 24)
    loader = fastload.DataLoader(dataset, 4, num_workers=2, prefetch_factor=3, persistent_workers=True)
    iterator = iter(loader)
    is_found.wait()

    with pytest.raises(fastload.errors.WorkerDiedError, match="worker 1 was killed by SIGKILL") as caught:
        list(iterator)
    assert list(iterator) == []
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert lines == [str(caught.value)]
    dataset.make = zoo.numbered
    assert_rest(loader, 0)
    loader.close()


@pytest.mark.parametrize("kind", ["without_workers", "process", "thread", "pinned"])
def test_each_next_after_close_is_one_error(pretend_accelerator: Any, kind: str) -> None:
    """However many batches were under way: never a wait, and no thread is left. The loader lives on."""
    if kind == "pinned":
        pretend_accelerator()
    options: Any = {"num_workers": 2 * (kind != "without_workers")}
    options["worker_type"] = "thread" if kind == "thread" else "process"
    num_threads = threading.active_count()
    with fastload.DataLoader(NUMBERED, 4, **options) as loader:
        iterator = iter(loader)
        held = next(iterator)
    assert threading.active_count() == num_threads
    loader.close()

    for _ in range(8):
        with pytest.raises(fastload.errors.LoaderClosedError, match="start a new one"):
            next(iterator)
    assert_numbered(held, 0, 4)
    assert_rest(loader, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_may_be_left_by_break_or_by_an_error(num_workers: int) -> None:
    """The loader starts anew afterwards, also with persistent workers that were ahead."""
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    with fastload.DataLoader(NUMBERED, 4, **options) as loader:
        for _ in loader:
            break
        with pytest.raises(ZeroDivisionError):
            [1 // 0 for _ in loader]

        assert_rest(loader, 0)
