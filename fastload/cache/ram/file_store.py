"""FileStore: a stand-in."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastload.readers.decode_cache import Stored


class FileStore:
    """A stand-in."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.values: dict[bytes, Stored] = {}

    def get(self, key: bytes) -> Stored | None:
        return self.values.get(key)

    def put(self, key: bytes, array: Any, note: Any) -> bool:
        array = np.array(array)
        array.flags.writeable = False
        self.values[key] = Stored(array, note)
        return True

    @property
    def num_files(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return sum(stored.array.nbytes for stored in self.values.values())


_store: FileStore | None = None


def open_store(max_memory: str | float) -> FileStore:
    global _store
    _store = _store or FileStore(1 << 34)
    return _store
