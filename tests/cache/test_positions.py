"""Masks, boxes and keypoints move with the image, or an error says how to name them."""

from __future__ import annotations

from typing import Any, NamedTuple

import albumentations as A
import numpy as np
import pytest
import torch

import fastload
from fastload.cache.dataset import CachedDataset
from tests.cache.zoo import Made

pytestmark = pytest.mark.usefixtures("registry_folder")

IMAGE = np.arange(24 * 20 * 3, dtype=np.uint8).reshape(24, 20, 3)
BOXES = np.array([[4, 10, 12, 20]], np.float32)
POINTS = np.array([[4, 10], [5, 11], [6, 12]], np.float32)
FLIP = A.HorizontalFlip(p=1)
PIXELS = A.Compose([A.RandomBrightnessContrast(p=1), A.OneOf([A.Normalize()]), A.ToTensorV2()])


class Pair(NamedTuple):
    image: Any
    keypoints: Any


class Named(NamedTuple):
    image: Any
    label: Any


UNMOVED: dict[str, tuple[Any, str]] = {
    "torchvision's target": ((IMAGE, {"boxes": BOXES, "labels": np.ones(1)}), r"sample\[1\].*\['boxes'\]"),
    "an empty target": ((IMAGE, {"boxes": BOXES[:0], "labels": np.ones(0)}), r"\['boxes'\]"),
    "COCO's annotations": (
        (IMAGE, [{"id": 3, "bbox": [1.0, 2.0, 3.0, 4.0]}]),
        r"sample\[1\].*\[0\]\['bbox'\]",
    ),
    "an image and a path": ((IMAGE, "a.jpg", {"masks": np.zeros((5, 24, 20))}), r"sample\[2\].*\['masks'\]"),
    "boxes": ((IMAGE, BOXES), r"sample\[1\].*array \(1, 4\)"),
    "boxes as tensors": ((IMAGE, 3, torch.as_tensor(BOXES)), r"sample\[2\].*tensor"),
    "boxes as lists": ((IMAGE, [[1, 2, 3, 4], [5, 6, 7, 8]]), r"sample\[1\]"),
    "points": ([IMAGE, POINTS], r"sample\[1\]"),
    "a mask": ((IMAGE, IMAGE[..., 0]), r"sample\[1\]"),
    "a mask as a tensor": ((IMAGE, torch.zeros(24, 20)), r"sample\[1\]"),
    "masks": ((IMAGE, np.zeros((5, 24, 20))), r"sample\[1\]"),
    "another name": ({"image": IMAGE, "boxes": BOXES}, r"sample\['boxes'\]"),
    "a nest in a dict": ({"image": IMAGE, "target": {"boxes": BOXES}}, r"sample\['target'\].*\['boxes'\]"),
}


@pytest.mark.parametrize("name", UNMOVED)
@pytest.mark.parametrize("transform", [FLIP, A.Compose([A.ColorJitter(p=1), A.OneOf([A.Affine()])])])
@pytest.mark.parametrize("role", ["transform", "pre_transform"])
def test_positions_without_a_target_are_an_error(name: str, transform: Any, role: str) -> None:
    """It names the place, and says which names a dict should have."""
    sample, said = UNMOVED[name]
    options: dict[str, Any] = {role: transform}
    with pytest.raises(TypeError, match=said + r".*\"bboxes\".*bbox_params="):
        CachedDataset(Made(lambda index: sample), **options)[0]


@pytest.mark.parametrize(
    "sample", [Pair(IMAGE, [1, 2]), Named(IMAGE, {"more": [{"segmentation": [[1, 2]]}]})]
)
def test_positions_in_namedtuples_are_an_error(sample: Any) -> None:
    """Which only pass where nothing is cached."""
    with pytest.raises(TypeError, match=r"sample\[1\].*\"bboxes\".*bbox_params="):
        CachedDataset(Made(lambda index: sample), FLIP, cache=None)[0]


@pytest.mark.parametrize("name", UNMOVED)
def test_a_transform_of_colors_alone_leaves_them(name: str) -> None:
    """It moves no pixel, so positions stay right; steps inside others count."""
    sample, _ = UNMOVED[name]
    assert len(CachedDataset(Made(lambda index: sample), PIXELS)[0]) == len(sample)


ENDS: dict[str, list[Any]] = {
    "Normalize": [A.Normalize()],
    "ToTensorV2": [A.ToTensorV2()],
    "Normalize and ToTensorV2": [A.Normalize(), A.ToTensorV2()],
    "an enclosed end": [A.Sequential([A.Normalize(), A.ToTensorV2()], p=1)],
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("end", ENDS)
def test_a_loader_refuses_unmoved_masks_before_a_deferred_end(end: str, num_workers: int) -> None:
    """Workers compute the end of the pipeline in the batch; what is before it is known to move."""
    dataset = CachedDataset(Made(lambda index: (IMAGE, IMAGE[..., 0])), A.Compose([FLIP, *ENDS[end]]))
    with pytest.raises(TypeError, match=r"sample\[1\].*moves the image"):
        next(iter(fastload.DataLoader(dataset, batch_size=4, num_workers=num_workers)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_additional_targets_move_before_a_deferred_end(num_workers: int) -> None:
    """A name that the pipeline was given is no error, whoever runs the pipeline."""
    pipeline = A.Compose([A.Crop(2, 3, 10, 11), *ENDS["Normalize"]], additional_targets={"polygons": "mask"})
    dataset = CachedDataset(Made(lambda index: {"image": IMAGE, "polygons": IMAGE[..., 0]}), pipeline)
    batch = next(iter(fastload.DataLoader(dataset, batch_size=2, num_workers=num_workers)))
    assert np.array_equal(batch["polygons"][1], IMAGE[3:11, 2:10, 0])


@pytest.mark.parametrize(
    "rest",
    [
        (3,),
        (np.int64(3), "a/b.jpg"),
        (np.zeros(10), torch.zeros(20)),
        (np.zeros((1, 77), np.int64), torch.zeros(3, 512)),
        ({"label": 3, "caption": "a box", "mask": "mask.png", "scores": [0.1, 0.2]},),
        (["a", "b"], [1, 2, 3, 4], None),
    ],
)
def test_what_is_no_position_stays(rest: Any) -> None:
    """Labels, texts, embeddings and metadata beside the image."""
    image, *others = CachedDataset(Made(lambda index: (IMAGE, *rest)), FLIP)[1]
    assert np.array_equal(image, IMAGE[:, ::-1])
    assert str(others) == str(list(rest))


def test_targets_move() -> None:
    """Under the names of the pipeline, also additional ones."""
    params = A.BboxParams(format="pascal_voc", label_fields=["classes"])
    pipeline = A.Compose([FLIP], bbox_params=params, additional_targets={"depth": "mask"})
    depth = IMAGE[..., 0]
    sample = {"image": IMAGE, "bboxes": BOXES, "classes": np.ones(1), "depth": depth, "id": 3}
    moved = CachedDataset(Made(lambda index: sample), pipeline)[0]
    assert np.array_equal(moved["depth"], depth[:, ::-1])
    assert np.allclose(moved["bboxes"], [[8, 10, 16, 20]])
    assert moved["id"] == 3
