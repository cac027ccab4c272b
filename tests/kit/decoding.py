"""DictStore: a store of decoded files that is a dictionary, for tests of readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastload.readers.decode_cache import Stored

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class DictStore:
    """Keeps read-only copies."""

    def __init__(self) -> None:
        self.values: dict[bytes, Stored] = {}

    def get(self, key: bytes) -> Stored | None:
        """What is stored under a key, if anything."""
        return self.values.get(key)

    def put(self, key: bytes, array: npt.NDArray[np.generic], note: Any) -> bool:
        """Store a copy."""
        copy = array.copy()
        copy.flags.writeable = False
        self.values[key] = Stored(copy, note)
        return True
