"""The GPU checks' own promises, as far as they can be kept without a GPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest

    from tests.kit.processes import Interpreter

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

    def fails() -> dict[str, Any]:
        raise RuntimeError("no such luck")

    path = tmp_path / "new" / "gpu.json"
    checks: Any = {"fails": fails, "works": lambda: {"figure": 7}}
    assert importlib.import_module("gpu_tools").run_all(checks, path, limit_s=60) == 0
    found = json.loads(path.read_text())
    assert "RuntimeError: no such luck" in found["checks"]["fails"]["error"]
    assert found["checks"]["works"]["result"] == {"figure": 7}
    assert "gpu" in found["machine"]


def test_the_training_check_measures_on_any_device(interpreter: Interpreter) -> None:
    """In miniature, on the CPU: three sources train, and their figures and ratios are there."""
    code = f"""
import json, sys, torch
sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu_training as training
torch.set_num_threads(1)
sizes = dict(num_images=8, side=16, batch_size=4, num_steps=4, num_workers=1, runs=1)
print(json.dumps(training.compare("cpu", lambda: training.resnet((1,), width=4), **sizes)))
"""
    found = json.loads(interpreter.run(code, exits=False).stdout)
    assert set(found["figures"]) == {"resident", "fastload", "torch"}
    for (figures,) in found["figures"].values():
        assert figures["losses"]
        assert figures["images_per_s"] > 0
        assert figures["wait_share"] is None
    assert found["fastload / torch (images/s)"] > 0
