"""examples/train.py: each technique can be switched, changes nothing else, and has its row."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.append(str(EXAMPLES))  # as it is for a script that lies there

train = importlib.import_module("train")
train_ablate = importlib.import_module("train_ablate")
train_data = importlib.import_module("train_data")
train_techniques = importlib.import_module("train_techniques")
train_step = importlib.import_module("train_step")

pytestmark = pytest.mark.slow  # most of these tests train a model

TECHNIQUES = train_techniques.TECHNIQUES
CPU = torch.device("cpu")
FIGURES = ("loss", "held_out_loss", "accuracy")
TINY = ["--device", "cpu", "--size", "32", "--width", "8", "--batch-size", "16", "--epochs", "1"]

# Those that a CPU can have and that need no compiler, with how far they may move the loss of an epoch.
EXACT = ("shared_cache", "fastload_loader", "set_to_none", "delete_temporaries", "oom_retry")
CLOSE = ("channels_last", "checkpointing", "foreach_optimizer", "fused_optimizer", "normalize_on_device")
SAME_LOSS = dict.fromkeys([*EXACT, "inference_mode", "debug"], 0.0) | dict.fromkeys(CLOSE, 1e-3)
SAME_LOSS |= {"metrics_on_device": 1e-6, "accumulate_parts": 1e-5, "mixed_precision": 0.1}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of 24 pictures: dark noise and bright noise."""
    root = tmp_path_factory.mktemp("photos")
    for label, (low, high) in {"bright": (120, 256), "dark": (0, 136)}.items():
        (root / label).mkdir()
        for number in range(24):
            pixels = np.random.default_rng(number).integers(low, high, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / label / f"{number}.png")
    return root


@pytest.fixture
def run(photos: Path) -> Callable[..., list[dict[str, Any]]]:
    """Trains on the pictures with these flags; gives the figures of each epoch."""
    return lambda *flags: train.train(*train.parse([*TINY, "--photos", str(photos), *flags]))


def _flag(technique: Any, value: bool) -> str:
    return ("--" if value else "--no-") + technique.name.replace("_", "-")


def _trainer(photos: Path, *flags: str) -> tuple[Any, argparse.Namespace]:
    options, device = train.parse([*TINY, "--photos", str(photos), *flags])
    return train_step.Trainer(options, 2, device), options


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (16, 32, 32, 3), dtype=torch.uint8, generator=generator)
    return images, torch.arange(16) % 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take longer than these tiny models do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- the list -----------------------------------------------------------------------------------------------


def test_each_technique_is_a_flag_that_is_used(monkeypatch: Any, capsys: Any) -> None:
    """--na-me and --no-na-me set the option that the code reads; what a CPU cannot have is said."""
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")  # put back afterwards
    for technique in TECHNIQUES:
        on, device = train.parse(["--device", "cpu", _flag(technique, True)])
        off, _ = train.parse(["--device", "cpu", _flag(technique, False)])
        assert getattr(on, technique.name) is (technique.obstacle(device) is None)
        assert getattr(off, technique.name) is False
    assert "--prefetcher stays off: needs CUDA\n" in capsys.readouterr().out
    code = "".join((EXAMPLES / f"{name}.py").read_text() for name in ("train", "train_data", "train_step"))
    assert [
        technique.name for technique in TECHNIQUES if not re.search(rf"\boptions\.{technique.name}\b", code)
    ] == []
    with pytest.raises(SystemExit, match="2"):
        train.parse(["--steps", "0"])
    assert "argument --steps: expected a number above zero, but got 0" in capsys.readouterr().err


def test_defaults_follow_the_device() -> None:
    """What needs a GPU is on with one and off without; the other defaults do not change."""
    for device in (CPU, torch.device("cuda", 0)):
        options = argparse.Namespace(**dict.fromkeys([technique.name for technique in TECHNIQUES]))
        refused = train_techniques.resolve(options, device)
        assert refused == []
        for technique in TECHNIQUES:
            wanted = (
                device.type == "cuda" if technique.default == train_techniques.CUDA else technique.default
            )
            assert getattr(options, technique.name) is wanted


# --- the run ------------------------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_resumes(run: Callable[..., Any], tmp_path: Path) -> None:
    """Of pictures that were not trained on; an epoch, saved, and two after it end where three do."""
    checkpoint = str(tmp_path / "model.pt")
    history = run("--epochs", "3", "--workers", "0")
    assert [figures["epoch"] for figures in history] == [1, 2, 3]
    assert history[2]["loss"] < history[0]["loss"]
    run("--epochs", "1", "--workers", "0", "--checkpoint", checkpoint)
    resumed = run("--epochs", "3", "--workers", "0", "--resume", checkpoint)
    assert [figures["epoch"] for figures in resumed] == [2, 3]
    assert resumed[1]["loss"] == pytest.approx(history[2]["loss"])


@pytest.mark.parametrize("name", SAME_LOSS)
def test_a_technique_changes_the_way_not_the_result(name: str, run: Any, monkeypatch: Any) -> None:
    """Each technique but those that change the model trains to the same loss, off and on."""
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    technique = next(technique for technique in TECHNIQUES if technique.name == name)
    # Without workers torch's loader seeds no pipeline, and fastload's does: see docs/how-it-works.md.
    workers = "2" if name in ("fastload_loader", "shared_cache") else "0"
    beside = ["--micro-batches", "1", "--workers", workers]
    [[off], [on]] = (run(*beside, _flag(technique, value)) for value in (False, True))
    assert off["loss"] == pytest.approx(on["loss"], abs=SAME_LOSS[name], rel=0)
    if SAME_LOSS[name] == 0:
        assert [off[name] for name in FIGURES] == [on[name] for name in FIGURES]


def test_metrics_stay_on_the_device_until_they_are_read(photos: Path, monkeypatch: Any) -> None:
    """A step calls .item() twice with --no-metrics-on-device, and never without."""
    calls: list[int] = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: (calls.append(1), item(tensor))[1])
    counts = []
    for flag in ("--metrics-on-device", "--no-metrics-on-device"):
        trainer, _ = _trainer(photos, flag)
        calls.clear()
        trainer.step(_batch(), train_step.Metrics())
        counts.append(len(calls))
    assert counts == [0, 2]


def test_debug_finds_the_line_and_starts_no_worker(photos: Path, monkeypatch: Any, capfd: Any) -> None:
    """--debug sets CUDA_LAUNCH_BLOCKING, loads in this process, and a NaN in backward is an error there."""
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    trainer, options = _trainer(photos, "--debug")
    trainer.network.head.register_forward_hook(lambda _module, _inputs, logits: (logits - logits).sqrt() * 0)
    assert os.environ["CUDA_LAUNCH_BLOCKING"] == "1"
    with train_data.Data(options, CPU).train_loader(torch.Generator()) as loader:
        assert loader.loader.num_workers == 0
    warns = pytest.warns(UserWarning, match="SqrtBackward0")
    with warns, pytest.raises(RuntimeError, match="returned nan values"):
        trainer.step(_batch(), train_step.Metrics())


def test_pictures_or_a_device_that_are_not_there_end_with_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    """It names `make photos` and --photos, or the devices that training can use here."""
    with pytest.raises(SystemExit, match=r"`make photos`.*--photos"):
        train.main(["--device", "cpu", "--photos", str(tmp_path / "none")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train.choose_device("auto") == train.parse(["--device", "cuda", "--disable-cuda"])[1] == CPU
    with pytest.raises(SystemExit, match="no GPU here"):
        train.choose_device("cuda")
    for name in ("gpu", "cuda:-1", "", "meta"):
        with pytest.raises(SystemExit, match=f"^--device {name}: expected auto, cpu, cuda or cuda:N$"):
            train.parse(["--device", name])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert train.choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(SystemExit, match=r"^--device cuda:7: the GPUs here are cuda:0, cuda:1$"):
        train.main(["--device", "cuda:7"])


# --- the table ----------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_technique(photos: Path, monkeypatch: Any, capsys: Any) -> None:
    """--ablate prints each technique once: figures for off and on, or why there are none."""
    monkeypatch.setattr(torch, "compile", lambda model: model)  # half a minute of a compiler's time
    for name in ("WARM_UP_STEPS", "PROBE_STEPS"):  # for true figures, which this test does not claim
        monkeypatch.setattr(train_ablate, name, 1)
    quick = ("--workers", "0", "--ablate", "--steps", "1", "--rounds", "1")
    train.main([*TINY, "--photos", str(photos), *quick])
    shown = capsys.readouterr().out
    timed = sum(technique.obstacle(CPU) is None for technique in TECHNIQUES)
    assert f": {timed} techniques x 2 sides, each with " in shown
    assert shown.index("takes about") < shown.index("images/s")
    lines = [re.split("  +", line) for line in shown.splitlines()]
    rows = {cells[0]: cells[1:] for cells in lines if len(cells) > 1 and cells[0] != "technique"}
    assert list(rows) == [technique.name for technique in TECHNIQUES]
    assert "accumulate_parts: both sides with micro_batches=4" in shown
    for technique in TECHNIQUES:
        figures, obstacle = rows[technique.name], technique.obstacle(CPU)
        assert figures[0] == obstacle if obstacle else [cell.count(">") for cell in figures[:3]] == [1] * 3


def test_checkpointing_and_parts_take_less_memory(photos: Path) -> None:
    """The peak of a step, which counts what is alive at once, falls by a fifth at least."""

    def peak(*flags: str) -> int:
        trainer, _ = _trainer(photos, *flags)
        return train_ablate.peak_bytes(lambda: trainer.step(_batch(), train_step.Metrics()), CPU)

    assert train_ablate.peak_bytes(lambda: [torch.empty(1 << 20) for _ in range(2)], CPU) == 8 << 20
    assert train_ablate.peak_bytes(lambda: [torch.empty(1 << 20).sum() for _ in range(2)], CPU) < 5 << 20
    assert peak("--checkpointing") < 0.8 * peak()
    parts = ("--micro-batches", "4")
    assert peak(*parts) < 0.8 * peak(*parts, "--no-accumulate-parts")
