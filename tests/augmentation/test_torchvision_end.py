"""torchvision_end: torchvision's last steps, done at once, bit for bit."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import io
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

import fastload
from fastload.augmentation import ends, torchvision_end
from fastload.readers import patches
from tests.kit.torchvision import import_torchvision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

import_torchvision()
import torchvision.transforms as v1  # noqa: E402
from torchvision import tv_tensors  # noqa: E402
from torchvision.transforms import functional, v2  # noqa: E402

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
V1_CALL, V2_FORWARD = v1.Compose.__call__, v2.Compose.forward

pytestmark = pytest.mark.filterwarnings("ignore:The transform `ToTensor:UserWarning")


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The ends that were done at once, of images of any size; afterwards, torchvision is as it was."""
    ends: list[Any] = []
    real = torchvision_end._computed

    def computed(end: Any, source: Any, value: Any) -> Any:
        ends.append(end)
        return real(end, source, value)

    monkeypatch.setattr(torchvision_end, "_computed", computed)
    monkeypatch.setattr(torchvision_end, "_MIN_PIXELS", 0)
    monkeypatch.setattr(torchvision_end, "_tried", {})
    yield ends
    patches.release(ends_owner)
    assert v1.Compose.__call__ is V1_CALL
    assert v2.Compose.forward is V2_FORWARD


class _Owner:
    """Stands for a loader."""


ends_owner = _Owner()


def picture(height: int = 20, width: int = 30, mode: str = "RGB", seed: int = 0) -> Any:
    """A random image."""
    rng = np.random.default_rng(seed)
    size = (height, width) if mode == "L" else (height, width, len(mode))
    return Image.fromarray(rng.integers(0, 256, size, np.uint8))


def facts(value: Any) -> Any:
    """All that can be seen of a value."""
    if not isinstance(value, torch.Tensor):
        return type(value), value.tobytes() if isinstance(value, (Image.Image, np.ndarray)) else value
    seen = type(value), value.dtype, value.shape, value.stride(), value.storage_offset(), value.requires_grad
    plain = value.as_subclass(torch.Tensor)
    return *seen, plain.untyped_storage().nbytes(), plain.contiguous().numpy().tobytes()


def outcome(pipeline: Any, *inputs: Any) -> Any:
    """The facts of what a pipeline returns, or its error, and where the generator is afterwards."""
    torch.manual_seed(0)
    try:
        result = facts(pipeline(*inputs))
    except Exception as error:  # noqa: BLE001  # is compared
        result = type(error), str(error)
    return result, torch.rand(1)


def same(pipeline: Any, *inputs: Any) -> bool:
    """Whether a pipeline does the same in a fetch."""
    has_memory = isinstance(inputs[0], (np.ndarray, torch.Tensor))  # a copy of it has other strides
    expected = outcome(pipeline, *(inputs if has_memory else copy.deepcopy(inputs)))
    with ends.met():
        return bool(outcome(pipeline, *inputs) == expected)


def end_of_v1(**arguments: Any) -> list[Any]:
    """ToTensor and Normalize."""
    return [v1.ToTensor(), v1.Normalize(MEAN, STD, **arguments)]


def end_of_v2() -> list[Any]:
    """ToImage, ToDtype and Normalize."""
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]


# --- equal bits -------------------------------------------------------------------------------------------

NUMBERS = st.floats(-3, 3, width=32) | st.integers(0, 2) | st.sampled_from([0.485, 1e-3, -0.0, 2.0**-20])
STEPS = st.sampled_from(
    [
        *(v1.ToTensor, v1.PILToTensor, v2.ToImage, v2.PILToTensor, v2.ToTensor, v2.ToPureTensor),
        *(functools.partial(kind, torch.float32) for kind in (v1.ConvertImageDtype, v2.ConvertImageDtype)),
        functools.partial(v2.ToDtype, torch.float32, scale=True),
        functools.partial(v2.ToDtype, torch.float32),
        functools.partial(v2.ToDtype, torch.float16, scale=True),
        functools.partial(v2.ToDtype, {tv_tensors.Image: torch.float32, "others": None}, scale=True),
        functools.partial(v1.RandomErasing, p=1),
        functools.partial(v1.RandomHorizontalFlip, 0.5),
        *(v1.ToPILImage, v2.RandomVerticalFlip),
    ]
)


@st.composite
def pipelines(draw: st.DrawFn) -> list[Any]:
    """Steps in an order that is usual, or in any order."""
    usual: list[list[Any]] = [
        *([v1.ToTensor()], [v2.ToTensor()]),
        *([v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)],),
        *([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)],),
        *([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)],),
        *([v2.ToImage(), v2.ConvertImageDtype(torch.float32)],),
    ]
    steps = draw(st.sampled_from(usual) | st.lists(STEPS.map(lambda make: make()), max_size=4))
    count = st.sampled_from([3, 3, 3, 1, 2])
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2]))):
        numbers = st.lists(NUMBERS, min_size=(size := draw(count)), max_size=size)
        mean, std = draw(numbers), draw(numbers)
        kind = draw(st.sampled_from([v1.Normalize, v2.Normalize]))
        steps = [*steps, kind(mean, std, inplace=draw(st.booleans()))]
    if draw(st.booleans()):
        steps.insert(draw(st.integers(0, len(steps))), draw(STEPS)())
    return steps or [v1.ToTensor()]


@settings(max_examples=400, deadline=None)
@given(
    steps=pipelines(),
    compose=st.sampled_from([v1.Compose, v2.Compose]),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    mode=st.sampled_from(["RGB", "RGB", "L", "RGBA", "LA"]),
    kind=st.sampled_from(["image", "image", "array", "tensor", "Image"]),
    seed=st.integers(0, 99),
)
@pytest.mark.filterwarnings("ignore")
def test_any_pipeline_does_in_a_fetch_what_it_does_elsewhere(
    steps: Any, compose: Any, size: Any, mode: str, kind: str, seed: int
) -> None:
    """Bits, type, dtype, strides, errors and draws of random pipelines, for images of any kind and size."""
    image = picture(*size, mode, seed)
    if kind != "image":
        array = np.asarray(image).copy()
        tensor = torch.from_numpy(np.atleast_3d(array)).permute(2, 0, 1)
        image = {"array": array, "tensor": tensor, "Image": tv_tensors.Image(tensor)}[kind]
    assert same(compose(steps), image)


ENDS: dict[str, Callable[[], list[Any]]] = {
    "v1": end_of_v1,
    "v1, in place": lambda: end_of_v1(inplace=True),
    "v1, scaled": lambda: [v1.ToTensor()],
    "v1, converted": lambda: [
        *(v1.PILToTensor(), v1.ConvertImageDtype(torch.float32), v1.Normalize(tuple(MEAN), STD)),
    ],
    "v2": end_of_v2,
    "v2, scaled": lambda: end_of_v2()[:2],
    "v2, pure": lambda: [*end_of_v2(), v2.ToPureTensor()],
    "v2, converted": lambda: [v2.PILToTensor(), v2.ConvertImageDtype(torch.float32), v2.Normalize(MEAN, STD)],
    "v2, deprecated": lambda: [v2.ToTensor(), v2.Normalize([0.5], [0.5])],
}


@pytest.mark.parametrize("compose", [v1.Compose, v2.Compose])
@pytest.mark.parametrize("name", ENDS)
def test_an_end_is_done_at_once(name: str, compose: Any, fused: list[Any]) -> None:
    """The usual ends, in RGB, alone and between other steps: equal bit for bit, and no step of them runs."""
    end = ENDS[name]()
    others = [v1.RandomHorizontalFlip(1.0)], [v1.RandomErasing(p=1)] if "image" not in name else []
    for steps in (end, [*others[0], *end, *others[1]]):
        fused.clear()
        assert same(compose(steps), picture())
        assert [len(one.steps) for one in fused][-1:] == [len(end)]


@pytest.mark.parametrize("name", ["v1, scaled", "v2, scaled", "v2, deprecated"])
def test_grey_images_too(name: str, fused: list[Any]) -> None:
    """The mode L, whose strides are the same for all of them."""
    assert same(v1.Compose(ENDS[name]()), picture(mode="L"))
    assert fused


def test_large_images_are_equal(fused: list[Any]) -> None:
    """More pixels than a vector or a block of threads has."""
    for end in (end_of_v1(), end_of_v2()):
        assert same(v1.Compose(end), picture(375, 501))
    assert len(fused) == 4


def test_a_result_has_memory_of_its_own_that_can_be_resized() -> None:
    """Two results share nothing, and their storage is torch's."""
    for end in (end_of_v1(), end_of_v2()):
        pipeline, image = v1.Compose(end), picture()
        with ends.met():
            one, other = pipeline(image), pipeline(image)
        before = facts(other)
        one.fill_(0)
        one.resize_(3, 100, 100)
        assert facts(other) == before


def test_timms_step_is_known(fused: list[Any]) -> None:
    """MaybeToTensor, a subclass of ToTensor."""
    transforms = pytest.importorskip("timm.data.transforms")
    pipeline = v1.Compose([transforms.MaybeToTensor(), v1.Normalize(torch.tensor(MEAN), torch.tensor(STD))])
    assert same(pipeline, picture())
    assert same(pipeline, torch.rand(3, 20, 30))
    assert {one.steps for one in fused} == {("planes",)}


def end_of_tensors(version: str, *, normalize: bool = True) -> list[Any]:
    """Of pipelines that crop and flip tensors."""
    t: Any = {"v1": v1, "v2": v2}[version]
    scale = v2.ToDtype(torch.float32, scale=True) if t is v2 else v1.ConvertImageDtype(torch.float32)
    return [scale, *([t.Normalize(MEAN, STD)] if normalize else [])]


class OwnTensorClass(torch.Tensor):
    """A class of the user."""


# What is made of an array, or of its tensor whose channels come last: plain images, and others.
PLAIN_ARRAYS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda array: array,
    "part": lambda array: array[3:40, 5:50],
    "every other row": lambda array: array[::2],
    "planes": lambda array: np.ascontiguousarray(array.transpose(2, 0, 1)).transpose(1, 2, 0),
    "Fortran's": np.asfortranarray,
    "three of four": lambda array: np.concatenate([array, array[..., :1]], axis=2)[..., :3],
    "repeated": lambda array: np.lib.stride_tricks.as_strided(array, strides=(0, 3, 1)),
}
OTHER_ARRAYS: dict[str, Callable[[Any], Any]] = {
    "flipped": lambda array: array[:, ::-1],
    "BGR": lambda array: array[..., ::-1],
    "grey": lambda array: array[..., 0].copy(),
    "two channels": lambda array: array[..., :2].copy(),
    "floats": lambda array: array / np.float32(255),
    "a subclass": lambda array: array.view(np.recarray),
    "read-only": lambda array: np.frombuffer(array.tobytes(), np.uint8).reshape(array.shape),
    "empty": lambda array: array[:0],
    "a row": lambda array: array[:1].copy(),
}
PLAIN_TENSORS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda tensor: tensor,
    "part": lambda tensor: tensor[:, 3:40, 5:50],
    "rows": lambda tensor: tensor[:, 3:40],
    "every other row": lambda tensor: tensor[:, ::2],
    "Image": tv_tensors.Image,
    "part of an Image": lambda tensor: v2.functional.crop(tv_tensors.Image(tensor), 3, 5, 40, 50),
}
OTHER_TENSORS: dict[str, Callable[[Any], Any]] = {
    "planes": lambda tensor: tensor.contiguous(),
    "Image in planes": lambda tensor: tv_tensors.Image(tensor.contiguous()),
    "Video": lambda tensor: tv_tensors.Video(tensor[None]),
    "a subclass": lambda tensor: tensor.as_subclass(OwnTensorClass),
    "every other pixel": lambda tensor: tensor[..., ::2],
    "three of four": lambda tensor: (
        torch.cat([tensor, tensor[:1]]).permute(1, 2, 0).contiguous()[..., :3].permute(2, 0, 1)
    ),
    "two channels": lambda tensor: tensor[:2],
    "transposed": lambda tensor: tensor.transpose(1, 2),
    "expanded": lambda tensor: tensor[:, :1].expand(3, 60, 80),
    "floats": lambda tensor: tensor.float(),
    "batch": lambda tensor: tensor[None],
    "a row": lambda tensor: tensor[:, :1],
    "sparse": lambda tensor: tensor.to_sparse(),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor, tensor]),
    "empty": lambda tensor: tensor[:, :0],
}
ENDS_OF_ARRAYS: dict[str, list[str]] = {
    "plain": ["v1", "v1, scaled", "v2", "v2, scaled", "v2, pure", "v2, deprecated"],
    "other": ["v1", "v2", "v1, converted", "v2, converted"],
}


@pytest.mark.parametrize(
    ("name", "end"),
    [
        *((name, end) for name in PLAIN_ARRAYS for end in ENDS_OF_ARRAYS["plain"]),
        *((name, end) for name in OTHER_ARRAYS for end in ENDS_OF_ARRAYS["other"]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_arrays_of_three_channels_too(name: str, end: str, fused: list[Any]) -> None:
    """What cv2.imread returns, and views of it; others, also those of which torch warns, as ever."""
    array = {**PLAIN_ARRAYS, **OTHER_ARRAYS}[name](np.asarray(picture(60, 80)).copy())
    before = array.copy()
    assert same(v1.Compose(ENDS[end]()), array)
    assert bool(fused) == (name in PLAIN_ARRAYS)
    assert (array == before).all()


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(
    ("name", "make", "is_plain"),
    [
        *((name, make, True) for name, make in PLAIN_TENSORS.items()),
        *((name, make, False) for name, make in OTHER_TENSORS.items()),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_whose_channels_come_last_too(
    name: str, make: Callable[[Any], Any], is_plain: bool, version: str, fused: list[Any]
) -> None:
    """What ToImage and PILToTensor make of Pillow's images; v1 knows no tv_tensors; planes gain nothing."""
    tensor = make(torch.from_numpy(np.asarray(picture(60, 80)).copy()).permute(2, 0, 1))
    if tensor.is_sparse or tensor.is_nested:
        pipeline: Any = v1.Compose([end_of_tensors(version)[0], lambda result: 0])
        assert same(pipeline, tensor)
    else:
        before = tensor.clone()
        assert same(v1.Compose(end_of_tensors(version)), tensor)
        assert torch.equal(tensor, before)
    assert bool(fused) == (is_plain and (version == "v2" or "Image" not in name))


def test_to_scale_a_tensor_takes_the_ordinary_way(fused: list[Any]) -> None:
    """Without Normalize, the step itself takes no longer."""
    tensor = torch.from_numpy(np.asarray(picture(60, 80)).copy()).permute(2, 0, 1)
    for version in ("v1", "v2"):
        assert same(v1.Compose(end_of_tensors(version, normalize=False)), tensor)
    assert not fused


def test_crops_of_tensors_end_at_once(fused: list[Any]) -> None:
    """A whole pipeline of v2 that begins with ToImage."""
    steps = [v2.ToImage(), v2.Resize(50), v2.RandomCrop(40), v2.RandomHorizontalFlip(), *end_of_v2()[1:]]
    for seed in range(8):
        assert same(v2.Compose(steps), picture(60, 80, seed=seed))
    assert len(fused) >= 8


# --- values are those of the call -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_a_changed_argument_takes_effect_at_once(name: str, fused: list[Any]) -> None:
    """mean, std and the list of steps, changed between two calls, in place or not."""
    steps = ENDS[name]()
    pipeline, image = v1.Compose(steps), picture()
    changes: list[Callable[[], Any]] = [
        lambda: setattr(steps[-1], "mean", [0.1, 0.2, 0.3]),
        lambda: steps[-1].mean.__setitem__(0, 0.7),
        lambda: setattr(steps[-1], "std", (2, 3, 4)),
        lambda: setattr(steps[-1], "std", [0.0, 1.0, 1.0]),
        lambda: setattr(steps[-1], "std", STD),
        lambda: setattr(steps[-1], "mean", torch.tensor(MEAN)),
        lambda: setattr(steps[-1], "inplace", True),
        lambda: steps.pop(),
    ]
    seen = set()
    for change in changes:
        change()
        with ends.met():
            in_fetch = outcome(pipeline, image)
        assert in_fetch == outcome(pipeline, image)
        seen.add(in_fetch[0])
    assert len(seen) > 5
    assert fused


def test_the_default_dtype_decides(fused: list[Any]) -> None:
    """ToTensor makes tensors of torch's default dtype, whenever that changes."""
    pipeline = v1.Compose(end_of_v1())
    for dtype in (torch.float32, torch.float64, torch.float16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            assert same(pipeline, picture())
        finally:
            torch.set_default_dtype(torch.float32)
    assert len(fused) == 3  # one to try it


def test_a_step_can_change_the_list_of_steps(fused: list[Any]) -> None:
    """As in a loop over a list: steps that were inserted and removed meanwhile."""

    def pipeline(image: Any) -> Any:
        steps: list[Any] = []

        def change(image: Any) -> Any:
            steps.pop()
            steps.append(v1.Normalize([0.1] * 3, STD))
            steps.append(v1.RandomHorizontalFlip(1.0))
            return image

        steps += [change, v1.ToTensor(), v1.Normalize(MEAN, STD)]
        return v1.Compose(steps)(image)

    assert same(pipeline, picture())
    assert fused


def test_nothing_is_written_to_objects_of_the_user(fused: list[Any]) -> None:
    """Steps, pipelines and images have the same attributes before and after."""
    pipeline, image = v2.Compose(end_of_v2()), picture()
    objects = [pipeline, image, *pipeline.transforms]
    before = [dict(vars(one)) for one in objects]
    with ends.met():
        pipeline(image)
    assert [vars(one) for one in objects] == before
    assert fused


# --- the ordinary way -------------------------------------------------------------------------------------


class OwnTensor(v1.ToTensor):
    """A step that does something else."""

    def __call__(self, pic: Any) -> Any:
        return super().__call__(pic) * 2


class OwnNormalize(v2.Normalize):
    """A subclass."""


class OwnList(list):  # type: ignore[type-arg]
    """A list whose items are what it likes."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)


class OwnImage(Image.Image):
    """An image of a class of the user."""


class Doubled(TorchFunctionMode):
    """Changes a function of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.div else result


def _with(step: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(step, name, value)
    return step


def _hooked(step: Any) -> Any:
    step.register_forward_hook(lambda module, inputs, output: output + 1)
    return step


def _prehooked(step: Any) -> Any:
    step.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    return step


def _of_own_class(image: Any) -> Any:
    image.__class__ = OwnImage
    return image


UNUSUAL: dict[str, Callable[[], Any]] = {
    "a subclass of ToTensor": lambda: [OwnTensor(), v1.Normalize(MEAN, STD)],
    "an attribute": lambda: [_with(v1.ToTensor(), note=1)],
    "an own forward": lambda: [v2.ToImage(), _with(end_of_v2()[1], forward=lambda image: 3)],
    "an own transform": lambda: [_with(v2.ToImage(), transform=lambda image, params: 3)],
    "no float32": lambda: [v2.ToImage(), v2.ToDtype(torch.float64, scale=True)],
    "no scale": lambda: [v2.ToImage(), v2.ToDtype(torch.float32)],
    "no floats": lambda: [v2.ToImage()],
    "bytes alone": lambda: [v1.PILToTensor()],
    "bytes to Normalize": lambda: [v1.PILToTensor(), v1.Normalize(MEAN, STD)],
    "an Image to v1's step": lambda: [v2.ToImage(), v1.ConvertImageDtype(torch.float32)],
    "a compiled step": lambda: [_with(v2.ToImage(), _compiled_call_impl=lambda image: 3)],
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_steps_run_themselves(name: str, fused: list[Any]) -> None:
    """Steps that are not as torchvision made them, or do something else."""
    assert same(v1.Compose(UNUSUAL[name]()), picture())
    assert not fused


NORMALIZE: dict[str, Callable[[], Any]] = {
    "a subclass": lambda: OwnNormalize(MEAN, STD),
    "a forward hook": lambda: _hooked(v1.Normalize(MEAN, STD)),
    "a hook before it": lambda: _prehooked(v2.Normalize(MEAN, STD)),
    "a tensor": lambda: v1.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
    "a tensor that requires a gradient": lambda: v1.Normalize(torch.tensor(MEAN, requires_grad=True), STD),
    "an own list": lambda: v1.Normalize(OwnList(MEAN), STD),
    "not a number": lambda: v1.Normalize([float("nan")] * 3, STD),
    "zero": lambda: v1.Normalize(MEAN, [1, 0, 1]),
    "nearly zero": lambda: v1.Normalize(MEAN, [1, 1e-50, 1]),
    "denormal": lambda: v1.Normalize(MEAN, [1e-39] * 3),
    "too many": lambda: v1.Normalize([0.5] * 4, [0.5] * 4),
    "none": lambda: v1.Normalize([], []),
    "a huge number": lambda: v1.Normalize([10**400, 0, 0], STD),
}


@pytest.mark.parametrize("name", NORMALIZE)
def test_an_unusual_normalize_runs_itself(name: str, fused: list[Any]) -> None:
    """What comes before it is done at once; it does, or raises, what it does elsewhere."""
    pipeline, image = v1.Compose([v1.ToTensor(), NORMALIZE[name]()]), picture()
    assert same(pipeline, image)
    assert all(one.mean == () for one in fused)


def test_numbers_of_numpy_are_numbers(fused: list[Any]) -> None:
    """float64 is a float of Python; float32 is not, and its Normalize runs itself."""
    for kind, num_steps in ((np.float64, 2), (np.float32, 1)):
        fused.clear()
        assert same(v1.Compose([v1.ToTensor(), v1.Normalize([kind(0.3)] * 3, STD)]), picture())
        assert len(fused[-1].steps) == num_steps


IMAGES: dict[str, Callable[[], Any]] = {
    "RGBA": lambda: picture(mode="RGBA"),
    "palette": lambda: picture().quantize(8),
    "YCbCr": lambda: picture().convert("YCbCr"),
    "tensor": lambda: torch.zeros(3, 20, 30, dtype=torch.uint8),
    "one row": lambda: picture(1, 30),
    "one column": lambda: picture(30, 1),
    "empty": lambda: Image.new("RGB", (0, 5)),
    "a subclass": lambda: _of_own_class(picture()),
    "text": lambda: "an image",
}


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("end", ["v1", "v2"])
@pytest.mark.filterwarnings("ignore")
def test_other_inputs_take_the_ordinary_way(name: str, end: str, fused: list[Any]) -> None:
    """What is no plain Pillow image in RGB or L, and what has one row or column."""
    assert same(v1.Compose(ENDS[end]()), IMAGES[name]())
    assert not fused or (end, name) in {("v2", "YCbCr"), ("v2", "a subclass")}  # what ToImage made of them


def test_an_opened_file_takes_the_ordinary_way(fused: list[Any]) -> None:
    """Images that are not loaded, whole or cut, give or raise what they do elsewhere."""
    file = io.BytesIO()
    picture(90, 90).save(file, "PNG")
    content = file.getvalue()
    pipeline = v1.Compose([io.BytesIO, Image.open, *end_of_v1()])
    assert same(pipeline, content)
    assert same(pipeline, content[: len(content) // 2])
    assert not fused


def target() -> dict[str, Any]:
    """Of a detector."""
    return {
        "boxes": tv_tensors.BoundingBoxes(torch.ones(2, 4), format="XYXY", canvas_size=(20, 30)),
        "masks": tv_tensors.Mask(torch.ones(2, 20, 30, dtype=torch.uint8)),
        "labels": torch.tensor([1, 2]),
        "name": "one",
    }


class OwnBoxes(tv_tensors.BoundingBoxes):
    """A class of the user."""


Pair = collections.namedtuple("Pair", "image label")

JOINT: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "label": lambda image: (image, 3),
    "label first": lambda image: (3, image),
    "target": lambda image: (image, target()),
    "dict": lambda image: ({"image": image, **target()},),
    "list": lambda image: ([image, None, 2.5, True],),
    "tuple": lambda image: ((image, b"one"),),
    "nested": lambda image: ([{"a": (image, [torch.rand(3, 20, 30)])}, ()],),
    "two images": lambda image: (image, image),
    "array": lambda image: (image, np.zeros((20, 30, 3), np.uint8)),
    "video": lambda image: (image, tv_tensors.Video(torch.zeros(2, 3, 4, 4, dtype=torch.uint8))),
    "own boxes": lambda image: (image, OwnBoxes(torch.ones(1, 4), format="XYXY", canvas_size=(9, 9))),
    "an object": lambda image: (image, Image.Image),
    "none": lambda image: (1, 2),
    "named": lambda image: (Pair(image, 3),),
    "a subclass": lambda image: (_of_own_class(image), OwnList([2])),
}


def nest_facts(value: Any) -> Any:
    """The facts of all leaves, and the containers."""
    leaves, structure = tree_flatten(value)
    attributes = [vars(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [facts(leaf) for leaf in leaves], structure, type(value), attributes


@pytest.mark.parametrize("end", ["v2", "v2, scaled", "v2, pure"])
@pytest.mark.parametrize("name", JOINT)
@pytest.mark.filterwarnings("ignore")
def test_an_image_with_its_target(name: str, end: str, fused: list[Any]) -> None:
    """v2's joint inputs take the ordinary way; so does an image in a container."""
    steps = [v2.RandomHorizontalFlip(0.5), *ENDS[end]()]
    for compose in (v2.Compose, v1.Compose):
        inputs = JOINT[name](picture())
        if compose is v1.Compose and len(inputs) > 1:
            continue
        torch.manual_seed(0)
        expected = nest_facts(compose(steps)(*inputs))
        torch.manual_seed(0)
        with ends.met():
            result = nest_facts(compose(steps)(*inputs))
        assert result == expected
    assert not fused


def test_a_step_that_converts_masks_too_runs_itself(fused: list[Any]) -> None:
    """v2's ConvertImageDtype changes all tensors of a target, and ToDtype only images."""
    pipeline = v2.Compose([v2.ToImage(), v2.ConvertImageDtype(torch.float32), v2.Normalize(MEAN, STD)])
    for image in (picture(), v2.ToImage()(picture())):
        expected = nest_facts(pipeline(image, target()))
        with ends.met():
            assert nest_facts(pipeline(image, target())) == expected
    assert not fused


def test_what_a_joint_step_returns_is_unpacked(fused: list[Any]) -> None:
    """A list in place of a tuple, and one that cannot be unpacked."""
    for step in (lambda image, label: [image, label], lambda image, label: 3, lambda image, label: (image,)):
        pipeline = v2.Compose([step, *end_of_v2()])
        outcomes = []
        for reading in (contextlib.nullcontext, ends.met):
            with reading():
                try:
                    outcomes.append(nest_facts(pipeline(picture(), 3)))
                except (TypeError, ValueError) as error:
                    outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


PLACES: dict[str, tuple[Any, str]] = {
    "ToTensor": (v1.ToTensor, "__call__"),
    "to_tensor": (functional, "to_tensor"),
    "Normalize, v1": (v1.Normalize, "forward"),
    "normalize, v1": (functional, "normalize"),
    "ToImage": (v2.ToImage, "transform"),
    "ToDtype": (v2.ToDtype, "transform"),
    "Normalize": (v2.Normalize, "transform"),
    "to_image": (v2.functional, "to_image"),
    "Transform": (v2.Transform, "forward"),
    "every module": (nn.Module, "__call__"),
}


@pytest.mark.parametrize("is_met_before", [True, False])
@pytest.mark.parametrize("name", PLACES)
def test_what_other_code_replaced_is_called(
    name: str, is_met_before: bool, monkeypatch: pytest.MonkeyPatch, fused: list[Any]
) -> None:
    """A method or function that a program has put in place of torchvision's, before or after it was met."""
    monkeypatch.setattr(torchvision_end, "_classes", {})
    pipelines = [v1.Compose(end_of_v1()), v1.Compose(end_of_v2())]
    if is_met_before:
        assert all(same(pipeline, picture()) for pipeline in pipelines)
    owner, attribute = PLACES[name]
    original = getattr(owner, attribute)
    calls = []

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, replaced)
        for pipeline in pipelines:
            pipeline(picture())
        num_calls = len(calls)
        assert num_calls
        assert all(same(pipeline, picture()) for pipeline in pipelines)
        assert len(calls) == 3 * num_calls
    fused.clear()
    assert all(same(pipeline, picture()) for pipeline in pipelines)
    assert len(fused) >= 2  # restored, they are done at once again


def test_hooks_of_all_modules_and_modes_are_seen(fused: list[Any]) -> None:
    """A global hook, and a mode that changes torch's functions."""
    pipeline = v1.Compose(end_of_v1())
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output + 1)
    try:
        assert same(pipeline, picture())
    finally:
        handle.remove()
    with Doubled():
        assert same(pipeline, picture())
    assert not fused


def test_a_release_with_another_arithmetic_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, fused: list[Any]
) -> None:
    """If the steps make something else of any level, they run themselves."""
    real = torchvision_end._computed

    def wrong(end: Any, image: Any, bands: Any) -> Any:
        result = real(end, image, bands)
        result.view(-1)[result.numel() // 2] += 1e-6
        return result

    monkeypatch.setattr(torchvision_end, "_computed", wrong)
    assert same(v1.Compose(end_of_v1()), picture())
    assert len(fused) == 1  # it was tried


@pytest.mark.parametrize("cls", [v1.Compose, v2.Compose])
def test_a_subclass_of_compose_that_others_wrote_is_called(cls: Any, fused: list[Any]) -> None:
    """Its own method decides, and what it inherits is met."""

    class Twice(cls):  # type: ignore[misc]
        def __call__(self, image: Any) -> Any:
            return super().__call__(image) * 2

    assert same(Twice(end_of_v1()), picture())
    assert len(fused) == 2


# --- where it is on ---------------------------------------------------------------------------------------


class Pictures(torch.utils.data.Dataset[Any]):
    """Random images, transformed, with the number of ends that were done at once in this process."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        before = len(torchvision_end._tried)
        image = self.transform(picture(70, 80, seed=index))
        return image, len(torchvision_end._tried) + before > 0


@pytest.mark.parametrize("cache", [None, "ram"])
@pytest.mark.parametrize(
    "workers",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 1, "worker_type": "thread"},
        {"memory_format": torch.channels_last},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["v1", "v2"])
def test_loaders_give_torchs_batches(name: str, workers: dict[str, Any], cache: Any) -> None:
    """With and without a cache, in processes, threads and here; torchvision is as it was after close()."""
    dataset = Pictures(v2.Compose(ENDS[name]()))
    num_workers = workers.get("num_workers", 0)
    expected = [images for images, _ in torch.utils.data.DataLoader(dataset, 3, num_workers=num_workers)]
    with fastload.DataLoader(dataset, 3, cache=cache, **workers) as loader:
        batches = list(loader)
    assert all(is_fused.all() for _, is_fused in batches)
    for (images, _), other in zip(batches, expected, strict=True):
        assert torch.equal(images, other)
        assert type(images) is type(other)
        assert images.stride() == other.stride() or "memory_format" in workers


def test_other_threads_and_calls_outside_of_fetches_run_the_steps(fused: list[Any]) -> None:
    """It is on in the thread that fetches alone, and while it fetches."""
    pipeline = v1.Compose(end_of_v1())
    with ends.met():
        thread = threading.Thread(target=pipeline, args=(picture(),))
        thread.start()
        thread.join()
        assert not fused
        pipeline(picture())
        assert fused
    fused.clear()
    pipeline(picture())
    assert not fused


def test_a_variable_turns_it_off() -> None:
    """FASTLOAD_FUSE=off leaves torchvision alone, and torchvision is not imported by it."""
    program = """
import sys
import fastload
from fastload.augmentation import ends
assert ends.met() is None
assert "torchvision" not in sys.modules
from tests.kit.torchvision import without_operators
without_operators()
import torchvision.transforms as v1
real = vars(v1.Compose)["__call__"]
with ends.met():
    print(vars(v1.Compose)["__call__"] is real)
"""
    environment = {**os.environ, "FASTLOAD_FUSE": "off"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "True", done.stderr


def test_a_class_that_is_replaced_pickles_as_ever() -> None:
    """Pipelines and their methods, pickled in a fetch or outside."""
    pipeline = v1.Compose(end_of_v1())
    with ends.met():
        text = copy.copy(pipeline), copy.deepcopy(pipeline)
    assert all(same(one, picture()) for one in text)
    assert v1.Compose.__call__.__qualname__ == "Compose.__call__"
