"""What readers store of a file, as a record in any store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastload.cache.ram.store import SharedStore
from tests.kit.numbered_files import array_of, files_in, key_of

MB = 1 << 20
pytestmark = pytest.mark.usefixtures("registry_folder", "small_tables")

ARRAYS = {
    "image": array_of(1, 3000)[:3000].reshape(25, 40, 3),
    "gray": np.arange(12, dtype=np.uint8).reshape(3, 4),
    "mask": np.array([[True, False], [False, True]]),
    "big-endian": np.arange(6, dtype=">u2").reshape(2, 3),
    "half": np.arange(4, dtype=np.float16),
    "complex": np.arange(4, dtype=np.complex64),
    "times": np.array(["2020-01-01", "NaT"], "datetime64[ms]"),
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "NaN": np.array([np.nan, -0.0, np.inf]),
    "number": np.array(7, np.int16),
    "empty": np.zeros((0, 5, 3), np.uint8),
    "Fortran": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    "reversed": np.arange(24, dtype=np.int32).reshape(4, 6)[::-1, ::2],
    "BGR": np.arange(24, dtype=np.uint8).reshape(2, 4, 3)[..., ::-1],
    "broadcast": np.broadcast_to(np.uint8(3), (4, 5)),
}
NOTES = [None, ("RGB", {"dpi": (72.0, 72.0), "exif": b"\0\1"}, [True, 2**80, -1.5, "\udcff"]), "\0"]


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("note", NOTES)
def test_an_array_comes_back_bit_for_bit(name: str, note: Any) -> None:
    """With its dtype and shape, and the note; read-only, and nobody can make it writable."""
    store, array = files_in(SharedStore(MB)), ARRAYS[name]
    assert store.put(key_of(1), array, note)
    stored = store.get(key_of(1))
    assert (stored.array.dtype, stored.array.shape) == (array.dtype, array.shape)
    assert stored.array.tobytes() == array.tobytes()
    assert (stored.note, type(stored.note)) == (note, type(note))
    assert not stored.array.flags.writeable
    if array.size:
        with pytest.raises(ValueError, match="WRITEABLE"):
            stored.array.flags.writeable = True


class Pixels(np.ndarray):
    """A subclass."""


ODD = {
    "objects": np.array([None]),
    "masked": np.ma.masked_array([1, 2], [True, False]),
    "subclass": np.zeros(3).view(Pixels),
}
ODD_NOTES = [np.int64(3), (1, np.float32(2)), bytearray(b"x"), np.zeros(2), object(), {"a": [np.bool_(True)]}]


@pytest.mark.parametrize("odd", [*ODD, *range(len(ODD_NOTES))])
def test_what_would_not_come_back_as_it_is_is_not_stored(odd: Any) -> None:
    """Arrays of objects, subclasses; notes that are not plain."""
    store = SharedStore(MB)
    array, note = (ODD[odd], None) if odd in ODD else (np.zeros(3), ODD_NOTES[odd])
    assert files_in(store).put(key_of(1), array, note) is False
    assert store.get(key_of(1)) is None
    assert store.num_files == 0
