"""The GPU checks' own promises, as far as they can be kept without a GPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

if TYPE_CHECKING:
    import pytest


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
    path = tmp_path / "new" / "gpu.json"
    checks: Any = {
        "fails": mock.Mock(side_effect=RuntimeError("no such luck")),
        "works": lambda: {"figure": 7},
    }
    assert importlib.import_module("gpu_tools").run_all(checks, path, limit_s=60) == 0
    found = json.loads(path.read_text())
    assert "RuntimeError: no such luck" in found["checks"]["fails"]["error"]
    assert found["checks"]["works"]["result"] == {"figure": 7}
    assert "gpu" in found["machine"]
