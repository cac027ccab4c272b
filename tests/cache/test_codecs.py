"""Codecs: which leaves they apply to, that exact ones are exact, and that half a file is no image."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage import data as photographs

from fastload.cache.codecs import CODECS, check_codec, codec_of_leaf, decode_image, encode_image
from fastload.cache.record import decode, record_parts
from fastload.errors import CacheCorruptError
from fastload.nested.leaves import Leaf
from fastload.nested.spec import flatten
from tests.cache.zoo import Everything
from tests.kit.batches import assert_same_samples

_SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 40)).flatmap(
    lambda side: st.sampled_from([side, (*side, 1), (*side, 3)])
)


def record(sample: Any, codec: str, quality: int = 95) -> bytes:
    return b"".join(record_parts(*flatten(sample), codec, quality)[0])


def noise(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.random.RandomState(0).randint(0, 256, shape, np.uint8)


@given(_SHAPES, st.sampled_from([("raw", 1), ("png", 1), ("webp", 100)]))
@settings(deadline=None, max_examples=60)
def test_exact_codecs_are_exact(shape: tuple[int, ...], way: tuple[str, int]) -> None:
    """raw, png, and webp of quality 100 give back every pixel, C-contiguous and read-only."""
    image = noise(shape)
    back = decode(record({"image": image, "label": 3}, *way))

    assert_same_samples(back, {"image": image, "label": 3})
    assert back["image"].flags.c_contiguous
    assert not back["image"].flags.writeable


@pytest.mark.parametrize("codec", ["jpeg", "webp"])
def test_lossy_codecs_are_close(codec: str) -> None:
    """A photograph survives quality 95 with a small mean error, in far fewer bytes."""
    image = np.ascontiguousarray(photographs.astronaut())
    text = record(image, codec)
    back = decode(text)

    assert (back.shape, back.dtype) == (image.shape, image.dtype)
    assert 0 < np.abs(back.astype(int) - image).mean() < 3
    assert len(text) < image.nbytes / 3


def test_lower_quality_takes_fewer_bytes() -> None:
    """Quality reaches the encoder."""
    image = np.ascontiguousarray(photographs.astronaut())

    for codec in ("jpeg", "webp"):
        assert len(record(image, codec, 30)) < len(record(image, codec, 90))


@pytest.mark.parametrize("codec", CODECS)
def test_one_channel_is_exact_in_every_codec(codec: str) -> None:
    """One channel may be a mask: its numbers never change, whatever the codec."""
    mask = noise((33, 21)) % 5
    back = decode(record((noise((33, 21, 3)), mask, mask[:, :, None]), codec, 50))

    np.testing.assert_array_equal(back[1], mask)
    np.testing.assert_array_equal(back[2], mask[:, :, None])


@pytest.mark.parametrize("codec", CODECS)
def test_other_leaves_stay_as_they_are(codec: str) -> None:
    """Leaves that are no images come back exactly, in every codec."""
    sample = Everything(3).sample(1)
    del sample["image"]
    sample["arrays"] = [noise((2, 3, 4)), noise((5,)), noise((0, 3, 3)), noise((4, 4, 3)).astype(np.int16)]

    assert_same_samples(decode(record(sample, codec)), sample)


@pytest.mark.parametrize(
    ("leaf", "way"),
    [
        (Leaf("array", "|u1", (8, 8, 3)), "jpeg"),
        (Leaf("array", "|u1", (8, 8, 1)), "png"),
        (Leaf("array", "|u1", (8, 8)), "png"),
        (Leaf("array", "|u1", (8, 8, 4)), "raw"),
        (Leaf("array", "|u1", (8,)), "raw"),
        (Leaf("array", "|u1", (2, 8, 8, 3)), "raw"),
        (Leaf("array", "|i1", (8, 8, 3)), "raw"),
        (Leaf("tensor", "uint8", (8, 8, 3)), "raw"),
        (Leaf("array", "|u1", (20_000, 8, 3)), "raw"),
        (Leaf("array", "|u1", (10_000, 10_000, 3)), "raw"),
        (Leaf("str"), "raw"),
    ],
)
def test_what_a_codec_applies_to(leaf: Leaf, way: str) -> None:
    """Images of one or three channels, of sides that every format can hold."""
    assert codec_of_leaf("jpeg", leaf) == way


@pytest.mark.parametrize("codec", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("quality", [90, 100])
def test_cut_short_is_corrupt(codec: str, quality: int) -> None:
    """No beginning of an image file is an image."""
    leaf = Leaf("array", "|u1", (40, 40, 3))
    whole = encode_image(codec, noise((40, 40, 3)), quality)
    assert decode_image(codec, whole, leaf).shape == (40, 40, 3)
    for end in [*range(0, len(whole), 97), len(whole) - 2, len(whole) - 1]:
        with pytest.raises(CacheCorruptError, match=f"^a record's {codec} image of .* bytes is cut short$"):
            decode_image(codec, whole[:end], leaf)


@pytest.mark.parametrize("codec", ["jpeg", "png", "webp"])
def test_image_of_another_shape_is_corrupt(codec: str) -> None:
    """An image that is not of the leaf's size and channels raises."""
    whole = encode_image(codec, noise((8, 9, 3)), 90)
    for shape in [(9, 8, 3), (8, 9), (8, 9, 1), (4, 9, 3)]:
        with pytest.raises(CacheCorruptError, match=f"^a record's {codec} image .* cannot be read: "):
            decode_image(codec, whole, Leaf("array", "|u1", shape))


def test_codec_of_no_number_is_corrupt() -> None:
    """A record that names a codec that there is not raises."""
    text = bytearray(record(1, "raw"))
    text[6] = 9
    with pytest.raises(CacheCorruptError, match="codec 9"):
        decode(bytes(text))


@pytest.mark.parametrize(
    ("codec", "quality", "message"),
    [
        ("gif", 90, "^codec should be one of .* got 'gif'$"),
        ("raw", 0, "^quality should be an int from 1 to 100, but got 0$"),
        ("jpeg", 101, "^quality should be an int from 1 to 100, but got 101$"),
        ("jpeg", True, "^quality should be an int from 1 to 100, but got True$"),
    ],
)
def test_what_there_is_not(codec: str, quality: int, message: str) -> None:
    """Unknown codecs and qualities raise."""
    with pytest.raises(ValueError, match=message):
        check_codec(codec, quality)
