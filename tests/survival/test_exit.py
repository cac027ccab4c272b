"""The interpreter exits while iterators live: exit code 0, not a word, nobody left."""

from __future__ import annotations

import psutil
import pytest

from tests.kit.processes import run_each

_SHARED = """
import multiprocessing, threading
import fastload
from fastload.workers import pool
from tests.faults import table_zoo
from tests.kit import datasets
from tests.kit.accelerator import pretend_accelerator
from tests.survival import zoo


def loader(**options):
    return fastload.DataLoader(
        datasets.Made(zoo.numbered, 800), 4, num_workers=2, multiprocessing_context="fork", **options
    )


def pids(*iterators):
    print(*(pid for iterator in iterators for pid in [one.pid for one in iterator._workers]), flush=True)


def exit_with_a_fault(name, stage, method):
    # Of a worker, at batch 4 or after an epoch.
    global held, iterator, batches
    pool._GRACE_S = pool._TERMINATE_S = 0.1
    is_idle = stage == "idle"
    held = table_zoo.make_loader(name, stage, multiprocessing_context=method, persistent_workers=is_idle)
    fault, context = held.worker_init_fn.fault, multiprocessing.get_context(method)
    fault.begins, fault.may_begin = context.Event(), context.Event()
    iterator = iter(held)
    pids(iterator)
    batches = list(iterator) if is_idle else [next(iterator) for _ in range(4)]
    fault.may_begin.set()
    assert fault.begins.wait(60)
"""

PROGRAMS = {
    "the end of the script": """
iterator = iter(loader())
batch = next(iterator)
pids(iterator)
""",
    "worker threads": """
held = fastload.DataLoader(datasets.Made(zoo.numbered, 800), 4, num_workers=2, worker_type="thread")
iterator = iter(held)
next(iterator)
print(os.getpid(), -1)
""",
    "a handler of SIGTERM, as launchers and loggers have": """
signal.signal(signal.SIGTERM, lambda *_: None)
iterator = iter(loader())
batch = next(iterator)
pids(iterator)
""",
    "a cycle": """
iterator = iter(loader())
pids(iterator)
cycle = [iterator]
cycle.append(cycle)
""",
    "persistent workers between two epochs": """
held = loader(persistent_workers=True)
for batch in held:
    pass
pids(held._iterator)
""",
    "two iterators over one loader": """
held = loader()
iterators = [iter(held), iter(held)]
batches = [next(iterator) for iterator in iterators]
pids(*iterators)
""",
    "a pin thread and persistent workers": """
pretend_accelerator(setattr)
held = loader(persistent_workers=True)
for epoch in range(2):
    for batch in held:
        break
pids(held._iterator)
""",
    "a daemon thread that goes on iterating with persistent workers": """
started = threading.Event()
held = loader(persistent_workers=True)
def consume():
    while True:
        iterator = iter(held)
        for number, batch in enumerate(iterator):
            if not started.is_set():
                pids(iterator)
                started.set()
            if number == 10:
                break
threading.Thread(target=consume, daemon=True).start()
started.wait()
""",
    "a daemon thread that goes on iterating behind a pin thread": """
pretend_accelerator(setattr)
started = threading.Event()
def consume():
    iterator = iter(loader())
    pids(iterator)
    for batch in iterator:
        started.set()
threading.Thread(target=consume, daemon=True).start()
started.wait()
""",
    "a daemon thread that holds an iterator": """
started = threading.Event()
def consume():
    iterator = iter(loader())
    pids(iterator)
    batch = next(iterator)
    started.set()
    threading.Event().wait()
threading.Thread(target=consume, daemon=True).start()
started.wait()
""",
    "a thread that goes on and closes its loader after the main thread's end": """
def consume():
    held = loader()
    iterator = iter(held)
    pids(iterator)
    threading.main_thread().join()
    batches = [next(iterator) for _ in range(20)]
    held.close()
    try:
        next(iterator)
    except fastload.errors.LoaderClosedError:
        return
    sys.exit("no error")
threading.Thread(target=consume).start()
""",
    **{
        f"a worker that {name}, {stage}, {method}": f"exit_with_a_fault({name!r}, {stage!r}, {method!r})"
        for name, stage, method in [
            ("hangs", "fetch", "fork"),
            ("blocks all signals", "fetch", "fork"),
            ("is stopped", "fetch", "fork"),
            ("SIGKILL", "fetch", "fork"),
            ("is stopped", "idle", "fork"),
            ("exits at once", "idle", "fork"),
            ("ignores SIGTERM", "fetch", "forkserver"),
        ]
    },
}


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[int, str, str]]:
    """Exit code, stdout and stderr of each program."""
    return run_each(PROGRAMS, shared=_SHARED)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_interpreter_exits_in_silence(results: dict[str, tuple[int, str, str]], name: str) -> None:
    """Exit code 0, nothing on stderr, no worker left: one that does not leave is killed."""
    code, out, err = results[name]

    assert (code, err) == (0, "")
    pids = [int(pid) for pid in out.split()]
    assert len(pids) >= 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
