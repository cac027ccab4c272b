"""A store of decoded files in a dict, which notices when its memory changes."""

from __future__ import annotations

import marshal
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.readers.decode_cache import Stored, inactive

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt


class DictStore:
    """A `DecodeStore` of one process.

    Args:
        is_full: Whether it stores nothing.

    Attributes:
        values: What is stored, by key: read-only copies.
        is_full: As given; can be changed.
    """

    def __init__(self, is_full: bool = False) -> None:
        self.values: dict[bytes, Stored] = {}
        self.is_full = is_full

    def get(self, key: bytes) -> Stored | None:
        """What is stored under a key, if anything."""
        stored = self.values.get(key)
        return stored and stored._replace(note=marshal.loads(marshal.dumps(stored.note)))

    def has_room(self, nbytes: int) -> bool:
        """Whether it is not full."""
        return not self.is_full

    def put(self, key: bytes, array: npt.NDArray[Any], note: Any) -> bool:
        """Store a copy, in the order of C, as the shared store does; False if it is full."""
        if self.is_full:
            return False
        copy = np.array(array, order="C")
        copy.flags.writeable = False
        self.values[key] = Stored(copy, note)
        return True

    def checksum(self) -> int:
        """A checksum of all that is stored: it changes if anything in it does."""
        checksum = 0
        for key, (array, note) in sorted(self.values.items()):
            for content in key, repr((array.dtype.str, array.shape, note)).encode(), array.tobytes():
                checksum = zlib.crc32(content, checksum)
        return checksum


def check_three_rounds(store: DictStore, num_stored: int, outcome: Callable[[], Any]) -> None:
    """What a call makes is the library's each time; the first call stores it, and nothing writes to it."""
    with inactive():
        expected = outcome()
    checksum = 0
    for number in range(3):
        assert outcome() == expected
        assert len(store.values) == num_stored
        checksum = checksum or store.checksum()
        assert store.checksum() == checksum, number
