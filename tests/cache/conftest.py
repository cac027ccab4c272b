"""What the tests of caches share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastload.cache.build import build_lmdb
from fastload.cache.ram import registry, store
from tests.augmentation.test_encoded import noise
from tests.cache.zoo import Images
from tests.kit.jobs import Job


@pytest.fixture
def registry_folder(tmp_path: Any, monkeypatch: Any) -> Any:
    """An empty registry of this test's own."""
    path = tmp_path / "registry"
    monkeypatch.setenv(registry.DIRECTORY_VARIABLE, str(path))
    return path


@pytest.fixture
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of 128 KB, levels that fill up soon, and processes that look for tables at each access."""
    monkeypatch.setattr(store, "_MIN_TABLE_BYTES", 128 << 10)
    monkeypatch.setattr(store, "_FIRST_LEVEL", 4)
    for name in ("_LOOK_EVERY_S", "_GROW_WAIT_S"):
        monkeypatch.setattr(store, name, 0.0)


@pytest.fixture
def path(tmp_path: Any) -> Any:
    """A finished cache of 20 images."""
    build_lmdb(Images(20), tmp_path / "cache", num_workers=0).close()
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Twelve JPEGs of two classes, of different sizes; some of them are turned by EXIF."""
    root = tmp_path_factory.mktemp("photos")
    for index in range(12):
        folder = root / ("even", "odd")[index % 2]
        folder.mkdir(exist_ok=True)
        exif = Image.Exif()
        exif[0x0112] = index % 9 or 1
        pixels = np.roll(noise(80 + index, 130 - index), 5 * index, axis=1)
        Image.fromarray(pixels).save(folder / f"{index:02}.jpg", exif=exif)
    return root


@pytest.fixture
def start() -> Any:
    """Starts jobs, which are ended with the test."""
    jobs: list[Job] = []

    def start(work: Any, *args: Any) -> Any:
        jobs.append(Job(work, *args))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()
