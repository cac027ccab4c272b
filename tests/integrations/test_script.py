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
from PIL import Image
from typer.testing import CliRunner

from fastload.cli import main

if TYPE_CHECKING:
    from tests.kit.processes import Interpreter

ROOT = Path(__file__).parents[2]
RUN = ("-m", "fastload", "run")
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
    "error": "def f():\n    raise ValueError('here')\n\nf()\n",
    "exit functions": (
        "import atexit, pickle\n"
        "class Kind: pass\n"
        "kept = Kind()\n"
        "atexit.register(lambda: print('at exit', type(pickle.loads(pickle.dumps(kept))) is Kind))\n"
        "raise SystemError('before')\n"
    ),
    "interrupt": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n",
}
# Programs that depend on what the commands import, watch and print.
PROGRAMS_UNDER_COMMANDS = {
    "error in a dataset": (
        "from torch.utils.data import DataLoader\n"
        "class Broken(list):\n"
        "    def __getitem__(self, index):\n"
        "        try:\n            return {}[index]\n"
        "        except KeyError as error:\n            raise ValueError('broken') from error\n"
        "for batch in DataLoader(Broken([0])): pass\n"
    ),
    "closed stdout": "import sys\nsys.stdout.close()\n",
    "closed stderr": "import sys\nsys.stderr.close()\nprint('printed')\nsys.exit(3)\n",
    "full stdout": "import os\nprint('lost', flush=not os.dup2(os.open('/dev/full', os.O_WRONLY), 1))\n",
    "exit at once": "import os\nprint('printed', flush=True)\nos._exit(9)\n",
    "interrupt": PROGRAMS["interrupt"],
}


def ended(
    folder: Path, *words: str, python: tuple[str, ...] = (), stdin: str | None = None, **variables: str
) -> tuple[int, str, str]:
    """The exit code and the output of python, with options, words, standard input and variables."""
    path = os.pathsep.join(str(place) for place in (ROOT, os.environ.get("PYTHONPATH")) if place)
    done = subprocess.run(
        [sys.executable, *python, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **variables},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout, done.stderr


def assert_the_same(folder: Path, *words: str, **options: Any) -> tuple[int, str, str]:
    """The same under plain python and under `fastload run`, which has nothing to say of loaders."""
    plain = ended(folder, *words, **options)
    assert ended(folder, *RUN, *words, **options) == plain
    return plain


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A package, links, a folder and an archive, whose scripts print their names."""
    for place in ("sub", "package"):
        (tmp_path / place).mkdir()
    for place in ("train.py", "package/names.py"):
        (tmp_path / place).write_text(PROGRAMS["names"])
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "sub" / "link.py").symlink_to(tmp_path / "train.py")
    with zipfile.ZipFile(tmp_path / "archive.pyz", "w") as archive:
        (tmp_path / "main").mkdir()
        programs = {"__main__.py": f"import beside\n{PROGRAMS['names']}", "beside.py": "print('beside')\n"}
        for name, code in programs.items():
            (tmp_path / "main" / name).write_text(code)
            archive.writestr(name, code)
    return tmp_path


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_runs_as_under_python(tmp_path: Path, name: str) -> None:
    """Exit code, standard output and standard error are the same, also for errors and Ctrl-C."""
    (tmp_path / "train.py").write_text(PROGRAMS[name])
    code, out, err = assert_the_same(tmp_path, "train.py", "--lr", "-m", "--help", "-c")
    assert out or err or code
    assert "fastload" not in err
    assert code == (-signal.SIGINT if name == "interrupt" else max(code, 0))


@pytest.mark.parametrize(
    ("words", "code", "options"),
    [
        ("sub/link.py x", 0, {"python": ("-P",)}),
        ("main x", 0, {}),
        ("archive.pyz x", 0, {}),
        ("-m package.names --help", 0, {}),
        ("absent.py", 2, {}),
        ("- --lr", 0, {"stdin": PROGRAMS["names"]}),
    ],
)
def test_any_name_of_a_script_is_python_s(folder: Path, words: str, code: int, options: Any) -> None:
    """`__file__`, `sys.argv`, `sys.path`, also with -P; modules, folders, archives; what does not exist."""
    assert assert_the_same(folder, *words.split(), **options)[0] == code


# Under each start method from the same seed: the digest of all batches, and the random state after them.
REPLACED = """
import hashlib, sys

import torch
from torch.utils.data import DataLoader

import helper


def train(method):
    torch.manual_seed(3)
    digest, kinds = hashlib.sha256(), set()
    options = {"num_workers": 2, "multiprocessing_context": method} if method else {}
    for make, more in ((DataLoader, {}), (helper.make, options)):
        loader = make(helper.Noise(range(11)), batch_size=4, shuffle=True, **more)
        assert isinstance(loader, DataLoader)
        for images, kinds_in_workers in loader:
            digest.update(images.numpy().tobytes())
        kinds |= set(kinds_in_workers)
    print(method, digest.hexdigest(), torch.rand(1).item())
    print(method, "in this process:", helper.kind(), "in the dataset:", *kinds, file=sys.stderr)


if __name__ == "__main__":
    for method in [None, *sys.argv[1:]]:
        train(method)
"""
HELPER = """
import torch
from torch.utils.data import DataLoader


class Noise(list):
    def __getitem__(self, index):
        return torch.rand(3, 4, 4) + index, kind()


def kind():
    return type(DataLoader([0])).__module__.partition(".")[0]


def make(*args, **options):
    return DataLoader(*args, **options)
"""


# The command up to the start of python; then, in its place, the hook and the script.
COMMAND = """
import importlib, json, os, runpy, sys

class Started(BaseException):
    pass

def execv(path, words):
    raise Started(words[1:])

os.execv = execv
from fastload.cli.main import main
try:
    main()
except Started as started:
    (sys.argv[:],) = started.args
module, _, function = json.loads(os.environ["FASTLOAD_RUN"])["hook"].partition(":")
getattr(importlib.import_module(module), function)()
sys.path.insert(0, "")
runpy.run_path(sys.argv[0], run_name="__main__")
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(interpreter: Interpreter, tmp_path: Path) -> Run:
    """Runs `fastload ...` in processes that have imported torch, so that none has to start."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        variables = {"PYTHONPATH": path}
        return interpreter.run(COMMAND, *words, cwd=tmp_path, environment=variables, limit_s=250)

    return run


@pytest.mark.parametrize(
    "methods", [["fork", "forkserver"], pytest.param(["spawn"], marks=pytest.mark.thorough)]
)
def test_an_unmodified_script_gets_torch_s_batches_from_our_loader(
    tmp_path: Path, methods: list[str]
) -> None:
    """Bit by bit, with the same random state; also in workers, which add no line about replaced loaders."""
    for name, script in (("train", REPLACED), ("helper", HELPER)):
        (tmp_path / f"{name}.py").write_text(script)
    plain, done = ended(tmp_path, "train.py", "fork"), ended(tmp_path, *RUN, "train.py", *methods)
    assert (plain[0], done[0]) == (0, 0), plain[2] + done[2]
    assert "None in this process: torch in the dataset: torch\n" in plain[2]
    alone, with_workers = plain[1].replace("fork ", "").splitlines()
    assert done[1].splitlines() == [alone, *(f"{method} {with_workers}" for method in methods)]
    for method in (None, *methods):
        assert f"{method} in this process: fastload in the dataset: fastload\n" in done[2]
    # A loop makes two loaders and `kind()` one; each sample that is read in this process makes one more.
    number = (3 + 2 * 11) + len(methods) * (3 + 11)
    (last,) = [line for line in done[2].splitlines() if line.startswith("fastload: ")]
    assert last.startswith(f"fastload: replaced {number} torch DataLoaders in process ")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        *((name, ["profile"]) for name in PROGRAMS_UNDER_COMMANDS),
        *((name, ["run", "-q"]) for name in ("closed stderr", "full stdout")),
    ],
)
def test_commands_run_scripts_as_python_does(tmp_path: Path, name: str, command: list[str]) -> None:
    """Its output, exit code and last words are the same, whatever it starts and closes."""
    (tmp_path / "train.py").write_text(PROGRAMS_UNDER_COMMANDS[name])
    code, out, err = ended(tmp_path, "train.py")
    ours = ended(tmp_path, "-m", "fastload", *command, "train.py")
    end = r"\nDataLoader: |fastload: no DataLoader was used"  # of the report
    seen = re.sub(r'  File ".*/profiling/recorder.py".*\n(    .*\n)+', "", re.split(end, ours[2])[0])
    assert (*ours[:2], seen) == (code, out, err)
    assert out or err or name == "closed stdout"
    assert (code == 0) == (name == "closed stdout")


def test_without_torch_nothing_is_imported(tmp_path: Path) -> None:
    """A script that makes no loader pays nothing, and nothing is said."""
    (tmp_path / "light.py").write_text(
        "import sys\n"
        "print({name.partition('.')[0] for name in sys.modules} & {'fastload', 'numpy', 'torch'})\n"
    )
    assert ended(tmp_path, *RUN, "light.py") == (0, "set()\n", "")


def test_options_of_python_are_the_script_s(tmp_path: Path) -> None:
    """Those of the python that runs the command; how it was named is none of them."""
    (tmp_path / "show.py").write_text(
        "import sys\n"
        "print(sys.flags, sys.warnoptions, sys._xoptions, sys.stdout.write_through, sys.argv)\n"
        "assert not 'run with -O'\n"
    )
    options = ["-O", "-W", "error::UserWarning", "-Wd", "-X", "dev", "-X", "int_max_str_digits=1000", "-u"]
    plain = ended(tmp_path, "show.py", "-x", python=tuple(options))
    assert plain[::2] == (0, "")
    for way in (
        ["-m", "fastload"],
        ["-Xdev", "-Bum", "fastload"],
        [str(Path(sys.executable).parent / "fastload")],
    ):
        ours = ended(tmp_path, *way, "run", "show.py", "-x", python=tuple(options))
        assert ours == plain, way


@pytest.mark.parametrize(("command", "option"), [("run", "-I"), ("profile", "-E"), ("run", "-S")])
def test_options_that_keep_us_out_are_refused(tmp_path: Path, command: str, option: str) -> None:
    """In one sentence; the script does not run."""
    (tmp_path / "show.py").write_text("print('the script runs')\n")
    # Without its environment, python finds packages only beside itself.
    find = (
        f"import sys; sys.path[:0] = {[str(ROOT), *sys.path]!r}; from fastload.cli.main import main; main()"
    )
    done = ended(tmp_path, "-c", find, command, "show.py", python=(option,))
    said = "fastload: error: python has -I, -E or -S, which keep fastload out of SCRIPT: leave them out\n"
    assert done == (2, "", said)


@pytest.mark.parametrize("words", [["run", "-q", "-m", "show"], ["profile", "show.py"]])
def test_words_after_the_script_are_the_script_s(tmp_path: Path, words: list[str]) -> None:
    """Also those that are options of ours, and no file is written."""
    (tmp_path / "show.py").write_text("import sys\nprint(sys.argv[1:])\n")
    before = {path.name for path in tmp_path.iterdir()}
    own = ["--seeding", "x", "--json", "a.json", "-m", "--help", "--device", "3", "--", "-q"]
    assert ended(tmp_path, "-m", "fastload", *words, *own) == (0, f"{own}\n", "")
    after = {path.name for path in tmp_path.iterdir()}
    assert after - {"__pycache__"} == before  # Python's own, unless the environment forbids it


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "run --cache disk",
            '\'--cache\': cache should be "ram", "ram:32G", "lmdb:PATH" or None, but got \'disk\'',
        ),
        ("run --cache ram:lots", "'--cache': cache='ram:lots' should have an amount of memory"),
        ("run --cache lmdb:s3://b/c", "'--cache': cache should be a path on this machine, but is s3://b/c"),
        ("run --cache lmdb:absent/file", "'--cache': .*/absent is no directory: make it first"),
        ("run --cache lmdb:folder", "/folder is a directory, but a cache on disk is one file"),
        ("run --cache lmdb:show.py", "/show.py is not a cache, .*: use a different path"),
        ("run --seeding smaple", "'--seeding': .*'smaple' is not one of 'worker', 'sample', 'torch'"),
        ("run --worker-type ray", "'--worker-type': .*'ray' is not one of 'process', 'thread'"),
        ("run --device gpu7", "'--device': it should be cuda, cuda:N, cpu or auto, but is 'gpu7'$"),
        ("run --device 0", "'--device': it should be cuda, cuda:N, cpu or auto, but is '0'$"),
        ("run --chace ram", "--chace .*--cache.*see `fastload run --help`"),
        ("profile --output absent/file", "directory that can be written, not 'absent/file'"),
        ("profile --output folder", "'--output'.*: it should be a file in a directory .*, not 'folder'"),
    ],
)
def test_wrong_options_end_the_command(words: str, said: str, tmp_path: Path, monkeypatch: Any) -> None:
    """By one line, and the exit code of wrong usage."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "show.py").write_text("print('the script runs')\n")
    done = CliRunner().invoke(main.app, [*words.split(), "show.py"])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert re.search(rf"^fastload: error: .*{said}", done.stderr)


def test_defaults_of_the_command_line_reach_workers_and_children(tmp_path: Path, run: Run) -> None:
    """`--seeding sample` is the default of every loader, whatever patch_torch() in the script says."""
    (tmp_path / "show.py").write_text(
        "import subprocess, sys\n"
        "from torch.utils.data import DataLoader\n"
        "import fastload\n"
        "fastload.patch_torch(max_worker_restarts=2)\n"
        "loader = DataLoader([0])\n"
        "print(loader.seeding, loader.max_worker_restarts, flush=True)\n"
        "code = 'from torch.utils.data import DataLoader; print(DataLoader([0]).seeding)'\n"
        "subprocess.run([sys.executable, '-c', code])\n"
    )
    done = run("run", "--seeding", "sample", "show.py")
    assert done.stdout == "sample 2\nsample\n"
    assert done.stderr.count("replaced 1 torch DataLoader in process") == 1  # of the script, not of the child


LAUNCH = """
import os, subprocess, sys
for rank in "01":
    variables = {**os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    subprocess.run([sys.executable, "show.py"], env=variables, check=True)
"""


def test_a_script_without_a_loader_is_told_of(tmp_path: Path) -> None:
    """If it imports torch."""
    (tmp_path / "show.py").write_text("import torch\n")
    code, out, err = ended(tmp_path, "-m", "fastload", "profile", "show.py")
    assert (code, out) == (0, "")
    assert re.fullmatch(
        r"fastload: no DataLoader was used in process \d+: there is nothing to profile\n", err
    )


def test_the_first_rank_alone_is_profiled(tmp_path: Path) -> None:
    """Of those that a launcher starts."""
    (tmp_path / "launch.py").write_text(LAUNCH)
    (tmp_path / "show.py").write_text("from torch.utils.data import DataLoader\nlist(DataLoader([1, 2]))\n")
    code, out, err = ended(tmp_path, "-m", "fastload", "profile", "launch.py")
    assert (code, out, err.count(", 1 epoch, ")) == (0, "", 1), err


TORCHRUN = """
import fcntl, sys, torch, torch.distributed as dist
from torch.utils.data import DataLoader
dist.init_process_group("gloo")
rank = dist.get_rank()
print(rank, type(DataLoader([1])).__module__, sys.argv[1:], flush=True)
lock = open("lock", "w")
if rank == 0:
    fcntl.flock(lock, fcntl.LOCK_EX)
dist.barrier()
dist.destroy_process_group()
fcntl.flock(lock, fcntl.LOCK_EX)  # rank 1 waits for the end of rank 0, which torchrun would end otherwise
sys.exit(7 * rank)
"""


def test_torchrun_starts_ranks_with_our_loader(tmp_path: Path) -> None:
    """One of them says so; the exit code is torchrun's, and it tells that of a rank that failed."""
    (tmp_path / "ranks.py").write_text(TORCHRUN)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ranks.py", "--lr"]
    code, out, err = ended(tmp_path, *RUN, *words, OMP_NUM_THREADS="1")
    assert (code, "exitcode  : 7" in err) == (1, True), err
    assert sorted(out.splitlines()) == [
        f"{rank} fastload.integrations.replaced ['--lr']" for rank in range(2)
    ]
    (said,) = re.findall("^fastload: .*", err, re.MULTILINE)
    assert re.match(r"fastload: replaced 1 torch DataLoader in process \d+, rank 0 \(", said)


PIPELINES = """
import albumentations as A
import fastload
import torch
from torch.utils.data import DataLoader

class Photos(list):
    flip = A.Compose([A.HorizontalFlip(p=0.5)], seed=3)

    def __getitem__(self, index):
        return self.flip(image=torch.arange(2).reshape(1, 2, 1).numpy())["image"]

for _ in range(2):
    torch.manual_seed(0)
    loader = DataLoader(Photos(range(32)), num_workers=2, multiprocessing_context="fork")
    print([int(batch[0, 0, 0, 0]) for batch in loader])
    fastload.unpatch_torch()
"""


def test_seeded_pipelines_are_told_in_one_line(tmp_path: Path, run: Run) -> None:
    """With --seeding torch the draws are those of torch's loader, and nothing is told."""
    (tmp_path / "flips.py").write_text(PIPELINES)
    seeded, unseeded = run("run", "flips.py"), run("run", "--seeding", "torch", "flips.py")
    ours, torchs = seeded.stdout.splitlines()
    assert unseeded.stdout.splitlines() == [torchs, torchs] != [ours, torchs]
    told = [done.stderr.count("albumentations pipelines were seeded") for done in (seeded, unseeded)]
    assert told == [1, 0]


READS = """
import numpy, PIL.Image, {loader}
from fastload.readers import identity
identity.SETTLED_S = 0  # the photo was just written

class Photos:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return numpy.array(PIL.Image.open("photo.png"))

for epoch in range(2):
    for batch in {loader}.DataLoader(Photos(), 2, num_workers=1, multiprocessing_context="fork"):
        print(batch.sum().item())
"""


@pytest.mark.parametrize("loader", ["torch.utils.data", "fastload"])
def test_files_are_remembered_for_every_loader_of_a_script(tmp_path: Path, run: Run, loader: str) -> None:
    """With `--cache ram`, torch's and fastload's own; a line at the end says how often they were found."""
    Image.frombytes("RGB", (8, 8), bytes(range(192))).save(tmp_path / "photo.png")
    (tmp_path / "reads.py").write_text(READS.format(loader=loader))
    done = run("run", "--cache", "ram", "reads.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{2 * sum(range(192))}"] * 4
    assert re.search(r"^fastload: cache in process \d+: 7 found, 1 decoded$", done.stderr, re.MULTILINE)
    assert ("replaced no" in done.stderr, "1 new: read" in done.stderr) == (False, True)


@pytest.mark.parametrize("words", ["", "--quiet"])
def test_lines_at_the_end_come_once_or_never(tmp_path: Path, run: Run, words: str) -> None:
    """A program that shows log lines gets those at the end on standard error alone; none with --quiet."""
    (tmp_path / "logs.py").write_text(
        "import logging\nlogging.basicConfig(level=logging.INFO)\n" + READS.format(loader="torch.utils.data")
    )
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    done = run("run", *words.split(), "--cache", "ram", "logs.py")
    counts = [done.stderr.count(text) for text in ("replaced ", " found, ")]
    assert counts == ([0, 0] if words else [1, 1]), done.stderr
    assert ("fastload" in done.stderr) == (not words)


@pytest.mark.parametrize("loader", ["torch.utils.data", "fastload"])
def test_a_cache_of_no_use_is_told(tmp_path: Path, run: Run, loader: str) -> None:
    """Where samples are in memory, after one epoch as well; the warning and the line at the end say why.

    That no loader was replaced is told only where there was nothing else to do.
    """
    (tmp_path / "memory.py").write_text(f"import {loader}\nlist({loader}.DataLoader([1, 2]))\n")
    told = run("run", "--cache", "ram", "memory.py").stderr
    assert "cache: nothing that list reads is remembered:\n" in told
    assert re.search(r"fastload: cache in process \d+: no decoding by a supported library was seen", told)
    number = "1" if loader == "torch.utils.data" else "no"
    assert ("replaced" in told) == (number == "1")
    without = run("run", "memory.py").stderr
    assert re.fullmatch(rf"fastload: replaced {number} torch DataLoader in process \d+\n", without)


def test_a_rank_says_whose_hits_it_counts(tmp_path: Path, run: Run) -> None:
    """Its own, as one of several."""
    (tmp_path / "memory.py").write_text(
        "import os, fastload\n"
        "os.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='2')\n"
        "list(fastload.DataLoader([1, 2]))\n"
    )
    told = run("run", "--cache", "ram", "memory.py").stderr
    assert ", rank 0 (those of the other ranks are not counted): " in told


# Prints each batch; the script's argument says how it ends, most often in the middle of the epoch.
ENDING = """
import os, signal, sys
import fastload, torch
from torch.utils.data import DataLoader

class Numbers(list):
    def __getitem__(self, index):
        return torch.full((2,), index)

def train(ending):
    train_loader = DataLoader(Numbers(range(40)), batch_size=4, num_workers=int(ending == "fork"))
    pid = os.fork() if ending == "fork" else None
    for number, batch in enumerate(train_loader):
        print(number, batch[0, 0].item())
        if number == 6:
            if ending == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            if ending == "error":
                raise ValueError("a bad batch")
            if ending == "code":
                sys.exit(3)
    if pid == 0:
        raise ValueError("child")
    if pid:
        os.waitpid(pid, 0)
    if ending == "removed directory":
        os.remove("train.py")
        os.rmdir("out")
        sys.exit(5)
    if ending == "profile":
        with fastload.profile():
            print("inside")

train(sys.argv[1])
print("the end")
"""
WITH_WORKER = """
import collections, sys, torch
from torch.utils.data import DataLoader
Sample = collections.namedtuple("Sample", "x y")

class Photos(list):
    def __getitem__(self, index):
        return Sample(torch.ones(3) * index, index)

if __name__ == "__main__":
    for batch in DataLoader(Photos(range(40)), 10, num_workers=1, multiprocessing_context=sys.argv[1]):
        print(type(batch) is Sample, batch.y[0].item())
"""
REPORT = r"\ntrain_loader: .+\n  Numbers, 40 samples, batch_size=4, "  # the verdict comes first
FILE = ("--output", "a.json")


@pytest.mark.parametrize(
    ("ending", "code", "report", "said"),
    [
        ("code", 3, "0 workers: 7 batches, ", ""),
        ("error", 1, "0 workers: 7 batches, ", "ValueError: a bad batch\n"),
        ("interrupt", -signal.SIGINT, "0 workers: 7 batches, ", "KeyboardInterrupt\n"),
        ("fork", 0, "1 worker: 10 batches, ", ""),
        ("profile", 1, "0 workers: 10 batches, ", "`fastload profile`"),
        ("removed directory", 5, "0 workers: 10 batches, ", "out/a.json: "),
    ],
)
def test_it_reports_once(run: Run, tmp_path: Path, ending: str, code: int, report: str, said: str) -> None:
    """Once, with the script's exit code, traceback or signal, and the error of a file of ours."""
    (tmp_path / "out").mkdir()
    (tmp_path / "train.py").write_text(ENDING)
    removes = ending == "removed directory"
    done = run("profile", *(["--output", "out/a.json"] if removes else []), "train.py", ending)
    assert done.returncode == code, done.stderr
    before, _ = re.split(f"{REPORT}{report}", done.stderr)
    assert said in (done.stderr if removes else before)
    assert done.stderr.count(" batches, ") == 1
    assert not said.endswith("\n") or before.replace("\ntrain_loader", said).endswith(said)
    assert "inside" not in done.stdout


@pytest.mark.parametrize(("command", "name"), [("run", "DataLoader"), ("profile", "profile")])
def test_a_script_may_begin_with_an_import_of_ours(tmp_path: Path, command: str, name: str) -> None:
    """The hook is then called in the middle of that import."""
    (tmp_path / "train.py").write_text(
        f"from fastload import {name}\nfrom torch.utils.data import DataLoader\nlist(DataLoader([1, 2]))\n"
    )
    code, _, err = ended(tmp_path, "-m", "fastload", command, "train.py")
    assert (code, err.count("replaced 1 " if command == "run" else ", 1 epoch, ")) == (0, 1), err


def test_the_file_is_named(run: Run, tmp_path: Path) -> None:
    """The one of `--output`, also after an error."""
    (tmp_path / "train.py").write_text(ENDING)
    done = run("profile", *FILE, "train.py", "code")
    assert done.returncode == 3
    assert done.stderr.endswith(f"fastload: wrote {tmp_path}/a.json\n")
    report = json.loads((tmp_path / "a.json").read_text())
    assert [(loader["name"], loader["num_batches"]) for loader in report["loaders"]] == [("train_loader", 7)]


@pytest.mark.parametrize(
    "words",
    [
        *(["profile", *FILE, "train.py", method] for method in ("fork", "forkserver")),
        ["run", "-q", "-m", "train", "forkserver"],
        pytest.param(["profile", *FILE, "train.py", "spawn"], marks=pytest.mark.thorough),
    ],
)
def test_workers_find_the_script_s_classes(tmp_path: Path, words: list[str]) -> None:
    """By each start method; what they send comes back as an object of the script's class."""
    (tmp_path / "train.py").write_text(WITH_WORKER)
    code, out, err = ended(tmp_path, "-m", "fastload", *words)
    assert (code, out) == (0, "True 0\nTrue 10\nTrue 20\nTrue 30\n"), err
    if words[0] == "run":
        return
    (loader,) = json.loads((tmp_path / "a.json").read_text())["loaders"]
    assert (loader["num_batches"], loader["settings"]["num_workers"]) == (4, 1)
