"""A build says whether the arrays of its samples differ in shape, which default_collate would refuse."""

from __future__ import annotations

import logging
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from fastload.cache.build.build import build_lmdb
from fastload.cache.dataset import CachedDataset
from fastload.cache.lmdb import shapes as shapes_module
from fastload.cache.lmdb.shapes import SeenShapes
from fastload.cache.record import encode
from fastload.errors import CacheCorruptError
from tests.cache.build_zoo import BrokenImages
from tests.cache.zoo import Collatable, Images, RaggedImages

if TYPE_CHECKING:
    from pathlib import Path


class Shaped:
    """An image of a given shape at each index; reading one of them can fail.

    Args:
        shapes: Of the images.
        broken: Index of the sample that cannot be read.
    """

    def __init__(self, shapes: list[tuple[int, int]], broken: int | None = None) -> None:
        self.shapes = shapes
        self.broken = broken

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise OSError("broken")
        return {"image": np.zeros((*self.shapes[index], 3), np.uint8), "label": index}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shards", [1, 3])
def test_mixed_shapes_are_told_with_an_example_and_the_fix(
    num_workers: int, shards: int, tmp_path: Path, caplog: Any
) -> None:
    """The log names the number of shapes, two of them, where they are, and what to change."""
    with caplog.at_level(logging.INFO, "fastload"):
        cache = build_lmdb(RaggedImages(40), tmp_path / "x", num_workers=num_workers, shards=shards)

    assert cache.num_shapes == 35
    assert "the samples have 35 different shapes at $[0], such as (8, 8, 3) and (9, 9, 3)" in caplog.text
    assert "--size 256x256" in caplog.text
    assert "crop in the transform" in caplog.text


def test_a_cached_dataset_logs_it_too(tmp_path: Path, caplog: Any) -> None:
    """cache="lmdb:PATH" builds, and says so as well."""
    with caplog.at_level(logging.INFO, "fastload"):
        CachedDataset(RaggedImages(9), cache=f"lmdb:{tmp_path}/x", num_workers=0, progress=False)

    assert "9 different shapes at $[0]" in caplog.text


@pytest.mark.parametrize("kind", [Images, Collatable])
def test_equal_shapes_are_not_mentioned(kind: type[Images], tmp_path: Path, caplog: Any) -> None:
    """Where default_collate works there is nothing to say."""
    with caplog.at_level(logging.INFO, "fastload"):
        cache = build_lmdb(kind(20), tmp_path / "x", num_workers=0)

    default_collate([kind(20).sample(index) for index in range(20)])
    assert cache.num_shapes == 1
    cache.close()
    assert "different shapes" not in caplog.text


def test_samples_without_arrays_have_no_shapes(tmp_path: Path) -> None:
    """A dataset of numbers has none."""
    assert build_lmdb([1, 2, 3], tmp_path / "x", num_workers=0).num_shapes == 0


def test_a_cache_that_is_only_opened_was_not_looked_at(tmp_path: Path) -> None:
    """The number is known to the process that built the cache; no other reads every record for it."""
    build_lmdb(RaggedImages(9), tmp_path / "x", num_workers=0).close()

    assert build_lmdb(RaggedImages(9), tmp_path / "x").num_shapes is None


def test_skipped_samples_have_no_shape(tmp_path: Path) -> None:
    """Samples that are left out count for nothing."""
    cache = build_lmdb(BrokenImages(12, bad=[0, 3]), tmp_path / "x", num_workers=0, on_error="skip")

    assert cache.num_shapes == 1


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=12),
    data=st.data(),
)
def test_a_build_that_goes_on_counts_what_the_first_one_wrote(
    shapes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Wherever the first build stopped, the second one's number is that of the whole cache."""
    broken = data.draw(st.none() | st.integers(1, len(shapes)))
    shards = data.draw(st.integers(1, 4))
    with tempfile.TemporaryDirectory() as directory:
        if broken is not None and broken < len(shapes):
            with pytest.raises(OSError, match="broken"):
                build_lmdb(Shaped(shapes, broken), f"{directory}/x", num_workers=0, shards=shards)
        cache = build_lmdb(Shaped(shapes), f"{directory}/x", num_workers=0, shards=shards)
        assert cache.num_shapes == len(set(shapes))


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered is bounded, and the text then says "at least"."""
    monkeypatch.setattr(shapes_module, "_MOST_TEXTS", 10)
    seen = SeenShapes()
    for width in [*range(1, 30), 1]:
        seen.add(encode(np.zeros((width, 2), np.uint8)))

    assert seen.number == 10
    assert "at least 10 different shapes at $, such as (1, 2) and (2, 2)" in str(seen.explain())


@pytest.mark.parametrize("record", [b"", b"FLrc", encode(np.zeros(3))[:24]])
def test_a_record_that_is_cut_short_is_damage(record: bytes) -> None:
    """A record whose structure cannot be read is damage, as everywhere."""
    with pytest.raises(CacheCorruptError):
        SeenShapes().add(record)
