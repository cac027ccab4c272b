"""What all tests share: the leak guard, caches that store without delay, the markers of `make test-fast`."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

# Not what imports torch: the process that hands tests to those that run them needs none of it.
from tests.kit import leaks
from tests.kit.processes import Gate, Interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

if hypothesis.settings.get_current_profile_name() == "default":  # the mutants have a profile of their own
    # By default a test fails if an example takes more than 200 ms, or long to make: on a busy machine, any
    # does at times.
    hypothesis.settings.register_profile(
        "without deadline", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("without deadline")

TESTS = Path(__file__).parent
INTERPRETERS = {"spawn", "forkserver"}  # start methods
MATRICES = {"parity", "resume", "faults", "survival"}  # folders of many cases that start worker processes
# Files that import much (pandas, torch's compiler, Lightning) or keep much: a worker forked from a
# process of 370 MB costs 34 ms of processor time, from one of 800 MB 56 ms, from a fork server 43 ms.
LAST = [
    "test_crop_in_decoder.py",
    "test_record.py",
    "test_foreign_samples.py",
    "test_hugging_face.py",
    "test_training.py",
    "test_stats.py",
]
LAST += ["test_gpu_checks.py", "test_train.py", "test_launchers.py", "test_bottlenecks.py"]
os.environ.setdefault("FASTLOAD_VERIFY", "1")  # each remembered file is decoded again and compared
# What training scripts import; an optimizer imports torch's compiler. Warnings are errors, as in the scripts.
# One thread computes: threads that wait for each other take longer than small models do.
READY = """
import os, warnings
os.environ["OMP_NUM_THREADS"] = "1"
warnings.filterwarnings("error", category=UserWarning)
import albumentations, torch, torch._dynamo, skimage.data, skimage.io
import fastload.cache.dataset, fastload.cli.main, fastload.epochs.epoch
"""
# Imported once by the fork server, before it forks workers; with torch's loader each would import torch.
PRELOADED = (
    "__main__",
    "fastload.cache.dataset",
    "albumentations",
    "tests.kit.datasets",
    "fastload.workers.preload",
)


def pytest_configure() -> None:
    """Let the fork server import what workers need, take Ctrl-C, and fork where a test names no start method.

    The background job of a shell ignores Ctrl-C: tests send it, and would wait for ever. Python 3.14 does not
    fork by default, and workers from its fork server lack what a test changes or defines within itself.
    """
    if sys.version_info >= (3, 14):
        multiprocessing.set_start_method("fork", force=True)
    os.register_at_fork(after_in_parent=_count_fork)
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # its import would ask the network for a newer version
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_BEGAN_S = time.monotonic()
_forks = [0]  # of the processes that run tests


def _count_fork() -> None:
    _forks[0] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that prints the summary how often this one forked."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["forks"] = _forks[0]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the forks of a process that has run its tests."""
    _forks[0] += getattr(node, "workeroutput", {}).get("forks", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how often the tests forked: a fork of these large processes takes 10 to 20 ms."""
    terminalreporter.write_line(f"The tests forked {_forks[0]:,} times.")
    if config.getoption("--record"):
        from benchmarks.harness import machine

        tests = [one for kind in ("passed", "failed") for one in terminalreporter.getreports(kind)]
        phases = [*tests, *terminalreporter.getreports("")]  # setup and teardown have no name here
        slowest = sorted(phases, key=lambda one: one.duration, reverse=True)[:10]
        used = os.times()
        found = {
            "command": "make test RECORD=benchmarks/results/suite.json",
            "machine": machine(),
            "load": round(os.getloadavg()[2], 1),
            "tests": len(tests),
            "wall_s": round(time.monotonic() - _BEGAN_S),
            "cpu_s": round(used.user + used.system + used.children_user + used.children_system),
            "forks": _forks[0],
            "slowest": [[round(one.duration, 1), f"{one.nodeid:.100} ({one.when})"] for one in slowest],
        }
        Path(config.getoption("--record")).write_text(json.dumps(found, indent=1) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Tests marked `thorough` run with --thorough only, as `make test-all` does."""
    parser.addoption("--thorough", action="store_true", help="every case of the tests' tables")
    parser.addoption("--record", metavar="FILE", help="write what the run took to a file, as JSON")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test-fast` leaves out, where it shows in a test's parameters, fixtures or folder.

    Leave out what is marked `thorough`, unless it was asked for. Put the files in `LAST` last, in its order.
    """
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    items.sort(key=lambda item: LAST.index(item.path.name) if item.path.name in LAST else -1)
    for item in items:
        if " at 0x" in item.name:
            raise pytest.UsageError(f"{item.nodeid}: the address is another one in each process: give ids=")
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        texts = {value for value in parameters.values() if isinstance(value, str)}
        if "interpreter" in getattr(item, "fixturenames", ()) or texts & INTERPRETERS:
            item.add_marker("slow")
        has_none = parameters.get("num_workers") == 0 or "without_workers" in item.name
        if item.path.relative_to(TESTS).parts[0] in MATRICES and not has_none:
            item.add_marker("matrix")


_frozen_modules = [0]  # how many modules were imported at the last gc.freeze()


@pytest.fixture(autouse=True)
def leak_guard() -> Iterator[None]:
    """No test leaves a process, a thread, a descriptor or a file in /dev/shm behind."""
    if len(sys.modules) > _frozen_modules[0]:  # what tests import takes no time of the collections below
        _frozen_modules[0] = len(sys.modules)
        gc.collect()
        if "t" not in sys.abiflags:  # see fastload/workers/preload.py
            gc.freeze()
    before = leaks.snapshot()
    yield
    entry_points = sys.modules.get("fastload.rng.entry_points")
    if entry_points is not None and (
        entry_points.current_streams() is not None or entry_points.THREAD.drawing.root is not None
    ):
        entry_points.set_worker_streams(None, is_thread=False)
        pytest.fail("left behind: transforms of this process or thread draw from a loader's streams")
    file_cache = sys.modules.get("fastload.cache.file_cache")
    if file_cache is not None:
        file_cache.forget_stores()  # which a process keeps on purpose
    gc.collect()
    deadline = time.monotonic() + leaks.GRACE_S
    pause_s = 0.001
    while grown := leaks.grown(before, leaks.snapshot()):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {grown}")
        select.select([], [], [], pause_s)
        pause_s = min(2 * pause_s, 0.02)
        gc.collect()


@pytest.fixture
def needs_lmdb() -> None:
    """Skip the test where lmdb is not installed; it has no wheels for free-threaded Python 3.13.

    Most tests of LMDB raise ModuleNotFoundError there, which tests/compatibility/run.py counts as not run.
    Tests of the command line or of other processes see another error in its place, and ask for this fixture.
    """
    pytest.importorskip("lmdb")


@pytest.fixture
def pretend_accelerator(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and the loaders of this test pin their batches in a thread."""
    from tests.kit import accelerator

    return lambda: accelerator.pretend_accelerator(monkeypatch.setattr)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The device of every loader with device="cuda"; at the end nothing was used without order."""
    from fastload.epochs import on_device
    from fastload.system import logs
    from tests.device.fake import FakeBackend

    backend = FakeBackend()
    monkeypatch.setattr(on_device, "choose_backend", lambda device, _: None if device == "cpu" else backend)
    logs.say_once.cache_clear()
    yield backend
    backend.check()


@pytest.fixture
def lends_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small leaves lie in slots and in buffers, too: batches of a few bytes then show what is lent."""
    from fastload.batch import packing
    from fastload.memory import lease

    monkeypatch.setattr(lease, "SMALL_BYTES", 0)
    monkeypatch.setattr(packing, "SMALL_BYTES", 0)
    monkeypatch.setattr(packing, "_SMALL_SHARE", 0)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Where samples wait for the test; it is opened when the test is over."""
    gate = Gate()
    yield gate
    gate.open()
    gate.close()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Runs programs in processes of their own, in which nothing but torch has been imported."""
    with Interpreter("import torch") as interpreter:
        yield interpreter


@pytest.fixture(scope="session")
def ready_interpreter() -> Iterator[Interpreter]:
    """Runs scripts in processes of their own, in which the slow imports of training scripts are done."""
    with Interpreter(READY) as interpreter:
        yield interpreter
