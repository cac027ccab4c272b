"""Caches of undecoded images: the same batches from each cache, and errors that name the file."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import albumentations as A
import numpy as np
import pytest
import torch
import torch.utils.data as tud
from PIL import Image
from typer.testing import CliRunner

import fastload
from fastload.cache.build.build import build_lmdb
from fastload.cache.dataset import CachedDataset
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cli import main
from fastload.errors import CacheMismatchError, ImageReadError
from fastload.images.encoded import EncodedImage
from fastload.images.folder import ImageFolder
from fastload.images.jpeg import parse_jpeg
from fastload.images.restarts import has_restarts
from tests.images.test_encoded import noise
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("registry")

NUM_IMAGES = 12
SIDE = 32  # of the crops
# About half of the decoded images.
SMALL_BUDGET = 200_000
CACHES: dict[str, Any] = {
    "ram": "ram",
    "ram-encoded": "ram-encoded",
    "none": None,
    "both": ["ram", "ram-encoded"],
    "part of both": ["ram", "ram-encoded"],
    "lmdb": "lmdb",
    "ram over lmdb": "lmdb",
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve JPEGs of two classes, of different sizes; some of them are turned by EXIF."""
    root = tmp_path_factory.mktemp("photos")
    for index in range(NUM_IMAGES):
        folder = root / ("even", "odd")[index % 2]
        folder.mkdir(exist_ok=True)
        exif = Image.Exif()
        exif[0x0112] = index % 9 or 1
        pixels = np.roll(noise(80 + index, 130 - index), 5 * index, axis=1)
        Image.fromarray(pixels).save(folder / f"{index:02}.jpg", exif=exif)
    return root


def pipeline() -> Any:
    return A.Compose([A.RandomCrop(SIDE, SIDE), A.HorizontalFlip(), A.RandomBrightnessContrast()])


def opened(name: str, dataset: Any, transform: Any, tmp_path: Path, **options: Any) -> CachedDataset:
    """A CachedDataset with the cache of this name."""
    cache = CACHES[name]
    if cache == "lmdb":
        path = tmp_path / "source.lmdb"
        if not path.exists():
            encoded = fastload.cache.encoded.encoded_source(dataset)
            build_lmdb(encoded, path, codec="source", num_workers=0).close()
        return CachedDataset.from_cache(path, transform, ram=name != "lmdb", **options)
    max_memory = SMALL_BUDGET if name == "part of both" else 1 << 24
    return CachedDataset(dataset, transform, cache=cache, max_memory=max_memory, **options)


def batches_of(dataset: Any, **options: Any) -> list[Any]:
    """Two shuffled epochs."""
    generator = torch.Generator().manual_seed(3)
    loader = fastload.DataLoader(
        dataset, batch_size=5, shuffle=True, rng="sample", generator=generator, **options
    )
    with loader:
        return [[part.clone() for part in batch] for _ in range(2) for batch in loader]


def assert_same_batches(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


WAYS: dict[str, dict[str, Any]] = {
    "no workers": {"num_workers": 0},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "threads": {"num_workers": 2, "worker_type": "thread"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(
            ("ram", "no workers"),
            ("ram-encoded", "fork"),
            ("ram-encoded", "forkserver"),
            ("none", "forkserver"),
        ),
        *(("both", "no workers"), ("part of both", "threads"), ("part of both", "fork"), ("lmdb", "threads")),
        *(("lmdb", "no workers"), ("ram over lmdb", "fork")),
    ],
)
def test_every_cache_gives_the_same_batches(name: str, way: str, photos: Path, tmp_path: Path) -> None:
    """Two shuffled epochs are those of a cache of decoded images, without workers and in all of them."""
    options = WAYS.get(way, {"num_workers": 1, "multiprocessing_context": way, "persistent_workers": True})
    decoded = CachedDataset(ImageFolder(photos), pipeline(), cache="ram")
    # Persistent workers too: as in torch, the second epoch then has another order than without workers.
    forked = {**options, "multiprocessing_context": "fork"}
    expected = batches_of(decoded, **({"num_workers": 0} if way in WAYS else forked))

    assert_same_batches(
        batches_of(opened(name, ImageFolder(photos), pipeline(), tmp_path), **options), expected
    )


def test_torchs_loader(photos: Path, tmp_path: Path) -> None:
    """Torch's own DataLoader reads these datasets, with persistent workers."""
    fixed = A.Compose([A.CenterCrop(SIDE, SIDE)])
    ds = opened("part of both", ImageFolder(photos), fixed, tmp_path)
    folder = ImageFolder(photos)
    loader = tud.DataLoader(
        ds, batch_size=4, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    for _ in range(2):
        images = torch.cat([batch[0] for batch in loader])
        for index in range(NUM_IMAGES):
            np.testing.assert_array_equal(images[index], fixed(image=folder[index][0])["image"])
    del loader


# --- datasets of users -----------------------------------------------------------------------------------


class Pair(NamedTuple):
    image: Any
    label: int


class Own:
    """Undecoded images of a folder in samples of one form.

    Args:
        root: Of the folder.
        form: The name of the form.
        is_decoded: Whether images are decoded instead.
    """

    def __init__(self, root: Path, form: str, *, is_decoded: bool = False) -> None:
        self.folder = ImageFolder(root)
        self.form = form
        self.is_decoded = is_decoded

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> Any:
        path, label = self.folder.samples[index]
        image: Any = EncodedImage(path)
        if self.is_decoded:
            image = image.decode()
        return {
            "alone": lambda: image,
            "tuple": lambda: (image, label, "text"),
            "list": lambda: [image, label],
            "namedtuple": lambda: Pair(image, label),
            "dict": lambda: {"image": image, "mask": image, "label": label},
            "nested": lambda: {"image": image, "more": [{"again": (image, label)}]},
        }[self.form]()


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("alone", "ram"), ("tuple", "lmdb"), ("list", "ram-encoded"), ("namedtuple", "part of both")),
        *(("dict", "none"), ("nested", "both"), ("nested", "lmdb"), ("dict", "ram-encoded")),
    ],
)
def test_samples_of_every_form(form: str, name: str, photos: Path, tmp_path: Path) -> None:
    """EncodedImage values anywhere in a sample are decoded, with and without a transform."""
    decoded = Own(photos, form, is_decoded=True)
    plain = opened(name, Own(photos, form), None, tmp_path)
    transform = A.Compose([A.CenterCrop(SIDE, SIDE)])
    cropped = opened(name, Own(photos, form), transform, tmp_path)
    expected = CachedDataset(decoded, transform)
    for _ in range(2):
        for index in (0, 3, NUM_IMAGES - 1):
            assert_same_samples(plain[index], decoded[index])
            assert_same_samples(cropped[index], expected[index])


class Relabelled(ImageFolder):
    """A subclass with other samples than the folder's."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return 255 - image, 10 + label


class Undecoded(ImageFolder):
    """A subclass that gives undecoded images."""

    def __getitem__(self, index: int) -> Any:
        return self.encoded(index)


def test_a_subclass_with_samples_of_its_own(photos: Path) -> None:
    """A subclass of ImageFolder that overrides only __getitem__ is read through __getitem__."""
    dataset = Relabelled(photos)
    assert_same_samples(CachedDataset(dataset, cache=None)[3], dataset[3])
    with pytest.raises(ValueError, match="needs samples with undecoded images, but Relabelled"):
        CachedDataset(dataset, cache="ram-encoded")


@pytest.mark.parametrize("name", ["ram-encoded", "none"])
def test_subsets_and_chains(name: str, photos: Path, tmp_path: Path) -> None:
    """Torch's Subset and ConcatDataset of ImageFolder give undecoded images, too; so may a subclass of it."""
    folder = ImageFolder(photos)
    subset = tud.Subset(tud.Subset(folder, range(1, 9)), [5, 2, 0])
    for dataset in (subset, tud.ConcatDataset([folder] * 2)):
        ds = opened(name, dataset, None, tmp_path)
        for index in range(len(dataset)):
            assert_same_samples(ds[index], dataset[index])
    assert_same_samples(opened(name, Undecoded(photos), None, tmp_path)[3], folder[3])


def test_a_cache_of_a_cache(photos: Path) -> None:
    """A CachedDataset over another one caches its decoded samples."""
    inner = CachedDataset(ImageFolder(photos), A.Compose([A.CenterCrop(SIDE, SIDE)]), cache="ram-encoded")
    outer = CachedDataset(inner)

    assert_same_samples(outer[4], inner[4])
    with pytest.raises(ValueError, match="needs samples with undecoded images, but CachedDataset"):
        CachedDataset(inner, cache="ram-encoded")


# --- the caches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "photos-1"])
def test_caches_of_one_dataset_are_never_mistaken(key: str | None, photos: Path) -> None:
    """Decoded and undecoded caches of one dataset are found by equal caches, and only by them."""
    folder = ImageFolder(photos)
    decoded, encoded = (CachedDataset(folder, cache_key=key, cache=cache) for cache in ("ram", "ram-encoded"))
    decoded.fill(0, progress=False), encoded.fill(0, progress=False)
    again = CachedDataset(folder, cache_key=key, cache="ram-encoded")
    decoded_again = CachedDataset(folder, cache_key=key, cache="ram")
    both = CachedDataset(folder, cache_key=key, cache=["ram", "ram-encoded"])

    assert again.cache_info().num_cached == decoded_again.cache_info().num_cached == NUM_IMAGES
    for ds in (decoded, encoded, again, decoded_again, both):
        assert_same_samples(ds[5], folder[5])
    assert type(again._view(5)[0]) is EncodedImage
    assert type(decoded_again._view(5)[0]) is np.ndarray


def test_a_part_is_kept_decoded(photos: Path) -> None:
    """Files take about their own bytes; with a small budget some samples are decoded beside them."""
    encoded = CachedDataset(ImageFolder(photos), cache="ram-encoded", max_memory=1 << 24).fill(
        0, progress=False
    )
    file_bytes = sum(path.stat().st_size for path in photos.glob("*/*"))
    ds = CachedDataset(ImageFolder(photos), cache=["ram", "ram-encoded"], max_memory=SMALL_BUDGET)
    info = ds.fill(0, progress=False)
    kinds = [type(ds._view(index)[0]) for index in range(NUM_IMAGES)]

    assert info.num_cached == encoded.num_cached == NUM_IMAGES
    assert file_bytes <= encoded.nbytes < 1.2 * file_bytes + 4096 * NUM_IMAGES
    assert 0 < kinds.count(np.ndarray) < NUM_IMAGES
    assert info.layout.endswith("over encoded")
    assert info.max_bytes is not None
    assert info.nbytes <= info.max_bytes <= SMALL_BUDGET


def test_without_a_cache(tmp_path: Path) -> None:
    """cache=None stores nothing, and reads a file again after it was changed."""
    (tmp_path / "a").mkdir()
    Image.new("L", (7, 5), 10).save(tmp_path / "a" / "0.png")
    ds = CachedDataset(ImageFolder(tmp_path), cache=None)
    before = ds[0][0].max()
    Image.new("L", (7, 5), 20).save(tmp_path / "a" / "0.png")

    assert (before, ds[0][0].max()) == (10, 20)
    assert ds.fill(progress=False) == fastload.cache.CacheInfo(1, 0, 0, None, "none")
    assert "every access reads the dataset" in ds.explain()


class RandomOwn(Own):
    """A random label."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], random.random(), float(np.random.rand())


def test_random_datasets_without_a_cache(photos: Path) -> None:
    """With cache=None a dataset may be random, and draws from the generators as without fastload."""
    dataset = RandomOwn(photos, "tuple")
    ds = CachedDataset(dataset, cache=None)
    numbers = []
    for source in (dataset, ds):
        random.seed(1), np.random.seed(1)
        numbers.append([source[index][1:] for index in (0, 0, 1)])

    assert numbers[0] == numbers[1]
    assert numbers[0][0] != numbers[0][1]


# --- what is refused, and damage -------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["ram-encoded", ["ram", "ram-encoded"]])
def test_refusals(cache: Any, photos: Path) -> None:
    """prepare=, ImageFolder(size=) and datasets without undecoded images are refused with advice."""
    with pytest.raises(ValueError, match="omit prepare="):
        CachedDataset(ImageFolder(photos), cache=cache, prepare=A.Compose([A.Resize(9, 9)]))
    with pytest.raises(ValueError, match="omit size="):
        CachedDataset(ImageFolder(photos, size=20), cache=cache)
    with pytest.raises(ValueError, match=r"return fastload\.EncodedImage"):
        CachedDataset(Own(photos, "tuple", is_decoded=True), cache=cache)
    with pytest.raises(ValueError, match='decode should be "exact" or "fast"'):
        CachedDataset(ImageFolder(photos), cache=cache, decode="quick")  # type: ignore[arg-type]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Eight images; one of them is cut short, behind its header."""
    folder = tmp_path / "damaged" / "a"
    folder.mkdir(parents=True)
    for index in range(8):
        Image.fromarray(noise(60 + index, 70)).save(folder / f"{index}.jpg")
    content = (folder / "5.jpg").read_bytes()
    (folder / "5.jpg").write_bytes(content[: len(content) // 2])
    return folder.parent


@pytest.mark.parametrize("name", ["ram-encoded", "none", "lmdb"])
def test_a_damaged_file_names_its_path(name: str, damaged: Path, tmp_path: Path) -> None:
    """A file that cannot be decoded raises ImageReadError with its path, from each cache."""
    ds = opened(name, ImageFolder(damaged), pipeline(), tmp_path)
    for _ in range(2):
        with pytest.raises(ImageReadError, match=r"damaged/a/5\.jpg"):
            ds[5]
    assert ds[4][0].shape == (SIDE, SIDE, 3)


@pytest.mark.parametrize(("name", "num_workers"), [("ram", 0), ("ram-encoded", 2), ("lmdb", 0), ("both", 2)])
def test_damaged_files_are_replaced(name: str, num_workers: int, damaged: Path, tmp_path: Path) -> None:
    """on_error="replace" of the loader puts another sample in the place of a damaged one."""
    ds = opened(name, ImageFolder(damaged), pipeline(), tmp_path)
    loader = fastload.DataLoader(
        ds, batch_size=4, on_error="replace", max_errors=4, num_workers=num_workers, rng="sample"
    )
    with loader:
        assert [len(images) for images, _ in loader] == [4, 4]


# --- files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_command_line(num_workers: int, photos: Path, tmp_path: Path) -> None:
    """`cache build --codec source` and `info` work; samples are the folder's, which knows its cache."""
    dest, folder = tmp_path / "photos.lmdb", ImageFolder(photos)
    build = ("build", photos, dest, "--codec", "source", "--workers", num_workers, "--quiet")
    outputs = [CliRunner().invoke(main.app, ["cache", *map(str, words)]) for words in (build, ("info", dest))]
    ds, beside = CachedDataset.from_cache(dest), CachedDataset(folder, pipeline(), cache=f"lmdb:{dest}")

    assert [result.exit_code for result in outputs] == [0, 0]
    assert "source" in outputs[1].output
    assert ds.classes == folder.classes
    for index in range(NUM_IMAGES):
        assert_same_samples(ds[index], folder[index])
    assert dest.stat().st_size < 3 * sum(path.stat().st_size for path in photos.glob("*/*")) + (1 << 17)
    assert beside.cache_info().num_cached == NUM_IMAGES
    assert type(beside._view(2)[0]) is EncodedImage
    with pytest.raises(CacheMismatchError):
        CachedDataset(tud.Subset(folder, range(5)), cache=f"lmdb:{dest}")


def test_files_with_tiles(photos: Path, tmp_path: Path) -> None:
    """`cache build --codec tiles` rewrites JPEGs without loss; the cache is still that of the folder."""
    dest, folder = tmp_path / "photos.lmdb", ImageFolder(photos)
    words = ["cache", "build", photos, dest, "--codec", "tiles", "--workers", 0, "--quiet"]
    assert CliRunner().invoke(main.app, [*map(str, words)]).exit_code == 0

    ds, beside = CachedDataset.from_cache(dest), CachedDataset(folder, pipeline(), cache=f"lmdb:{dest}")

    assert beside.cache_info().num_cached == NUM_IMAGES
    for index in range(NUM_IMAGES):
        assert_same_samples(ds[index], folder[index])
        header = parse_jpeg(beside._view(index)[0].content())
        assert header is not None
        assert has_restarts(header)
    with pytest.raises(CacheMismatchError, match="codec"):
        build_lmdb(fastload.cache.encoded.encoded_source(folder), dest, codec="source")


def test_files_that_cannot_have_tiles_are_kept(damaged: Path, tmp_path: Path) -> None:
    """PNG, progressive and damaged files are stored as they are, without a fingerprint, too."""
    Image.fromarray(noise(40, 50)).save(damaged / "a" / "0.jpg", "png")
    Image.fromarray(noise(40, 50)).save(damaged / "a" / "1.jpg", "jpeg", progressive=True)
    paths = sorted((damaged / "a").iterdir())
    dataset = [(EncodedImage(path), 0) for path in paths]

    build_lmdb(dataset, tmp_path / "cache", codec="tiles", num_workers=0).close()

    ds = CachedDataset(dataset, cache=f"lmdb:{tmp_path / 'cache'}")
    for index, path in enumerate(paths):
        is_kept = bytes(ds._view(index)[0].content()) == path.read_bytes()
        assert is_kept == (index in (0, 1, 5))


class Large(tud.Dataset[Any]):
    """Pictures that are worth decoding in part."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.roll(noise(260, 300), 9 * index, axis=1), index


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_crops_of_a_file_of_jpegs_decode_their_tiles(num_workers: int, tmp_path: Path) -> None:
    """The batches are those of decoded images; a cache in RAM before the file holds decoded ones."""
    path = tmp_path / "jpegs.lmdb"
    build_lmdb(Large(), path, codec="jpeg", num_workers=0).close()
    ds, in_ram = (CachedDataset.from_cache(path, pipeline(), ram=ram) for ram in (False, True))
    beside = CachedDataset(Large(), pipeline(), cache=f"lmdb:{path}")

    assert type(ds._view(2)[0]) is type(beside._view(2)[0]) is EncodedImage
    assert type(in_ram._view(2)[0]) is np.ndarray
    assert "only the tiles in the region of RandomCrop are decoded" in ds.explain()
    assert_same_samples(CachedDataset.from_cache(path)[2], in_ram._lend(2))
    expected = batches_of(in_ram, num_workers=num_workers)
    assert_same_batches(batches_of(ds, num_workers=num_workers), expected)
    assert_same_batches(batches_of(beside, num_workers=num_workers), expected)


def test_a_file_of_sources_knows_its_samples_in_another_place(tmp_path: Path) -> None:
    """Without a fingerprint, sample 0 is compared: by the content of its file, not by its path."""
    rng = np.random.default_rng(0)
    for name in ("here", "other"):
        (tmp_path / name).mkdir()
        for number in range(3):
            image = Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8))
            image.save(tmp_path / name / f"{number}.png")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    build_lmdb(Paths(tmp_path / "here"), tmp_path / "cache", codec="source", num_workers=0).close()
    cache = f"lmdb:{tmp_path / 'cache'}"

    moved = CachedDataset(Paths(tmp_path / "there"), cache=cache)

    assert np.array_equal(moved[1][0], np.asarray(Image.open(tmp_path / "here" / "1.png")))
    with pytest.raises(CacheMismatchError, match="the content of sample 0 is"):
        CachedDataset(Paths(tmp_path / "other"), cache=cache)


def test_a_file_of_sources_needs_undecoded_images(tmp_path: Path) -> None:
    """Decoded arrays would be stored as they are, under a name that promises files."""
    arrays = tud.StackDataset(list(np.zeros((3, 8, 8, 3), np.uint8)), range(3))

    with pytest.raises(ValueError, match=r"stores the files .* sample 0 is a tuple of .*EncodedImage"):
        build_lmdb(arrays, tmp_path / "cache", codec="source", num_workers=0)

    assert list(tmp_path.iterdir()) == []


class Paths(tud.Dataset[Any]):
    """Undecoded images by their paths, without a fingerprint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[EncodedImage, int]:
        return EncodedImage(self.folder / f"{index}.png"), index


def test_damaged_headers_are_left_out(damaged: Path, tmp_path: Path) -> None:
    """A build with on_error="skip" leaves out files whose header cannot be read."""
    (damaged / "a" / "2.jpg").write_bytes(b"no image")
    source = fastload.cache.encoded.encoded_source(ImageFolder(damaged))
    path = tmp_path / "skipped.lmdb"
    build_lmdb(source, path, codec="source", num_workers=0, on_error="skip", max_errors=1.0).close()

    assert LMDBCache(path).num_cached == 7


class OfPIL:
    """Samples that no cache stores."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return Image.new("RGB", (8, 6), (index, 0, 0)), index


def test_without_a_cache_samples_may_be_of_any_type() -> None:
    """Nothing is stored, so nothing is refused."""
    dataset = CachedDataset(OfPIL(), lambda sample: (np.asarray(sample[0]), sample[1]), cache=None)

    image, index = dataset[1]
    assert (image.shape, int(image[0, 0, 0]), index) == ((6, 8, 3), 1, 1)


def test_without_a_cache_the_dataset_s_own_arrays_are_safe() -> None:
    """A transform that writes to its input does not change what the dataset holds."""
    held = [np.zeros((4, 4, 3), np.uint8)]

    def brighten(image: Any) -> Any:
        image += 1
        return image

    dataset = CachedDataset(held, brighten, cache=None)

    assert dataset[0].max() == dataset[0].max() == 1
    assert held[0].max() == 0


def test_decode_is_checked_when_it_is_set_later(photos: Path) -> None:
    """A word that is not valid raises at the next access, and the right one works again."""
    dataset = CachedDataset(ImageFolder(photos), pipeline(), cache=None)
    dataset.decode = "quick"  # type: ignore[assignment]

    with pytest.raises(ValueError, match='"exact" or "fast"'):
        dataset[0]
    dataset.decode = "fast"
    assert dataset[0][0].shape == (SIDE, SIDE, 3)


def test_the_files_of_a_folder_are_shared_under_another_spelling_of_its_path(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paths in the cached samples may differ: the content of the files decides."""
    first = CachedDataset(ImageFolder(photos), cache="ram-encoded")
    assert first.fill(num_workers=0, progress=False).num_cached == len(first)
    monkeypatch.chdir(photos.parent)

    second = CachedDataset(ImageFolder(photos.name), cache="ram-encoded")

    assert second.cache_info().num_cached == len(first)
