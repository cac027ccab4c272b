"""CachedDataset(cache=None): the same batches as from a cache, and errors that name the file."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import pytest
import torch
import torch.utils.data as tud
from PIL import Image

import fastload
from fastload.augmentation.encoded import EncodedImage
from fastload.cache.dataset import CachedDataset, CacheInfo
from fastload.errors import ImageReadError
from fastload.images.folder import ImageFolder
from tests.augmentation.test_encoded import noise
from tests.cache.zoo import Made
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("registry_folder")

NUM_IMAGES = 12
SIDE = 32  # of the crops
CENTRE, CENTRE_9 = (A.Compose([A.CenterCrop(side, side)]) for side in (SIDE, 9))


def pipeline() -> Any:
    return A.Compose([A.RandomCrop(SIDE, SIDE), A.HorizontalFlip(), A.RandomBrightnessContrast()])


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
@pytest.mark.parametrize("way", WAYS)
def test_crops_without_a_cache_are_those_of_cached_images(way: str, photos: Path) -> None:
    """Two shuffled epochs are those of a cache of decoded images, in all workers and in torch's loader."""
    transform = CENTRE if way == "torch's" else pipeline()
    decoded = CachedDataset(ImageFolder(photos), transform, cache="ram")
    # Persistent workers too: as in torch, the second epoch then has another order than without workers.
    persistent = {**PERSISTENT, "multiprocessing_context": "fork"}
    expected = batches_of(decoded, **(persistent if "persistent_workers" in WAYS[way] else {}))
    dataset = CachedDataset(ImageFolder(photos), transform, cache=None)
    assert_same_samples(batches_of(dataset, **WAYS[way]), expected)


# --- what is decoded in part -----------------------------------------------------------------------------


def changed(folder: ImageFolder) -> ImageFolder:
    """A folder of a subclass with other samples."""
    getitem = lambda self, index: (np.full((9, 9, 3), index, np.uint8), index)  # noqa: E731
    return type("Changed", (ImageFolder,), {"__getitem__": getitem})(folder.root)


@pytest.mark.parametrize(
    ("make", "is_encoded"),
    [
        (lambda folder: folder, True),
        (lambda folder: tud.Subset(tud.Subset(folder, range(1, 9)), [5, 2, 0]), True),
        (lambda folder: tud.ConcatDataset([folder, changed(folder)]), True),
        (lambda folder: type("Sub", (ImageFolder,), {})(folder.root), True),
        (changed, False),
        (lambda folder: ImageFolder(folder.root, size=40), False),
        (lambda folder: ImageFolder(folder.root, A.Compose([A.Resize(40, 40)])), False),
        (lambda folder: CachedDataset(folder), False),
        (lambda folder: Made(lambda index: folder[index], NUM_IMAGES), False),
    ],
)
def test_an_image_folder_is_decoded_in_part(make: Any, is_encoded: bool, photos: Path) -> None:
    """Through torch's wrappers, too; what has samples of its own, or other images, is read as it is."""
    dataset = make(ImageFolder(photos))
    plain, cropped = (CachedDataset(dataset, transform, cache=None) for transform in (None, CENTRE_9))
    assert (type(plain._view(1)[0]) is EncodedImage) is is_encoded
    assert ("decode" in cropped.explain()) is is_encoded
    for index in (0, len(dataset) - 1):
        image, label = dataset[index]
        assert_same_samples(plain[index], (image, label))
        assert_same_samples(cropped[index], (CENTRE_9(image=image)["image"], label))


def test_a_transform_of_the_folder_that_is_set_later_runs(photos: Path) -> None:
    """Its samples are then no longer the images of its files."""
    folder = ImageFolder(photos)
    dataset = CachedDataset(folder, CENTRE_9, cache=None)
    folder.transform = A.Compose([A.InvertImg(p=1)])
    assert_same_samples(dataset[3][0], CENTRE_9(image=folder[3][0])["image"])


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


# --- damage -------------------------------------------------------------------------


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


@pytest.mark.parametrize(("cache", "num_workers"), [("ram", 0), (None, 2)])
def test_damaged_files(cache: Any, num_workers: int, damaged: Path) -> None:
    """One raises ImageReadError with its path, each time; on_error="replace" puts another in its place."""
    ds = CachedDataset(ImageFolder(damaged), pipeline(), cache=cache)
    for _ in range(2):
        with pytest.raises(ImageReadError, match=r"damaged/a/5\.jpg"):
            ds[5]
    assert ds[4][0].shape == (SIDE, SIDE, 3)
    options: dict[str, Any] = {"on_error": "replace", "max_errors": 4, "seeding": "sample"}
    with fastload.DataLoader(ds, batch_size=4, num_workers=num_workers, **options) as loader:
        assert [len(images) for images, _ in loader] == [4, 4]
