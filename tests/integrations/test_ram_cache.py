"""`cache="ram"`: ImageFolders are decoded once, with the same samples; every other dataset is named."""

from __future__ import annotations

import logging
import os
import pickle
import random
import re
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.data as tud
from PIL import Image, ImageOps, PngImagePlugin

import fastload
from fastload.integrations import ram_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

decoded: list[str] = []

# This module stands for torchvision.datasets.folder, with its attributes and the code that reads samples.


def pil_loader(path: str) -> Image.Image:
    with open(path, "rb") as f:
        img = Image.open(f)
        return img.convert("RGB")


def default_loader(path: str) -> Any:
    return pil_loader(path)


class DatasetFolder(torch.utils.data.Dataset[Any]):
    """As torchvision's ImageFolder, but for its checks."""

    def __init__(
        self, root: str, transform: Any = None, target_transform: Any = None, loader: Any = None
    ) -> None:
        self.root = root
        self.transform = transform
        self.target_transform = target_transform
        self.classes = sorted(os.listdir(root))
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.loader = loader or default_loader
        self.samples = [
            (os.path.join(root, name, file), number)
            for name, number in self.class_to_idx.items()
            for file in sorted(os.listdir(os.path.join(root, name)))
        ]
        self.targets = [target for _, target in self.samples]
        self.imgs = self.samples

    def __getitem__(self, index: int) -> Any:
        path, target = self.samples[index]
        sample = self.loader(path)
        if self.transform is not None:
            sample = self.transform(sample)
        if self.target_transform is not None:
            target = self.target_transform(target)

        return sample, target

    def __len__(self) -> int:
        return len(self.samples)


class ImageFolder(DatasetFolder):
    """The same."""


def plant(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Put the stand-in where torchvision would be imported."""
    package, datasets = types.ModuleType("torchvision"), types.ModuleType("torchvision.datasets")
    package.get_image_backend = lambda: "PIL"  # type: ignore[attr-defined]
    modules = {"torchvision": package, "torchvision.datasets": datasets}
    for name, module in (modules | {"torchvision.datasets.folder": sys.modules[__name__]}).items():
        monkeypatch.setitem(sys.modules, name, module)
    return package


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plant(monkeypatch)
    decoded.clear()
    ram_cache._say_once.cache_clear()
    yield
    fastload.unpatch_torch()
    for cached in list(ram_cache._caches.values()):
        cached.cache.close()
    ram_cache._caches.clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Six images: of two sizes and three modes, with EXIF data that turns one, and with texts."""
    exif = Image.Exif()
    exif[0x0112] = 6
    texts = PngImagePlugin.PngInfo()
    texts.add_text("title", "a picture")
    texts.add_itxt("author", "one", lang="en")
    options: list[dict[str, Any]] = [{"exif": exif}, {"dpi": (72, 72)}, {"pnginfo": texts}]
    generator = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number, saved in enumerate(options):
            pixels = generator.integers(0, 255, (12 + number, 16, 3), np.uint8)
            kind = "PNG" if number == 2 else "JPEG"
            mode = "P" if name == "dog" and number == 2 else "RGB"
            Image.fromarray(pixels).convert(mode).save(tmp_path / name / f"{number}", kind, **saved)
    return tmp_path


class Examine:
    """A random transform that sees everything of its image."""

    def __call__(self, image: Any) -> Any:
        seen = {name: repr(value) for name, value in vars(image).items() if name not in ("im", "_im")}
        turned = ImageOps.exif_transpose(image)  # reads info
        pixels = image.load()
        pixels[0, 0] = (1, 2, 3)  # an image of its own: nobody else sees this
        return type(image), image.mode, image.size, image.tobytes(), turned.tobytes(), seen, random.random()


def epoch(dataset: Any, **options: Any) -> list[Any]:
    """All samples of a loader with a random order."""
    torch.manual_seed(2)
    random.seed(2)
    loader = tud.DataLoader(dataset, 2, shuffle=True, collate_fn=list, **options)
    return [sample for batch in loader for sample in batch]


def counting_loader(path: str) -> Any:
    decoded.append(path)
    return pil_loader(path)


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "seeding"), [(0, "sample"), (1, "worker"), (1, "sample")])
def test_samples_of_torchvision_s_folder_are_the_same(root: Path, num_workers: int, seeding: str) -> None:
    """Also of subsets, which share its cache: what a random transform sees and draws, in every epoch."""
    folder = ImageFolder(str(root), Examine(), target_transform=str)
    parts = [folder, *tud.random_split(folder, [4, 2]), tud.Subset(tud.Subset(folder, [5, 1, 3]), [2, 0])]
    if seeding == "sample":
        fastload.patch_torch(seeding="sample")
    expected = [epoch(part, num_workers=num_workers) for part in parts]
    fastload.patch_torch(cache="ram")
    for _ in range(2):
        assert [epoch(part, num_workers=num_workers) for part in parts] == expected
    assert folder.loader.images.cache_info().num_cached == 6


class Paths(ImageFolder):
    """Returns more than its class does."""

    def __getitem__(self, index: int) -> Any:
        path, _ = self.samples[index]
        return path, self.loader(path).tobytes()


@pytest.mark.parametrize("kind", [ImageFolder, Paths])
def test_each_image_is_decoded_once(root: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all epochs and loaders of one dataset, whatever a subclass does; a first look counts, too."""
    monkeypatch.setitem(globals(), "default_loader", counting_loader)
    folder = kind(str(root), Examine(), loader=counting_loader)
    expected = epoch(folder)
    decoded.clear()
    fastload.patch_torch(cache="ram")
    epoch(folder)
    num_decoded = len(decoded)
    assert set(decoded) == {path for path, _ in folder.samples}
    assert [epoch(folder), epoch(folder)] == [expected] * 2
    assert len(decoded) == num_decoded


def test_the_loader_s_dataset_is_the_program_s_folder(root: Path) -> None:
    """What the program changes later holds: transforms, moved and new samples. It pickles, with its cache."""
    folder = ImageFolder(str(root))
    fastload.patch_torch(cache="ram")
    assert all(tud.DataLoader(folder).dataset is folder for _ in range(2))
    folder.target_transform = str
    twin = pickle.loads(pickle.dumps(folder))
    assert twin[3] == folder[3]
    assert twin[3][1] == "1"
    assert 3 in twin.loader.images.cache
    images = [folder[index][0].tobytes() for index in range(6)]
    new = root / "new"
    new.write_bytes((root / "cat" / "1").read_bytes())
    folder.samples.reverse()
    folder.samples.append((str(new), 0))
    assert [folder[index][0].tobytes() for index in range(7)] == [*reversed(images), images[1]]


def test_fastload_s_folder_is_cached(root: Path) -> None:
    """Its batches are the same, and CachedDataset holds them."""
    photos = fastload.ImageFolder(root, size=(8, 8), extensions=("",))
    expected = [*tud.DataLoader(photos, 4)]
    fastload.patch_torch(cache="ram")
    loader: Any = tud.DataLoader(photos, 4)
    for _ in range(2):
        for (images, labels), (ours, our_labels) in zip(expected, loader, strict=True):
            assert torch.equal(images, ours)
            assert torch.equal(labels, our_labels)
    assert loader.dataset.cache_info().num_cached == 6
    subset = tud.Subset(photos, [4, 1])  # a copy of it reads the same cache; the program's stays as it is
    dataset: Any = tud.DataLoader(subset).dataset
    assert [label for _, label in (dataset[0], dataset[1])] == [1, 0]
    assert dataset.dataset is loader.dataset
    assert subset.dataset is photos


def torchvisions(root: Path, loader: Any = None) -> Any:
    return ImageFolder(str(root), loader=loader)


WHY_NOT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another dataset": (lambda _: [1, 2], "builtins.list is not cached: only ImageFolder, torchvision's or"),
    "what to do": (lambda _: [1, 2], r"fastload\.CachedDataset\(dataset"),
    # It may be random, or return no image.
    "another loader": (lambda root: torchvisions(root, len), "len instead of torchvision's default_loader"),
    "another backend": (torchvisions, "backend is 'accimage'"),
    "broken files": (torchvisions, "the cache cannot be created: UnidentifiedImageError"),
}


@pytest.mark.parametrize("name", WHY_NOT)
def test_why_a_dataset_is_not_cached(
    name: str, root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, once; the loader has the dataset itself, and raises what reading it raises."""
    if name == "another backend":
        monkeypatch.setattr(plant(monkeypatch), "get_image_backend", lambda: "accimage")
    if name == "broken files":
        for path in root.rglob("*"):
            if path.is_file():
                path.write_bytes(b"no image")
    make, said = WHY_NOT[name]
    dataset = make(root)
    fastload.patch_torch(cache="ram")
    with caplog.at_level(logging.INFO, "fastload"):
        loaders = [tud.DataLoader(dataset) for _ in range(2)]
    assert all(loader.dataset is dataset for loader in loaders)
    (line,) = [record.getMessage() for record in caplog.records if "--cache ram" in record.getMessage()]
    assert re.search(said, line)
    if name == "broken files":
        with pytest.raises(OSError, match="cannot identify"):
            list(loaders[0])
