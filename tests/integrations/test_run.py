"""`fastload run`: an unmodified script gets fastload's loader, in all of its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # an interpreter each

TRAIN = """
import argparse, hashlib, subprocess, sys

import torch
from torch.utils.data import DataLoader

import helper


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int)
    parser.add_argument("--method")
    parser.add_argument("--rng")
    arguments = parser.parse_args()
    torch.manual_seed(3)
    digest, kinds = hashlib.sha256(), set()
    options = {"num_workers": arguments.workers, "multiprocessing_context": arguments.method}
    for make, more in ((DataLoader, {}), (helper.make, options)):
        loader = make(helper.Noise(), batch_size=4, shuffle=True, **more)
        assert isinstance(loader, DataLoader)
        for images, kinds_in_workers in loader:
            digest.update(images.numpy().tobytes())
        kinds |= set(kinds_in_workers)
    print(digest.hexdigest(), torch.rand(1).item())
    print("in this process:", helper.kind(), "in the dataset:", *kinds, file=sys.stderr)
    child = [sys.executable, "-c", "import helper, sys; print('in a child:', helper.kind(), file=sys.stderr)"]
    subprocess.run(child, check=True)


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


def run(folder: Path, *words: str, plain: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `fastload run ...`, or plain python."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])
    return subprocess.run(
        [sys.executable, *([] if plain else ["-m", "fastload", "run"]), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture(scope="module")
def plain_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """The script under plain python, by its number of workers; the start method changes nothing."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "train.py").write_text(TRAIN)
    (folder / "helper.py").write_text(HELPER)
    return {number: run(folder, "train.py", "--workers", number, plain=True) for number in ("0", "2")}


@pytest.mark.parametrize("words", ["0", "2 --method fork", "2 --method spawn", "2 --method forkserver"])
def test_an_unmodified_script_gets_torch_s_batches_from_our_loader(
    folder: Path, plain_runs: dict[str, subprocess.CompletedProcess[str]], words: str
) -> None:
    """Bit by bit, with the same random state after it; by any name, in worker processes and in a child."""
    plain = plain_runs[words[0]]
    ours = run(folder, "train.py", "--workers", *words.split())

    assert (plain.returncode, ours.returncode) == (0, 0), plain.stderr + ours.stderr
    assert ours.stdout == plain.stdout != ""
    assert "in this process: torch in the dataset: torch" in plain.stderr
    assert "in this process: fastload in the dataset: fastload" in ours.stderr
    assert "in a child: fastload" in ours.stderr
    number = 3 + 11 * (2 if words == "0" else 1)  # each sample that is read in this process makes one
    lines = [line for line in ours.stderr.splitlines() if line.startswith("fastload: ")]
    child, last = lines  # no worker process adds a line
    assert child.startswith("fastload: 1 loader of torch was replaced in process ")
    assert last.startswith(f"fastload: {number} loaders of torch were replaced in process ")


def test_words_after_the_script_are_the_script_s(folder: Path) -> None:
    """Those that look like ours, too: `--rng`, `--help`, `--` and -m; --quiet prints no line of ours."""
    (folder / "show.py").write_text("import sys\nprint(sys.argv[1:])\n")
    words = ["--rng", "x", "--help", "--", "-m", "--json", "-q"]
    script, module = run(folder, "-q", "show.py", *words), run(folder, "--quiet", "-m", "show", *words)

    assert script.stdout == module.stdout == f"{words}\n"
    assert script.stderr == module.stderr == ""


def test_the_end_of_the_script_is_plain_python_s(folder: Path) -> None:
    """An error has its traceback and no line of ours; a SystemExit has its code and its text."""
    (folder / "error.py").write_text("def f():\n    raise ValueError('here')\n\nf()\n")
    (folder / "exits.py").write_text("import sys\nsys.exit('an error message')\n")

    for script in ("error.py", "exits.py", "absent.py"):
        plain, ours = run(folder, script, plain=True), run(folder, "--quiet", script)
        assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_without_torch_nothing_is_imported(folder: Path) -> None:
    """A script that makes no loader pays nothing, and the line at the end says so."""
    (folder / "light.py").write_text("import sys\nprint('torch' in sys.modules, 'numpy' in sys.modules)\n")
    done = run(folder, "light.py")

    assert done.stdout == "False False\n"
    assert done.stderr.startswith("fastload: no loader of torch was replaced in process ")


def test_defaults_of_the_command_line_reach_workers_and_children(folder: Path) -> None:
    """`--rng sample` is the default of every loader, and install() in the script changes nothing of it."""
    (folder / "show.py").write_text(
        "import subprocess, sys\n"
        "from torch.utils.data import DataLoader\n"
        "import fastload\n"
        "fastload.install(error_budget=2)\n"
        "loader = DataLoader([0])\n"
        "print(loader.rng, loader.error_budget, flush=True)\n"
        "code = 'from torch.utils.data import DataLoader; print(DataLoader([0]).rng)'\n"
        "subprocess.run([sys.executable, '-c', code])\n"
    )
    done = run(folder, "--rng", "sample", "show.py")

    assert done.stdout == "sample 2\nsample\n"
    assert done.stderr.count("1 loader of torch was replaced in process") == 2


def test_datasets_that_are_not_cached_are_named_once(folder: Path) -> None:
    """`--cache ram` says why not, and the script works."""
    done = run(folder, "--cache", "ram", "train.py", "--workers", "0")

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("fastload: --cache ram: helper.Noise is not cached: only ImageFolder") == 1


def test_other_values_are_wrong_usage(folder: Path) -> None:
    """One line, and exit code 2; the script does not begin."""
    done = run(folder, "--cache", "disk", "train.py")

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
