"""Files of a store that are known by a number: their keys, their pixels, and what is there of them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.decoded_files import DecodedFiles

if TYPE_CHECKING:
    from collections.abc import Iterable

KB = 1 << 10


def key_of(number: int) -> bytes:
    """The key of a file."""
    return hashlib.blake2b(b"%d" % number, digest_size=16).digest()


def array_of(number: int, nbytes: int = 8 * KB) -> Any:
    """What decoding a file gives."""
    return np.random.RandomState(number % 2**32).randint(0, 256, nbytes + number % 7, np.uint8)


def files_in(store: Any) -> Any:
    """The decoded files in a store."""
    return store if isinstance(store, DecodedFiles) else DecodedFiles(store)


def put(store: Any, numbers: Iterable[int]) -> list[int]:
    """Store what is not there, as readers do; the files that are there then."""
    files = files_in(store)
    return [
        number
        for number in numbers
        if files.get(key_of(number)) is not None or files.put(key_of(number), array_of(number), number)
    ]


def right(store: Any, numbers: Iterable[int]) -> list[int]:
    """The files that are there, each of which is right."""
    there, files = [], files_in(store)
    for number in numbers:
        stored = files.get(key_of(number))
        if stored is not None:
            assert stored.note == number
            assert np.array_equal(stored.array, array_of(number))
            there.append(number)
    return there
