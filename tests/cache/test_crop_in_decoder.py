"""A crop in the decoder: the outputs and random numbers of the whole pipeline stay."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any
from unittest import mock

import albumentations as A
import cv2
import numpy as np
import pytest
from albumentations.augmentations.crops.transforms import CropSizeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fastload.augmentation.albumentations import crop
from fastload.augmentation.albumentations.crop import CropInDecoder
from fastload.cache.dataset import CachedDataset
from fastload.errors import ImageReadError
from fastload.images import jpeg, regions
from fastload.images.encoded import EncodedImage
from tests.images.test_encoded import image_file
from tests.images.test_restart_markers import marked_file, turned_file
from tests.kit.batches import assert_same_samples

pytestmark = pytest.mark.skipif(regions.name_of_decoder() is None, reason="needs the extra regions")
HEIGHT, WIDTH = 181, 243
MASK = (np.indices((HEIGHT, WIDTH)).sum(0) % 251 > 120).astype(np.uint8)
CROPS: dict[str, Any] = {
    "RandomResizedCrop": lambda: A.RandomResizedCrop((40, 56)),
    "RandomResizedCrop, area": lambda: A.RandomResizedCrop((40, 56), area_for_downscale="image_mask"),
    "RandomSizedCrop": lambda: A.RandomSizedCrop((50, 150), (40, 56)),
    "RandomSizedBBoxSafeCrop": lambda: A.RandomSizedBBoxSafeCrop(40, 56),
    "RandomCrop": lambda: A.RandomCrop(60, 70),
    "RandomCrop, padded": lambda: A.RandomCrop(200, 100, pad_if_needed=True),
    "CenterCrop": lambda: A.CenterCrop(60, 70),
    "CenterCrop, padded": lambda: A.CenterCrop(200, 300, pad_if_needed=True),
    "Crop": lambda: A.Crop(10, 20, 200, 100),
    "Crop, padded": lambda: A.Crop(5, 20, 300, 100, pad_if_needed=True),
    "RandomCropNearBBox": lambda: A.RandomCropNearBBox(0.3),
    "BBoxSafeRandomCrop": lambda: A.BBoxSafeRandomCrop(0.1),
    "AtLeastOneBBoxRandomCrop": lambda: A.AtLeastOneBBoxRandomCrop(60, 70),
    "CropNonEmptyMaskIfExists": lambda: A.CropNonEmptyMaskIfExists(60, 70),
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


NEEDS_ALL = 'SmallestMaxSize needs all pixels; decode="fast" can decode JPEGs at a reduced size'
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
    "resize": (lambda: A.Compose([A.Resize(60, 70)]), "Resize needs all pixels"),
    "nothing": (lambda: A.Compose([]), "the pipeline is empty"),
    "sequential": (lambda: A.Sequential([A.RandomCrop(60, 70)], p=1), "the first transform is Sequential"),
    **{
        f"resize, {name}": (lambda it=it: A.Compose([A.SmallestMaxSize(64), copy.deepcopy(it)]), NEEDS_ALL)
        for name, it in {
            "crop with p": A.CenterCrop(40, 40, p=0.5),
            "padded crop": A.CenterCrop(40, 40, pad_if_needed=True),
            "random crop": A.RandomCrop(40, 40),
            "nested crop": A.Compose([A.CenterCrop(40, 40)]),
        }.items()
    },
}  # fmt: skip


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
    whole = EncodedImage(content).decode()
    plain, cropping = make(), make()
    for pipeline in (plain, cropping):
        pipeline.set_random_seed(7)
    in_decoder = CropInDecoder(cropping, reduces=False)
    data = targets(None) if getattr(plain, "processors", None) else {"mask": MASK}
    for _ in range(20 if name.startswith("p") else 6):
        expected = plain(**data | {"image": whole.copy()})
        found = in_decoder(**data | {"image": EncodedImage(content)})

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
    image = EncodedImage(image_file("4:2:0", HEIGHT, WIDTH))
    pipeline = A.ReplayCompose([A.RandomCrop(60, 70), A.HorizontalFlip()])
    output = CropInDecoder(pipeline, reduces=False)(image=image)
    again = A.ReplayCompose.replay(output["replay"], image=image.decode())
    np.testing.assert_array_equal(output["image"], again["image"])
    with pytest.raises(CropSizeError) as theirs:
        A.Compose([A.RandomCrop(300, 300)])(image=image.decode())
    with pytest.raises(CropSizeError) as ours:
        CropInDecoder(A.Compose([A.RandomCrop(300, 300)]), reduces=False)(image=image)
    assert str(ours.value) == str(theirs.value)


def smooth_file(height: int, width: int, interval: int = 0) -> bytes:
    """A JPEG of a picture with soft edges, as photos have; with a restart marker every `interval` MCUs."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 37) + np.cos(y / 29), np.cos((x - y) / 41), np.sin((x + 2 * y) / 53)]
    file = io.BytesIO()
    image = Image.fromarray((127 + 60 * np.stack(waves, -1)).clip(0, 255).astype(np.uint8))
    image.save(file, "jpeg", restart_marker_blocks=interval)
    return file.getvalue()


def psnr_db(found: np.ndarray, expected: np.ndarray) -> float:
    error = np.square(found.astype(float) - expected.astype(float)).mean()
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


@pytest.mark.parametrize(
    ("first", "db"),
    [
        (A.Resize(50, 60), 30),
        (A.Resize(640, 720), 130),  # nothing is reduced that the pipeline enlarges
        (A.SmallestMaxSize(64), 30),
        (A.LongestMaxSize(max_size_hw=(64, 90)), 30),
        (A.RandomResizedCrop((40, 56), scale=(0.5, 1)), 30),
        (A.RandomSizedCrop((300, 500), (40, 56)), 30),
    ],
    ids=str,
)
def test_fast_decoding_is_close(first: Any, db: int) -> None:
    """decode="fast" gives the exact shapes, boxes and keypoints, and pixels of a PSNR above 30 dB."""
    height, width = 613, 707
    content = smooth_file(height, width)
    whole = EncodedImage(content).decode()
    plain, fast = (A.Compose([copy.deepcopy(first)], **PARAMS, seed=3) for _ in range(2))
    in_decoder = CropInDecoder(fast, reduces=True)
    assert in_decoder.why_whole is None
    data = targets(None) | {"mask": np.zeros((height, width), np.uint8)}
    del data["other"]
    for _ in range(5):
        expected = plain(**data | {"image": whole})
        found = in_decoder(**data | {"image": EncodedImage(content)})
        assert found["image"].shape == expected["image"].shape
        assert psnr_db(found["image"], expected["image"]) > db
        del found["image"], expected["image"]
        assert_same_samples(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("crop", [A.Resize(50, 60), A.RandomResizedCrop((40, 56), scale=(0.5, 1))], ids=str)
@given(share=st.floats(0, 1))
@settings(max_examples=25)
def test_fast_decoding_of_a_truncated_file(crop: Any, share: float) -> None:
    """ImageReadError, or the pixels of the whole file: never an image that is partly grey."""
    content = smooth_file(512, 640)
    cut = content[: round(share * len(content))]
    fast, whole = (A.Compose([copy.deepcopy(crop)], seed=3) for _ in range(2))
    try:
        found = CropInDecoder(fast, reduces=True)(image=EncodedImage(cut))["image"]
    except ImageReadError:
        assert cut != content
    else:
        expected = whole(image=EncodedImage(content).decode())["image"]
        assert psnr_db(found, expected) > 30


@pytest.mark.parametrize(("height", "width"), [(2048, 2560), (100, 90), (512, 90), (1, 1)])
def test_fast_decoding_of_a_file_whose_header_lies(height: int, width: int) -> None:
    """Other sides than those of the picture: ImageReadError, or an image of the pipeline's shape."""
    content = bytearray(smooth_file(512, 640))
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    with contextlib.suppress(ImageReadError):
        found = CropInDecoder(A.Compose([A.Resize(50, 60)]), reduces=True)(image=EncodedImage(bytes(content)))
        assert found["image"].shape == (50, 60, 3)


INTERPOLATIONS = [cv2.INTER_NEAREST, cv2.INTER_LINEAR, cv2.INTER_CUBIC, cv2.INTER_AREA, cv2.INTER_LANCZOS4]
RESIZES: dict[str, Any] = {
    "Resize": lambda side, **options: A.Resize(side, 2 * side, **options),
    "SmallestMaxSize": lambda side, **options: A.SmallestMaxSize(side, **options),
    "one of two": lambda side, **options: A.SmallestMaxSize([side, side + 7], **options),
    "LongestMaxSize": lambda side, **options: A.LongestMaxSize(side, **options),
}


@pytest.fixture
def of_any_size(monkeypatch: Any) -> None:
    """Small images count as large ones."""
    monkeypatch.setattr(crop, "_MIN_PIXELS", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize("has_codec", [False, True])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sides=st.tuples(st.integers(16, 200), st.integers(16, 200)),
    interval=st.sampled_from([0, 1, 2, 4, 7]),
    turn=st.integers(1, 8),
    resize=st.sampled_from(list(RESIZES)),
    interpolation=st.sampled_from(INTERPOLATIONS),
    area=st.sampled_from([None, "image"]),
    side=st.integers(4, 220),
    crop=st.tuples(st.floats(0.05, 1), st.floats(0.05, 1)),
)
def test_the_center_of_a_resized_image_is_that_of_the_pipeline(
    has_codec: bool, sides: Any, interval: int, turn: int, resize: str, crop: Any, side: int, **options: Any
) -> None:
    """All targets and generators are the same, also for a crop that does not fit; whatever is decoded."""
    area = options.pop("area")
    content = turned_file(marked_file(*sides, interval), turn)
    whole = EncodedImage(content).decode()
    height, width = (max(1, round(share * side)) for share in crop)

    def make() -> Any:
        first = RESIZES[resize](side, area_for_downscale=area, **options)
        return A.Compose([first, A.CenterCrop(height, width), A.HorizontalFlip(p=0.5)], seed=5)

    plain, cropping = make(), CropInDecoder(make(), reduces=False)
    assert cropping.why_whole is None
    mask = whole[..., 0].copy()
    with mock.patch.object(regions, "_codec", regions._codec if has_codec else lambda: None):
        for _ in range(2):
            try:
                expected = plain(image=whole, mask=mask)
            except CropSizeError:
                with pytest.raises(CropSizeError):
                    cropping(image=EncodedImage(content), mask=mask)
                return
            assert_same_samples(cropping(image=EncodedImage(content), mask=mask), expected)


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("has_codec", [False, True])
def test_validation_decodes_the_part_that_it_keeps(reduces: bool, has_codec: bool, monkeypatch: Any) -> None:
    """Not the whole of a large image: cut at its restart markers, or an ordinary file by nvImageCodec."""
    height, width = 700, 1500
    content = smooth_file(height, width, 0 if has_codec else 2)
    validation = A.Compose([A.SmallestMaxSize(128), A.CenterCrop(112, 112)])
    expected = validation(image=EncodedImage(content).decode())["image"]
    if not has_codec:
        monkeypatch.setattr(regions, "_codec", lambda: None)
    decode_jpeg = mock.Mock(side_effect=jpeg.decode_jpeg)
    monkeypatch.setattr(regions, "decode_jpeg", decode_jpeg)
    monkeypatch.setattr(EncodedImage, "decode", lambda *_: pytest.fail("the whole image is decoded"))
    cropping = CropInDecoder(validation, reduces=reduces)
    found = cropping(image=EncodedImage(content))["image"]

    if reduces:
        assert psnr_db(found, expected) > 30
    else:
        np.testing.assert_array_equal(found, expected)
    assert all(call.args[1].width < width // 2 for call in decode_jpeg.mock_calls)
    assert "CenterCrop" in cropping.explain()


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("sides", [(513, 707), (2048, 640), (300, 400)])
def test_fast_validation_of_a_cut_file_is_that_of_the_whole(
    sides: Any, interpolation: int, monkeypatch: Any
) -> None:
    """The part has the scale of the whole, and is sampled at the same places, up to what OpenCV rounds."""
    monkeypatch.setattr(regions, "_codec", lambda: None)
    content = smooth_file(*sides)
    resize, crop = A.SmallestMaxSize(128, interpolation=interpolation), A.CenterCrop(112, 100)
    whole = CropInDecoder(A.Compose([copy.deepcopy(resize)]), reduces=True)(image=EncodedImage(content))
    expected = crop(image=whole["image"])["image"]
    marked = EncodedImage(smooth_file(*sides, 1))
    found = CropInDecoder(A.Compose([resize, crop]), reduces=True)(image=marked)["image"]
    assert psnr_db(found, expected) > (30 if interpolation == cv2.INTER_NEAREST else 48)


def test_a_new_pipeline_or_way_of_decoding() -> None:
    """A transform and a `decode` that are set later are used, and explain() follows them."""
    image = EncodedImage(image_file("4:2:0", HEIGHT, WIDTH))
    ds = CachedDataset([{"image": image, "other": image}], A.Compose([A.Resize(20, 30)]), cache=None)
    assert "Resize needs all pixels" in ds.explain()
    assert ds[0]["image"].shape == (20, 30, 3)
    ds.decode = "fast"
    assert "at a reduced size where Resize shrinks them" in ds.explain()
    assert ds[0]["image"].shape == (20, 30, 3)
    ds.transform = A.Compose([A.CenterCrop(33, 34)])
    assert "decodes the region of CenterCrop" in ds.explain()
    assert ds[0]["image"].shape == (33, 34, 3)
    ds.transform = None
    assert "there is no transform" in ds.explain()
    assert ds[0]["image"].shape == (HEIGHT, WIDTH, 3)
    ds.transform = lambda sample: sample["image"].sum()
    assert "not an albumentations pipeline" in ds.explain()
    assert ds[0] > 0


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_reduced_crop_lies_where_the_exact_one_lies(orientation: int) -> None:
    """With decode="fast", a box whose edges lie between reduced pixels is sampled between them."""
    y, x = np.mgrid[:403, :605]
    ramps = np.stack([255 * x / 605, 255 * y / 403, 0 * x], axis=-1).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(ramps).save(file, "jpeg", quality=98, subsampling="4:4:4", exif=exif)
    image = EncodedImage(file.getvalue())

    def crop() -> Any:
        return A.Compose([A.RandomResizedCrop((40, 40), scale=(0.7, 1.0))], seed=5)

    fast, exact = (CropInDecoder(crop(), reduces=reduces) for reduces in (True, False))
    images = [(fast(image=image)["image"], exact(image=image)["image"]) for _ in range(10)]
    differences = [np.abs(ours.astype(int) - theirs.astype(int)) for ours, theirs in images]

    # A reduced pixel is 8 pixels wide, of which the ramps rise by 3.4 and 5.1 levels. With OpenCV 4, one
    # value in 96,000 differs by 4 levels; with OpenCV 5, no value does.
    assert max(difference.max() for difference in differences) <= 4
    assert np.mean(np.stack(differences) > 3) < 1e-4
    assert max(difference.mean() for difference in differences) < 0.8
