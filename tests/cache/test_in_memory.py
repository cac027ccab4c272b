"""Datasets whose samples are in memory already: one warning says that a cache in RAM gains nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import fastload
from fastload.cache.dataset import CachedDataset
from tests.cache.zoo import Images, RaggedImages

if TYPE_CHECKING:
    from pathlib import Path

NUM_SAMPLES = 50


class Rows:
    """Samples that are rows of one array."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {"label": index, "image": self.rows[index]}


class Buffer(Rows):
    """Samples that are made in one buffer, which the next one replaces."""

    def __getitem__(self, index: int) -> Any:
        self.rows[:] = index
        return {"label": index, "image": self.rows[:]}


def pixels() -> Any:
    return np.random.default_rng(0).integers(0, 256, (NUM_SAMPLES, 8, 8, 3), np.uint8)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [text for text in texts if "in memory already" in text]


@pytest.mark.parametrize("rows", [pixels(), pixels()[:, ::-1]])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_array_in_memory_is_one_warning(rows: Any, num_workers: int, caplog: Any) -> None:
    """It names the memory and what to do; workers and epochs do not repeat it."""
    with caplog.at_level(logging.WARNING, "fastload"):
        dataset = CachedDataset(Rows(rows))
        for _ in range(2):
            for _ in fastload.DataLoader(dataset, 10, num_workers=num_workers):
                pass
    (text,) = warnings_of(caplog)

    assert "an array of 9.6 kB" in text
    assert "calls the transform itself" in text


def test_each_process_that_joins_a_cache_is_silent(registry: Any, caplog: Any) -> None:
    """Only the one that makes the cache says it."""
    with caplog.at_level(logging.WARNING, "fastload"):
        first = CachedDataset(Rows(pixels()), key="in memory")
        second = CachedDataset(Rows(pixels()), key="in memory")

    assert len(warnings_of(caplog)) == 1
    assert len(first) == len(second)


@pytest.mark.parametrize("kind", ["made", "ragged", "file", "torch's file", "buffer"])
def test_other_datasets_are_no_warning(kind: str, tmp_path: Path, caplog: Any) -> None:
    """Samples that are made, or read from a mapped file, or that replace each other in a buffer."""
    np.save(tmp_path / "rows.npy", pixels())
    torch.save(torch.from_numpy(pixels()), tmp_path / "rows.pt")
    datasets = {
        "made": lambda: Images(NUM_SAMPLES),
        "ragged": lambda: RaggedImages(NUM_SAMPLES),
        "file": lambda: Rows(np.load(tmp_path / "rows.npy", mmap_mode="r")),
        "torch's file": lambda: Rows(torch.load(tmp_path / "rows.pt", mmap=True).numpy()),
        "buffer": lambda: Buffer(np.zeros((8, 8, 3), np.uint8)),
    }
    with caplog.at_level(logging.WARNING, "fastload"):
        CachedDataset(datasets[kind]())

    assert warnings_of(caplog) == []


def test_a_cache_on_disk_is_no_warning(needs_lmdb: None, tmp_path: Path, caplog: Any) -> None:
    """It takes no memory, and is kept for later runs."""
    with caplog.at_level(logging.WARNING, "fastload"):
        CachedDataset(Rows(pixels()), cache=f"lmdb:{tmp_path / 'x'}", num_workers=0, progress=False)

    assert warnings_of(caplog) == []
