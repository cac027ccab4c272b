"""Samples that hold undecoded images: how they are found, measured and decoded."""

from __future__ import annotations

from math import prod
from typing import Any

from fastload.images.encoded import EncodedImage
from fastload.nested.spec import is_namedtuple
from fastload.nested.tree import leaves, map_leaves


def holds_images(sample: Any) -> bool:
    """Whether a sample holds an undecoded image."""
    return any(type(leaf) is EncodedImage for leaf in leaves(sample))


def check_headers(sample: Any) -> None:
    """Read the header of each undecoded image.

    Raises:
        ImageReadError: A file cannot be read, or is no image.
    """
    for leaf in leaves(sample):
        if type(leaf) is EncodedImage:
            _ = leaf.shape


def decoded_nbytes(sample: Any) -> int:
    """About how many bytes a sample takes with decoded images; only headers are read."""
    return sum(
        prod(leaf.shape) if type(leaf) is EncodedImage else getattr(leaf, "nbytes", 8)
        for leaf in leaves(sample)
    )


def decode_images(sample: Any) -> Any:
    """The sample with decoded images, `(H, W, 3) uint8` RGB each.

    Raises:
        ImageReadError: An image cannot be decoded.
    """
    return map_leaves(sample, lambda leaf: leaf.decode() if type(leaf) is EncodedImage else leaf)


def decode_others(sample: Any) -> Any:
    """The sample with decoded images, except for the image of an albumentations pipeline.

    This is the value of `"image"` in a dict, the first one in a tuple or list, or the sample itself.

    Raises:
        ImageReadError: An image cannot be decoded.
    """
    if isinstance(sample, EncodedImage):
        return sample
    others = {**sample, "image": None} if isinstance(sample, dict) else [None, *sample[1:]]
    decoded = decode_images(others)
    if isinstance(sample, dict):
        return {**decoded, "image": sample["image"]}
    values = [sample[0], *decoded[1:]]
    if is_namedtuple(sample):
        return type(sample)._make(values)
    return tuple(values) if isinstance(sample, tuple) else values
