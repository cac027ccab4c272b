"""Recorded loaders do what they did before, whatever they are made of, and everything is put back."""

from __future__ import annotations

import builtins
import collections
import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import json
import multiprocessing.queues
import operator
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
import torch.utils.data
from PIL import Image, ImageFile
from torch.utils.data import DataLoader, TensorDataset, _utils

import fastload
from fastload.batch.fetch import Fetcher
from fastload.profiling import hooks, probes, recording, session, spans
from fastload.profiling.probes import _open
from fastload.profiling.spans import Spans, this_thread
from fastload.profiling.timeline import Machine
from fastload.readers import identity
from fastload.rng import entry_points
from fastload.workers import process
from tests.kit import datasets
from tests.kit.batches import assert_same_batches, stop_workers
from tests.profiling import zoo
from tests.profiling.test_bottlenecks import LOADERS, make
from tests.test_rebuilt_loaders import prepared_as_accelerate_does, prepared_as_ray_does

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.kit.processes import Interpreter

pytestmark = pytest.mark.slow  # loops that wait


HOOKED: list[tuple[Any, str]] = [
    *((kind, "__iter__") for kind in LOADERS.values()),
    *((kind, "fetch") for kind in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher)),
    *((Fetcher, "fetch"), (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__")),
    *((multiprocessing.queues, "_ForkingPickler"), (process, "main"), (_utils.worker, "_worker_loop")),
    *((_utils.pin_memory, "pin_memory"), (builtins, "open"), (A.BasicTransform, "__call__")),
    (Image.Image, "convert"),
]


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    """Each test leaves everything that a profile replaces as it found it."""
    entry_points.install()  # which loaders do once in a process, and for good
    before = [vars(owner)[name] for owner, name in HOOKED]
    yield
    assert all(vars(owner)[name] is one for (owner, name), one in zip(HOOKED, before, strict=True))


def batches(loader: Any, num_epochs: int = 1) -> list[Any]:
    """Copies of all batches; afterwards no worker is left."""
    clone = functools.partial(torch.utils._pytree.tree_map_only, torch.Tensor, torch.clone)
    copies = [clone(batch) for _ in range(num_epochs) for batch in loader]
    if isinstance(loader, fastload.DataLoader):
        loader.close()
    stop_workers(getattr(loader, "_iterator", None))
    return copies


def profile_of(loader: Any, num_epochs: int = 1) -> fastload.profiling.Profile:
    """The profile of some epochs, which is over."""
    with fastload.profile(loader) as profile:
        batches(loader, num_epochs)
    return profile


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


class Changed(zoo.Quick):
    """Applies its transform to a tensor."""

    def __getitem__(self, index: int) -> Any:
        part = self.transform[0] if isinstance(self.transform, list) else self.transform
        if isinstance(part, functools.partial):
            assert part.keywords == {"other": 2}
        return torch.as_tensor(part(torch.ones(2)))


class Halved(torch.nn.Module):
    """A module."""

    def forward(self, value: Any) -> Any:
        return value / 2


class Chain:
    """A composition, as torchvision's."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return getattr(value, "content", value)


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
CARRIED = BATCHES | {"max_prefetch_memory": "1GB"}
ALONE: dict[str, Any] = {"batch_size": None}
QUICK, BLURRED = zoo.Quick(), zoo.slow_transform()
STREAM, WORDS = Numbers(), [str(number) for number in range(40)]
# The class, the dataset, settings; the batches of an epoch; and a stage of the report, or the name of one.
LOADED: list[tuple[str, Any, dict[str, Any], int, str]] = [
    *((kind, BLURRED, SHUFFLED, 24, "SlowBlur") for kind in LOADERS),
    *((kind, BLURRED, LASTING, 24, "collate") for kind in LOADERS),
    *((kind, QUICK, SERVED, 24, "collate") for kind in LOADERS),
    ("fastload", QUICK, WORKER | {"worker_type": "thread"}, 24, "collate"),
    ("fastload", QUICK, BATCHES | {"device": "cpu", "device_transform": list}, 24, "collate"),
    *((kind, QUICK, CARRIED, 24, "collate") for kind in ("accelerate", "ray")),
    ("torch", STREAM, BATCHES, 5, ""),
    *((kind, STREAM, WORKERS, 6, "") for kind in LOADERS),
    ("fastload", QUICK, ALONE, 96, ""),
    *((kind, QUICK, ALONE | {"num_workers": 1}, 96, "") for kind in LOADERS),
    ("fastload", WORDS, BATCHES, 10, ""),
    ("fastload", WORDS, WORKER | {"collate_fn": list}, 10, ""),
    ("torch", Nested(), BATCHES, 24, "collate"),
    *((kind, Nested(), WORKER, 24, "collate") for kind in LOADERS),
    ("torch", Changed(Halved()), BATCHES, 24, "Halved"),
    ("torch", Changed(torch.nn.Sequential(Halved())), BATCHES, 24, ""),
    ("torch", Changed(functools.partial(torch.mul, other=2)), BATCHES, 24, "mul"),
    ("torch", Changed(operator.itemgetter(0)), BATCHES, 24, ""),
    ("torch", Changed([Halved()]), BATCHES, 24, ""),
    ("torch", Changed(Chain(torch.neg, Halved(), datasets.Box)), BATCHES, 24, "Halved"),
]


@pytest.mark.parametrize(("kind", "dataset", "settings", "num_batches", "stage"), LOADED)
def test_batches_are_the_same(kind: str, dataset: Any, settings: Any, num_batches: int, stage: str) -> None:
    """Values, types and order in two epochs, which one report counts; the dataset stays as it was."""
    before = dict(getattr(dataset, "__dict__", {}))
    epochs = []
    for is_recorded in (False, True):
        loader = MAKERS[kind](dataset, **settings)
        SHUFFLED["generator"].manual_seed(3)
        with fastload.profile() if is_recorded else contextlib.nullcontext() as profile:
            epochs.append(batches(loader, 2))
    assert len(epochs[1]) == 2 * num_batches
    assert_same_batches(*epochs)
    assert all(vars(dataset)[key] is value for key, value in before.items())
    (report,) = profile.report().loaders
    assert (report.num_epochs, report.num_batches) == (2, 2 * num_batches)
    (timeline,) = profile._timelines
    assert len(timeline.record.steps) == 2 * num_batches
    assert {made.num_samples for own in timeline.batches.values() for made in own} <= {1, 2, zoo.BATCH}
    assert stage in {"", *(word for one in report.stages for word in (one.stage, one.name))}
    assert (report.worker_utilization is None) == ("num_workers" not in settings)
    assert (report.settings["num_samples"] is None) == (dataset is STREAM)
    assert ("batch_size=None" in str(profile.report())) == (settings["batch_size"] is None)
    assert dataset is not WORDS or report.settings["nbytes"] == 0


@pytest.mark.parametrize("kind", list(LOADERS))
@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_are_the_same(kind: str, num_workers: int) -> None:
    """At the same batches, of the same types; afterwards nothing is replaced in this process."""
    loader = make(kind, datasets.Made(datasets.raises), num_workers)
    with fastload.profile(loader):
        iterator = iter(loader)
        assert next(iterator).tolist() == [[0], [1], [2], [3]]
        for error, text in (
            (ValueError, "five"),
            (KeyError, "nine"),
        ):  # the third batch is measured in detail
            with pytest.raises(error, match=text):
                next(iterator)
        stop_workers(iterator)
        del iterator


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
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(range(96)), 6, drop_last=False)
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
    assert "größe" in str(profile.report())
    assert found["of_a_framework"].settings["batch_size"] == 6


@pytest.mark.parametrize(
    ("kind", "options", "is_in_threads"),
    [
        ("torch", {"num_workers": 0}, True),
        ("fastload", {"num_workers": 1}, False),
        ("fastload", {"num_workers": 1, "worker_type": "thread"}, True),
    ],
)
def test_two_loaders_at_once(kind: str, options: dict[str, Any], is_in_threads: bool) -> None:
    """Interleaved, or in threads: steps and batches belong to their own loader, of those that are named."""
    slow = zoo.slow_transform(), zoo.SlowWorker(zoo.plain_transform)
    one, other = (make(kind, dataset, **options) for dataset in slow)
    with fastload.profile(one, other) as profile:
        if is_in_threads:
            threads = [threading.Thread(target=list, args=(loader,)) for loader in (one, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            collections.deque(zip(one, other, strict=True), maxlen=0)
        batches(make("torch", QUICK, 0))  # not recorded: it is not named
    if kind == "fastload":
        one.close(), other.close()
    found = profile.report().loaders
    names = [{"SlowBlur", "plain_transform"} & {stage.name for stage in report.stages} for report in found]
    assert [report.num_batches for report in found] == [24, 24]
    assert sorted(names, key=sorted) == [{"SlowBlur"}, {"plain_transform"}]


@pytest.mark.usefixtures("clock")
def test_the_inner_of_nested_loops_is_computing_of_the_outer() -> None:
    """Its waits are no waits of the outer loop."""
    outer, inner = make("torch", QUICK, 0), make("torch", zoo.SlowRead(), 0)
    with fastload.profile() as profile:
        for number, _batch in enumerate(outer):
            if number < 3:
                for _other in inner:
                    pass
    found = {report.name: report for report in profile.report().loaders}
    assert (found["outer"].num_batches, found["inner"].num_batches) == (24, 72)
    assert found["outer"].data_share < found["inner"].data_share


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


def test_an_error_while_the_recordings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler may raise there, as torch's does when a worker dies; the report is made."""
    read = session.read_recordings
    calls: list[str] = []

    def interrupted(directory: str) -> Any:
        calls.append(directory)
        if len(calls) == 1:
            raise RuntimeError("a worker is killed")
        return read(directory)

    monkeypatch.setattr(session, "read_recordings", interrupted)
    profile = fastload.profile()
    with pytest.raises(RuntimeError, match="a worker is killed"), profile:
        list(make("torch", QUICK, 0))
    assert profile.report().loaders[0].num_batches == 24
    assert not os.path.exists(calls[0])


@pytest.mark.parametrize("kind", list(LOADERS))
def test_workers_that_were_started_before(kind: str) -> None:
    """Nothing is known of their work, so that no change of it is suggested."""
    loader = make(kind, zoo.SlowRead(), 1, persistent_workers=True)
    next(iter(loader))
    (report,) = profile_of(loader).report().loaders
    assert report.num_batches == 24
    assert "Nothing was recorded" in report.verdict
    assert report.suggestions == []


def test_a_profile_that_begins_in_mid_epoch() -> None:
    """That epoch is not recorded, and goes on; the next one is."""
    loader = make("torch", QUICK, 1)
    iterator = iter(loader)
    next(iterator)
    with fastload.profile(loader) as profile:
        assert len(list(iterator)) == 23
        iterator = iter(loader)
        next(iterator)
    assert len(list(iterator)) == 23
    assert profile.report().loaders[0].num_batches == 1


@pytest.mark.usefixtures("clock")
def test_a_long_profile_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batches are recorded, and times per batch are theirs; the last steps; the number of all."""
    monkeypatch.setattr("fastload.profiling.recorder.MAX_STEPS", 30)
    monkeypatch.setattr(recording, "MAX_LINES", 8)
    monkeypatch.setattr("fastload.profiling.spans.MAX_STRIDE", 1)
    profile = profile_of(make("torch", zoo.slow_transform(), 0), 3)
    (report,) = profile.report().loaders
    assert report.num_batches == 72
    assert len(profile._timelines[0].record.steps) == 30
    assert sum(stage.ms_per_batch for stage in report.stages) < 2 * report.make_ms


def test_a_second_profile_and_an_early_report_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """Each error says what to do; at the end recordings are removed; without a loader nothing is said."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with fastload.profile() as profile:
        with pytest.raises(RuntimeError, match="end its with block first"):
            fastload.profile().start()
        with pytest.raises(RuntimeError, match="still running"):
            profile.report()
    assert str(profile.report()) == "No DataLoader was used."
    assert profile_of(make("fastload", QUICK, 1)).report().loaders[0].stages
    assert list(tmp_path.iterdir()) == []


def test_a_report_as_values_and_as_text() -> None:
    """Plain values, and text with the verdict."""
    profile = profile_of(make("torch", zoo.slow_transform(), 0))
    report = profile.report()
    value = json.loads(json.dumps(report.as_dict()))
    assert value["version"] == 1
    assert value["loaders"][0]["bottleneck"] == "transform"
    assert report.loaders[0].verdict in str(report)


@pytest.mark.parametrize(("busy_share", "is_told"), [(0.97, True), (0.5, False), (None, False)])
def test_a_busy_machine_is_told(busy_share: float | None, is_told: bool) -> None:
    """If no CPU was free, with the share of other processes."""
    profile = profile_of(make("torch", QUICK, 0))
    profile._timelines[0].machine = Machine(2, busy_share, 0.6)
    notes = str(profile.report()).partition("Note: ")[2]
    assert ("60% of them with other processes" in notes) == is_told


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_of_few_batches(num_workers: int) -> None:
    """No verdict without a steady step, and no list without an entry."""
    loader = make("torch", [torch.ones(3)] * 4, num_workers)
    lines = str(profile_of(loader).report()).splitlines()
    assert lines[0].endswith(": Too few batches for a verdict: 1, all of them during the warm-up.")
    (report,) = profile_of(loader, 2).report().loaders
    report = dataclasses.replace(report, bottleneck_text="The bottleneck is unknown.")
    lines = report.lines_of_text()
    assert any("too few batches were made to say" in line for line in lines)
    assert not any(line.endswith(":") for line in lines)


NAMES: tuple[tuple[str, ...], ...] = (*probes.FUNCTIONS, *probes.METHODS, *hooks.COPIES)
OWN_NAMES = [words for words in NAMES if words[0].startswith("fastload.")]


@pytest.mark.parametrize("words", OWN_NAMES, ids=lambda words: ".".join(words[:-1]))
def test_what_is_recorded_of_fastload_is_there(words: tuple[str, ...]) -> None:
    """Probes and hooks name functions by text: after a renaming, no report would have that stage."""
    module, *path, name, _ = words
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    assert callable(vars(owner)[name])


THROUGH_PATHLIB = """
import cv2, numpy, pathlib
def read(path): return cv2.imdecode(numpy.frombuffer(pathlib.Path(path).read_bytes(), "uint8"), 1)
"""


THROUGH_OS = """
import os
from os import open, pread
def read(path):
    fd = open(path, os.O_RDONLY)
    try:
        return pread(fd, 9, 0) + os.read(fd, 9)
    finally:
        os.close(fd)
"""


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("from cv2 import imread\ndef read(path): return imread(path)\n", {"decode"}),
        ("import PIL.Image\ndef read(path): return PIL.Image.open(path).convert('L')\n", {"decode", "read"}),
        (THROUGH_PATHLIB, {"decode", "read"}),
        (THROUGH_OS, {"read"}),
        ("import numpy\ndef read(path): return numpy.memmap(path, mode='r')[:9]\n", {"read"}),
        ("import io\ndef read(path):\n    with io.open(path, 'rb') as f: return f.read()[:9]\n", {"read"}),
    ],
    ids=["cv2", "PIL", "pathlib", "os", "memmap", "io"],
)
def test_functions_that_a_module_imports(tmp_path: Path, monkeypatch: Any, text: str, stages: Any) -> None:
    """Reading and decoding are told apart, however the module names the functions; they read the same."""
    path = tmp_path / "image.png"
    Image.fromarray(np.full((64, 64, 3), 7, np.uint8)).save(path)
    (tmp_path / "module_of_mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "module_of_mine", raising=False)
    module = importlib.import_module("module_of_mine")
    loader = DataLoader(datasets.Made(lambda _: np.asarray(module.read(str(path))).tobytes()), 4)
    plain = list(loader)
    with fastload.profile() as profile:
        assert list(loader) == plain
    del sys.modules["module_of_mine"]
    (report,) = profile.report().loaders
    assert stages <= {stage.stage for stage in report.stages}
    assert getattr(module, "imread", cv2.imread) is cv2.imread


class Opened(datasets.Made):
    """A photograph, opened by Pillow; or a picture, read by OpenCV."""

    def __init__(self, folder: Path, reads: Callable[[str], Any]) -> None:
        super().__init__(lambda index: np.array(reads(f"{folder}/{index % 8}.jpg"))[:8, :8], 24)


def by_pillow(path: str) -> Any:
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")


def by_opencv(path: str) -> Any:
    return cv2.imread(path)


@pytest.fixture
def photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of eight, which count as unchanged at once."""
    monkeypatch.setattr(identity, "SETTLED_S", 0.0)
    monkeypatch.setattr(identity, "_file_systems", {})
    for number in range(8):
        Image.fromarray(np.full((300, 300, 3), number, np.uint8)).save(tmp_path / f"{number}.jpg")
    return tmp_path


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", list(LOADERS))
def test_opened_files_are_seen_beside_a_loader_that_remembers(
    kind: str, num_workers: int, photographs: Path
) -> None:
    """Loading and converting count once for each file, whether or not Pillow's methods are replaced."""
    dataset, seen = Opened(photographs, by_pillow), []
    for is_beside_another in (False, True):
        loader = make(kind, dataset, num_workers)
        with contextlib.ExitStack() as stack:
            if is_beside_another:
                other = stack.enter_context(fastload.DataLoader(dataset, 4, cache="ram:16M"))
                list(other)
            (timeline,) = profile_of(loader)._timelines
        loaded = {part.name: part for part in timeline.stages if part.stage == probes.DECODE}
        part = loaded["ImageFile.load JPEG"]
        seen.append((part.num_calls, part.nbytes, loaded["Image.convert"].num_calls))
        stop_workers(loader)
    assert seen == [(4, 300 * 300 * 3, 4)] * 2


@pytest.mark.parametrize("reads", [by_pillow, by_opencv])
def test_what_a_loader_remembers_is_not_decoded_for_a_profile(
    reads: Callable[[str], Any], photographs: Path
) -> None:
    """Measured batches take files from memory, too, and libraries' functions are their own afterwards."""
    originals = Image.open, vars(Image.Image)["convert"], vars(ImageFile.ImageFile)["load"]
    with fastload.DataLoader(Opened(photographs, reads), 4, cache="ram:16M") as loader:
        profile_of(loader)
        stats = loader.stats()
        assert (stats.cache_misses, stats.cache_hits) == (8, len(loader.dataset) - 8)
    assert originals == (Image.open, vars(Image.Image)["convert"], vars(ImageFile.ImageFile)["load"])


@pytest.mark.parametrize("has_faults", [False, True])
def test_waiting_for_mapped_pages_is_reading(has_faults: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An access to a mapped file calls nothing: the kernel counts the pages that it read for the thread."""
    faults = itertools.count(step=int(has_faults))
    monkeypatch.setattr(spans, "_num_page_faults", lambda: next(faults))
    (report,) = profile_of(DataLoader(zoo.SlowRead(), 4)).report().loaders
    (largest, *_) = report.stages
    assert (largest.stage, largest.name) == (spans.MAPPED_FILES if has_faults else spans.OWN_CODE)


NOTEBOOK = """
import sys, types
import torch, fastload
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
cell = '''
import time
import cv2
from cv2 import imread
from torch.utils.data import DataLoader
from tests.kit.datasets import Made
cv2.imwrite("image.png", __import__("numpy").zeros((8, 8, 3), "uint8"))

def read(_index):
    time.sleep(0.002)
    return imread("image.png")

images = DataLoader(Made(read, 40), batch_size=4)
with fastload.profile() as profile:
    for batch in images:
        pass
'''
vars(main)["fastload"] = fastload
exec(compile(cell, "<ipython-input-1>", "exec"), vars(main))
(report,) = main.profile.report().loaders
print(report.name, report.lines[0][0], "decode" in [stage.stage for stage in report.stages])
"""


def test_a_notebook(interpreter: Interpreter, tmp_path: Path) -> None:
    """The cell's lines are the user's, and `from cv2 import imread` in a cell is seen."""
    done = interpreter.run(NOTEBOOK, cwd=tmp_path, exits=False)
    assert done.stdout == "images <ipython-input-1>:10 in read True\n", done.stderr


OPEN = open


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with some lines, while a batch is measured in detail."""
    monkeypatch.setattr(this_thread, "spans", Spans())
    (tmp_path / "lines.txt").write_bytes(b"one\r\ntwo\n" * 3000)
    return tmp_path / "lines.txt"


def descriptor(path: Path) -> int:
    return os.open(path, os.O_RDONLY)


def described(function: Any, place: Any, *args: Any, **options: Any) -> Any:
    """What can be seen of a file object, and its contents; or of the error."""
    try:
        opened = function(place, *args, **options)
    except Exception as error:  # noqa: BLE001  # any error
        return (
            type(error),
            str(error),
            *(getattr(error, name, 0) for name in ("errno", "strerror", "filename")),
        )
    with opened:
        kind = io.FileIO if isinstance(opened, io.FileIO) else type(opened)
        properties = [
            getattr(opened, name, None) for name in ("name", "mode", "encoding", "errors", "newlines")
        ]
        properties += [
            opened.readable(),
            opened.writable(),
            opened.seekable(),
            opened.isatty(),
            opened.closed,
        ]
        properties += [opened.readline(), opened.tell(), opened.seek(5), opened.read(), opened.read()]
    with pytest.raises(ValueError, match="closed file") as caught:
        opened.read()
    return kind, *properties, str(caught.value), opened.closed


@pytest.mark.parametrize(
    ("place", "args", "options"),
    [
        *((str, args, {}) for args in ((), ("rb",), ("rb", 16), ("r+b",))),
        *((os.fsencode, ("r", 1), {"newline": ""}), (os.fsencode, ("rb",), {})),
        *((Path, ("rb",), {"buffering": 0}), (Path, ("br", -1, None, None, None), {})),
        (str, ("rb",), {"closefd": True, "opener": os.open}),
        (descriptor, ("rb",), {"closefd": False}),
        (lambda path: np.int64(descriptor(path)), ("rb",), {"closefd": False}),
        *((lambda _, place=place: place, ("rb",), {}) for place in ("absent", ".", 1.5, "a\0b")),
        *(
            (lambda _: "absent", args, {})
            for args in (("q",), ("rb", 0, "utf-8"), ("rb", -1, None, None, None, False))
        ),
    ],
)
def test_open_is_open(file: Path, place: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Types, attributes, contents, errors with their texts; a descriptor stays open if it is to stay open."""
    found = []
    for function in (_open, OPEN):
        found.append(described(function, given := place(file), *args, **options))
        if isinstance(given, (int, np.int64)):
            os.close(given)
    assert found[0] == found[1]
