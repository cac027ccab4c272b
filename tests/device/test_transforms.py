"""Batch transforms: albumentations' values and boxes, the values of a formula, in the images' place."""

from __future__ import annotations

import collections
import copy
import functools
import os
import pickle
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fastload import DataLoader
from fastload.rng.batch_draws import BatchDraws, drawing_from
from fastload.rng.keys import BatchKey
from fastload.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop, resample
from fastload.transforms.boxes import NUM_DRAWS, draw_boxes
from tests.device.conftest import CUDA

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
EPSILON = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
}


def some_images(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def same_draws(seed: int = 1) -> Any:
    """A block in which transforms draw what they drew in the block before."""
    return drawing_from(BatchDraws(BatchKey(0, 0, base_seed=seed)))


Pair = collections.namedtuple("Pair", "image label")
IMAGES, MASKS, LABELS = some_images(2, 6, 6, 3), some_images(2, 6, 6, 3, seed=1), torch.tensor([1, 2])
normalize, crop, flip = Normalize(MEAN, STD), RandomResizedCrop((9, 11)), RandomHorizontalFlip()

# --- Normalize --------------------------------------------------------------------------------------------


def formula(chw: torch.Tensor, mean: Any = MEAN, std: Any = STD, max_value: float = 255.0) -> torch.Tensor:
    """As it is written, in float64."""
    per_channel = [torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1) for values in (mean, std)]
    return (chw.double() / max_value - per_channel[0]) / per_channel[1]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    num_channels = draw(st.sampled_from([1, 3, 4]))
    return {
        "mean": draw(st.lists(st.floats(0, 1), min_size=num_channels, max_size=num_channels)),
        "std": draw(st.lists(st.floats(0.01, 1), min_size=num_channels, max_size=num_channels)),
        "dtype": draw(st.sampled_from(list(EPSILON))),
        "memory_format": draw(st.sampled_from([None, torch.channels_last, torch.contiguous_format])),
        "layout": draw(st.sampled_from(["HWC", "CHW"])),
        "max_pixel_value": draw(st.sampled_from([255.0, 1.0, 128.0])),
    }


@pytest.mark.slow
@given(
    arguments=cases(),
    sizes=st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 9)),
    is_contiguous=st.booleans(),
    seed=st.integers(0, 99),
)
def test_normalised_values(arguments: Any, sizes: Any, is_contiguous: bool, seed: int) -> None:
    """Rounded to the dtype, for any channels, strides, dtype and format; without one, the input's stays."""
    batch, height, width = sizes
    num_channels = len(arguments["mean"])
    chw = some_images(batch, num_channels, height, width, seed=seed)
    images = chw.permute(0, 2, 3, 1) if arguments["layout"] == "HWC" else chw
    images = images.contiguous() if is_contiguous else images
    result = Normalize(**arguments)(images)
    expected = formula(chw, arguments["mean"], arguments["std"], arguments["max_pixel_value"])
    biggest = max(1.0, max(m / s for m, s in zip(arguments["mean"], arguments["std"], strict=True)))
    epsilon = EPSILON[arguments["dtype"]]
    assert result.dtype == arguments["dtype"]
    assert result.shape == chw.shape
    are_pixels = arguments["layout"] == "HWC" and is_contiguous
    kept = torch.channels_last if are_pixels else torch.contiguous_format
    if batch or arguments["memory_format"] is not None:  # an empty tensor has no order
        assert result.is_contiguous(memory_format=arguments["memory_format"] or kept)
    assert torch.allclose(result.double(), expected, rtol=epsilon, atol=epsilon * biggest)


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), copy.deepcopy])
def test_a_models_dtype_does_not_touch_the_constants(move: Any) -> None:
    """In a model that is cast, and in autocast, values stay exact; a model's state has none of them."""
    expected = normalize(IMAGES)
    model = torch.nn.Sequential(Normalize(MEAN, STD))
    assert model.state_dict() == {}
    assert list(model.parameters()) == []
    assert torch.equal(pickle.loads(pickle.dumps(move(model)))(IMAGES), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(IMAGES), expected)


def test_constants_move_with_the_module_and_follow_the_batch() -> None:
    """to(device) moves them; a batch on another device takes them along."""
    module = Normalize(MEAN, STD).to("meta")
    assert {str(buffer.device) for buffer in module.buffers()} == {"meta"}
    on_meta = module(IMAGES.to("meta"))
    assert on_meta.device.type == "meta"
    assert on_meta.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(module(IMAGES), normalize(IMAGES))


def test_constants_of_pixels_need_their_unit() -> None:
    """A mean of 123.7 is refused with the unit and the way out, and taken with max_pixel_value=1."""
    mean, std = ([value * 255 for value in values] for values in (MEAN, STD))
    with pytest.raises(ValueError, match=r"units of max_pixel_value=255.*mean above 1.*max_pixel_value=1 "):
        Normalize(mean, std)
    torch.testing.assert_close(Normalize(mean, std, max_pixel_value=1)(IMAGES), normalize(IMAGES))


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu_normalised_values_are_the_same(dtype: torch.dtype, device: str) -> None:
    """The device's one kernel gives the CPU's values, but for the last bit."""
    result = Normalize(MEAN, STD, dtype)(IMAGES.to(device))
    assert result.is_cuda
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result.cpu(), Normalize(MEAN, STD, dtype)(IMAGES))


# --- crops and flips --------------------------------------------------------------------------------------


def all_at_once(images: torch.Tensor, boxes: Any, size: tuple[int, int]) -> torch.Tensor:
    """The accelerators' form, on the CPU."""
    return resample._all_at_once(images, torch.from_numpy(boxes.astype(np.float32)), size)


FORMS = [resample.resample, all_at_once]
streams = st.integers(0, 1 << 62).map(lambda seed: BatchDraws(BatchKey(0, 0, base_seed=seed)))


def reference(image: Any, box: Any, size: tuple[int, int]) -> Any:
    """The crop and resize of albumentations itself, for one `(H, W, C)` array."""
    A = pytest.importorskip("albumentations")
    top, left, height, width = (int(number) for number in box)
    crop = A.RandomResizedCrop(size, p=1.0).apply(image, crop_coords=(left, top, left + width, top + height))
    return crop.reshape(*size, image.shape[2])


@st.composite
def boxes_of_images(draw: st.DrawFn) -> dict[str, Any]:
    num_images = draw(st.integers(0, 3))
    image_size = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    columns = []
    for _ in range(num_images):
        height, width = (draw(st.integers(1, length)) for length in image_size)
        top, left = draw(st.integers(0, image_size[0] - height)), draw(st.integers(0, image_size[1] - width))
        columns.append((top, left, height, width))
    return {
        "boxes": np.array(columns, dtype=np.float64).reshape(num_images, 4).T,
        "shape": (num_images, *image_size, draw(st.sampled_from([1, 3, 4]))),
        "size": (draw(st.integers(1, 40)), draw(st.integers(1, 40))),
        "seed": draw(st.integers(0, 99)),
        "is_chw": draw(st.booleans()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@settings(max_examples=40)
@given(case=boxes_of_images())
def test_values_are_those_of_albumentations(form: Any, dtype: torch.dtype, case: dict[str, Any]) -> None:
    """OpenCV's, of uint8 within a grey level, for any box, size and strides; floats are not rounded."""
    images, tolerance = some_images(*case["shape"], seed=case["seed"]), 1.0
    if dtype.is_floating_point:
        images, tolerance = (images / 256).to(dtype), max(1e-4, torch.finfo(dtype).eps)
    pixels = images if dtype == torch.uint8 else images.float()
    given_images = images.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1) if case["is_chw"] else images
    result = form(given_images, case["boxes"], case["size"])
    assert result.dtype == dtype
    assert result.shape == (len(images), *case["size"], images.shape[3])
    for image, box, found in zip(pixels.numpy(), case["boxes"].T, result.double().numpy(), strict=True):
        assert np.abs(found - reference(image, box, case["size"])).max() <= tolerance


@pytest.mark.slow
@pytest.mark.thorough
def test_values_are_right_without_avx2() -> None:
    """The test above passes with the kernels that torch uses on other CPUs."""
    name = test_values_are_those_of_albumentations.__name__
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", __file__, "-k", name]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "6 passed" in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("transform", [crop, flip])
def test_layout_and_strides_are_kept(transform: Any, memory_format: torch.memory_format) -> None:
    """(B, C, H, W) images stay so, contiguous or channels-last, with the values of (B, H, W, C)."""
    hwc = some_images(5, 20, 30, 3)
    chw = hwc.permute(0, 3, 1, 2).contiguous(memory_format=memory_format)
    with same_draws():
        expected = transform(hwc)
    with same_draws():
        result = transform(chw)
    assert expected.is_contiguous()
    assert result.is_contiguous(memory_format=memory_format)
    assert torch.equal(result, expected.permute(0, 3, 1, 2))
    result.zero_()
    assert torch.equal(hwc, some_images(5, 20, 30, 3))  # the caller's images are read only


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
@pytest.mark.parametrize("transform", [crop, flip])
def test_on_an_accelerator_nothing_depends_on_values(transform: Any, dtype: torch.dtype) -> None:
    """On a device without values: one copy of parameters, and no operator that needs a value on the host."""
    images = torch.empty((4, 20, 30, 3), dtype=dtype, device="meta")
    with same_draws(), Operators() as operators:
        result = transform(images)
    assert result.device.type == "meta"
    assert result.shape == ((4, 9, 11, 3) if isinstance(transform, RandomResizedCrop) else images.shape)
    assert operators.num_copies == 1
    dynamic = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    assert [func for func in operators.seen if dynamic & set(func.tags)] == []


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
def test_boxes(image_size: Any, scale: Any, ratio: Any, streams: BatchDraws) -> None:
    """The same uniform draws give the same boxes, in the image; after ten failures the central one."""
    A = pytest.importorskip("albumentations")
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


# --- where the images are ---------------------------------------------------------------------------------


normalized = functools.partial(Normalize, MEAN, STD)
cropped = functools.partial(RandomResizedCrop, (4, 5))
mirrored = functools.partial(RandomHorizontalFlip, 1.0)


@pytest.mark.parametrize(
    ("batch", "key", "where"),
    [
        ([IMAGES, MASKS], None, 0),
        (Pair(IMAGES, LABELS), None, 0),
        ({"image": IMAGES, "label": LABELS, "mask": MASKS}, None, "image"),
        ({"images": IMAGES, "path": ["a", "b"]}, None, "images"),
        ({"pixels": IMAGES, "image": MASKS}, "pixels", "pixels"),
        ((LABELS, IMAGES), -1, 1),
    ],
)
@pytest.mark.parametrize("make", [normalized, cropped, mirrored])
def test_only_the_images_are_transformed(batch: Any, key: Any, where: Any, make: Any) -> None:
    """The container keeps its type, the images change, and every other part is the same object."""
    with same_draws():
        expected = make()(IMAGES)
    with same_draws():
        result = make(key=key)(batch)
    parts = list(batch) if isinstance(batch, dict) else range(len(batch))
    assert type(result) is type(batch)
    assert torch.equal(result[where], expected)
    assert not torch.equal(expected, IMAGES)
    assert all(result[part] is batch[part] for part in parts if part != where)


def test_a_shape_that_fits_both_layouts_has_to_be_named() -> None:
    """(2, 3, 4, 3) can be either, both readings by name; with a named layout a crop takes any channels."""
    images = some_images(2, 3, 4, 3)
    hwc, chw = (Normalize(MEAN, STD, layout=layout)(images) for layout in ("HWC", "CHW"))
    assert torch.allclose(hwc.double(), formula(images.permute(0, 3, 1, 2)), atol=1e-6)
    assert torch.allclose(chw.double(), formula(images), atol=1e-6)
    assert RandomResizedCrop(4, layout="HWC")(some_images(2, 5, 6, 7)).shape == (2, 4, 4, 7)
    assert RandomResizedCrop(4, layout="CHW")(some_images(2, 7, 6, 5)).shape == (2, 7, 4, 4)


BHWC = r"images of shape \(B, H, W, C\) or \(B, C, H, W\) at batch, but got .* as image\[None\]"
OTHER_CHANNELS = "with 1 or 3 or 4 channels and layout='auto' it fits neither; pass layout="
KEYS = r"the keys \['image', 'images'\]; pass the key"


@pytest.mark.parametrize(
    ("transform", "batch", "error", "message"),
    [
        (normalize, some_images(2, 3, 4, 3), ValueError, 'layout="HWC" or layout="CHW"'),
        (normalize, some_images(2, 5, 6, 4), ValueError, "fits neither; its constants and .* equally many"),
        (
            normalized(layout="HWC"),
            some_images(2, 3, 6, 4),
            ValueError,
            "3 channels and layout='HWC' it fits neither",
        ),
        *((each, some_images(5, 6, 3), ValueError, BHWC) for each in (normalize, crop, flip)),
        *(
            (each, some_images(2, 3, 6, 4), ValueError, r"at batch, .* it fits HWC and")
            for each in (crop, flip)
        ),
        *((each, some_images(2, 5, 6, 7), ValueError, OTHER_CHANNELS) for each in (crop, flip)),
        (normalize, {"label": LABELS}, ValueError, r"in a mapping, but got the keys \['label'\]"),
        (normalize, {"image": IMAGES, "images": IMAGES}, ValueError, KEYS),
        (normalized(key="pixels"), {"image": IMAGES}, ValueError, r"key='pixels', .* the keys \['image'\]"),
        (normalized(key=3), (IMAGES,), ValueError, "key=3, but the batch is a sequence of 1"),
        (normalized(key="image"), IMAGES, ValueError, "the batch is a tensor"),
        (normalize, ("a.jpg", IMAGES), TypeError, r"a uint8 tensor at batch\[0\], but got str"),
        (normalize, {"image": IMAGES.float()}, TypeError, r"uint8 images at batch\['image'\], .*float32"),
        (normalize, b"bytes", TypeError, r"a uint8 tensor at batch, but got bytes"),
        (crop, (IMAGES.int(),), TypeError, r"uint8 or floats at batch\[0\], but got torch.int32"),
        (crop, ("a.jpg",), TypeError, r"RandomResizedCrop expects images as a tensor at batch\[0\]"),
        (crop, some_images(2, 0, 6, 3), ValueError, r"with pixels, but got the shape \(2, 0, 6, 3\)"),
    ],
)
def test_other_batches_are_refused(transform: Any, batch: Any, error: type[Exception], message: str) -> None:
    """The error says where images were looked for, what was expected, and what was there."""
    with pytest.raises(error, match=message) as caught:
        transform(batch)
    if isinstance(batch, torch.Tensor) and batch is not IMAGES:
        assert str(tuple(batch.shape)) in str(caught.value)


PIXELS = {"mean": MEAN, "std": STD}


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (Normalize, {"mean": (0.5,), "std": STD}, ValueError, "per channel, but got 1 and 3 values"),
        (Normalize, {"mean": (0.5,), "std": (0.0,)}, ValueError, r"should be above zero, but got \(0.0,\)"),
        (Normalize, {"mean": (float("inf"),), "std": (1.0,)}, ValueError, "mean / std should be finite"),
        (Normalize, {"mean": torch.zeros(1, 3), "std": STD}, TypeError, "mean should be a sequence of numb"),
        (Normalize, {"mean": MEAN, "std": (0.2, None, 0.2)}, TypeError, "std should be a sequence of numb"),
        (Normalize, PIXELS | {"max_pixel_value": 0}, ValueError, "above zero, but got .* and 0$"),
        (Normalize, PIXELS | {"max_pixel_value": None}, TypeError, "max_pixel_value should .* got None"),
        (Normalize, PIXELS | {"dtype": torch.uint8}, TypeError, "dtype should be .* got torch.uint8"),
        (Normalize, PIXELS | {"memory_format": torch.preserve_format}, ValueError, "^memory_format should"),
        (Normalize, PIXELS | {"layout": "NHWC"}, ValueError, "layout should be one of .* got 'NHWC'"),
        (RandomResizedCrop, {"size": "224"}, TypeError, "size should be an int, or .* got '224'"),
        (RandomResizedCrop, {"size": 0}, ValueError, "size should be at least 1 pixel, but got 0"),
        (RandomResizedCrop, {"size": 4, "scale": (0.5, 1.5)}, ValueError, "scale should be .* at most 1"),
        (RandomResizedCrop, {"size": 4, "scale": (0.0, 1.0)}, ValueError, "scale should be .* above 0"),
        (RandomResizedCrop, {"size": 4, "ratio": (2, 1)}, ValueError, "ratio should be two numbers above 0"),
        (RandomHorizontalFlip, {"p": 1.5}, ValueError, "p should be a probability from 0 to 1, but got 1.5"),
        (RandomHorizontalFlip, {"p": None}, TypeError, "p should be a probability .* got None"),
    ],
)
def test_other_arguments_are_refused(make: Any, arguments: Any, error: type[Exception], message: str) -> None:
    """When the module is made; the error names the argument, what was expected, and what came."""
    with pytest.raises(error, match=message):
        make(**arguments)


def test_a_list_is_applied_in_its_order() -> None:
    """The values of the calls one after another, also of copies and pickles."""
    images = some_images(32, 20, 30, 3)
    generator = torch.Generator().manual_seed(1)
    base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))  # as a loader draws it
    with same_draws(base_seed):
        expected = normalize(flip(crop(images)))
    copies = [copy.deepcopy(crop), pickle.loads(pickle.dumps(flip)), normalize]
    generator.manual_seed(1)
    loader = DataLoader(images, 32, device="cpu", device_transform=copies, generator=generator)
    assert torch.equal(next(iter(loader)), expected)
