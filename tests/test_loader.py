"""The class itself: a torch DataLoader that frameworks can take apart and build again."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import inspect
import itertools
import multiprocessing
import os
import pickle
import resource
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.data as tud
from torch.utils.data import dataloader

import fastload
from fastload import loader as loader_module
from fastload.images.geometry import image_layout
from fastload.system.logs import say_once
from tests.kit import datasets, torchs_own
from tests.kit.faults import limited

if TYPE_CHECKING:
    from pathlib import Path

EXTRAS = {
    *("memory_format", "max_prefetch_memory", "seeding", "worker_type", "device"),
    *("on_error", "batch_transform", "device_transform", "max_errors", "max_worker_restarts"),
    "cache",
}
IMAGES = datasets.Made(datasets.image, 12)


def test_the_arguments_are_torchs_in_torchs_order_and_ours_by_keyword() -> None:
    """17 names with torch's kinds and defaults, then the extras."""
    theirs = inspect.signature(tud.DataLoader.__init__).parameters
    ours = dict(inspect.signature(fastload.DataLoader.__init__).parameters)
    assert {ours.pop(name).kind for name in EXTRAS} == {inspect.Parameter.KEYWORD_ONLY}
    plain, expected = ([(p.name, p.kind, p.default) for p in one.values()] for one in (ours, theirs))
    assert plain == expected


def test_a_framework_may_build_it_again_from_its_attributes() -> None:
    """The way of ignite: type(loader)(**public attributes), which are arguments, with a new batch sampler."""
    theirs = {name for name in vars(tud.DataLoader(IMAGES)) if not name.startswith("_")}
    loader = fastload.DataLoader(IMAGES, 4, num_workers=1, max_prefetch_memory="12345B", seeding="torch")
    list(loader)
    arguments = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    assert set(arguments) == theirs | EXTRAS
    for name in ("batch_size", "sampler", "drop_last", "batch_sampler"):
        del arguments[name]
    again = type(loader)(**arguments, batch_sampler=[[1, 2], [3]])
    assert [labels.tolist() for _, labels in again] == [[1, 2], [3]]
    assert (again.max_prefetch_memory, again.seeding) == ("12345B", "torch")


def test_its_class_has_the_type_parameter_of_torchs() -> None:
    """For type checkers and when the program runs: an annotation stays right when the import changes."""
    assert len(fastload.DataLoader.__parameters__) == 1  # type: ignore[attr-defined]
    assert isinstance(fastload.DataLoader[int]([1, 2]), tud.DataLoader)


def test_making_a_loader_takes_nothing() -> None:
    """No descriptor, thread or process before the first iter()."""
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    loader = fastload.DataLoader(IMAGES, num_workers=2, persistent_workers=True)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert loader._iterator is None


@pytest.mark.slow
def test_it_can_be_pickled_and_copied_while_it_is_iterated() -> None:
    """Nothing that is open belongs to the loader."""
    loader = fastload.DataLoader(IMAGES, 4, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    for twin in (pickle.loads(pickle.dumps(loader)), copy.copy(loader)):
        assert [labels.tolist()[0] for _, labels in twin] == [0, 4, 8]
    assert next(iterator)[1].tolist()[0] == 4


class _OwnIterators(fastload.DataLoader[Any]):
    """Makes its iterators by itself, as LitData's loader, which derives from ours after `patch_torch()`."""

    def _get_iterator(self) -> Any:
        kind = "_MultiProcessingDataLoaderIter" if self.num_workers else "_SingleProcessDataLoaderIter"
        return getattr(dataloader, kind)(self)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_subclass_may_make_iterators_of_its_own(num_workers: int) -> None:
    """Its batches are those of its iterators, which fastload does not measure."""
    loader = _OwnIterators(IMAGES, 4, num_workers=num_workers)
    persistent = _OwnIterators(IMAGES, 4, num_workers=1, persistent_workers=True)
    assert isinstance(iter(loader), dataloader._BaseDataLoaderIter)
    for one in (loader, persistent):
        for _ in range(2):
            assert [labels.tolist() for _, labels in one] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert one.stats().num_batches == 0
    persistent._iterator._shutdown_workers()


def test_attributes_are_read_again_at_the_next_epoch() -> None:
    """As in torch: what may be set is obeyed, what may not be set is refused; wrong extras at once."""
    loader = fastload.DataLoader(IMAGES, 4)
    loader.collate_fn = len
    lengths = list(loader)
    loader.num_workers, loader.prefetch_factor = 1, 2
    assert lengths == list(loader) == [4, 4, 4]
    with pytest.raises(ValueError, match="should not be set after DataLoader is initialized"):
        loader.batch_size = 3
    with pytest.raises(ValueError, match=r"memory_format should be None or torch\.channels_last"):
        fastload.DataLoader(IMAGES, memory_format=torch.preserve_format)  # type: ignore[arg-type]
    for wrong in ("many", -1):
        with pytest.raises(ValueError, match=f"^max_prefetch_memory={wrong!r} is not an amount of memory: "):
            fastload.DataLoader(IMAGES, max_prefetch_memory=wrong)


class _Labels(tud.Dataset[int]):
    """Numbers, and what their worker's process is."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return index, os.getpid()


def test_torchs_workers_that_cannot_start_leave_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The iterator that was not made has nothing to stop, and says nothing more when it is freed."""
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    loader = fastload.DataLoader(IMAGES, 4, num_workers=1, **torchs_own.FORK)
    with limited(resource.RLIMIT_FSIZE, 0), pytest.raises(OSError, match="too large"):
        iter(loader)
    gc.collect()
    assert not ignored


@pytest.mark.parametrize(
    "workers",
    [
        {},
        {"num_workers": 1},
        {"num_workers": 1, "persistent_workers": True},
        {"num_workers": 1, "persistent_workers": True, "device": "cpu", "device_transform": list},
        {"num_workers": 1, "persistent_workers": True, **torchs_own.FORK},
    ],
    ids=["none", "one", "persistent", "device", "torch's iterator"],
)
def test_our_own_attributes_take_effect_at_the_next_epoch(workers: dict[str, Any]) -> None:
    """Also with persistent workers, which are replaced; an epoch that has begun goes on as it was."""
    loader = fastload.DataLoader(IMAGES, 4, **workers)
    iterator = iter(loader)
    next(iterator)
    loader.batch_transform = lambda batch: [len(batch[1])]
    assert len(list(iterator)) == 2
    assert list(loader) == [[4], [4], [4]]
    loader.batch_transform = None
    loader.memory_format = torch.channels_last
    assert [tuple(images.shape) for images, _ in loader] == [(4, 3, 8, 8)] * 3
    loader.close()


def test_persistent_workers_stay_when_nothing_was_changed() -> None:
    """Setting what is set already keeps them."""
    loader = fastload.DataLoader(_Labels(), 12, num_workers=1, persistent_workers=True)
    ((_, first),) = loader
    loader.seeding, loader.device, loader.cache = "worker", None, None
    ((_, second),) = loader
    loader.on_error = "replace"
    ((_, third),) = loader
    assert first[0] == second[0] != third[0]
    loader.close()


def test_persistent_workers_keep_what_torch_keeps() -> None:
    """Another number of workers is for new ones, also where each has a state; so is another order."""
    with fastload.DataLoader(datasets.Stream(22), 4, num_workers=2, persistent_workers=True) as loader:
        first = [numbers.tolist() for _, numbers, _ in loader]
        loader.num_workers, loader.in_order = 1, False
        assert [numbers.tolist() for _, numbers, _ in loader] == first
        next(iter(loader))
        assert loader.state_dict()["why_unresumable"] is None


def test_another_cache_is_opened_at_the_next_epoch(tmp_path: Path) -> None:
    """`explain()` names the one that is set; the epoch that has begun still reads with the old one."""
    loader = fastload.DataLoader(IMAGES, 4, cache="ram")
    iterator = iter(loader)
    next(iterator)
    for cache, text in ((f"lmdb:{tmp_path / 'files'}", f"at {tmp_path / 'files'}"), (None, "cache: none")):
        loader.cache = cache
        assert text in loader.explain()
        assert len(list(loader)) == 3
    assert len(list(iterator)) == 2
    loader.close()


WRONG: dict[str, Any] = {
    "seeding": "all",
    "worker_type": "fiber",
    "device": "gpu",
    "cache": {},
    "on_error": "skip",
    "max_errors": 5,
    "max_worker_restarts": -1,
    "memory_format": 3,
    "max_prefetch_memory": "much",
    "batch_transform": 3,
    "device_transform": len,
}


@pytest.mark.parametrize("name", WRONG)
def test_an_attribute_of_ours_is_checked_when_it_is_set(name: str) -> None:
    """By the rules of the constructor; the loader keeps what it had."""
    loader = fastload.DataLoader(IMAGES, 4)
    before = getattr(loader, name)
    with pytest.raises(ValueError, match=name):
        fastload.DataLoader(IMAGES, 4, **{name: WRONG[name]})
    with pytest.raises(ValueError, match=name) as caught:
        setattr(loader, name, WRONG[name])
    assert f"raised when DataLoader.{name} was set" in caught.value.__notes__[-1]
    assert getattr(loader, name) is before
    assert len(list(loader)) == 3


def test_max_errors_needs_on_error() -> None:
    """It would have no effect, in the constructor and afterwards, in either order."""
    with pytest.raises(ValueError, match=r"max_errors=3 needs on_error="):
        fastload.DataLoader(IMAGES, max_errors=3)
    loader = fastload.DataLoader(IMAGES, 4, on_error="replace", max_errors=3)
    with pytest.raises(ValueError, match=r"max_errors=3 needs on_error="):
        loader.on_error = "raise"
    loader.max_errors = 0.01
    loader.on_error = "raise"


def test_a_subclass_may_set_its_own_attribute_before_the_constructor() -> None:
    """Names of ours are checked only once the constructor has set them."""

    class Own(fastload.DataLoader[Any]):
        def __init__(self, dataset: Any) -> None:
            self.device = 3.5
            super().__init__(dataset, 4)

    loader = Own(IMAGES)
    assert loader.device is None
    assert len(list(loader)) == 3


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}], ids=str)
def test_torchs_attributes_that_workers_need_are_checked(workers: dict[str, Any]) -> None:
    """A number of workers below 0 raises, as in torch; a timeout below 0 is none, as in torch."""
    loader = fastload.DataLoader(IMAGES, 4, **workers)
    loader.num_workers = -1
    with pytest.raises(AssertionError, match="num_workers must be greater than 0"):
        iter(loader)
    loader.num_workers, loader.timeout = 1, -1
    assert len(list(loader)) == 3


@pytest.mark.parametrize(("num_cpus", "number"), [(1, 1), (3, 3), (99, 16)])
def test_auto_is_a_worker_for_each_cpu_of_the_rank(num_cpus: int, number: int, monkeypatch: Any) -> None:
    """At most 16, from the start; a daemon process, which can start none, has none."""
    monkeypatch.setattr(loader_module.cpus, "rank_cpus", lambda: num_cpus)
    loader = fastload.DataLoader(IMAGES, 4, num_workers="auto")
    assert (type(loader.num_workers), loader.num_workers) == (int, number)
    with pytest.raises(ValueError, match='the constructor takes "auto"'):
        loader.num_workers = "auto"  # type: ignore[assignment]
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert fastload.DataLoader(IMAGES, 4, num_workers="auto").num_workers == 0


@pytest.mark.parametrize(("num_workers", "warns"), [(2, False), (3, True), ("auto", False), (9, False)])
def test_more_workers_than_cpus_of_the_rank_are_warned_of_once(
    num_workers: Any, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Unless torch warns, which knows the host's CPUs alone."""
    for cached in (say_once, loader_module._warn_of_workers):
        cached.cache_clear()
    monkeypatch.setattr(loader_module.cpus, "usable_cpus", lambda: 8)
    monkeypatch.setattr(loader_module.cpus, "rank_cpus", lambda: 2)
    monkeypatch.setattr(tud.DataLoader, "check_worker_number_rationality", lambda _: None)
    for _ in range(2):
        fastload.DataLoader(IMAGES, 16, num_workers=num_workers)
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in texts] == ["a DataLoader has more workers than CPUs"] * warns
    loader_module._warn_of_workers.cache_clear()


# --- channels-last ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Fields:
    image: Any


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        *((IMAGES, {}), (IMAGES, {"num_workers": 1}), (IMAGES, {"num_workers": 1, "in_order": False})),
        (datasets.Made(datasets.SAMPLES["HWC seen as CHW"], 12), {"num_workers": 1}),
        (datasets.Bulk(datasets.image, 12), {}),
        *(("cache", {}), ("cache", {"num_workers": 1})),
    ],
    ids=["HWC", "workers", "torch's iterator", "CHW", "getitems", "cache", "cache and workers"],
)
def test_channels_last_hands_images_out_as_bchw(dataset: Any, options: dict[str, Any]) -> None:
    """(B, C, H, W) with channels-last strides, a view of (B, H, W, C); the same pixels as without."""
    if dataset == "cache":
        dataset = fastload.CachedDataset(IMAGES)
        dataset.fill(0, progress=False)
    plain = list(fastload.DataLoader(dataset, 4))
    images = list(fastload.DataLoader(dataset, 4, memory_format=torch.channels_last, **options))
    for one, other in zip(plain, images, strict=True):
        want, got = (batch[0] if isinstance(batch, list) else batch for batch in (one, other))
        back = got.permute(0, 2, 3, 1)
        assert got.shape == (4, 3, 8, 8)
        assert got.is_contiguous(memory_format=torch.channels_last)
        assert (back.is_contiguous(), back.data_ptr()) == (True, got.data_ptr())
        assert torch.equal(got, want if want.shape[1] == 3 else want.permute(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("kind", "num_workers"), [(collections.OrderedDict, 1), (collections.UserDict, 0), (Fields, 1)]
)
def test_channels_last_reaches_images_in_any_container(kind: Any, num_workers: int) -> None:
    """Images in subclasses of dict, in other mappings, and in dataclasses that a collate_fn returns."""

    def collate(samples: Any) -> Any:
        return kind(image=torch.stack([torch.from_numpy(image) for image, _ in samples]))

    options: Any = {"num_workers": num_workers, "collate_fn": collate, "memory_format": torch.channels_last}
    batches = list(fastload.DataLoader(IMAGES, 4, **options))
    assert [type(batch) for batch in batches] == [kind] * 3
    found = [batch.image if kind is Fields else batch["image"] for batch in batches]
    assert [image.shape for image in found] == [(4, 3, 8, 8)] * 3


# Leaves that look like images in part: too small, of another dtype, or of other dimensions.
NOT_IMAGES = {
    "keypoints": torch.zeros(17, 3, 3),
    "poses": torch.zeros(5, 4, 4),
    "tracks of 3 people": torch.zeros(3, 64, 3),
    "points of one channel": np.zeros((1, 17, 2), np.float32),
    "mask": np.zeros((64, 64), np.uint8),
    "classes": np.zeros((64, 64, 1), np.int64),
    "voxels": np.zeros((3, 16, 16, 16), np.float32),
    "two channels": torch.zeros(2, 64, 64),
    "tall patch": torch.zeros(3, 64, 7, dtype=torch.uint8),
    "turned": torch.zeros(96, 128, 2).permute(2, 0, 1),  # large enough for rows, and not contiguous
    "flags": torch.zeros(3, 64, 64, dtype=torch.bool),
}


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"batch_size": None}, {"collate_fn": tud.default_collate}),
        *({"num_workers": 1}, {"num_workers": 1, "in_order": False}),
        {"num_workers": 1, "worker_type": "thread"},
        {"num_workers": 1, "device": "cpu", "device_transform": lambda batch: batch},
    ],
    ids=["local", "whole batches", "collate_fn", "workers", "torch's iterator", "threads", "device"],
)
def test_channels_last_changes_images_alone(options: dict[str, Any]) -> None:
    """Keypoints, poses, masks and tensors of other dtypes keep shape and strides beside an image."""
    sample = {"image": np.zeros((64, 64, 3), np.uint8), "float": torch.zeros(3, 9, 8), **NOT_IMAGES}
    if "batch_size" in options:  # the samples are batches
        sample = {name: np.stack([part, part]) for name, part in sample.items()}
    options = {"batch_size": 2, **options}
    dataset: Any = [sample] * 4
    plain = next(iter(fastload.DataLoader(dataset, **options)))
    batch = next(iter(fastload.DataLoader(dataset, memory_format=torch.channels_last, **options)))
    assert (batch["image"].shape, batch["float"].shape) == ((2, 3, 64, 64), (2, 3, 9, 8))
    for name in ("image", "float"):
        assert batch[name].is_contiguous(memory_format=torch.channels_last)
    for name in NOT_IMAGES:
        assert (batch[name].shape, batch[name].stride()) == (plain[name].shape, plain[name].stride()), name


def test_no_shape_is_an_image_in_two_layouts() -> None:
    """With 8 x 8 pixels at least, the shape decides on the layout, or says that this is no image."""
    sizes = (0, 1, 2, 3, 4, 5, 7, 8, 9, 64)
    for shape in itertools.product(sizes, repeat=3):
        is_hwc = shape[2] in (1, 3, 4) and min(shape[:2]) >= 8
        is_chw = shape[0] in (1, 3, 4) and min(shape[1:]) >= 8
        assert not (is_hwc and is_chw)
        expected = "HWC" if is_hwc else "CHW" if is_chw else None
        assert image_layout(shape, is_pixels=True) == expected, shape
        assert image_layout(shape, is_pixels=False) is None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_labelled_in_a_profile(num_workers: int) -> None:
    """Under the label that torch gives, for those that are asked for while the profiler is on."""
    iterator = iter(fastload.DataLoader(IMAGES, 4, num_workers=num_workers))
    next(iterator)
    with torch.autograd.profiler.profile() as profile:
        next(iterator), next(iterator)
    list(iterator)
    label = f"enumerate(DataLoader)#{type(iterator).__name__}.__next__"
    assert [event.name for event in profile.function_events if "DataLoader" in event.name] == [label] * 2


class _Ends(tud.IterableDataset):
    """Four images a pass; counts how often it was asked after the last one."""

    num_ends = left = 0

    def __iter__(self) -> Any:
        self.left = 4
        return self

    def __next__(self) -> Any:
        if not self.left:
            self.num_ends += 1
            raise StopIteration
        self.left -= 1
        return np.zeros((64, 64, 3), np.uint8)


@pytest.mark.parametrize("batch_size", [2, 3, None])
def test_a_stream_is_told_of_its_end_as_often_as_by_torch(batch_size: Any) -> None:
    """LitData's, for example, count their epochs by it."""
    ours, torchs = _Ends(), _Ends()
    for _ in range(2):
        assert len(list(fastload.DataLoader(ours, batch_size))) == len(
            list(tud.DataLoader(torchs, batch_size))
        )
    assert ours.num_ends == torchs.num_ends
