"""The samples of the soak: each is a function of its index and of its group, which determines the shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

SIDES = (4, 1, 9, 2, 33, 6, 90)  # of images, by group
BIG_SIDES = (700, 500, 900)  # 0.75 to 2.4 MB an image

# All values are below these limits, so that each dtype holds them exactly: bfloat16 keeps 8 significant bits.
_LIMITS = {"bool": 2, "int8": 127, "uint8": 251, "bfloat16": 251, "float16": 2039}
_LIMIT_OF_OTHERS = 32749

_TENSORS = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
_ARRAYS = ["bool", "uint8", "int16", "uint16", "int64", "float16", "float32", "float64", "complex128"]


def values(index: int, shape: tuple[int, ...], dtype: str, salt: int) -> np.ndarray[Any, Any]:
    """Whole numbers below the dtype's limit; neighbouring elements differ, and so do neighbouring indices."""
    count, limit = int(np.prod(shape)), _LIMITS.get(dtype, _LIMIT_OF_OTHERS)
    # The series has the period `limit`: computing one period is enough for a big array.
    series = (np.arange(min(count, limit)) * 7 + index * 31 + salt * 17) % limit
    return np.resize(series, count).reshape(shape) if count else np.zeros(shape, np.int64)


def array(index: int, shape: tuple[int, ...], dtype: str = "uint8", salt: int = 0) -> np.ndarray[Any, Any]:
    return values(index, shape, dtype, salt).astype(dtype)


def tensor(index: int, shape: tuple[int, ...], dtype: str = "float32", salt: int = 0) -> torch.Tensor:
    return torch.from_numpy(values(index, shape, dtype, salt)).to(getattr(torch, dtype))


def side_of(group: int) -> int:
    return SIDES[group % len(SIDES)]


def labelled(index: int, group: int) -> Any:
    side = side_of(group)
    return array(index, (side, side + 1, 3)), index


def planes(index: int, group: int) -> Any:
    """An image whose channels come first."""
    side = side_of(group)
    return {"image": tensor(index, (3, side + 4, side + 5)), "label": torch.tensor(index)}


def big(index: int, group: int) -> Any:
    side = BIG_SIDES[group % len(BIG_SIDES)]
    return array(index, (side, side, 3)), index


def dtypes(index: int, group: int) -> Any:
    """A tensor and an array of each dtype."""
    side, names = side_of(group), [*_TENSORS, "complex64"]
    tensors = {dtype: tensor(index, (2, side), dtype, salt) for salt, dtype in enumerate(names)}
    return tensors, [array(index, (side, 3), dtype, salt) for salt, dtype in enumerate(_ARRAYS)]


def nest(index: int, group: int) -> Any:
    side, word = side_of(group), f"bild-\N{LATIN SMALL LETTER A WITH DIAERESIS}-{index}"
    return {
        "image": array(index, (side, 3, 2)),
        "point": (tensor(index, (2,), "bfloat16"), {"z": tensor(index, (side,), "int64", 1)}),
        "pair": (torch.tensor(float(index)), [index, array(index, (2, side), "int64", 2)]),
        "texts": [word * (index % 4), (word, bytes([index % 256]) * (index % 9))],
        "numbers": [
            index,
            index / 2,
            index % 2 == 0,
            np.float32(index),
            np.int16(index),
            torch.tensor(index),
        ],
        "nothing": {},
        "empty array": np.zeros((0, side), np.float32),
        "empty tensor": torch.empty(side, 0, dtype=torch.int16),
        "after": array(index, (side,), "int32"),
    }


def strided(index: int, group: int) -> Any:
    """Elements that do not lie one behind the other; the same tensor in several places."""
    side, one = side_of(group), tensor(index, (side_of(group), 2))
    return {
        "turned array": array(index, (side, side + 1, 2)).transpose(2, 0, 1),
        "turned tensor": tensor(index, (side, side + 2)).T,
        "every other": array(index, (2 * side,), "float64")[::2],
        "expanded": tensor(index, (1,), "int32").expand(side),
        "same": [one, one, one[:1]],
    }


def plain_colour(index: int, group: int) -> Any:
    """An image of one colour: all crops of one size are equal."""
    side = 8 + side_of(group) % 10
    return {"image": np.broadcast_to(array(index, (3,)), (side, side + 1, 3)).copy(), "label": index}


def known_draws(index: int, group: int) -> Any:
    """The part of a sample that does not depend on random numbers."""
    return {"index": index}


class Kind(NamedTuple):
    """A kind of sample."""

    make: Callable[[int, int], Any]
    has_shapes: bool = True  # the group determines the shapes
    is_big: bool = False
    transforms: tuple[str, ...] = ("none", "alias")


_OF_IMAGES = ("none", "in place", "rarely in place", "part", "as tensor")

KINDS = {
    "labelled": Kind(labelled, transforms=_OF_IMAGES),
    "planes": Kind(planes),
    "big": Kind(big, is_big=True, transforms=_OF_IMAGES),
    "dtypes": Kind(dtypes),
    "nest": Kind(nest),
    "strided": Kind(strided),
    "plain colour": Kind(plain_colour, transforms=("none", "crop to tensor")),
    "draws": Kind(known_draws, has_shapes=False, transforms=("draws",)),
}
