"""RandomResizedCrop and RandomHorizontalFlip: albumentations' values and boxes, in the images' place."""

from __future__ import annotations

import copy
import os
import pickle
import random
import subprocess
import sys
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fastload import DataLoader
from fastload.rng.batch_draws import BatchId, BatchStreams, drawing_from
from fastload.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop, crop_and_flip, resample
from fastload.transforms.boxes import NUM_DRAWS, draw_boxes
from fastload.transforms.chain import chained

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def some_images(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def all_at_once(images: torch.Tensor, boxes: Any, size: tuple[int, int]) -> torch.Tensor:
    """The accelerators' form, on the CPU."""
    return resample._all_at_once(images, torch.from_numpy(boxes.astype(np.float32)), size)


FORMS = [resample.resample, all_at_once]
streams = st.integers(0, 1 << 62).map(lambda seed: BatchStreams.of_batch(BatchId(0, 0, 0, seed, 0)))


def reference(image: Any, box: Any, size: tuple[int, int]) -> Any:
    """The crop, resize and flip of albumentations itself, for one `(H, W, C)` array."""
    top, left, height, width, is_flipped = (int(number) for number in box)
    crop = A.RandomResizedCrop(size, p=1.0).apply(image, crop_coords=(left, top, left + width, top + height))
    crop = crop.reshape(*size, image.shape[2])
    return A.HorizontalFlip(p=1.0).apply(crop).reshape(crop.shape) if is_flipped else crop


# --- values -----------------------------------------------------------------------------------------------


@st.composite
def boxes_of_images(draw: st.DrawFn) -> dict[str, Any]:
    num_images = draw(st.integers(0, 3))
    image_size = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    columns = []
    for _ in range(num_images):
        height, width = (draw(st.integers(1, length)) for length in image_size)
        top, left = draw(st.integers(0, image_size[0] - height)), draw(st.integers(0, image_size[1] - width))
        columns.append((top, left, height, width, draw(st.booleans())))
    return {
        "boxes": np.array(columns, dtype=np.float64).reshape(num_images, 5).T,
        "shape": (num_images, *image_size, draw(st.sampled_from([1, 3, 4]))),
        "size": (draw(st.integers(1, 40)), draw(st.integers(1, 40))),
        "seed": draw(st.integers(0, 99)),
        "is_chw": draw(st.booleans()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=50)
@given(case=boxes_of_images())
def test_values_are_those_of_albumentations(form: Any, case: dict[str, Any]) -> None:
    """Any box, size, number of channels and strides: the uint8 values of OpenCV within one grey level."""
    images = some_images(*case["shape"], seed=case["seed"])
    given_images = images.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1) if case["is_chw"] else images
    result = form(given_images, case["boxes"], case["size"])

    assert result.dtype == torch.uint8
    assert result.shape == (len(images), *case["size"], images.shape[3])
    for image, box, found in zip(images.numpy(), case["boxes"].T, result.numpy(), strict=True):
        expected = reference(image, box, case["size"])
        assert np.abs(found.astype(int) - expected).max() <= 1


@pytest.mark.slow
@pytest.mark.thorough
def test_values_are_right_without_avx2() -> None:
    """The test above passes with the kernels that torch uses on other CPUs."""
    name = test_values_are_those_of_albumentations.__name__
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", __file__, "-k", name]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert "2 passed" in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=25)
@given(case=boxes_of_images())
def test_floats_are_not_rounded_to_whole_numbers(form: Any, dtype: torch.dtype, case: dict[str, Any]) -> None:
    """Float images keep their dtype, and have OpenCV's float32 values to the precision of both."""
    images = (some_images(*case["shape"], seed=case["seed"]) / 256).to(dtype)
    result = form(images, case["boxes"], case["size"])

    assert result.dtype == dtype
    tolerance = max(1e-4, torch.finfo(dtype).eps)
    for image, box, found in zip(images.float().numpy(), case["boxes"].T, result, strict=True):
        expected = torch.from_numpy(np.ascontiguousarray(reference(image, box, case["size"])))
        assert torch.allclose(found.float(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("transform", [RandomResizedCrop((9, 11)), RandomHorizontalFlip()])
def test_layout_and_strides_are_kept(transform: Any, memory_format: torch.memory_format) -> None:
    """(B, C, H, W) images stay so, contiguous or channels-last, with the values of (B, H, W, C)."""
    hwc = some_images(5, 20, 30, 3)
    chw = hwc.permute(0, 3, 1, 2).contiguous(memory_format=memory_format)
    with drawing_from(BatchStreams.of_batch(BatchId(0, 0, 0, 1, 0))):
        expected = transform(hwc)
    with drawing_from(BatchStreams.of_batch(BatchId(0, 0, 0, 1, 0))):
        result = transform(chw)

    assert expected.is_contiguous()
    assert result.is_contiguous(memory_format=memory_format)
    assert torch.equal(result, expected.permute(0, 3, 1, 2))
    result.zero_()
    assert torch.equal(hwc, some_images(5, 20, 30, 3))  # the caller's images are read only


@given(p=st.sampled_from([0.0, 0.5, 1.0]), streams=streams, dtype=st.sampled_from([torch.uint8, torch.int32]))
def test_a_flip_reverses_whole_rows(p: float, streams: BatchStreams, dtype: torch.dtype) -> None:
    """Each image is the one that came, or its mirror; none with p=0, all with p=1."""
    images = some_images(8, 5, 6, 3).to(dtype)
    with drawing_from(streams):
        result = RandomHorizontalFlip(p)(images)
    flipped = [torch.equal(found, image.flip(1)) for found, image in zip(result, images, strict=True)]
    kept = [torch.equal(found, image) for found, image in zip(result, images, strict=True)]

    assert all(one != other for one, other in zip(flipped, kept, strict=True))
    assert p == 0.5 or all(flipped if p else kept)


class Operators(TorchDispatchMode):
    """Records the operators that run, and the copies to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.seen.append(func)
        self.num_copies += func._schema.name == "aten::_to_copy" and kwargs.get("device") is not None
        return func(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("transform", [RandomResizedCrop((9, 11)), RandomHorizontalFlip()])
def test_on_an_accelerator_nothing_depends_on_values(transform: Any, dtype: torch.dtype) -> None:
    """On a device without values: one copy of parameters, and no operator that needs a value on the host."""
    images = torch.empty((4, 20, 30, 3), dtype=dtype, device="meta")
    with drawing_from(BatchStreams.of_batch(BatchId(0, 0, 0, 1, 0))), Operators() as operators:
        result = transform(images)

    assert result.device.type == "meta"
    assert result.shape == ((4, 9, 11, 3) if isinstance(transform, RandomResizedCrop) else images.shape)
    assert operators.num_copies == 1
    dynamic = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    assert [func for func in operators.seen if dynamic & set(func.tags)] == []


# --- boxes ------------------------------------------------------------------------------------------------


class Replays(random.Random):
    """Gives the draws of one image in the order in which albumentations asks for them."""

    def __init__(self, draws: list[float]) -> None:
        super().__init__(0)
        self._tries, self._place = iter(draws[:-2]), iter(draws[-2:])

    def uniform(self, a: float, b: float) -> float:
        return a + (b - a) * next(self._tries)

    def random(self) -> float:
        return next(self._place)


ratios = st.sampled_from([RATIO, (1.0, 1.0), (0.1, 10.0), (3.0, 4.0), (0.2, 0.25)])


@pytest.mark.slow
@given(
    image_size=st.tuples(st.integers(1, 600), st.integers(1, 600)),
    scale=st.sampled_from([SCALE, (1.0, 1.0), (0.5, 0.9), (0.9, 1.0)]),
    ratio=ratios,
    streams=streams,
)
def test_boxes_are_those_of_albumentations(
    image_size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float], streams: BatchStreams
) -> None:
    """The same uniform draws give the same boxes, in the image; after ten failures the central one."""
    uniforms = streams.uniforms(20, NUM_DRAWS)
    boxes = draw_boxes(uniforms, image_size, scale, ratio)
    top, left, height, width = boxes
    assert (np.minimum(top, left) >= 0).all()
    assert (np.minimum(height, width) >= 1).all()
    assert (top + height <= image_size[0]).all()
    assert (left + width <= image_size[1]).all()
    theirs = A.RandomResizedCrop((8, 8), scale=scale, ratio=ratio)

    for number in range(20):
        theirs.py_random = Replays(uniforms[:, number].tolist())
        expected = theirs.get_params_dependent_on_data({"shape": (*image_size, 3)}, {})["crop_coords"]
        top, left, height, width = boxes[:, number].astype(int).tolist()
        if expected[0] == expected[2] or expected[1] == expected[3]:
            assert min(height, width) == 1  # albumentations gives a box without pixels, and fails
        else:
            assert (left, top, left + width, top + height) == expected


# --- fusing -----------------------------------------------------------------------------------------------


def count_resamples(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def counting(images: Any, boxes: Any, size: Any) -> Any:
        calls.append(boxes[4])
        return resample.resample(images, boxes, size)

    monkeypatch.setattr(crop_and_flip, "resample", counting)
    return calls


def test_a_flip_after_a_crop_is_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a list both are one pass, with the draws and the values of two calls."""
    calls = count_resamples(monkeypatch)
    transforms = [RandomResizedCrop(7), RandomHorizontalFlip()]
    images = some_images(32, 20, 30, 3)
    with drawing_from(BatchStreams.of_batch(BatchId(0, 0, 0, 1, 0))):
        fused = chained(transforms)(images)
    with drawing_from(BatchStreams.of_batch(BatchId(0, 0, 0, 1, 0))):
        apart = transforms[1](transforms[0](images))

    assert 0 < calls[0].sum() < 32
    assert not calls[1].any()
    assert torch.equal(fused, apart)


@pytest.mark.parametrize(
    "flip", [RandomHorizontalFlip(1.0, key=1), RandomHorizontalFlip(1.0, key=0, layout="CHW")]
)
def test_a_flip_of_other_images_is_a_step_of_its_own(flip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another key or layout, the crop flips nothing."""
    calls = count_resamples(monkeypatch)
    images = some_images(2, 6, 5, 3), some_images(2, 6, 5, 3)
    crop = RandomResizedCrop((6, 5), key=0, layout="HWC")
    chained([crop, flip])(images)

    assert [box.any() for box in calls] == [False]


# --- batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "key", "where"),
    [
        ((some_images(2, 6, 6, 3), torch.tensor([1, 2])), None, 0),
        ({"image": some_images(2, 6, 6, 3), "mask": some_images(2, 6, 6, 1)}, None, "image"),
        ([torch.tensor([1, 2]), some_images(2, 6, 6, 3)], 1, 1),
    ],
)
@pytest.mark.parametrize("make", [lambda key: RandomResizedCrop(6, key=key), RandomHorizontalFlip])
def test_only_the_images_are_transformed(batch: Any, key: Any, where: Any, make: Any) -> None:
    """The container keeps its type, the images change, and every other part is the same object."""
    transform = RandomHorizontalFlip(1.0, key=key) if make is RandomHorizontalFlip else make(key)
    result = transform(batch)
    parts = list(batch) if isinstance(batch, dict) else range(len(batch))

    assert type(result) is type(batch)
    assert not torch.equal(result[where], batch[where])
    assert all(result[part] is batch[part] for part in parts if part != where)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 3, 6, 4), r"at \$, .* it fits HWC and CHW; pass layout="),
        ((2, 5, 6, 7), "with 1 or 3 or 4 channels and layout='auto' it fits neither; pass layout="),
        ((5, 6, 3), r"images of shape \(B, H, W, C\) or \(B, C, H, W\) at \$, but got"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...], message: str) -> None:
    """The error names the shape, and what was expected; with a named layout any channels will do."""
    for transform in (RandomResizedCrop(4), RandomHorizontalFlip()):
        with pytest.raises(ValueError, match=message) as caught:
            transform(some_images(*shape))
        assert str(shape) in str(caught.value)
    assert RandomResizedCrop(4, layout="HWC")(some_images(2, 5, 6, 7)).shape == (2, 4, 4, 7)
    assert RandomResizedCrop(4, layout="CHW")(some_images(2, 7, 6, 5)).shape == (2, 7, 4, 4)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ((some_images(2, 6, 6, 3).int(),), TypeError, r"uint8 or floats at \$\[0\], but got torch.int32"),
        (("a.jpg",), TypeError, r"RandomResizedCrop expects images as a tensor at \$\[0\]"),
        (some_images(2, 0, 6, 3), ValueError, r"images with pixels, but got the shape \(2, 0, 6, 3\)"),
    ],
)
def test_other_images_are_refused(batch: Any, error: type[Exception], message: str) -> None:
    """The error says what was expected, and what came."""
    with pytest.raises(error, match=message):
        RandomResizedCrop(4)(batch)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RandomResizedCrop("224"), TypeError, "size should be an int, or .* got '224'"),
        (lambda: RandomResizedCrop(0), ValueError, "size should be at least 1 pixel, but got 0"),
        (
            lambda: RandomResizedCrop(4, scale=(0.5, 1.5)),
            ValueError,
            "scale should be two numbers .* at most 1",
        ),
        (lambda: RandomResizedCrop(4, scale=(0.0, 1.0)), ValueError, "scale should be two numbers above 0"),
        (lambda: RandomResizedCrop(4, ratio=(2, 1)), ValueError, "ratio should be two numbers above 0"),
        (lambda: RandomHorizontalFlip(1.5), ValueError, "p should be a probability from 0 to 1, but got 1.5"),
        (lambda: RandomHorizontalFlip(None), TypeError, "p should be a probability .* got None"),  # type: ignore[arg-type]
        (lambda: RandomHorizontalFlip(layout="NCHW"), ValueError, "layout should be one of auto, HWC, CHW"),
    ],
)
def test_arguments_out_of_their_range_are_refused(make: Any, error: type[Exception], message: str) -> None:
    """The error names the argument, what was expected, and what came."""
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles_draw_the_same(clone: Any) -> None:
    """They have no state: with torch's generator in one state they give one result, and two calls differ."""
    module = torch.nn.Sequential(RandomResizedCrop(6), RandomHorizontalFlip())
    images = some_images(4, 40, 40, 3)
    torch.manual_seed(1)
    expected = module(images)
    torch.manual_seed(1)

    assert module.state_dict() == {}
    assert torch.equal(clone(module)(images), expected)
    assert not torch.equal(module(images), expected)


# --- in a loader ------------------------------------------------------------------------------------------

# The seed that a loader draws first from a generator with the seed 1.
BASE_SEED = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(1)).item())


def test_a_list_is_applied_in_its_order() -> None:
    """Crops, flips and Normalize: one batch of floats, with the values of the calls one after another."""
    images = some_images(8, 20, 30, 3)
    crop, flip, normalize = RandomResizedCrop(7), RandomHorizontalFlip(), Normalize([0.5] * 3, [0.5] * 3)
    with drawing_from(BatchStreams.of_batch(BatchId(0, 0, 0, BASE_SEED, 0))):
        expected = normalize(flip(crop(images)))
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(
        images, 8, device="cpu", device_transform=[crop, flip, normalize], generator=generator
    )

    assert torch.equal(next(iter(loader)), expected)
