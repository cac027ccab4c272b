"""Archives and stores whose root has the folders of classes; URLs of samples, which fsspec opens again."""

from __future__ import annotations

import io
import pickle
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from fastload.errors import ImageReadError
from fastload.files.file_systems import join_url
from fastload.files.remote import RemoteFolder
from fastload.images.folder import ImageFolder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

fsspec = pytest.importorskip("fsspec")

NAMES = ("cat/1.png", "dog/deep/2.png")


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((9, 9, 3), value, np.uint8)).save(file, "png")
    return file.getvalue()


@pytest.fixture
def archives(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The same images in a zip file, a tar file and memory, at the root and below a folder."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as packed, tarfile.open(tmp_path / "x.tar", "w") as tar:
        for value, name in enumerate(NAMES):
            for prefix in ("", "train/"):
                entry = tarfile.TarInfo(f"{prefix}{name}")
                entry.size = len(png(value))
                tar.addfile(entry, io.BytesIO(png(value)))
                packed.writestr(f"{prefix}{name}", png(value))
    memory = fsspec.filesystem("memory")
    for value, name in enumerate(NAMES):
        memory.pipe(f"/{name}", png(value))
        memory.pipe(f"/train/{name}", png(value))
    yield {"zip": f"{tmp_path / 'x.zip'}", "tar": f"{tmp_path / 'x.tar'}"}
    memory.rm("/", recursive=True)


@pytest.mark.parametrize(
    "url",
    [
        *("zip://::ZIP", "zip:///::ZIP", "zip::ZIP", "tar://::TAR", "memory://", "memory:///"),
        *("zip://train::ZIP", "zip://train/::ZIP", "tar://train::TAR", "memory://train"),
        "simplecache::memory://train/",
    ],
)
def test_every_root_is_listed_and_its_samples_open_again(url: str, archives: dict[str, str]) -> None:
    """Classes, images, and the names of samples, which fsspec opens and which errors have."""
    url = url.replace("ZIP", archives["zip"]).replace("TAR", archives["tar"])
    folder = ImageFolder(url)
    classes = [name for name in folder.classes if name != "train"]  # the root holds the other folder, too
    assert classes == ["cat", "dog"]
    chosen = [
        number for number in range(len(folder)) if folder[number][1] != folder.class_to_idx.get("train")
    ]
    assert [int(folder[number][0][0, 0, 0]) for number in chosen] == [0, 1]
    for (path, _), (image, _) in zip(folder.samples, folder, strict=True):  # type: ignore[call-overload]
        with fsspec.open(path) as file:
            assert np.array_equal(np.asarray(Image.open(file)), image)
    twin = pickle.loads(pickle.dumps(folder))
    assert np.array_equal(twin[0][0], folder[0][0])


def test_a_damaged_image_is_named_by_a_url_that_opens(archives: dict[str, str]) -> None:
    """Inside a folder of an archive."""
    memory: Any = fsspec.filesystem("memory")
    memory.pipe("/train/cat/1.png", b"no image")
    with pytest.raises(ImageReadError) as caught:
        ImageFolder("memory://train")[0]
    assert fsspec.open(caught.value.path).open().read() == b"no image"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/train", "s3://bucket/train/a/1.png"),
        ("memory://", "memory://a/1.png"),
        ("zip://::s3://b/x.zip", "zip://a/1.png::s3://b/x.zip"),
        ("zip::s3://b/x.zip", "zip://a/1.png::s3://b/x.zip"),
        ("simplecache::s3://b/train", "simplecache::s3://b/train/a/1.png"),
        ("filecache::zip://train::s3://b/x.zip", "filecache::zip://train/a/1.png::s3://b/x.zip"),
    ],
)
def test_the_name_goes_to_the_part_that_has_a_path(url: str, expected: str) -> None:
    """Not to the file that holds the archive, nor to a protocol that keeps copies."""
    assert join_url(url, "a/1.png") == expected


def test_samples_of_an_archive_can_be_selected(archives: dict[str, str]) -> None:
    """In another order; others are refused; a selection has a fingerprint of its own."""
    folder = ImageFolder(f"zip://train::{archives['zip']}")
    whole, samples, first = folder.fingerprint(), list(folder.samples), folder[0][0]
    folder.samples = samples[::-1]
    assert [label for _, label in folder] == [1, 0]  # type: ignore[attr-defined]
    assert np.array_equal(folder[1][0], first)
    assert folder.fingerprint() is None or folder.fingerprint() != whole
    with pytest.raises(ValueError, match="not in the list of files"):
        folder.samples = [("elsewhere.png", 0)]


@pytest.mark.parametrize("where", ["tar://::TAR", "tar://.::TAR", "tar::TAR"])
def test_a_tar_file_of_the_folder_itself_has_its_classes(where: str, tmp_path: Path) -> None:
    """``tar -cf x.tar -C photos .`` begins each name with "./", which is no class."""
    for value, name in enumerate(NAMES):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(png(value))
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(tmp_path / "photos", arcname=".")
    folder = pickle.loads(pickle.dumps(ImageFolder(where.replace("TAR", f"{tmp_path / 'x.tar'}"))))
    assert folder.classes == ["cat", "dog"]
    assert [(int(image[0, 0, 0]), label) for image, label in folder] == [(0, 0), (1, 1)]
    with fsspec.open(folder.samples[1][0]) as file:
        assert np.asarray(Image.open(file)).max() == 1


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("x.zip", r"fastload\.ImageFolder\('zip://::.*x\.zip'\)"),
        ("x.tar.gz", r"fastload\.ImageFolder\('tar://::.*x\.tar\.gz'\)"),
        ("x.jpg", "is a file, not a folder with one folder of images per class$"),
    ],
)
def test_a_file_as_the_root_is_an_error_that_knows_archives(name: str, advice: str, tmp_path: Path) -> None:
    """An archive needs a URL, which the error has."""
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(NotADirectoryError, match=advice):
        ImageFolder(tmp_path / name)


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_threads_read_whole_files_of_an_archive(kind: str, tmp_path: Path) -> None:
    """Fsspec reads a tar file through one handle, whose position all threads would share."""
    contents = {f"{number:02d}.bin": bytes([number]) * (200_000 + number) for number in range(40)}
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as packed, tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, content in contents.items():
            packed.writestr(name, content)
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    folder = RemoteFolder(f"{kind}://::{tmp_path / f'x.{kind}'}")

    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            assert dict(zip(contents, threads.map(folder.load, contents), strict=True)) == contents
