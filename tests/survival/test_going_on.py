"""After an interruption, a time-out, an error or a death: what the caller gets next.

Every test here runs under the leak guard of conftest.py: no process, thread or descriptor remains.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import fastload
from fastload.device.pin_thread import PinThread
from fastload.workers import pool
from tests.kit import datasets
from tests.kit.batches import compare_with_torch
from tests.survival import attack_zoo
from tests.survival.attack_zoo import assert_numbered

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kit.processes import Gate

PINNED = pytest.mark.parametrize("pinned", [False, True], ids=["plain", "pinned"])


def assert_rest(iterator: Any, start: int, *, stop: int = 24, step: int = 4) -> None:
    """Exactly the batches from ``start`` on come, in order."""
    batches = list(iterator)
    assert len(batches) == (stop - start) // step
    for number, batch in enumerate(batches):
        assert_numbered(batch, start + number * step, start + number * step + step)


# --- interruptions ---------------------------------------------------------------------------------------


@PINNED
def test_an_interrupted_wait_may_be_taken_up_again(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, pretend_accelerator: Any, pinned: bool
) -> None:
    """KeyboardInterrupt in next(), as in a notebook: the batch that was waited for is the next one."""
    if pinned:
        pretend_accelerator()
    dataset = attack_zoo.Held(gate, 9, interrupts=True)
    iterator = iter(fastload.DataLoader(dataset, 4, num_workers=2, prefetch_factor=1))
    held = [next(iterator), next(iterator)]
    _call_when_waited_for(gate.open, monkeypatch, pinned)

    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    gate.open()

    assert_rest(iterator, 8)
    for number, batch in enumerate(held):
        assert_numbered(batch, 4 * number, 4 * number + 4)


def test_a_loader_whose_workers_ctrl_c_has_ended_starts_new_ones() -> None:
    """A terminal and a notebook interrupt persistent workers too; the next epoch is whole."""
    loader = fastload.DataLoader(torch.arange(40), 4, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    for process in iterator._workers:
        os.kill(process.pid, signal.SIGINT)
        process.join()

    assert torch.equal(torch.cat(list(loader)), torch.arange(40))


def _call_when_waited_for(call: Callable[[], None], monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    """Call ``call`` once the consumer is about to wait."""
    place: Any = PinThread if pinned else pool.Pool
    wait = place.wait
    calls = [call]

    def call_and_wait(self: Any, *args: Any) -> Any:
        if calls:
            calls.pop()()
        return wait(self, *args)

    monkeypatch.setattr(place, "wait", call_and_wait)


# --- time-outs -------------------------------------------------------------------------------------------


@PINNED
def test_after_a_timeout_the_same_batch_is_waited_for_again(
    gate: Gate, pretend_accelerator: Any, pinned: bool
) -> None:
    """As in torch: twice too late, then there, and nothing is lost or doubled."""
    if pinned:
        pretend_accelerator()
    dataset = attack_zoo.Held(gate, 9)
    iterator = iter(fastload.DataLoader(dataset, 4, num_workers=2, timeout=60))
    held = [next(iterator), next(iterator)]
    iterator._timeout = 0.1
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.1 seconds"):
            next(iterator)
    iterator._timeout = 60  # what comes now must not be late on a busy machine
    gate.open()

    assert_rest(iterator, 8)
    for number, batch in enumerate(held):
        assert_numbered(batch, 4 * number, 4 * number + 4)


def test_after_a_timeout_a_new_epoch_of_persistent_workers_has_nothing_of_the_old_one(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late batch of the old epoch is dropped when it comes."""
    monkeypatch.setattr(pool, "_GRACE_S", 0.2)  # the worker behind the gate does not leave by itself
    dataset = attack_zoo.Held(gate, 9)
    loader = fastload.DataLoader(dataset, 4, num_workers=2, timeout=60, persistent_workers=True)
    iterator = iter(loader)
    held = [next(iterator), next(iterator)]
    iterator._timeout = 0.1
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after "):
        next(iterator)
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after "):
        next(iter(loader))  # its first batch is due from the worker that is late
    iterator._timeout = 60
    gate.open(10)

    assert_rest(loader, 0)
    assert_numbered(held[1], 4, 8)
    loader.close()


# --- errors of the sampler -------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_a_new_epoch_takes_the_only_slot_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to the epoch that was left had the slot; nothing else would wake the one who waits."""
    monkeypatch.setattr(pool, "_WATCH_INTERVAL_S", 1000.0)
    dataset = datasets.Made(attack_zoo.numbered, 24)
    with fastload.DataLoader(
        dataset, 4, num_workers=1, persistent_workers=True, prefetch_memory=4096
    ) as loader:
        for _ in range(3):
            iterator = iter(loader)
            assert_numbered(next(iterator), 0, 4)

        assert_rest(iter(loader), 0)


@pytest.mark.parametrize(
    ("num_workers", "persistent", "position"),
    [(0, False, 0), (0, False, 3), (1, False, 1), (1, True, 0), (2, False, 4), (2, True, 3), (2, True, 5)],
)
def test_a_sampler_that_raises_midway_does_what_it_does_in_torch(
    num_workers: int, persistent: bool, position: int
) -> None:
    """The same batches before it, the same error at the same call, the same batches after it."""

    def make(loader_class: Any) -> Any:
        sampler = attack_zoo.RaisingSampler(position)
        dataset = datasets.Made(attack_zoo.numbered, 24)
        options = {"num_workers": num_workers, "persistent_workers": persistent}
        return loader_class(dataset, batch_sampler=sampler, **options), None

    epochs = compare_with_torch(make)

    assert any(isinstance(part, ConnectionError) for part in epochs[0])


def test_an_index_that_cannot_be_sent_is_an_error_that_ends_the_epoch() -> None:
    """It names the batch; afterwards nobody waits for what will not come."""
    indices: list[Any] = [[0], [1], [2], [lambda: 3], [4]]
    loader = fastload.DataLoader(datasets.Made(attack_zoo.numbered, 24), batch_sampler=indices, num_workers=1)
    iterator = iter(loader)
    next(iterator)

    with pytest.raises(Exception, match="lambda") as caught:
        next(iterator)

    assert caught.value.__notes__ == ["fastload: the index of batch 3 could not be sent to worker 0"]
    with pytest.raises(fastload.errors.LoaderClosedError):
        next(iterator)


# --- deaths and closing ----------------------------------------------------------------------------------


@PINNED
def test_a_loader_whose_persistent_worker_died_can_begin_a_new_epoch(
    pretend_accelerator: Any, pinned: bool
) -> None:
    """Its dead workers are not asked again; the batch in hand stays."""
    if pinned:
        pretend_accelerator()
    loader = fastload.DataLoader(
        datasets.Made(datasets.killed, 24), 4, num_workers=2, persistent_workers=True
    )
    iterator = iter(loader)
    held = next(iterator)
    kept = held[0].clone()

    with pytest.raises(fastload.errors.WorkerDiedError, match="worker 1 was killed by SIGKILL"):
        list(iterator)
    assert list(iterator) == []
    loader.dataset.make = attack_zoo.numbered

    assert_rest(loader, 0)
    assert torch.equal(held[0], kept)
    loader.close()


def test_a_death_is_logged_once_with_the_text_of_its_error(caplog: pytest.LogCaptureFixture) -> None:
    """A program that catches the error leaves a trace of it."""
    iterator = iter(fastload.DataLoader(datasets.Made(datasets.killed, 24), 4, num_workers=2))
    with caplog.at_level(logging.ERROR, "fastload"):
        with pytest.raises(fastload.errors.WorkerDiedError) as caught:
            list(iterator)
        assert list(iterator) == []

    assert [record.getMessage() for record in caplog.records] == [str(caught.value)]


def test_a_death_that_the_pin_thread_finds_first_is_still_a_death(
    monkeypatch: pytest.MonkeyPatch, pretend_accelerator: Any
) -> None:
    """Not a closed loader: the error is the same when the consumer comes to it much later."""
    pretend_accelerator()
    is_found = threading.Event()
    report = pool.Pool._bury

    def report_and_tell(self: Any, *args: Any) -> None:
        try:
            report(self, *args)
        finally:
            is_found.set()

    monkeypatch.setattr(pool.Pool, "_bury", report_and_tell)
    iterator = iter(
        fastload.DataLoader(datasets.Made(datasets.killed, 24), 4, num_workers=2, prefetch_factor=3)
    )
    is_found.wait()

    with pytest.raises(fastload.errors.WorkerDiedError, match="worker 1 was killed by SIGKILL"):
        list(iterator)
    assert list(iterator) == []


@pytest.mark.parametrize(("num_workers", "pinned"), [(0, False), (2, False), (2, True)])
def test_every_next_after_close_is_the_same_error(
    pretend_accelerator: Any, num_workers: int, pinned: bool
) -> None:
    """However many batches were under way: never a wait. The loader lives on."""
    if pinned:
        pretend_accelerator()
    with fastload.DataLoader(datasets.Made(attack_zoo.numbered, 24), 4, num_workers=num_workers) as loader:
        iterator = iter(loader)
        held = next(iterator)
    loader.close()

    for _ in range(8):
        with pytest.raises(fastload.errors.LoaderClosedError, match="start a new one"):
            next(iterator)
    assert_numbered(held, 0, 4)
    assert_rest(loader, 0)


@PINNED
def test_close_in_another_thread_ends_a_wait(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, pretend_accelerator: Any, pinned: bool
) -> None:
    """The waiting thread gets LoaderClosedError, whatever it was at."""
    if pinned:
        pretend_accelerator()
    loader = fastload.DataLoader(attack_zoo.Held(gate, 1), 4, num_workers=2)
    iterator = iter(loader)
    is_waiting = threading.Event()
    _call_when_waited_for(is_waiting.set, monkeypatch, pinned)
    errors: list[Exception] = []

    def consume() -> None:
        try:
            next(iterator)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is what the test is about
            errors.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    is_waiting.wait()
    gate.open()  # or its worker would be given its five seconds
    loader.close()
    thread.join()

    assert [type(error) for error in errors] in ([fastload.errors.LoaderClosedError], [])


def test_a_batch_that_cannot_be_opened_costs_itself_alone() -> None:
    """Unpickling fails in this process: the error comes at its batch, and those behind it come whole."""
    iterator = iter(
        fastload.DataLoader(
            datasets.Made(datasets.third_sealed, 6), batch_size=None, num_workers=1, timeout=20
        )
    )
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

    method = "thread" if num_workers else "process"
    loader = fastload.DataLoader(datasets.Made(read, 6), 2, num_workers=num_workers, worker_type=method)
    iterator = iter(loader)
    for _ in range(3):
        with pytest.raises(ValueError, match="unreadable"):
            next(iterator)

    own, place = raised.__notes__
    assert own == "of the user's own"
    assert place.startswith("fastload: batch 2, ")
    loader.close()


class _InterruptedOnce(torch.utils.data.Dataset[int]):
    """Ctrl-C comes while sample 3 is read for the first time."""

    def __init__(self) -> None:
        self.is_interrupted = False

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3 and not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt
        return index


def test_ctrl_c_in_a_dataset_without_workers_loses_no_batch() -> None:
    """The batch comes next, also from a state that was saved when the interrupt was handled."""
    loader = fastload.DataLoader(_InterruptedOnce(), 2)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    state = loader.state_dict()

    assert [batch.tolist() for batch in iterator] == [[2, 3], [4, 5], [6, 7]]
    resumed = fastload.DataLoader(range(8), 2)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[2, 3], [4, 5], [6, 7]]
