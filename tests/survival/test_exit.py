"""The interpreter exits while iterators live: exit code 0, not a word, nobody left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

from tests.kit.processes import Interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHARED = """
import multiprocessing, threading
import fastload
from fastload.workers import process_pool
from tests.faults import table_zoo
from tests.kit import datasets
from tests.kit.accelerator import pretend_accelerator
from tests.survival import zoo


def started(**options):
    # A loader, its iterator and the first batch.
    options = {"num_workers": 2, "multiprocessing_context": "fork"} | options
    loader = fastload.DataLoader(datasets.Made(zoo.numbered, 800), 4, **options)
    iterator = iter(loader)
    pids(iterator)
    return loader, iterator, next(iterator)


def pids(iterator):
    print(*(one.pid for one in iterator._workers), flush=True)


def begin(consume):
    # In a daemon thread, which says when the script may end.
    may_end = threading.Event()
    threading.Thread(target=consume, args=(may_end.set,), daemon=True).start()
    may_end.wait()


def exit_with_a_fault(name, stage, method):
    # Of a worker, at batch 4 or after an epoch.
    global held, iterator, batches
    process_pool.GRACE_S = process_pool._TERMINATE_S = 0.1
    is_idle = stage == "idle"
    held = table_zoo.make_loader(name, stage, method, persistent_workers=is_idle)
    fault, context = held.worker_init_fn.fault, multiprocessing.get_context(method)
    fault.begins, fault.may_begin = context.Event(), context.Event()
    iterator = iter(held)
    pids(iterator)
    batches = list(iterator) if is_idle else [next(iterator) for _ in range(4)]
    fault.may_begin.set()
    assert fault.begins.wait(60)
"""

PROGRAMS = {
    "the end of the script": "held = started()",
    "worker threads": """
held = started(worker_type="thread", multiprocessing_context=None)
print(os.getpid(), -1)
""",
    "a handler of SIGTERM, as launchers and loggers have": """
signal.signal(signal.SIGTERM, lambda *_: None)
held = started()
""",
    "a cycle": """
cycle = list(started())
cycle.append(cycle)
""",
    "persistent workers between two epochs": """
loader, iterator, _ = started(persistent_workers=True)
for batch in iterator:
    pass
""",
    "two iterators over one loader": """
loader, *held = started()
other = iter(loader)
batch = next(other)
pids(other)
""",
    "a pin thread and persistent workers": """
pretend_accelerator(setattr)
loader, *_ = started(persistent_workers=True)
for batch in loader:
    break
""",
    "a daemon thread that goes on iterating with persistent workers": """
def consume(end):
    loader, *_ = started(persistent_workers=True)
    while True:
        for number, batch in enumerate(loader):
            end()
            if number == 10:
                break
begin(consume)
""",
    "a daemon thread that goes on iterating behind a pin thread": """
pretend_accelerator(setattr)
def consume(end):
    _, iterator, _ = started()
    for batch in iterator:
        end()
begin(consume)
""",
    "a thread that goes on and closes its loader after the main thread's end": """
def consume():
    loader, iterator, _ = started()
    threading.main_thread().join()
    batches = [next(iterator) for _ in range(20)]
    loader.close()
    try:
        next(iterator)
    except fastload.errors.LoaderClosedError:
        return
    sys.exit("no error")
threading.Thread(target=consume).start()
""",
    **{
        f"a worker that {name}, {stage}": f"exit_with_a_fault({name!r}, {stage!r}, 'fork')"
        for name, stage in [
            *((name, "fetch") for name in ("hangs", "blocks all signals", "is stopped", "SIGKILL")),
            *((name, "idle") for name in ("is stopped", "exits at once")),
        ]
    },
}


@pytest.fixture(scope="module")
def scripts() -> Iterator[Interpreter]:
    """Runs each program in a process of its own."""
    with Interpreter(_SHARED) as interpreter:
        yield interpreter


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_interpreter_exits_in_silence(scripts: Interpreter, name: str) -> None:
    """Exit code 0, nothing on stderr, no worker left: one that does not leave is killed."""
    done = scripts.run(PROGRAMS[name])

    assert (done.returncode, done.stderr) == (0, "")
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
