"""`fastload run`: an unmodified script gets fastload's loader, in all of its processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kit.processes import Interpreter

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # an interpreter each

# Under each start method from the same seed: the digest of all batches, and the random state after them.
TRAIN = """
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "helper.py").write_text(HELPER)
    return tmp_path


COMMAND = """
import sys
sys.path.insert(0, "")  # for the script's folder
sys.argv[0] = "fastload"
from fastload.cli.main import main
main()
"""
PLAIN = """
import sys
sys.path.insert(0, "")
from fastload.cli.script import run_script
run_script(sys.argv[1], sys.argv[2:])
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(interpreter: Interpreter, folder: Path) -> Run:
    """Runs `fastload run ...`, or plain python, in processes that have imported torch already."""
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(folder)]

    def run(*words: str, plain: bool = False) -> subprocess.CompletedProcess[str]:
        program, before = (PLAIN, []) if plain else (COMMAND, ["run"])
        variables = {"PYTHONPATH": os.pathsep.join(places)}
        return interpreter.run(program, *before, *words, cwd=folder, environment=variables, limit_s=250)

    return run


def from_shell(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_an_unmodified_script_gets_torch_s_batches_from_our_loader(
    folder: Path, run: Run, method: str
) -> None:
    """Bit by bit, with the same random state after it; by any name, in worker processes and in children.

    Each process of the script's own says how many loaders were replaced; no worker process adds a line.
    """
    plain = run("train.py", "--methods", "fork", plain=True)
    ours = from_shell(folder, "-m", "fastload", "run", "train.py", "--child", "--methods", method)
    assert (plain.returncode, ours.returncode) == (0, 0), plain.stderr + ours.stderr
    assert "None in this process: torch in the dataset: torch\n" in plain.stderr
    for name, name_in_plain in (("None", "None"), (method, "fork")):
        expected = re.findall(rf"^{name_in_plain} (.*)", plain.stdout, re.MULTILINE)
        assert re.findall(rf"^{name} (.*)", ours.stdout, re.MULTILINE) == expected
        assert len(expected) == 1
        assert f"{name} in this process: fastload in the dataset: fastload\n" in ours.stderr
    # A loop makes two loaders and `kind()` one; each sample that is read in this process makes one more.
    number = (3 + 2 * 11) + (3 + 11)
    child, last = [line for line in ours.stderr.splitlines() if line.startswith("fastload: ")]

    assert "in a child: fastload" in ours.stderr
    assert child.startswith("fastload: 1 loader of torch was replaced in process ")
    assert last.startswith(f"fastload: {number} loaders of torch were replaced in process ")


def test_words_after_the_script_are_the_script_s(folder: Path, run: Run) -> None:
    """Those that look like ours, too; --quiet prints no line of ours. A wrong value is wrong usage."""
    (folder / "show.py").write_text("import sys\nprint(sys.argv[1:])\n")
    words = ["--rng", "x", "--help", "--", "-m", "--json", "-q"]
    done, wrong = run("-q", "-m", "show", *words), run("--cache", "disk", "show.py")

    assert (done.stdout, done.stderr) == (f"{words}\n", "")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)


def test_without_torch_nothing_is_imported(folder: Path) -> None:
    """A script that makes no loader pays nothing, and the line at the end says so."""
    (folder / "light.py").write_text("import sys\nprint('torch' in sys.modules, 'numpy' in sys.modules)\n")
    done = from_shell(folder, "-m", "fastload", "run", "light.py")

    assert done.stdout == "False False\n"
    assert done.stderr.startswith("fastload: no loader of torch was replaced in process ")


def test_defaults_of_the_command_line_reach_workers_and_children(folder: Path, run: Run) -> None:
    """`--rng sample` is the default of every loader, whatever patch_torch() in the script says."""
    (folder / "show.py").write_text(
        "import subprocess, sys\n"
        "from torch.utils.data import DataLoader\n"
        "import fastload\n"
        "fastload.patch_torch(max_errors=2)\n"
        "loader = DataLoader([0])\n"
        "print(loader.rng, loader.max_errors, flush=True)\n"
        "code = 'from torch.utils.data import DataLoader; print(DataLoader([0]).rng)'\n"
        "subprocess.run([sys.executable, '-c', code])\n"
    )
    done = run("--rng", "sample", "show.py")

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
    folder: Path, run: Run, has_pipeline: bool, words: list[str], is_said: bool
) -> None:
    """Only if there was one; with --no-seed-albumentations the draws are those of torch's loader."""
    (folder / "flips.py").write_text(PIPELINES.format(has_pipeline=has_pipeline))

    plain, done = run("flips.py", plain=True), run(*words, "flips.py")

    assert (done.stdout != plain.stdout) == is_said
    assert done.stderr.count("albumentations pipelines were seeded") == is_said


def test_datasets_that_are_not_cached_are_named_once(run: Run) -> None:
    """`--cache ram` says why not, and the script works."""
    done = run("--cache", "ram", "train.py", "--methods")

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("fastload: --cache ram: helper.Noise is not cached: only ImageFolder") == 1
