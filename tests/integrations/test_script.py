"""`run_script`, `fastload run` and `fastload profile` run a program as plain python does, to the same end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DRIVER = """
import sys
from fastload.cli.script import run_script

as_module = sys.argv[1] == "-m"
target, *args = sys.argv[2 if as_module else 1:]
run_script(target, args, as_module=as_module)
"""
PLAIN: list[str] = []
DRIVEN = ["-c", DRIVER]
COMMANDS = {"run": ["-m", "fastload", "run", "--quiet"], "profile": ["-m", "fastload", "profile"]}
pytestmark = pytest.mark.slow  # two interpreters each

PROGRAMS = {
    "names": (
        "import sys\n"
        "main = sys.modules['__main__']\n"
        "assert vars(main) is globals()\n"
        "names = sorted(name for name in vars(main) if name.startswith('__'))\n"
        "print([(name, repr(vars(main)[name]).split(' at 0x')[0]) for name in names])\n"
        "print(sys.argv, sys.path)\n"
    ),
    "usage": "import argparse\nargparse.ArgumentParser().parse_args()\n",
    "message": "import sys\nsys.exit('an error message')\n",
    "error": "def f():\n    raise ValueError('here')\n\nf()\n",
    "cause": (
        "try:\n    {}['key']\nexcept KeyError as error:\n    raise RuntimeError('after it') from error\n"
    ),
    "syntax": "x = 1\nif x\n",
    "exit functions": (
        "import atexit, pickle\n"
        "class Kind: pass\n"
        "kept = Kind()\n"
        "atexit.register(lambda: print('at exit', type(pickle.loads(pickle.dumps(kept))) is Kind))\n"
        "raise SystemError('before')\n"
    ),
    "hook": (
        "import sys\n"
        "sys.excepthook = lambda kind, value, frames: print(kind, value, frames.tb_frame.f_code.co_name)\n"
        "raise ValueError('hooked')\n"
    ),
    "threads": (
        "import threading\n"
        "begun = threading.Event()\n"
        "threading.Thread(target=lambda: (begun.wait(), print('thread', __name__))).start()\n"
        "begun.set()\n"
    ),
    "interrupt": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n",
    "encoding": (
        "# -*- coding: latin-1 -*-\n"
        "import sys\n"
        "count: int = 3\n"
        "print(len('\xe9'), sys.modules['__main__'].__annotations__)\n"
    ),
}
STARTED = """
import multiprocessing, sys

class Kind:
    pass

def work(connection, kind):
    connection.send((type(kind) is Kind, __name__, type(kind).__module__))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, Kind()))
    process.start()
    theirs.close()
    print(ours.recv())
    process.join()
"""


# Programs that depend on more than run_script(): on what the commands import, watch and print.
PROGRAMS_UNDER_COMMANDS = {
    "children": (
        "import concurrent.futures, multiprocessing\n"
        "class Kind:\n    def __init__(self, x): self.x = x\n"
        "def double(kind): return Kind(kind.x * 2)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    with context.Pool(1) as pool:\n"
        "        print([kind.x for kind in pool.map(double, [Kind(1), Kind(2)])])\n"
        "    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:\n"
        "        print([kind.x for kind in executor.map(double, [Kind(1), Kind(2)])])\n"
    ),
    "batches of workers": (
        "import collections, torch\n"
        "from torch.utils.data import DataLoader\n"
        "Sample = collections.namedtuple('Sample', 'x y')\n"
        "class Photos:\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return Sample(torch.ones(3) * i, i)\n"
        "if __name__ == '__main__':\n"
        "    context = 'forkserver' if __import__('sys').argv[1:] else 'spawn'\n"
        "    for batch in DataLoader(Photos(), 4, num_workers=1, multiprocessing_context=context):\n"
        "        print(type(batch) is Sample, batch.y.tolist())\n"
    ),
    "closed stdout": "import sys\nsys.stdout.close()\n",
    "closed stderr": "import sys\nsys.stderr.close()\nprint('printed')\nsys.exit(3)\n",
    "full stdout": "import os\nprint('lost', flush=not os.dup2(os.open('/dev/full', os.O_WRONLY), 1))\n",
    "exit at once": "import os\nprint('printed', flush=True)\nos._exit(9)\n",
    "error": PROGRAMS["cause"],
    "interrupt": PROGRAMS["interrupt"],
}
ERROR_IN_DATASET = """
import sys
from torch.utils.data import DataLoader

class Broken:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        try:
            return {}[index]
        except KeyError as error:
            raise ValueError("broken") from error

for batch in DataLoader(Broken(), num_workers=int(sys.argv[1])):
    pass
"""


def ended(
    folder: Path, *words: str, by: list[str], safe: bool = False, stdin: str | None = None
) -> tuple[int, str, str]:
    """The exit code and the output of a program under plain python, run_script(), or a command."""
    command = [sys.executable, *(["-P"] if safe else []), *by, *words]
    path = os.pathsep.join(str(place) for place in (ROOT, os.environ.get("PYTHONPATH")) if place)
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
    )
    err = done.stderr
    if by == COMMANDS["profile"]:  # the report, which comes before the interpreter's own last words
        pattern = r"\n(No DataLoader was used|DataLoader \().*?(?=^[TE]|\Z)"
        err = re.sub(pattern, "", err, flags=re.DOTALL | re.MULTILINE)
    return done.returncode, done.stdout, err


def assert_the_same(
    folder: Path, *words: str, by: list[str] = DRIVEN, safe: bool = False, stdin: str | None = None
) -> tuple[int, str, str]:
    plain = ended(folder, *words, by=PLAIN, safe=safe, stdin=stdin)
    assert ended(folder, *words, by=by, safe=safe, stdin=stdin) == plain
    return plain


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_runs_as_under_python(tmp_path: Path, name: str) -> None:
    """Exit code, standard output and standard error are the same, also for errors and Ctrl-C."""
    encoding = "latin-1" if name == "encoding" else "utf-8"
    (tmp_path / "train.py").write_text(PROGRAMS[name], encoding=encoding)

    code, out, err = assert_the_same(tmp_path, "train.py", "--lr", "-m", "--help", "-c")

    assert out or err or code
    assert "fastload" not in err
    assert (code == -signal.SIGINT) == (name == "interrupt")


@pytest.mark.parametrize(
    ("target", "safe"),
    [("./train.py", False), ("sub/../train.py", True), ("sub/link.py", False), ("sub/again/train.py", True)],
)
def test_the_script_s_folder_is_searched_first(tmp_path: Path, target: str, safe: bool) -> None:
    """`__file__`, `sys.argv[0]` and `sys.path` are python's for any way to name the script, also with -P."""
    (tmp_path / "sub" / "again").mkdir(parents=True)
    for place in ("train.py", "sub/again/train.py"):
        (tmp_path / place).write_text(PROGRAMS["names"])
    (tmp_path / "sub" / "link.py").symlink_to(tmp_path / "train.py")

    assert assert_the_same(tmp_path, target, "x", safe=safe)[0] == 0


@pytest.mark.parametrize("name", ["names", "error"])
def test_a_module_runs_as_under_python_m(tmp_path: Path, name: str) -> None:
    """With the package and the spec of the module."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text(PROGRAMS[name])

    assert_the_same(tmp_path, "-m", "package.train", "--help")


def test_a_folder_and_an_archive_run(tmp_path: Path) -> None:
    """Their `__main__.py` runs, and finds its neighbours."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(f"import beside\n{PROGRAMS['names']}")
    (tmp_path / "folder" / "beside.py").write_text("print('beside')\n")
    with zipfile.ZipFile(tmp_path / "archive.pyz", "w") as archive:
        for file in (tmp_path / "folder").iterdir():
            archive.write(file, file.name)

    for target in ("folder", "archive.pyz"):
        assert assert_the_same(tmp_path, target, "x")[1].startswith("beside\n")


@pytest.mark.parametrize(
    ("words", "by"),
    [(("absent.py",), COMMANDS["run"]), (("-m", "absent_module"), DRIVEN), (("-m", "absent.module"), DRIVEN)],
)
def test_a_script_that_does_not_exist(tmp_path: Path, by: list[str], words: tuple[str, ...]) -> None:
    """Python's own message and exit code, and no line about loaders."""
    assert assert_the_same(tmp_path, *words, by=by)[0] in (1, 2)


@pytest.mark.parametrize(
    ("method", "as_module"), [("fork", True), ("spawn", False), ("spawn", True), ("forkserver", False)]
)
def test_child_processes_find_the_script_s_classes(tmp_path: Path, method: str, as_module: bool) -> None:
    """An object of a class of the script reaches a child, and is of that class there."""
    (tmp_path / "train.py").write_text(STARTED)
    words = ["-m", "train"] if as_module else ["train.py"]

    code, out, _ = assert_the_same(tmp_path, *words, method)

    assert code == 0
    assert out.startswith("(True, ")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        pytest.param(name, command, marks=[pytest.mark.thorough] if (row + column) % 2 else [])
        for row, name in enumerate(PROGRAMS_UNDER_COMMANDS)
        for column, command in enumerate(COMMANDS)
    ],
)
def test_a_script_under_a_command_runs_as_under_python(tmp_path: Path, name: str, command: str) -> None:
    """Its output, exit code and last words are the same, whatever it starts and closes."""
    (tmp_path / "train.py").write_text(PROGRAMS_UNDER_COMMANDS[name])

    code, out, err = assert_the_same(tmp_path, "train.py", by=COMMANDS[command])

    assert out or err or name == "closed stdout"
    assert (code == 0) == (name in ("children", "batches of workers", "closed stdout"))


def test_fork_server_workers_of_a_module_find_its_classes(tmp_path: Path) -> None:
    """A child imports the module by its name, for -m."""
    (tmp_path / "train.py").write_text(PROGRAMS_UNDER_COMMANDS["batches of workers"])

    assert assert_the_same(tmp_path, "-m", "train", "x", by=COMMANDS["run"])[0] == 0


@pytest.mark.parametrize("name", ["names", "syntax"])
def test_a_script_on_standard_input(tmp_path: Path, name: str) -> None:
    """As `python -`: its names, arguments and path, and how errors name it."""
    assert_the_same(tmp_path, "-", "--lr", by=COMMANDS["run"], stdin=PROGRAMS[name])


def test_the_traceback_of_a_dataset_s_error_has_no_frames_of_the_profile(tmp_path: Path) -> None:
    """That of this process; the text that torch's workers send names them all."""
    (tmp_path / "train.py").write_text(ERROR_IN_DATASET)

    code, _, err = assert_the_same(tmp_path, "train.py", "0", by=COMMANDS["profile"])

    assert code == 1
    assert err.count("Traceback") > 1
