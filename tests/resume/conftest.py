"""A device for the tests of resuming."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fastload.epochs import on_device
from tests.device.fake import FakeBackend

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBackend]:
    """A device to which loaders with device= copy ahead."""
    fake = FakeBackend()
    monkeypatch.setattr(on_device, "choose_backend", lambda device, asker: fake)
    yield fake
    fake.drain()
    fake.check()
