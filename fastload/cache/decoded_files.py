"""DecodedFiles: what readers store of files, as records in any store: the array, and the text of the note."""

from __future__ import annotations

import marshal
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.plain_text import parse_plain_text, plain_text
from fastload.cache.records import decode, is_intact, record_parts
from fastload.errors import CacheCorruptError, UnsupportedSampleError
from fastload.nested.spec import flatten
from fastload.readers.decode_cache import Stored
from fastload.readers.identity import is_plain

if TYPE_CHECKING:
    import numpy.typing as npt

    from fastload.cache.store import Store

_SHORT_BYTES = 256  # the notes of most files are short, and equal


class DecodedFiles:
    """A `DecodeStore` over a `Store`.

    Args:
        store: Where the records are.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.full_reason = store.full_reason
        self.has_room = store.has_room

    def get(self, key: bytes) -> Stored | None:
        """What is stored under a key, if anything; what is damaged is not."""
        record = self._store.get(key)
        if record is None or (self._store.lasts and not is_intact(record, key)):
            return None
        try:
            array, text = decode(record)
            is_short = len(text) <= _SHORT_BYTES
            return Stored(array, marshal.loads(_note(text)) if is_short else parse_plain_text(text))
        except (CacheCorruptError, ValueError, TypeError):
            return None

    def put(self, key: bytes, array: npt.NDArray[Any], note: Any) -> bool:
        """Store an array and a note of plain values; False if they are not kept, or would not come back."""
        if type(array) is not np.ndarray or not is_plain(note):
            return False
        packed = marshal.dumps(note, 2)
        text = _text(packed) if len(packed) <= _SHORT_BYTES else plain_text(note)
        if text is None:
            return False
        try:
            parts, _ = record_parts(*flatten((array, text)), key if self._store.lasts else None)
        except UnsupportedSampleError:
            return False
        return self._store.put(key, parts)


@lru_cache(maxsize=4096)
def _note(text: bytes) -> bytes:
    """A note as `marshal` reads it, five times as fast as JSON, and anew for each caller."""
    return marshal.dumps(parse_plain_text(text))


@lru_cache(maxsize=4096)
def _text(packed: bytes) -> bytes | None:
    return plain_text(marshal.loads(packed))
