"""Claims of `fastload bench`, from the command to its files; none depends on the speed of the machine."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import fastload
from fastload.bench import measure, subprocess_runner
from fastload.bench.configurations import Configuration
from fastload.bench.measure import Epochs
from fastload.bench.report import ending_lines
from fastload.cli import arguments, main
from fastload.cli.source_argument import setup_code
from tests.bench import made_up
from tests.cli_zoo import NUM_SAMPLES, Plain
from tests.kit.processes import still_running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ZOO = "tests.cli_zoo:factory"
QUICK = ("--rounds", "1", "--samples", "32", "--batch-size", "8", "--num-workers", "0,1")
ALONE = ("--rounds", "1", "--num-workers", "0", "--cache", "none")


def cached() -> Any:
    return fastload.CachedDataset(Plain())


class Named:
    dataset = Plain()


def flip() -> Any:
    return lambda sample: (sample[0][:, ::-1].copy(), sample[1])


def only_images(sample: Any) -> Any:
    return sample[0]


def made_by(lines: list[str]) -> Any:
    """The loader that printed lines of code make."""
    names: dict[str, Any] = {}
    exec("\n".join(line.strip() for line in lines), names)
    return names["loader"]


def run(*words: Any) -> Any:
    """Run `fastload bench ...` in this process; its runs are forked from here."""
    return CliRunner().invoke(main.app, ["bench", *map(str, words)])


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder for temporary files; pytest's own, made before, has too long a path for a socket in it."""
    monkeypatch.setattr(measure, "LATER_S", 1e-9)  # each run has one later epoch
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


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
def test_a_folder_is_measured_and_leaves_only_what_was_asked_for(
    photos: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table, code that runs, a file that can be read again, no cache, and few other lines."""
    saved, sized = tmp_path / "result.json", (photos, "--size", "16x16")
    saved.write_text("yesterday")
    with monkeypatch.context() as patch:
        patch.setattr(arguments.os, "replace", Mock(side_effect=PermissionError(13, "Permission denied")))
        refused = run(*sized, *ALONE, "--samples", "8", "--output", saved)
    assert (refused.exit_code, saved.read_text()) == (1, "yesterday")
    assert "--output" in refused.stderr
    result = run(*sized, *QUICK, "--output", saved)
    assert result.exit_code == 0, result.stderr
    found = json.loads(saved.read_text())
    assert (found["length"], found["num_samples"]) == (40, 32)
    assert len(found["rows"]) == 2 + 3 * 2
    assert all(not row["problem"] and min(row["first"] + row["later"]) > 0 for row in found["rows"])
    assert (found["size"], found["build_s"] > 0) == ([16, 16], True)
    assert "times torch's best here" in result.stdout or "torch's own loader" in result.stdout
    assert "use --rounds 3" in result.stdout
    assert "samples/s" in result.stdout
    assert list(temporary.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "result.json"}
    said = [line.partition(":")[2] for line in result.stderr.splitlines()]
    assert said[1:] == [" building an LMDB cache", " round 1 of 1"]
    monkeypatch.chdir(tmp_path)
    code = result.stdout.partition("fastest on this machine:\n")[2]
    loader = made_by([line for line in code.splitlines() if line.startswith("    ")])
    assert loader.batch_size == 8
    assert loader.dataset[0][0].shape == (16, 16, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "named"),
    [
        *(("photos", None), ("photos", "flip"), ("tests.cli_zoo:Plain", "only_images")),
        *((f"{__name__}:Named.dataset", None), (f"{__name__}:cached", "flip")),
    ],
)
def test_the_code_for_any_source_and_transform_is_complete(
    photos: Path, source: str, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, a class, a function, a dataset inside a class, and both kinds of transform."""
    monkeypatch.chdir(photos.parent)
    transform = None if named is None else f"{__name__}:{named}"
    setup = setup_code(source, (8, 8) if source == "photos" else None, transform)
    row = made_up.row(Configuration("fastload", "lmdb", 0, 4), 2.0)
    loader = made_by(ending_lines(made_up.result(row, source=source, transform=transform), setup)[1:-1])
    assert len(next(iter(loader))) == (4 if named == "only_images" else 2)
    assert (loader.dataset.transform is None) == (named is None)


SOME = (*QUICK, "--json")
FEW = (*SOME, "--cache", "ram", "--samples", "8")
# Source, options, the problem that some rows have, which rows, and a warning.
PROBLEMS: list[tuple[str, Any, str, Callable[[Any], bool], str]] = [
    ("tests.cli_zoo:Random", SOME, "the dataset is random", lambda row: row["cache"] != "none", ""),
    (f"{__name__}:cached", SOME, "a CachedDataset", lambda row: row["cache"] != "none", "only later epochs"),
    (ZOO, SOME, "but a cache in RAM can take", lambda row: row["cache"] == "ram", ""),
    (ZOO, FEW, "", lambda row: False, "rates of the measured part"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "words", "problem", "has_problem", "warning"), PROBLEMS)
def test_what_cannot_be_measured_is_a_row_with_its_reason(
    source: str, words: Any, problem: str, has_problem: Any, warning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on: a random dataset, one with a cache, too little room."""
    if source == ZOO:
        monkeypatch.setattr("fastload.system.budget.available_bytes", lambda: 40 * 200)
    result = run(source, *words)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    for row in found["rows"]:
        assert bool(row["problem"]) == has_problem(row) == (not row["later"]), row
        assert problem in row["problem"] or not has_problem(row)
    assert not warning or any(warning in text for text in found["warnings"])


@pytest.mark.slow
def test_when_all_fail_the_command_fails(temporary: Path) -> None:
    """The table has the reason once; the sample was not looked at before the runs."""
    result = run("tests.cli_zoo:Broken", *QUICK[:2], "--num-workers", "0,1")
    assert result.exit_code == 1
    assert "failed: ValueError: sample thirty is broken" in result.stdout
    assert "no configuration could be measured" in result.stdout
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_the_file_of_output_holds_what_json_prints(tmp_path: Path) -> None:
    """With the medians that two such files are compared by."""
    words = (*ALONE[:4], "--cache", "none,ram", "--samples", "48", "--batch-size", "16")
    saved, flipped = tmp_path / "saved.json", f"{__name__}:flip"
    result = run(ZOO, "--transform", flipped, *words, "--output", saved, "--json")
    assert result.exit_code == 0, result.stderr
    plain = json.loads(saved.read_text())
    assert json.loads(result.stdout) == plain
    assert (plain["transform"], plain["num_samples"]) == (flipped, 48)
    assert [row["median"] for row in plain["rows"]] == [row["later"][0] for row in plain["rows"]]


@pytest.mark.slow
def test_without_options_all_caches_and_some_workers_take_part() -> None:
    """Over all samples of a small dataset."""
    found = json.loads(run(ZOO, "--rounds", "1", "--json").stdout)
    assert found["num_samples"] == NUM_SAMPLES
    assert {row["cache"] for row in found["rows"]} == {"none", "ram", "lmdb"}
    assert {0} < {row["num_workers"] for row in found["rows"]}


# --- interruption -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("needs_lmdb")
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_shows_what_was_measured_and_leaves_nothing(
    as_json: bool, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code of an interruption; no process, no cache and no file."""
    pids, saved = tmp_path / "pids", tmp_path / "result.json"

    def measure_and_interrupt(
        dataset: Any, transform: Any, configuration: Configuration, path: str | None
    ) -> Epochs:
        if configuration.is_torch:
            return Epochs(11.0, 4321.0)
        with fastload.DataLoader(dataset, 4, num_workers=2) as loader:
            batches = iter(loader)
            next(batches)
            workers = [child.pid for child in subprocess_runner.multiprocessing.active_children()]
            pids.write_text(" ".join(map(str, [os.getpid(), *workers])))
            os.kill(os.getppid(), signal.SIGINT)
            signal.pause()
        raise AssertionError("the run was not interrupted")

    monkeypatch.setattr(measure, "measure", measure_and_interrupt)
    words = ("--num-workers", "0", "--cache", "lmdb", "--output", saved, *["--json"] * as_json)
    result = run(ZOO, *words)
    assert result.exit_code == 130
    assert "interrupted after 1 runs" in result.stderr
    for text in ['"type": "KeyboardInterrupt"'] if as_json else ["4,321", "not run"]:
        assert text in result.stdout
    started = list(map(int, pids.read_text().split()))
    assert (len(started), still_running(started, 60)) == (3, [])
    assert (saved.exists(), list(temporary.iterdir())) == (False, [])


def test_sigterm_leaves_nothing(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CI ends a command that takes too long this way."""

    def run_isolated(function: Any, dataset: Any, *arguments: Any) -> Any:
        if function is not measure.build:
            return subprocess_runner.run_isolated(function, dataset, *arguments)
        Path(arguments[0]).write_bytes(b"a part of a cache")
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal was not heard")

    monkeypatch.setattr("fastload.bench.run.run_isolated", run_isolated)
    before = signal.getsignal(signal.SIGTERM)
    result = run(ZOO, *QUICK)
    assert result.exit_code == 128 + signal.SIGTERM
    assert list(temporary.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
