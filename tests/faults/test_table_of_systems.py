"""Rows of the table of faults that need a process of their own: systems that refuse, and limits.

Each row is a program that makes its system refuse, reads two epochs with two workers, and prints what came:
all, where fastload has another way, or an error with the system's own reason. Nothing is left after it.
"""

from __future__ import annotations

import json
import platform
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.faults import table_zoo as zoo
from tests.kit.processes import Interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "aarch64"), reason="the filter's numbers are of these machines"
    ),
]
ALL = list(range(0, zoo.SIZE, zoo.BATCH))
OF_WORKER_1 = ALL[1::2]

_SHARED = """
import contextlib, errno, multiprocessing, resource, select, time
import fastload
from tests.faults import table_zoo as zoo
from tests.faults.test_table import take
from tests.kit import leaks
from tests.kit.faults import hide_proc, log_lines, refuse

lines = log_lines()


def become_a_user():
    # One that has no other process and no privilege, so that limits hold and count this process alone.
    if os.geteuid() != 0:
        print(json.dumps("only root can become a user that has no other process"))
        sys.exit(0)
    os.setgroups([])
    os.setresgid(61234, 61234, 61234)
    os.setresuid(61234, 61234, 61234)


def expect_clone3():
    # By which glibc starts threads since 2.34; before that it did so by the call that also forks.
    _, version = os.confstr("CS_GNU_LIBC_VERSION").split()
    if tuple(map(int, version.split("."))) < (2, 34):
        print(json.dumps("threads cannot be refused without processes here"))
        sys.exit(0)


def limit(name, allowed):
    resource.setrlimit(getattr(resource, name), (allowed, allowed))


def left_behind(before):
    deadline = time.monotonic() + 5
    while (grown := leaks.grown(before, leaks.snapshot())) and time.monotonic() < deadline:
        select.select([], [], [], 0.02)
    return list(grown)


def describe(error):
    return [[kind.__name__ for kind in type(error).__mro__], str(error)]


def read_two_epochs(in_worker=None, method="fork", padding=0, **options):
    # Worker 0 alone does something first.
    before = leaks.snapshot() if os.path.exists("/proc/self") else None
    loader = zoo.make_loader("raises", "nowhere", method, **options)
    loader.collate_fn.padding = padding
    if in_worker is not None:
        loader.worker_init_fn = lambda worker_id: worker_id or in_worker()
    report = []
    for _ in range(2):
        firsts, errors = [], []
        try:
            iterator = iter(loader)
            while True:
                some, error = take(iterator)
                firsts += some
                if error is None or len(errors) == 8:
                    break
                if errors and isinstance(error, fastload.errors.LoaderClosedError):
                    break  # the error before has closed the iterator
                errors.append(describe(error))
                del error
        except Exception as error:
            errors.append(describe(error))
        iterator = None
        report.append([firsts, errors])
        loader.close()
    gc.collect()
    print(json.dumps([report, lines, before and left_behind(before)]))
"""


class Row(NamedTuple):
    """What one system refuses, and what the caller gets."""

    program: str
    firsts: list[int] = ALL  # samples of the batches that come in each epoch
    error: tuple[str, str] | None = None  # its type and a part of its text
    line: str = ""  # a part of each line of the log
    left: tuple[str, ...] = ()  # kinds of what stays


READ = "\nread_two_epochs()"
NO_FORK = ("BlockingIOError", "temporarily unavailable")
ENDED = (("WorkerDiedError", "exited with code 1"), "exited with code 1")
TORCHS = "workers use torch's own transport"
ROWS = {
    # Calls without which workers have torch's transport.
    **{
        f"{call} gives {code}": Row(f"refuse({call!r}, errno.{code})" + READ, line=TORCHS)
        for call, code in [
            *[("memfd_create", "EPERM"), ("pidfd_open", "ENOSYS")],
            *[("pidfd_send_signal", "EPERM"), ("socketpair", "EPERM")],
        ]
    },
    # Calls that fastload does without.
    **{
        f"{call} gives {code}": Row(f"refuse({call!r}, errno.{code})" + READ)
        for call, code in [("madvise", "ENOSYS"), ("mlock", "EPERM"), ("flock", "EPERM")]
    },
    "no locked memory": Row("become_a_user()\nlimit('RLIMIT_MEMLOCK', 0)" + READ),
    "no /proc": Row("hide_proc() or (print('\"this user may not mount\"'), sys.exit(0))" + READ),
    # Processes and threads.
    # multiprocessing leaves its pipes open if the fork fails.
    "no processes": Row("refuse('clone', errno.EAGAIN)" + READ, [], NO_FORK, left=("descriptors",)),
    "one process for this user": Row(
        "become_a_user()\nlimit('RLIMIT_NPROC', 2)" + READ, [], NO_FORK, left=("descriptors",)
    ),
    "no processes for the fork server": Row(
        "multiprocessing.set_forkserver_preload(['tests.faults.cannot_fork'])\n"
        "read_two_epochs(method='forkserver')",
        [],
        ("WorkerStartError", "the usual cause is a limit on processes or memory"),
    ),
    "no threads": Row("expect_clone3()\nrefuse('clone3', errno.EAGAIN)" + READ, [], *ENDED),
    "no threads for worker threads": Row(
        "become_a_user()\nlimit('RLIMIT_NPROC', 1)\nread_two_epochs(method=None, worker_type='thread')",
        [],
        ("RuntimeError", "can't start new thread"),
    ),
    "no messages": Row("refuse('sendmsg', errno.EPERM)" + READ, [], ("PermissionError", "not permitted")),
    # In worker 0 alone, once it has started.
    **{
        f"{call} in a worker": Row(f"read_two_epochs(lambda: {call})", OF_WORKER_1, error)
        for call, error in {
            "refuse('ftruncate', errno.ENOSPC)": ("SharedMemoryError", "No space left on device"),
            "refuse('madvise', errno.ENOMEM)": ("SharedMemoryError", "of memory: [Errno 12] Cannot allocate"),
            "limit('RLIMIT_FSIZE', 0)": ("SharedMemoryError", "RLIMIT_FSIZE is 0"),
            "refuse('pwrite64', errno.ENOSPC), padding=3000": ("RuntimeError", "not be sent: OSError(28"),
        }.items()
    },
    **{
        f"no {call} in a worker": Row(f"read_two_epochs(lambda: refuse('{call}', errno.EPERM))", [], *ENDED)
        for call in ("sendmsg", "recvmsg")
    },
}


@pytest.fixture(scope="module")
def systems() -> Iterator[Interpreter]:
    """Runs each program in a process of its own."""
    with Interpreter(_SHARED) as interpreter:
        yield interpreter


@pytest.mark.parametrize("name", ROWS)
def test_what_a_system_refuses_is_told_or_costs_nothing(name: str, systems: Interpreter) -> None:
    """Two epochs in a row, with the same batches, the same errors, and nothing left behind."""
    row = ROWS[name]
    done = systems.run(row.program, exits=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    if isinstance(report, str):
        pytest.skip(report)
    epochs, lines, left = report

    assert tuple(left or ()) == row.left
    for firsts, errors in epochs:
        assert firsts == row.firsts
        assert bool(errors) == (row.error is not None)
        for kinds, text in errors:
            assert row.error is not None
            assert row.error[0] in kinds
            assert row.error[1] in text
    assert bool(lines) == bool(row.line)
    assert all(row.line in line for line in lines)
