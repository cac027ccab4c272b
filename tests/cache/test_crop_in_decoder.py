"""A crop in the decoder: the outputs and random numbers of the whole pipeline stay."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import pytest
from albumentations.augmentations.crops.transforms import CropSizeError
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastload.augmentation import regions
from fastload.augmentation.albumentations.crop import CropInDecoder
from fastload.augmentation.encoded import EncodedImage
from fastload.cache.dataset import CachedDataset
from fastload.errors import ImageReadError
from fastload.images.folder import ImageFolder
from tests.augmentation.test_encoded import image_file
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(regions.name_of_decoder() is None, reason="needs the extra regions")
HEIGHT, WIDTH = 181, 243
MASK = (np.indices((HEIGHT, WIDTH)).sum(0) % 251 > 120).astype(np.uint8)
CROPS: dict[str, Any] = {
    "RandomResizedCrop": lambda: A.RandomResizedCrop((40, 56)),
    "RandomResizedCrop, area": lambda: A.RandomResizedCrop((40, 56), area_for_downscale="image_mask"),
    "RandomSizedCrop": lambda: A.RandomSizedCrop((50, 150), (40, 56)),
    "RandomCrop": lambda: A.RandomCrop(60, 70),
    "RandomCrop, padded": lambda: A.RandomCrop(200, 100, pad_if_needed=True),
    "CenterCrop": lambda: A.CenterCrop(60, 70),
    "CenterCrop, padded": lambda: A.CenterCrop(200, 300, pad_if_needed=True),
    "Crop": lambda: A.Crop(10, 20, 200, 100),
    "Crop, padded": lambda: A.Crop(5, 20, 300, 100, pad_if_needed=True),
    "RandomCropFromBorders": lambda: A.RandomCropFromBorders(),
}


def targets(image: Any) -> dict[str, Any]:
    """A sample with each kind of target; `other` is an additional target of type image."""
    return {
        "image": image,
        "mask": MASK,
        "bboxes": np.array([[20, 30, 120, 90], [100, 80, 200, 170]], np.float32),
        "labels": [3, 4],
        "keypoints": np.array([[50, 60], [200, 100]], np.float32),
        "other": np.repeat(MASK[..., None] * 200, 3, axis=2),
        "cropping_bbox": [40, 50, 140, 130],
        "name": "a text",
    }


PARAMS: Any = {
    "bbox_params": A.BboxParams("pascal_voc", label_fields=["labels"]),
    "keypoint_params": A.KeypointParams("xy", remove_invisible=False),
}


def compose(first: list[Any], end: Any = (), **options: Any) -> Any:
    return A.Compose(
        [*first, A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=0.5), *end],
        **PARAMS,
        additional_targets={"other": "image"},
        **options,
    )


def states(pipeline: Any) -> Any:
    """The states of a pipeline's generators, and of its transforms'."""
    parts = [pipeline, *getattr(pipeline, "transforms", ())]
    return [(part.py_random.getstate(), part.random_generator.bit_generator.state) for part in parts]


class RandomCrop(A.RandomCrop):
    """A user's own subclass with a name of albumentations."""

    def apply(self, img: Any, **params: Any) -> Any:
        return 255 - super().apply(img, **params)


# Pipelines, and why whole images are decoded; None where a crop is decoded alone.
PIPELINES: dict[str, tuple[Any, str | None]] = {
    **{name: (lambda crop=crop: compose([crop()]), None) for name, crop in CROPS.items()},
    "saves parameters": (lambda: compose([A.RandomCrop(60, 70)], save_applied_params=True), None),
    "p and a seed": (lambda: compose([A.RandomCrop(60, 70)], p=0.5, seed=137), None),
    "other release": (lambda: compose([A.RandomCrop(60, 70)]), "a different release"),
    "no decoder of regions": (lambda: compose([A.RandomCrop(60, 70)]), "pip install"),
    **{f"bare {n}": (CROPS[n], None) for n in ("RandomCrop", "CenterCrop, padded", "RandomResizedCrop")},
    "p of a crop": (lambda: A.Compose([A.RandomCrop(60, 70, p=0.5)]), "RandomCrop has p=0.5"),
    "subclass": (lambda: A.Compose([RandomCrop(60, 70)]), "RandomCrop is not a class of albumentations"),
    "nested": (lambda: A.Compose([A.Compose([A.RandomCrop(60, 70)])]), "the first transform is Compose"),
    "one of": (lambda: A.Compose([A.OneOf([A.RandomCrop(60, 70)], p=1)]), "the first transform is OneOf"),
    "later": (lambda: A.Compose([A.HorizontalFlip(), A.RandomCrop(60, 70)]), "is HorizontalFlip; only a"),
    "nothing": (lambda: A.Compose([]), "the pipeline is empty"),
    "sequential": (lambda: A.Sequential([A.RandomCrop(60, 70)], p=1), "the first transform is Sequential"),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_outputs_and_generators_are_those_of_the_pipeline(name: str, monkeypatch: Any) -> None:
    """A crop is decoded alone, or explain() says why not: all targets and later random numbers stay."""
    decoded: list[Any] = []
    real = EncodedImage.decode
    monkeypatch.setattr(EncodedImage, "decode", lambda self, box=None: decoded.append(box) or real(self, box))
    if name == "other release":
        monkeypatch.setattr(A, "__version__", "2.0.9")
    if name == "no decoder of regions":
        monkeypatch.setattr(regions, "_codec", lambda: None)
    make, obstacle = PIPELINES[name]
    content = image_file("4:2:0", HEIGHT, WIDTH)
    whole = EncodedImage("x", content).decode()
    plain, cropping = make(), make()
    for pipeline in (plain, cropping):
        pipeline.set_random_seed(7)
    in_decoder = CropInDecoder(cropping)
    data = targets(None) if getattr(plain, "processors", None) else {"mask": MASK}
    for _ in range(20 if name.startswith("p") else 6):
        expected = plain(**data | {"image": whole.copy()})
        found = in_decoder(**data | {"image": EncodedImage("x", content)})

        assert_same_samples(found, expected)
        assert found["image"].flags.writeable
    assert states(cropping) == states(plain)
    if obstacle is None:
        assert in_decoder.why_whole is None
        if name in CROPS and "padded" not in name:
            assert None not in decoded[1:]  # the first one is the test's own
    else:
        assert obstacle in in_decoder.explain()
        assert name == "no decoder of regions" or in_decoder.explain().startswith(
            "whole images are decoded: "
        )
    if name == "saves parameters":
        assert cropping.transforms[0].get_applied_params()["crop_coords"]


def test_replay_and_the_error_of_a_large_crop() -> None:
    """ReplayCompose decodes whole images, and its record can be replayed; the error is albumentations'."""
    image = EncodedImage("x", image_file("4:2:0", HEIGHT, WIDTH))
    pipeline = A.ReplayCompose([A.RandomCrop(60, 70), A.HorizontalFlip()])
    output = CropInDecoder(pipeline)(image=image)
    again = A.ReplayCompose.replay(output["replay"], image=image.decode())
    np.testing.assert_array_equal(output["image"], again["image"])
    with pytest.raises(CropSizeError) as theirs:
        A.Compose([A.RandomCrop(300, 300)])(image=image.decode())
    with pytest.raises(CropSizeError) as ours:
        CropInDecoder(A.Compose([A.RandomCrop(300, 300)]))(image=image)
    assert str(ours.value) == str(theirs.value)


def smooth_file(height: int, width: int) -> bytes:
    """A JPEG of a picture with soft edges, as photos have."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 37) + np.cos(y / 29), np.cos((x - y) / 41), np.sin((x + 2 * y) / 53)]
    file = io.BytesIO()
    Image.fromarray((127 + 60 * np.stack(waves, -1)).clip(0, 255).astype(np.uint8)).save(file, "jpeg")
    return file.getvalue()


@pytest.mark.slow
@given(share=st.floats(0, 1))
@settings(max_examples=25)
def test_a_crop_of_a_truncated_file(share: float) -> None:
    """ImageReadError, or the pixels of the whole file: never an image that is partly grey."""
    content = smooth_file(512, 640)
    cut = content[: round(share * len(content))]
    in_decoder, whole = (A.Compose([A.RandomResizedCrop((40, 56))], seed=3) for _ in range(2))
    try:
        found = CropInDecoder(in_decoder)(image=EncodedImage("x", cut))["image"]
    except ImageReadError:
        assert cut != content
    else:
        np.testing.assert_array_equal(found, whole(image=EncodedImage("x", content).decode())["image"])


@pytest.mark.parametrize(("height", "width"), [(2048, 2560), (100, 90), (512, 90), (1, 1)])
def test_a_crop_of_a_file_whose_header_lies(height: int, width: int) -> None:
    """Other sides than those of the picture: ImageReadError, or an image of the pipeline's shape."""
    content = bytearray(smooth_file(512, 640))
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    with contextlib.suppress(ImageReadError):
        found = CropInDecoder(A.RandomResizedCrop((50, 60)))(image=EncodedImage("x", bytes(content)))
        assert found["image"].shape == (50, 60, 3)


def test_a_new_pipeline(tmp_path: Path) -> None:
    """A transform that is set later is used, and explain() follows it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.jpg").write_bytes(image_file("4:2:0", HEIGHT, WIDTH))
    ds = CachedDataset(ImageFolder(tmp_path), A.Compose([A.Resize(20, 30)]), cache=None)
    assert "whole images are decoded: the first transform is Resize" in ds.explain()
    assert ds[0][0].shape == (20, 30, 3)
    ds.transform = A.Compose([A.CenterCrop(33, 34)])
    assert "decodes the region of CenterCrop" in ds.explain()
    assert ds[0][0].shape == (33, 34, 3)
    ds.transform = None
    assert "there is no transform" in ds.explain()
    assert ds[0][0].shape == (HEIGHT, WIDTH, 3)
    ds.transform = lambda sample: sample[0].sum()
    assert "not an albumentations pipeline" in ds.explain()
    assert ds[0] > 0
