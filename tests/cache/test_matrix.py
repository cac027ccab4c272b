"""Every cache in front of every kind of source: the right batches, and no read of the source too many."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Subset

import fastload
from fastload.cache.build.build import build_lmdb
from fastload.cache.dataset import CachedDataset
from fastload.cache.encoded import decode_images, encoded_source
from fastload.files.read_ahead import ReadAhead
from fastload.images.encoded import EncodedImage
from fastload.images.folder import ImageFolder
from tests.cache.zoo import Everything, Images, MixedImages, RaggedImages
from tests.images.test_encoded import noise
from tests.kit.batches import assert_same_samples
from tests.kit.remote import FaultyFileSystem, register, upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("registry")

SIZE, BATCH = 12, 5
URL = "faulty://bucket/photos"


class Arrays(Images):
    """Rows of an array in memory."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.rows = np.arange(SIZE * 60, dtype=np.float32).reshape(SIZE, 20, 3)

    def sample(self, index: int) -> Any:
        return self.rows[index], index


class Files(Images):
    """The files of images, undecoded."""

    def __init__(self, root: Path) -> None:
        super().__init__(SIZE)
        self.root = root

    def sample(self, index: int) -> Any:
        return {"image": EncodedImage(self.root / ("even", "odd")[index % 2] / f"{index:02}.png")}


class Reads:
    """Counts which samples of a source were asked for, by their indices.

    Attributes:
        announced: Of a folder: the samples that it was told to read ahead.
    """

    def __init__(self, source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source = source
        self.announced: set[int] = set()
        self._of_folder: Counter[int] = Counter()
        sample, announce = ImageFolder._sample, ReadAhead.announce

        def counted(folder: ImageFolder, index: int) -> tuple[str, int]:
            self._of_folder[index] += 1
            return sample(folder, index)

        def noted(reader: ReadAhead, numbers: Any) -> None:
            numbers = list(numbers)
            self.announced.update(numbers)
            announce(reader, numbers)

        monkeypatch.setattr(ImageFolder, "_sample", counted)
        monkeypatch.setattr(ReadAhead, "announce", noted)

    def take(self) -> Counter[int]:
        """The reads since the last call."""
        if isinstance(self.source, Images):
            found = Counter(dict(enumerate(self.source.reads)))
            self.source._own_reads = [0] * SIZE
        else:
            found, self._of_folder = self._of_folder, Counter()
        return +found


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images of two classes and of different sizes."""
    root = tmp_path_factory.mktemp("photos")
    for index in range(SIZE):
        folder = root / ("even", "odd")[index % 2]
        folder.mkdir(exist_ok=True)
        Image.fromarray(noise(20 + index, 30 - index)).save(folder / f"{index:02}.png")
    return root


@pytest.fixture
def remote(photos: Path) -> Iterator[str]:
    """The same images at a URL."""
    register()
    FaultyFileSystem.reset()
    upload(photos, URL)
    yield URL
    FaultyFileSystem.reset()


SOURCES: dict[str, Callable[[Path, str], Any]] = {
    "arrays": lambda photos, url: Arrays(),
    "uniform": lambda photos, url: Images(SIZE),
    "ragged": lambda photos, url: RaggedImages(SIZE),
    "mixed": lambda photos, url: MixedImages(SIZE),
    "nests": lambda photos, url: Everything(SIZE),
    "files": lambda photos, url: Files(photos),
    "folder": lambda photos, url: ImageFolder(photos),
    "resized folder": lambda photos, url: ImageFolder(photos, size=(8, 9)),
    "remote folder": lambda photos, url: ImageFolder(url),
    "subset of a remote folder": lambda photos, url: Subset(ImageFolder(url), range(SIZE)),
}
ENCODED = ("files", "folder", "remote folder", "subset of a remote folder")
CACHES = ("none", "ram", "lmdb", "ram over lmdb")
CASES = [(cache, source) for source in SOURCES for cache in CACHES] + [
    (cache, source)
    for source in ENCODED
    for cache in ("ram-encoded", "ram over ram-encoded", "lmdb of files", "ram over lmdb of files")
]


Case = tuple[str, CachedDataset, Reads, list[Any]]


@pytest.fixture(params=CASES, ids=" of ".join)
def opened(
    request: pytest.FixtureRequest, photos: Path, remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Case]:
    """Makes the name of a cache, a dataset with it, the reads of its source, and all samples."""

    def open_case() -> Case:
        name, kind = request.param
        source = SOURCES[kind](photos, remote)
        samples = [decode_images(source[index]) for index in range(SIZE)]
        reads = Reads(source, monkeypatch)
        path = tmp_path / "cache"
        if name.endswith("of files"):
            build_lmdb(encoded_source(source), path, codec="source", num_workers=0, progress=False)
        on_disk = ["ram", f"lmdb:{path}"] if name.startswith("ram over") else f"lmdb:{path}"
        cache: Any = {
            "none": None,
            "ram": "ram",
            "ram-encoded": "ram-encoded",
            "ram over ram-encoded": ["ram", "ram-encoded"],
        }.get(name, on_disk)
        dataset = CachedDataset(source, cache=cache, budget=1 << 24, num_workers=0, progress=False)
        reads.take()
        reads.announced.clear()
        return name, dataset, reads, samples

    return open_case


def loader_of(dataset: CachedDataset, rng: Any = "worker") -> Any:
    return fastload.DataLoader(dataset, BATCH, collate_fn=list, rng=rng)


def assert_right(batches: Any, samples: list[Any]) -> None:
    found = [sample for batch in batches for sample in batch]
    assert len(found) == len(samples)
    for one, other in zip(found, samples, strict=True):
        assert_same_samples(one, other)


def test_a_filled_cache_replaces_its_source(opened: Callable[[], Case]) -> None:
    """fill() reads a sample at most once, epochs and a resume after it none; cache=None reads all of them."""
    name, dataset, reads, samples = opened()

    dataset.fill(0, progress=False)
    assert max(reads.take().values(), default=0) <= (name != "none")
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


def test_epochs_read_a_sample_once(opened: Callable[[], Case]) -> None:
    """Without fill(), the first epoch reads what the cache lacks, and later ones nothing."""
    name, dataset, reads, samples = opened()
    lacking = {index for index in range(SIZE) if index not in dataset.cache}
    loader = loader_of(dataset, "sample")

    assert_right(loader, samples)
    assert reads.take() == Counter(lacking)
    assert reads.announced <= lacking
    reads.announced.clear()
    assert_right(loader, samples)
    if name == "none":
        assert reads.take() == Counter(range(SIZE))
    else:
        assert (reads.take(), reads.announced) == (Counter(), set())
    assert name == "none" or dataset.cache_info().num_cached == SIZE
