"""LmdbStore: the contract of stores, and what is LMDB's own."""

from __future__ import annotations

from typing import Any

from fastload.cache.lmdb_store import open_store
from tests.cache.store_contract import StoreContract


class TestLmdbStoreByFile(StoreContract):
    """The contract, with keys of files."""

    def make(self, folder: Any) -> Any:
        return open_store(str(folder / "files.lmdb"), {"kind": "files"})


class TestLmdbStoreBySample(TestLmdbStoreByFile):
    """The contract, with keys of samples."""

    key_bytes = 8
