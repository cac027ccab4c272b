"""Resizes that datasets begin with are remembered; those of random sizes leave nothing behind."""

from __future__ import annotations

import io
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from fastload.errors import DecodeMismatchError
from fastload.readers import patches
from fastload.readers.decode_cache import DecodeCache, inactive
from fastload.readers.front import NUM_EQUAL
from tests.kit.decoding import DictStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def active() -> Iterator[DictStore]:
    """A store that this thread uses."""
    with patches.installed(), DecodeCache(store := DictStore(), verify_share=0.0).active():
        yield store


def photo(width: int = 40, height: int = 30, mode: str = "RGB") -> bytes:
    """A PNG with pixels that differ."""
    shape = (height, width) if mode == "L" else (height, width, len(mode))
    content = np.random.default_rng(width).integers(0, 256, shape, np.uint8)
    Image.fromarray(content).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def opened(content: bytes) -> Image.Image:
    """Decoded already, if a cache is active."""
    return Image.open(io.BytesIO(content))


def thumbnail(image: Image.Image) -> Image.Image:
    image = image.copy()
    image.thumbnail((9, 9))
    return image


RESIZES: dict[str, Callable[[Any], Any]] = {
    "resize": lambda image: image.resize((12, 9), Image.Resampling.BILINEAR),
    "resize by default": lambda image: image.resize((12, 9)),
    "resize, nearest": lambda image: image.resize((12, 9), 0),
    "resize with a gap": lambda image: image.resize((5, 4), Image.Resampling.BICUBIC, reducing_gap=2.0),
    "reduce": lambda image: image.reduce(3),
    "reduce by two factors": lambda image: image.reduce((3, 2)),
    "reduce almost as much": lambda image: image.reduce((4, 2)),
    "thumbnail": thumbnail,
}


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize("name", RESIZES)
def test_a_remembered_resize_is_as_pillows(name: str, mode: str, active: DictStore) -> None:
    """In its pixels, also those that only Arrow shows, and in crops and copies of it."""
    content = photo(mode=mode)
    with inactive():
        expected = RESIZES[name](opened(content))
    for _ in range(NUM_EQUAL + 4):
        resized = RESIZES[name](opened(content).convert(mode))
        assert type(resized) is Image.Image
        assert (resized.mode, resized.size, resized.info) == (mode, expected.size, expected.info)
        assert resized.crop((1, 1, 4, 3)).tobytes() == expected.crop((1, 1, 4, 3)).tobytes()
        assert np.asarray(resized.copy()).tobytes() == expected.tobytes()
        if mode == "RGB":
            assert resized.tobytes("raw", "RGBX") == expected.tobytes("raw", "RGBX")


@pytest.mark.parametrize(
    "size_of",
    [
        lambda image: (8, 8),
        lambda image: (8, 8 * image.height // image.width),
        lambda image: (image.width * 10 // image.height, 10),
    ],
)
def test_a_resize_that_repeats_is_stored(size_of: Any, active: DictStore) -> None:
    """One size, one shorter or one longer side, for files of all sizes."""
    contents = [photo(width, 60) for width in range(61, 61 + NUM_EQUAL + 10)]
    for content in contents:
        opened(content).load()
    num_files = len(active.values)
    for content in contents:
        image = opened(content)
        image.resize(size_of(image)).load()
    assert len(active.values) == num_files + 10


def test_random_sizes_leave_nothing_behind(active: DictStore) -> None:
    """Of one file, or random boxes of it."""
    content = photo()
    for number in range(500):
        image = opened(content)
        image.resize((3 + number % 31, 3 + number % 37), Image.Resampling.BILINEAR).load()
        image.resize((8, 8), Image.Resampling.BICUBIC, (number % 7, 1, 30, 30)).load()
        image.crop((number % 7, 1, 30, 30)).resize((8, 8)).load()
    assert len(active.values) == 1


def test_a_wrong_result_is_an_error() -> None:
    """With a share of 1, each remembered result is computed again."""
    content = photo()
    with patches.installed(), DecodeCache(store := DictStore(), verify_share=1.0).active():
        for _ in range(NUM_EQUAL + 2):
            opened(content).copy().resize((8, 8)).load()
        assert len(store.values) == 1  # an image that was decoded again is not lazy
    with patches.installed(), DecodeCache(store, verify_share=0.0).active() as cache:
        for _ in range(NUM_EQUAL + 2):
            opened(content).copy().resize((8, 8)).load()
        for key, stored in store.values.items():
            store.values[key] = stored._replace(array=stored.array + np.uint8(stored.note is None))
        image = opened(content).copy()
        cache._verify_share = 1.0
        with pytest.raises(DecodeMismatchError):
            image.resize((8, 8))


@pytest.mark.parametrize(
    "size", [(8.0, 8), (np.int64(8), 8), [8, 8], np.array((8, 8)), (0, 8), (8, -1), "88", 8]
)
def test_odd_sizes_are_pillows_matter(size: Any, active: DictStore) -> None:
    """The same result or error, however often."""
    content = photo()

    def outcome() -> Any:
        try:
            return opened(content).copy().resize(size).tobytes()
        except Exception as error:  # noqa: BLE001 - compared with the other one's
            return type(error), str(error)

    with inactive():
        expected = outcome()
    assert [outcome() for _ in range(NUM_EQUAL + 4)] == list(itertools.repeat(expected, NUM_EQUAL + 4))
