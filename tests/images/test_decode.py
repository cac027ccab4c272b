"""read_image: every kind of file becomes the RGB that a viewer shows, or an error with its path."""

from __future__ import annotations

import io
import os
import pickle
import struct
import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from fastload.augmentation.encoded import EncodedImage
from fastload.errors import ImageReadError
from fastload.images import jpeg
from fastload.images.decode import decode, decode_image, read_image
from fastload.images.jpeg import opencv_pixels
from tests.augmentation.test_encoded import KINDS, OTHERS, exif_of, image_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.kit.processes import Interpreter

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def scene(height: int = 48, width: int = 64) -> np.ndarray:
    """A smooth picture without symmetry, which JPEG keeps well."""
    y, x = np.mgrid[:height, :width]
    channels = (255 * x / width, 255 * y / height, 255 * (x + 2 * y) / (width + 2 * height))
    return np.stack(channels, axis=-1).astype(np.uint8)


SCENE, SCENE_GREY = scene(), scene()[..., 0]


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """The mean distance in levels, after checking that the shapes agree."""
    assert got.shape == expected.shape
    return float(np.abs(got.astype(int) - expected.astype(int)).mean())


def saved(picture: Any, suffix: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    image.save(file, {"jpg": "jpeg", "tif": "tiff", "pgm": "ppm"}.get(suffix, suffix), **options)
    return file.getvalue()


def palette(indices: list[int], *colours: tuple[int, ...]) -> Image.Image:
    image = Image.fromarray(np.array([indices], np.uint8)).convert("P")
    image.putpalette([value for colour in colours for value in colour])
    return image


def transparent(mode: str) -> Image.Image:
    image = Image.fromarray(SCENE).convert(mode)
    image.putalpha(0)
    return image


def animation(suffix: str, **options: Any) -> bytes:
    first, second = (Image.new("RGB", (8, 8), colour) for colour in (GREEN, BLUE))
    return saved(first, suffix, save_all=True, append_images=[second], **options)


def greys(*values: int) -> np.ndarray:
    return np.array([[[value] * 3 for value in values]], np.uint8)


COLOURS = np.array([[RED, GREEN, BLUE]], np.uint8)
WIDE = np.array([[0, 255, 256, 0x1234, 0x80FF, 65535]], np.uint16)  # 16 bits keep their high byte
WIDE_RGB = cv2.imencode(".png", WIDE.reshape(1, 2, 3))[1].tobytes()  # whose first channel is blue
LUMA = np.asarray(Image.fromarray(SCENE).convert("L"))
ALPHA = bytes([255, 0, 128])
DAMAGED_EXIF = b"Exif\0\0MM\0*\0\0\0\x08\0\x03\x01\x12\0\x03"
LOSSLESS, LOSSLESS_GREY = ("png", "ppm", "bmp", "tif", "webp"), ("png", "pgm", "bmp", "tif")
FILES: dict[str, tuple[bytes, np.ndarray, float]] = {  # content, pixels, tolerance
    **{f"{end}, RGB": (saved(SCENE, end, lossless=True), SCENE, 0) for end in LOSSLESS},
    **{f"{end}, grey": (saved(SCENE_GREY, end), SCENE_GREY[..., None], 0) for end in LOSSLESS_GREY},
    **{f"16 bits, {end}": (saved(WIDE, end), greys(0, 0, 1, 0x12, 0x80, 255), 0) for end in ("png", "tif")},
    "jpg, RGB": (saved(SCENE, "jpg", quality=95), SCENE, 2),
    "jpg, grey": (saved(SCENE_GREY, "jpg"), SCENE_GREY[..., None], 2),
    "jpg, damaged EXIF": (saved(SCENE, "jpg", quality=95, exif=DAMAGED_EXIF), SCENE, 2),
    # Stored inverted, as Adobe does; magenta and yellow make red.
    "jpg, CMYK": (saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "jpg"), np.full((8, 8, 3), RED), 3),
    "one bit": (saved(np.array([[True, False]]), "png"), greys(255, 0), 0),
    "alpha over colours": (saved(transparent("RGBA"), "png"), SCENE, 0),  # they are kept
    "alpha over greys": (saved(transparent("LA"), "png"), LUMA[..., None], 0),
    "palette": (saved(palette([0, 1, 2], RED, GREEN, BLUE), "png"), COLOURS, 0),
    "palette, clear": (saved(palette([0, 1, 2], RED, GREEN, BLUE), "png", transparency=1), COLOURS, 0),
    "palette, alpha": (saved(palette([0, 1, 2], RED, GREEN, BLUE), "png", transparency=ALPHA), COLOURS, 0),
    "a transparent grey": (saved(SCENE_GREY, "png", transparency=0), SCENE_GREY[..., None], 0),
    "a transparent colour": (saved(SCENE, "png", transparency=(0, 0, 0)), SCENE, 0),
    "16 bits, pgm": (b"P5 6 1 65535\n" + WIDE.astype(">u2").tobytes(), greys(0, 0, 1, 0x12, 0x80, 255), 0),
    "16 bits, RGB": (WIDE_RGB, np.array([[[1, 0, 0], [255, 0x80, 0x12]]]), 0),
    "animation": (animation("webp", lossless=True, duration=50), np.full((8, 8, 3), GREEN), 0),
    "animated palette": (animation("gif"), np.full((8, 8, 3), GREEN), 0),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_its_colours(tmp_path: Path, name: str) -> None:
    """As a new, writable, C-contiguous HWC uint8 array; grey in three equal channels; the first frame."""
    content, expected, tolerance = FILES[name]
    (tmp_path / "image").write_bytes(content)
    image = read_image(tmp_path / "image")
    assert image.dtype == np.uint8
    assert image.flags.c_contiguous
    assert difference(image, np.broadcast_to(expected, (*expected.shape[:2], 3))) <= tolerance
    assert expected.shape[2] == 3 or (image == image[..., :1]).all()
    kept = image.copy()
    image[:] = 0
    assert np.array_equal(read_image(tmp_path / "image"), kept)


# --- orientation and size ---------------------------------------------------------------------------------


def turned(picture: np.ndarray, suffix: str, orientation: int) -> bytes:
    options: Any = {"lossless": True} if suffix == "webp" else {}
    return saved(picture, suffix, exif=exif_of(orientation), **options)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sides=st.tuples(st.integers(40, 400), st.integers(40, 400)),
    suffix=st.sampled_from(["jpg", "png", "webp", "tif"]),
    orientation=st.integers(1, 8),
    size=st.integers(16, 250) | st.tuples(st.integers(16, 250), st.integers(16, 250)) | st.none(),
)
@example(sides=(111, 1599), suffix="jpg", orientation=1, size=7)  # is decoded at an eighth, rounded
@example(sides=(97, 131), suffix="png", orientation=6, size=(333, 500))
def test_orientation_and_size(tmp_path: Path, sides: Any, suffix: str, orientation: int, size: Any) -> None:
    """Turned as by Pillow; an int is the shorter side, a pair is exact, None and its own change nothing."""
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(turned(scene(*sides), suffix, orientation))
    whole = read_image(path)
    with Image.open(path) as image:
        assert np.array_equal(whole, np.asarray(ImageOps.exif_transpose(image)))
    assert suffix == "jpg" or orientation != 1 or np.array_equal(whole, scene(*sides))
    height, width = whole.shape[:2]
    assert np.array_equal(read_image(path, (height, width)), whole)
    short, long = sorted((height, width))
    shape = size
    if isinstance(size, int):
        shape = (size, size * long // short) if height <= width else (size * long // short, size)
    picture, found = Image.fromarray(whole), read_image(path, size)
    expected = picture if size is None else picture.resize(shape[::-1], Image.Resampling.BILINEAR)
    assert found.flags.c_contiguous
    assert difference(found, np.asarray(expected)) < (1.5 if size else 1e-9)


def test_a_palette_is_resized_between_colours(tmp_path: Path) -> None:
    """Never between its indices."""
    palette([0, 2], RED, GREEN, RED).save(tmp_path / "a.png")
    assert np.array_equal(read_image(tmp_path / "a.png", (4, 4)), np.full((4, 4, 3), RED))


@pytest.mark.parametrize(
    ("error", "sizes"),
    [(ValueError, [0, -1, (4, 0)]), (TypeError, [2.5, "8", (1, 2, 3), (5,), (1.0, 2), ()])],
)
def test_impossible_sizes_are_named(error: type[Exception], sizes: list[Any]) -> None:
    """Before the file is opened."""
    for size in sizes:
        with pytest.raises(error, match="size should be"):
            read_image("missing.jpg", size)


# --- OpenCV's decoder and Pillow's ------------------------------------------------------------------------


SAMPLINGS = [0x111111, 0x211111, 0x221111, 0x411111, 0x121111]
GREY = 0


def noise_file(interval: int, sampling: int, is_progressive: int) -> bytes:
    """A JPEG of noise, 61 x 83, with a restart marker every `interval` MCUs."""
    noise = np.random.default_rng(0).integers(0, 256, (61, 83, 3), np.uint8)
    options = [cv2.IMWRITE_JPEG_RST_INTERVAL, interval, cv2.IMWRITE_JPEG_PROGRESSIVE, is_progressive]
    if sampling != GREY:
        options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling]
    return cv2.imencode(".jpg", noise if sampling != GREY else noise[..., 0], options)[1].tobytes()


def of_pillow(content: bytes) -> np.ndarray:
    """The same file, read by Pillow alone."""
    with mock.patch.object(jpeg, "_decoder", return_value=None):
        return decode(content, "x")


def outcome(read: Callable[[bytes], np.ndarray], content: bytes) -> tuple[Any, ...]:
    try:
        pixels = read(content)
    except ImageReadError as error:
        return ("raised", error.reason)
    return pixels.shape, pixels.tobytes()


@pytest.mark.parametrize("interval", [0, 3])
@pytest.mark.parametrize("is_progressive", [0, 1])
@pytest.mark.parametrize("sampling", [*SAMPLINGS, GREY])
def test_opencv_gives_pillows_pixels(sampling: int, is_progressive: int, interval: int) -> None:
    """Every sampling, sequential or progressive, with and without restart markers."""
    content = noise_file(interval, sampling, is_progressive)
    with Image.open(io.BytesIO(content)) as image:
        pixels = opencv_pixels(image)
    assert pixels is not None
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    np.testing.assert_array_equal(pixels, of_pillow(content))


@pytest.mark.slow
@settings(max_examples=700, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    orientation=st.sampled_from([1, 6]),
    doubled=st.sampled_from([None, b"\xff\xc0", b"\xff\xc4", b"\xff\xe0", b"\xff\xe1"]),
    data=st.data(),
)
def test_damage_has_pillows_outcome(kind: str, orientation: int, doubled: Any, data: st.DataObject) -> None:
    """Bytes changed, removed or put in, segments doubled: Pillow's pixels or error; headers say its size."""
    content = bytearray(image_file(kind, orientation=orientation))
    scan = content.index(b"\xff\xda")
    if doubled is not None and doubled in content[:scan]:
        start = content.index(doubled)
        segment = content[start : start + 2 + int.from_bytes(content[start + 2 : start + 4], "big")]
        content[scan:scan] = segment
        scan += len(segment)
    is_header = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(0 if doubled else 1, 3))):
        low, high = (2, scan + 14) if is_header else (scan, len(content))
        start = data.draw(st.integers(min(low, len(content)), min(high, len(content))))
        removed = data.draw(st.sampled_from([0, 1, 1, 2, 50, 10**6]))
        marker = st.integers(0, 255).map(lambda kind: bytes([0xFF, kind]))
        byte = st.binary(min_size=removed, max_size=removed) if removed < 3 else st.nothing()
        content[start : start + removed] = data.draw(st.binary(max_size=3) | marker | byte)
    if data.draw(st.booleans()):
        content += b"\xff\xd9"
    expected = outcome(of_pillow, bytes(content))
    assert outcome(lambda file: decode(file, "x"), bytes(content)) == expected
    if expected[0] != "raised":
        assert EncodedImage("x", bytes(content)).shape == expected[0]


@pytest.mark.parametrize("has_rgb", [True, False], ids=["other pixels", "before 4.11"])
def test_an_opencv_that_is_not_as_pillow_is_not_used(monkeypatch: pytest.MonkeyPatch, has_rgb: bool) -> None:
    """One pixel of one proof that differs is enough; releases before 4.11 have no RGB."""
    real = cv2.imdecode

    def imdecode(*args: Any) -> np.ndarray:
        pixels = real(*args)
        pixels[0, 0, 0] ^= 1
        return pixels

    if has_rgb:
        monkeypatch.setattr(cv2, "imdecode", imdecode)
    else:
        monkeypatch.delattr(cv2, "IMREAD_COLOR_RGB")
    jpeg._decoder.cache_clear()
    try:
        assert jpeg._decoder() is None
        np.testing.assert_array_equal(decode(image_file("4:2:0"), "x"), of_pillow(image_file("4:2:0")))
    finally:
        jpeg._decoder.cache_clear()


# --- the content of a file ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["4:2:0", "grey", "png"])
def test_decode_image_has_the_pixels_of_read_image(kind: str, tmp_path: Path) -> None:
    """Of bytes, and of arrays of them, read-only or with gaps; the result is new and writable."""
    content, path = image_file(kind, orientation=6), tmp_path / "a"
    path.write_bytes(content)
    array = np.frombuffer(content, np.uint8)
    gaps = np.repeat(array, 2)[::2]
    for data in (content, bytearray(content), memoryview(content), array, gaps):
        image = decode_image(data)
        assert np.array_equal(image, read_image(path))
        assert image.flags.writeable


def test_decode_image_says_what_it_got() -> None:
    """The number of bytes of what is no image, and the type, shape and dtype of what is no content."""
    for data, said in ((b"", "0 bytes.*empty"), (bytes(1234), "1,234 bytes.*not an image of a format")):
        with pytest.raises(ImageReadError, match=said):
            decode_image(data)
    with pytest.raises(ImageReadError, match="truncated"):
        decode_image(np.frombuffer(image_file("4:2:0"), np.uint8)[:-300])
    for wrong, said in (
        ("a.jpg", r"got 'a\.jpg': for a path, use fastload\.read_image"),
        (np.zeros((4, 4, 3), np.uint8), r"got an array \(4, 4, 3\) uint8"),
        (np.zeros(9, np.int8), r"got an array \(9,\) int8"),
    ):
        with pytest.raises(TypeError, match=said):
            decode_image(wrong)  # type: ignore[arg-type]


# --- bad files --------------------------------------------------------------------------------------------


def bomb() -> bytes:
    """A small file that promises 900 million pixels."""
    content = bytearray(saved(SCENE, "bmp"))
    struct.pack_into("<ii", content, 18, 30_000, 30_000)  # width, height
    return bytes(content)


SIGNED = np.ones((4, 4), np.uint16)  # with the tag SampleFormat, 2: elevations, computed tomography


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.jpg", None, "No such file"),
        ("", None, "Is a directory"),
        ("a\0b.jpg", None, r"embedded null byte$"),
        ("empty.jpg", b"", "empty"),
        ("text.jpg", b"hello " * 100, "not an image"),
        ("damaged.png", saved(SCENE, "png").replace(b"IDAT", b"ID\0T"), "."),
        ("bomb.bmp", bomb(), "900000000 pixels"),
        ("floats.tif", saved(np.ones((4, 4), np.float32), "tif"), "scale them to 8 bits"),
        ("ints.tif", saved(np.ones((4, 4), np.int32), "tif"), "32-bit numbers .*scale them to 8 bits"),
        (
            "signed.tif",
            saved(SIGNED, "tif", tiffinfo={339: 2}),
            "signed 16-bit numbers .*scale them to 8 bits",
        ),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: Any, reason: str) -> None:
    """It says what is wrong, crosses a process border, and an EncodedImage raises the same."""
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ImageReadError, match=reason) as caught:
        read_image(path)
    with pytest.raises(ImageReadError) as of_encoded:
        EncodedImage(str(path)).decode()
    error, copy = caught.value, pickle.loads(pickle.dumps(caught.value))
    assert error.path == str(path)
    assert repr(str(path)) in str(error) == str(of_encoded.value)
    assert error.__cause__ is not None
    assert (copy.path, copy.reason, str(copy)) == (error.path, error.reason, str(error))
    if not content or name == "text.jpg":  # has no header
        with pytest.raises(ImageReadError) as of_shape:
            _ = EncodedImage(str(path)).shape
        assert str(of_shape.value) == str(error)


@pytest.mark.parametrize("kind", ["4:2:0", "progressive", "restarts", *OTHERS, "bmp", "ppm"])
def test_a_file_cut_anywhere_is_an_error(kind: str, tmp_path: Path) -> None:
    """Never a picture with a grey half; a box of it raises exactly where the whole picture does."""
    content = image_file(kind)
    path = tmp_path / "cut"
    for end in {0, 1, 2, 3, 20, *range(30, len(content), len(content) // 40), len(content) - 1}:
        path.write_bytes(content[:end])
        found = []
        for read in (lambda: read_image(path), lambda: EncodedImage(str(path)).decode((1, 1, 9, 9))):
            try:
                found.append(read() is None)
            except ImageReadError as error:
                found.append(str(path) in str(error))
        assert found == [True, True] if end < len(content) - 50 else found[0] == found[1]


def test_lack_of_memory_is_not_the_files_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MemoryError stays MemoryError."""
    Image.fromarray(SCENE_GREY).save(tmp_path / "a.png")
    monkeypatch.setattr(Image.Image, "convert", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        read_image(tmp_path / "a.png")


def test_only_pillows_warnings_of_damaged_tags_are_silenced(tmp_path: Path) -> None:
    """By one filter for all reads, as each new one makes others warn again."""
    (tmp_path / "a.jpg").write_bytes(saved(SCENE, "jpg", exif=DAMAGED_EXIF))
    with warnings.catch_warnings():
        read_image(tmp_path / "a.jpg")
        filters = list(warnings.filters)
        read_image(tmp_path / "a.jpg")
        assert list(warnings.filters) == filters
        with pytest.warns(UserWarning, match="mine"):
            warnings.warn("mine", stacklevel=1)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_pillows_limit_of_pixels_holds(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to it nothing happens, for JPEGs too; above it Pillow warns, or raises its warning or its error."""
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(SCENE).save(path)
    expected = of_pillow(path.read_bytes())
    jpeg._decoder.cache_clear()  # what it compares first has more pixels than this limit
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", SCENE_GREY.size)
    assert jpeg._decoder() is not None
    assert np.array_equal(read_image(path), expected)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", SCENE_GREY.size - 1)
    with pytest.warns(Image.DecompressionBombWarning, match="3072 pixels"):
        assert np.array_equal(read_image(path), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Image.DecompressionBombWarning):
            read_image(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", SCENE_GREY.size // 2 - 1)
    with pytest.raises(ImageReadError, match=r"3072 pixels") as caught:
        read_image(path)
    assert isinstance(caught.value.__cause__, Image.DecompressionBombError)


def test_no_file_stays_open(tmp_path: Path) -> None:
    """After a read, good or bad, no descriptor points to the file."""
    good, bad = tmp_path / "good.tif", tmp_path / "bad.jpg"
    Image.fromarray(SCENE).save(good, save_all=True, append_images=[Image.fromarray(SCENE)])
    bad.write_bytes(saved(SCENE, "jpg")[:-200])
    read_image(good)
    with pytest.raises(ImageReadError):
        read_image(bad)
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    held = [os.readlink(link) for link in links if os.path.islink(link)]  # the listing's own has gone
    assert not [target for target in held if str(tmp_path) in target]


def test_reading_images_imports_no_opencv(interpreter: Interpreter) -> None:
    """It needs Pillow and numpy; OpenCV and torchvision are not imported."""
    code = "import sys, fastload.images.decode; print({'cv2', 'torchvision'} & set(sys.modules))"
    assert interpreter.run(code).stdout.strip() == "set()"
