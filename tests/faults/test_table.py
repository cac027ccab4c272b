"""Each fault at each stage of a worker's life, under each start method: the error, and all that was right.

The table says what the caller gets. Every row checks the error's type and text, that each batch that arrived
is right, that nobody waits for a batch that will not come, and that a new epoch works once the fault is gone;
the leak guard of conftest.py checks that nothing is left behind.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import fastload
from fastload.transport import pool
from tests.faults import table_zoo as zoo

METHODS = [
    "fork",
    pytest.param("forkserver", marks=pytest.mark.slow),
    pytest.param("spawn", marks=pytest.mark.slow),
]
READING = ("fetch", "transform", "collate", "pack")
# Spawned workers run the code of those of the fork server: one stage shows that they get there.
PLACES = [
    *[pytest.param(stage, "fork", id=f"{stage}-fork") for stage in READING],
    *[
        pytest.param(stage, "forkserver", id=f"{stage}-forkserver", marks=pytest.mark.slow)
        for stage in READING
    ],
    pytest.param("fetch", "spawn", id="fetch-spawn", marks=pytest.mark.slow),
]
DEATHS = {
    "exits": "exited with code 3",
    "exits at once": "exited with code 4",
    "raises a BaseException": "exited with code 1",
    "SIGKILL": "was killed by SIGKILL",
    "SIGTERM": "was killed by SIGTERM",
    "SIGSEGV": "was killed by SIGSEGV",
    "SIGABRT": "was killed by SIGABRT",
}
ERRORS: dict[str, tuple[type[Exception], str]] = {
    "raises": (zoo.OwnError, "it is mine"),
    "no memory": (MemoryError, ""),
    "no files": (OSError, "Too many open files"),
    "no room in a file": (OSError, "File too large"),
}
HARMLESS = ("forks", "starts threads", "leaves a daemon thread", "own signal handlers", "closes stderr")


def take(iterator: Any) -> tuple[list[int], Exception | None]:
    """The first sample of each batch up to the end or an error, and the error; every batch is checked."""
    firsts: list[int] = []
    try:
        for batch, first in iterator:
            assert (batch == batch[:, :1, :1]).all()
            assert batch[:, 0, 0].tolist() == list(range(first, first + zoo.BATCH))
            firsts.append(first)
    except Exception as error:  # noqa: BLE001  # whatever it is, the row says what it should be
        return firsts, error
    return firsts, None


ALL = list(range(0, zoo.SIZE, zoo.BATCH))
BEFORE = [first for first in ALL if first + zoo.BATCH <= zoo.FAULTY]
AFTER = [first for first in ALL if first > zoo.FAULTY]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is waited for in vain is a time-out of the test, not a pause of five seconds."""
    monkeypatch.setattr(pool, "_GRACE_S", 100.0)


def assert_a_new_epoch_works(loader: Any, name: str) -> None:
    for part in (loader.worker_init_fn, loader.collate_fn):
        part.fault.stage = "nowhere"
    assert take(iter(loader)) == (ALL, None), name


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("stage", "method"), PLACES)
@pytest.mark.parametrize("name", DEATHS)
def test_a_death_while_a_batch_is_made_is_an_error_that_says_how(name: str, stage: str, method: str) -> None:
    """The batches before it came; the error names worker, cause and batch; the epoch is over."""
    loader = zoo.make_loader(name, stage, multiprocessing_context=method)
    iterator = iter(loader)

    firsts, error = take(iterator)

    assert firsts in (BEFORE, BEFORE[:-1])  # the death may be seen while worker 1's batch is waited for
    assert isinstance(error, fastload.WorkerDiedError)
    assert f"worker 0 {DEATHS[name]}" in str(error)
    assert "It was at batch 4" in str(error)
    assert take(iterator) == ([], None)
    assert_a_new_epoch_works(loader, name)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("stage", "method"), PLACES)
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_while_a_batch_is_made_costs_that_batch_alone(name: str, stage: str, method: str) -> None:
    """It comes at its turn, with its own type, text and place; the batches after it come."""
    loader = zoo.make_loader(name, stage, multiprocessing_context=method)
    iterator = iter(loader)
    kind, text = ERRORS[name]

    firsts, error = take(iterator)

    assert firsts == BEFORE
    assert isinstance(error, kind)
    assert text in str(error)
    assert "fastload: batch 4, worker 0, dataset index" in error.__notes__[-1]
    assert take(iterator) == (AFTER, None)
    assert_a_new_epoch_works(loader, name)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("stage", "method"), [*PLACES, ("init", "fork")])
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_odd_and_harmless_costs_nothing(name: str, stage: str, method: str) -> None:
    """Children, threads, handlers and a missing stderr in a worker: all batches come."""
    loader = zoo.make_loader(name, stage, multiprocessing_context=method)

    assert take(iter(loader)) == (ALL, None)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [*DEATHS, *ERRORS])
def test_a_fault_at_init_is_an_error_before_the_first_batch(name: str, method: str) -> None:
    """A death ends the epoch; an error is that of every batch of its worker."""
    loader = zoo.make_loader(name, "init", multiprocessing_context=method)
    iterator = iter(loader)

    firsts, error = take(iterator)

    assert firsts == []
    if name in DEATHS:
        assert isinstance(error, fastload.WorkerDiedError)
        assert f"worker 0 {DEATHS[name]}" in str(error)
        assert take(iterator) == ([], None)
    else:
        assert isinstance(error, ERRORS[name][0])
        firsts, error = take(iterator)
        assert firsts == [zoo.BATCH]
        assert isinstance(error, ERRORS[name][0])
        loader.close()
    assert_a_new_epoch_works(loader, name)


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("name", [*DEATHS, *ERRORS])
def test_a_fault_while_the_dataset_is_unpickled_is_an_error_before_the_first_batch(
    name: str, method: str
) -> None:
    """In both workers, because both unpickle it."""
    loader = zoo.make_loader(name, "start", multiprocessing_context=method)
    iterator = iter(loader)

    firsts, error = take(iterator)

    assert firsts == []
    if name in DEATHS:
        assert isinstance(error, fastload.WorkerDiedError)
        assert DEATHS[name] in str(error)
    else:
        assert isinstance(error, ERRORS[name][0])
    loader.close()
    assert_a_new_epoch_works(loader, name)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_worker_is_waited_for_and_goes_on(method: str) -> None:
    """SIGSTOP is no death: with a time-out it is torch's error, and after SIGCONT its batch comes."""
    loader = zoo.make_loader("raises", "nowhere", multiprocessing_context=method, timeout=60)
    iterator = iter(loader)
    pid = iterator._pool.pids[0]
    next(iterator), next(iterator), next(iterator), next(iterator)
    os.kill(pid, signal.SIGSTOP)
    iterator._timeout = 0.2
    firsts, error = take(iterator)  # its next batch may have been on its way
    assert firsts in ([], [16], [16, 20])
    assert "timed out" in str(error)
    os.kill(pid, signal.SIGCONT)
    iterator._timeout = 60

    rest, error = take(iterator)

    assert (firsts + rest, error) == ([first for first in ALL if first >= 16], None)


@pytest.mark.timeout(60)
def test_a_stopped_worker_does_not_keep_close_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM waits for a stopped process; SIGKILL does not."""
    monkeypatch.setattr(pool, "_GRACE_S", 0.1)
    monkeypatch.setattr(pool, "_TERMINATE_S", 0.1)
    loader = zoo.make_loader("raises", "nowhere")
    iterator = iter(loader)
    next(iterator)
    os.kill(iterator._pool.pids[0], signal.SIGSTOP)

    loader.close()

    with pytest.raises(fastload.LoaderClosedError):
        next(iterator)
