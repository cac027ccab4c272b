"""The file that an error is about: named where it is certain, by every kind of worker, never a wrong one."""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import fastload
from fastload.batch.failures import path_of
from tests.faults.test_on_error import MODES
from tests.kit.torchvision import import_torchvision

if TYPE_CHECKING:
    from pathlib import Path

CUT = 1  # the sample whose file is cut off


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Four JPEGs in the folder of a class, one of them cut off."""
    (tmp_path / "a").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for number in range(4):
        path = tmp_path / "a" / f"{number}.jpg"
        Image.fromarray(noise).save(path)
        if number == CUT:
            path.write_bytes(path.read_bytes()[:2000])
    return tmp_path


class Folder:
    """Reads images as torchvision's ImageFolder does."""

    def __init__(self, root: Path) -> None:
        self.paths = sorted((root / "a").iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return np.asarray(pil_loader(self.paths[index]))


def pil_loader(path: Path) -> Image.Image:
    with path.open("rb") as file:
        return Image.open(file).convert("RGB")


def image_folder(root: Path) -> Any:
    """The dataset of torchvision itself."""
    import_torchvision()
    from torchvision import datasets

    return datasets.ImageFolder(str(root), np.asarray)


@pytest.mark.parametrize(
    ("make", "mode", "cache"),
    [
        *((Folder, mode, "ram" if mode in ("no workers", "threads") else None) for mode in MODES),
        (image_folder, "processes", "ram"),
    ],
)
def test_a_folder_of_images(photos: Path, make: Any, mode: str, cache: str | None) -> None:
    """The note of the error and the failed sample have the path, with and without a cache."""
    folder, path = make(photos), str(photos / "a" / f"{CUT}.jpg")
    with (
        fastload.DataLoader(folder, 2, cache=cache, **MODES[mode]) as loader,
        pytest.raises(OSError, match="truncated") as caught,
    ):
        list(loader)
    assert f"dataset index {CUT}, {path}" in str(caught.value) + "".join(caught.value.__notes__)
    with fastload.DataLoader(
        folder, 2, cache=cache, on_error="replace", max_errors=1, **MODES[mode]
    ) as loader:
        list(loader)
        assert [sample.path for sample in loader.failed_samples] == [path]


def test_a_cache_that_is_filled(photos: Path) -> None:
    """It reports the path, whether it skips the sample or raises."""
    folder = fastload.CachedDataset(Folder(photos), cache="ram")
    with pytest.raises(fastload.errors.TooManyFailuresError, match=f"{CUT}.jpg"):
        folder.fill(num_workers=0, progress=False, on_error="skip", max_errors=0)
    with pytest.raises(OSError, match="truncated") as caught:
        folder.fill(num_workers=0, progress=False)
    assert f"{CUT}.jpg" in "".join(caught.value.__notes__)
    folder.cache.close()


def by_path(path: Path) -> Any:
    return np.asarray(Image.open(path))


def by_file(path: Path) -> Any:
    image = Image.open(open(path, "rb"))  # noqa: SIM115
    return image.resize((8, 8))


def by_closed_file(path: Path) -> Any:
    with path.open("rb") as file:
        return Image.open(file)


def by_text_file(path: Path) -> Any:
    with path.open(encoding="latin-1") as file:
        return _refuse(file)


def by_str_without_a_reader(path: Path) -> Any:
    return _refuse(str(path))


def _refuse(source: Any, other: Any = None, *, third: Any = None) -> Any:
    raise ValueError("no")


READS = [by_path, by_file, by_text_file, by_str_without_a_reader]


def error_of(read: Any, *args: Any) -> Exception:
    """What a call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  # of any library
        read(*args)
    return caught.value


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("read", READS)
def test_however_a_file_is_read(photos: Path, read: Any) -> None:
    """By path, as a file, lazily: the innermost function that got a file got this one."""
    path = photos / "a" / f"{CUT}.jpg"
    assert path_of(error_of(lambda: read(path))) == str(path)


def test_what_is_no_image(tmp_path: Path) -> None:
    """A file that Pillow does not know, as torchvision opens it."""
    (tmp_path / "text.jpg").write_text("no image")
    assert path_of(error_of(by_closed_file, tmp_path / "text.jpg")) == str(tmp_path / "text.jpg")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_nothing_is_guessed(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files, a file read before, a member of an archive, a word that happens to be a file: no path."""
    first, second = photos / "a" / "0.jpg", photos / "a" / "1.jpg"
    monkeypatch.chdir(photos)
    (photos / "cat").write_text("")
    with zipfile.ZipFile(photos / "all.zip", "w") as archive:
        archive.write("a/0.jpg")

    def after_reading() -> None:
        path = first
        by_path(path)
        _refuse(None)

    def of_archive() -> None:
        with zipfile.ZipFile("all.zip") as archive, archive.open("a/0.jpg") as member:
            _refuse(io.BufferedReader(member))  # type: ignore[arg-type]

    for read in (
        lambda: _refuse(first, str(second)),
        lambda: _refuse(first, third=second.open("rb")),
        lambda: _refuse("cat"),
        lambda: _refuse(str(photos)),
        lambda: _refuse("a/absent.jpg"),
        after_reading,
        of_archive,
    ):
        assert path_of(error_of(read)) is None
