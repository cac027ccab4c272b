"""A row: an entry of the index on disk, 64 bytes, as eight little-endian words.

    word   of pixels                          of a file
    0, 1   the key                            the key: a digest of its path, size and times
    2      PIXELS                             FILE
    3      offset of the record               SHA-256 of its content, in four words
    4      bytes of the record
    5      bytes of its head
    6      its checksum
    7      check of the seven words before

The first row of a file of rows is its header: the magic, the format version, and the machine that writes it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

FORMAT_VERSION = 1  # of rows, records and keys
HEADER, PIXELS, FILE = 1, 2, 3
ROW_BYTES = 64

_MAGIC = int.from_bytes(b"FLfiles\0", "little")
_WORDS = struct.Struct("<8Q")
_CONTENT = struct.Struct("<4Q")
KEY = struct.Struct("<QQ")
_MASK = (1 << 64) - 1
# Odd, so that each bit of each word counts; the check of zeros is not zero.
_FACTORS = (
    0x9E3779B97F4A7C15,
    0xBF58476D1CE4E5B9,
    0x94D049BB133111EB,
    0xD6E8FEB86659FD93,
    0xA0761D6478BD642F,
    0xE7037ED1A0B428DB,
    0x8EBC6AF09C88C6E3,
)
_FACTORS_ARRAY = np.array(_FACTORS, np.uint64)
_START = 0x589965CC75374CC3


class Row(NamedTuple):
    """A row without its check.

    Attributes:
        key: 16 bytes.
        kind: HEADER, PIXELS or FILE.
        values: Its other four words.
    """

    key: bytes
    kind: int
    values: tuple[int, int, int, int]

    def to_bytes(self) -> bytes:
        """The row with its check."""
        words = (*KEY.unpack(self.key), self.kind, *self.values)
        return _WORDS.pack(*words, _check(words))

    @classmethod
    def parse(cls, data: bytes) -> Row | None:
        """The row in some bytes; None if its check is wrong."""
        if len(data) != ROW_BYTES:
            return None
        *words, check = _WORDS.unpack(data)
        if check != _check(words):
            return None
        return cls(data[: KEY.size], words[2], (words[3], words[4], words[5], words[6]))


def _check(words: Any) -> int:
    return (_START + sum(map(int.__mul__, words, _FACTORS))) & _MASK


def are_right(rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which rows have the right check.

    Args:
        rows: `(n, 8)`.
    """
    sums = (rows[:, :7] * _FACTORS_ARRAY).sum(axis=1, dtype=np.uint64) + np.uint64(_START)
    return np.asarray(sums == rows[:, 7])


def file_row(key: bytes, content: bytes) -> Row:
    """The row of a file whose content has a SHA-256."""
    a, b, c, d = _CONTENT.unpack(content)
    return Row(key, FILE, (a, b, c, d))


def content_of(row: Row) -> bytes:
    """The SHA-256 in the row of a file."""
    return _CONTENT.pack(*row.values)


def header_row() -> Row:
    """The header of the rows that this machine writes."""
    return Row(KEY.pack(_MAGIC, FORMAT_VERSION), HEADER, (_machine(), 0, 0, 0))


def is_header(row: Row | None) -> bool:
    """Whether the rows after this one have this format."""
    return row is not None and row.kind == HEADER and KEY.unpack(row.key) == (_MAGIC, FORMAT_VERSION)


@functools.cache
def _machine() -> int:
    """The machine, as far as its name tells; another one's locks might not be seen here."""
    name = os.uname().nodename.encode(errors="surrogateescape")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
