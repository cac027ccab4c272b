"""benchmarks/gate.py: what it promises of its figures, and the rows' own checks."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import fastload

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CHECKOUT = Path(fastload.__file__).parents[1]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, for which no run is disturbed."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("gate")
    monkeypatch.setattr(module, "DISTURBED_CPUS", 1e9)
    return module


@pytest.mark.slow
def test_a_checkout_against_itself(gate: Any, tmp_path: Path) -> None:
    """Every row that was asked for has figures of both sides, and the results say what was measured."""
    path = tmp_path / "gate.json"
    words = [str(CHECKOUT), str(CHECKOUT), "--only", "int, int", "--runs", "1", "--seconds", "0"]
    assert gate.main([*words, "--save", str(path)]) in (0, 1)  # timings never decide a test
    found = json.loads(path.read_text())
    assert found["commits"]["old"] == found["commits"]["new"]
    assert {"date", "machine", "load"} <= set(found)
    (answer,) = found["rows"].values()
    assert "error" not in answer
    assert answer["old"][0] > 0
    assert answer["lowest"] == answer["ratio"] == answer["highest"] == answer["new"][0] / answer["old"][0]


def test_a_process_that_imports_another_checkout_fails(gate: Any, tmp_path: Path) -> None:
    """Its rows have no figure, say why, and do not pass."""
    program = gate.PROGRAMS[-1]
    measured = gate.measure(program, tmp_path, CHECKOUT, gate.Settings("", 0, "", 0.0), 1)
    answer = measured.answer(0, program.rows[0])
    assert f"expected fastload from {tmp_path}, got" in answer["error"]
    assert not answer["passes"]


def test_the_ratio_is_that_of_the_medians(gate: Any) -> None:
    """Its range is that of the runs in pairs, and it passes from the row's floor on."""
    measured = gate.Measured(old=[[1.0], [2.0], [4.0]], new=[[2.0], [1.8], [1.0]])
    answer = measured.answer(0, gate.Row("a row", floor=0.9))
    assert (answer["ratio"], answer["lowest"], answer["highest"]) == (0.9, 0.25, 2.0)
    assert answer["passes"]
    assert not measured.answer(0, gate.Row("a row", floor=0.91))["passes"]


def test_rows_have_names_of_their_own(gate: Any) -> None:
    """The results have one row for each."""
    names = [row.name for program in gate.PROGRAMS for row in program.rows]
    assert len(names) == len(set(names)) > 30


def test_checkouts_take_turns_and_disturbed_programs_run_once_more(
    gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one run of each that does not count; of two measurements, the less disturbed one counts."""
    calls: list[tuple[str, float]] = []

    def run(checkout: Path, _program: Any, settings: Any) -> tuple[list[float], float]:
        calls.append((checkout.name, settings.seconds))
        is_again = len(calls) > 8
        return [2.0 if is_again else 1.0], 0.5 if is_again else 0.75

    monkeypatch.setattr(gate, "run", run)
    monkeypatch.setattr(gate, "DISTURBED_CPUS", 0.1)
    settings = gate.Settings("", 0, "", 3.0)
    (found,) = gate.measure_all(gate.PROGRAMS[-1:], Path("old"), Path("new"), settings, 3)
    turns = ["old", "new", "new", "old", "old", "new"]
    assert calls == 2 * [("old", 0.0), ("new", 0.0), *((name, 3.0) for name in turns)]
    assert (found.old, found.other_cpus, found.is_disturbed) == (3 * [[2.0]], 0.5, True)


def test_a_revision_is_checked_out_and_removed(
    gate: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a worktree of its own; what is neither a revision nor a checkout ends with a sentence."""
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "fastload").mkdir()
    (tmp_path / "fastload" / "__init__.py").touch()
    for words in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "a")):
        subprocess.run((*git, *words), check=True)
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    with contextlib.ExitStack() as stack:
        path = gate.checkout_of("HEAD", stack)
        assert path != tmp_path
        assert (path / "fastload" / "__init__.py").is_file()
        assert gate.checkout_of(str(tmp_path), stack) == tmp_path
    assert not path.exists()
    worktrees = subprocess.run((*git, "worktree", "list"), check=True, capture_output=True, text=True).stdout
    assert len(worktrees.splitlines()) == 1
    with contextlib.ExitStack() as stack, pytest.raises(SystemExit, match="expected a folder with fastload/"):
        gate.checkout_of("no-such-revision", stack)
