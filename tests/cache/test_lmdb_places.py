"""Where records lie in a file, by our own walk over the tree and by LMDB; which indices are stored."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastload.cache.build import writer as lmdb_writer
from fastload.cache.build.build import build_lmdb
from fastload.cache.lmdb.description import runs_of
from fastload.cache.lmdb.format import VALUE_HEADER_BYTES, pack_key
from fastload.cache.lmdb.indices import StoredIndices
from fastload.cache.lmdb.lmdb_cache import LMDBCache

if TYPE_CHECKING:
    from pathlib import Path


class Texts:
    """bytes of given sizes; -1 for a sample that cannot be read."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> bytes:
        if self.sizes[index] < 0:
            raise OSError(f"no sample {index}")
        return index.to_bytes(2, "little") * (self.sizes[index] // 2)


def check_as_lmdb(path: Path, num_samples: int) -> None:
    """Every record is what LMDB finds under its key."""
    cache = LMDBCache(path)
    with (
        lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        for index in range(num_samples):
            value = transaction.get(pack_key(index))
            assert (index in cache) == (value is not None)
            if value is not None:
                record = cache._file_of(index).record(index)
                assert record is not None
                assert bytes(record) == value[VALUE_HEADER_BYTES:]


@given(
    st.lists(
        st.integers(-1, 200) | st.integers(1800, 2100) | st.integers(3900, 4200) | st.integers(0, 30_000),
        max_size=60,
    ),
    st.integers(1, 30_000),
)
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_records_lie_where_lmdb_finds_them(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], commit_bytes: int
) -> None:
    """Values in leaf pages and in overflow pages of any length, after any number of commits."""
    path = tmp_path_factory.mktemp("places") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmdb_writer, "_COMMIT_BYTES", commit_bytes)
        build_lmdb(Texts(sizes), path, num_workers=0, on_error="skip").close()

    check_as_lmdb(path, len(sizes))


@pytest.mark.slow
@pytest.mark.parametrize(("num_samples", "size"), [(30_000, 20), (50, -1)])
def test_trees_of_many_levels(num_samples: int, size: int, tmp_path: Path) -> None:
    """Trees with branches over branches, and more leaves than are looked at together."""
    build_lmdb(Texts([size] * num_samples), tmp_path / "cache", num_workers=0, on_error="skip").close()

    check_as_lmdb(tmp_path / "cache", num_samples)


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_stored_indices(data: st.DataObject) -> None:
    """Positions and indices are those in the list of all indices that are stored."""
    start = data.draw(st.integers(0, 10**12))
    count = data.draw(st.integers(0, 30))
    offsets = data.draw(st.sets(st.integers(0, count - 1))) if count else set()
    missing = sorted(start + offset for offset in offsets)
    runs: list[Any] = runs_of(missing)
    if data.draw(st.booleans()):  # runs may touch each other
        runs = [(first + at, 1) for first, length in runs for at in range(length)]
    model = [index for index in range(start, start + count) if index not in missing]
    stored = StoredIndices(range(start, start + count), runs)

    assert (len(stored), list(stored), stored.is_complete) == (len(model), model, len(model) == count)
    for index in range(start, start + count):
        assert stored.position(index) == (model.index(index) if index in model else None)
    first, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(model))] * 2)))
    assert stored.between(first, stop).tolist() == model[first:stop]
    if count:
        wanted = data.draw(st.lists(st.integers(start, start + count - 1), max_size=5))
        found = stored.positions(np.array(wanted, np.intp))
        if set(wanted) <= set(model):
            assert found is not None
            assert found.tolist() == [model.index(index) for index in wanted]
        else:
            assert found is None


def test_long_records_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of which the system gives only a part at once is read to its end."""
    build_lmdb(Texts([9_000] * 3), tmp_path / "cache", num_workers=0).close()
    cache = LMDBCache(tmp_path / "cache")
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: real(fd, min(nbytes, 1000), at))

    assert [cache.get(index) for index in range(3)] == [Texts([9_000] * 3)[index] for index in range(3)]


def test_files_give_their_descriptors_back(tmp_path: Path) -> None:
    """An open file takes two; a file that is refused is closed at once, also while its error is held."""
    build_lmdb(Texts([9] * 9), tmp_path / "cache", num_workers=0).close()
    lmdb.open(str(tmp_path / "other"), subdir=False, lock=False).close()
    before = len(os.listdir("/proc/self/fd"))
    cache = LMDBCache(tmp_path / "cache")
    assert len(os.listdir("/proc/self/fd")) == before + 2
    cache.close()
    with open(tmp_path / "cache", "r+b") as file:
        file.write(b"\xff" * 5000)
    errors = []
    for name in ("cache", "other"):
        with pytest.raises(OSError, match=name) as caught:
            LMDBCache(tmp_path / name)
        errors.append(caught.value)

    assert len(os.listdir("/proc/self/fd")) == before
