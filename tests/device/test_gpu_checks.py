"""The GPU checks' own promises, as far as they can be kept without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_failing_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Status 2 and one line, older results stay; an error's text is written down, and the next check runs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["gpu_checks.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status = importlib.import_module("gpu_checks").main()
    assert (status, capsys.readouterr().out) == (2, "no CUDA device\n")
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "new" / "group.json"
    checks: Any = {
        "fails": mock.Mock(side_effect=RuntimeError("no such luck")),
        "works": lambda: {"figure": 7},
    }
    assert importlib.import_module("gpu_tools").run_all(checks, path) == 0
    found = json.loads(path.read_text())
    assert "RuntimeError: no such luck" in found["fails"]["error"]
    assert found["works"]["result"] == {"figure": 7}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(400)  # a minute on a quiet machine
def test_every_check_runs_through_without_a_device(tmp_path: Path) -> None:
    """On stand-ins, in small: no line of a check fails for any other reason than a missing package."""
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "gpu_checks.py"), "--dry-run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    path = tmp_path / "found.json"
    done = subprocess.run(
        [*command, "--in-process", str(path)], env=environment, capture_output=True, text=True, check=False
    )
    found = json.loads(path.read_text())
    failed = {name: one["error"] for name, one in found.items() if not one["is_ok"]}
    assert all(error.startswith("left out: needs ") for error in failed.values()), failed
    assert len(found) - len(failed) >= 30, done.stdout
    training = found["resnet_50_from_a_cache"]["result"]
    assert set(training["figures"]) == {"resident", "fastload", "torch"}
    assert all(run["losses"] and run["images_per_s"] > 0 for (run,) in training["figures"].values())


def test_a_group_is_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that runs out of its time costs its own checks, which say so; the results are one file."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    checks = importlib.import_module("gpu_checks")
    found = checks.run_group("memory", 0.01, ["torch_pinned_memory"], is_dry=True)
    assert found == {"torch_pinned_memory": {"is_ok": False, "error": "did not end: ended after 0.01 s"}}
    in_groups = [name for _, names in checks.GROUPS.values() for name in names]
    assert sorted(in_groups) == sorted(checks.CHECKS)
