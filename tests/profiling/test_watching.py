"""Watched loaders do what they did before, and everything is put back."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib
import json
import multiprocessing.queues
from typing import TYPE_CHECKING, Any

import albumentations as A
import pytest
import torch
import torch.utils.data
from PIL import Image
from torch.utils.data import _utils

import fastload
from fastload.batch.fetch import Fetcher
from fastload.profiling import probes
from fastload.profiling.timeline import Machine
from fastload.profiling.watching import AHEAD, NEW, REPLAYED
from fastload.workers import process
from fastload.workers.auto_workers import AutoWorkers
from tests.kit.batches import stop_workers
from tests.profiling import zoo
from tests.profiling.test_culprits import LOADERS, make

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow  # loops that wait

SETTINGS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 1, "multiprocessing_context": "forkserver"},
]


def hooks() -> list[Any]:
    """Everything that a profile replaces."""
    return [
        *(vars(kind)["__iter__"] for kind in LOADERS.values()),
        *(
            vars(kind)["fetch"]
            for kind in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher, Fetcher)
        ),
        vars(torch.utils.data.dataloader._BaseDataLoaderIter)["__next__"],
        vars(multiprocessing.queues)["_ForkingPickler"],
        vars(process)["main"],
        _utils.worker._worker_loop,
        _utils.pin_memory.pin_memory,
        builtins.open,
        A.BasicTransform.__call__,
        Image.Image.convert,
    ]


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    """Each test leaves every hook as it found it."""
    before = hooks()
    yield
    assert all(now is then for now, then in zip(hooks(), before, strict=True))


def batches(loader: Any, num_epochs: int = 2) -> list[Any]:
    """Copies of all batches; afterwards no worker is left."""
    copies = [[part.clone() for part in batch] for _ in range(num_epochs) for batch in loader]
    stop_workers(getattr(loader, "_iterator", None))
    return copies


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", list(LOADERS))
def test_batches_are_the_same(kind: str, settings: dict[str, Any]) -> None:
    """Values and order, with a sampler that shuffles."""

    def new() -> Any:
        return make(
            kind, zoo.SlowTransform(), shuffle=True, generator=torch.Generator().manual_seed(3), **settings
        )

    plain = batches(new())
    with fastload.profile() as profile:
        watched = batches(new())

    assert len(watched) == len(plain) == 48
    assert all(
        torch.equal(a, b) for x, y in zip(plain, watched, strict=True) for a, b in zip(x, y, strict=True)
    )
    (report,) = profile.report().loaders
    assert report.num_batches == 48
    assert report.num_epochs == 2


class Broken(zoo.Quick):
    """One sample cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 9:
            raise OSError("sample 9 is unreadable")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("kind", "num_workers"), [("torch", 0), ("torch", 1), ("fastload", 0), ("fastload", 1)]
)
def test_errors_are_the_same(kind: str, num_workers: int) -> None:
    """At the same batch, of the same type."""
    loader = make(kind, Broken(), num_workers)

    with fastload.profile(loader):
        iterator = iter(loader)
        next(iterator)
        next(iterator)
        with pytest.raises(OSError, match="sample 9 is unreadable"):
            next(iterator)
        stop_workers(iterator)
        del iterator


def test_only_the_named_loaders_are_watched() -> None:
    """Others are used meanwhile, and leave no trace."""
    watched, other = make("torch", zoo.Quick(), 0), make("torch", zoo.Quick(), 0)

    with fastload.profile(watched) as profile:
        for loader in (watched, other):
            batches(loader, 1)

    (report,) = profile.report().loaders
    assert report.name == "watched"
    assert report.num_batches == 24


def test_all_loaders_are_watched_without_names() -> None:
    """Each has a report; a loader made anew for each epoch is one loader."""

    def train() -> None:
        train_loader = make("torch", zoo.Quick(), 0)
        batches(train_loader, 1)

    with fastload.profile() as profile:
        validation = make("fastload", zoo.Quick(), 0)
        for _ in range(3):
            train()
            batches(validation, 1)

    reports = profile.report().loaders
    assert [(report.name, report.num_epochs) for report in reports] == [
        ("train_loader", 3),
        ("validation", 3),
    ]


class Around:
    """A framework's loader that iterates over another one, as Accelerate's does."""

    def __init__(self, loader: Any) -> None:
        self.base_dataloader = loader

    def __iter__(self) -> Any:
        yield from self.base_dataloader


class Generator(torch.utils.data.DataLoader[Any]):
    """A subclass whose iterator is a generator around torch's."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


def test_the_workers_are_those_of_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`num_workers="auto"` chooses them when it begins."""
    monkeypatch.setattr(AutoWorkers, "choose", lambda *_: 5)
    loader = fastload.DataLoader(zoo.Quick(), batch_size=zoo.BATCH, num_workers="auto")
    with fastload.profile() as profile:
        batches(loader, 1)

    (timeline,) = profile._timelines
    assert [timeline.facts[name] for name in ("num_workers", "prefetch_factor")] == [5, 2]


def test_a_loader_inside_a_framework_s_has_the_user_s_name() -> None:
    """The name of the variable that holds the outer one, and the batch size of the batch sampler."""
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(range(96)), 6, drop_last=False)
    train_loader = Around(Generator(zoo.Quick(), batch_sampler=sampler))

    with fastload.profile() as profile:
        batches(train_loader, 1)

    (report,) = profile.report().loaders
    assert (report.name, report.settings["batch_size"]) == ("train_loader", 6)


def test_a_device_loader_counts_each_batch_once() -> None:
    """The outer of two iterators."""
    loader = fastload.DataLoader(zoo.Quick(), batch_size=zoo.BATCH, device="cpu", device_transform=list)

    with fastload.profile(loader) as profile:
        assert len(list(loader)) == 24

    (report,) = profile.report().loaders
    assert report.num_batches == 24
    assert report.stages


def test_a_second_profile_and_a_report_before_the_end_are_refused() -> None:
    """Each error says what to do."""
    with fastload.profile() as profile:
        with pytest.raises(RuntimeError, match="end its with block first"):
            fastload.profile().start()
        with pytest.raises(RuntimeError, match="still running"):
            profile.report()


def test_no_directory_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recordings are removed with the profile."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    with fastload.profile() as profile:
        batches(make("fastload", zoo.Quick(), 1), 1)

    assert profile.report().loaders[0].stages
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "num_workers"), [("torch", 0), ("torch", 2), ("fastload", 2)])
def test_replayed_epochs_keep_their_length(kind: str, num_workers: int) -> None:
    """Stretches of held batches take the place of new ones, which are left at the end."""
    loader = make(kind, zoo.SlowRead(), num_workers)

    profile = fastload.profile(loader, replay=3)
    with profile:
        seen = [[part.clone() for part in batch] for batch in loader]
    steps = list(profile._timelines[0].watched.steps)
    (report,) = profile.report().loaders

    assert len(seen) == len(steps) == 24
    first = steps.index(next(step for step in steps if step.kind == REPLAYED))
    assert first == 6 + 3 * num_workers
    assert [step.kind for step in steps[first : first + 3]] == [REPLAYED] * 3
    assert [batch[1].tolist() for batch in seen[first : first + 3]] == [b[1].tolist() for b in seen[:3]]
    assert {step.kind for step in steps} == ({NEW, REPLAYED, AHEAD} if num_workers else {NEW, REPLAYED})
    assert report.speedup_replayed is not None
    assert report.speedup_replayed > 2


class TestReport:
    """What can be done with a report."""

    @pytest.fixture
    def profile(self) -> fastload.profiling.Profile:
        """A short profile of a slow dataset."""
        loader = make("torch", zoo.SlowTransform(), 0)
        with fastload.profile(loader) as profile:
            batches(loader, 1)
        return profile

    def test_as_json_and_as_text(self, profile: fastload.profiling.Profile) -> None:
        """Plain values only; the text holds the verdict."""
        report = profile.report()
        value = json.loads(json.dumps(report.as_dict()))

        assert value["version"] == 1
        assert value["loaders"][0]["culprit"] == "transform"
        assert report.loaders[0].verdict in str(report)

    @pytest.mark.parametrize(("busy_share", "is_told"), [(0.97, True), (0.5, False), (None, False)])
    def test_a_busy_machine_is_told(
        self, profile: fastload.profiling.Profile, busy_share: float | None, is_told: bool
    ) -> None:
        """If no CPU was free, with the share of other processes."""
        (timeline,) = profile._timelines
        timeline.machine = Machine(2, busy_share, 0.6)

        notes = str(profile.report()).partition("Note: ")[2]

        assert ("60% of them with other processes" in notes) == is_told

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_a_loader_of_few_batches(self, num_workers: int) -> None:
        """No verdict without a steady step, and no list without an entry."""
        loader = make("torch", [torch.ones(3)] * 4, num_workers)
        with fastload.profile(loader) as profile:
            batches(loader, 1)

        lines = str(profile.report()).splitlines()
        assert lines[1] == "  Too few batches for a verdict: 1, all of them during the warm-up."
        with fastload.profile(loader) as profile:
            batches(loader, 2)

        report = dataclasses.replace(profile.report().loaders[0], bottleneck="The bottleneck is unknown.")
        lines = report.lines_of_text()
        assert any("too few batches were made to say" in line for line in lines)
        assert not any(line.endswith(":") for line in lines)

    def test_as_a_trace(self, profile: fastload.profiling.Profile, tmp_path: Path) -> None:
        """Complete events of the loop and of the batches that were made."""
        path = tmp_path / "trace.json"

        profile.save_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]

        names = [event["name"] for event in events if event["ph"] == "X"]
        assert names.count("waiting for data") == names.count("making a batch") == 24
        assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")

    def test_without_a_loader(self, tmp_path: Path) -> None:
        """Nothing to say, and no error."""
        with fastload.profile() as profile:
            pass
        profile.save_trace(str(tmp_path / "empty.json"))

        assert str(profile.report()) == "No DataLoader was used."


def identity(samples: list[Any]) -> list[Any]:
    """A collate_fn."""
    return samples


@pytest.mark.parametrize(("num_workers", "collate"), [(0, None), (1, identity)])
def test_batches_that_are_no_tensors(num_workers: int, collate: Callable[[Any], Any] | None) -> None:
    """Lists of strings have no size, and are measured alike."""
    loader = make("fastload", [str(number) for number in range(40)], num_workers, collate_fn=collate)

    with fastload.profile(loader) as profile:
        assert len(list(loader)) == 10

    assert profile.report().loaders[0].settings["nbytes"] == 0


def test_a_long_profile_keeps_its_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded; the number of batches is that of all."""
    monkeypatch.setattr("fastload.profiling.watching.MAX_STEPS", 30)
    loader = make("torch", zoo.Quick(), 0)

    with fastload.profile(loader) as profile:
        batches(loader, 3)

    (timeline,) = profile._timelines
    assert len(timeline.watched.steps) == 30
    assert profile.report().loaders[0].num_batches == 72


OWN_NAMES = [words for words in (*probes._FUNCTIONS, *probes._METHODS) if words[0].startswith("fastload.")]


@pytest.mark.parametrize("words", OWN_NAMES, ids=lambda words: ".".join(words[:-1]))
def test_what_is_watched_of_fastload_is_there(words: tuple[str, ...]) -> None:
    """The probes name functions by text: one that was renamed would take its stage out of every report."""
    module, *path, _ = words

    assert callable(functools.reduce(getattr, path, importlib.import_module(module)))
