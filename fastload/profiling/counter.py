"""Counts the files that a thread decodes, and the bytes of their pixels, by the readers; stores nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

from fastload.readers import patches
from fastload.readers.decode_cache import DecodeCache, activate
from fastload.readers.reasons import LEARNING, TOO_NEW, UNCOMPRESSED
from fastload.readers.resizes import Resizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.readers.identity import Identity


class _Resizes(Resizes):
    """Takes results of first resizes for what is stored, until many of them do not repeat."""

    def learn(self, kind: int, size: tuple[int, ...]) -> bool:
        """As the base, which would wait."""
        return super().learn(kind, size) is not False


class _NoStore:
    """A store with nothing in it, which knows files as one in RAM does."""

    def get(self, key: bytes) -> None:
        """Nothing."""

    def known_as(self, identity: Identity, source: Any) -> Identity:
        """The identity itself."""
        return identity


class Counter(DecodeCache):
    """What `cache="ram"` would keep of the files that threads decode while it is active in them.

    Args:
        folder: Of the profile.
        loader: The number of the loader that reads them.
    """

    def __init__(self, folder: str, loader: int) -> None:
        super().__init__(cast("Any", _NoStore()), verify_share=0.0, resizes=_Resizes())
        self._loader, self._ended = loader, os.path.join(folder, f"{loader}.counted")
        self._new: dict[str, int] = {}
        self._counts = [0, 0, 0]  # known, resized and unknown images since they were taken
        patches.retain(self)

    def begin(self) -> None:
        """Count what this thread decodes from now on, unless a whole epoch was counted."""
        activate(None if os.path.exists(self._ended) else self)

    def end(self) -> None:
        """A whole epoch was counted, in whatever processes."""
        with open(self._ended, "w"):
            pass

    def taken(self) -> list[Any]:
        """What was counted since the last call; nothing if there is nothing.

        The loader, the images that were known, resized first, and unknown; files, and their bytes.
        """
        new, self._new = self._new, {}
        counts, self._counts = self._counts, [0, 0, 0]
        return [self._loader, *counts, new] if any(counts) else []

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
