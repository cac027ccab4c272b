"""Planted bottlenecks are named by the verdict, for torch's loader and for fastload's."""

from __future__ import annotations

import inspect
import itertools
import re
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import pytest
import torch
import torch.utils.data
from PIL import Image
from typer.testing import CliRunner

import fastload
from fastload.augmentation import regions
from fastload.cache.file_cache import _stores, forget_stores
from fastload.cli import main
from fastload.profiling import suggestions
from fastload.readers import identity
from fastload.readers.resizes import NUM_LEARNT
from fastload.system.humanize import readable_size
from tests.profiling import zoo

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow  # loops that wait

LOADERS = {"torch": torch.utils.data.DataLoader, "fastload": fastload.DataLoader}


def profiled(loader: Any) -> fastload.profiling.LoaderReport:
    """The report on a loop over a loader."""
    with fastload.profile(loader) as profile:
        for _batch in loader:
            pass
    (report,) = profile.report().loaders
    return report


def make(kind: str, dataset: Any, num_workers: int, **settings: Any) -> Any:
    """A loader of either class."""
    if num_workers and "worker_type" not in settings:
        settings.setdefault("multiprocessing_context", "fork")
    return LOADERS[kind](dataset, batch_size=zoo.BATCH, num_workers=num_workers, **settings)


# What is planted, the arguments of its loader; what the report names and says; and what it suggests.
PLANTED: dict[str, tuple[Any, dict[str, Any], str, str, str]] = {
    "a wait in reading": (zoo.SlowRead, {}, "dataset", "in SlowRead.read", ""),
    "a transform": (zoo.slow_transform, {}, "transform", r"SlowBlur is \d\d%", "transform: .*SlowBlur"),
    "decoding": (zoo.DecodedAndCropped, {}, "decode", "", "regions: .*RandomResizedCrop"),
    "a plain function": (lambda: zoo.Quick(zoo.plain_transform), {}, "transform", "plain_transform", ""),
    "a collate_fn": (zoo.Quick, {"collate_fn": zoo.slow_collate}, "collate", "slow_collate", ""),
    "cold reads": (zoo.ColdOnce, {}, "dataset", "ColdOnce.__getitem__", ""),
    "slow files": (zoo.SlowFile, {}, "read", "", ""),
    "a stream": (zoo.Stream, {}, "dataset", "Stream.__iter__", ""),
}
CLOCKED = ("a plain function", "a collate_fn")


@pytest.mark.parametrize(("number", "name"), list(enumerate(PLANTED)))
@pytest.mark.parametrize("num_workers", [0, 1])
def test_bottlenecks(number: int, name: str, num_workers: int, request: Any, monkeypatch: Any) -> None:
    """What was planted is named, by class, function or line; what would help is suggested."""
    if name in CLOCKED and num_workers == 0:
        request.getfixturevalue("clock")
    if num_workers:  # one, or a slow one could be the bottleneck; receiving may take milliseconds
        monkeypatch.setattr(zoo, "PLANTED_S", 0.02)
        monkeypatch.setattr(zoo, "NUM_SAMPLES", 48)
    new, options, bottleneck, text, suggested = PLANTED[name]
    dataset = new()
    kind = "fastload" if (number + num_workers) % 2 else "torch"
    report = profiled(make(kind, dataset, num_workers, **options))
    assert report.bottleneck == bottleneck
    assert re.search(text, report.bottleneck_text)
    assert re.search(suggested, "\n".join(f"{one.change}: {one.text}" for one in report.suggestions))
    if name == "a plain function":
        assert dataset.transform is zoo.plain_transform  # put back


def test_the_largest_gain_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that gain less than 3% are left out."""
    gains = {"transform": 1.02, "ram": 1.5, "workers": 4.0}

    def planned(*_: Any) -> Any:
        return iter(suggestions.Suggestion(name, "", gain) for name, gain in gains.items())

    for name in [name for name, each in vars(suggestions).items() if inspect.isgeneratorfunction(each)]:
        monkeypatch.setattr(suggestions, name, lambda *_: iter(()))
    monkeypatch.setattr(suggestions, "_caches", planned)
    monkeypatch.setattr(suggestions.LoaderModel, "of", lambda _: None)
    timeline: Any = SimpleNamespace(data_share=0.9, waits=[1.0], warm=[1], start_share=0.0)
    timeline.info = {"num_workers": 2}
    assert [one.change for one in suggestions.suggest(timeline, 0)] == ["workers", "ram"]


@pytest.mark.usefixtures("no_minimum")
def test_no_device_is_advised_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """To normalize there would end in an error."""
    dataset = zoo.Quick(A.Compose([A.Normalize(), A.ToTensorV2()]))
    for reason, is_advised in (("no driver", False), (None, True)):
        monkeypatch.setattr(suggestions, "why_unavailable", lambda _, reason=reason: reason)
        assert ("uint8" in suggested("torch", dataset, 1 << 40)) == is_advised


@pytest.mark.usefixtures("clock")  # beside workers, a busy machine takes its time to send and to receive
@pytest.mark.parametrize("kind", list(LOADERS))
def test_a_slow_consumer_is_not_a_data_problem(kind: str) -> None:
    """No bottleneck, no suggestion."""
    with fastload.profile() as profile:
        for _batch in itertools.islice(make(kind, zoo.Quick(), 0), 8):
            time.sleep(0.2)
    (report,) = profile.report().loaders
    assert "not your bottleneck: " in report.verdict
    assert (report.suggestions, report.bottleneck) == ([], "")


@pytest.fixture
def no_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little a change would gain, it is suggested."""
    monkeypatch.setattr(suggestions, "MIN_GAIN", 0.0)
    monkeypatch.setattr(suggestions, "MIN_DATA_SHARE", 0.0)


def suggested(kind: str, dataset: Any, free_bytes: int) -> dict[str, str]:
    """The texts of the suggested changes, by their names."""
    with fastload.profile() as profile:
        for _ in make(kind, dataset, 0):
            pass
    return {one.change: one.text for one in suggestions.suggest(profile._timelines[0], free_bytes)}


@pytest.mark.parametrize(
    ("dataset", "free_bytes", "changes"),
    [
        (zoo.DecodedAndCropped(), 1 << 40, {"ram", "regions", "files"}),
        (zoo.DecodedAndCropped(), 1, {"lmdb", "regions"}),
        (zoo.SlowRead(), 1, {"lmdb"}),
        (zoo.Quick(A.Compose([A.Normalize(), A.ToTensorV2()])), 1 << 40, {"uint8"}),
    ],
    ids=["ram", "disk", "lmdb", "uint8"],
)
def test_advised_code_runs_as_printed(
    dataset: Any, free_bytes: int, changes: set[str], tmp_path: Path, no_minimum: None, monkeypatch: Any
) -> None:
    """Code and commands, with dataset, root, transform, mean, std and MODULE:NAME filled in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suggestions, "why_unavailable", lambda _: None)
    texts = suggested("torch", dataset, free_bytes)
    names: dict[str, Any] = {name: getattr(fastload, name) for name in ("CachedDataset", "DataLoader")}
    names |= {"fastload": fastload, "dataset": [np.zeros((4, 4, 3), np.uint8)], "transform": len}
    (tmp_path / "root" / "label").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "root" / "label" / "0.jpg")
    names |= {"mean": [0.5], "std": [0.5], "root": tmp_path / "root"}
    assert changes <= texts.keys()
    for text in map(texts.get, changes):
        for command in re.findall(r"run fastload (.*?), and", text):
            words = command.replace("MODULE:NAME", "tests.cli_zoo:Photos").split()
            assert CliRunner().invoke(main.app, words).exit_code == 0
        codes = re.findall(r"(?:CachedDataset[.\w]*|DataLoader)\((?:[^()]|\([^()]*\))*\)", text)
        assert codes, text
        for code in codes:
            eval(code.replace('"cuda"', '"cpu"'), names)


def test_what_remembering_files_takes_is_told(no_minimum: None) -> None:
    """The memory of every decoded image, and nothing where less than a quarter fits or a cache does it."""
    dataset = zoo.DecodedAndCropped()
    text = suggested("fastload", dataset, 1 << 40)["files"]
    assert f"at most {readable_size(600 * 800 * 3 * len(dataset))} of RAM" in text
    assert re.search(r"Decoding is \d+% of the time of making a batch", text)
    assert "files" not in suggested("fastload", dataset, 1 << 20)
    with fastload.DataLoader(dataset, zoo.BATCH, cache="ram") as loader:
        with fastload.profile() as profile:
            list(loader)
        changes = suggestions.suggest(profile._timelines[0], 1 << 40)
    assert "files" not in {one.change for one in changes}


class Resize:
    """Of both images, or of the first."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, images: Any) -> Any:
        return *(image.resize((60, 45)) for image in images[: self.count]), *images[self.count :]


class Crop:
    """A part of both."""

    def __call__(self, images: Any) -> Any:
        return [image.crop((0, 0, 40, 50)) for image in images]


class Steps:
    """One after another, to arrays."""

    def __init__(self, *steps: Any) -> None:
        self.transforms = list(steps)

    def __call__(self, images: Any) -> Any:
        for step in self.transforms:
            images = step(images)
        return [np.array(image) for image in images]


class WithLabels(zoo.Quick):
    """Photographs with labels of their pixels, both of which Pillow opens."""

    def __init__(self, folder: Path, mode: str, *steps: Any) -> None:
        super().__init__(Steps(*steps))
        self.folder = folder
        noise = np.random.default_rng(0).integers(0, 255, (90, 120, 3), np.uint8)
        for number in range(len(self)):
            Image.fromarray(noise).save(folder / f"{number}.jpg")
            Image.fromarray(noise).convert(mode).save(folder / f"{number}.png")

    def __len__(self) -> int:
        return 2 * NUM_LEARNT

    def __getitem__(self, index: int) -> Any:
        image = Image.open(self.folder / f"{index}.jpg").convert("RGB")
        return self.transform([image, Image.open(self.folder / f"{index}.png")])


@pytest.mark.usefixtures("no_minimum")
@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        ("P", ()),
        ("L", (Crop(),)),
        ("1", (Crop(),)),
        ("P", (Crop(), Resize(2))),
        ("P", (Resize(1), Crop())),
        ("L", (Resize(2), Crop())),
    ],
    ids=["whole", "crop", "bits", "resized crop", "resize", "resize both"],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_memory_that_is_predicted_is_taken(
    mode: str, steps: tuple[Any, ...], num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a tenth, where each file is read for one sample: of whole images, and of those resized first."""
    monkeypatch.setenv("FASTLOAD_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("FASTLOAD_VERIFY", "0")  # what is decoded again is not resized by a reader
    monkeypatch.setattr(identity, "SETTLED_S", 0.0)
    monkeypatch.setattr(identity, "_file_systems", {})
    (folder := tmp_path / "images").mkdir()
    dataset = WithLabels(folder, mode, *steps)
    loader = make("torch", dataset, num_workers)
    with fastload.profile() as profile:
        list(loader)
    found = {one.change: one for one in suggestions.suggest(profile._timelines[0], 1 << 40)}
    forget_stores()
    with make("fastload", dataset, num_workers, cache="ram:64M") as loader:
        for _ in range(3):
            list(loader)
        (store,) = _stores.values()
        taken_bytes = store.nbytes
    forget_stores()
    assert found["files"].nbytes == pytest.approx(taken_bytes, rel=0.1)


@pytest.mark.usefixtures("no_minimum")
@pytest.mark.parametrize("kind", list(LOADERS))
def test_collating_without_a_collate_fn_is_not_blamed(kind: str) -> None:
    """Neither default_collate nor fastload's own rows could be cheaper."""
    report = profiled(make(kind, zoo.Quick(), 0))
    assert "collate" not in [one.change for one in report.suggestions]
    assert {stage.name for stage in report.stages if stage.stage == "collate"} <= {
        "fastload",
        "default_collate",
    }


@pytest.mark.parametrize("has_decoder", [False, True])
def test_a_decoder_of_regions_is_suggested_where_it_lacks(
    has_decoder: bool, tmp_path: Path, no_minimum: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a dataset that asks for regions; not where it decodes them."""
    if not has_decoder:
        monkeypatch.setattr(regions, "_codec", lambda: None)
    elif regions.name_of_decoder() is None:
        pytest.skip("needs the extra regions")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (600, 800, 3), np.uint8))
    (tmp_path / "a").mkdir()
    for number in range(24):
        noise.save(tmp_path / "a" / f"{number}.jpg")
    transform = A.Compose([A.RandomResizedCrop((32, 32)), A.HorizontalFlip()])
    dataset = fastload.CachedDataset(fastload.ImageFolder(tmp_path), transform, cache=None)
    texts = suggested("fastload", dataset, 1 << 40)
    assert ("pip install" in texts.get("regions", "")) == (not has_decoder)


@pytest.mark.parametrize("kind", list(LOADERS))
def test_a_worker_or_a_lock_that_others_wait_for_is_named(kind: str) -> None:
    """The worker by its number; where each waits for the others, more workers are not suggested."""
    report = profiled(make(kind, zoo.SlowWorker(), 2))
    assert report.bottleneck == "worker"
    assert "worker 1 takes" in report.bottleneck_text
    report = profiled(make(kind, zoo.Locked(), 2))
    assert report.bottleneck == "lock"
    assert not any(one.change == "workers" for one in report.suggestions)


def fit_with_lightning(*args: Any, with_module: bool = False) -> None:
    """Two epochs of a model that learns nothing; the loader is given, or made by a data module."""
    # Here and last, because its 134 MB make each later fork slower.
    L = pytest.importorskip("lightning")

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _batch_idx: int) -> Any:
            return self.layer(batch[1].float()[:, None]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(zoo.SlowRead(), batch_size=zoo.BATCH)

    off = ("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar")
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", **dict.fromkeys(off, False))
    trainer.fit(Model(), *args, datamodule=Data() if with_module else None)


@pytest.mark.thorough  # it imports Lightning
@pytest.mark.filterwarnings("ignore")  # Lightning's: few workers, deprecated functions of its own
def test_loops_of_lightning_are_recorded() -> None:
    """The waits are measured, and copying to the device; the name is the user's variable."""
    training_data = torch.utils.data.DataLoader(zoo.SlowRead(), batch_size=zoo.BATCH)
    with fastload.profile() as profile:
        fit_with_lightning(training_data)
        fit_with_lightning(with_module=True)
    reports = profile.report().loaders
    found = [(report.name, report.num_epochs, report.num_batches) for report in reports]
    assert found == [("training_data", 2, 48), ("DataLoader", 2, 48)]
    assert all(
        report.bottleneck == "dataset" and "SlowRead.read" in report.bottleneck_text for report in reports
    )
    assert "copy" in reports[0].outside
