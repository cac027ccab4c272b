"""Pickles of cached datasets that outlive their process: in checkpoints, or sent elsewhere."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import pickle
from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import pytest
import torch
from PIL import Image

import fastload
from fastload.cache.dataset import CachedDataset
from fastload.cache.ram import registry
from tests.cache.build_zoo import exit_codes
from tests.cache.zoo import Everything, Images, KnownImages, RaggedImages
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("registry_folder")


class Renamed(CachedDataset):
    """A user's subclass with state of its own."""

    note = ""


def darker(sample: Any) -> Any:
    image, label = sample
    return image // 2, label


def with_torch(value: Any, path: Path) -> None:
    torch.save({"epoch": 3, "dataset": value}, path)


def with_pickle(value: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps({"epoch": 3, "dataset": value}))


def saved_yesterday(
    make: Callable[[], Any], path: Path, save: Callable[[Any, Path], None] = with_torch
) -> Any:
    """What a process made, filled and saved, loaded after its end."""

    def work() -> None:
        dataset = make()
        dataset.fill(0, progress=False)
        save(dataset, path)

    assert exit_codes(work) == [0]
    if save is with_torch:
        return torch.load(path, weights_only=False)["dataset"]
    return pickle.loads(path.read_bytes())["dataset"]


@pytest.mark.parametrize(
    ("source", "save"),
    [
        *((Images(8), with_torch), (KnownImages(8), with_pickle), (RaggedImages(8), with_torch)),
        (Everything(8), with_pickle),
    ],
)
def test_a_checkpoint_loads_after_its_process_has_ended(save: Any, source: Any, tmp_path: Path) -> None:
    """With an empty cache of the same kind, which fills again; samples are right."""
    ds = saved_yesterday(lambda: CachedDataset(source), tmp_path / "checkpoint", save)
    layout = CachedDataset(source).cache_info().layout

    assert_same_samples([ds[i] for i in range(8)], [source.sample(i) for i in range(8)])
    assert (ds.cache_info().num_cached, ds.cache_info().layout) == (8, layout)


def test_transform_key_and_subclass_come_along(tmp_path: Path, caplog: Any) -> None:
    """A key finds the cache that a process holds now; one line says that it is not that of the pickle."""
    make = lambda: Renamed(Images(8), darker, cache_key="photos", max_memory="8MB")  # noqa: E731
    with caplog.at_level(logging.INFO, "fastload"):
        ds = saved_yesterday(make, tmp_path / "checkpoint")
    other = CachedDataset(Images(8), cache_key="photos")
    other.fill(0, progress=False)

    assert type(ds) is Renamed
    assert_same_samples(ds[3], darker(Images(8).sample(3)))
    assert ds.cache_info().num_cached == 8  # `other` found it
    assert ds.cache_info().max_bytes == 8_000_000
    assert caplog.text.count("new and empty, because the process that pickled it cannot be reached") == 1


def test_loaded_twice_there_are_two_caches_without_a_key(tmp_path: Path) -> None:
    """Who loads them might change the one dataset; nobody else finds either of them."""
    first = saved_yesterday(lambda: CachedDataset(Images(8)), tmp_path / "checkpoint")
    second = torch.load(tmp_path / "checkpoint", weights_only=False)["dataset"]
    first.fill(0, progress=False)

    assert second.cache_info().num_cached == 0
    assert registry.entries() == []


def test_a_key_of_other_samples_is_a_warning_and_the_cache_private(tmp_path: Path, caplog: Any) -> None:
    """Loading does not fail because of what another process holds."""
    path = tmp_path / "checkpoint"
    assert exit_codes(lambda: with_torch(CachedDataset(Images(8), cache_key="photos"), path)) == [0]
    holder = CachedDataset(Images(9), cache_key="photos")
    ds = torch.load(path, weights_only=False)["dataset"]
    ds.fill(0, progress=False)

    assert "not shared with other processes" in caplog.text
    assert (ds.cache_info().num_cached, holder.cache_info().num_cached) == (8, 3)


@pytest.mark.parametrize("cache", ["lmdb", None], ids=str)
def test_tomorrow_every_kind_of_cache_loads(cache: Any, tmp_path: Path) -> None:
    """A file is opened again."""
    name = f"lmdb:{tmp_path}/cache"
    cache = name if cache == "lmdb" else cache
    ds = saved_yesterday(lambda: CachedDataset(Images(8), cache=cache), tmp_path / "checkpoint")

    assert_same_samples([ds[i] for i in range(8)], [Images(8).sample(i) for i in range(8)])


@pytest.mark.parametrize("start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("cache", ["ram", "lmdb"])
def test_workers_start_with_a_closed_cache(cache: Any, start_method: str, tmp_path: Path) -> None:
    """Its reads are misses in them, too."""
    name = f"lmdb:{tmp_path}/cache"
    cache = name if cache == "lmdb" else cache
    source = Images(8, log=tmp_path / "log")
    ds = CachedDataset(source, cache=cache)
    ds.fill(0, progress=False)
    ds.cache.close()
    before = sum(source.reads)

    for loader in (fastload.DataLoader, torch.utils.data.DataLoader):
        batches = list(loader(ds, 4, num_workers=1, multiprocessing_context=start_method))
        assert [batch[1].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sum(source.reads) == before + 16


def test_a_closed_cache_loads_from_a_checkpoint_as_an_empty_one() -> None:
    """The process that saved it was about to end; who loads it wants a cache."""
    ds = CachedDataset(Images(8))
    ds.cache.close()
    loaded = pickle.loads(pickle.dumps(ds))
    loaded.fill(0, progress=False)

    assert (ds.cache_info().num_cached, loaded.cache_info().num_cached) == (0, 8)


def answer(pipe: Any) -> None:
    pipe.send(pipe.recv().cache_info().num_cached)


def test_a_running_process_of_this_run_shares_the_cache() -> None:
    """One that was started before the dataset was made, and gets it through a pipe."""
    context = multiprocessing.get_context("fork")
    pipe, other = context.Pipe()
    process = context.Process(target=answer, args=(other,))
    process.start()
    ds = CachedDataset(Images(8))
    ds.fill(0, progress=False)
    pipe.send(ds)

    assert pipe.recv() == 8
    process.join()


def every_kind(folder: Path) -> dict[str, CachedDataset]:
    """A dataset behind each kind of cache, used once, so that what is made on demand is there."""
    crop = A.Compose([A.RandomCrop(4, 4), A.Normalize()])
    file, photos = f"lmdb:{folder}/cache", fastload.ImageFolder(make_photos(folder / "photos"))
    kinds = {
        "ram": CachedDataset(Images(8)),
        "a key, a transform": CachedDataset(Images(8), darker, cache_key="photos"),
        "pre_transform": CachedDataset(Images(8), pre_transform=darker),
        "nests": CachedDataset(Everything(8)),
        "a pipeline": CachedDataset(photos, crop),
        "none": CachedDataset(photos, crop, cache=None),
        "file": CachedDataset(Images(8), cache=file),
        "from file": CachedDataset.from_cache(folder / "cache"),
    }
    for ds in kinds.values():
        assert ds[1] is not None
    return kinds


def make_photos(folder: Path) -> Path:
    for number in range(4):
        (folder / "a").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 50 * number, np.uint8)).save(folder / "a" / f"{number}.png")
    return folder


def test_a_pickle_loads_as_the_same_dataset(tmp_path: Path) -> None:
    """Behind each kind of cache, which it shares with what was pickled while that lives; it is a handle."""
    for kind, ds in every_kind(tmp_path).items():
        data = pickle.dumps(ds)
        assert len(data) < 20_000, kind
        loaded = pickle.loads(data)
        assert loaded._caller is None  # it holds what this release of the transform's library does
        attributes, found = ({**vars(each), "_caller": None} for each in (ds, loaded))
        assert {name: type(found[name]) for name in found} == {
            name: type(attributes[name]) for name in attributes
        }, kind
        assert type(loaded._source) is type(ds._source)
        assert loaded.explain().partition(",")[0] == ds.explain().partition(",")[0], kind
        assert loaded.cache_info() == ds.cache_info()
        if ds.transform is None:
            assert_same_samples(loaded[1], ds[1])
        assert (loaded.dataset is loaded.cache) is (ds.dataset is ds.cache)


def test_a_pickle_of_a_file_loads_without_the_file(tmp_path: Path) -> None:
    """A checkpoint goes to machines without the data; what needs the file says so when it is read."""
    CachedDataset(Images(8), cache=f"lmdb:{tmp_path}/cache")
    ds = CachedDataset.from_cache(tmp_path / "cache")
    data = pickle.dumps(ds)
    os.rename(tmp_path / "cache", tmp_path / "elsewhere")
    loaded = pickle.loads(data)
    assert (len(loaded), loaded.dataset is loaded.cache) == (8, True)
    os.rename(tmp_path / "elsewhere", tmp_path / "cache")
    assert_same_samples([loaded[i] for i in range(8)], [Images(8).sample(i) for i in range(8)])


class OwnState(CachedDataset):
    """A user's class with a state of its own, as many have."""

    def __getstate__(self) -> Any:
        return {name: value for name, value in vars(self).items() if name != "note"}


def test_a_subclass_with_its_own_state_loads() -> None:
    """Without what it leaves out."""
    ds = OwnState(Images(8))
    ds.note = lambda: None
    for loaded in (pickle.loads(pickle.dumps(ds)), copy.copy(ds), copy.deepcopy(ds)):
        assert_same_samples(loaded[3], Images(8).sample(3))
        assert (type(loaded), hasattr(loaded, "note")) == (OwnState, False)
