"""What readers store of a file, as a record in any store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.cache.decoded_files import DecodedFiles, open_files
from fastload.cache.ram.store import SharedStore
from fastload.cache.records import encode
from fastload.readers import identity
from tests.kit.numbered_files import array_of, files_in, key_of, put, right

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
NOTES = [None, ("RGB", {"dpi": (72.0, 72.0), 3: b"\0\1"}, [True, 2**80, -1.5, "\udcff"]), "\0" * 2000]


@pytest.mark.parametrize("kind", ["ram", "lmdb"])
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back_bit_for_bit(name: str, kind: str, path: str) -> None:
    """With its dtype and shape, and the note; read-only, and nobody can make it writable."""
    files = files_in(SharedStore(MB)) if kind == "ram" else DecodedFiles(open_files(path))
    array = ARRAYS[name]
    for number, note in enumerate(NOTES):
        assert files.put(key_of(number), array, note)
        files.store.flush()
        stored: Any = files.get(key_of(number))
        assert (stored.array.dtype, stored.array.shape) == (array.dtype, array.shape)
        assert stored.array.tobytes() == array.tobytes()
        assert (stored.note, type(stored.note)) == (note, type(note))
        if array.size and (array.ndim or kind == "ram"):  # else it is a copy
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
ODD_NOTES += [{1: {2, 3}}, [b""] * 3 + [bytearray()], 10**5000]


@pytest.mark.parametrize("odd", [*ODD, *range(len(ODD_NOTES))])
def test_what_would_not_come_back_as_it_is_is_not_stored(odd: Any) -> None:
    """Arrays of objects, subclasses; notes that are not plain."""
    store = SharedStore(MB)
    array, note = (ODD[odd], None) if odd in ODD else (np.zeros(3), ODD_NOTES[odd])
    assert files_in(store).put(key_of(1), array, note) is False
    assert store.get(key_of(1)) is None
    assert store.num_files == 0


# --- plain values ------------------------------------------------------------------------------------------

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary())
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner),
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_notes_come_back_as_they_are(value: Any) -> None:
    """Floats bit for bit, NaN too, halves of characters, and each list, tuple and dict as what it was."""
    files = files_in(SharedStore(MB))
    assert files.put(key_of(1), np.zeros(3), value)
    found: Any = files.get(key_of(1))
    assert repr(found.note) == repr(value)


# --- on disk ----------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where the files are."""
    return str(tmp_path / "files.lmdb")


@pytest.mark.parametrize(
    "value",
    [
        *(1, (1,), (1, 2, 3), (np.zeros(3), 5), (5, b"None"), "text", None),
        *((np.zeros(3), text) for text in (b"", b"{", b"x", b"f()", b"1+x", b"\0", b"\xff", b"[" * 100_000)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_records_of_something_else_are_not_found(path: str, value: Any) -> None:
    """Nothing is raised into a training."""
    files = DecodedFiles(open_files(path))
    files.store.put(key_of(1), [encode(value, key_of(1))])
    assert files.get(key_of(1)) is None


def test_a_damaged_file_is_decoded_again_and_replaced(path: str) -> None:
    """The others are found; a file that is opened again has them all."""
    files = DecodedFiles(open_files(path))
    assert put(files, range(6)) == [*range(6)]
    files.store.close()
    content = Path(path).read_bytes()
    Path(path).write_bytes(content.replace(array_of(2)[50:90].tobytes(), bytes(40)))
    assert right(files, range(6)) == [0, 1, 3, 4, 5]
    assert put(files, range(6)) == [*range(6)]
    assert right(files, range(6)) == [*range(6)]
    files.store.close()
    assert all(is_intact for _, _, is_intact in files.store.checked())
    pid = os.fork()
    if not pid:
        os._exit(right(files, range(6)) != [*range(6)])
    assert os.waitpid(pid, 0)[1] == 0


def test_files_in_folders_that_are_swapped_are_not_taken_for_each_other(
    path: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Small files of one script have equal sizes and times, where the clock of a file system is coarse."""
    monkeypatch.setattr(identity, "_facts", lambda s: (s.st_dev, s.st_ino, s.st_size, 1, 1, s.st_mode))
    store = open_files(path)

    def contents() -> list[Any]:
        files = DecodedFiles(store)  # another process, which keeps nothing in mind
        paths = [str(tmp_path / name / "mask") for name in ("left", "right")]
        return [files.known_as(identity.identify_path(each), each) for each in paths]

    for name in ("left", "right"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mask").write_text(name[:4])
    before = contents()
    os.rename(tmp_path / "left", tmp_path / "other")
    os.rename(tmp_path / "right", tmp_path / "left")
    os.rename(tmp_path / "other", tmp_path / "right")
    assert contents() == before[::-1]
