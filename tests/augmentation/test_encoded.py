"""EncodedImage: a box has the pixels of the whole image, and a bad file the same error."""

from __future__ import annotations

import functools
import io
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from fastload.augmentation import regions
from fastload.augmentation.encoded import EncodedImage
from fastload.images.decode import decode

KINDS = ["4:4:4", "4:2:2", "4:2:0", "progressive", "restarts", "optimized", "rgb", "grey", "cmyk"]
OTHERS = ["png", "webp", "tiff", "gif"]


def noise(height: int, width: int) -> np.ndarray:
    """A picture of waves with noise, in which neighbouring pixels differ."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 7), np.cos(y / 5), np.sin((x + y) / 11)], axis=-1)
    pixels = 127 + 100 * waves + np.random.default_rng(0).normal(0, 12, waves.shape)
    return pixels.clip(0, 255).astype(np.uint8)


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@functools.lru_cache(maxsize=100)
def image_file(kind: str, height: int = 61, width: int = 83, orientation: int = 1) -> bytes:
    """The content of a file of this kind; height and width are those of the stored image."""
    options: dict[str, Any] = {"exif": exif_of(orientation)} if orientation != 1 else {}
    modes = {"grey": "L", "cmyk": "CMYK", "gif": "P"}
    image = Image.fromarray(noise(height, width)).convert(modes.get(kind, "RGB"))
    special: dict[str, dict[str, Any]] = {
        "progressive": {"progressive": True},
        "restarts": {"restart_marker_rows": 1},
        "optimized": {"optimize": True, "quality": 40},
        "rgb": {"keep_rgb": True},
    }
    options |= special.get(kind, {"subsampling": kind} if ":" in kind else {})
    file = io.BytesIO()
    image.save(file, kind if kind in [*OTHERS, "bmp", "ppm"] else "jpeg", **options)
    return file.getvalue()


def random_span(rng: np.random.Generator, length: int) -> tuple[int, int]:
    """A part of an axis: half of them are narrow, and many of these at an end."""
    start, stop = sorted(int(place) for place in rng.choice(length + 1, 2, replace=False))
    if rng.random() < 0.5:
        width = min(length, int(rng.integers(1, 6)))
        start = int(rng.choice([0, length - width, rng.integers(0, length - width + 1)]))
        stop = start + width
    return start, stop


def assert_boxes_are_parts(content: bytes, count: int, seed: int = 1) -> None:
    """Random boxes of a file have the pixels of the whole image, in arrays that the caller owns."""
    whole = decode(content, "whole")
    rng = np.random.default_rng(seed)
    image = EncodedImage("x", content)
    assert image.shape == whole.shape
    np.testing.assert_array_equal(image.decode(), whole)
    for _ in range(count):
        (y_min, y_max), (x_min, x_max) = (random_span(rng, side) for side in whole.shape[:2])
        box = x_min, y_min, x_max, y_max
        part = image.decode(box)
        np.testing.assert_array_equal(part, whole[y_min:y_max, x_min:x_max], err_msg=str(box))
        assert part.flags.c_contiguous
        part[:] = 0  # not that of the next call


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS + OTHERS)
@settings(max_examples=40)
@given(
    sides=st.tuples(st.integers(1, 130), st.integers(1, 130)),
    orientation=st.integers(1, 8),
    tail=st.sampled_from([b"", b"", b"\0" * 20, b"\0" * 100, b"padding of a camera" * 9]),
    decoder=st.booleans(),
    seed=st.integers(0, 99),
)
def test_boxes(kind: str, sides: Any, orientation: int, tail: bytes, decoder: bool, seed: int) -> None:
    """In files of every kind and size, turned as a viewer shows them, with and without nvImageCodec."""
    assume(not (tail and kind in OTHERS))
    with mock.patch.object(regions, "_codec", regions._codec if decoder else lambda: None):
        assert decoder or regions.name_of_decoder() is None
        assert_boxes_are_parts(image_file(kind, *sides, orientation) + tail, 20, seed)


def test_boxes_of_odd_files() -> None:
    """EXIF behind the frame turns the image, as for read_image; a file of several JPEGs is its first one."""
    plain, turned = image_file("4:2:0"), image_file("4:2:0", orientation=6)
    start, scan = turned.index(b"\xff\xe1"), plain.index(b"\xff\xda")
    exif = turned[start : start + 2 + int.from_bytes(turned[start + 2 : start + 4], "big")]
    assert_boxes_are_parts(plain[:scan] + exif + plain[scan:], 10)
    file = io.BytesIO()
    pictures = [Image.fromarray(noise(40, 50)[::step]) for step in (1, -1)]
    pictures[0].save(file, "MPO", save_all=True, append_images=pictures[1:])
    assert_boxes_are_parts(file.getvalue(), 10)


# --- the decoder of regions -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_shared", [True, False])
def test_threads_and_forks_decode_boxes(is_shared: bool) -> None:
    """Four threads decode boxes of one object, or of their own; so does a child forked afterwards."""
    content = image_file("4:2:0", 200, 300)
    whole, shared = decode(content, "x"), EncodedImage("x", content)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            image = shared if is_shared else EncodedImage("x", content)
            (y_min, y_max), (x_min, x_max) = (random_span(rng, side) for side in whole.shape[:2])
            found = image.decode((x_min, y_min, x_max, y_max))
            np.testing.assert_array_equal(found, whole[y_min:y_max, x_min:x_max])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    shared.decode((5, 5, 60, 50))  # this thread has a decoder now
    if (pid := os.fork()) == 0:
        try:
            work(9)
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
