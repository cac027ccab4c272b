"""Run a client's script in its own environment, with one of three loaders, in one rank or in two.

A script is a program for torch's loader. The three ways to run it are:

- `torch`: the script as it is;
- `fastload`: the script with the import of fastload's loader in the place of torch's;
- `patch_torch`: the script as it is, below `fastload.patch_torch()`.

Each has the names of `in_rank`, and must end by itself and leave no process and no file in /dev/shm behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.kit import leaks

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build" / "clients"
OURS = ("fastload", "patch_torch")
IMPORT_OF_TORCH = "from torch.utils.data import DataLoader\n"
IMPORT_OF_FASTLOAD = "from fastload import DataLoader\n"
FIRST_LINES = "import torch\nfrom tests.clients.in_rank import *\n"
_PATCH = "import fastload\nfastload.patch_torch()\n"
_MARK = "CLIENT_RUN"  # the variable by which the processes of a run are found
_LEAVES_S = 20.0  # how long processes may take to go after the ranks have ended


@dataclass
class Rank:
    """How a rank has ended, and the records that it has made, in order."""

    returncode: int
    output: str
    records: list[tuple[str, Any]]

    def got(self, *names: str) -> list[Any]:
        """The records of these names, in order."""
        return [value for name, value in self.records if name in names]


@dataclass
class Run:
    """The ranks of a run, in their order, and what was left behind when they had ended."""

    ranks: list[Rank]
    left_behind: list[str]

    def check(self, way: str | None = None) -> Run:
        """Each rank succeeded, nothing is left, and batches came from the loader of the way that is given."""
        for number, rank in enumerate(self.ranks):
            assert rank.returncode == 0, f"rank {number}:\n{rank.output}"
            other = "fastload" if way == "torch" else "torch"
            assert way is None or rank.got(f"epochs of {other}") == [0], rank.records
        assert self.left_behind == []
        return self

    def named(self) -> list[list[tuple[str, Any]]]:
        """The records of all ranks, with their names, but for the counts of epochs."""
        return [[one for one in rank.records if "epochs of" not in one[0]] for rank in self.ranks]


def changed(script: str, way: str, replacements: Mapping[str, str] | None = None) -> str:
    """The script for one of the ways, with what a user changes for fastload: by default, the import."""
    if way == "fastload":
        for old, new in (replacements or {IMPORT_OF_TORCH: IMPORT_OF_FASTLOAD}).items():
            assert old in script, f"the script lacks {old!r}"
            script = script.replace(old, new)
    return FIRST_LINES + (_PATCH if way == "patch_torch" else "") + script


class Started:
    """The processes of a run that has begun, in a new folder: one for each rank, with torchrun's variables.

    The program is a text that `changed` gives, and the `command` runs it by Python; `settings` are further
    environment variables.
    """

    def __init__(
        self,
        program: str,
        folder: Path,
        *,
        ranks: int = 1,
        environment: str = "shared",
        command: tuple[str, ...] = ("train.py",),
        arguments: tuple[str, ...] = (),
        num_workers: int = 0,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        python = ENVIRONMENTS / environment / "bin" / "python"
        assert python.exists(), f"{python} is missing: `make test-clients` makes it"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(program)
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self._files_before = leaks.names_in_shm()
        own = {name: text for name, text in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
        shared = own | {
            "PYTHONPATH": str(ROOT),
            "CLIENT_FOLDER": str(folder),
            "CLIENT_NUM_WORKERS": str(num_workers),
            "OMP_NUM_THREADS": "1",
            "NO_ALBUMENTATIONS_UPDATE": "1",
            "HF_HUB_OFFLINE": "1",
            "YOLO_CONFIG_DIR": str(folder / "ultralytics"),
            "HF_HOME": str(folder / "huggingface"),
            "TOKENIZERS_PARALLELISM": "false",
            "FASTLOAD_RUNTIME_DIR": str(folder / "runtime"),
            _MARK: self._mark,
            **(settings or {}),
        }
        if ranks > 1:
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        self._outputs = [folder / f"output-{rank}.txt" for rank in range(ranks)]
        self._processes = []
        for rank, output in enumerate(self._outputs):
            with output.open("w") as file:
                process = subprocess.Popen(
                    [str(python), *command, *arguments],
                    cwd=folder,
                    env={**shared, **(_torchrun(rank, ranks) if ranks > 1 else {})},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._processes.append(process)

    def signal_when_ready(self, number: int, limit_s: float = 100.0) -> None:
        """Send a signal to all ranks, when each of them has got batches."""
        deadline = time.monotonic() + limit_s
        ready = [self._folder / f"ready-{rank}" for rank in range(len(self._processes))]
        while time.monotonic() < deadline and not all(path.exists() for path in ready):
            if any(one.poll() is not None for one in self._processes):
                break  # `end` gives their output
            _pause()
        for process in self._processes:
            process.send_signal(number)

    def end(self, limit_s: float = 100.0) -> Run:
        """Wait until all ranks have ended; kill all that is left after the limit, and say so."""
        deadline = time.monotonic() + limit_s
        while any(one.poll() is None for one in self._processes) and time.monotonic() < deadline:
            _pause()
        left = [f"rank {number} runs on" for number, one in enumerate(self._processes) if one.poll() is None]
        left += self._leftovers(_LEAVES_S if not left else 0.0)
        for process in self._processes:
            process.wait()
        ranks = []
        for number, (process, output) in enumerate(zip(self._processes, self._outputs, strict=True)):
            records = self._folder / f"records-{number}.jsonl"
            lines = records.read_text().splitlines() if records.exists() else []
            told = output.read_text(errors="replace")
            ranks.append(Rank(process.returncode, told, [tuple(json.loads(line)) for line in lines]))
        return Run(ranks, left)

    def _leftovers(self, grace_s: float) -> list[str]:
        """Processes of this run, and files in /dev/shm, that are there after a time; processes are killed."""
        deadline = time.monotonic() + grace_s
        while True:
            processes = self._own_processes()
            files = leaks.names_in_shm() - self._files_before
            if not (processes or files) or time.monotonic() > deadline:
                break
            _pause()
        found = [f"{one.pid}: {' '.join(one.cmdline())}" for one in processes if one.is_running()]
        for one in processes:
            os.kill(one.pid, signal.SIGKILL)
        return found + sorted(files)

    def _own_processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
                is_own = process.environ().get(_MARK) == self._mark
                if is_own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def run(
    script: str,
    folder: Path,
    way: str,
    *,
    replacements: Mapping[str, str] | None = None,
    limit_s: float = 150.0,
    **options: Any,
) -> Run:
    """Run a script to its end; the options are those of `Started`."""
    return Started(changed(script, way, replacements), folder, **options).end(limit_s)


def _torchrun(rank: int, ranks: int) -> dict[str, str]:
    """What torchrun sets for a rank."""
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "GROUP_RANK": 0, "NODE_RANK": 0}
    numbers |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(number) for name, number in numbers.items()}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _pause() -> None:
    time.sleep(0.05)  # it waits for other processes; no test depends on its length
