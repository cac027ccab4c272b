"""A build says whether the arrays of its samples differ in shape, which default_collate would refuse."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import default_collate

from fastload.cache.build.build import build_lmdb
from fastload.cache.dataset import CachedDataset
from tests.cache.build_zoo import BrokenImages
from tests.cache.zoo import Collatable, Images, RaggedImages

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shards", [1, 3])
def test_mixed_shapes_are_told_with_an_example_and_the_fix(
    num_workers: int, shards: int, tmp_path: Path, caplog: Any
) -> None:
    """The log names the number of shapes, two of them, where they are, and what to change."""
    with caplog.at_level(logging.INFO, "fastload"):
        build_lmdb(RaggedImages(40), tmp_path / "x", num_workers=num_workers, shards=shards)

    assert "the samples have at least 35 different shapes at $[0], such as (8, 8, 3) and (" in caplog.text
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
    cache.close()
    assert "different shapes" not in caplog.text


def test_samples_without_arrays_have_no_shapes(tmp_path: Path, caplog: Any) -> None:
    """There is nothing to say about a dataset of numbers, nor about samples that are left out."""
    with caplog.at_level(logging.INFO, "fastload"):
        build_lmdb([1, 2, 3], tmp_path / "x", num_workers=0)
        build_lmdb(BrokenImages(12, bad=[0, 3]), tmp_path / "y", num_workers=0, on_error="skip")

    assert "different shapes" not in caplog.text


def test_a_large_cache_is_looked_at_in_part(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of samples that are looked at is bounded."""
    monkeypatch.setattr("fastload.cache.build.build._MOST_LOOKED_AT", 5)
    with caplog.at_level(logging.INFO, "fastload"):
        build_lmdb(RaggedImages(30), tmp_path / "x", num_workers=0)

    assert "at least 5 different shapes" in caplog.text
