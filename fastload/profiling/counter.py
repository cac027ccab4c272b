"""Counts the files that a thread decodes, and the bytes of their pixels, by the readers; stores nothing."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, cast

from fastload.readers import patches
from fastload.readers.decode_cache import DecodeCache, activate
from fastload.readers.lessons import Lessons
from fastload.readers.reasons import LEARNING, TOO_NEW, UNCOMPRESSED

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.readers.identity import Identity


class _Lessons(Lessons):
    """Takes results of first resizes for what is stored, until many of them do not repeat."""

    def learn(self, kind: int, size: tuple[int, ...]) -> bool:
        """As the base, which would wait."""
        return super().learn(kind, size) is not False


class _NoStore:
    """A store with nothing in it, which knows files as one in RAM does.

    Attributes:
        num_in_memory: How often it was asked for bytes in memory.
    """

    num_in_memory = 0

    def get(self, key: bytes) -> None:
        """Nothing."""

    def known_as(self, identity: Identity, source: Any) -> Identity:
        """The identity itself."""
        self.num_in_memory += identity.is_of_content
        return identity


class Counter(DecodeCache):
    """What `cache="ram"` would keep of the files that threads decode while it is active in them.

    Args:
        folder: Of the profile.
        loader: The number of the loader that reads them.
    """

    def __init__(self, folder: str, loader: int) -> None:
        self._store = _NoStore()
        super().__init__(cast("Any", self._store), verify_share=0.0, lessons=_Lessons())
        self._loader, self._ended = loader, os.path.join(folder, f"{loader}.counted")
        self._new: dict[str, int] = {}
        self._counts = [0, 0, 0]  # known, resized and unknown images since they were taken
        patches.retain(self)

    def begin(self) -> None:
        """Count what this thread decodes from now on, unless a whole epoch was counted."""
        activate(None if os.path.exists(self._ended) else self)

    def end(self) -> None:
        """A whole epoch was counted, in whatever processes."""
        with contextlib.suppress(OSError), open(self._ended, "w"):  # a full disk; the loop goes on
            pass

    def taken(self) -> list[Any]:
        """What was counted since the last call; nothing if there is nothing.

        The loader, the images that were known, resized first, read to memory, and unknown; files, and their
        bytes.
        """
        new, self._new = self._new, {}
        (known, resized, unknown), self._counts = self._counts, [0, 0, 0]
        in_memory, self._store.num_in_memory = self._store.num_in_memory, 0
        return [self._loader, known, resized, in_memory, unknown, new] if known or unknown else []

    def keep(self, key: bytes, array: Any, note: Any = None) -> None:
        """Count a file."""
        self.keep_made(key, array.nbytes, lambda: array, note)

    def keep_made(self, key: bytes, nbytes: int, make: Callable[[], Any], note: Any = None) -> None:
        """Count a file."""
        if not self._new:  # which is rare
            self.begin()
        self._new[key.hex()] = nbytes
        self._counts[0] += 1
        self._counts[1] += type(note) is tuple and type(note[0]) is bytes  # a result, with its key

    def missed(self, reason: str) -> None:
        """Count a file that would not be kept."""
        self._counts[2] += reason not in (LEARNING, UNCOMPRESSED, TOO_NEW)
