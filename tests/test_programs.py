"""The programs and pins beside the package: peers of the benchmark, `make test-matrix`, and the clients."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "benchmarks" / "peers"
PINS = ROOT / "tests" / "clients" / "requirements"
PAGE = ROOT / "docs" / "guides" / "frameworks.md"


def imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The folder's run.py as a module; what it imports from there is forgotten after the test."""
    importlib.import_module("torch")  # compiled parts, NumPy's too, can be loaded once in a process
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return importlib.import_module("run")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    return imported(PEERS, monkeypatch)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    return imported(ROOT / "tests" / "compatibility", monkeypatch)


def test_every_contender_has_its_file_and_its_pins(run: Any) -> None:
    """Each row has a configuration, and an environment that the Makefile makes from pinned releases."""
    makefile = (ROOT / "Makefile").read_text()
    for peer in run.PEERS:
        assert (PEERS / f"{peer.module}.py").is_file()
        if peer.environment:
            assert peer.environment in makefile.split("PEERS_ENVIRONMENTS := ")[1].splitlines()[0]
            pins = (PEERS / "requirements" / f"{peer.environment}.txt").read_text().splitlines()
            lines = [line for line in pins if not line.startswith(("#", "-r "))]
            assert lines
            assert all("==" in line for line in lines)


def test_workers_get_equal_shares_of_whole_batches(run: Any) -> None:
    """With all images and with fewer of them, each of two workers has whole batches."""
    for task in run.TASKS:
        for sized in (task, run.fewer(task)):
            assert sized.num_images >= 2 * sized.batch_size
            assert sized.num_images % (2 * sized.batch_size) == 0


def test_photographs_come_from_all_classes(run: Any, tmp_path: Path) -> None:
    """A part of a folder holds each class equally often; a folder that is too small is refused."""
    for path in (tmp_path / name / f"{number}.jpg" for name in "ab" for number in range(4)):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert [label for _, label in run.some_photos(tmp_path, 5)] == [0, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="too few photographs"):
        run.some_photos(tmp_path, 9)


@pytest.mark.parametrize(
    ("wrong", "objection"),
    [
        ({}, ""),
        ({"num_images": 511}, "num_images is 511 instead of 512"),
        ({"labels_sum": 0}, "labels_sum is 0 instead of 256"),
        ({"dtype": "torch.float32"}, "dtype is torch.float32 instead of torch.uint8"),
        ({"shape": [3, 224, 224]}, ""),
        ({"shape": [256, 256, 3]}, "images are of the shape [256, 256, 3]"),
        ({"cannot": "it has no crop"}, "it has no crop"),
    ],
)
def test_wrong_batches_become_the_row(run: Any, tmp_path: Path, wrong: Any, objection: str) -> None:
    """A contender that delivers other images than asked for has a row that says so."""
    task = run.Task("jpeg_folder", "", 512, 0, 64, True)
    job = run.Job(task, tmp_path, [("photo.jpg", index % 2) for index in range(512)], tmp_path)
    right = {"num_images": 512, "labels_sum": 256, "dtype": "torch.uint8", "shape": [224, 224, 3]}
    assert run.objection(right | wrong, job) == objection


# --- make test-matrix ------------------------------------------------------------------------------------


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
        ("<error>No module named 'lmdb'</error><failure message='left'/>", ["lmdb==3.0.0"], "not_run"),
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


# --- docs/guides/frameworks.md ---------------------------------------------------------------------------


def _pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def test_the_table_names_each_client_with_its_pinned_release() -> None:
    """A row for each client, and no other row."""
    clients = (PINS / "shared.txt").read_text().split("# The clients.\n")[1].partition("#")[0]
    pinned = _pins(clients) | {
        "albumentationsx": _pins((PINS / "albumentationsx.txt").read_text())["albumentationsx"]
    }
    rows = dict(re.findall(r"^\| \[[^]]+\]\([^)]+\) \| ([\w-]+) ([\d.]+) \|", PAGE.read_text(), re.MULTILINE))
    assert rows == pinned


def test_each_requirement_is_pinned() -> None:
    """A run of the clients' tests is the same on any day; albumentationsx (AGPL) is in one alone."""
    makefile = (ROOT / "Makefile").read_text()
    environments = makefile.split("CLIENTS_ENVIRONMENTS := ")[1].splitlines()[0]
    for path in PINS.glob("*.txt"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
        assert path.name in makefile or path.stem in environments
    for path in (ROOT / "pyproject.toml", PINS / "shared.txt"):
        assert "albumentationsx==" not in path.read_text().lower()


IMPORT_ALL = """
import importlib, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    try:
        importlib.import_module(path.stem)
    except ModuleNotFoundError as error:
        if error.name not in ("kornia", "ray", "torchvision", "triton"):
            raise
"""


def test_every_benchmark_finds_what_it_imports() -> None:
    """Those of packages that are not installed apart; none of them runs in other tests."""
    folder = ROOT / "benchmarks"
    paths = os.pathsep.join([str(folder), *sys.path])
    command = [sys.executable, "-c", IMPORT_ALL, str(folder)]

    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True)
