"""A faulty file system, and the same images in a local folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fastload.files import attempts
from tests.kit.remote import FaultyFileSystem, register

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    monkeypatch.setattr(attempts, "_sleep", found.append)
    return found
