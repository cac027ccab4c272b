"""Run one case: limit its time, and check afterwards that the library has left nothing behind."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from tests.kit import leaks
from tests.kit.accelerator import pretend_accelerator
from tests.soak.case import draw
from tests.soak.compare import SoakError
from tests.soak.faults import FAULTS
from tests.soak.modes import MODES
from tests.soak.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.soak.case import Case

_ALL_MODES = {**MODES, **FAULTS}
_STACKS_S = 1.0  # in which workers write their stacks
_LATER_S = 30.0  # after the limit faulthandler takes over, if Python does not let the watching thread run


class Soak:
    """Runs cases in this process; standard error goes to a file, and a failure shows the text of its case."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._gives_up = threading.Event()
        self._stderr = os.dup(2)
        self._captured = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        os.dup2(self._captured.fileno(), 2)
        faulthandler.enable(self._stderr)
        os.register_at_fork(after_in_child=functools.partial(faulthandler.enable, 2))
        self._folder = tempfile.TemporaryDirectory(prefix="fastload-soak-")
        self._registry = Path(self._folder.name, "registry")
        os.environ["FASTLOAD_RUNTIME_DIR"] = str(self._registry)  # apart from other jobs' caches
        os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
        multiprocessing.set_forkserver_preload(["tests.soak.datasets"])
        pretend_accelerator(setattr, always=False)
        torch.set_num_threads(1)  # torch's pools of threads do not survive a fork
        warnings.simplefilter("ignore")  # about more workers than cores, and about pinned memory
        gc.collect()
        gc.freeze()  # imported modules stay anyway; without them each later collection is fast

    def close(self) -> None:
        """Give standard error back."""
        faulthandler.disable()
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        self._captured.close()
        self._folder.cleanup()

    def run(self, case: Case) -> str | None:
        """Run a case; gives the failure as text, or None."""
        self._captured.seek(0)
        self._captured.truncate()
        with self._watched(case):
            try:
                self._run(case)
            except Exception as error:  # noqa: BLE001  # each exception is the failure of the case
                told = "" if isinstance(error, SoakError) else traceback.format_exc()
                return f"{type(error).__name__}: {error}\n{told}{self._written()}"
        return None

    def _run(self, case: Case) -> None:
        before = self._snapshot()
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            consume(case, Path(folder))
        deadline = time.monotonic() + leaks.GRACE_S
        while grown := leaks.grown(before, self._snapshot()):
            if time.monotonic() > deadline:
                raise SoakError(f"left behind: {grown}")
            time.sleep(0.02)

    def _snapshot(self) -> dict[str, set[Any]]:
        gc.collect()
        return {
            **leaks.snapshot(),
            "shared memory": _mapped(),
            "registered caches": _registered(self._registry),
        }

    def _written(self) -> str:
        self._captured.seek(0)
        text = self._captured.read().decode(errors="replace").strip()
        return f"standard error:\n{text}\n" if text else ""

    @contextlib.contextmanager
    def _watched(self, case: Case) -> Iterator[None]:
        timer = threading.Timer(self._limit_s, self._give_up, [case])
        timer.name = "soak-watch"
        timer.daemon = True
        timer.start()
        faulthandler.dump_traceback_later(self._limit_s + _LATER_S, exit=True, file=self._stderr)
        try:
            yield
        finally:
            timer.cancel()
            if self._gives_up.is_set():
                threading.Event().wait()  # the watching thread ends this process
            faulthandler.cancel_dump_traceback_later()

    def _give_up(self, case: Case) -> None:
        """Write the stacks of this process and of its workers to standard error, and end all of them."""
        self._gives_up.set()
        os.write(self._stderr, f"\nFAILED {case}\nno end after {self._limit_s:.0f} s; stacks:\n".encode())
        faulthandler.dump_traceback(self._stderr)
        children = leaks.children()
        for signal_number in (signal.SIGABRT, signal.SIGCONT, signal.SIGKILL):
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal_number)
            if signal_number == signal.SIGCONT:
                time.sleep(_STACKS_S)
        os.write(self._stderr, f"{self._written()}\n{replay(case)}\n".encode())
        os._exit(1)


def consume(case: Case, folder: Path) -> None:
    """Run the mode of a case. This function keeps nothing: all that stays after it belongs to the library."""
    random.seed(case.seed)
    np.random.seed(case.seed % 2**32)
    torch.manual_seed(case.seed)
    thresholds = gc.get_threshold()
    subject = Subject(case, folder)
    try:
        gc.set_threshold(*{"usual": thresholds, "off": (0,), "eager": (20, 2, 2)}[case.garbage])
        _ALL_MODES[case.mode](subject, random.Random(f"actions of {case.seed}"))
    finally:
        subject.close()
        gc.set_threshold(*thresholds)


def _mapped() -> set[str]:
    """The memfds that this process maps, by inode and name."""
    text = Path("/proc/self/maps").read_text()
    return set(re.findall(r"\d+ +/memfd:\S+", text))


def _registered(registry: Path) -> set[str]:
    """The registered caches of living processes; the next look-up removes those of dead processes."""
    names = set(os.listdir(registry)) - {"lock"} if registry.exists() else set()
    return {name for name in names if psutil.pid_exists(int(name.split(".")[1]))}


def replay(case: Case) -> str:
    """The command that runs a case again, with the settings that `--with` has changed."""
    command = f"replay: {Path(sys.executable).name} -m tests.soak --case {case.seed}"
    changes = case.settings(draw(case.seed))
    return f"{command} --with {changes}" if changes else command
