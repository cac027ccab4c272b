"""Claims of benchmarks/peers/run.py that need none of the other loaders."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; what it imports from its folder is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [str(PEERS), *sys.path])
    known = set(sys.modules)
    module = importlib.import_module("run")
    yield module
    for name in ("run", "common", "harness"):
        if name not in known:
            sys.modules.pop(name, None)


def photos(folder: Path, each: int) -> Path:
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for number in range(each):
            (folder / name / f"{number:02d}.jpg").touch()
    return folder


def test_every_contender_has_its_file_and_its_pins(run: Any) -> None:
    """Each row has a configuration, and an environment that the Makefile makes from pinned releases."""
    makefile = (PEERS.parents[1] / "Makefile").read_text()
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
    folder = photos(tmp_path / "photos", 4)
    found = run.some_photos(folder, 5)

    assert [label for _, label in found] == [0, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="too few photographs"):
        run.some_photos(folder, 9)


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
def test_wrong_batches_become_the_row(
    run: Any, tmp_path: Path, wrong: dict[str, Any], objection: str
) -> None:
    """A contender that delivers other images than asked for has a row that says so."""
    task = run.Task("jpeg_folder", "", 512, 0, 64, True)
    job = run.Job(task, tmp_path, [("photo.jpg", index % 2) for index in range(512)], tmp_path)
    right = {"num_images": 512, "labels_sum": 256, "dtype": "torch.uint8", "shape": [224, 224, 3]}

    assert run.objection(right | wrong, job) == objection


def test_a_job_survives_its_file(run: Any, tmp_path: Path) -> None:
    """A contender's process reads the job that was written for it."""
    job = run.Job(run.TASKS[3], tmp_path / "images.npy", [("photo.jpg", 3)], tmp_path)
    job.save(tmp_path / "job.json")

    assert run.Job.load(tmp_path / "job.json") == job
    assert job.labels == [3]
