"""Each script of this folder, run as its user would run it: a process of its own, real files, and what it claims.

A script states its claim in the first line of its docstring and asserts it. Lines that begin with `$` are the
commands that run it, in order; without any, it is `python SCRIPT`. Its folder holds `photos/` with two classes
of twenty images; all pixels of image number k have the value 6 k. Scripts that end before their time print
`skip:` and the reason.

Plain calls of `python` and `fastload` are forks of an interpreter that has imported torch, which no script can
tell from a new one; other commands go to a shell.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.kit import leaks
from tests.kit.processes import AS_A_SCRIPT, ROOT, still_running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kit.processes import Interpreter

HERE = Path(__file__).parent
SCRIPTS = sorted(path for path in HERE.glob("*.py") if not path.name.startswith("test_"))
LIMIT_S = 60

# Of the programs that it starts, multiprocessing asks for those in the folder where it was imported.
IN_ITS_FOLDER = """
import multiprocessing.process, os
multiprocessing.process.ORIGINAL_DIR = os.getcwd()
"""


def docstring(script: Path) -> str:
    return ast.get_docstring(ast.parse(script.read_text())) or ""


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty images each of two classes; image k is of the gray value 6 k."""
    photos = tmp_path_factory.mktemp("images") / "photos"
    for number in range(40):
        path = photos / ("cat" if number < 20 else "dog") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((48, 64, 3), 6 * number, np.uint8)).save(path)
    return photos


@pytest.fixture
def folder(tmp_path: Path, images: Path) -> Iterator[Path]:
    """Where the user works; no process that began there may be left."""
    folder = tmp_path / "work"
    shutil.copytree(images, folder / "photos")
    (tmp_path / "home").mkdir()
    yield folder
    left = still_running(_processes_in(tmp_path), leaks.GRACE_S)
    assert not left, [psutil.Process(pid).cmdline() for pid in left]


def _processes_in(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            where = os.readlink(f"/proc/{process.pid}/cwd")
        except OSError:  # it has ended
            continue
        if Path(where).is_relative_to(folder):
            found.append(process.pid)
    return found


# `python SCRIPT WORDS`, `python -c "$(cat SCRIPT)"` or `fastload WORDS`, to an exit code other than 0 if it says so.
IN_A_FORK = re.compile(
    r"(?P<program>python|fastload) (?P<words>\w+(?:\.py)?(?: [\w./:=-]+)*|-c \"\$\(cat (?P<text>\w+\.py)\)\")"
    r"(?: 2> (?P<told>\w+\.txt))?(?:; test \$\? = (?P<code>\d+))?"
)
COMMAND_LINE = 'import runpy\nrunpy.run_module("fastload", run_name="__main__", alter_sys=True)\n'


def run_in_a_fork(
    command: re.Match[str], folder: Path, environment: dict[str, str], interpreter: Interpreter
) -> tuple[bool, str, str]:
    """Whether a command ended as it says, and its output."""
    words = command["words"].split()
    if command["program"] == "fastload":
        program = COMMAND_LINE
    elif command["text"]:
        program, words = (folder / command["text"]).read_text(), []
    else:
        program = AS_A_SCRIPT
    done = interpreter.run(
        IN_ITS_FOLDER + program, *words, cwd=folder, environment=environment, limit_s=LIMIT_S
    )
    told = done.stderr
    if command["told"]:
        (folder / command["told"]).write_text(told)
        told = ""
    return done.returncode == int(command["code"] or 0), done.stdout, told


def run_in_a_shell(command: str, folder: Path, environment: dict[str, str]) -> tuple[bool, str, str]:
    """Whether the exit code of a command is 0, and its output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    more = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=os.environ | environment | more,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode == 0, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_does_what_it_says(script: Path, folder: Path, ready_interpreter: Interpreter) -> None:
    """Each command of the script ends with the exit code 0, or with that which it tests for."""
    shutil.copy(script, folder)
    environment = {
        "HOME": str(folder.parent / "home"),
        "FASTLOAD_RUNTIME_DIR": str(folder.parent / "runtime"),
    }
    for command in re.findall(r"^ *\$ (.*)$", docstring(script), re.MULTILINE) or [f"python {script.name}"]:
        if plain := IN_A_FORK.fullmatch(command):
            is_right, out, err = run_in_a_fork(plain, folder, environment, ready_interpreter)
        else:
            is_right, out, err = run_in_a_shell(command, folder, environment)
        assert is_right, f"$ {command}\n{out}{err}"
        assert "Traceback" not in err, f"$ {command}\n{out}{err}"
        if out.startswith("skip:"):
            pytest.skip(out.removeprefix("skip:").strip())


def test_the_readme_lists_each_script_with_its_claim() -> None:
    """One line for each, in the order of the names."""
    lines = [f"- `{script.name}`: {docstring(script).splitlines()[0]}" for script in SCRIPTS]
    text = (HERE / "README.md").read_text()
    assert re.findall(r"^- `\w+\.py`: .*$", text, re.MULTILINE) == lines
    assert f"{len(SCRIPTS)} scripts" in text


def test_scripts_are_short_enough_to_read() -> None:
    """No script has more than thirty lines of code."""
    for script in SCRIPTS:
        lines = script.read_text().partition('"""\n')[2].splitlines()
        assert len([line for line in lines if line.strip()]) <= 30, script.name
