"""RandomCrop and RandomHorizontalFlip: which pixels they give, on every path."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastload import transforms
from fastload.memory.lease import BufferPool, allocating_in
from fastload.rng.batch_draws import BatchDraws, drawing_from
from fastload.rng.keys import BatchKey
from fastload.transforms import crop_and_flip
from fastload.transforms.compose import compose

IMAGES = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
DTYPES = [torch.uint8, torch.int16, torch.bool, torch.float16, torch.float32, torch.bfloat16]


def drawn(transform: Any, batch: Any, seed: int = 0) -> Any:
    """The result with draws that depend on the seed alone."""
    with drawing_from(BatchDraws(BatchKey(0, 0, base_seed=seed))):
        return transform(batch)


@st.composite
def batches(draw: Any, dtypes: Any = DTYPES) -> tuple[torch.Tensor, str]:
    """Images of any shape, dtype and strides, and their layout."""
    shape = [draw(st.integers(*limits)) for limits in ((0, 5), (2, 9), (2, 9), (1, 4))]
    values = np.random.default_rng(0).integers(0, 200, shape)
    images = torch.from_numpy(values).to(draw(st.sampled_from(dtypes)))
    order = draw(st.sampled_from(["HWC", "CHW", "CHW, channels last", "HWC, every second column"]))
    if order == "HWC, every second column":
        images = torch.stack([images, images], 3).flatten(2, 3)[:, :, ::2]
    elif order != "HWC":
        images = images.permute(0, 3, 1, 2)
        images = images.contiguous() if order == "CHW" else images
    return images, order[:3]


def on_each_path(transform: Any, images: torch.Tensor, seed: int) -> torch.Tensor:
    """The results of both implementations, which must be equal."""
    first = drawn(transform, images, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crop_and_flip, "NUMPY_DTYPES", ())
        second = drawn(transform, images, seed)
    assert torch.equal(first, second)
    assert first.dtype == images.dtype
    return first


@pytest.mark.slow
@given(batches(), st.data())
def test_a_crop_is_a_box_of_the_padded_image(batch: tuple[torch.Tensor, str], data: st.DataObject) -> None:
    """Each result is the padded image at one of all places, on every path and in the layout of the input."""
    images, layout = batch
    channels = images if layout == "HWC" else images.permute(0, 2, 3, 1)
    _, height, width, _ = channels.shape
    padding = data.draw(st.integers(0, min(height, width) - 1))
    size = data.draw(st.integers(1, height + 2 * padding)), data.draw(st.integers(1, width + 2 * padding))
    mode = data.draw(st.sampled_from(["constant", "reflect"]))
    fill = data.draw(st.sampled_from([0, 1]))
    crop = transforms.RandomCrop(size, padding, padding_mode=mode, fill=fill, layout=layout)
    result = on_each_path(crop, images, data.draw(st.integers(0, 99)))
    assert result.is_contiguous() or result.is_contiguous(memory_format=torch.channels_last)
    options: Any = {"constant_values": fill} if mode == "constant" else {}
    for image, box in zip(channels, result if layout == "HWC" else result.permute(0, 2, 3, 1), strict=True):
        array = image.to(torch.float32).numpy()
        padded = np.pad(array, ((padding, padding), (padding, padding), (0, 0)), mode, **options)
        windows = np.lib.stride_tricks.sliding_window_view(padded, size, axis=(0, 1))
        places = np.moveaxis(windows, 2, -1) == box.to(torch.float32).numpy()
        assert places.all((2, 3, 4)).any()


def test_every_place_of_a_crop_is_equally_likely() -> None:
    """The corner of the box is uniform over all places, also those in the padding."""
    image = torch.arange(1, 10, dtype=torch.uint8).reshape(1, 3, 3, 1).expand(20000, -1, -1, -1)
    corners = drawn(transforms.RandomCrop(1, 1, layout="HWC"), image).flatten()
    counts = np.bincount(corners.numpy(), minlength=10)
    assert np.allclose(counts[1:] / 20000, 1 / 25, atol=0.01)
    assert math.isclose(counts[0] / 20000, 16 / 25, abs_tol=0.02)


@pytest.mark.slow
@given(batches(), st.integers(0, 99), st.sampled_from([0.0, 0.5, 1.0]))
def test_a_flip_reverses_whole_rows(batch: tuple[torch.Tensor, str], seed: int, p: float) -> None:
    """Each image is itself with p=0, its mirror image with p=1, else either; all dtypes and strides."""
    images, layout = batch
    result = on_each_path(transforms.RandomHorizontalFlip(p, layout=layout), images, seed)
    mirrored = images.flip(2 if layout == "HWC" else 3)
    for before, after, mirror in zip(images, result, mirrored, strict=True):
        assert (p < 1 and torch.equal(after, before)) or (p > 0 and torch.equal(after, mirror))


def test_each_channel_has_its_own_fill() -> None:
    """A sequence gives one value for each channel, also where a large batch is padded in parts."""
    images = torch.zeros(3, 8, 8, 3, dtype=torch.uint8)
    around = drawn(transforms.RandomCrop(1, 7, fill=(1, 2, 3)), images, seed=3)
    assert [1, 2, 3] in around.reshape(-1, 3).tolist()
    images = torch.randint(0, 256, (700, 40, 40, 3), dtype=torch.uint8)
    on_each_path(transforms.RandomCrop(32, 4, fill=(1, 2, 3)), images, 5)


@pytest.mark.usefixtures("lends_small")
def test_results_lie_in_the_memory_of_the_batch() -> None:
    """Within `allocating_in`, only the result of the last transform lies in the allocator's memory."""
    images = torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8)
    normalize = transforms.Normalize((0.5,) * 3, (0.5,) * 3)
    for transform in (transforms.RandomCrop(8, 2), transforms.RandomHorizontalFlip(), normalize):
        buffers = BufferPool(1 << 20)
        buffers.begin()
        with allocating_in(buffers):
            result = compose([transforms.RandomCrop(8, 1), transform])(images)
        memory = buffers.memory
        assert memory is not None
        assert memory.address <= result.data_ptr() < memory.address + memory.nbytes
        assert buffers.used_bytes == result.nbytes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transforms.RandomCrop(0), "size should be at least 1 pixel"),
        (lambda: transforms.RandomCrop(8, -1), "padding should be at least 0"),
        (lambda: transforms.RandomCrop(8, "4"), "padding should be an int"),
        (lambda: transforms.RandomCrop(8, padding_mode="edge"), "padding_mode should be"),
        (lambda: transforms.RandomHorizontalFlip(2), "p should be a probability"),
        (lambda: transforms.RandomResizedCrop(8, (0.1, 2)), "scale should be two numbers above 0 and at"),
        (lambda: transforms.RandomCrop((1, 2, 3)), "size should be an int, or the height and the width"),
        (lambda: transforms.RandomCrop(9)(IMAGES), "images of at least 9 x 9 pixels"),
        (lambda: transforms.RandomCrop(8, 8, padding_mode="reflect")(IMAGES), "larger than their padding"),
        (lambda: transforms.RandomCrop(8, 1, fill=-1)(IMAGES), "fill should be a value of torch.uint8"),
        (lambda: transforms.RandomCrop(8, 1, fill=(1, 2))(IMAGES), "or one for each of 3 channels"),
        (lambda: transforms.RandomCrop(8, 1, fill=0.5)(IMAGES), "fill should be a value of torch.uint8"),
    ],
)
def test_wrong_arguments_and_images_that_do_not_fit(make: Any, message: str) -> None:
    """Errors of the constructor, or of the call, say what was expected."""
    with pytest.raises((TypeError, ValueError), match=message):
        make()
