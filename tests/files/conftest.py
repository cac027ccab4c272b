"""A faulty file system, a server of S3's protocol, and small images."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import fsspec.asyn
import pytest
from PIL import Image

from fastload.files import retry
from tests.kit import servers
from tests.kit.remote import FaultyFileSystem, register

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def png(value: int) -> bytes:
    """A small image of one colour."""
    buffer = io.BytesIO()
    Image.new("RGB", (6, 5), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


def write_images(folder: Path, number: int) -> Path:
    """A folder of images in two classes; image i is full of i."""
    for i in range(number):
        path = folder / f"class{2 * i // number}" / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(i))
    return folder


@pytest.fixture(scope="session", autouse=True)
def _loop() -> None:
    """Fsspec starts one thread for all requests of a process, and keeps it."""
    fsspec.asyn.get_loop()


@pytest.fixture
def faulty() -> Iterator[type[FaultyFileSystem]]:
    """The file system behind `faulty://`, empty."""
    register()
    FaultyFileSystem.reset()
    yield FaultyFileSystem
    FaultyFileSystem.reset()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which are not made."""
    found: list[float] = []
    monkeypatch.setattr(retry, "_sleep", found.append)
    return found


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The URL of a server that speaks S3; a session needs one, because its start takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in servers.CREDENTIALS.items():
            patch.setenv(name, value)
        with servers.s3() as endpoint:
            yield endpoint
