"""The deterministic front: resizes that many datasets begin with, remembered beside the whole image.

`Resize(256)` costs as much as decoding a photograph. The result of a resize of a whole remembered image is a
pure function of the file and of the arguments, so its key is always right. Whether storing it is of use is
learnt from ordinary accesses: 64 in a row must agree in the size, its shorter or its longer side. So random
sizes leave nothing behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.readers.decode_cache import current
from fastload.readers.identity import digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.readers.decode_cache import DecodeCache, Stored

NUM_EQUAL = 64


class Habit:
    """What a cache's recent resizes of one kind had in common."""

    def __init__(self) -> None:
        self._in_common: set[tuple[str, Any]] = set()
        self._num_equal = 0

    def is_kept(self, size: Any) -> bool:
        """Learn from a resize; whether enough of them agreed."""
        facts = {("size", size), ("shorter", min(size)), ("longer", max(size))}
        in_common = self._in_common & facts
        self._num_equal = self._num_equal + 1 if in_common else 1
        self._in_common = in_common or facts
        return self._num_equal > NUM_EQUAL


class Origin:
    """The remembered file that pixels are of.

    Args:
        cache: Where it is.
        key: Its key there.
    """

    def __init__(self, cache: DecodeCache, key: bytes) -> None:
        self._cache = cache
        self._key = key

    def find(self, mode: str, size: Any, arguments: tuple[Any, ...]) -> tuple[bytes | None, Stored | None]:
        """The key of a result of this size, if it is of use to keep it, and the stored one.

        Args:
            mode: Of the image.
            size: Of the result.
            arguments: All that decides it.
        """
        cache = self._cache
        if current() is not cache:
            return None, None
        key = digest("front", self._key, mode, size, arguments)
        kind = mode, arguments[0], arguments[2]  # masks are resized by another filter, or to another size
        if key is None or not cache.habits.setdefault(kind, Habit()).is_kept(size):
            return None, None
        return key, cache.store.get(key)

    def check(self, stored: Stored, compute: Callable[[], bytes]) -> None:
        """Compute a share of the results again, and compare them.

        Raises:
            DecodeMismatchError: They differ.
        """
        if self._cache.is_verification_due():
            computed = np.frombuffer(compute(), np.uint8)
            self._cache.verify(stored.array, computed, "the result of a resize")

    def keep(self, key: bytes, content: bytes) -> None:
        """Store a result."""
        self._cache.store.put(key, np.frombuffer(content, np.uint8), None)
