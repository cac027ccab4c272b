"""Unusual loaders and datasets: a profile changes nothing, and finds the right loader and stage."""

from __future__ import annotations

import collections
import functools
import gzip
import importlib.util
import io
import operator
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fastload
from fastload.profiling import recording, session
from fastload.profiling.probes import _open
from fastload.profiling.spans import Spans, here
from tests.kit.batches import stop_workers
from tests.profiling import zoo
from tests.profiling.test_culprits import LOADERS, make
from tests.test_rebuilt_loaders import prepared_as_accelerate_does, prepared_as_ray_does

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator

    from tests.kit.processes import Interpreter


pytestmark = pytest.mark.slow  # loops that wait


def by_name(profile: fastload.profiling.Profile) -> dict[str, fastload.profiling.LoaderReport]:
    """The reports by their loaders' names."""
    return {report.name: report for report in profile.report().loaders}


def stop(loader: Any) -> None:
    """End persistent workers."""
    if isinstance(loader, fastload.DataLoader):
        loader.close()
    else:
        stop_workers(loader._iterator)


# Several loaders at once


@pytest.mark.parametrize("is_in_threads", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("torch", {"num_workers": 0}),
        ("fastload", {"num_workers": 1}),
        ("fastload", {"num_workers": 1, "worker_type": "thread"}),
    ],
)
def test_two_loaders_at_once(kind: str, options: dict[str, Any], is_in_threads: bool) -> None:
    """Interleaved, or in two threads: steps and batches belong to the loader whose workers they are."""
    one = LOADERS[kind](zoo.SlowTransform(), batch_size=zoo.BATCH, **options)
    other = LOADERS[kind](zoo.SlowFunction(), batch_size=zoo.BATCH, **options)
    with fastload.profile(one, other) as profile:
        if is_in_threads:
            threads = [threading.Thread(target=list, args=(loader,)) for loader in (one, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            collections.deque(zip(one, other, strict=True), maxlen=0)
    stop(one)
    stop(other)

    names = {one.dataset: {stage.name for stage in one.stages} for one in profile.report().loaders}
    assert [report.num_batches for report in profile.report().loaders] == [24, 24]
    assert "SlowBlur" in names["SlowTransform"] - names["SlowFunction"]
    assert "plain_transform" in names["SlowFunction"] - names["SlowTransform"]


class Nested(zoo.Quick):
    """Each sample is read through a loader of its own."""

    def __getitem__(self, index: int) -> Any:
        inner = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
        return sum(len(batch) for (batch,) in inner), index


@pytest.mark.parametrize(("kind", "num_workers"), [("torch", 0), ("torch", 1), ("fastload", 1)])
def test_a_loader_inside_a_dataset(kind: str, num_workers: int) -> None:
    """It is part of the outer loader's batches, in this process and in a worker."""
    loader = make(kind, Nested(), num_workers)
    with fastload.profile() as profile:
        first = next(iter(loader))
        assert first[0].tolist() == [8] * zoo.BATCH
        num_batches = 1 + len(list(loader))

    (timeline,) = profile._timelines
    assert len(timeline.watched.steps) == num_batches
    assert all(made.num_samples == zoo.BATCH for own in timeline.batches.values() for made in own)


@pytest.mark.usefixtures("clock")
def test_nested_loops() -> None:
    """The inner loop is computing of the outer one."""
    outer = make("torch", zoo.Quick(), 0)
    inner = make("torch", zoo.SlowRead(), 0)
    with fastload.profile() as profile:
        for number, _batch in enumerate(outer):
            if number < 3:
                for _other in inner:
                    pass

    reports = by_name(profile)
    assert (reports["outer"].num_batches, reports["inner"].num_batches) == (24, 72)
    assert reports["outer"].data_share < reports["inner"].data_share


def test_workers_of_a_forked_process_record_nothing() -> None:
    """A process that the script forks may have loaders with workers; they are not watched."""
    loader = make("torch", zoo.Quick(), 1)
    with fastload.profile(loader) as profile:
        list(loader)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if len(list(loader)) == 24 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    (timeline,) = profile._timelines
    assert sum(map(len, timeline.batches.values())) == 24


# Loaders of other kinds


class Counted(IterableDataset[Any]):
    """Numbers, each from one worker."""

    def __iter__(self) -> Iterator[int]:
        info = fastload.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(start, 20, step)


@pytest.mark.parametrize(("kind", "num_workers"), [("torch", 0), ("torch", 2), ("fastload", 2)])
def test_streams(kind: str, num_workers: int) -> None:
    """All samples come once, and each batch is counted."""
    stream = make(kind, Counted(), num_workers)
    with fastload.profile() as profile:
        found = [value for batch in stream for value in batch.tolist()]

    assert sorted(found) == list(range(20))
    (report,) = profile.report().loaders
    assert report.num_batches == (5 if num_workers == 0 else 6)
    assert report.settings["num_samples"] is None


@pytest.mark.parametrize(("kind", "num_workers"), [("torch", 1), ("fastload", 0), ("fastload", 1)])
def test_samples_without_batches(kind: str, num_workers: int) -> None:
    """batch_size=None."""
    samples = LOADERS[kind](zoo.Quick(), batch_size=None, num_workers=num_workers)
    with fastload.profile() as profile:
        assert len(list(samples)) == zoo.NUM_SAMPLES

    assert "batch_size=None" in str(profile.report())


@pytest.mark.parametrize("prepare", [prepared_as_accelerate_does, prepared_as_ray_does])
def test_loaders_that_frameworks_build_again(prepare: Callable[[Any], Any]) -> None:
    """Torch's loader around our collate function gives the same batches, and is one loader in two epochs."""
    ours: Any = fastload.DataLoader(zoo.Quick(), batch_size=zoo.BATCH, memory_format=torch.channels_last)
    plain = list(prepare(ours))
    with fastload.profile() as profile:
        watched = [batch for _ in range(2) for batch in prepare(ours)]

    assert all(
        torch.equal(a, b) for x, y in zip(plain * 2, watched, strict=True) for a, b in zip(x, y, strict=True)
    )
    (report,) = profile.report().loaders
    assert (report.num_epochs, report.num_batches) == (2, 48)
    assert "collate" in {stage.stage for stage in report.stages}


def test_names() -> None:
    """Attributes of the caller, general names, and unicode; a name of any length."""

    class Trainer:
        def __init__(self) -> None:
            self.validation_data = make("torch", zoo.Quick(), 0)

        def run(self) -> None:
            for _batch in self.validation_data:
                pass

    def of_any(loader: Any) -> None:
        for _batch in loader:
            pass

    größe = make("torch", zoo.SlowRead(), 0)
    with fastload.profile() as profile:
        Trainer().run()
        of_any(make("torch", zoo.SlowFunction(), 0))
        of_any(größe)

    assert [report.name for report in profile.report().loaders] == ["validation_data", "loader", "größe"]
    assert "größe" in str(profile.report())


# The ends of workers and loops


class Dies(zoo.Quick):
    """Its worker is killed."""

    def __getitem__(self, index: int) -> Any:
        if index == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


DYING = """
import sys
from tests.profiling import test_attacks, test_culprits
import fastload
# Samples as they are: torch would fetch tensors from the worker's descriptors, which end at any moment.
loader = test_culprits.make(sys.argv[1], test_attacks.Dies(), 1, collate_fn=list)
profile = fastload.profile()
try:
    with profile:
        list(loader)
except RuntimeError as error:
    print(type(error).__name__)
(report,) = profile.report().loaders
print(0 < report.num_batches <= 5)
"""


@pytest.mark.parametrize(("kind", "error"), [("torch", "RuntimeError"), ("fastload", "WorkerDiedError")])
def test_a_worker_that_dies(interpreter: Interpreter, kind: str, error: str) -> None:
    """The loader's own error; the batches until then are reported."""
    done = interpreter.run(DYING, kind, exits=False)

    assert (done.returncode, done.stdout) == (0, f"{error}\nTrue\n"), done.stderr


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
    loader = make("torch", zoo.Quick(), 0)
    profile = fastload.profile(loader)
    with pytest.raises(RuntimeError, match="a worker is killed"), profile:
        list(loader)

    assert profile.report().loaders[0].num_batches == 24
    assert not os.path.exists(calls[0])


@pytest.mark.parametrize("kind", list(LOADERS))
def test_workers_that_were_started_before(kind: str) -> None:
    """Nothing is known of their work, so that no change of it is suggested."""
    loader = make(kind, zoo.SlowRead(), 1, persistent_workers=True)
    next(iter(loader))
    with fastload.profile(loader) as profile:
        list(loader)

    (report,) = profile.report().loaders
    assert report.num_batches == 24
    assert "Nothing was recorded" in report.verdict
    assert report.suggestions == []
    stop(loader)


def test_a_profile_that_begins_in_mid_epoch() -> None:
    """That epoch is not watched, and goes on; the next one is."""
    loader = make("torch", zoo.Quick(), 1)
    iterator = iter(loader)
    next(iterator)
    with fastload.profile(loader) as profile:
        assert len(list(iterator)) == 23
        iterator = iter(loader)
        next(iterator)
    assert len(list(iterator)) == 23

    assert profile.report().loaders[0].num_batches == 1


@pytest.mark.usefixtures("clock")
def test_more_than_a_recording_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batches are recorded, and times per batch are theirs."""
    monkeypatch.setattr(recording, "MAX_LINES", 8)
    monkeypatch.setattr("fastload.profiling.spans.MAX_STRIDE", 1)
    loader = make("torch", zoo.SlowTransform(), 0)
    with fastload.profile(loader) as profile:
        for _ in range(2):
            list(loader)

    (report,) = profile.report().loaders
    assert report.num_batches == 48
    assert sum(stage.ms_per_batch for stage in report.stages) < 2 * report.make_ms


# Transforms of all kinds


class Slots:
    """A dataset without a dict."""

    __slots__ = ("transform",)

    def __init__(self) -> None:
        self.transform = zoo.plain_transform

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)


class OfTheInstance(zoo.Quick):
    """The transform is given."""

    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.transform = transform

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
        return getattr(value, "value", value)


class Boxed:
    """A class that is used as a function."""

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (Slots(), None),
        (OfTheInstance(Halved()), "Halved"),
        (OfTheInstance(torch.nn.Sequential(Halved())), None),
        (OfTheInstance(functools.partial(torch.mul, other=2)), "mul"),
        (OfTheInstance(operator.itemgetter(0)), None),
        (OfTheInstance([Halved()]), None),
        (OfTheInstance(Chain(torch.neg, Halved(), Boxed)), "Halved"),
    ],
    ids=lambda value: type(getattr(value, "transform", value)).__name__,
)
def test_any_transform_works(dataset: Any, name: str | None) -> None:
    """Batches are those without a profile; the transform is the original again, and known by name."""
    plain = list(DataLoader(dataset, batch_size=2))
    before = dict(getattr(dataset, "__dict__", {}))
    with fastload.profile() as profile:
        watched = list(DataLoader(dataset, batch_size=2))

    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert all(vars(dataset)[key] is value for key, value in before.items())
    if name is not None:
        (report,) = profile.report().loaders
        assert name in {stage.name for stage in report.stages if stage.stage == "transform"}


# Names that modules import

THROUGH_PATHLIB = """
import cv2, numpy, pathlib

def read(path):
    return cv2.imdecode(numpy.frombuffer(pathlib.Path(path).read_bytes(), "uint8"), 1)
"""


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("from cv2 import imread\ndef read(path): return imread(path)\n", {"decode"}),
        ("import PIL.Image\ndef read(path): return PIL.Image.open(path).convert('L')\n", {"decode", "read"}),
        (THROUGH_PATHLIB, {"decode", "read"}),
        ("import io\ndef read(path):\n    with io.open(path, 'rb') as f: return f.read()[:9]\n", {"read"}),
    ],
)
def test_functions_that_a_module_imports(tmp_path: Path, text: str, stages: set[str]) -> None:
    """Reading and decoding are told apart, however the module names the functions."""
    path = tmp_path / "image.png"
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(path)
    module = module_of(tmp_path, text)

    class Images(zoo.Quick):
        def __getitem__(self, index: int) -> Any:
            return len(np.asarray(module.read(str(path))).tobytes())

    try:
        with fastload.profile() as profile:
            list(DataLoader(Images(), batch_size=4))
    finally:
        del sys.modules[module.__name__]

    (report,) = profile.report().loaders
    assert stages <= {stage.stage for stage in report.stages}
    if hasattr(module, "imread"):
        assert module.imread is cv2.imread


def module_of(folder: Path, text: str) -> types.ModuleType:
    """A module that was imported from a file of the user's."""
    file = folder / "the_users_module.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("the_users_module", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["the_users_module"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NOTEBOOK = """
import sys, types
import torch, fastload
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
cell = '''
import time
import cv2
from cv2 import imread
from torch.utils.data import DataLoader, Dataset
cv2.imwrite("image.png", __import__("numpy").zeros((8, 8, 3), "uint8"))

class Images(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        time.sleep(0.002)
        return imread("image.png")

images = DataLoader(Images(), batch_size=4)
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

    assert done.returncode == 0, done.stderr
    assert done.stdout == "images <ipython-input-1>:12 in Images.__getitem__ True\n"


# `open`

OPEN = open


@pytest.fixture
def in_a_batch() -> Iterator[None]:
    """As while a batch is measured in detail."""
    here.spans = Spans()
    yield
    here.spans = None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with some lines."""
    path = tmp_path / "lines.txt"
    path.write_bytes(b"one\r\ntwo\n" * 3000)
    return path


def described(opened: Any) -> tuple[Any, ...]:
    """What can be seen of a file object, and its contents."""
    with opened:
        kind = io.FileIO if isinstance(opened, io.FileIO) else type(opened)
        facts = [getattr(opened, name, None) for name in ("name", "mode", "encoding", "errors", "newlines")]
        facts += [opened.readable(), opened.writable(), opened.seekable(), opened.isatty(), opened.closed]
        first = opened.readline()
        facts += [first, opened.tell(), opened.seek(5), opened.read(), opened.read()]
    with pytest.raises(ValueError, match="closed file") as caught:
        opened.read()
    return kind, *facts, str(caught.value), opened.closed


@pytest.mark.usefixtures("in_a_batch")
@pytest.mark.parametrize(
    ("kind", "args", "options"),
    [
        (str, (), {}),
        (bytes, ("r", 1), {"newline": ""}),
        (str, ("rb",), {}),
        (bytes, ("rb",), {}),
        (Path, ("rb",), {"buffering": 0}),
        (str, ("rb", 16), {}),
        (Path, ("br", -1, None, None, None), {}),
        (str, ("rb",), {"closefd": True, "opener": os.open}),
        (str, ("r+b",), {}),
        (int, ("rb",), {"closefd": False}),
        (np.int64, ("rb",), {"closefd": False}),
    ],
    ids=str,
)
def test_open_is_open(file: Path, kind: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Types, attributes, contents and errors after closing; a descriptor stays open if it is to stay open."""
    found = []
    for function in (_open, OPEN):
        fd = os.open(file, os.O_RDONLY)
        place = kind(fd) if kind in (int, np.int64) else kind(os.fsencode(file) if kind is bytes else file)
        found.append(described(function(place, *args, **options))[(kind in (int, np.int64) and 2) or 0 :])
        os.close(fd)

    assert found[0] == found[1]


@pytest.mark.usefixtures("in_a_batch")
@pytest.mark.parametrize(
    ("place", "args"),
    [
        ("absent", ("rb",)),
        (".", ("rb",)),
        (1.5, ("rb",)),
        ("absent", ("q",)),
        ("absent", ("rb", 0, "utf-8")),
        ("a\0b", ("rb",)),
        ("absent", ("rb", -1, None, None, None, False)),
    ],
    ids=repr,
)
def test_open_fails_as_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, args: Any) -> None:
    """The same errors, with the same numbers, names and texts."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception) as plain:  # noqa: PT011  # any error
        OPEN(place, *args)
    with pytest.raises(type(plain.value)) as watched:
        _open(place, *args)

    assert str(watched.value) == str(plain.value)
    for name in ("errno", "strerror", "filename"):
        assert getattr(watched.value, name, None) == getattr(plain.value, name, None)


def test_libraries_read_through_it(tmp_path: Path) -> None:
    """Gzip and pathlib read the same bytes, counted as reading, in batches that are measured."""
    path = tmp_path / "data.gz"
    path.write_bytes(gzip.compress(bytes(range(200))))

    class Files(zoo.Quick):
        def __getitem__(self, index: int) -> Any:
            with gzip.open(path) as opened:
                return len(opened.read()), len(path.read_bytes())

    with fastload.profile() as profile:
        batches = list(DataLoader(Files(), batch_size=4))

    assert {tuple(part.tolist()) for batch in batches for part in batch} == {
        (200,) * 4,
        (len(path.read_bytes()),) * 4,
    }
    assert "read" in {stage.stage for stage in profile.report().loaders[0].stages}
