"""The GPU checks' own promises, as far as they can be kept without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that runs checks, as the script imports it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_tools")


@pytest.mark.slow
def test_without_a_device_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    """Exit status 2, one line, and older results stay."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path)}
    command = [sys.executable, str(BENCHMARKS / "gpu_checks.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "no CUDA device\n")
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_fails_is_written_down_and_the_next_one_runs(tools: Any, tmp_path: Path) -> None:
    """The error's text goes to the results, and the exit status is 0 as long as one check succeeded."""

    def fails() -> dict[str, Any]:
        raise RuntimeError("no such luck")

    path = tmp_path / "new" / "gpu.json"
    status = tools.run_all({"fails": fails, "works": lambda: {"figure": 7}}, path, limit_s=60)
    found = json.loads(path.read_text())
    assert status == 0
    assert "RuntimeError: no such luck" in found["checks"]["fails"]["error"]
    assert found["checks"]["works"]["result"] == {"figure": 7}
    assert "gpu" in found["machine"]


@pytest.mark.slow
def test_the_training_check_measures_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In miniature, on the CPU: three sources train, and their figures and ratios are there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    training = importlib.import_module("gpu_training")

    def network() -> Any:
        return training.resnet((1, 1), width=4)

    found = training.compare(
        "cpu", network, num_images=24, side=32, batch_size=4, num_steps=8, num_workers=1, runs=1
    )
    assert set(found["figures"]) == {"resident", "fastload", "torch"}
    for (figures,) in found["figures"].values():
        assert figures["losses"]
        assert figures["images_per_s"] > 0
        assert figures["wait_share"] is None
    assert found["fastload / torch (images/s)"] > 0
