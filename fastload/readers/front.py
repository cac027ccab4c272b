"""The deterministic front: resizes that many datasets begin with, remembered instead of the whole image.

`Resize(256)` costs as much as decoding a photograph, and its result takes a small part of the memory. The
result of a resize of all pixels is a pure function of the file and of the arguments, so its key is always
right; what is learnt decides only what is stored. Rules:

1. A result is stored if 64 resizes before it, one after another, agreed in the size, its shorter or its
   longer side. So random sizes leave nothing behind. Modes, methods and filters are learnt apart: masks are
   resized by another filter, or not at all.
2. What a JPEG was decoded to is held back until its first use. If that is a resize whose result is stored,
   only a note is stored beside the result; anything else stores the original first. So while a process
   learns, it stores originals, as many as it would without a front, and nothing is ever decoded in vain.
3. A file with such a note is not decoded until something needs more than a stored result: a validation with
   another size, or a transform that was changed. Then it is decoded from the descriptor that was opened, and
   its original is stored like that of a new file. This costs one decode of each file, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastload.errors import DecodeMismatchError
from fastload.readers.decode_cache import current
from fastload.readers.identity import Unknown, digest

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


class Front(NamedTuple):
    """A result that is of use.

    Attributes:
        key: Its own.
        stored: The result; None if it is to be stored.
    """

    key: bytes
    stored: Stored | None


class Origin:
    """The remembered file that pixels are of.

    Args:
        cache: Where it is.
        key: Its key there.
        note: What is to be stored beside its pixels; None if they are stored.
        alone: The result that is stored instead of them.
    """

    def __init__(self, cache: DecodeCache, key: bytes, note: Any = None, alone: Stored | None = None) -> None:
        self._cache = cache
        self._key = key
        self._note = note
        self._alone = alone
        self._keeps = True

    def find(self, mode: str, size: Any, arguments: tuple[Any, ...]) -> Front | None:
        """The result of a resize; None if it is not stored, and of no use to be.

        Args:
            mode: Of the image.
            size: Of the result.
            arguments: All that decides it.
        """
        cache, alone = self._cache, self._alone
        if current() is not cache:
            return None
        key = digest("front", self._key, mode, size, arguments)
        if key is None:
            return None
        is_kept = cache.habits.setdefault((mode, arguments[0], arguments[2]), Habit()).is_kept(size)
        stored = None
        if alone is not None and alone.note[0] == key:
            stored = alone
        elif is_kept or alone is not None:
            stored = cache.store.get(key)
        return Front(key, stored) if is_kept or stored is not None else None

    def check(self, stored: Stored, compute: Callable[[], bytes]) -> None:
        """Compute a share of the results again, and compare them.

        Raises:
            DecodeMismatchError: They differ.
        """
        if not self._cache.is_verification_due():
            return
        try:
            computed = np.frombuffer(compute(), np.uint8)
            self._cache.verify(stored.array, computed, "the result of a resize")
        except DecodeMismatchError as error:
            if self._keeps:  # else the file was written to since
                self._cache.differs(self._key, error)
        except OSError:
            if self._keeps:
                raise

    def keep(self, key: bytes, content: bytes) -> None:
        """Store a result; the first one of a file whose pixels are not stored goes with its note."""
        pixels, store = np.frombuffer(content, np.uint8), self._cache.store
        if not self._keeps:
            self._cache.missed(Unknown.TOO_NEW)
        elif self._note is None:
            store.put(key, pixels, None)
        elif self._alone is None:
            self._cache.keep(alone_key(self._key), pixels, (key, self._note))
        else:
            self._cache.keep(key, pixels)

    def keep_nothing(self) -> None:
        """Store nothing from now on: the pixels may not be those of the key."""
        self._note, self._keeps = None, False

    def keep_whole(self, nbytes: int, tobytes: Callable[[], bytes]) -> None:
        """Store the pixels, if they are not stored."""
        note, self._note = self._note, None
        if note is not None and not self._cache.store.has_room(nbytes):
            self._cache.missed(self._cache.full_reason)  # before the pixels are copied
        elif note is not None:
            self._cache.keep(self._key, np.frombuffer(tobytes(), np.uint8), note)


def alone_key(key: bytes) -> bytes:
    """The key of a result that is stored instead of the pixels with this key."""
    return digest("alone", key) or key
