"""What the tests of caches share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fastload.cache.build.build import build_lmdb
from fastload.cache.ram import owners
from tests.cache.zoo import Images
from tests.kit.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    """Starts jobs, which are ended with the test."""
    jobs: list[Job] = []

    def start(work: Callable[..., Any], *args: Any) -> Job:
        jobs.append(Job(work, *args))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()
