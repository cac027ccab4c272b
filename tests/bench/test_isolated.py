"""Claims about runs in processes of their own: results, errors, deaths, and that nothing stays behind."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import tempfile
from multiprocessing import popen_fork
from typing import TYPE_CHECKING, Any

import pytest

from fastload.bench.isolated import RunFailedError, run_isolated
from tests.kit.processes import still_running

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = tempfile.gettempdir()
state: list[int] = []


def remember(value: int) -> tuple[int, list[int]]:
    state.append(value)
    return os.getpid(), list(state)


def fail(error: BaseException) -> None:
    raise error


def shout() -> None:
    sys.stdout.write("from Python\n")
    sys.stdout.flush()
    os.write(1, b"from below\n")


def sleep_deaf(pids: str) -> None:
    """A run with a worker, both of which wait for ever and are deaf to Ctrl-C. It interrupts its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    worker.start()
    with open(pids, "w") as file:
        file.write(f"{os.getpid()} {worker.pid}")
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()


def lose_parent(pids: str) -> None:
    """A run whose parent is killed, and cannot end it."""
    with open(pids, "w") as file:
        file.write(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


@pytest.mark.slow
def test_what_a_run_leaves_behind_does_not_meet_the_next_one() -> None:
    """Each call has a process of its own, and starts from the same state."""
    (first, seen), (second, seen_again) = (
        run_isolated(functools.partial(remember, 1), FOLDER),
        run_isolated(functools.partial(remember, 2), FOLDER),
    )
    assert len({os.getpid(), first, second}) == 3
    assert (seen, seen_again, state) == ([1], [2], [])


CAUGHT = RuntimeError("Caught it.\nOriginal Traceback (most recent):\nKeyError: 7\n")


@pytest.mark.parametrize(
    ("function", "argument", "said"),
    [
        (fail, ValueError("of\nmany lines"), r"^ValueError: of many lines$"),
        (fail, MemoryError(), r"^MemoryError$"),
        (fail, SystemExit(3), r"^SystemExit: 3$"),
        (fail, CAUGHT, r"^KeyError: 7$"),
        (os._exit, 5, r"exit code 5"),
        (signal.raise_signal, signal.SIGKILL, r"exit code -9 \(killed, perhaps out of memory"),
        (signal.raise_signal, signal.SIGTERM, r"exit code -15"),
    ],
)
def test_a_run_that_fails_says_why_in_a_line(function: Any, argument: Any, said: str) -> None:
    """Errors by their class and text, deaths by their signal or exit code."""
    with pytest.raises(RunFailedError, match=said):
        run_isolated(functools.partial(function, argument), FOLDER)


def test_the_output_of_a_run_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output has results alone."""
    run_isolated(shout, FOLDER)
    out, err = capfd.readouterr()
    assert out == ""
    assert {"from Python", "from below"} <= set(err.splitlines())


@pytest.mark.slow
def test_ctrl_c_ends_a_run_and_its_workers(tmp_path: Path) -> None:
    """Although they are deaf to it."""
    pids = tmp_path / "pids"
    with pytest.raises(KeyboardInterrupt):
        run_isolated(functools.partial(sleep_deaf, str(pids)), FOLDER)
    assert still_running(map(int, pids.read_text().split()), 60) == []


def test_a_signal_at_the_start_of_a_run_leaves_no_process(monkeypatch: Any) -> None:
    """It is handled after the start."""
    launch, started = popen_fork.Popen._launch, []  # type: ignore[attr-defined]

    def launch_and_interrupt(self: Any, process: Any) -> None:
        launch(self, process)
        started.append(self.pid)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(popen_fork.Popen, "_launch", launch_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_isolated(signal.pause, FOLDER)
    assert len(started) == 1
    assert still_running(started, 60) == []


@pytest.mark.slow
def test_a_run_ends_with_the_process_that_waits_for_it(tmp_path: Path) -> None:
    """Also after SIGKILL, which nobody can handle."""
    pids = tmp_path / "pids"
    run = functools.partial(lose_parent, str(pids))
    waiting = multiprocessing.get_context("fork").Process(target=run_isolated, args=(run, FOLDER))
    waiting.start()
    waiting.join()
    assert waiting.exitcode == -signal.SIGKILL
    assert still_running([int(pids.read_text())], 60) == []
    waiting.close()
