"""DecodedFiles: what readers store of files, as records in any store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.plain_text import parse_plain_text, plain_text
from fastload.cache.records import decode, record_parts
from fastload.errors import CacheCorruptError, UnsupportedSampleError
from fastload.nested.spec import flatten
from fastload.readers.decode_cache import Stored

if TYPE_CHECKING:
    import numpy.typing as npt

    from fastload.cache.store import Store


class DecodedFiles:
    """A `DecodeStore` over a `Store`: an array and a note are the record of `(array, text of the note)`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.full_reason = store.full_reason
        self.has_room = store.has_room

    def get(self, key: bytes) -> Stored | None:
        """What is stored under a key, if anything."""
        record = self.store.get(key)
        if record is None:
            return None
        try:
            array, text = decode(record)
            return Stored(array, parse_plain_text(text))
        except (CacheCorruptError, ValueError, TypeError):
            return None

    def put(self, key: bytes, array: npt.NDArray[Any], note: Any) -> bool:
        """Store an array and a note of plain values; False if it is not kept."""
        text = plain_text(note)
        if text is None or type(array) is not np.ndarray:
            return False
        try:
            return self.store.put(key, record_parts(*flatten((array, text)), key)[0])
        except UnsupportedSampleError:
            return False
