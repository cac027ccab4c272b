"""`fastload profile SCRIPT`: the script ends as under plain python, and the report goes to standard error.

`tests/integrations/test_script.py` shows that `run_script` is plain python; here it is the comparison.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.kit.processes import Interpreter

pytestmark = pytest.mark.slow  # loops that wait

COMMAND = """
import sys
sys.path.insert(0, "")  # for the script's folder
sys.argv[0] = "fastload"
from fastload.cli.main import main
main()
"""
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
TRAIN = (
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


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    """Make a script."""
    path = folder / name
    path.write_text(text)
    return path


def profiled(
    interpreter: Interpreter, folder: Path, *words: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The end of `fastload profile WORDS`."""
    return interpreter.run(COMMAND, "profile", *words, cwd=folder, **options)


@pytest.mark.parametrize(
    ("ending", "code", "num_batches", "said"),
    [
        ("code", 3, 7, ""),
        ("error", 1, 7, "ValueError: a bad batch\n"),
        ("interrupt", -signal.SIGINT, 7, "KeyboardInterrupt\n"),
    ],
)
def test_the_report_comes_before_the_last_words_of_the_script(
    interpreter: Interpreter, tmp_path: Path, ending: str, code: int, num_batches: int, said: str
) -> None:
    """Output, exit code, traceback and signal are the script's: see tests/integrations/test_script.py."""
    write(tmp_path, TRAIN)

    done = profiled(interpreter, tmp_path, "train.py", ending)

    assert done.returncode == code
    assert done.stderr.startswith(f"{REPORT}0 workers): {num_batches} batches, ")
    assert done.stderr.endswith(said)


def test_the_files_are_written(interpreter: Interpreter, tmp_path: Path) -> None:
    """`--output` and `--trace`, also after an error of the script; each is named."""
    write(tmp_path, TRAIN)
    files = ("--output", "report.json", "--trace", "trace.json")

    done = profiled(interpreter, tmp_path, *files, "train.py", "code")

    assert done.returncode == 3
    assert done.stderr.endswith("fastload: wrote report.json\nfastload: wrote trace.json\n")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(loader["name"], loader["num_batches"]) for loader in report["loaders"]] == [("train_loader", 7)]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events].count("waiting for data") == 7


@pytest.mark.parametrize(("option", "place"), [("--output", "absent/file"), ("--trace", "folder")])
def test_a_path_that_cannot_be_written_is_refused_first(
    interpreter: Interpreter, tmp_path: Path, option: str, place: str
) -> None:
    """Before the script runs; the message names the path."""
    (tmp_path / "folder").mkdir()
    write(tmp_path, "print('the script runs')\n")

    done = profiled(interpreter, tmp_path, option, place, "train.py")

    assert (done.returncode, done.stdout) == (2, "")
    said = f"{option} should be a file in a directory that can be written, not {place!r}"
    assert done.stderr == f"fastload: error: {said}\n"


def test_a_file_that_fails_later_hides_nothing(interpreter: Interpreter, tmp_path: Path) -> None:
    """The script removes the directory: an error line for the file, and the script's exit code."""
    (tmp_path / "out").mkdir()
    write(tmp_path, "import os, sys\nos.rmdir('out')\nsys.exit(5)\n")

    done = profiled(interpreter, tmp_path, "--output", "out/a.json", "--trace", "b.json", "train.py")

    assert done.returncode == 5
    assert "fastload: error: --output out/a.json could not be written: " in done.stderr
    assert done.stderr.endswith("fastload: wrote b.json\n")


def test_words_after_the_script_belong_to_it(interpreter: Interpreter, tmp_path: Path) -> None:
    """Also those that are options of `fastload profile`; none of its files is written."""
    write(tmp_path, "import sys\nprint(sys.argv)\n")
    words = ["--json", "a.json", "-m", "--help", "--replay", "3", "--", "x"]

    done = profiled(interpreter, tmp_path, "train.py", *words)

    assert (done.returncode, done.stdout) == (0, f"{['train.py', *words]}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_worker_processes(interpreter: Interpreter, tmp_path: Path, method: str) -> None:
    """Workers of each start method find the script's dataset, and are watched."""
    write(tmp_path, WITH_WORKER)

    done = profiled(interpreter, tmp_path, "--output", "report.json", "train.py", method)

    assert (done.returncode, done.stdout) == (0, f"done ['train.py', '{method}']\n")
    (loader,) = json.loads((tmp_path / "report.json").read_text())["loaders"]
    assert loader["num_batches"] == 10
    assert loader["worker_utilisation"] is not None
    assert "default_collate" in [stage["name"] for stage in loader["stages"]]


def test_a_forked_child_prints_no_report(interpreter: Interpreter, tmp_path: Path) -> None:
    """Not even after an error; the batches that it loads are not counted."""
    text = (
        f"{DATASET}"
        "train_loader = DataLoader(Numbers(), batch_size=4)\n"
        "pid = os.fork()\n"
        "for batch in train_loader:\n"
        "    pass\n"
        "if pid == 0:\n"
        "    raise ValueError('child')\n"
        "else:\n"
        "    os.waitpid(pid, 0)\n"
    )
    write(tmp_path, text)

    done = profiled(interpreter, tmp_path, "train.py")

    assert done.returncode == 0
    assert done.stderr.count(f"{REPORT}0 workers): 10 batches, ") == 1
    assert done.stderr.count("batches, ") == 1


def test_a_script_that_profiles_itself(interpreter: Interpreter, tmp_path: Path) -> None:
    """Its own profile is refused with a message that names both ways out; the report covers the rest."""
    text = (
        f"{DATASET}"
        "import fastload\n"
        "train_loader = DataLoader(Numbers(), batch_size=4)\n"
        "for batch in train_loader:\n"
        "    pass\n"
        "with fastload.profile():\n"
        "    print('inside')\n"
    )
    write(tmp_path, text)

    done = profiled(interpreter, tmp_path, "train.py")

    assert (done.returncode, done.stdout) == (1, "")
    assert "run the script with python instead of `fastload profile`" in done.stderr
    assert done.stderr.startswith(f"{REPORT}0 workers): 10 batches, ")


def test_replay(interpreter: Interpreter, tmp_path: Path) -> None:
    """`--replay N` returns held batches, and keeps the number of steps."""
    write(tmp_path, TRAIN)

    done = profiled(interpreter, tmp_path, "--replay", "2", "--output", "a.json", "train.py", "none")

    assert done.returncode == 0
    assert (
        done.stdout
        == "".join(f"{number} {value}\n" for number, value in enumerate([0, 4, 8, 12, 0, 4, 16, 20, 24, 28]))
        + "the end\n"
    )
    (loader,) = json.loads((tmp_path / "a.json").read_text())["loaders"]
    assert loader["num_batches"] == 10
