"""Hugging Face datasets: images of files and of parquet, with a transform, remembered by a loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.data as tud
from PIL import Image

import fastload

datasets = pytest.importorskip("datasets")

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 12


@pytest.fixture
def rows(settled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Rows of files of three formats, undecoded."""
    monkeypatch.setenv("FASTLOAD_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # it would start a thread
    paths = [str(tmp_path / f"{number:02d}.{('jpg', 'png', 'webp')[number % 3]}") for number in range(SIZE)]
    draw = np.random.default_rng(0)
    for path in paths:
        Image.fromarray(draw.integers(0, 256, (20, 24, 3), np.uint8)).save(path)
    made = datasets.Dataset.from_dict({"image": paths, "label": list(range(SIZE))})
    return made.cast_column("image", datasets.Image())


def augment(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Random crops of the images of a batch."""
    images = []
    for image in rows["image"]:
        left, top = torch.randint(8, (2,)).tolist()
        images.append(np.asarray(image.convert("RGB").crop((left, top, left + 12, top + 12))).copy())
    return {"image": images, "label": rows["label"]}


def _set(rows: Any, folder: Path) -> Any:
    rows.set_transform(augment)
    return rows


def _from_parquet(rows: Any, folder: Path) -> Any:
    rows.to_parquet(folder / "rows.parquet")
    again = datasets.Dataset.from_parquet(str(folder / "rows.parquet"), cache_dir=str(folder / "arrow"))
    return again.with_transform(augment)


def _stream(rows: Any, folder: Path) -> Any:
    return rows.to_iterable_dataset(num_shards=2).map(augment, batched=True, batch_size=3)


WAYS = {
    "set_transform": _set,
    "with_transform": lambda rows, folder: rows.with_transform(augment),
    "parquet": _from_parquet,
    "stream": _stream,
    "one by one": lambda rows, folder: tud.Subset(rows.with_transform(augment), range(SIZE)),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_batches_are_torchs_and_nothing_is_decoded_twice(
    way: str, num_workers: int, rows: Any, tmp_path: Path
) -> None:
    """Three epochs of random crops; each image is decoded in the first one only."""
    dataset = WAYS[way](rows, tmp_path)
    options: dict[str, Any] = {"shuffle": way != "stream", "num_workers": num_workers}

    def epochs(loader: Any) -> list[Any]:
        torch.manual_seed(1)
        return [(batch["image"].tolist(), batch["label"].tolist()) for _ in range(3) for batch in loader]

    expected = epochs(tud.DataLoader(dataset, 4, **options))
    with fastload.DataLoader(dataset, 4, cache="ram", **options) as loader:
        assert epochs(loader) == expected
        stats = loader.stats()
    assert (stats.cache_misses, stats.cache_hits) == (SIZE, 2 * SIZE)
