"""Claims of `fastload doctor`: what it finds, says plainly that it cannot know, and leaves alone."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fastload
from fastload.cli import main, source_report
from fastload.training import machine_report
from tests.cli_zoo import NUM_SAMPLES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.processes import Interpreter


def run(*words: str) -> Any:
    """Run `fastload doctor ...` in this process."""
    return CliRunner().invoke(main.app, ["doctor", *words])


def as_json(*words: str) -> Any:
    return json.loads(run(*words, "--json").stdout)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose torch has no CUDA."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)


@pytest.mark.usefixtures("needs_lmdb")
def test_without_a_gpu_all_else_is_found(without_gpu: None) -> None:
    """Versions, CPUs and memory, as one object and as text, which says why GPUs are unknown."""
    found, text = as_json(), run().stdout
    versions = found["versions"]
    assert (versions["fastload"], versions["torch"]) == (fastload.__version__, torch.__version__)
    assert versions["lmdb"] is not None
    assert 1 <= found["num_usable_cpus"] <= found["num_cpus"]
    assert found["memory"]["host_total_bytes"] > found["memory"]["process_rss_bytes"] > 0
    assert found["gpus"] == []
    for line in (
        r"^gpus note +torch .* was built without CUDA",
        r"^  process pss +[\d.,]+ [GM]iB$",
    ):
        assert re.search(line, text, re.MULTILINE)
    verdict = r"no problems: \d+ CPUs?, [\d.,]+ [GM]iB of free memory, no GPUs"
    assert re.match(rf"{verdict}\nversions\n", text)
    assert re.fullmatch(verdict, found["verdict"])


def gpu(index: int, name: str, **found: Any) -> dict[str, Any]:
    """A GPU of which only this is known."""
    unknown = dict.fromkeys(machine_report._FIGURES)
    return {"index": index, "name": name, **unknown, "problem": "", **found}


def test_gpus_are_listed_with_all_that_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that could be measured, and one that could not, with its error."""
    figures = {"total_bytes": 80 << 30, "free_bytes": 79 << 30}
    rates = {"pinned_bytes_per_s": 50e9, "pageable_bytes_per_s": 10e9}
    gpus = [
        gpu(0, "Big", **figures, **rates, page_locking="works"),
        gpu(1, "Full", problem="CUDA out of memory"),
    ]
    monkeypatch.setattr(machine_report, "why_unavailable", lambda index: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(machine_report, "examine_gpu", gpus.__getitem__)
    text = re.sub("  +", "  ", run().stdout)
    for line in ("name  Big", "total  80.00 GiB", "pageable bytes per s  9.31 GiB"):
        assert f"  {line}\n" in text
    assert text.startswith("1 problem: GPU 1: CUDA out of memory\n")
    gpus[0]["page_locking"] = "not allowed"
    assert run().stdout.startswith(
        "2 problems: GPU 0: it cannot read batches in place, which costs a copy: not"
    )
    gpus[0]["page_locking"] = "works"
    assert "  problem  CUDA out of memory" in text
    assert as_json()["gpus"][0]["page_locking"] == "works"
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    fails = Mock(side_effect=RuntimeError("CUDA error: out of memory\nwith many more lines"))
    monkeypatch.setattr(torch.cuda, "device", fails)
    assert machine_report.examine_gpu(1) == gpu(1, "GPU 1", problem="CUDA error: out of memory")


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (RuntimeError("CUDA error: unknown error\nof many lines"), "CUDA error: unknown error"),
        (AssertionError(), "AssertionError"),
        (torch.cuda.DeferredCudaCallError("CUDA call failed lazily"), "CUDA call failed lazily"),
    ],
)
def test_a_gpu_that_does_not_even_say_its_name_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, error: Exception, problem: str
) -> None:
    """It is reported as any other: the report never raises because of a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", Mock(side_effect=error))
    assert machine_report.examine_gpu(3) == gpu(3, "unknown", problem=problem)


@pytest.mark.parametrize(
    ("refusals", "is_pinned", "outcome"),
    [
        ({}, True, "works"),
        ({"register": "cudaHostRegister gave error 801"}, False, "cudaHostRegister gave error 801"),
        ({"unregister": "cudaHostUnregister gave error 713"}, True, "cudaHostUnregister gave error 713"),
        ({}, False, "torch does not treat registered memory as pinned"),
    ],
)
def test_page_locking_works_or_has_its_reason(
    monkeypatch: pytest.MonkeyPatch, refusals: dict[str, str], is_pinned: bool, outcome: str
) -> None:
    """The driver's or the host's; what is registered for the trial is unregistered after it."""
    backend = Mock(**{f"{name}.return_value": refusals.get(name, "") for name in ("register", "unregister")})
    monkeypatch.setattr(machine_report, "choose_backend", lambda index, asker: backend)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: is_pinned)
    assert machine_report.try_page_locking(0) == outcome
    num_calls = 1 if "register" in refusals else 2
    assert [call[0] for call in backend.method_calls] == ["register", "unregister"][:num_calls]
    assert len({call.args[0] for call in backend.method_calls}) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_all_is_measured() -> None:
    """Bandwidths, memory, capability and page-locking of every GPU; the trial leaves no error behind."""
    found, _ = machine_report.machine_report()
    assert found["gpus_note"] == ""
    assert [one["index"] for one in found["gpus"]] == list(range(torch.cuda.device_count()))
    gpus = [one for one in found["gpus"] if not one["problem"]]
    assert all(one["pinned_bytes_per_s"] > 1e8 for one in gpus)
    assert all(0 < one["free_bytes"] <= one["total_bytes"] for one in gpus)
    assert [one["page_locking"] for one in gpus] == ["works"] * len(gpus)
    assert int(torch.ones(3, device="cuda").sum()) == 3  # no error is pending


@pytest.mark.slow
def test_without_proc_the_command_answers(interpreter: Interpreter) -> None:
    """As one JSON object in which resident memory is unknown, like in the text; the machine's is known."""
    program = (
        "import sys; from tests.kit.faults import hide_proc; hide_proc() or sys.exit(77)\n"
        "import fastload; from fastload.cli.main import main\n"
        "import re; assert re.search(r'process rss +unknown', str(fastload.memory_report()))\n"
        "sys.argv = ['fastload', 'doctor', '--json']; main()"
    )
    done = interpreter.run(program)
    if done.returncode == 77:
        pytest.skip("this user may not change what is mounted")
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)["memory"]
    assert memory["process_rss_bytes"] is None
    assert memory["host_total_bytes"] >= memory["host_available_bytes"] > 0


# --- a source ---------------------------------------------------------------------------------------------


def _photos(root: Path, *, num_images: int) -> Path:
    """A folder of JPEGs of noise."""
    folder = root / "photos" / "noise"
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 255, (300, 300, 3), np.uint8)
    for number in range(num_images):
        Image.fromarray(noise).save(folder / f"{number}.jpg")
    return folder.parent


@pytest.mark.parametrize(
    ("ram_bytes", "disk_bytes", "cache"),
    [
        (10**7, 10**9, '"ram"'),
        (800_000, 10**9, '"lmdb:PATH"'),
        (1000, 10**4, "None"),
    ],
)
def test_a_source_has_its_bytes_and_the_line_to_use(
    ram_bytes: int, disk_bytes: int, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of decoded images and of files, from a sample; and the first cache that fits, as code that runs."""
    root = _photos(tmp_path, num_images=6)
    file_bytes = sum(path.stat().st_size for path in root.rglob("*.jpg"))
    monkeypatch.setattr(source_report, "_MAX_SAMPLES", 4)
    monkeypatch.setattr(source_report, "parse_memory", lambda amount: ram_bytes)
    monkeypatch.setattr(source_report.shutil, "disk_usage", lambda path: Mock(free=disk_bytes))
    found, text = as_json(str(root)), run(str(root)).stdout
    assert (found["num_samples"], found["num_read"], found["num_unreadable"]) == (6, 4, 0)
    assert found["decoded_bytes"] == pytest.approx(6 * 300 * 300 * 3, abs=100)
    assert found["file_bytes"] == pytest.approx(file_bytes, rel=0.01)
    assert "6 samples take 1.6 MB decoded, " in text
    assert " as files, estimated from 4\n" in text
    assert text.splitlines()[0] == f"use {found['use']}"  # the verdict comes first
    assert f"cache={cache})" in found["use"]
    by_file = cache if cache != "None" else None
    assert found["loader"] == (f"fastload.DataLoader(dataset, ..., cache={by_file})" if by_file else "")
    made = found["use"].replace("PATH", f"{tmp_path}/photos.lmdb")
    assert len(eval(made, {"fastload": fastload, "transform": None})) == 6


@pytest.mark.parametrize("make", ["pipe", "dangling link", "device", "text", "empty file"])
def test_files_that_cannot_be_read_are_counted(make: str, tmp_path: Path, interpreter: Interpreter) -> None:
    """Whatever has the name of an image; where no file can be read, this is the error. Nothing hangs."""
    root = _photos(tmp_path, num_images=3)
    path = root / "noise" / "other.jpg"
    if make == "pipe":
        os.mkfifo(path)
    elif "link" in make or make == "device":
        path.symlink_to("/dev/zero" if make == "device" else tmp_path / "nowhere")
    else:
        path.write_text("a text" if make == "text" else "")
    found = as_json(str(root))
    assert (found["num_samples"], found["num_unreadable"]) == (4, 1)
    assert "other.jpg" in found["first_error"]
    assert "1 of 4 cannot be read; the first: ImageReadError: " in run(str(root)).stdout
    for image in root.rglob("[0-9].jpg"):
        image.unlink()
    done = run(str(root))
    assert done.exit_code == 1
    assert "other.jpg" in done.stderr


def test_what_is_no_source_is_an_error(tmp_path: Path) -> None:
    """A pipe, a dangling link, a folder without images, and a dataset without samples."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder" / "cat").mkdir(parents=True)
    for name, text in (
        ("pipe", "is neither"),
        ("link", "is neither"),
        ("folder", "Found no valid file"),
        ("folder/cat", "Couldn't find any class folder"),
    ):
        done = run(str(tmp_path / name))
        assert done.exit_code in (1, 2)
        assert text in done.stderr


def test_a_remote_source_is_read_like_a_local_one(tmp_path: Path) -> None:
    """The bytes are the same."""
    root = _photos(tmp_path, num_images=3)
    found, remote = as_json(str(root)), as_json(f"local://{root}")
    assert {**found, "use": 0, "ram_bytes": 0, "disk_bytes": 0} == {
        **remote, "use": 0, "ram_bytes": 0, "disk_bytes": 0
    }  # fmt: skip


def test_a_source_without_undecoded_images() -> None:
    """A dataset of arrays has no files; of random samples and images, only files can be, for a reason."""
    found = as_json("tests.cli_zoo:Plain")
    assert (found["file_bytes"], found["problem"]) == (None, "")
    assert found["use"] == 'fastload.CachedDataset(dataset, transform, cache="ram")'
    found = as_json("tests.cli_zoo:Random")
    assert found["use"] == "fastload.CachedDataset(dataset, transform, cache=None)"
    assert found["loader"] == 'fastload.DataLoader(dataset, ..., cache="ram")'
    assert "Random[0] returns a different sample on every access" in found["problem"]
    first, size, *_, last = run("tests.cli_zoo:Random").stdout.splitlines()
    assert first == f"use {found['loader']}"
    assert "as the dataset returns them" in size
    assert last.startswith("no cache can hold these samples")
    found = as_json("tests.cli_zoo:Opened")
    assert found["loader"] == 'fastload.DataLoader(dataset, ..., cache="ram")'
    assert "numpy.asarray" in found["problem"]


def test_bytes_and_images_of_pillow_count_whole() -> None:
    """Those of a file that a dataset returns as it is, and those of an image's pixels."""
    assert as_json("tests.cli_zoo:Files")["decoded_bytes"] == NUM_SAMPLES * (1000 + 8)
    assert as_json("tests.cli_zoo:Opened")["decoded_bytes"] == NUM_SAMPLES * 6 * 8 * 3
