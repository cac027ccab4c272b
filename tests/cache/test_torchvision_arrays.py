"""A torchvision v2 transform that would leave an image in a NumPy array as it is raises an error."""

from __future__ import annotations

import pickle
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import fastload
from fastload.cache.dataset import CachedDataset
from tests.cache.zoo import Made
from tests.rng.draws_zoo import Chain

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("registry_folder")

IMAGE = np.arange(24 * 24 * 3, dtype=np.uint8).reshape(24, 24, 3)


class StandIn:
    """As torchvision's class: transforms what it takes in a nest, and passes all else through."""

    _transformed_types: tuple[Any, ...] = (torch.Tensor,)

    def _needs_transform_list(self, flat_inputs: list[Any]) -> list[bool]:
        return [isinstance(value, self._transformed_types) for value in flat_inputs]

    def __call__(self, *inputs: Any) -> Any:
        sample = inputs if len(inputs) > 1 else inputs[0]
        parts = list(sample) if isinstance(sample, tuple) else [sample]
        chosen = self._needs_transform_list(parts)
        moved = [self.transform(part) if is_chosen else part for part, is_chosen in zip(parts, chosen)]  # noqa: B905
        return tuple(moved) if isinstance(sample, tuple) else moved[0]

    def transform(self, part: Any) -> Any:
        return part.flip(-1)


class Flip(StandIn):
    """Takes tensors."""


class ToImage(StandIn):
    """Takes arrays as well."""

    _transformed_types = (torch.Tensor, np.ndarray)

    def transform(self, part: Any) -> Any:
        return torch.as_tensor(part).permute(2, 0, 1).as_subclass(Tensor)


class Tensor(torch.Tensor):
    """As torchvision's tv_tensors.Image."""


class Clamp(StandIn):
    """Takes neither images nor plain tensors, but boxes."""

    _transformed_types = (type("Boxes", (torch.Tensor,), {}),)


@pytest.fixture(autouse=True)
def _torchvision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of the same shape as torchvision's."""
    original = StandIn._needs_transform_list
    module = types.ModuleType("torchvision.transforms.v2")
    module.Transform = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield
    StandIn._needs_transform_list = original  # type: ignore[method-assign]


def around(transform: Any) -> Any:
    """A function of the user's that takes the sample apart."""
    return lambda sample: (transform(sample[0]), sample[1])


class Holding:
    """A class of the user's that calls a pipeline of torchvision's."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, sample: Any) -> Any:
        return {"image": self.transform(sample[0]), "label": sample[1]}


@pytest.mark.parametrize("label", [3, np.zeros(4), torch.zeros(4), torch.ones(24, 24)])
@pytest.mark.parametrize("role", ["transform", "pre_transform"])
@pytest.mark.parametrize(
    "transform",
    [Flip(), Chain(Clamp(), Flip(), ToImage()), around(Flip()), Holding(Chain(Flip(), ToImage()))],
)
def test_a_transform_that_passes_the_image_is_an_error(transform: Any, role: str, label: Any) -> None:
    """Also inside a function or a class of the user's, and where it would flip a label instead."""
    options: dict[str, Any] = {role: transform}
    with pytest.raises(TypeError, match=r"Flip of torchvision takes no NumPy array.*\(24, 24, 3\).*ToImage"):
        CachedDataset(Made(lambda index: (IMAGE, label)), **options)[0]


@pytest.mark.parametrize("wrap", [lambda transform: transform, around, Holding])
def test_a_pipeline_that_begins_with_toimage_is_right(wrap: Any) -> None:
    """Arrays beside the image, and transforms of boxes alone, are no errors."""
    transform = wrap(Chain(ToImage(), Clamp(), Flip()))
    sample = CachedDataset(Made(lambda index: (IMAGE, index)), transform)[1]
    image = next(iter(sample.values())) if isinstance(sample, dict) else sample[0]
    assert torch.equal(image.as_subclass(torch.Tensor), torch.as_tensor(IMAGE).permute(2, 0, 1).flip(-1))
    boxes = np.zeros((5, 4), np.float32)
    dataset = Made(lambda index: (torch.as_tensor(IMAGE), boxes, np.zeros(3)))
    assert np.array_equal(CachedDataset(dataset, Flip())[0][1], boxes)


def test_a_folder_and_a_worker_say_so_too(photos: Any) -> None:
    """ImageFolder calls the transform with the array alone; a started process hooks torchvision again."""
    with pytest.raises(TypeError, match="Flip of torchvision takes no NumPy array"):
        fastload.ImageFolder(photos, transform=Flip())[0]
    dataset = CachedDataset(Made(tuple_of_image), Flip())
    with pytest.raises(TypeError, match="Flip"):
        dataset[0]
    stored = pickle.dumps(dataset)
    StandIn._needs_transform_list = vars(StandIn._needs_transform_list)["__wrapped__"]  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="Flip"):
        pickle.loads(stored)[0]


def tuple_of_image(index: int) -> Any:
    return IMAGE, index


def test_calls_from_elsewhere_are_left_alone(photos: Any) -> None:
    """The user's own calls, also in a dataset inside, pass arrays as they always did."""
    CachedDataset(Made(lambda index: Flip()((IMAGE, index))), tuple)[0]
    assert np.array_equal(Flip()(IMAGE), IMAGE)


def test_torchvision_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own flips and colors raise over arrays, and run behind ToImage; skipped where it is missing."""
    monkeypatch.delitem(sys.modules, "torchvision.transforms.v2")
    monkeypatch.setitem(sys.modules, "torchvision._meta_registrations", types.ModuleType("empty"))
    v2 = pytest.importorskip("torchvision.transforms.v2")
    dataset = Made(lambda index: (IMAGE, index))
    image = torch.as_tensor(IMAGE).permute(2, 0, 1)
    normalize = v2.Normalize((0.0,) * 3, (1.0,) * 3)
    dtype = v2.ToDtype(torch.float32, scale=True)
    for transform in (v2.RandomHorizontalFlip(1.0), v2.ColorJitter(0.5), normalize, dtype, v2.Resize(8)):
        with pytest.raises(TypeError, match=r"takes no NumPy array"):
            CachedDataset(dataset, v2.Compose([v2.ClampBoundingBoxes(), transform, v2.ToImage()]))[0]
    ours = CachedDataset(dataset, v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip(1.0), v2.ToPureTensor()]))
    assert torch.equal(ours[0][0], image.flip(-1))


def old_transform() -> Any:
    """As torchvision's first transforms: from a module of its package, for PIL images and tensors."""
    module = types.ModuleType("torchvision.transforms.functional")
    exec(  # the error must come from a module of that name
        "def flip(image):\n    raise TypeError(f'Unexpected type {type(image)}')\n", vars(module)
    )
    return module.flip  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrapped", [lambda flip: flip, around, Holding])
def test_an_error_of_torchvisions_first_transforms_says_how_to_convert(wrapped: Any) -> None:
    """They take neither a sample nor its array: a note has the two ways."""
    dataset = CachedDataset(Made(lambda index: (IMAGE, 3)), wrapped(old_transform()))
    with pytest.raises(TypeError, match="Unexpected type") as caught:
        dataset[0]
    note = "".join(caught.value.__notes__)
    assert "PIL.Image.fromarray(image)" in note
    assert "torchvision.transforms.v2" in note


def test_other_errors_get_no_advice_about_torchvision() -> None:
    """An error of the user's own function, and one over a sample without arrays."""

    def fail(sample: Any) -> Any:
        raise TypeError("no")

    for function, sample in ((fail, (IMAGE, 3)), (old_transform(), (3, "a"))):
        with pytest.raises(TypeError) as caught:
            CachedDataset(Made(lambda index, sample=sample: sample), function)[0]
        assert "torchvision" not in "".join(caught.value.__notes__)
