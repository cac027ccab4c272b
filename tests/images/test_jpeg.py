"""Claims of the faster decoder of JPEGs: Pillow's pixels or Pillow's error, for every file."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastload.errors import ImageReadError
from fastload.images import jpeg
from fastload.images.decode import _opened, _read, decode, read_image
from fastload.images.jpeg import decode_jpeg, parse_jpeg

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEIGHT, WIDTH = 61, 83
SAMPLINGS = {"4:4:4": 0x111111, "4:2:2": 0x211111, "4:2:0": 0x221111, "4:1:1": 0x411111, "4:4:0": 0x121111}
KINDS = [*SAMPLINGS, "grey"]


@functools.cache
def jpeg_file(kind: str, is_progressive: bool = False, restart_interval: int = 0) -> bytes:
    """A JPEG of noise."""
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    options = [
        cv2.IMWRITE_JPEG_PROGRESSIVE,
        int(is_progressive),
        cv2.IMWRITE_JPEG_RST_INTERVAL,
        restart_interval,
    ]
    if kind in SAMPLINGS:
        options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLINGS[kind]]
    return cv2.imencode(".jpg", noise if kind in SAMPLINGS else noise[..., 0], options)[1].tobytes()


def of_pillow(content: bytes) -> np.ndarray:
    """The same file, read by Pillow alone."""
    return _opened(content, "x", lambda image: _read(image, None, 1))


def outcome(read: Any, content: bytes) -> tuple[Any, ...]:
    try:
        pixels = read(content)
    except ImageReadError as error:
        return ("raised", error.reason)
    return pixels.shape, pixels.tobytes()


@pytest.fixture
def other_decoder() -> Iterator[None]:
    """OpenCV is looked at again, now and after the test."""
    jpeg._decoder.cache_clear()
    yield
    jpeg._decoder.cache_clear()


@pytest.mark.parametrize("restart_interval", [0, 3])
@pytest.mark.parametrize("is_progressive", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_files_are_decoded_to_pillows_pixels(
    kind: str, is_progressive: bool, restart_interval: int
) -> None:
    """OpenCV decodes every sampling, sequential or progressive, with and without restart markers."""
    content = jpeg_file(kind, is_progressive, restart_interval)
    header = parse_jpeg(content)
    assert header is not None

    pixels = decode_jpeg(content, header)

    assert pixels is not None
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    np.testing.assert_array_equal(pixels, of_pillow(content))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_picture(orientation: int) -> None:
    """The picture is turned by its EXIF tag, once."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.open(io.BytesIO(jpeg_file("4:2:0"))).save(file, "jpeg", exif=exif)

    np.testing.assert_array_equal(decode(file.getvalue(), "x"), of_pillow(file.getvalue()))


def test_cmyk_is_left_to_pillow() -> None:
    """OpenCV converts CMYK to other colours."""
    file = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 4), np.uint8), "CMYK").save(file, "jpeg")

    assert parse_jpeg(file.getvalue()) is None


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    is_progressive=st.booleans(),
    restart_interval=st.sampled_from([0, 3]),
    data=st.data(),
)
def test_a_damaged_file_has_pillows_outcome(
    kind: str, is_progressive: bool, restart_interval: int, data: st.DataObject
) -> None:
    """Bytes that are changed, removed or put in anywhere: Pillow's pixels, or Pillow's error."""
    content = bytearray(jpeg_file(kind, is_progressive, restart_interval))
    scan = content.index(b"\xff\xda")
    is_header = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 3))):
        low, high = (2, scan) if is_header else (scan, len(content))
        start = data.draw(st.integers(min(low, len(content)), min(high, len(content))))
        removed = data.draw(st.sampled_from([0, 1, 2, 50, 10**6]))
        marker = st.integers(0, 255).map(lambda kind: bytes([0xFF, kind]))
        content[start : start + removed] = data.draw(st.binary(max_size=3) | marker)
    if data.draw(st.booleans()):
        content += b"\xff\xd9"

    assert outcome(lambda file: decode(file, "x"), bytes(content)) == outcome(of_pillow, bytes(content))


@pytest.mark.parametrize("length", [2, 20, 400, 1000, -100, -3, -2, -1])
def test_a_file_that_is_cut_short_raises(tmp_path: Path, length: int) -> None:
    """OpenCV is not asked for a file without an end."""
    path = tmp_path / "a.jpg"
    path.write_bytes(jpeg_file("4:2:0")[:length])
    expected = outcome(of_pillow, path.read_bytes())

    assert outcome(read_image, path) == expected


@pytest.mark.usefixtures("other_decoder")
def test_an_opencv_of_other_pixels_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one pixel of one proof differs from Pillow's, Pillow decodes."""
    real = cv2.imdecode

    def imdecode(*args: Any) -> np.ndarray:
        pixels = real(*args)
        pixels[0, 0, 0] ^= 1
        return pixels

    monkeypatch.setattr(cv2, "imdecode", imdecode)

    assert jpeg._decoder() is None
    np.testing.assert_array_equal(decode(jpeg_file("4:2:0"), "x"), of_pillow(jpeg_file("4:2:0")))


@pytest.mark.usefixtures("other_decoder")
def test_an_old_opencv_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases before 4.11 have no RGB."""
    monkeypatch.delattr(cv2, "IMREAD_COLOR_RGB")

    np.testing.assert_array_equal(decode(jpeg_file("grey"), "x"), of_pillow(jpeg_file("grey")))
    assert jpeg._decoder() is None
