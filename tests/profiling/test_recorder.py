"""Recorded loaders do what they did before, nothing of the user's is replaced, what is planted is found."""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import json
import multiprocessing.synchronize
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import pytest
import torch
import torch.utils.data
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset, _utils

import fastload
from fastload.cache.file_cache import _stores, forget_stores
from fastload.profiling import sampler
from fastload.profiling.recorder import Profile
from fastload.readers import identity
from fastload.readers.lessons import NUM_LEARNED
from fastload.workers import process
from tests.kit import datasets
from tests.kit.batches import assert_same_batches, stop_workers
from tests.profiling import zoo
from tests.test_rebuilt_loaders import prepared_as_accelerate_does, prepared_as_ray_does

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.kit.processes import Interpreter

pytestmark = pytest.mark.slow  # loops that wait

LOADERS = {"torch": torch.utils.data.DataLoader, "fastload": fastload.DataLoader}
HOOKED: list[tuple[Any, str]] = [
    *((kind, "__iter__") for kind in LOADERS.values()),
    *((process, "main"), (_utils.worker, "_worker_loop")),
]
NOT_HOOKED: list[tuple[Any, str]] = [
    *((builtins, "open"), (A.BasicTransform, "__call__"), (os, "read")),
    *((multiprocessing.synchronize.SemLock, "__enter__"), (_utils.fetch._MapDatasetFetcher, "fetch")),
]


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    """Each test leaves what a profile replaces as it found it."""
    before = [vars(owner)[name] for owner, name in HOOKED]
    switch_s = sys.getswitchinterval()
    yield
    assert all(vars(owner)[name] is one for (owner, name), one in zip(HOOKED, before, strict=True))
    assert sys.getswitchinterval() == switch_s


def make(kind: str, dataset: Any, num_workers: int, **settings: Any) -> Any:
    """A loader of either class."""
    if num_workers and "worker_type" not in settings:
        settings.setdefault("multiprocessing_context", "fork")
    return LOADERS[kind](dataset, batch_size=zoo.BATCH, num_workers=num_workers, **settings)


def batches(loader: Any, num_epochs: int = 1) -> list[Any]:
    """Copies of all batches; afterwards no worker is left."""
    clone = functools.partial(torch.utils._pytree.tree_map_only, torch.Tensor, torch.clone)
    copies = [clone(batch) for _ in range(num_epochs) for batch in loader]
    if isinstance(loader, fastload.DataLoader):
        loader.close()
    stop_workers(getattr(loader, "_iterator", None))
    return copies


def profiled(loader: Any, num_epochs: int = 1) -> Any:
    """The report on some epochs."""
    with fastload.profile(loader) as profile:
        batches(loader, num_epochs)
    return profile.report()


# What is planted, the arguments of its loader, and what the verdict names.
PLANTED: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "a wait in reading": (zoo.SlowRead, {}, "code", "in SlowRead.read"),
    "a transform": (zoo.slow_transform, {}, "code", "in SlowBlur.apply"),
    "a collate_fn": (zoo.Quick, {"collate_fn": zoo.slow_collate}, "code", "in slow_collate"),
    "a stream": (zoo.Stream, {}, "code", "in Stream.__iter__"),
    "a lock": (zoo.Locked, {"num_workers": 2}, "lock", "in Locked.__getitem__"),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("kind", LOADERS)
def test_what_is_planted_is_named(name: str, kind: str) -> None:
    """By the stage, and the user's line, with workers; their time is what the line takes."""
    new, options, stage, said = PLANTED[name]
    report = profiled(make(kind, new(), **{"num_workers": 1, **options}))
    (loader,) = report.loaders
    assert loader.share(stage) > (0.35 if name == "a lock" else 0.7), str(report)
    assert said in loader.lines[0][0]
    assert name == "a lock" or (report.bottleneck(loader), said in report.verdict(loader)) == (stage, True)
    assert loader.make_s > 0.5 * zoo.BATCH * zoo.PLANTED_S


def test_nothing_of_the_user_s_is_replaced() -> None:
    """Neither functions of Python and of libraries nor the dataset's transform, during a profile."""
    before = [vars(owner)[name] for owner, name in NOT_HOOKED]
    dataset = zoo.Quick(lambda image: {"image": image})
    attributes = dict(vars(dataset))
    with fastload.profile():
        iterator = iter(make("torch", dataset, 0))
        next(iterator)
        assert all(vars(owner)[name] is one for (owner, name), one in zip(NOT_HOOKED, before, strict=True))
        assert all(vars(dataset)[name] is value for name, value in attributes.items())


def slow_check(image: Any) -> Any:
    """What only the validation does."""
    threading.Event().wait(0.02)
    return {"image": image}


@pytest.mark.parametrize("kind", LOADERS)
def test_workers_of_loaders_that_are_not_named_are_not_counted(kind: str) -> None:
    """They start while a named one is recorded."""
    training = make(kind, zoo.SlowRead(), 1)
    validation = make(kind, zoo.Quick(slow_check), 1)
    with fastload.profile(training) as profile:
        for number, _batch in enumerate(training):
            if number == 3:
                batches(validation)
    stop_workers(getattr(training, "_iterator", None))
    (loader,) = profile.report().loaders
    assert loader.num_batches == 12
    assert "SlowRead.read" in {each.name for each in loader.stages}
    assert not any("slow_check" in text for each in loader.stages for text in (each.name, *loader.lines))


class Numbers(torch.utils.data.IterableDataset[Any]):
    """Each from one worker."""

    def __iter__(self) -> Iterator[int]:
        info = fastload.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(start, 20, step))


class Nested(zoo.Quick):
    """Each sample is read through a loader of its own."""

    def __getitem__(self, index: int) -> Any:
        inner = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
        return sum(len(batch) for (batch,) in inner), index


MAKERS: dict[str, Callable[..., Any]] = {
    **LOADERS,
    "accelerate": lambda *args, **options: prepared_as_accelerate_does(fastload.DataLoader(*args, **options)),
    "ray": lambda *args, **options: prepared_as_ray_does(fastload.DataLoader(*args, **options)),
}
BATCHES: dict[str, Any] = {"batch_size": zoo.BATCH}
SHUFFLED: dict[str, Any] = BATCHES | {"shuffle": True, "generator": torch.Generator()}
WORKER, WORKERS = BATCHES | {"num_workers": 1}, BATCHES | {"num_workers": 2}
LASTING = SHUFFLED | {"num_workers": 2, "persistent_workers": True}
SERVED = SHUFFLED | {"num_workers": 1, "multiprocessing_context": "forkserver"}
ALONE: dict[str, Any] = {"batch_size": None}
QUICK, STREAM, WORDS = zoo.Quick(), Numbers(), [str(number) for number in range(40)]
# The class, the dataset, settings, and the batches of an epoch.
LOADED: list[tuple[str, Any, dict[str, Any], int]] = [
    *((kind, QUICK, SHUFFLED, 12) for kind in LOADERS),
    *((kind, QUICK, LASTING, 12) for kind in LOADERS),
    *((kind, QUICK, SERVED, 12) for kind in LOADERS),
    ("fastload", QUICK, WORKER | {"worker_type": "thread"}, 12),
    ("fastload", QUICK, BATCHES | {"device": "cpu", "device_transform": list}, 12),
    *((kind, QUICK, BATCHES, 12) for kind in ("accelerate", "ray")),
    ("torch", STREAM, BATCHES, 5),
    *((kind, STREAM, WORKERS, 6) for kind in LOADERS),
    *((kind, QUICK, ALONE | {"num_workers": 1}, 48) for kind in LOADERS),
    ("fastload", WORDS, WORKER | {"collate_fn": list}, 10),
    *((kind, Nested(), WORKER, 12) for kind in LOADERS),
]


@pytest.mark.parametrize(("kind", "dataset", "settings", "num_batches"), LOADED)
def test_batches_are_the_same(kind: str, dataset: Any, settings: Any, num_batches: int) -> None:
    """Values, types and order in two epochs, which one report counts."""
    epochs = []
    for is_recorded in (False, True):
        loader = MAKERS[kind](dataset, **settings)
        SHUFFLED["generator"].manual_seed(3)
        with fastload.profile() if is_recorded else contextlib.nullcontext() as profile:
            epochs.append(batches(loader, 2))
    assert_same_batches(*epochs)
    (report,) = profile.report().loaders
    assert (report.num_epochs, report.num_batches) == (2, 2 * num_batches)
    assert (report.settings["num_samples"] is None) == (dataset is STREAM)
    assert json.loads(json.dumps(profile.report().as_dict()))["version"] == 2


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_are_the_same(kind: str, num_workers: int) -> None:
    """At the same batches, of the same types."""
    loader = make(kind, datasets.Made(datasets.raises), num_workers)
    with fastload.profile(loader):
        iterator = iter(loader)
        assert next(iterator).tolist() == [[0], [1], [2], [3]]
        for error, text in ((ValueError, "five"), (KeyError, "nine")):
            with pytest.raises(error, match=text):
                next(iterator)
        stop_workers(iterator)
        del iterator


@pytest.mark.parametrize("kind", LOADERS)
def test_an_iterator_has_its_length(kind: str) -> None:
    """As scripts that show progress over `iter(loader)` ask for it."""
    loader = make(kind, TensorDataset(torch.arange(2 * zoo.BATCH + 1)), 0)
    with fastload.profile(loader):
        iterator = iter(loader)
        assert len(iterator) == len(list(iterator)) == 3


def test_a_batch_belongs_to_its_own_loop() -> None:
    """Also where a loop over a loader is inside another one over the same loader."""
    loader = make("torch", TensorDataset(torch.arange(2 * zoo.BATCH)), 0)
    with fastload.profile(loader) as profile:
        for _ in loader:
            batches(loader)
    (record,) = profile._records.values()
    assert [step.epoch for step in record.steps] == [0, 1, 1, 0, 2, 2]
    assert all(end_ns > start_ns for start_ns, end_ns in record.epochs)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_threads_and_this_process_are_watched(num_workers: int) -> None:
    """Two loaders at once, in threads: what each makes belongs to it."""
    options: dict[str, Any] = {"worker_type": "thread"} if num_workers else {}
    slow = zoo.slow_transform(), zoo.SlowRead()
    one, other = (make("fastload", dataset, num_workers, **options) for dataset in slow)
    with fastload.profile(one, other) as profile:
        threads = [threading.Thread(target=collections.deque, args=(each, 0)) for each in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    one.close(), other.close()
    names = [
        {"SlowBlur.apply", "SlowRead.read"} & {each.name for each in of.stages}
        for of in profile.report().loaders
    ]
    assert sorted(names, key=sorted) == [{"SlowBlur.apply"}, {"SlowRead.read"}]


class Around:
    """A framework's loader that iterates over another one, as Accelerate's and timm's do."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        yield from self.loader


class Generator(torch.utils.data.DataLoader[Any]):
    """A subclass whose iterator is a generator around torch's."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


def test_loaders_have_the_names_that_the_user_gave_them() -> None:
    """By variables, attributes and unicode, outside of functions of any name; one made anew is one loader."""

    class Trainer:
        def __init__(self) -> None:
            self.validation_data = make("torch", QUICK, 0)

        def run(self) -> None:
            train_loader = make("fastload", QUICK, 0)
            for loader in (self.validation_data, train_loader):
                batches(loader)

    größe = make("torch", QUICK, 0)
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(range(48)), 6, drop_last=False)
    of_a_framework = Around(Generator(QUICK, batch_sampler=sampler))
    trainer = Trainer()
    with fastload.profile() as profile:
        for _ in range(3):
            trainer.run()
        batches(make("torch", datasets.Made(datasets.image), 0))
        batches(größe)
        batches(of_a_framework)
    found = {report.name: report for report in profile.report().loaders}
    names = {"validation_data": 3, "train_loader": 3, "loader": 1, "größe": 1, "of_a_framework": 1}
    assert {name: report.num_epochs for name, report in found.items()} == names
    assert found["of_a_framework"].settings["batch_size"] == 6


DYING = """
import fastload, torch.utils.data
from tests.kit import datasets

for kind in (torch.utils.data.DataLoader, fastload.DataLoader):
    # Samples as they are: torch would fetch tensors from the worker's descriptors, which end at any moment.
    loader = kind(datasets.Made(datasets.killed), 4, num_workers=1, collate_fn=list)
    profile = fastload.profile()
    try:
        with profile:
            list(loader)
    except RuntimeError as error:
        print(type(error).__name__)
    (report,) = profile.report().loaders
    print(0 < report.num_batches <= 3)
    del loader
"""


def test_a_worker_that_dies(interpreter: Interpreter) -> None:
    """The loader's own error; the batches until then are reported."""
    done = interpreter.run(DYING, exits=False)
    assert done.stdout == "RuntimeError\nTrue\nWorkerDiedError\nTrue\n", done.stderr


def test_a_profile_that_begins_in_mid_epoch() -> None:
    """That epoch is not recorded, and goes on; the next one is, until the profile ends."""
    loader = make("torch", QUICK, 1)
    iterator = iter(loader)
    next(iterator)
    with fastload.profile(loader) as profile:
        assert len(list(iterator)) == 11
        iterator = iter(loader)
        next(iterator)
    assert len(list(iterator)) == 11
    assert profile.report().loaders[0].num_batches == 1


def test_a_second_profile_and_an_early_report_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """Each error says what to do; at the end no file is left; without a loader nothing is said."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with fastload.profile() as profile:
        with pytest.raises(RuntimeError, match="end its with block first"):
            fastload.profile().start()
        with pytest.raises(RuntimeError, match="still running"):
            profile.report()
    assert str(profile.report()) == "No DataLoader was used."
    assert profiled(make("fastload", zoo.SlowRead(), 1)).loaders[0].stages
    profile.stop()
    assert list(tmp_path.iterdir()) == []
    assert Profile._current is None


def test_a_recording_that_ends_early_is_read(tmp_path: Path) -> None:
    """In the middle of a line, as of a killed process."""
    (tmp_path / "1.jsonl").write_text('[[[0, 5, 7, [["read", "open", "", 3, 1]]]], []]\n[[[0,')
    assert sampler.read_sums(str(tmp_path)) == ([(0, 5, 7, [["read", "open", "", 3, 1]])], [])


class Resize:
    """Of both images, or of the first."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, images: Any) -> Any:
        return *(image.resize((120, 90)) for image in images[: self.count]), *images[self.count :]


class Crop:
    """A part of both."""

    def __call__(self, images: Any) -> Any:
        return [image.crop((0, 0, 40, 50)) for image in images]


class WithLabels(zoo.Quick):
    """Photographs with labels of their pixels, both of which Pillow opens."""

    def __init__(self, folder: Path, mode: str, *steps: Any) -> None:
        super().__init__()
        self.folder, self.steps = folder, steps
        noise = np.random.default_rng(0).integers(0, 255, (180, 240, 3), np.uint8)
        for number in range(len(self)):
            Image.fromarray(noise).save(folder / f"{number}.jpg")
            Image.fromarray(noise).convert(mode).save(folder / f"{number}.png")

    def __len__(self) -> int:
        return 2 * NUM_LEARNED

    def __getitem__(self, index: int) -> Any:
        images: Any = [Image.open(self.folder / f"{index}.jpg").convert("RGB")]
        images.append(Image.open(self.folder / f"{index}.png"))
        for step in self.steps:
            images = step(images)
        return [np.array(image) for image in images]


@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        ("P", ()),
        ("1", (Crop(),)),
        ("P", (Crop(), Resize(2))),
        ("P", (Resize(1), Crop())),
        ("L", (Resize(2),)),
    ],
    ids=["whole", "bits", "resized crop", "resize", "resize both"],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_memory_that_is_predicted_is_taken(
    mode: str, steps: tuple[Any, ...], num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a twentieth: of whole images, and of those resized first; nothing is stored meanwhile."""
    monkeypatch.setattr(identity, "SETTLED_S", 0.0)
    monkeypatch.setattr(identity, "_file_systems", {})
    monkeypatch.setenv("FASTLOAD_RUNTIME_DIR", str(tmp_path / "runtime"))  # no other process has files in it
    forget_stores()
    dataset, is_resized = WithLabels(tmp_path, mode, *steps), isinstance([*steps, None][0], Resize)
    (found,) = profiled(make("torch", dataset, num_workers)).loaders
    assert not _stores
    assert (found.known_share, found.resized_share > 0) == (1.0, is_resized)
    with make("fastload", dataset, num_workers, cache="ram:64M") as loader:
        for _ in range(3):
            list(loader)
        (store,) = _stores.values()
        assert found.file_bytes == pytest.approx(store.nbytes, rel=0.05)
    forget_stores()


def test_a_loader_that_has_a_cache_is_profiled() -> None:
    """Nothing of its files is counted: the cache counts them."""
    (found,) = profiled(make("fastload", zoo.Quick(), 0, cache="ram:64M")).loaders
    assert (found.num_batches > 0, found.file_bytes) == (True, None)
    forget_stores()


def fit_with_lightning(*args: Any) -> None:
    """Two epochs of a model that learns nothing."""
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

    off = ("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar")
    L.Trainer(max_epochs=2, accelerator="cpu", **dict.fromkeys(off, False)).fit(Model(), *args)


@pytest.mark.thorough  # it imports Lightning
@pytest.mark.filterwarnings("ignore")  # Lightning's: few workers, deprecated functions of its own
def test_loops_of_lightning_are_recorded() -> None:
    """The name is the user's variable."""
    training_data = torch.utils.data.DataLoader(zoo.SlowRead(), batch_size=zoo.BATCH)
    with fastload.profile() as profile:
        fit_with_lightning(training_data)
    (found,) = profile.report().loaders
    assert (found.name, found.num_epochs, found.num_batches) == ("training_data", 2, 24)
    assert "SlowRead.read" in found.lines[0][0]
