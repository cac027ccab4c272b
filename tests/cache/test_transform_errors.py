"""What a transform or prepare that cannot be used, or that raises, is told."""

from __future__ import annotations

from typing import Any

import albumentations as A
import numpy as np
import pytest

from fastload import DataLoader
from fastload.cache.dataset import CachedDataset
from tests.cache.zoo import Images


class Named(Images):
    """Dicts under the keys that it was given; 4 samples.

    Args:
        keys: Of the image and of the label.
    """

    def __init__(self, *keys: str) -> None:
        super().__init__(4)
        self.keys = keys

    def sample(self, index: int) -> Any:
        return dict(zip(self.keys, super().sample(index), strict=True))


@pytest.mark.parametrize("role", ["transform", "prepare"])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "{}=5 is of type int, which cannot be called: give an albumentations pipeline, a function"),
        ("flip", "{}='flip' is of type str, which cannot be called"),
        ([A.NoOp()], "is of type list, which cannot be called"),
        (
            A.HorizontalFlip,
            r"{} is the class HorizontalFlip: give an instance of it, such as {}=HorizontalFlip\(",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_at_once(role: str, value: Any, text: str) -> None:
    """transform= and prepare= are checked before the dataset is read, and the error says what to give."""
    dataset = Images(4)
    with pytest.raises(TypeError, match=text.replace("{}", role)):
        CachedDataset(dataset, **{role: value})

    assert sum(dataset.reads) == 0


def test_a_transform_that_is_set_later_is_checked_too() -> None:
    """`dataset.transform = 5` is refused when the transform would run first."""
    ds = CachedDataset(Images(4))
    ds.transform = 5

    with pytest.raises(TypeError, match="transform=5 is of type int, which cannot be called"):
        ds[0]


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def image_only(image: Any) -> Any:
    return image[:8].astype(np.float32)


def test_a_function_of_an_image_is_told_of_the_whole_sample() -> None:
    """An image-only function over tuples fails with its own error, and a note that says what it was given."""
    ds = CachedDataset(Images(8), image_only)

    with pytest.raises(AttributeError) as caught:
        ds[5]

    assert notes(caught.value) == (
        "fastload calls the transform with the whole sample; sample 5 is a tuple of "
        "(array (32, 24, 3) uint8, int)"
    )


@pytest.mark.parametrize("method", ["process", "thread"])
def test_the_note_comes_from_workers(method: Any) -> None:
    """The error that a worker sends carries the note."""
    loader = DataLoader(CachedDataset(Images(8), image_only), 4, num_workers=1, worker_method=method)

    with pytest.raises(AttributeError) as caught:
        next(iter(loader))

    assert "sample 0 is a tuple of (array (32, 24, 3) uint8, int)" in f"{caught.value}\n{notes(caught.value)}"


def test_prepare_is_told_the_same() -> None:
    """The deterministic part fails with its own error and a note of its own."""
    with pytest.raises(AttributeError) as caught:
        CachedDataset(Images(8), prepare=image_only)

    assert "fastload calls the prepare with the whole sample; sample 0 is a tuple" in notes(caught.value)


@pytest.mark.parametrize("role", ["transform", "prepare"])
def test_the_note_describes_the_sample_as_it_was(role: str) -> None:
    """A function that takes the sample apart before it fails is told what it was given, not what it left."""

    def take(sample: Any) -> Any:
        del sample["image"]
        raise KeyError("mask")

    with pytest.raises(KeyError) as caught:
        CachedDataset(Named("image", "label"), **{role: take})[0]

    assert "a dict of {'image': array (32, 24, 3) uint8, 'label': int}" in notes(caught.value)


def test_errors_of_the_dataset_carry_no_such_note() -> None:
    """A sample that cannot be read was never given to the transform."""

    class Broken(Images):
        def sample(self, index: int) -> Any:
            if index == 3:
                raise OSError("unreadable")
            return super().sample(index)

    ds = CachedDataset(Broken(8), lambda sample: sample, budget="10MB")
    with pytest.raises(OSError, match="unreadable") as caught:
        ds[3]

    assert "calls the transform" not in notes(caught.value)


@pytest.mark.parametrize("role", ["transform", "prepare"])
@pytest.mark.parametrize("p", [0, 1])
def test_a_dict_without_a_target_is_refused(role: str, p: float) -> None:
    """A pipeline that would change nothing of a dict raises; the error names both sides' keys."""
    flip = A.Compose([A.HorizontalFlip(p=p)])
    with pytest.raises(TypeError) as caught:
        CachedDataset(Named("img", "label"), **{role: flip})[2]

    assert "takes the keys ['bboxes', 'image', 'images', 'keypoints'," in str(caught.value)
    assert "the dataset returned a dict with ['img', 'label']: use those keys" in str(caught.value)
    assert "is a dict of {'img': array (32, 24, 3) uint8, 'label': int}" in notes(caught.value)


def test_an_image_under_another_key_beside_a_target_is_told() -> None:
    """Where albumentations itself stumbles over a missing image, the note says which keys came."""
    ds = CachedDataset(Named("img", "mask"), A.HorizontalFlip(p=1))

    with pytest.raises(KeyError, match="images") as caught:
        ds[1]

    assert notes(caught.value) == (
        "fastload calls the transform with the image or the named targets of a sample; sample 1 is a dict of "
        "{'img': array (32, 24, 3) uint8, 'mask': int}"
    )


def test_a_dict_without_an_image_but_with_a_volume_is_taken() -> None:
    """Any target that the pipeline knows is enough."""
    ds = CachedDataset(Named("volume", "label"), A.HorizontalFlip(p=1))

    np.testing.assert_array_equal(ds[1]["volume"], Images(4).sample(1)[0][:, :, ::-1])
