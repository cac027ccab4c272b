"""Each fault at each stage of a worker's life, under each start method: the error, and all that was right.

Every row checks the error's type and text, that each batch that arrived is right, that nobody waits for a
batch that will not come, and that a new epoch works once the fault is gone. test_table_of_systems.py has the
rows that need a process of their own. Spawn differs from the fork server at start, init and fetch alone.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.util
import os
import signal
from multiprocessing import popen_fork, popen_forkserver, popen_spawn_posix
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.distributed as dist

import fastload
from fastload.cache.ram import registry
from fastload.cache.ram.arena import Arena
from fastload.workers import pool, process_pool
from fastload.workers import process as starting
from tests.faults import table_zoo as zoo
from tests.kit import datasets, leaks
from tests.kit.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.kit.processes import Gate

READING = ("fetch", "transform", "inner loader", "collate", "pack")
SPAWNED = ("exits at once", "SIGKILL", "raises")


def rows(names: Iterable[str], stages: Iterable[str], *, spawned: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Each fault at each stage under each method; without --thorough a part, and none that is spawned."""
    found = []
    for (row, name), (column, stage) in itertools.product(enumerate(names), enumerate(stages)):
        is_spawned = name in SPAWNED and stage in spawned
        for method, every in [("fork", 2), ("forkserver", 4), *([("spawn", 0)] if is_spawned else [])]:
            marks = [] if every and not (row + column) % every else [pytest.mark.thorough]
            if (stage, method) != ("start", "fork"):  # a forked worker unpickles nothing
                found.append(pytest.param(name, stage, method, marks=marks))
    return pytest.mark.parametrize(("name", "stage", "method"), found)


DEATHS = {
    "exits": "exited with code 3 (user code called sys.exit()",
    "exits at once": "exited with code 4",
    "raises a BaseException": "exited with code 1",
    "SIGKILL": "was killed by SIGKILL",
    "SIGTERM": "was killed by SIGTERM",
    "SIGSEGV": "was killed by SIGSEGV",
}
ERRORS: dict[str, tuple[type[Exception], str]] = {  # an error of fastload's brings its attributes, too
    "raises": (zoo.OwnError, "it is mine"),
    "raises an error of fastload": (fastload.errors.ImageReadError, "it is cut"),
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


pytestmark = pytest.mark.timeout(90)
ALL = list(range(0, zoo.SIZE, zoo.BATCH))
BEFORE = [first for first in ALL if first + zoo.BATCH <= zoo.FAULTY]
AFTER = [first for first in ALL if first > zoo.FAULTY]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for in vain, or noticed late, is a time-out of the test, not a pause of seconds."""
    monkeypatch.setattr(process_pool, "GRACE_S", 1000.0)
    monkeypatch.setattr(pool, "WATCH_INTERVAL_S", 1000.0)


def assert_death(error: Exception | None, name: str, task: str) -> None:
    """The error names the worker, the cause and what it was working on."""
    assert isinstance(error, fastload.errors.WorkerDiedError)
    assert f"worker 0 {DEATHS[name]}" in str(error)
    assert ("out-of-memory killer" in str(error)) == (name == "SIGKILL")
    assert task in str(error)


def assert_a_new_epoch_works(loader: Any) -> None:
    """Without the fault, in forked workers in the place of spawned ones, which would import torch again."""
    for part in (loader.worker_init_fn, loader.collate_fn):
        part.fault.stage = "nowhere"
    if loader.multiprocessing_context.get_start_method() == "spawn":
        loader.multiprocessing_context = "fork"
    assert take(iter(loader)) == (ALL, None)


@rows(DEATHS, [*READING, "reply", "replied"], spawned=["fetch"])
def test_a_death_is_an_error_that_says_how(name: str, stage: str, method: str) -> None:
    """The batches before it and the reply in the pipe come; the epoch is over, the next has new workers."""
    with zoo.make_loader(name, stage, method, persistent_workers=True) as loader:
        iterator = iter(loader)

        firsts, error = take(iterator)

        task = "It was working on batch 4, index [16, 17"
        if stage == "replied":
            assert firsts in (ALL[:3], ALL[:5], ALL[:6])
            task = "It had no unfinished batch" if firsts == ALL[:3] else "It was working on batch 6"
        else:
            assert firsts in (BEFORE, BEFORE[:-1])
        assert_death(error, name, task)
        assert take(iterator) == ([], None)
        if stage in ("fetch", "replied"):
            assert_a_new_epoch_works(loader)


@rows(DEATHS, ["fetch", "collate", "reply", "replied"], spawned=["fetch"])
def test_a_death_costs_nothing_where_a_worker_may_be_replaced(name: str, stage: str, method: str) -> None:
    """All batches come."""
    loader = zoo.make_loader(name, stage, method, max_worker_restarts=1)
    loader.dataset.fault.happens_once(multiprocessing.get_context(method))

    assert [first for _, first in loader] == ALL


@rows(ERRORS, [*READING, "reply"], spawned=["fetch"])
def test_an_error_while_a_batch_is_made_or_sent_costs_that_batch(name: str, stage: str, method: str) -> None:
    """It comes at its turn, with its own type, text and place; the batches after it come."""
    iterator = iter(zoo.make_loader(name, stage, method))
    kind, text = ERRORS[name]

    firsts, error = take(iterator)

    assert firsts == BEFORE
    assert error is not None
    if stage == "reply":
        kind, text = RuntimeError, text or "MemoryError()"
        assert "the batch could not be sent: " in str(error)
    assert isinstance(error, kind)
    assert text in str(error)
    assert "fastload: batch 4, worker 0, dataset index" in error.__notes__[-1]
    assert take(iterator) == (AFTER, None)


@rows(["exits", "SIGKILL"], ["replied"])
def test_a_death_after_the_last_reply_ends_the_wait_for_others(name: str, stage: str, method: str) -> None:
    """Worker 1 never answers batch 3, so the caller sees the death before batch 6 is sent to worker 0."""
    firsts, error = take(iter(zoo.make_loader(name, stage, method, hangs_at=12)))

    assert firsts == ALL[:3]
    assert_death(error, name, "It had no unfinished batch")


@rows(HARMLESS, ["fetch", "inner loader", "pack", "init", "replied", "idle"])
def test_what_is_odd_and_harmless_costs_nothing(name: str, stage: str, method: str) -> None:
    """Children, threads, handlers and a missing stderr in a worker: all batches come."""
    assert take(iter(zoo.make_loader(name, stage, method))) == (ALL, None)


@rows([*DEATHS, *ERRORS], ["init", "start"], spawned=["init", "start"])
def test_a_fault_at_init_or_unpickling_comes_first(name: str, stage: str, method: str) -> None:
    """A death ends the epoch. An error at init is that of every batch of worker 0; both workers unpickle."""
    loader = zoo.make_loader(name, stage, method)
    iterator = iter(loader)

    firsts, error = take(iterator)

    assert firsts == []
    if name in DEATHS:
        assert isinstance(error, fastload.errors.WorkerDiedError)
        assert DEATHS[name] in str(error)
        assert take(iterator) == ([], None)
    elif stage == "init":
        assert isinstance(error, ERRORS[name][0])
        firsts, error = take(iterator)
        assert firsts == [zoo.BATCH]
        assert isinstance(error, ERRORS[name][0])
    else:  # as in torch, a user's error loses its class
        kind, text = ERRORS[name]
        is_own = issubclass(kind, fastload.FastloadError)
        assert isinstance(error, kind if is_own else fastload.errors.WorkerStartError)
        assert text in str(error)
        assert is_own or f"{kind.__name__}: " in str(error)
        assert error.__notes__[-1] == "fastload: worker 0, at its start"


IDLE_DEATHS = [name for name in DEATHS if name not in ("exits", "raises a BaseException")]  # a thread's error


@rows(IDLE_DEATHS, ["idle"])
@pytest.mark.parametrize("then", ["goes on", "is replaced", "is closed"])
def test_a_death_between_epochs_is_an_error_of_the_second(
    name: str, stage: str, method: str, then: str
) -> None:
    """It says how the worker ended, and at which batch it was needed; a restart or close() makes it none."""
    options = {"persistent_workers": True, "max_worker_restarts": int(then == "is replaced")}
    loader = zoo.make_loader(name, stage, method, **options)
    fault = loader.worker_init_fn.fault
    fault.may_begin = multiprocessing.get_context(method).Event()
    iterator = iter(loader)
    assert take(iterator) == (ALL, None)
    fault.may_begin.set()
    assert starting.wait_for_all([iterator._pool._workers[0].process], 60)
    fault.may_begin.clear()  # or a worker in its place dies as well
    if then == "is closed":
        loader.close()
    iterator = iter(loader)

    firsts, error = take(iterator)

    if then == "goes on":
        assert firsts == []
        assert_death(error, name, "It was working on batch 0")
        assert take(iterator) == ([], None)
    else:
        assert (firsts, error) == (ALL, None)
    loader.close()


def test_a_stopped_worker_is_waited_for_and_goes_on() -> None:
    """SIGSTOP is no death: with a time-out it is torch's error, and after SIGCONT its batch comes."""
    iterator = iter(zoo.make_loader("raises", "nowhere", "fork", timeout=60))
    pid = iterator._workers[0].pid
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


LAUNCHERS: dict[str, Any] = {
    "fork": popen_fork.Popen,
    "spawn": popen_spawn_posix.Popen,
    "forkserver": popen_forkserver.Popen,
}


@pytest.mark.parametrize(
    ("method", "moment", "number"),
    [
        *(("fork", "before", 1), ("fork", "launched", 1), ("fork", "launched", 2)),
        ("forkserver", "launched", 2),
        pytest.param("spawn", "launched", 2, marks=pytest.mark.thorough),
    ],
)
def test_a_handler_that_raises_while_a_worker_is_started_leaves_nothing_behind(
    method: str, moment: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before there is a process, and when only it is there."""
    launch, parent = LAUNCHERS[method]._launch, os.getpid()
    numbers = itertools.count(1)

    def raise_in_turn(*_: object) -> None:
        if next(numbers) == number:
            raise zoo.OwnError

    def launch_and_ring(self: Any, process: Any) -> None:
        launch(self, process)
        if os.getpid() == parent:
            signal.raise_signal(signal.SIGALRM)

    loader = zoo.make_loader("raises", "nowhere", method)
    starting.start_helpers(method)
    before = leaks.held()
    handler = signal.signal(signal.SIGALRM, raise_in_turn)
    if moment == "before":
        monkeypatch.setattr(multiprocessing.util, "_flush_std_streams", raise_in_turn)
    else:
        monkeypatch.setattr(LAUNCHERS[method], "_launch", launch_and_ring)
    try:
        with pytest.raises(zoo.OwnError):
            iter(loader)
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGALRM, handler)

    assert leaks.held_soon(before) == before
    assert_a_new_epoch_works(loader)


def assert_close_ends_workers(name: str, stage: str, method: str, patch: pytest.MonkeyPatch) -> None:
    """Close the loader when one has its fault: no batch comes after that, and those that are held stay."""
    patch.setattr(process_pool, "GRACE_S", 0.1)
    patch.setattr(process_pool, "_TERMINATE_S", 0.1)
    loader = zoo.make_loader(name, stage, method)
    begins = loader.worker_init_fn.fault.begins = multiprocessing.get_context(method).Event()
    iterator = iter(loader)
    held = [] if stage == "init" else list(itertools.islice(iterator, 4))
    assert begins.wait(50)

    loader.close()

    with pytest.raises(fastload.errors.LoaderClosedError):
        next(iterator)
    assert take(held) == (BEFORE[: len(held)], None)


@rows(["hangs", "ignores SIGTERM", "blocks all signals", "is stopped"], ["fetch", "inner loader", "init"])
def test_close_ends_any_worker(name: str, stage: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time it gets SIGTERM and then SIGKILL."""
    assert_close_ends_workers(name, stage, method, monkeypatch)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_close_is_not_disturbed_by_what_happens(
    number: signal.Signals, method: str, monkeypatch: Any
) -> None:
    """One dies or is stopped after it was told to leave, and before it has left."""
    original, numbers = process_pool.wait_for_all, [number]

    def wait_and_kill(processes: Any, limit_s: float) -> bool:
        while numbers:
            processes[0].send_signal(numbers.pop())
        return original(processes, limit_s)

    monkeypatch.setattr(process_pool, "wait_for_all", wait_and_kill)
    assert_close_ends_workers("hangs", "fetch", method, monkeypatch)


def fill_together(rank: int, store: Path, victim: int, number: signal.Signals, gate: Gate) -> tuple[Any, Any]:
    """Open the cache of both ranks; the victim fills it until its fault, and the other one after that."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for turn in range(2):
        if turn == rank:
            dataset = datasets.Made(lambda index: np.full((4, 4), index), zoo.SIZE)
            cached = fastload.CachedDataset(dataset, cache_key="faults")
        dist.barrier()
    publish: Any = Arena.publish

    def end_self(self: Any, index: int, *args: Any) -> Any:
        if index == zoo.FAULTY:
            os.kill(os.getpid(), number)
        return publish(self, index, *args)

    if rank == victim:
        Arena.publish = end_self  # type: ignore[method-assign]
    else:
        gate.wait()
    stored = [index for index in range(zoo.SIZE) if index in cached.cache]
    cached.fill(num_workers=0)
    right = [index for index in range(zoo.SIZE) if (cached[index] == index).all()]
    return cached, (stored, cached.cache_info().num_cached, right)


@pytest.mark.parametrize(("number", "victim"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)])
def test_a_rank_that_ends_with_a_sample_half_stored_in_the_cache_of_all_costs_nothing(
    number: signal.Signals, victim: int, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has stored stays, the rest is stored by another rank, and no sample is wrong."""
    monkeypatch.setenv(registry.DIRECTORY_VARIABLE, str(tmp_path / "registry"))
    ranks = [Job(fill_together, rank, tmp_path / "store", victim, number, gate) for rank in range(2)]
    try:
        os.waitid(os.P_PID, ranks[victim].pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        gate.open()
        stored, num_cached, right = ranks[1 - victim].answer()
    finally:
        for rank in ranks:
            rank.end()

    assert [index for index in stored if index <= zoo.FAULTY] == list(range(zoo.FAULTY))
    assert num_cached == zoo.SIZE
    assert right == list(range(zoo.SIZE))
