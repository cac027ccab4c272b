"""Claims of `fastload bench`, from the command to its files; none depends on the speed of the machine."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import fastload
from fastload.bench import apart, measure
from fastload.bench.contenders import Contender
from fastload.bench.measure import Epochs
from fastload.bench.report import ending_lines
from fastload.bench.result import Result
from fastload.cli import arguments, main
from fastload.cli.source_argument import setup_code
from tests.bench import made_up
from tests.cli_zoo import NUM_SAMPLES, Plain
from tests.kit.processes import still_running

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
QUICK = ("--rounds", "1", "--samples", "32", "--batch-size", "8", "--workers", "0,1")
ALONE = ("--rounds", "1", "--workers", "0", "--cache", "none")


class WithLambda(Plain):
    """Cannot be pickled, so that no worker can be spawned with it."""

    def __init__(self) -> None:
        super().__init__()
        self.function = lambda: None


class BreaksWithLabels(Plain):
    """A sample that is not looked at before the runs cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == NUM_SAMPLES - 2:
            raise ValueError("this sample is broken")
        return super().__getitem__(index)


class Empty(Plain):
    def __len__(self) -> int:
        return 0


def cached() -> Any:
    return fastload.CachedDataset(Plain())


def ends_the_process() -> None:
    sys.exit(4)


class Photos(Plain):
    """Named by its class, inside another name."""


class Named:
    dataset = Photos()


def flip() -> Any:
    return lambda sample: (sample[0][:, ::-1].copy(), sample[1])


def only_images(sample: Any) -> Any:
    return sample[0]


def made_by(lines: Iterable[str]) -> Any:
    """The loader that printed lines of code make."""
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    return names["loader"]


def run(*words: Any) -> Any:
    """Run `fastload bench ...` in this process; its runs are forked from here."""
    return CliRunner().invoke(main.app, ["bench", *map(str, words)])


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder for temporary files; each run has one later epoch.

    Pytest's own folder, which must exist before, has too long a path for a socket in it.
    """
    monkeypatch.setattr(measure, "LATER_S", 1e-9)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", name)
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


def rescaled(source: Path, dest: Path, factor: float, *, only: str = "") -> Path:
    """A result whose rates are multiplied, those of one kind of loader or all."""
    plain = json.loads(source.read_text())
    for row in plain["rows"]:
        if only in ("", row["cache"]):
            row["later"] = [factor * rate for rate in row["later"]]
    dest.write_text(json.dumps(plain))
    return dest


@pytest.mark.slow
class TestWhole:
    @pytest.mark.slow
    def test_a_folder_is_measured_and_leaves_only_what_was_asked_for(
        self, photos: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A table, code that runs, a chart, a file that can be read again, no cache, and few other lines."""
        chart, saved, other = (tmp_path / name for name in ("chart.png", "result.json", "other.json"))

        result = run(photos, "--size", "16x16", *QUICK, "--chart", chart, "--output", saved)
        as_json = run(photos, "--size", "16x16", *ALONE, "--samples", "8", "--json", "--output", other)

        assert json.loads(as_json.stdout) == json.loads(other.read_text())
        other.unlink()
        assert result.exit_code == 0, result.stderr
        loaded = Result.from_dict(json.loads(saved.read_text()))
        assert (loaded.length, loaded.num_samples) == (40, 32)
        assert len(loaded.rows) == 2 + 3 * 2
        assert all(one.is_measured and min(one.first + one.later) > 0 for one in loaded.rows)
        assert loaded.build_s.keys() == {"16x16"}
        assert chart.read_bytes().startswith(PNG_SIGNATURE)
        assert "times torch's best here" in result.stdout or "torch's own loader" in result.stdout
        assert "use --rounds 3" in result.stdout
        assert "samples/s" in result.stdout
        assert list(temporary.iterdir()) == []
        assert {path.name for path in tmp_path.iterdir()} == {"photos", "chart.png", "result.json"}
        assert [line.partition(":")[2] for line in result.stderr.splitlines()][1:] == [
            " building an LMDB cache",
            " round 1 of 1",
        ]
        monkeypatch.chdir(tmp_path)
        code = result.stdout.partition("fastest on this machine:\n")[2]
        loader = made_by(line.strip() for line in code.splitlines() if line.startswith("    "))
        assert loader.batch_size == 8
        assert loader.dataset[0][0].shape == (16, 16, 3)

    def test_a_transform_runs_behind_every_contender(self, photos: Path) -> None:
        """It brings images of several sizes to one, and the fastest lines have it behind a cache."""
        result = run(
            "tests.cli_zoo:factory", "--transform", "tests.test_cli_bench:flip", *QUICK, "--cache", "ram,lmdb"
        )

        assert result.exit_code == 0, result.stderr
        assert "transform tests.test_cli_bench:flip" in result.stdout

    @pytest.mark.parametrize(
        ("source", "named"),
        [
            ("photos", None),
            ("photos", "flip"),
            (f"{__name__}:Photos", "only_images"),
            (f"{__name__}:Named.dataset", None),
            (f"{__name__}:cached", "flip"),
        ],
    )
    def test_the_code_for_any_source_and_transform_is_complete(
        self, photos: Path, source: str, named: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A folder, a class, a function, a dataset inside a class, and both kinds of transform."""
        monkeypatch.chdir(photos.parent)
        transform = None if named is None else f"{__name__}:{named}"
        setup = {"8x8": setup_code(source, (8, 8) if source == "photos" else None, transform)}
        rows = [made_up.row(Contender("fastload", "lmdb", 0, 4, size="8x8"), 2.0)]
        found = made_up.result(*rows, source=source, transform=transform)

        loader = made_by(line.strip() for line in ending_lines(found, setup)[1:-1])

        assert len(next(iter(loader))) == (4 if named == "only_images" else 2)
        assert (loader.dataset.transform is None) == (named is None)

    @pytest.mark.slow
    def test_without_options_all_caches_and_some_workers_take_part(self) -> None:
        """The number of samples follows from --minutes."""
        result = run("tests.cli_zoo:factory", "--minutes", "0", "--rounds", "1", "--json")

        found = json.loads(result.stdout)
        assert found["num_samples"] == NUM_SAMPLES
        assert {row["cache"] for row in found["rows"]} == {"none", "ram", "lmdb"}
        assert {0} < {row["num_workers"] for row in found["rows"]}


class TestImpossible:
    @pytest.fixture(autouse=True)
    def short_epochs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No test of this class is about a rate; the processes that measure inherit this."""
        monkeypatch.setattr(measure, "LATER_S", 0.01)

    @pytest.mark.slow
    def test_a_random_dataset_is_measured_without_a_cache(self) -> None:
        """The rows of caches say why they have no figures."""
        result = run("tests.cli_zoo:Random", *QUICK, "--json")

        assert result.exit_code == 0, result.stderr
        rows = json.loads(result.stdout)["rows"]
        assert all(("the dataset is random" in row["problem"]) == (row["cache"] != "none") for row in rows)
        assert all(bool(row["later"]) == (row["cache"] == "none") for row in rows)

    @pytest.mark.slow
    def test_a_dataset_with_a_cache_is_measured_as_it_is(self) -> None:
        """A second cache would be of no use, and first epochs read what earlier contenders have cached."""
        result = run("tests.test_cli_bench:cached", *QUICK, "--json")

        found = json.loads(result.stdout)
        for row in found["rows"]:
            assert ("is a CachedDataset already" in row["problem"]) == (row["cache"] != "none")
        assert any("only later epochs compare" in text for text in found["warnings"])

    @pytest.mark.slow
    def test_a_contender_that_fails_is_a_row_and_the_others_go_on(self) -> None:
        """A dataset that cannot be pickled cannot be spawned with, and is forked with all the same."""
        words = ("--rounds", "1", "--workers", "1", "--cache", "none", "--start-method", "fork,spawn")

        result = run("tests.test_cli_bench:WithLambda", *words, "--json")

        assert result.exit_code == 0, result.stderr
        for row in json.loads(result.stdout)["rows"]:
            # Python 3.13: "Can't get local object", other releases: "Can't pickle local object".
            assert ("local object" in row["problem"]) == (row["start_method"] == "spawn"), row
            assert bool(row["later"]) == (row["start_method"] == "fork")

    @pytest.mark.slow
    def test_when_all_fail_the_command_fails(self, temporary: Path) -> None:
        """The table has the reason once."""
        result = run("tests.test_cli_bench:BreaksWithLabels", *QUICK[:2], "--workers", "0,1")

        assert result.exit_code == 1
        assert "failed: ValueError: this sample is broken" in result.stdout
        assert "no contender could be measured" in result.stdout
        assert list(temporary.iterdir()) == []

    @pytest.mark.slow
    def test_a_cache_that_does_not_fit_is_not_measured_by_default(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its rate over a part would be wrong for the whole; the row has both sizes."""
        monkeypatch.setattr("fastload.system.budget.available_bytes", lambda: 40 * 200)

        default = run("tests.cli_zoo:factory", *QUICK, "--json")
        asked = run("tests.cli_zoo:factory", *QUICK, "--cache", "ram", "--samples", "8", "--json")

        rows = json.loads(default.stdout)["rows"]
        assert all(
            ("but a cache in RAM can take" in row["problem"]) == (row["cache"] == "ram") for row in rows
        )
        found = json.loads(asked.stdout)
        assert all(row["problem"] == "" for row in found["rows"])
        assert any(
            "the rows with a cache show the rates of the measured part" in text for text in found["warnings"]
        )

    @pytest.mark.parametrize(
        ("words", "code", "said"),
        [
            (["SOURCE"], 2, "add a size with both sides such as --size 224x224"),
            (["no/such/folder"], 2, "neither"),
            (["tests.cli_zoo:factory", "--size", "8x8"], 2, "--size is for folders"),
            (["tests.test_cli_bench:Empty"], 1, "has no samples"),
            (["tests.test_cli_bench:ends_the_process"], 1, "exit code 4"),
            (["tests.cli_zoo:factory", "--transform", "tests.cli_zoo:number"], 2, "is not callable"),
            (["tests.cli_zoo:factory", "--transform", "no name"], 2, "should be MODULE:NAME"),
            (["tests.cli_zoo:factory", "--transform", "tests.cli_zoo:nothing"], 2, "has no 'nothing'"),
            (["tests.cli_zoo:factory", "--workers", "0,two"], 2, "--workers should be numbers from 0"),
            (["tests.cli_zoo:factory", "--batch-size", "0"], 2, "--batch-size should be numbers from 1"),
            (["tests.cli_zoo:factory", "--start-method", "clone"], 2, "but got 'clone'"),
            (["tests.cli_zoo:factory", "--cache", "disk"], 2, "none,ram,lmdb, but got 'disk'"),
            (["tests.cli_zoo:factory", "--scratch", "no/such"], 2, "--scratch should be a directory"),
            (["tests.cli_zoo:factory", "--output", "no/such/file"], 2, "should be a file"),
            (["tests.cli_zoo:factory", "--chart", "TMP"], 2, "--chart should be a file"),
            (["tests.cli_zoo:factory", "--relative"], 2, "--relative is for --baseline"),
            (["tests.cli_zoo:factory", "--baseline", "TMP/none"], 2, "make one with --output"),
            (["tests.cli_zoo:factory", "--baseline", "NOTES"], 2, "is no result of this release"),
            (["tests.cli_zoo:factory", "--baseline", "OTHER"], 2, "is no result of this release"),
        ],
    )
    def test_what_cannot_be_measured_is_one_line(
        self, words: list[str], code: int, said: str, photos: Path, tmp_path: Path
    ) -> None:
        """Before anything runs."""
        (tmp_path / "notes").write_text("no JSON")
        (tmp_path / "other").write_text("{}")
        names = {
            "SOURCE": str(photos),
            "TMP": str(tmp_path),
            "TMP/none": str(tmp_path / "none"),
            "NOTES": str(tmp_path / "notes"),
            "OTHER": str(tmp_path / "other"),
        }

        result = run(*(names.get(word, word) for word in words), *QUICK[:4], "--json")

        assert result.exit_code == code
        error = json.loads(result.stdout)
        assert said in error["error"]
        assert result.stderr == f"fastload: error: {error['error']}\n"

    @pytest.mark.slow
    def test_a_failed_write_leaves_the_earlier_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The table was lost, but not the baseline of yesterday."""
        saved = tmp_path / "result.json"
        saved.write_text("yesterday")

        def refuse(*paths: str) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(arguments.os, "replace", refuse)

        result = run("tests.cli_zoo:factory", *ALONE, "--output", saved)

        assert result.exit_code == 1
        assert "--output" in result.stderr
        assert saved.read_text() == "yesterday"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json"]


@pytest.mark.slow
class TestBaseline:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        path = tmp_path / "saved.json"
        path.write_text(self.measured())
        return path

    @staticmethod
    @functools.cache
    def measured() -> str:
        """A result, which is measured once: the tests change its rates as they need."""
        words = (*ALONE[:4], "--cache", "none,ram", "--samples", "48", "--batch-size", "16")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "saved.json")
            result = run("tests.cli_zoo:factory", *words, "--output", path, "--quiet")
            assert result.exit_code == 0, result.stderr
            return path.read_text()

    def test_a_faster_run_passes_with_the_settings_of_the_baseline(self, saved: Path, tmp_path: Path) -> None:
        """No option needs to be repeated."""
        slow = rescaled(saved, tmp_path / "slow.json", 1e-6)

        result = run("tests.cli_zoo:factory", "--baseline", slow)

        assert result.exit_code == 0, result.stdout
        assert "48 of 100 samples, batches of 16" in result.stdout
        assert result.stdout.count("  ok      ") == 3
        assert "no contender is slower" in result.stdout

    def test_a_slower_run_ends_with_4_and_names_the_contenders(self, saved: Path, tmp_path: Path) -> None:
        """The line has both rates."""
        fast = rescaled(saved, tmp_path / "fast.json", 1e6, only="ram")

        result = run("tests.cli_zoo:factory", "--baseline", fast, "--tolerance", "1.0")
        strict = run("tests.cli_zoo:factory", "--baseline", fast, "--tolerance", "0.999")
        as_json = run("tests.cli_zoo:factory", "--baseline", fast, "--tolerance", "0.999", "--json")

        assert result.exit_code == 0
        assert strict.exit_code == as_json.exit_code == 4
        slower = [line for line in strict.stdout.splitlines() if line.startswith("  SLOWER")]
        assert len(slower) == 1
        assert "fastload, ram cache, 0 workers, batch 16" in slower[0]
        comparison = json.loads(as_json.stdout)["comparison"]
        assert [one["contender"] for one in comparison["changes"] if one["is_slower"]] == [
            "fastload, ram cache, 0 workers, batch 16"
        ]
        assert not comparison["has_passed"]

    def test_relative_ignores_what_slows_torch_too(self, saved: Path, tmp_path: Path) -> None:
        """A baseline of a machine that is a million times as fast passes, where samples/s fail."""
        fast = rescaled(saved, tmp_path / "fast.json", 1e6)
        plain = json.loads(fast.read_text())
        plain["machine"]["cpu"] = "another processor"
        fast.write_text(json.dumps(plain))

        refused = run("tests.cli_zoo:factory", "--baseline", fast)
        relative = run("tests.cli_zoo:factory", "--baseline", fast, "--relative", "--tolerance", "0.999")

        assert refused.exit_code == 2
        assert "a different machine (another processor" in refused.stderr
        assert relative.exit_code == 0, relative.stdout
        assert "warning: the machine was another processor" in relative.stdout

    def test_other_settings_leave_nothing_to_compare(self, saved: Path) -> None:
        """This is a failure, and both sides are named."""
        result = run("tests.cli_zoo:factory", "--baseline", saved, "--batch-size", "4")

        assert result.exit_code == 1
        assert "  not in this run  torch, 0 workers, batch 16" in result.stdout
        assert "  not in the baseline  torch, 0 workers, batch 4" in result.stdout
        assert "nothing could be compared" in result.stdout


class TestInterruption:
    @pytest.mark.slow
    @pytest.mark.usefixtures("needs_lmdb")
    @pytest.mark.parametrize("as_json", [False, True])
    def test_ctrl_c_shows_what_was_measured_and_leaves_nothing(
        self, as_json: bool, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The exit code of an interruption; no process, no cache and no file."""
        pids, saved = tmp_path / "pids", tmp_path / "result.json"

        def measure_and_interrupt(
            dataset: Any, transform: Any, contender: Contender, path: str | None
        ) -> Epochs:
            if contender.is_torch:
                return Epochs(11.0, 4321.0)
            with fastload.DataLoader(dataset, 4, num_workers=2) as loader:
                batches = iter(loader)
                next(batches)
                workers = [child.pid for child in apart.multiprocessing.active_children()]
                pids.write_text(" ".join(map(str, [os.getpid(), *workers])))
                os.kill(os.getppid(), signal.SIGINT)
                signal.pause()
            raise AssertionError("the run was not interrupted")

        monkeypatch.setattr(measure, "measure", measure_and_interrupt)
        words = ("--workers", "0", "--cache", "lmdb", "--output", saved, *(["--json"] if as_json else []))

        result = run("tests.cli_zoo:factory", *words)

        assert result.exit_code == 130
        assert "interrupted after 1 runs" in result.stderr
        if as_json:
            assert json.loads(result.stdout)["type"] == "KeyboardInterrupt"
        else:
            assert "4,321" in result.stdout
            assert "not run" in result.stdout
        started = list(map(int, pids.read_text().split()))
        assert len(started) == 3
        assert still_running(started, 5.0) == []
        assert not saved.exists()
        assert list(temporary.iterdir()) == []

    def test_sigterm_leaves_nothing(self, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """CI ends a command that takes too long this way."""
        context = multiprocessing.get_context("fork")
        is_awaited, start, receive = context.Event(), context.Process.start, Connection.recv

        def start_unawaited(self: Any) -> None:
            is_awaited.clear()
            start(self)

        def receive_and_tell(self: Any) -> Any:
            is_awaited.set()
            return receive(self)

        def terminate(dataset: Any, path: str, num_workers: int) -> float:
            Path(path).write_bytes(b"a part of a cache")
            is_awaited.wait()  # an exception in a hook of os.fork, which the parent may still run, is lost
            os.kill(os.getppid(), signal.SIGTERM)
            signal.pause()
            return 0.0

        monkeypatch.setattr(context.Process, "start", start_unawaited)
        monkeypatch.setattr(Connection, "recv", receive_and_tell)
        monkeypatch.setattr(measure, "build", terminate)
        before = signal.getsignal(signal.SIGTERM)

        result = run("tests.cli_zoo:factory", *QUICK)

        assert result.exit_code == 128 + signal.SIGTERM
        assert list(temporary.iterdir()) == []
        assert signal.getsignal(signal.SIGTERM) is before
