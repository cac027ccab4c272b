"""Caches of undecoded images: the same batches from each cache, and errors that name the file."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
import torch.utils.data as tud
from PIL import Image
from typer.testing import CliRunner

import fastload
from fastload.cache.build.build import build_lmdb
from fastload.cache.build.sources import encoded_source
from fastload.cache.dataset import CachedDataset, CacheInfo
from fastload.cache.format.undecoded import decode_images
from fastload.cli import main
from fastload.errors import CacheMismatchError, ImageReadError
from fastload.images.encoded import EncodedImage
from fastload.images.folder import ImageFolder
from tests.cache.zoo import Files, Made
from tests.images.test_encoded import noise
from tests.kit.batches import assert_same_samples

pytestmark = pytest.mark.usefixtures("registry_folder")

NUM_IMAGES = 12
SIDE = 32  # of the crops
SMALL_BUDGET = "40000B"  # for half of the files
CENTRE = A.Compose([A.CenterCrop(SIDE, SIDE)])


def pipeline() -> Any:
    return A.Compose([A.RandomCrop(SIDE, SIDE), A.HorizontalFlip(), A.RandomBrightnessContrast()])


def opened(name: str, dataset: Any, transform: Any, tmp_path: Path, **options: Any) -> CachedDataset:
    """A CachedDataset with the cache of this name."""
    if "lmdb" in name:
        path = tmp_path / "source.lmdb"
        if not path.exists():
            build_lmdb(encoded_source(dataset), path, codec="source", num_workers=0).close()
        return CachedDataset.from_cache(path, transform, **options)
    cache = {"none": None, "part of the files": "ram-encoded"}.get(name, name)
    max_memory = SMALL_BUDGET if name == "part of the files" else 1 << 24
    return CachedDataset(dataset, transform, cache=cache, max_memory=max_memory, **options)


def batches_of(dataset: Any, *, loader_class: Any = fastload.DataLoader, **options: Any) -> list[Any]:
    """Two shuffled epochs."""
    if loader_class is fastload.DataLoader:
        options["seeding"] = "sample"
    generator = torch.Generator().manual_seed(3)
    loader = loader_class(dataset, batch_size=5, shuffle=True, generator=generator, **options)
    return [[part.clone() for part in batch] for _ in range(2) for batch in loader]


PERSISTENT = {"num_workers": 1, "persistent_workers": True}
WAYS: dict[str, dict[str, Any]] = {
    "no workers": {"num_workers": 0},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "threads": {"num_workers": 2, "worker_type": "thread"},
    "forkserver": {**PERSISTENT, "multiprocessing_context": "forkserver"},
    "torch's": {**PERSISTENT, "multiprocessing_context": "fork", "loader_class": tud.DataLoader},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("ram-encoded", way) for way in ("fork", "forkserver")),
        *(("part of the files", way) for way in ("threads", "fork", "torch's")),
        *((name, "no workers") for name in ("ram", "lmdb")),
        *(("none", "fork"), ("lmdb", "threads"), ("lmdb", "fork")),
    ],
)
def test_every_cache_gives_the_same_batches(name: str, way: str, photos: Path, tmp_path: Path) -> None:
    """Two shuffled epochs are those of a cache of decoded images, in all workers and in torch's loader."""
    transform = CENTRE if way == "torch's" else pipeline()
    decoded = CachedDataset(ImageFolder(photos), transform, cache="ram")
    # Persistent workers too: as in torch, the second epoch then has another order than without workers.
    persistent = {**PERSISTENT, "multiprocessing_context": "fork"}
    expected = batches_of(decoded, **(persistent if "persistent_workers" in WAYS[way] else {}))
    dataset = opened(name, ImageFolder(photos), transform, tmp_path)
    assert_same_samples(batches_of(dataset, **WAYS[way]), expected)


# --- datasets of users -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("alone", "ram"), ("tuple", "lmdb"), ("list", "ram-encoded"), ("namedtuple", "part of the files")),
        *(("dict", "none"), ("nested", "ram-encoded"), ("nested", "lmdb"), ("dict", "ram-encoded")),
    ],
)
def test_samples_of_every_form(form: str, name: str, photos: Path, tmp_path: Path) -> None:
    """EncodedImage values anywhere in a sample are decoded, with and without a transform."""
    decoded = Files(photos, form, is_decoded=True)
    plain = opened(name, Files(photos, form), None, tmp_path)
    cropped = opened(name, Files(photos, form), CENTRE, tmp_path)
    expected = CachedDataset(decoded, CENTRE)
    for _ in range(2):
        for index in (0, 3, NUM_IMAGES - 1):
            assert_same_samples(plain[index], decoded[index])
            assert_same_samples(cropped[index], expected[index])


def changed(folder: ImageFolder, getitem: Any) -> ImageFolder:
    """A folder of a subclass with other samples."""
    return type("Changed", (ImageFolder,), {"__getitem__": getitem})(folder.root)


@pytest.mark.parametrize(
    ("make", "is_encoded"),
    [
        (lambda folder: tud.Subset(tud.Subset(folder, range(1, 9)), [5, 2, 0]), True),
        (lambda folder: tud.ConcatDataset([folder] * 2), True),
        (lambda folder: changed(folder, lambda self, index: self.encoded(index)), True),
        (lambda folder: changed(folder, lambda self, index: (np.zeros((9, 9, 3), np.uint8), index)), False),
        (lambda folder: CachedDataset(folder, CENTRE, cache="ram-encoded"), False),
    ],
    ids=["subset", "chain", "undecoded", "relabelled", "cache"],
)
def test_datasets_over_folders(make: Any, is_encoded: bool, photos: Path) -> None:
    """Torch's wrappers give undecoded images, too; a subclass or a cache is read by its own __getitem__."""
    dataset = make(ImageFolder(photos))
    if not is_encoded:
        with pytest.raises(ValueError, match=r"needs samples with undecoded images, but C"):
            CachedDataset(dataset, cache="ram-encoded")
    for cache in ("ram-encoded", None)[not is_encoded :]:
        ds = CachedDataset(dataset, cache=cache)
        for index in range(len(dataset)):
            assert_same_samples(ds[index], decode_images(dataset[index]))


# --- the caches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "photos-1"])
def test_caches_of_one_dataset_are_never_mistaken(key: str | None, photos: Path, monkeypatch: Any) -> None:
    """Decoded and undecoded ones are found by equal caches alone, under other spellings of the path too."""
    kinds = {"ram": np.ndarray, "ram-encoded": EncodedImage}
    folder = ImageFolder(photos)
    first = [CachedDataset(folder, cache_key=key, cache=cache) for cache in kinds]
    assert [ds.fill(0, progress=False).num_cached for ds in first] == [NUM_IMAGES] * 2
    monkeypatch.chdir(photos.parent)
    for again in (folder, ImageFolder(photos.name)):
        for cache, kind in kinds.items():
            ds = CachedDataset(again, cache_key=key, cache=cache)
            assert ds.cache_info().num_cached == NUM_IMAGES
            assert type(ds._view(5)[0]) is kind
            assert_same_samples(ds[5], folder[5])


def test_files_take_about_their_own_bytes(photos: Path) -> None:
    """Instead of those of the decoded images."""
    info = CachedDataset(ImageFolder(photos), cache="ram-encoded", max_memory=1 << 24).fill(0, progress=False)
    file_bytes = sum(path.stat().st_size for path in photos.glob("*/*"))
    assert info.num_cached == NUM_IMAGES
    assert file_bytes <= info.nbytes < 1.2 * file_bytes + 4096 * NUM_IMAGES


def test_without_a_cache(tmp_path: Path) -> None:
    """Nothing is stored: files are read again, any type is taken, and held arrays stay as they are."""
    (tmp_path / "a").mkdir()
    ds, found = None, []
    for value in (10, 20):
        Image.new("L", (7, 5), value).save(tmp_path / "a" / "0.png")
        ds = ds or CachedDataset(ImageFolder(tmp_path), cache=None)
        found.append(ds[0][0].max())
    assert found == [10, 20]
    assert ds.fill(progress=False) == CacheInfo(1, 0, 0, None, "none")
    assert "every access reads the dataset" in ds.explain()

    source = Made(lambda i: (Image.new("RGB", (8, 6), (i, 0, 0)), random.random(), float(np.random.rand())))
    odd, numbers = CachedDataset(source, lambda sample: (np.asarray(sample[0]), *sample[1:]), cache=None), []
    for dataset in (source, odd):  # draws from the generators as without fastload
        random.seed(1), np.random.seed(1)
        numbers.append([dataset[index][1:] for index in (0, 0, 1)])
    assert odd[1][0][0, 0, 0] == 1
    assert numbers[0] == numbers[1]
    assert numbers[0][0] != numbers[0][1]

    held = [np.zeros((4, 4, 3), np.uint8)]
    adding = CachedDataset(held, lambda image: np.add(image, 1, out=image), cache=None)
    assert adding[0].max() == adding[0].max() == 1
    assert held[0].max() == 0


# --- what is refused, and damage -------------------------------------------------------------------------


def test_refusals(photos: Path, tmp_path: Path) -> None:
    """What cannot be cached undecoded is refused with advice."""
    folder = ImageFolder(photos)
    for dataset, options, said in (
        (folder, {"pre_transform": A.Compose([A.Resize(9, 9)])}, "omit pre_transform="),
        (ImageFolder(photos, size=20), {}, "omit size="),
        (Files(photos, is_decoded=True), {}, r"return fastload\.EncodedImage"),
    ):
        with pytest.raises(ValueError, match=said):
            CachedDataset(dataset, cache="ram-encoded", **options)
    arrays = Made(lambda i: (np.zeros((8, 8, 3), np.uint8), i))
    with pytest.raises(ValueError, match=r"stores the files .* sample 0 is a tuple of .*EncodedImage"):
        build_lmdb(arrays, tmp_path / "cache", codec="source", num_workers=0)
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize(("name", "num_workers"), [("ram", 0), ("ram-encoded", 2), ("none", 0), ("lmdb", 0)])
def test_damaged_files(name: str, num_workers: int, damaged: Path, tmp_path: Path) -> None:
    """One raises ImageReadError with its path, each time; on_error="replace" puts another in its place."""
    ds = opened(name, ImageFolder(damaged), pipeline(), tmp_path)
    for _ in range(2):
        with pytest.raises(ImageReadError, match=r"damaged/a/5\.jpg"):
            ds[5]
    assert ds[4][0].shape == (SIDE, SIDE, 3)
    options: dict[str, Any] = {"on_error": "replace", "max_errors": 4, "seeding": "sample"}
    with fastload.DataLoader(ds, batch_size=4, num_workers=num_workers, **options) as loader:
        assert [len(images) for images, _ in loader] == [4, 4]


# --- files -----------------------------------------------------------------------------------------------


def test_files_of_files(photos: Path, tmp_path: Path) -> None:
    """`cache build --codec source` stores the files without loss; the folder knows its cache."""
    dest, folder = tmp_path / "photos.lmdb", ImageFolder(photos)
    build = ("build", photos, dest, "--codec", "source", "--num-workers", 2, "--quiet")
    outputs = [CliRunner().invoke(main.app, ["cache", *map(str, words)]) for words in (build, ("info", dest))]
    ds, beside = CachedDataset.from_cache(dest), CachedDataset(folder, pipeline(), cache=f"lmdb:{dest}")
    assert [result.exit_code for result in outputs] == [0, 0]
    assert "source" in outputs[1].output
    assert ds.classes == folder.classes
    assert beside.cache_info().num_cached == NUM_IMAGES
    for index in range(NUM_IMAGES):
        assert_same_samples(ds[index], folder[index])
        assert beside._view(index)[0].content() == Path(folder.samples[index][0]).read_bytes()
    assert dest.stat().st_size < 3 * sum(path.stat().st_size for path in photos.glob("*/*")) + (1 << 17)
    with pytest.raises(CacheMismatchError, match=r"num_samples|class"):
        CachedDataset(tud.Subset(folder, range(5)), cache=f"lmdb:{dest}")
    with pytest.raises(CacheMismatchError, match="codec"):
        build_lmdb(encoded_source(folder), dest, codec="jpeg")


def test_files_of_any_kind_are_kept(damaged: Path, tmp_path: Path) -> None:
    """PNG, progressive and damaged files are stored as they are; one whose header is damaged is left out."""
    Image.fromarray(noise(40, 50)).save(damaged / "a" / "0.jpg", "png")
    Image.fromarray(noise(40, 50)).save(damaged / "a" / "1.jpg", "jpeg", progressive=True)
    paths = sorted((damaged / "a").iterdir())
    paths[2].write_bytes(b"no image")
    dataset = [(EncodedImage(path), 0) for path in paths]
    options: dict[str, Any] = {"num_workers": 0, "on_error": "skip", "max_errors": 1.0}
    build_lmdb(dataset, tmp_path / "cache", codec="source", **options).close()
    ds = CachedDataset(dataset, cache=f"lmdb:{tmp_path / 'cache'}")
    assert ds.cache_info().num_cached == len(paths) - 1
    for index, path in enumerate(paths):
        if index != 2:
            assert ds._view(index)[0].content() == path.read_bytes()


def test_a_file_of_sources_knows_its_samples_in_another_place(photos: Path, tmp_path: Path) -> None:
    """Without a fingerprint, sample 0 is compared: by the content of its file, not by its path."""
    build_lmdb(Files(photos), tmp_path / "cache", codec="source", num_workers=0).close()
    cache = f"lmdb:{tmp_path / 'cache'}"
    shutil.copytree(photos, tmp_path / "there")
    moved = CachedDataset(Files(tmp_path / "there"), cache=cache)
    assert_same_samples(moved[1][0], ImageFolder(photos)[1][0])
    shutil.copy(tmp_path / "there/odd/01.jpg", tmp_path / "there/even/00.jpg")
    with pytest.raises(CacheMismatchError, match="the content of sample 0 is"):
        CachedDataset(Files(tmp_path / "there"), cache=cache)
