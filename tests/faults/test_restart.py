"""Workers that die are replaced, as often as restart_workers allows, and their batches are read again."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import pytest

import fastload
from fastload.workers import death_message, pool
from tests.faults import zoo
from tests.faults.zoo import rows
from tests.kit import datasets

METHODS = ["fork", pytest.param("forkserver", marks=pytest.mark.slow)]


EXPECTED = [list(range(start, start + 4)) for start in range(0, 40, 4)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
@pytest.mark.parametrize("index", [0, 14, 39])
def test_a_worker_that_died_is_replaced_and_no_batch_is_missing(
    tmp_path: Any, method: str, number: signal.Signals, index: int, caplog: pytest.LogCaptureFixture
) -> None:
    """All batches come in order; the log names the signal and what is left."""
    loader = fastload.DataLoader(
        datasets.Made(zoo.DiesOnce(str(tmp_path / "died"), index, number), 40),
        4,
        num_workers=2,
        restart_workers=2,
        multiprocessing_context=method,
    )

    with caplog.at_level(logging.WARNING, "fastload"):
        assert rows(loader) == EXPECTED

    assert f"was killed by {number.name}" in caplog.text
    assert "restart_workers allows 1 more" in caplog.text


def test_a_worker_that_dies_each_time_ends_the_epoch_after_the_last_restart() -> None:
    """The error is that of the last death."""
    loader = fastload.DataLoader(
        datasets.Made(zoo.DiesAlways(14), 40), 4, num_workers=2, restart_workers=2, prefetch_factor=1
    )
    iterator = iter(loader)
    got = [[zoo.value_of(sample) for sample in next(iterator)] for _ in range(3)]

    with pytest.raises(
        fastload.WorkerDiedError, match=r"worker 1 exited with code 7 .*It was working on batch 3"
    ):
        next(iterator)

    assert got == EXPECTED[:3]


def test_batches_that_are_held_stay_as_they_are_when_their_worker_is_replaced(tmp_path: Any) -> None:
    """The new worker writes to memory of its own."""
    make = zoo.DiesOnce(str(tmp_path / "died"), 22)
    loader = fastload.DataLoader(datasets.Made(make, 40), 4, num_workers=1, restart_workers=1)

    held = list(loader)

    assert [[zoo.value_of(sample) for sample in batch] for batch in held] == EXPECTED
    assert all((batch == batch[:, :1]).all() for batch in held)


def test_persistent_workers_are_replaced_in_a_later_epoch_too(tmp_path: Any) -> None:
    """The new worker serves the epochs after it, and hears of their numbers."""
    make = zoo.DiesOnce(str(tmp_path / "died"), 22)
    open(make.path, "w").close()
    loader = fastload.DataLoader(
        datasets.Made(make, 40), 4, num_workers=2, restart_workers=1, persistent_workers=True
    )
    with loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            if epoch == 1:
                os.unlink(make.path)
            assert rows(loader) == EXPECTED


def test_a_worker_that_is_killed_from_outside_between_batches_is_replaced() -> None:
    """Also one that owes nothing at the moment."""
    loader = fastload.DataLoader(datasets.Made(zoo.array, 40), 4, num_workers=2, restart_workers=1)
    iterator = iter(loader)
    got = [next(iterator) for _ in range(2)]
    os.kill(iterator._pool.pids[0], signal.SIGKILL)

    got += list(iterator)

    assert [[zoo.value_of(sample) for sample in batch] for batch in got] == EXPECTED


def test_the_cgroups_count_of_kills_is_named_where_it_grew(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL without it is most often, not certainly, for want of memory."""
    counts = iter([3, 4])
    monkeypatch.setattr(pool, "oom_kills", lambda: next(counts, 4))
    iterator = iter(fastload.DataLoader(datasets.Made(datasets.killed, 24), 4, num_workers=1))

    with pytest.raises(fastload.WorkerDiedError, match=r"memory\.events of the cgroup counts 1 more"):
        list(iterator)


def test_an_exit_code_that_others_took_is_said_to_be_unknown() -> None:
    """A handler for SIGCHLD that waits for any child takes it."""
    text = death_message.death_message(1, None, None)

    assert "worker 1 ended, and another part of this program took its exit code" in text


@pytest.mark.timeout(60)
def test_a_handler_that_waits_for_all_children_hides_no_death() -> None:
    """SIGCHLD: os.waitpid(-1), as some servers do."""

    def reap(*_: object) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    before = signal.signal(signal.SIGCHLD, reap)
    try:
        iterator = iter(fastload.DataLoader(datasets.Made(datasets.killed, 24), 4, num_workers=2))
        with pytest.raises(fastload.WorkerDiedError, match=r"worker 1 .* working on batch 3,"):
            list(iterator)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_worker_that_cannot_be_started_again_ends_the_iterator(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's error comes first, and every later call says that the iterator is closed."""
    make = zoo.DiesOnce(str(tmp_path / "died"), 2)
    loader = fastload.DataLoader(datasets.Made(make, 40), 4, num_workers=1, restart_workers=1)
    iterator = iter(loader)

    def refuse(*_: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(pool, "make_channel", refuse)

    with pytest.raises(BlockingIOError):
        next(iterator)
    with pytest.raises(fastload.LoaderClosedError):
        next(iterator)


def test_after_a_death_the_state_lies_within_the_epoch(tmp_path: Any) -> None:
    """Also for a caller who goes on after the error; the rest of the epoch can be read later."""
    make = zoo.DiesOnce(str(tmp_path / "died"), 10)
    loader = fastload.DataLoader(datasets.Made(make, 40), 4, num_workers=2)
    iterator = iter(loader)
    got: list[Any] = []
    with pytest.raises(fastload.WorkerDiedError):
        got.extend(iter(iterator.__next__, None))
    with pytest.raises(StopIteration):
        next(iterator)

    loader.load_state_dict(loader.state_dict())
    got += list(loader)

    assert [[zoo.value_of(sample) for sample in batch] for batch in got] == EXPECTED
