"""The program behind `make test-matrix`: what it installs, and how it counts."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "compatibility"


@pytest.fixture(scope="module")
def program() -> Any:
    """tests/compatibility/run.py as a module."""
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("compatibility_run", FOLDER / "run.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def test_the_oldest_row_has_every_lower_bound(program: Any) -> None:
    """A bound that is raised in pyproject.toml is the one that is installed; torch has its own column."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = (row for row in program.ROWS if row.libraries == "oldest")
    ranges = [*project["dependencies"], *project["optional-dependencies"]["albumentations"]]
    bounds = {text.partition(">=")[0]: text.partition(">=")[2].partition(",")[0] for text in ranges}

    assert f"torch>={oldest.torch.removesuffix('.0')}" in project["dependencies"]
    del bounds["torch"]
    assert {f"{name}=={bound}.*" for name, bound in bounds.items()} <= set(program._libraries(oldest))


@pytest.mark.parametrize(
    ("children", "left_out", "outcome"),
    [
        ("", [], "passed"),
        ("<skipped/>", [], "skipped"),
        ("<failure message='assert 1 == 2'/>", ["lmdb==3.0.0"], "failed"),
        ("<error>No module named 'lmdb'</error>", ["lmdb==3.0.0"], "not_run"),
        ("<error>No module named 'lmdb'</error>", [], "failed"),
        ("<error>No module named 'lmdb'</error><failure message='no'/>", ["lmdb==3.0.0"], "failed"),
    ],
)
def test_only_a_missing_package_excuses_a_failure(
    program: Any, children: str, left_out: list[str], outcome: str
) -> None:
    """And only where one could not be installed."""
    case = ET.fromstring(f"<testcase>{children}</testcase>")

    assert program._outcome(case, left_out) == outcome


def test_interpreters_are_known_by_what_they_answer(program: Any, tmp_path: Path) -> None:
    """The name of a command does not count, and one that fails is not there."""
    shim = tmp_path / "python3.14"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"

    found = program.interpreters([str(shim), sys.executable])

    assert list(found) == [version + ("t" if "t" in sys.abiflags else "")]
