"""`fastload run` and `fastload profile`: a program runs as under python, with our loader or watched."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from fastload.cli import main

if TYPE_CHECKING:
    from tests.kit.processes import Interpreter

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
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # two interpreters each

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
# Programs that depend on more than run_script(): on what the commands import, watch and print.
PROGRAMS_UNDER_COMMANDS = {
    "children": (
        "import concurrent.futures, multiprocessing, sys\n"
        "class Kind:\n    def __init__(self, x): self.x = x\n"
        "def double(kind): return Kind(kind.x * 2)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context((sys.argv[1:] or ['spawn'])[0])\n"
        "    with context.Pool(1) as pool:\n"
        "        print([kind.x for kind in pool.map(double, [Kind(1), Kind(2)])])\n"
        "    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:\n"
        "        print([kind.x for kind in executor.map(double, [Kind(1), Kind(2)])])\n"
    ),
    "batches of workers": (
        "import collections, sys, torch\n"
        "from torch.utils.data import DataLoader\n"
        "Sample = collections.namedtuple('Sample', 'x y')\n"
        "class Photos:\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return Sample(torch.ones(3) * i, i)\n"
        "if __name__ == '__main__':\n"
        "    context = (sys.argv[1:] or ['spawn'])[0]\n"
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
        timeout=280,
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A package, links, a folder and an archive, whose scripts print their names."""
    for place in ("sub/again", "package"):
        (tmp_path / place).mkdir(parents=True)
    for place in ("train.py", "sub/again/train.py", "package/names.py"):
        (tmp_path / place).write_text(PROGRAMS["names"])
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "error.py").write_text(PROGRAMS["error"])
    (tmp_path / "sub" / "link.py").symlink_to(tmp_path / "train.py")
    with zipfile.ZipFile(tmp_path / "archive.pyz", "w") as archive:
        (tmp_path / "main").mkdir()
        for name, code in (
            ("__main__", f"import beside\n{PROGRAMS['names']}"),
            ("beside", "print('beside')\n"),
        ):
            (tmp_path / "main" / f"{name}.py").write_text(code)
            archive.writestr(f"{name}.py", code)
    return tmp_path


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
    ("words", "by", "safe", "stdin", "codes"),
    [
        (("./train.py", "x"), DRIVEN, False, None, {0}),
        (("sub/../train.py", "x"), DRIVEN, True, None, {0}),
        (("sub/link.py", "x"), DRIVEN, False, None, {0}),
        (("sub/again/train.py", "x"), DRIVEN, True, None, {0}),
        (("main", "x"), DRIVEN, False, None, {0}),
        (("archive.pyz", "x"), DRIVEN, False, None, {0}),
        (("-m", "package.names", "--help"), DRIVEN, False, None, {0}),
        (("-m", "package.error"), DRIVEN, False, None, {1}),
        (("absent.py",), COMMANDS["run"], False, None, {2}),
        (("-m", "absent_module"), DRIVEN, False, None, {1}),
        (("-m", "absent.module"), DRIVEN, False, None, {1}),
        (("-", "--lr"), COMMANDS["run"], False, PROGRAMS["names"], {0}),
        (("-", "--lr"), COMMANDS["run"], False, PROGRAMS["syntax"], {1}),
    ],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, tuple) else None,
)
def test_any_name_of_a_script_is_python_s(
    folder: Path, words: tuple[str, ...], by: list[str], safe: bool, stdin: str | None, codes: set[int]
) -> None:
    """`__file__`, `sys.argv`, `sys.path`, also with -P; modules, folders, archives; what does not exist."""
    assert assert_the_same(folder, *words, by=by, safe=safe, stdin=stdin)[0] in codes


@pytest.mark.parametrize(
    ("name", "method", "words", "by"),
    [
        ("children", "fork", ["-m", "train"], DRIVEN),
        ("children", "spawn", ["train.py"], DRIVEN),
        ("children", "spawn", ["-m", "train"], DRIVEN),
        ("children", "forkserver", ["train.py"], DRIVEN),
        ("batches of workers", "forkserver", ["-m", "train"], COMMANDS["run"]),
    ],
)
def test_child_processes_find_the_script_s_classes(
    tmp_path: Path, name: str, method: str, words: list[str], by: list[str]
) -> None:
    """An object of a class of the script reaches a child and comes back; a module is imported by its name."""
    (tmp_path / "train.py").write_text(PROGRAMS_UNDER_COMMANDS[name])
    code, out, _ = assert_the_same(tmp_path, *words, method, by=by)
    assert (code, out.count("\n")) == (0, 2)


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


def test_the_traceback_of_a_dataset_s_error_has_no_frames_of_the_profile(tmp_path: Path) -> None:
    """That of this process; the text that torch's workers send names them all."""
    (tmp_path / "train.py").write_text(ERROR_IN_DATASET)
    code, _, err = assert_the_same(tmp_path, "train.py", "0", by=COMMANDS["profile"])
    assert code == 1
    assert err.count("Traceback") > 1


# --- fastload run -----------------------------------------------------------------------------------------

# Under each start method from the same seed: the digest of all batches, and the random state after them.
REPLACED = """
import argparse, hashlib, subprocess, sys

import torch
from torch.utils.data import DataLoader

import helper


def train(method):
    torch.manual_seed(3)
    digest, kinds = hashlib.sha256(), set()
    options = {"num_workers": 2, "multiprocessing_context": method} if method else {}
    for make, more in ((DataLoader, {}), (helper.make, options)):
        loader = make(helper.Noise(), batch_size=4, shuffle=True, **more)
        assert isinstance(loader, DataLoader)
        for images, kinds_in_workers in loader:
            digest.update(images.numpy().tobytes())
        kinds |= set(kinds_in_workers)
    print(method, digest.hexdigest(), torch.rand(1).item())
    print(method, "in this process:", helper.kind(), "in the dataset:", *kinds, file=sys.stderr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="*")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--rng")
    arguments = parser.parse_args()
    for method in [None, *arguments.methods]:
        train(method)
    if arguments.child:
        code = "import helper, sys; print('in a child:', helper.kind(), file=sys.stderr)"
        subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    main()
"""
HELPER = """
import torch
from torch.utils.data import DataLoader


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.rand(3, 4, 4) + index, kind()


def kind():
    return type(DataLoader([0])).__module__.partition(".")[0]


def make(*args, **options):
    return DataLoader(*args, **options)
"""


COMMAND = """
import sys
sys.path.insert(0, "")  # for the script's folder
sys.argv[0] = "fastload"
from fastload.cli.main import main
main()
"""
PLAINLY = """
import sys
sys.path.insert(0, "")
from fastload.cli.script import run_script
run_script(sys.argv[1], sys.argv[2:])
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(interpreter: Interpreter, tmp_path: Path) -> Run:
    """Runs `fastload ...`, or plain python without a command, in processes that have imported torch."""
    for name, code in (("train", REPLACED), ("helper", HELPER)):
        (tmp_path / f"{name}.py").write_text(code)
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(tmp_path)]

    def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        program = COMMAND if words[0] in COMMANDS else PLAINLY
        variables = {"PYTHONPATH": os.pathsep.join(places)}
        return interpreter.run(program, *words, cwd=tmp_path, environment=variables, limit_s=250, **options)

    return run


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_an_unmodified_script_gets_torch_s_batches_from_our_loader(
    tmp_path: Path, run: Run, method: str
) -> None:
    """Bit by bit, with the same random state after it; by any name, in worker processes and in children.

    Each process of the script's own says how many loaders were replaced; no worker process adds a line.
    """
    plain = run("train.py", "--methods", "fork")
    code, out, err = ended(tmp_path, "train.py", "--child", "--methods", method, by=COMMANDS["run"][:3])
    assert (plain.returncode, code) == (0, 0), plain.stderr + err
    assert "None in this process: torch in the dataset: torch\n" in plain.stderr
    for name, name_in_plain in (("None", "None"), (method, "fork")):
        expected = re.findall(rf"^{name_in_plain} (.*)", plain.stdout, re.MULTILINE)
        assert re.findall(rf"^{name} (.*)", out, re.MULTILINE) == expected
        assert len(expected) == 1
        assert f"{name} in this process: fastload in the dataset: fastload\n" in err
    # A loop makes two loaders and `kind()` one; each sample that is read in this process makes one more.
    number = (3 + 2 * 11) + (3 + 11)
    child, last = [line for line in err.splitlines() if line.startswith("fastload: ")]
    assert "in a child: fastload" in err
    assert child.startswith("fastload: 1 loader of torch was replaced in process ")
    assert last.startswith(f"fastload: {number} loaders of torch were replaced in process ")


def test_without_torch_nothing_is_imported(tmp_path: Path) -> None:
    """A script that makes no loader pays nothing, and the line at the end says so."""
    (tmp_path / "light.py").write_text("import sys\nprint('torch' in sys.modules, 'numpy' in sys.modules)\n")
    _, out, err = ended(tmp_path, "light.py", by=COMMANDS["run"][:3])
    assert out == "False False\n"
    assert err.startswith("fastload: no loader of torch was replaced in process ")


@pytest.mark.parametrize("words", [["run", "-q", "-m", "show"], ["profile", "show.py"]])
def test_words_after_the_script_are_the_script_s(tmp_path: Path, run: Run, words: list[str]) -> None:
    """Also those that are options of ours; --quiet prints no line of ours, and no file is written."""
    (tmp_path / "show.py").write_text("import sys\nprint(sys.argv[1:])\n")
    before = {path.name for path in tmp_path.iterdir()}
    own = ["--rng", "x", "--json", "a.json", "-m", "--help", "--replay", "3", "--", "-q"]
    done = run(*words, *own)
    assert (done.returncode, done.stdout) == (0, f"{own}\n")
    assert done.stderr == ("" if "-q" in words else "No DataLoader was used.\n") or "profile" in words
    after = {path.name for path in tmp_path.iterdir()}
    assert after - {"__pycache__"} == before  # Python's own, unless the environment forbids it


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--cache", "disk", "show.py"], "'disk'"),
        (
            ["profile", "--output", "absent/file", "show.py"],
            "directory that can be written, not 'absent/file'",
        ),
        (
            ["profile", "--trace", "folder", "show.py"],
            "--trace should be a file in a directory .*, not 'folder'",
        ),
    ],
)
def test_wrong_options_end_the_command_before_the_script_runs(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one line, and the exit code of wrong usage."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "show.py").write_text("print('the script runs')\n")
    done = CliRunner().invoke(main.app, words)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert re.search(rf"^fastload: error: .*{said}", done.stderr)


def test_defaults_of_the_command_line_reach_workers_and_children(tmp_path: Path, run: Run) -> None:
    """`--rng sample` is the default of every loader, whatever patch_torch() in the script says."""
    (tmp_path / "show.py").write_text(
        "import subprocess, sys\n"
        "from torch.utils.data import DataLoader\n"
        "import fastload\n"
        "fastload.patch_torch(max_errors=2)\n"
        "loader = DataLoader([0])\n"
        "print(loader.rng, loader.max_errors, flush=True)\n"
        "code = 'from torch.utils.data import DataLoader; print(DataLoader([0]).rng)'\n"
        "subprocess.run([sys.executable, '-c', code])\n"
    )
    done = run("run", "--rng", "sample", "show.py")
    assert done.stdout == "sample 2\nsample\n"
    assert done.stderr.count("1 loader of torch was replaced in process") == 2


PIPELINES = """
import albumentations as A
import torch
from torch.utils.data import DataLoader


class Photos:
    flip = A.Compose([A.HorizontalFlip(p=0.5)], seed=3) if {has_pipeline} else None

    def __len__(self):
        return 32

    def __getitem__(self, index):
        image = torch.arange(2).reshape(1, 2, 1).numpy()
        return image if self.flip is None else self.flip(image=image)["image"]


torch.manual_seed(0)
loader = DataLoader(Photos(), num_workers=2, multiprocessing_context="fork")
print([int(batch[0, 0, 0, 0]) for batch in loader])
"""


@pytest.mark.parametrize(
    ("has_pipeline", "words", "is_said"),
    [
        (True, [], True),
        (True, ["--no-seed-albumentations"], False),
        pytest.param(False, [], False, marks=pytest.mark.thorough),
    ],
)
def test_seeded_pipelines_are_told_in_one_line(
    tmp_path: Path, run: Run, has_pipeline: bool, words: list[str], is_said: bool
) -> None:
    """Only if there was one; with --no-seed-albumentations the draws are those of torch's loader."""
    (tmp_path / "flips.py").write_text(PIPELINES.format(has_pipeline=has_pipeline))
    plain, done = run("flips.py"), run("run", *words, "flips.py")
    assert (done.stdout != plain.stdout) == is_said
    assert done.stderr.count("albumentations pipelines were seeded") == is_said


def test_datasets_that_are_not_cached_are_named_once(run: Run) -> None:
    """`--cache ram` says why not, and the script works."""
    done = run("run", "--cache", "ram", "train.py", "--methods")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("fastload: --cache ram: helper.Noise is not cached: only ImageFolder") == 1


# --- fastload profile -------------------------------------------------------------------------------------

DATASET = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full((2,), index)

"""

# Prints each batch; the script's argument says how it ends in the middle of the epoch.
ENDING = (
    DATASET
    + """
def train(ending):
    train_loader = DataLoader(Numbers(), batch_size=4)
    for number, batch in enumerate(train_loader):
        print(number, batch[0, 0].item())
        if number == 6:
            if ending == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            if ending == "error":
                raise ValueError("a bad batch")
            if ending == "code":
                sys.exit(3)

train(sys.argv[1])
print("the end")
"""
)
WITH_WORKER = (
    DATASET
    + """
def main():
    train_loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context=sys.argv[1])
    for batch in train_loader:
        pass
    print("done", sys.argv)

if __name__ == "__main__":
    main()
"""
)
REPORT = "\ntrain_loader (Numbers, 40 samples, batch_size=4, "
FORKED = f"""{DATASET}
train_loader = DataLoader(Numbers(), batch_size=4, num_workers=1)
pid = os.fork()
for batch in train_loader:
    pass
if pid == 0:
    raise ValueError("child")
os.waitpid(pid, 0)
"""
OF_ITS_OWN = f"""{DATASET}
import fastload
train_loader = DataLoader(Numbers(), batch_size=4)
for batch in train_loader:
    pass
with fastload.profile():
    print("inside")
"""
FILES = ("--output", "a.json", "--trace", "b.json")
REMOVES = "import os, sys\nos.remove('train.py')\nos.rmdir('out')\nsys.exit(5)\n"
HELD = [0, 4, 8, 12, 0, 4, 16, 20, 24, 28]  # the first values of batches, where some are replayed


@pytest.mark.parametrize(
    ("script", "words", "code", "report", "said"),
    [
        (ENDING, ["train.py", "code"], 3, "0 workers): 7 batches, ", ""),
        (ENDING, ["train.py", "error"], 1, "0 workers): 7 batches, ", "ValueError: a bad batch\n"),
        (ENDING, ["train.py", "interrupt"], -signal.SIGINT, "0 workers): 7 batches, ", "KeyboardInterrupt\n"),
        (FORKED, ["train.py"], 0, "1 worker): 10 batches, ", ""),
        (OF_ITS_OWN, ["train.py"], 1, "0 workers): 10 batches, ", "`fastload profile`"),
        (REMOVES, ["--output", "out/a.json", "train.py"], 5, "", "out/a.json could not be written: "),
    ],
    ids=["code", "error", "interrupt", "fork", "a profile of its own", "a removed directory"],
)
def test_the_report_comes_before_the_last_words_of_the_script(
    run: Run, tmp_path: Path, script: str, words: list[str], code: int, report: str, said: str
) -> None:
    """Once, with the script's exit code, traceback or signal, and the error of a file of ours."""
    (tmp_path / "out").mkdir()
    (tmp_path / "train.py").write_text(script)
    done = run("profile", *words)
    assert done.returncode == code, done.stderr
    *_, before, last = ("", *done.stderr.split(f"{REPORT}{report}")) if report else ("", done.stderr)
    assert said in last
    assert done.stderr.count(" batches, ") == bool(report)
    assert before == "" or "child" in before
    assert not said.endswith("\n") or last.endswith(said)
    assert "inside" not in done.stdout


def test_files_and_replayed_batches(run: Run, tmp_path: Path) -> None:
    """`--output` and `--trace` are named, also after an error; `--replay` keeps the number of steps."""
    (tmp_path / "train.py").write_text(ENDING)
    done = run("profile", *FILES, "train.py", "code")
    assert done.returncode == 3
    assert done.stderr.endswith("fastload: wrote a.json\nfastload: wrote b.json\n")
    report = json.loads((tmp_path / "a.json").read_text())
    assert [(loader["name"], loader["num_batches"]) for loader in report["loaders"]] == [("train_loader", 7)]
    events = json.loads((tmp_path / "b.json").read_text())["traceEvents"]
    assert [event["name"] for event in events].count("waiting for data") == 7
    done = run("profile", "--replay", "2", *FILES, "train.py", "none")
    expected = "".join(f"{number} {value}\n" for number, value in enumerate(HELD))
    assert (done.returncode, done.stdout) == (0, f"{expected}the end\n")
    assert json.loads((tmp_path / "a.json").read_text())["loaders"][0]["num_batches"] == 10


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_worker_processes_are_watched(run: Run, tmp_path: Path, method: str) -> None:
    """Workers of each start method find the script's dataset."""
    (tmp_path / "train.py").write_text(WITH_WORKER)
    done = run("profile", *FILES, "train.py", method)
    assert (done.returncode, done.stdout) == (0, f"done ['train.py', '{method}']\n")
    (loader,) = json.loads((tmp_path / "a.json").read_text())["loaders"]
    assert loader["num_batches"] == 10
    assert loader["worker_utilisation"] is not None
    assert "default_collate" in [stage["name"] for stage in loader["stages"]]
