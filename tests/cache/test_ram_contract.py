"""The stores in RAM keep the contract of stores."""

from __future__ import annotations

from typing import Any

import pytest

from fastload.cache.ram.store import SharedStore
from tests.cache.store_contract import StoreContract


@pytest.mark.usefixtures("registry_folder")
class TestSharedStore(StoreContract):
    """By file."""

    reopens = False

    def make(self, folder: Any) -> Any:
        return SharedStore("64MB")
