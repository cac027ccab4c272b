"""Claims of `fastload bench`, from the command to its files; none depends on the speed of the machine."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fastload
from fastload.bench import isolated
from fastload.bench import run as bench_run
from fastload.cli import main
from tests.cli_zoo import NUM_SAMPLES, Plain
from tests.kit.processes import on_a_terminal, still_running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastload.bench.configurations import Configuration

ZOO = "tests.cli_zoo:factory"
QUICK = ("--rounds", "1", "--samples", "32", "--batch-size", "8", "--num-workers", "0", "--num-workers", "1")
ALONE = ("--rounds", "1", "--num-workers", "0", "--cache", "none")


class Named:
    dataset = Plain()


def flip() -> Any:
    return lambda sample: (sample[0][:, ::-1].copy(), sample[1])


def run(*words: Any) -> Any:
    """Run `fastload bench ...` in this process; its runs are forked from here."""
    return CliRunner().invoke(main.app, ["bench", *map(str, words)])


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder for temporary files; pytest's own, made before, has too long a path for a socket in it."""
    monkeypatch.setattr(bench_run, "LATER_S", 1e-9)  # each run has one later epoch
    handler = signal.getsignal(signal.SIGTERM)
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Forty photos of two sizes in two classes."""
    rng = np.random.default_rng(0)
    for number in range(40):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (20, 30, 3) if number % 3 else (30, 20, 3)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(path)
    return tmp_path / "photos"


@pytest.mark.slow
def test_a_folder_is_measured_and_nothing_is_left(photos: Path, tmp_path: Path, temporary: Path) -> None:
    """A table, a line of code that runs, and no file."""
    result = run(photos, "--size", "16x16", *QUICK)
    assert result.exit_code == 0, result.stderr
    assert "32 of 40 samples; samples/s, medians" in result.stdout
    assert result.stdout.count("\nfastload ") == 3 * 2
    assert "a cache of all 40 samples takes" in result.stdout
    assert list(temporary.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
    line = result.stdout.partition("fastest here:\n")[2].splitlines()[0].strip()
    names: dict[str, Any] = {"fastload": fastload, "torch": torch}
    exec(line.replace("PATH", f"{tmp_path}/cache"), names)
    assert names["loader"].batch_size == 8
    assert names["loader"].dataset[0][0].shape == (16, 16, 3)


@pytest.mark.slow
@pytest.mark.parametrize("source", [f"{__name__}:Named.dataset", "tests.cli_zoo:Plain"])
def test_a_dataset_and_its_random_part_are_named(source: str) -> None:
    """A class, or a dataset inside one; the line has the user's variables."""
    found = json.loads(run(source, "--transform", f"{__name__}:flip", *ALONE, "--json").stdout)
    assert found["transform"] == f"{__name__}:flip"
    assert "CachedDataset(dataset, transform, cache=None), batch_size=64" in found["fastest"]


@pytest.mark.slow
def test_the_time_left_is_shown_on_a_terminal() -> None:
    """A bar that ends at all runs; elsewhere, or with --quiet, nothing."""
    shown = run(ZOO, *ALONE)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert run(ZOO, *ALONE, "--quiet").output == ""
    code, frames = on_a_terminal("bench", ZOO, *ALONE)
    assert code == 0
    counts = re.findall(r" (\d/2) ", " ".join(frames))
    assert list(dict.fromkeys(counts)) == ["0/2", "1/2", "2/2"]


@pytest.mark.slow
def test_what_cannot_be_measured_is_a_row_with_its_reason() -> None:
    """The others go on. Of a random dataset, files can be cached."""
    result = run("tests.cli_zoo:Random", *QUICK, "--json")
    assert result.exit_code == 0, result.stderr
    for row in json.loads(result.stdout)["rows"]:
        is_random = "[0] returns a different sample on every access" in row["problem"]
        assert is_random == (row["cache"] != "none") == (not row["later"]), row
    by_file = json.loads(run("tests.cli_zoo:Random", *ALONE[:4], "--by", "file", "--json").stdout)
    assert [row["problem"] for row in by_file["rows"]] == [""] * 4


@pytest.mark.slow
def test_when_all_fail_the_command_fails(photos: Path, temporary: Path) -> None:
    """The line has the first reason; images of several shapes get advice."""
    result = run("tests.cli_zoo:Broken", *QUICK[:2], *QUICK[-4:])
    assert result.exit_code == 1
    assert "no configuration could be measured: ValueError: sample thirty is broken" in result.stderr
    result = run(photos, *ALONE, "--quiet")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "images of several shapes need --size 224x224, or a crop in --transform" in result.stderr
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_without_options_all_caches_and_some_workers_take_part() -> None:
    """Over all samples of a small dataset; each row has its settings and rates."""
    found = json.loads(run(ZOO, "--rounds", "1", "--json").stdout)
    assert (found["num_samples"], found["length"], found["rounds"]) == (NUM_SAMPLES, NUM_SAMPLES, 1)
    assert {row["cache"] for row in found["rows"]} == {"none", "ram", "lmdb"}
    assert {0} < {row["num_workers"] for row in found["rows"]}
    assert all([row["median"]] == row["later"] and min(row["first"]) > 0 for row in found["rows"])
    assert found["sample_nbytes"] > 6 * 8 * 3


# --- interruption -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("needs_lmdb")
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_leaves_nothing(
    as_json: bool, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code of an interruption; no process, no cache and no file."""
    pids = tmp_path / "pids"

    def measure_and_interrupt(dataset: Any, transform: Any, configuration: Configuration, path: str) -> Any:
        if configuration.loader == "torch":
            return 11.0, 4321.0, 0
        with fastload.DataLoader(dataset, 4, num_workers=2) as loader:
            batches = iter(loader)
            next(batches)
            workers = [child.pid for child in isolated.multiprocessing.active_children()]
            pids.write_text(" ".join(map(str, [os.getpid(), *workers])))
            os.kill(os.getppid(), signal.SIGINT)
            signal.pause()
        raise AssertionError("the run was not interrupted")

    monkeypatch.setattr(bench_run, "measure", measure_and_interrupt)
    words = ("--num-workers", "0", "--cache", "lmdb", *["--json"] * as_json)
    result = run(ZOO, *words)
    assert result.exit_code == 130
    assert "fastload: error: interrupted\n" in result.stderr
    assert ('"type": "KeyboardInterrupt"' in result.stdout) == as_json
    started = list(map(int, pids.read_text().split()))
    assert (len(started), still_running(started, 60)) == (3, [])
    assert list(temporary.iterdir()) == []


def test_sigterm_leaves_nothing(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CI ends a command that takes too long this way."""

    def write_and_signal(dataset: Any, transform: Any, configuration: Configuration, folder: str) -> Any:
        (Path(folder) / "cache.lmdb").write_bytes(b"a part of a cache")
        os.kill(os.getppid(), signal.SIGTERM)
        signal.pause()

    monkeypatch.setattr(bench_run, "measure", write_and_signal)
    assert run(ZOO, *QUICK).exit_code == 130
    assert list(temporary.iterdir()) == []
