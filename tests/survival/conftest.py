"""What the survival tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.survival import pretending

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def pretend_accelerator(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and the loaders of this test pin their batches in a thread."""
    return lambda: pretending.pretend_accelerator(monkeypatch.setattr)
