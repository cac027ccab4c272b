"""Pillow's images and torchvision's tv_tensors in cached samples: they come back as what they were."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, PngImagePlugin, TiffImagePlugin

import fastload
from fastload.cache.format.record import decode, encode
from fastload.errors import CacheCorruptError, CacheError, UnsupportedSampleError
from fastload.nested import objects
from fastload.nested.tree import first_difference
from tests.cache.zoo import Made
from tests.kit.batches import assert_same_batches, assert_same_samples
from tests.kit.torchvision import import_torchvision

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("registry_folder")

MODES = [
    *("1", "L", "P", "LA", "PA", "La", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"),
    *("I", "F", "I;16", "I;16L", "I;16B", "I;16N"),
]
_VALUES = st.recursive(
    st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


@st.composite
def images(draw: st.DrawFn) -> Image.Image:
    """An image of any mode and size, with any pixels, palette and `info`."""
    mode = draw(st.sampled_from(MODES))
    image = Image.new(mode, (draw(st.integers(0, 9)), draw(st.integers(0, 9))))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    if image.width * image.height:  # bytes of other numbers are no pixels of float images that are equal
        image.frombytes(rng.integers(0, 64, len(image.tobytes()), np.uint8).tobytes())
    if mode in ("P", "PA") and draw(st.booleans()):
        channels = draw(st.sampled_from(["RGB", "RGBA"]))
        colors = draw(st.integers(1, 256))
        image.putpalette(rng.integers(0, 256, colors * len(channels), np.uint8).tobytes(), channels)
    names = st.text().filter(lambda name: name != "transparency")  # Pillow's: not of any type
    image.info = draw(st.dictionaries(names, _VALUES, max_size=3))
    if mode == "P" and draw(st.booleans()):
        image.info["transparency"] = draw(st.integers(0, 255) | st.binary(min_size=1, max_size=256))
    return image


def assert_same_images(found: Any, image: Any) -> None:
    """Equal, and equal in what conversions make of them."""
    expected = image.copy()
    assert type(found) is Image.Image
    assert found == expected
    assert found.info == expected.info
    assert list(map(type, found.info.values())) == list(map(type, expected.info.values()))
    if image.mode in ("P", "PA"):
        assert found.im.getpalettemode() == expected.im.getpalettemode()
        assert found.palette.mode == expected.palette.mode
        assert bytes(found.palette.tobytes()) == bytes(expected.palette.tobytes())
        assert found.palette.colors == expected.palette.colors
    if image.mode in ("P", "RGB", "L"):
        assert found.copy().convert("RGBA").tobytes() == expected.convert("RGBA").tobytes()


@pytest.mark.slow
@given(images())
@settings(max_examples=200)
def test_any_image_comes_back(image: Image.Image) -> None:
    """Mode, size, pixels, palette, transparency and `info`; beside other values."""
    sample = {"image": image, "label": 3}
    found = decode(encode(sample))
    assert_same_images(found["image"], image)
    assert found["label"] == 3
    assert first_difference(sample, found) is None
    assert encode(sample) == encode({**sample, "image": image.copy()})


@pytest.mark.parametrize("suffix", ["jpeg", "png", "tiff", "webp", "bmp", "gif"])
def test_an_opened_file_comes_back_as_its_copy(suffix: str) -> None:
    """Whether it was loaded before or not; EXIF data turn it as before."""
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(0).integers(0, 256, (9, 14, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, suffix, exif=exif)
    for prepare in (lambda image: None, lambda image: image.load()):
        image, expected = (Image.open(io.BytesIO(file.getvalue())) for _ in range(2))
        expected.load()
        prepare(image)
        found = decode(encode(image))
        assert_same_images(found, expected)
        assert ImageOps.exif_transpose(found) == ImageOps.exif_transpose(expected.copy())


def test_entries_of_info_that_are_not_plain_become_plain_or_are_left_out() -> None:
    """International texts, fractions and enumerations become what they derive from."""
    image = Image.new("L", (3, 2))
    image.info = {
        "text": PngImagePlugin.iTXt("text", "en", "key"),
        "dpi": (TiffImagePlugin.IFDRational(1, 2), 72),
        "depth": np.int64(3),
        "sizes": {(1, 2)},
        "photoshop": {1: b"x", "name": [1, object()]},
        (0, 1): 3,
    }
    found = decode(encode(image)).info
    assert_same_samples(found, {"text": "text", "dpi": (0.5, 72), "depth": 3.0, "photoshop": {}})
    image.info["sizes"] = {"changed"}
    assert encode(image) == encode(decode(encode(image)))


def frames(suffix: str) -> Any:
    file = io.BytesIO()
    several = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    several[0].save(file, suffix, save_all=True, append_images=several[1:])
    return Image.open(file)


class OwnImage(Image.Image):
    """A subclass of a user's."""


def test_images_that_would_lose_something_are_refused() -> None:
    """Those of several frames, but not photographs with a preview; and classes of the user's."""
    for suffix in ("gif", "tiff", "png"):
        with pytest.raises(UnsupportedSampleError, match=r"^\$\[0\]: .*several frames.*image\.copy\(\)"):
            encode((frames(suffix), 1))
    assert decode(encode(frames("mpo"))).size == (4, 4)
    with pytest.raises(UnsupportedSampleError, match=r"OwnImage cannot be cached.*numpy\.asarray\(image\)"):
        encode(OwnImage())


@pytest.mark.slow
@given(images(), st.data())
@settings(max_examples=200)
def test_damage_raises_at_worst(image: Image.Image, data: st.DataObject) -> None:
    """A record of an image with any bytes overwritten is read, or raises a cache error."""
    damaged = bytearray(encode(image))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CacheError):
        decode(bytes(damaged))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"PIL.Image:Image", b"PIL.Image:image"),  # no other name is looked up
        (b"PIL.Image:Image", b"os.system:Image"),
        (b'"mode"', b'"MODE"'),
        (b"RGB\0", b"RGX\0"),
    ],
)
def test_a_record_that_was_changed_raises(old: bytes, new: bytes) -> None:
    """A name that is not in the table, missing parts, and parts that do not fit."""
    text = encode(Image.new("RGB", (5, 4)))
    assert old in text
    with pytest.raises(CacheCorruptError):
        decode(text.replace(old, new))


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that another machine has filled; the error says what to install."""
    tv_tensors = import_torchvision().tv_tensors
    text = encode(tv_tensors.Mask(torch.zeros(1)))

    def fail(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(objects.importlib, "import_module", fail)  # type: ignore[attr-defined]
    with pytest.raises(CacheError, match=r"Mask of torchvision\.tv_tensors.*Install torchvision"):
        decode(text)


# --- tv_tensors -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tv() -> Any:
    """The module of torchvision's tensors, which is not installed everywhere."""
    return pytest.importorskip("torchvision.tv_tensors") if import_torchvision() else None


def tv_samples(tv: Any) -> Iterator[Any]:
    """Of each class, format and clamping."""
    yield tv.Image(torch.arange(24, dtype=torch.uint8).reshape(3, 2, 4))
    yield tv.Image(torch.rand(3, 4, 2).permute(0, 2, 1))
    yield tv.Mask(torch.arange(4).reshape(2, 2) % 2 == 0)
    yield tv.Video(torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16))
    for form in tv.BoundingBoxFormat:
        sides = {"XYWHR": 5, "CXCYWHR": 5, "XYXYXYXY": 8}.get(form.name, 4)
        for count in (0, 1, 3):
            yield tv.BoundingBoxes(torch.rand(count, sides), format=form, canvas_size=(5, count))
    yield tv.BoundingBoxes([[1, 2, 3, 4]], format="xywh", canvas_size=torch.Size((5, 6)))
    if hasattr(tv, "KeyPoints"):
        yield tv.BoundingBoxes([[1, 2, 3, 4]], format="XYXY", canvas_size=(5, 6), clamping_mode=None)
        yield tv.KeyPoints(torch.rand(2, 3, 2), canvas_size=[5, 6])


def test_tv_tensors_come_back(tv: Any) -> None:
    """Class, values, dtype and attributes, also where torchvision is told to return its own classes."""
    for sample in tv_samples(tv):
        for kind in ("Tensor", "TVTensor"):
            with tv.set_return_type(kind):
                found = decode(encode({"target": sample}))["target"]
            assert_same_samples(found, sample)
            found.zero_()
            assert_same_samples(decode(encode([sample])), [sample])


def test_tv_tensors_that_would_lose_something_are_refused(tv: Any) -> None:
    """A subclass of the user's, an attribute of the user's, and one that needs its gradient."""
    named = tv.Image(torch.zeros(3, 2, 2))
    named.path = "a.jpg"
    own = torch.zeros(3, 2, 2).as_subclass(type("Own", (tv.Image,), {}))
    for sample, said in (
        (named, "attributes path"),
        (own, "Own cannot be cached"),
        (tv.Mask(torch.zeros(2), requires_grad=True), r"detach\(\)"),
    ):
        with pytest.raises(UnsupportedSampleError, match=rf"^\$\[0\]: .*{said}"):
            encode([sample])


def test_a_changed_record_of_a_tv_tensor_raises(tv: Any) -> None:
    """Attributes that the class does not have, and formats that there are not."""
    text = encode(tv.BoundingBoxes(torch.zeros(1, 4), format="XYWH", canvas_size=(5, 6)))
    for old, new in ((b'"canvas_size"', b'"canvas_sizE"'), (b"XYWH", b"XYXX"), (b'"data"', b'"dada"')):
        assert old in text
        with pytest.raises(CacheCorruptError):
            decode(text.replace(old, new))


# --- in caches --------------------------------------------------------------------------------------------


def photo(index: int) -> Any:
    pixels = np.random.default_rng(index).integers(0, 256, (6 + index % 3, 8, 3), np.uint8)
    return Image.fromarray(pixels), index


def mask(index: int) -> Any:
    image = Image.fromarray(np.full((6, 8), index, np.uint8)).convert("P")
    image.putpalette(bytes(range(3 * (index + 1))))
    return {"image": photo(3 * index)[0], "mask": image}


@pytest.mark.parametrize("make", [photo, mask])
@pytest.mark.parametrize("cache", ["ram", "lmdb", "no memory"])
def test_images_in_every_cache(make: Any, cache: str, tmp_path: Any, monkeypatch: Any) -> None:
    """A miss and each hit are equal to what the dataset returned, and what is drawn into them stays there."""
    if cache == "no memory":
        monkeypatch.setattr("fastload.memory.segment.why_unsupported", lambda: "a test")
    kind = f"lmdb:{tmp_path}/x" if cache == "lmdb" else "ram"
    dataset = fastload.CachedDataset(Made(make), cache=kind, by="sample")
    for _ in range(3):
        for index in range(20):
            found = dataset[index]
            assert_same_samples(found, make(index))
            for value in found.values() if isinstance(found, dict) else found[:1]:
                value.paste(7, (0, 0, 8, 8))


def to_tensor(sample: Any) -> Any:
    return torch.from_numpy(np.array(sample[0].crop((0, 0, 5, 5)).convert("L"))), sample[1]


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_get_images(context: str) -> None:
    """Batches are those of the dataset without a cache, in the first epoch and in the second."""
    plain = torch.utils.data.DataLoader([to_tensor(photo(index)) for index in range(20)], 4)
    dataset = fastload.CachedDataset(Made(photo), to_tensor)
    loader = fastload.DataLoader(dataset, 4, num_workers=1, multiprocessing_context=context)
    for _ in range(2):
        assert_same_batches(list(plain), list(loader))
    assert dataset.cache_info().num_cached == 20


def test_batches_of_objects_are_default_collates(tv: Any) -> None:
    """tv_tensors become plain tensors; images raise torch's error."""
    made = Made(lambda index: (tv.Mask(torch.full((2, 3), index)), {"boxes": tv.Image(torch.ones(3, 2, 2))}))
    dataset = fastload.CachedDataset(made, by="sample")
    dataset.fill(num_workers=0)
    for batch_size in (4, 3):
        theirs = list(torch.utils.data.DataLoader(made, batch_size))
        assert_same_batches(theirs, list(fastload.DataLoader(dataset, batch_size)))
    images = fastload.CachedDataset(Made(lambda index: photo(0)), by="sample")
    images.fill(num_workers=0)
    with pytest.raises(TypeError, match="default_collate"):
        next(iter(fastload.DataLoader(images, 4)))


def test_torchvisions_transforms_get_what_the_dataset_returned(tv: Any) -> None:
    """Both generations of them draw the same and give the same over a cache, its misses and hits."""
    v1, v2 = (pytest.importorskip(f"torchvision.transforms{name}") for name in ("", ".v2"))
    pipelines = [
        v1.Compose([v1.RandomCrop(4), v1.RandomHorizontalFlip(), v1.ColorJitter(0.5), v1.ToTensor()]),
        torch.nn.Sequential(v1.RandomHorizontalFlip(0.5), v1.RandomRotation(9)),
        v1.RandomApply([v1.GaussianBlur(3)]),
        v2.Compose([v2.RandomCrop(4), v2.RandomHorizontalFlip(), v2.ColorJitter(0.5), v2.ToImage()]),
    ]
    for pipeline in pipelines:
        dataset = fastload.CachedDataset(Made(photo))
        dataset.transform = pipeline  # as timm does it
        for _ in range(2):
            torch.manual_seed(0)
            expected = [(pipeline(image), label) for image, label in map(photo, range(20))]
            torch.manual_seed(0)
            assert_same_samples([dataset[index] for index in range(20)], expected)


@pytest.mark.parametrize("make", [photo, lambda index: {"image": photo(index)[0]}])
def test_albumentations_gets_no_image_and_says_how_to_convert(make: Any) -> None:
    """It takes arrays alone."""
    dataset = fastload.CachedDataset(Made(make), A.HorizontalFlip(p=1))
    with pytest.raises(TypeError, match=r"pre_transform=.*numpy\.asarray\(image\.convert"):
        dataset[0]


def test_joint_transforms_move_stored_boxes_and_masks(tv: Any) -> None:
    """Of v2, over a sample with an image of Pillow's."""
    v2 = pytest.importorskip("torchvision.transforms.v2")

    def scene(index: int) -> Any:
        boxes = tv.BoundingBoxes([[1, 2, 3, 4 + index % 2]], format="XYXY", canvas_size=(6 + index % 3, 8))
        return photo(index)[0], {"boxes": boxes, "masks": tv.Mask(torch.eye(8)[: 6 + index % 3].bool())}

    pipeline = v2.Compose([v2.RandomHorizontalFlip(0.5), v2.RandomResize(8, 20), v2.ToImage()])
    dataset = fastload.CachedDataset(Made(scene), pipeline)
    for _ in range(2):
        torch.manual_seed(0)
        expected = [pipeline(scene(index)) for index in range(20)]
        torch.manual_seed(0)
        assert_same_samples([dataset[index] for index in range(20)], expected)
