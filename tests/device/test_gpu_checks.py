"""The GPU checks' own promises, as far as they can be kept without a GPU."""

from __future__ import annotations

import importlib
import json
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
def test_the_training_check_measures_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In miniature, on the CPU: three sources train, and their figures and ratios are there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    training = importlib.import_module("gpu_training")
    few = {"num_images": 24, "side": 32, "batch_size": 4, "num_steps": 8, "num_workers": 1, "runs": 1}
    found = training.compare("cpu", lambda: training.resnet((1, 1), width=4), **few)
    assert set(found["figures"]) == {"resident", "fastload", "torch"}
    assert all(one["losses"] and one["images_per_s"] > 0 for (one,) in found["figures"].values())
    assert found["fastload / torch (images/s)"] > 0
