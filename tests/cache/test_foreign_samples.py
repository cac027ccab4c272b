"""Samples of other libraries' datasets: cached as they are, or refused with the way to convert them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fastload
from fastload.errors import NondeterministicDatasetError, UnsupportedSampleError
from tests.kit.batches import assert_same_samples
from tests.kit.datasets import Made

pytestmark = pytest.mark.usefixtures("registry_folder")
NUM_SAMPLES = 6


@pytest.fixture(params=["ram", "lmdb"])
def cached(request: Any, tmp_path: Any) -> Any:
    """Makes a CachedDataset of each kind, in which all samples are stored."""

    def make(dataset: Any, **options: Any) -> fastload.CachedDataset:
        cache: Any = "ram"
        if request.param == "lmdb":
            own = {name: options[name] for name in ("pre_transform", "cache_key") if name in options}
            cache = fastload.CachedDataset.build(
                dataset, tmp_path / "x", num_workers=0, progress=False, **own
            )
        made = fastload.CachedDataset(dataset, cache=cache, **options)
        assert made.fill(num_workers=0, progress=False).num_cached == len(dataset)
        return made

    return make


def picture(index: int) -> Image.Image:
    """An image whose height depends on the index."""
    pixels = np.random.default_rng(index).integers(0, 256, (4 + index, 5, 3), np.uint8)
    return Image.fromarray(pixels)


def to_arrays(sample: Any) -> Any:
    """The `pre_transform` of the documentation, for pairs and for rows."""
    image, label = sample.values() if isinstance(sample, dict) else sample
    return np.asarray(image.convert("RGB")), label


def _coco(index: int) -> dict[str, Any]:
    """As torchvision's CocoDetection gives it: a list of annotations, each with polygons or a run length."""
    one = {"segmentation": [[1.5, 2.0, 3.0, 4.0, 5.0, 6.0]], "area": 12.5, "bbox": [1.0, 2.0, 30.0, 4.0]}
    objects: list[Any] = [{**one, "iscrowd": 0, "id": number} for number in range(index % 3)]
    crowd = {"segmentation": {"counts": [3, 4, 5], "size": [12, 1]}, "iscrowd": 1, "id": index}
    return {"image": np.full((4, 4 + index, 3), index, np.uint8), "target": [*objects, crowd]}


def _detection(index: int) -> dict[str, Any]:
    """As torchvision's detection models take it: tensors whose first size is the number of objects."""
    count = index % 3
    return {
        "image": np.full((4, 4 + index, 3), index, np.uint8),
        "boxes": torch.arange(4.0 * count).reshape(count, 4),
        "labels": torch.arange(count),
        "area": np.linspace(1, 2, count, dtype=np.float32),
        "image_id": index,
    }


@pytest.mark.parametrize("make", [_detection, _coco])
def test_annotations_are_cached_as_they_are(make: Any, cached: Any) -> None:
    """Boxes in any number, also none, and nested annotations come back with their types and values."""
    dataset = cached(Made(make, NUM_SAMPLES))
    for index in range(NUM_SAMPLES):
        assert_same_samples(dataset[index], make(index))


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torchvision", "Hugging Face"])
def test_pil_images_are_converted(library: str, request: Any, cached: Any) -> None:
    """With `pre_transform`, samples are HWC uint8 arrays and the int labels; without, they are refused."""
    pairs = Made(lambda index: (picture(index), index), NUM_SAMPLES)
    source = request.getfixturevalue("rows") if library == "Hugging Face" else pairs
    dataset = cached(source, pre_transform=to_arrays)
    for index in range(NUM_SAMPLES):
        assert_same_samples(dataset[index], (np.array(picture(index)), index))
    with pytest.raises(
        UnsupportedSampleError, match=r'image.*numpy.asarray.*DataLoader\(dataset, cache="ram"\)'
    ):
        fastload.CachedDataset(source)


@pytest.fixture(scope="module")
def rows() -> Any:
    """A dataset in memory with a column of images and one of labels."""
    hugging_face = pytest.importorskip("datasets")
    columns = {"image": [picture(i) for i in range(NUM_SAMPLES)], "label": list(range(NUM_SAMPLES))}
    features = {"image": hugging_face.Image(), "label": hugging_face.Value("int64")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # progress bars start a thread otherwise
        yield hugging_face.Dataset.from_dict(columns, features=hugging_face.Features(features))


FORMATS: dict[str, Any] = {
    "numpy": lambda rows: rows.with_format("numpy"),
    "torch": lambda rows: rows.with_format("torch"),
    "undecoded": lambda rows: rows.cast_column("image", pytest.importorskip("datasets").Image(decode=False)),
    "deterministic": lambda rows: rows.with_transform(
        lambda batch: {"pixels": [np.asarray(image)[:2] for image in batch["image"]]}
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_with_a_format_are_cached_as_they_are(rows: Any, kind: str, cached: Any) -> None:
    """Arrays, tensors, dicts of bytes, and what a transform gives; a random transform is refused."""
    formatted = FORMATS[kind](rows)
    assert_same_samples(cached(formatted)[3], formatted[3])
    transformed = rows.with_transform(lambda batch: {"pixels": [np.random.rand(2)]})
    with pytest.raises(NondeterministicDatasetError, match=r'sample\["pixels"\] differs'):
        fastload.CachedDataset(transformed)


def test_rows_with_a_seed_for_each_sample(rows: Any) -> None:
    """A cache of rows has no `__getitems__`, so that seeding="sample" works."""

    def draw(sample: Any) -> torch.Tensor:
        return torch.tensor([*sample[0].shape, np.random.randint(1 << 30)])

    dataset = fastload.CachedDataset(rows, pre_transform=to_arrays, transform=draw)
    found = []
    for num_workers in (0, 1):
        generator = torch.Generator().manual_seed(1)
        loader = fastload.DataLoader(
            dataset, 2, num_workers=num_workers, seeding="sample", generator=generator
        )
        found.append(torch.cat(list(loader)))
    assert torch.equal(*found)
