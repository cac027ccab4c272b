"""Every cache in front of every kind of source, and batches in one go: right, with no read too many."""

from __future__ import annotations

import array
import contextlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, default_collate

import fastload
from fastload.cache.dataset import CachedDataset
from fastload.images.folder import ImageFolder
from fastload.images.remote import RemoteFiles
from tests.cache.zoo import Everything, Images, Made, MixedImages, RaggedImages
from tests.kit.batches import assert_same_samples, read_epoch
from tests.kit.remote import FaultyFileSystem, register, upload

pytestmark = pytest.mark.usefixtures("registry_folder")
SIZE, BATCH = 12, 5
URL = "faulty://bucket/photos"
ROWS = np.arange(SIZE * 60, dtype=np.float32).reshape(SIZE, 20, 3)


class Reads:
    """Counts which samples of a source were asked for, and which files a folder was told to expect."""

    def __init__(self, source: Any, monkeypatch: Any) -> None:
        self.source = source
        self.announced: set[str] = set()
        self._of_folder: Counter[int] = Counter()
        sample, expect = ImageFolder._sample, RemoteFiles.expect

        def counted(folder: ImageFolder, index: int) -> tuple[str, int]:
            self._of_folder[index] += 1
            return sample(folder, index)

        def noted(files: RemoteFiles, coming: dict[str, int]) -> None:
            self.announced.update(coming)
            expect(files, coming)

        monkeypatch.setattr(ImageFolder, "_sample", counted)
        monkeypatch.setattr(RemoteFiles, "expect", noted)

    def take(self) -> Counter[int]:
        """The reads since the last call."""
        if isinstance(self.source, Images):
            found = Counter(dict(enumerate(self.source.reads)))
            self.source._own_reads[:] = array.array("q", bytes(8 * len(self.source)))
        else:
            found, self._of_folder = self._of_folder, Counter()
        return +found


@pytest.fixture
def remote(photos: Any) -> Any:
    """The same images at a URL."""
    register()
    FaultyFileSystem.reset()
    upload(photos, URL)
    yield URL
    FaultyFileSystem.reset()


SOURCES: dict[str, Any] = {
    "arrays": lambda photos, url: Made(lambda index: (ROWS[index], index), SIZE),
    "uniform": lambda photos, url: Images(SIZE),
    "ragged": lambda photos, url: RaggedImages(SIZE),
    "mixed": lambda photos, url: MixedImages(SIZE),
    "nests": lambda photos, url: Everything(SIZE),
    "folder": lambda photos, url: ImageFolder(photos),
    "resized folder": lambda photos, url: ImageFolder(photos, size=(8, 9)),
    "remote folder": lambda photos, url: ImageFolder(url),
    "subset of a remote folder": lambda photos, url: Subset(ImageFolder(url), range(SIZE)),
}
CACHES = ("none", "ram", "lmdb")
CASES = [(cache, source) for source in SOURCES for cache in CACHES]


@pytest.fixture(params=CASES, ids=" of ".join)
def opened(request: Any, photos: Any, remote: str, tmp_path: Any, monkeypatch: Any) -> Any:
    """Makes a dataset with a cache; a function, as a fixture would hold it when descriptors are counted."""

    def open_case() -> tuple[str, CachedDataset, Reads, list[Any]]:
        name, kind = request.param
        source = SOURCES[kind](photos, remote)
        samples = [source[index] for index in range(SIZE)]
        reads = Reads(source, monkeypatch)
        path = tmp_path / "cache"
        cache = {"none": None, "ram": "ram", "lmdb": f"lmdb:{path}"}[name]
        if name == "lmdb":
            CachedDataset.build(source, path, num_workers=0, progress=False).close()
        dataset = CachedDataset(source, cache=cache, max_memory=1 << 24)
        reads.take()
        reads.announced.clear()
        return name, dataset, reads, samples

    return open_case


def loader_of(dataset: CachedDataset, seeding: Any = "worker") -> Any:
    return fastload.DataLoader(dataset, BATCH, collate_fn=list, seeding=seeding)


def assert_right(batches: Any, samples: list[Any]) -> None:
    assert_same_samples([sample for batch in batches for sample in batch], samples)


def test_a_filled_cache_replaces_its_source(opened: Any) -> None:
    """fill() reads a sample once, or not if a file has it; epochs and a resume after it read none."""
    name, dataset, reads, samples = opened()
    assert dataset.fill(0, progress=False).num_cached == (0 if name == "none" else SIZE)
    assert max(reads.take().values(), default=0) <= (name != "none" and "lmdb" not in name)
    reads.announced.clear()
    loader = loader_of(dataset)
    assert_right(loader, samples)
    next(iter(loader))
    resumed = loader_of(dataset)
    resumed.load_state_dict(loader.state_dict())
    assert_right(resumed, samples[BATCH:])
    if name == "none":
        assert reads.take() == Counter([*range(SIZE), *range(SIZE)])
    else:
        assert (reads.take(), reads.announced) == (Counter(), set())


def test_epochs_read_a_sample_once(opened: Any) -> None:
    """Without fill(), the first epoch reads what the cache lacks, and later ones nothing."""
    name, dataset, reads, samples = opened()
    lacking = {index for index in range(SIZE) if index not in dataset.cache}
    loader = loader_of(dataset, "sample")
    assert_right(loader, samples)
    assert reads.take() == Counter(lacking)
    assert len(reads.announced) in (0, len(lacking))
    reads.announced.clear()
    assert_right(loader, samples)
    if name == "none":
        assert reads.take() == Counter(range(SIZE))
    else:
        assert (reads.take(), reads.announced) == (Counter(), set())
        assert dataset.cache_info().num_cached == SIZE


def warmed(dataset: Images) -> CachedDataset:
    ds = CachedDataset(dataset)
    ds.fill(0, progress=False)
    return ds


SAMPLES: dict[str, Any] = {
    "array": lambda i: np.full((2, 3), i, np.uint8),
    "zero-dim array": lambda i: np.array(i),
    "empty array": lambda i: np.zeros((0, 2)),
    **{str(name): lambda i, name=name: np.full(3, i, name) for name in ("float16", "uint16", "complex64")},
    "bool array": lambda i: np.array([i % 2 == 0]),
    "tensor": lambda i: torch.full((2, 3), i),
    "zero-dim tensor": lambda i: torch.tensor(i),
    "bfloat16": lambda i: torch.full((2,), i, dtype=torch.bfloat16),
    "float8": lambda i: torch.full((2,), i).to(torch.float8_e4m3fn),
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 3 == 0,
    "str": lambda i: f"name {i}",
    "bytes": lambda i: b"x" * i,
    **{kind.__name__: kind for kind in (np.str_, np.float64, np.float32, np.int8, np.int64, np.uint8)},
    "np.bool": lambda i: np.bool_(i % 2),  # which some releases of torch collate
    "np.complex64": lambda i: np.complex64(i),
    "tuple": lambda i: (np.full(2, i), i),
    "list": lambda i: [np.full(2, i), i],
    "dict": lambda i: {"b": np.full(2, i), "a": {"c": i}},
    "deep": lambda i: ({"x": [(i, (np.ones(2), "s"))]},),
    "empty tuple": lambda i: (i, ()),
    "empty dict": lambda i: {"x": i, "y": {}},
}
REFUSED: dict[str, Any] = {
    "none": lambda i: None,
    "none in a tuple": lambda i: (i, None),
    "texts": lambda i: np.array([f"{i}"]),
    "dates": lambda i: np.array(i, "datetime64[s]"),
    "date": lambda i: np.datetime64(i, "s"),
    "byte order": lambda i: np.full(2, i, ">f4"),
    "long double": np.longdouble,
}


@pytest.mark.parametrize("name", SAMPLES | REFUSED)
def test_same_as_default_collate(name: str, tmp_path: Any) -> None:
    """For every kind of leaf and nest: types, dtypes, shapes and values; what it refuses is left to it."""
    dataset, expected = Made((SAMPLES | REFUSED)[name]), None
    on_disk = CachedDataset(dataset, cache=f"lmdb:{tmp_path}/x")
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        expected = default_collate([dataset.sample(i) for i in (3, 0, 19, 7, 7)])
    assert name == "np.bool" or (expected is None) == (name in REFUSED)
    for ds in (warmed(dataset), on_disk):
        found = ds.gather([3, 0, 19, 7, 7], np.empty)
        assert (found is None) == (expected is None)
        assert_same_samples(found, expected)


def test_batch_lies_where_it_was_told() -> None:
    """Numbers and arrays are written into the memory that `allocate` gives, which is not the cache's."""
    given: list[Any] = []
    ds: Any = warmed(Images(20))
    images, labels = ds.gather([1, 2, 3], lambda *kind: given.append(np.empty(*kind)) or given[-1])
    assert [array.shape for array in given] == [(3, 32, 24, 3), (3,)]
    assert [images.data_ptr(), labels.data_ptr()] == [a.__array_interface__["data"][0] for a in given]
    images.fill_(0)
    assert_same_samples(ds[1], Images(20).sample(1))


def test_the_rest_is_left_to_the_samples(tmp_path: Any) -> None:
    """Odd indices, a transform, missing and ragged samples, and numbers beyond 64 bits make no batch."""
    ds, part = warmed(Images(20)), CachedDataset(Images(20))
    for odd in ([], [0, 20], [-1, 0], [0.5], ["a"], [[0]], [10**30]):
        assert ds.gather(odd, np.empty) is None
    assert ds.gather(np.array([1, 2], np.uint8), np.empty) is None  # for torch's datasets, a mask
    for indices in ([1, 2], np.array([1, 2], np.int32), np.array([1, 2], np.int8)):
        assert_same_samples(ds.gather(indices, np.empty), default_collate([ds[1], ds[2]]))
    assert part.gather([0, 10, 19], np.empty) is not None
    assert part.gather([0, 1], np.empty) is None
    ds.transform = lambda sample: sample
    assert ds.gather([0, 1], np.empty) is None
    for number, make in enumerate((lambda i: 1 << (60 + i), lambda i: (i,) * (i + 1))):
        file = CachedDataset.build(Made(make), tmp_path / str(number), num_workers=0)
        on_disk = CachedDataset(Made(make), cache=file)
        assert on_disk.gather([0, 5, 1], np.empty) is None


def odd_number(index: int) -> Any:
    """A number beyond 64 bits makes a batch ragged that torch can collate."""
    return np.full((4, 4), index, np.uint8), np.zeros((0, 2)), float(index) if index % 3 else index


def large(index: int) -> Any:
    return {"large": np.full((400, 400), index, np.uint8), "text": "x" * (index * 20)}


@pytest.mark.parametrize("make", [odd_number, large, RaggedImages(20).sample])
@pytest.mark.parametrize("cached", [True, False])
def test_torch_is_not_given_read_only_arrays(make: Any, *, cached: bool) -> None:
    """It would warn that they are not writable, which the user cannot change; hits and misses alike."""
    ds = warmed(Made(make)) if cached else CachedDataset(Made(make), max_memory="1B")
    torch.set_warn_always(True)
    try:
        found = read_epoch(fastload.DataLoader(ds, 5))
    finally:
        torch.set_warn_always(False)
    if make in (odd_number, large):
        expected = [default_collate([make(i) for i in range(k, k + 5)]) for k in (0, 5, 10, 15)]
        assert_same_samples(found, expected)
    else:
        assert ["equal size" in str(error) for error in found] == [True] * 4
