"""Batches of torchvision's tv_tensors: those of torch's loader, written to the memory of the batch."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.utils.data as tud

import fastload
from fastload.batch.collate import Collator
from fastload.memory.lease import BufferPool
from tests.kit import datasets
from tests.kit.batches import assert_same_batches
from tests.kit.torchvision import import_torchvision

import_torchvision()
from torchvision import tv_tensors  # noqa: E402


class OwnImage(tv_tensors.Image):
    """A class of the user."""


def image(index: int, kind: Any = tv_tensors.Image, *, side: int = 64) -> Any:
    """Of an image of Pillow: its channels come last in memory."""
    return kind(torch.full((side, side, 3), float(index)).cumsum(0).permute(2, 0, 1))


def boxes(index: int) -> Any:
    return tv_tensors.BoundingBoxes(torch.full((2, 4), index), format="XYXY", canvas_size=(9, 9))


def nested(index: int) -> Any:
    mask = tv_tensors.Mask(torch.full((200, 200), index, dtype=torch.uint8))
    return {"image": image(index), "masks": [mask, mask[:3]], "boxes": boxes(index), "label": index}


def from_two_on(index: int, *, returns: str) -> Any:
    tv_tensors.set_return_type("TVTensor" if index == 2 and returns == "image" else "Tensor")
    return image(index)


SAMPLES: dict[str, Any] = {
    "strided": image,
    "contiguous": lambda index: tv_tensors.Image(image(index).contiguous()),
    "small": lambda index: image(index, side=4),
    "video": lambda index: tv_tensors.Video(torch.full((2, 3, 50, 50), index)),
    "boxes": boxes,
    "nested": nested,
    "own class": lambda index: image(index, OwnImage),
    "classes": lambda index: image(index, [tv_tensors.Image, torch.Tensor, OwnImage][index % 3]),
    "own class later": lambda index: image(index, OwnImage if index == 3 else tv_tensors.Image),
    "plain later": lambda index: image(index, tv_tensors.Image if index < 3 else torch.Tensor),
    "sizes": lambda index: image(index, side=64 + index),
    "dtypes": lambda index: image(index) if index else tv_tensors.Image(image(index).int()),
    "gradient": lambda index: image(index).requires_grad_(index == 1),
    "images are returned": lambda index: from_two_on(index, returns="image"),
}


def _batches(loader: Any) -> Any:
    try:
        return list(loader)
    except Exception as error:  # noqa: BLE001  # is compared
        return error
    finally:
        tv_tensors.set_return_type("Tensor")


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"memory_format": torch.channels_last}], ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_batches_are_those_of_torch(name: str, workers: dict[str, Any]) -> None:
    """Types, values, strides and errors, of samples that are alike and of those that are not."""
    dataset, num_workers = datasets.Made(SAMPLES[name], 4), workers.get("num_workers", 0)
    theirs = _batches(tud.DataLoader(dataset, 4, num_workers=num_workers))
    ours = _batches(fastload.DataLoader(dataset, 4, **workers))
    if "memory_format" in workers and isinstance(theirs, list):
        theirs = [fastload.batch.collate.to_channels_last(batch) for batch in theirs]
    assert_same_batches(theirs, ours)


@pytest.mark.parametrize("kind", [tv_tensors.Image, tv_tensors.Mask, torch.Tensor])
def test_they_are_written_to_the_memory_of_the_batch(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain tensors are, in a worker."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    allocator = BufferPool(1 << 20)
    allocator.begin()
    collator = Collator(allocator, in_worker=True, channels_last=False)
    batch = collator.collate(collator.take((image(index, kind) for index in range(4)), 4))
    assert allocator.lease is not None
    assert allocator.memory is not None
    start = ctypes.addressof(allocator.lease)
    assert start <= batch.data_ptr() < start + allocator.memory.nbytes
    assert type(batch) is torch.Tensor
    assert batch.is_contiguous()
