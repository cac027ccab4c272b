"""Normalize: the values of a float64 reference, in the dtype and layout asked for, in the images' place."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastload.transforms.normalize import Normalize

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
EPSILON = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
}


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


def some_images(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def reference(chw: torch.Tensor, mean: Any = MEAN, std: Any = STD, max_value: float = 255.0) -> torch.Tensor:
    """The formula as it is written, in float64."""
    per_channel = [torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1) for values in (mean, std)]
    return (chw.double() / max_value - per_channel[0]) / per_channel[1]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    num_channels = draw(st.sampled_from([1, 3, 4]))
    unit = st.floats(0, 1)
    return {
        "mean": draw(st.lists(unit, min_size=num_channels, max_size=num_channels)),
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
def test_values_are_those_of_the_formula(
    arguments: dict[str, Any], sizes: tuple[int, int, int], is_contiguous: bool, seed: int
) -> None:
    """Any channels, strides, dtype and format: the float64 value, rounded to the dtype.

    Without a format, planes stay planes, and pixels stay together.
    """
    batch, height, width = sizes
    num_channels = len(arguments["mean"])
    chw = some_images(batch, num_channels, height, width, seed=seed)
    images = chw.permute(0, 2, 3, 1) if arguments["layout"] == "HWC" else chw
    images = images.contiguous() if is_contiguous else images

    result = Normalize(**arguments)(images)
    expected = reference(chw, arguments["mean"], arguments["std"], arguments["max_pixel_value"])
    biggest = max(1.0, max(m / s for m, s in zip(arguments["mean"], arguments["std"], strict=True)))
    epsilon = EPSILON[arguments["dtype"]]

    assert result.dtype == arguments["dtype"]
    assert result.shape == chw.shape
    are_pixels = arguments["layout"] == "HWC" and is_contiguous
    kept = torch.channels_last if are_pixels else torch.contiguous_format
    if batch or arguments["memory_format"] is not None:  # an empty tensor has no order
        assert result.is_contiguous(memory_format=arguments["memory_format"] or kept)
    assert torch.allclose(result.double(), expected, rtol=epsilon, atol=epsilon * biggest)


# --- which dimension is C ---------------------------------------------------------------------------------


def test_a_shape_that_fits_both_layouts_has_to_be_named() -> None:
    """(2, 3, 4, 3) can be either: an error by default, and both readings by name."""
    images = some_images(2, 3, 4, 3)

    with pytest.raises(ValueError, match='layout="HWC" or layout="CHW"'):
        Normalize(MEAN, STD)(images)
    hwc = Normalize(MEAN, STD, layout="HWC")(images)
    chw = Normalize(MEAN, STD, layout="CHW")(images)

    assert torch.allclose(hwc.double(), reference(images.permute(0, 3, 1, 2)), atol=1e-6)
    assert torch.allclose(chw.double(), reference(images), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "layout", "message"),
    [
        ((2, 5, 6, 4), "auto", "with 3 channels and layout='auto' it fits neither"),
        ((2, 3, 6, 4), "HWC", "with 3 channels and layout='HWC' it fits neither"),
        ((2, 5, 6, 3), "CHW", "with 3 channels and layout='CHW' it fits neither"),
        ((5, 6, 3), "auto", r"images of shape \(B, H, W, C\) or \(B, C, H, W\) at \$, but got"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...], layout: str, message: str) -> None:
    """The error names the shape, and what was expected."""
    with pytest.raises(ValueError, match=message) as caught:
        Normalize(MEAN, STD, layout=layout)(some_images(*shape))

    assert str(shape) in str(caught.value)


# --- where the images are ---------------------------------------------------------------------------------

IMAGES = some_images(2, 4, 5, 3)
LABELS = torch.tensor([1, 2])
MASKS = some_images(2, 4, 5, 3, seed=1)


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
def test_only_the_images_are_normalised(batch: Any, key: Any, where: Any) -> None:
    """The container keeps its type, the images change, and every other part is the same object."""
    result = Normalize(MEAN, STD, key=key)(batch)
    parts = list(batch) if isinstance(batch, dict) else range(len(batch))

    assert type(result) is type(batch)
    assert torch.equal(result[where], Normalize(MEAN, STD)(IMAGES))
    assert all(result[part] is batch[part] for part in parts if part != where)


@pytest.mark.parametrize(
    ("batch", "key", "error", "message"),
    [
        ({"label": LABELS}, None, ValueError, r"in a mapping, but got the keys \['label'\]"),
        (
            {"image": IMAGES, "images": IMAGES},
            None,
            ValueError,
            r"the keys \['image', 'images'\]; pass the key",
        ),
        ({"image": IMAGES}, "pixels", ValueError, r"key='pixels', but the batch has the keys \['image'\]"),
        ((IMAGES,), 3, ValueError, "key=3, but the batch is a sequence of 1"),
        ((), None, ValueError, "key=0, but the batch is a sequence of 0"),
        ((IMAGES,), "image", ValueError, "key='image', but the batch is a sequence of 1"),
        (("a.jpg", IMAGES), None, TypeError, r"a uint8 tensor at \$\[0\], but got str"),
        ({"image": IMAGES.float()}, None, TypeError, r"uint8 images at \$\['image'\], but got torch.float32"),
        (IMAGES, "image", ValueError, "the batch is a tensor"),
        (b"bytes", None, TypeError, r"a uint8 tensor at \$, but got bytes"),
    ],
)
def test_a_batch_without_images_in_their_place_is_refused(
    batch: Any, key: Any, error: type[Exception], message: str
) -> None:
    """The error says where images were looked for, and what was there."""
    with pytest.raises(error, match=message):
        Normalize(MEAN, STD, key=key)(batch)


# --- as a module ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "move", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), copy.deepcopy]
)
def test_a_models_dtype_does_not_touch_the_constants(move: Any) -> None:
    """In a model that is cast, and in autocast, values stay exact; a model's state has none of them."""
    expected = Normalize(MEAN, STD)(IMAGES)
    model = torch.nn.Sequential(Normalize(MEAN, STD))

    assert model.state_dict() == {}
    assert list(model.parameters()) == []
    assert torch.equal(pickle.loads(pickle.dumps(move(model)))(IMAGES), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(IMAGES), expected)


def test_constants_move_with_the_module_and_follow_the_batch() -> None:
    """to(device) moves them; a batch on another device takes them along."""
    module = Normalize(MEAN, STD).to("meta")
    buffers = {str(buffer.device) for buffer in module.buffers()}
    on_meta = module(IMAGES.to("meta"))
    back_on_cpu = module(IMAGES)

    assert buffers == {"meta"}
    assert on_meta.device.type == "meta"
    assert on_meta.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(back_on_cpu, Normalize(MEAN, STD)(IMAGES))


@pytest.mark.parametrize("dtype", list(EPSILON))
def test_the_accelerators_path_gives_the_same_values(dtype: torch.dtype) -> None:
    """The one-kernel form used off the CPU, run on the CPU, agrees bit for bit with the CPU's form."""
    module = Normalize(MEAN, STD, dtype)
    chw = IMAGES.permute(0, 3, 1, 2)
    out = torch.empty(chw.shape, dtype=dtype, memory_format=torch.channels_last)
    torch.addcmul(module._bias, chw, module._scale, out=out)

    assert torch.equal(out, module(IMAGES))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mean": (0.5,), "std": STD}, ValueError, "one value per channel, but got 1 and 3 values"),
        ({"mean": (0.5,), "std": (0.0,)}, ValueError, r"should be above zero, but got \(0.0,\)"),
        ({"mean": (0.5,), "std": (float("nan"),)}, ValueError, r"should be above zero, but got \(nan,\)"),
        ({"mean": (float("inf"),), "std": (1.0,)}, ValueError, "mean / std should be finite"),
        (
            {"mean": MEAN, "std": STD, "max_pixel_value": 0},
            ValueError,
            "should be above zero, but got .* and 0$",
        ),
        (
            {"mean": MEAN, "std": STD, "max_pixel_value": None},
            TypeError,
            "max_pixel_value should be .* got None",
        ),
        ({"mean": MEAN, "std": STD, "dtype": torch.uint8}, TypeError, "dtype should be .* got torch.uint8"),
        ({"mean": (0.5,), "std": "1"}, TypeError, "std should be a sequence of numbers.* got str"),
        ({"mean": torch.zeros(1, 3), "std": STD}, TypeError, "mean should be a sequence of numbers"),
        ({"mean": MEAN, "std": (0.2, None, 0.2)}, TypeError, "std should be a sequence of numbers"),
        (
            {"mean": MEAN, "std": STD, "memory_format": torch.preserve_format},
            ValueError,
            "^memory_format should be",
        ),
        ({"mean": MEAN, "std": STD, "layout": "NHWC"}, ValueError, "layout should be one of .* got 'NHWC'"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """What cannot work is refused when the module is made."""
    with pytest.raises(error, match=message):
        Normalize(**arguments)


def test_constants_of_pixels_need_their_unit() -> None:
    """A mean of 123.7 is refused with the unit and the way out, and taken with max_pixel_value=1."""
    mean, std = ([value * 255 for value in values] for values in (MEAN, STD))
    with pytest.raises(ValueError, match=r"units of max_pixel_value=255.*mean above 1.*max_pixel_value=1 "):
        Normalize(mean, std)
    result = Normalize(mean, std, max_pixel_value=1)(IMAGES)

    torch.testing.assert_close(result, Normalize(MEAN, STD)(IMAGES))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu_the_values_are_the_same(dtype: torch.dtype) -> None:
    """The device's one kernel gives the CPU's values, but for the last bit."""
    result = Normalize(MEAN, STD, dtype)(IMAGES.cuda())

    assert result.is_cuda
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result.cpu(), Normalize(MEAN, STD, dtype)(IMAGES))
