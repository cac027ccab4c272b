"""A store of decoded files in a dict, which notices when its memory changes."""

from __future__ import annotations

import marshal
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.readers.decode_cache import Stored, inactive
from fastload.readers.identity import Identity, identify_path, identify_stream
from fastload.readers.reasons import FULL, NOT_A_FILE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt


class DictStore:
    """A `DecodeStore` of one process.

    Args:
        is_full: Whether it stores nothing.

    Attributes:
        values: What is stored, by key: read-only copies.
        is_full: As given; can be changed.
    """

    full_reason = FULL

    def __init__(self, is_full: bool = False) -> None:
        self.values: dict[bytes, Stored] = {}
        self.is_full = is_full

    def get(self, key: bytes) -> Stored | None:
        """What is stored under a key, if anything."""
        stored = self.values.get(key)
        return stored and stored._replace(note=marshal.loads(marshal.dumps(stored.note)))

    def known_as(self, identity: Identity, source: Any) -> Identity | str:
        """The same identity, if a store on disk could find the file by its source."""
        if identity.is_of_content:
            return identity
        found = identify_stream(source) if hasattr(source, "fileno") else identify_path(source)
        return identity if found == identity else NOT_A_FILE

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


def outcome(call: Callable[[Path], Any], path: Path) -> Any:
    """All of a result that a caller can see, or the error; the result is overwritten."""
    try:
        result = call(path)
    except Exception as error:  # noqa: BLE001  # the same one is expected
        return type(error), str(error)
    seen = facts(result)
    overwrite(result)
    return seen


def facts(value: Any) -> Any:
    """All that a caller can see of a nest of arrays, tensors and plain values."""
    if isinstance(value, (list, tuple)):
        return type(value), [facts(part) for part in value]
    if isinstance(value, dict):
        return dict, [(facts(key), facts(part)) for key, part in value.items()]
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.shape, value.stride(), value.numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        strides = [step for step, length in zip(value.strides, value.shape, strict=True) if length > 1]
        flags = isinstance(value, np.generic) or value.flags.writeable
        content = value.tolist() if value.dtype.hasobject else value.tobytes()  # bytes of objects: addresses
        return type(value), value.dtype.str, value.shape, strides, flags, content
    return type(value), repr(value)


def overwrite(value: Any) -> None:
    """Write to all memory of a result."""
    if isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            overwrite(part)
    elif isinstance(value, torch.Tensor):
        value.zero_()
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        value[...] = np.zeros((), value.dtype)
