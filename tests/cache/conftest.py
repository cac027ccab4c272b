"""What the tests of caches share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fastload.cache.build.build import build_lmdb
from fastload.cache.ram import owners
from tests.cache.zoo import Images

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty registry of this test's own."""
    path = tmp_path / "registry"
    monkeypatch.setenv(owners.DIRECTORY_VARIABLE, str(path))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A finished cache of 20 images."""
    build_lmdb(Images(20), tmp_path / "cache", num_workers=0).close()
    return tmp_path / "cache"
