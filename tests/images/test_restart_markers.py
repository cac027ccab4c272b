"""A region of a JPEG with restart markers, cut at them, has the pixels of the whole image."""

from __future__ import annotations

import io
import re
from typing import Any
from unittest import mock

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastload.errors import ImageReadError
from fastload.images import jpeg, regions
from fastload.images.decode import decode
from fastload.images.encoded import EncodedImage
from fastload.images.geometry import apply_orientation
from fastload.images.regions import decode_region
from fastload.images.restart_markers import crop_jpeg
from tests.images.test_encoded import exif_of

SAMPLINGS = [0x111111, 0x211111, 0x221111, 0x411111, 0x121111]
GREY = 0


def marked_file(height: int, width: int, interval: int, sampling: int = 0x221111, *more: int) -> bytes:
    """A JPEG of noise with a restart marker every `interval` MCUs."""
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    options = [cv2.IMWRITE_JPEG_RST_INTERVAL, interval, *more]
    if sampling != GREY:
        options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling]
    return cv2.imencode(".jpg", noise if sampling != GREY else noise[..., 0], options)[1].tobytes()


def turned_file(content: bytes, orientation: int) -> bytes:
    """The same JPEG with an EXIF orientation."""
    tag = exif_of(orientation).tobytes()
    return content[:2] + b"\xff\xe1" + (len(tag) + 2).to_bytes(2, "big") + tag + content[2:]


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """All samplings and sizes, some progressive; intervals divide a row of MCUs, are rows, or neither."""
    height, width = draw(st.integers(1, 150)), draw(st.integers(1, 150))
    row = -(-width // 16)
    interval = draw(st.sampled_from([1, 2, 3, row, 2 * row, 3 * row]) | st.integers(1, 40))
    progressive = cv2.IMWRITE_JPEG_PROGRESSIVE, draw(st.sampled_from([0, 0, 0, 1]))
    return marked_file(height, width, interval, draw(st.sampled_from([*SAMPLINGS, GREY])), *progressive)


def draw_box(data: st.DataObject, height: int, width: int) -> tuple[int, int, int, int]:
    x_min, y_min = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    return x_min, y_min, data.draw(st.integers(x_min + 1, width)), data.draw(st.integers(y_min + 1, height))


def assert_is_part(content: bytes, box: tuple[int, int, int, int], whole: np.ndarray) -> None:
    x_min, y_min, x_max, y_max = box
    region = decode_region(content, box, "x")
    if region is not None:
        np.testing.assert_array_equal(region, whole[y_min:y_max, x_min:x_max])


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["OpenCV", "Pillow", "nvImageCodec"])
@settings(max_examples=120, deadline=None)
@given(content=files(), orientation=st.integers(1, 8), data=st.data())
def test_regions_are_parts(decoder: str, content: bytes, orientation: int, data: Any) -> None:
    """Regions of a file with markers are parts of the whole as a viewer shows it, by each decoder."""
    found = None if decoder == "Pillow" else jpeg._decoder()
    codec = regions._codec() if decoder == "nvImageCodec" else None
    with (
        mock.patch.object(jpeg, "_decoder", return_value=found),
        mock.patch.object(regions, "_codec", return_value=codec),
    ):
        image = EncodedImage(turned_file(content, orientation))
        whole = apply_orientation(decode(content, "x"), orientation)
        for _ in range(4):
            box = x_min, y_min, x_max, y_max = draw_box(data, *whole.shape[:2])
            np.testing.assert_array_equal(image.decode(box), whole[y_min:y_max, x_min:x_max])


@pytest.mark.parametrize("sampling", [*SAMPLINGS, GREY])
@pytest.mark.parametrize("width", [65, 66, 68, 69, 72])
@mock.patch.object(regions, "_codec", return_value=None)
def test_columns_at_the_edge(codec: Any, sampling: int, width: int) -> None:
    """libjpeg-turbo does not interpolate colours in pictures of four columns, which an interval can have."""
    content = marked_file(40, width, 1, sampling)
    whole = decode(content, "x")
    for x_min in range(width - 6, width):
        assert crop_jpeg(content, (x_min, 3, width, 30)) is not None
        assert_is_part(content, (x_min, 3, width, 30), whole)


@pytest.mark.parametrize("sampling", [*SAMPLINGS, GREY])
@pytest.mark.parametrize(("interval", "share"), [(1, 0.35), (4, 0.4), (32, 0.6), (64, 0.8), (5, 0.9)])
def test_a_cut_is_a_part_of_the_file(sampling: int, interval: int, share: float) -> None:
    """The intervals in a region are kept: single ones, or whole rows if rows do not begin with markers."""
    content = marked_file(512, 512, interval, sampling)
    cut = crop_jpeg(content, (200, 200, 300, 300))
    assert cut is not None
    assert len(cut.content) < share * len(content)
    assert_is_part(content, (200, 200, 300, 300), decode(content, "x"))


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["OpenCV", "nvImageCodec"])
@settings(max_examples=250, deadline=None)
@given(content=files(), data=st.data())
def test_a_damaged_file_never_has_other_pixels(decoder: str, content: bytes, data: st.DataObject) -> None:
    """Bytes changed, removed and put in, intervals lost and doubled, false headers, and files cut short."""
    damaged = bytearray(content)
    scan = content.index(b"\xff\xda")
    for _ in range(data.draw(st.integers(1, 3))):
        places = [match.start() for match in re.finditer(rb"\xff[\xd0-\xd7]", damaged[scan:])]
        start = data.draw(st.integers(scan, len(damaged)))
        kind = data.draw(st.sampled_from(["bytes", "header", "number", "marker", "interval", "end"]))
        if kind == "bytes":
            damaged[start : start + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=3))
        elif kind == "header":
            damaged[data.draw(st.integers(2, scan - 1))] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "number":
            damaged[content.index(b"\xff\xdd") + 5] = data.draw(st.integers(0, 40))
        elif kind == "marker":
            damaged[start:start] = bytes([0xFF, data.draw(st.integers(0xD0, 0xD9))])
        elif kind == "end":
            del damaged[start:]
        elif len(places) > 1:
            number = data.draw(st.integers(0, len(places) - 2))
            interval = slice(scan + places[number], scan + places[number + 1])
            damaged[interval] = damaged[interval] * data.draw(st.sampled_from([0, 2]))
    try:
        whole = decode(bytes(damaged), "x")
    except ImageReadError:
        whole = np.zeros((0, 0, 3), np.uint8)
    height, width = decode(content, "x").shape[:2] if whole.size == 0 else whole.shape[:2]
    box = draw_box(data, height, width)
    if crop_jpeg(bytes(damaged), box) is None:
        return
    codec = regions._codec() if decoder == "nvImageCodec" else None
    with mock.patch.object(regions, "_codec", return_value=codec):
        try:
            assert_is_part(bytes(damaged), box, whole)
        except ImageReadError:
            assert whole.size == 0


def cmyk_file() -> bytes:
    """A JPEG of four components with restart markers."""
    file = io.BytesIO()
    Image.new("CMYK", (64, 64), (10, 20, 30, 40)).save(file, "jpeg", restart_marker_blocks=2)
    return file.getvalue()


MARKED = marked_file(64, 64, 2)
UNCUT = {
    "missing": MARKED.replace(b"\xff\xd1", b"", 1),
    "out of order": MARKED.replace(b"\xff\xd2", b"\xff\xd3", 1),
    "too many": MARKED.replace(b"\xff\xd2", b"\xff\xd2\xff\xd3", 1),
    "filled": MARKED.replace(b"\xff\xd2", b"\xff\xff\xd2", 1),
    "end inside": MARKED.replace(b"\xff\xd2", b"\xff\xd9", 1),
    "no end": MARKED[:-2],
    "a false interval": MARKED.replace(b"\xff\xdd\x00\x04\x00\x02", b"\xff\xdd\x00\x04\x00\x03"),
    "without markers": marked_file(64, 64, 0),
    "progressive": marked_file(64, 64, 2, 0x221111, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    "CMYK": cmyk_file(),
    "no picture": b"not a picture",
}


@pytest.mark.parametrize("name", UNCUT)
def test_other_files_are_not_cut(name: str) -> None:
    """Ones whose markers are not those of their header, and other kinds; nor where all of it is needed."""
    assert crop_jpeg(MARKED, (0, 0, 8, 8)) is not None
    assert UNCUT[name] != MARKED
    assert crop_jpeg(UNCUT[name], (0, 0, 8, 8)) is None
    assert crop_jpeg(MARKED, (0, 0, 64, 64)) is None


@pytest.mark.parametrize("name", UNCUT)
@mock.patch.object(regions, "_codec", return_value=None)
def test_other_files_are_decoded_in_full(codec: Any, name: str) -> None:
    """A region is that part of the whole image, or the error that the whole image raises."""
    try:
        whole = decode(UNCUT[name], "x")
    except ImageReadError as error:
        with pytest.raises(ImageReadError, match=re.escape(error.reason)):
            EncodedImage.of(UNCUT[name], "x").decode((5, 9, 40, 33))
    else:
        found = EncodedImage.of(UNCUT[name], "x").decode((5, 9, 40, 33))
        np.testing.assert_array_equal(found, whole[9:33, 5:40])
