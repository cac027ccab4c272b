"""A torchvision v2 transform that would leave an image in a NumPy array as it is raises an error."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

import fastload
from fastload.cache.dataset import CachedDataset
from fastload.system import torchvision_arrays
from fastload.system.torchvision_arrays import reject_arrays
from tests.cache.zoo import Made
from tests.rng.draws_zoo import Chain

pytestmark = pytest.mark.usefixtures("registry_folder")

IMAGE = np.arange(24 * 24 * 3, dtype=np.uint8).reshape(24, 24, 3)


class StandIn:
    """As torchvision's class: transforms what it takes in a nest, and passes all else through."""

    takes: tuple[Any, ...] = (torch.Tensor,)

    def __call__(self, *inputs: Any) -> Any:
        sample = inputs if len(inputs) > 1 else inputs[0]
        parts = list(sample) if isinstance(sample, tuple) else [sample]
        moved = [self.transform(part) if isinstance(part, self.takes) else part for part in parts]
        return tuple(moved) if isinstance(sample, tuple) else moved[0]

    def transform(self, part: Any) -> Any:
        return part.flip(-1)


class Flip(StandIn):
    """Takes tensors."""


class ToImage(StandIn):
    """Takes arrays as well."""

    takes = (torch.Tensor, np.ndarray)

    def transform(self, part: Any) -> Any:
        return torch.as_tensor(part).permute(2, 0, 1).as_subclass(Tensor)


class Tensor(torch.Tensor):
    """As torchvision's tv_tensors.Image."""


class ClampBoundingBoxes(StandIn):
    """Takes neither images nor plain tensors, but boxes."""

    takes = (type("Boxes", (torch.Tensor,), {}),)


class Compose(Chain):
    """As torchvision's."""


@pytest.fixture(autouse=True)
def _torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes are in a module of torchvision's name."""
    for cls in (Flip, ToImage, ClampBoundingBoxes, Compose):
        monkeypatch.setattr(cls, "__module__", "torchvision.transforms.v2._of_tests")


@pytest.mark.parametrize("label", [3, np.zeros(4), torch.zeros(4), torch.ones(24, 24)])
@pytest.mark.parametrize("role", ["transform", "pre_transform"])
@pytest.mark.parametrize(
    "transform",
    [
        Flip(),
        Compose(ClampBoundingBoxes(), Flip(), ToImage()),
        Compose(Compose(Flip(), ToImage()), ToImage()),
    ],
)
def test_a_transform_that_passes_the_image_is_an_error(transform: Any, role: str, label: Any) -> None:
    """Alone or in a pipeline, also where it would flip a label instead."""
    options: dict[str, Any] = {role: transform}
    with pytest.raises(TypeError, match=r"Flip of torchvision takes no NumPy array.*\(24, 24, 3\).*ToImage"):
        CachedDataset(Made(lambda index: (IMAGE, label)), **options)[0]
    with pytest.raises(TypeError, match="Flip of torchvision takes no NumPy array"):
        CachedDataset(Made(lambda index: {"image": IMAGE, "label": label}), Flip())[0]


@pytest.mark.parametrize(
    "first", [ToImage(), Compose(ToImage()), lambda sample: (ToImage()(sample[0]), sample[1])]
)
def test_a_pipeline_that_begins_with_toimage_is_right(first: Any) -> None:
    """Arrays beside the image are no errors; neither is a function of the user's that makes the tensor."""
    transform = Compose(ClampBoundingBoxes(), first, Flip())
    image, _ = CachedDataset(Made(lambda index: (IMAGE, index)), transform)[1]
    assert torch.equal(image.as_subclass(torch.Tensor), torch.as_tensor(IMAGE).permute(2, 0, 1).flip(-1))


def test_arrays_beside_a_tensor_are_no_images() -> None:
    """Boxes after it, and a map of depths before it, if v2 knows which one is the image."""
    image, boxes = torch.as_tensor(IMAGE), np.zeros((5, 4), np.float32)
    assert np.array_equal(CachedDataset(Made(lambda index: (image, boxes, np.zeros(3))), Flip())[0][1], boxes)
    reject_arrays(Flip(), (IMAGE, image.as_subclass(Tensor)))


def test_boxes_alone_and_the_users_calls_are_left_alone() -> None:
    """Transforms that are not of images, and calls in a dataset inside, pass arrays as they always did."""
    for made, transform in (
        (lambda index: (IMAGE, index), ClampBoundingBoxes()),
        (lambda index: Flip()((IMAGE, index)), tuple),
    ):
        image, index = CachedDataset(Made(made), transform)[1]
        assert np.array_equal(image, IMAGE)
        assert index == 1


def test_a_folder_says_so_too(photos: Any) -> None:
    """ImageFolder calls the transform with the array alone."""
    with pytest.raises(TypeError, match="Flip of torchvision takes no NumPy array"):
        fastload.ImageFolder(photos, transform=Flip())[0]


def test_torchvision_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own flips and colors raise over arrays, and run behind ToImage; skipped where it is missing."""
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
    for name, cls in vars(v2).items():
        if name.startswith("To") and name != "ToPureTensor":
            takes_arrays = np.ndarray in cls._transformed_types
            assert takes_arrays == (name in torchvision_arrays._TAKE_ARRAYS), name
