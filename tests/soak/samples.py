"""The samples of the soak: each is a function of its index and of its group, which determines the shapes."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.utils.data as tud

import fastload

if TYPE_CHECKING:
    from collections.abc import Callable

Point = collections.namedtuple("Point", ["x", "y"])

SIDES = (4, 1, 9, 2, 33, 6, 90)  # of images, by group
BIG_SIDES = (700, 500, 900)  # 0.75 to 2.4 MB an image

# All values are below these limits, so that each dtype holds them exactly: bfloat16 keeps 8 significant bits.
_LIMITS = {"bool": 2, "int8": 127, "uint8": 251, "bfloat16": 251, "float16": 2039}
_LIMIT_OF_OTHERS = 32749

TENSOR_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)
ARRAY_DTYPES = ("bool", "uint8", "int16", "uint16", "int64", "float16", "float32", "float64", "complex128")


@dataclass
class Record:
    """A sample that torch's collate function refuses."""

    image: Any
    label: Any


def values(index: int, shape: tuple[int, ...], limit: int, salt: int) -> np.ndarray[Any, Any]:
    """Whole numbers from 0 to `limit - 1`; neighbouring elements differ, and so do neighbouring indices."""
    count = int(np.prod(shape))
    # The series has the period `limit`: computing one period is enough for a big array.
    series = (np.arange(min(count, limit)) * 7 + index * 31 + salt * 17) % limit
    return np.resize(series, count).reshape(shape) if count else np.zeros(shape, np.int64)


def array(index: int, shape: tuple[int, ...], dtype: str = "uint8", salt: int = 0) -> np.ndarray[Any, Any]:
    """An array of these values."""
    return values(index, shape, _LIMITS.get(dtype, _LIMIT_OF_OTHERS), salt).astype(dtype)


def tensor(index: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """A tensor of these values."""
    limit = _LIMITS.get(str(dtype).removeprefix("torch."), _LIMIT_OF_OTHERS)
    return torch.from_numpy(values(index, shape, limit, salt)).to(dtype)


# --- kinds of samples ------------------------------------------------------------------------------------


def side_of(group: int) -> int:
    return SIDES[group % len(SIDES)]


def image(index: int, group: int) -> Any:
    side = side_of(group)
    return array(index, (side, side + 1, 3))


def labelled(index: int, group: int) -> Any:
    return image(index, group), index


def planes(index: int, group: int) -> Any:
    """An image whose channels come first."""
    side = side_of(group)
    return {"image": tensor(index, (3, side + 4, side + 5), torch.float32), "label": torch.tensor(index)}


def big(index: int, group: int) -> Any:
    side = BIG_SIDES[group % len(BIG_SIDES)]
    return array(index, (side, side, 3)), index


def tiny(index: int, group: int) -> Any:
    return array(index, (1,))


def number(index: int, group: int) -> Any:
    return index


def text(index: int, group: int) -> Any:
    return f"sample-{index}"


def flags(index: int, group: int) -> Any:
    return tensor(index, (side_of(group),), torch.bool)


def tensors(index: int, group: int) -> Any:
    shape = (2, side_of(group))
    return {str(dtype): tensor(index, shape, dtype, salt) for salt, dtype in enumerate(TENSOR_DTYPES)}


def arrays(index: int, group: int) -> Any:
    return [array(index, (side_of(group), 3), dtype, salt) for salt, dtype in enumerate(ARRAY_DTYPES)]


def scalars(index: int, group: int) -> Any:
    return index, index / 2, index % 2 == 0, np.float32(index), np.int16(index), torch.tensor(index)


def texts(index: int, group: int) -> Any:
    word = f"bild-\N{LATIN SMALL LETTER A WITH DIAERESIS}-{index}"
    return {
        "text": word * (index % 4),
        "bytes": bytes([index % 256]) * (index % 9),
        "more": [word, (word, index)],
    }


def nest(index: int, group: int) -> Any:
    side = side_of(group)
    return {
        "image": array(index, (side, 3, 2)),
        "point": Point(tensor(index, (2,), torch.bfloat16), {"z": tensor(index, (side,), torch.int64, 1)}),
        "pair": (torch.tensor(float(index)), [index, array(index, (2, side), "int64", 2)]),
        "name": f"n{index}",
        "nothing": {},
    }


def empties(index: int, group: int) -> Any:
    side = side_of(group)
    return {
        "array": np.zeros((0, side), np.float32),
        "tensor": torch.empty(side, 0, dtype=torch.int16),
        "nothing": {},
        "index": index,
        "after": array(index, (side,), "int32"),
    }


def strided(index: int, group: int) -> Any:
    """Arrays and tensors whose elements do not lie one behind the other."""
    side = side_of(group)
    return {
        "turned array": array(index, (side, side + 1, 2)).transpose(2, 0, 1),
        "turned tensor": tensor(index, (side, side + 2), torch.float32).T,
        "every other": array(index, (2 * side,), "float64")[::2],
        "expanded": tensor(index, (1,), torch.int32).expand(side),
    }


def twice(index: int, group: int) -> Any:
    """The same tensor in several places."""
    one = tensor(index, (side_of(group), 2), torch.float32)
    return {"one": one, "two": one, "more": [one, one[:1]]}


def _views(index: int, group: int) -> list[Any]:
    side = side_of(group)
    return [
        {"b": tensor(index, (side,), torch.int64, salt), "a": tensor(index, (side, 2), torch.int32, salt + 7)}
        for salt in range(2)
    ]


def collated(index: int, group: int) -> Any:
    """Two views of one sample, collated by torch in another order of keys."""
    views = tud.default_collate(_views(index, group))
    return {"a": views["a"], "b": views["b"]}


def looped(index: int, group: int) -> Any:
    """The same with a loader inside the dataset: torch's or ours."""
    loader_class = fastload.DataLoader if index % 2 else tud.DataLoader
    views = next(iter(loader_class(_views(index, group), 2)))  # type: ignore[arg-type]
    return {"a": views["a"], "b": views["b"]}


def record(index: int, group: int) -> Any:
    return Record(tensor(index, (side_of(group), 2), torch.float32), index)


def plain_colour(index: int, group: int) -> Any:
    """An image of one colour: all crops of one size are equal."""
    side = 8 + side_of(group) % 10
    colour = array(index, (3,))
    return {"image": np.broadcast_to(colour, (side, side + 1, 3)).copy(), "label": index}


def known_draws(index: int, group: int) -> Any:
    """The part of a sample that does not depend on random numbers."""
    return {"index": index}


class Kind(NamedTuple):
    """A kind of sample."""

    make: Callable[[int, int], Any]
    has_shapes: bool = True  # the group determines the shapes
    is_cacheable: bool = True
    is_big: bool = False
    transforms: tuple[str, ...] = ("none", "alias")


_OF_IMAGES = (
    "none",
    "plus one",
    "in place",
    "in place by torch",
    "rarely in place",
    "alias",
    "part",
    "turned",
    "as tensor",
)

KINDS = {
    "image": Kind(image),
    "labelled": Kind(labelled, transforms=_OF_IMAGES),
    "planes": Kind(planes),
    "big": Kind(big, is_big=True, transforms=_OF_IMAGES),
    "tiny": Kind(tiny, has_shapes=False),
    "number": Kind(number, has_shapes=False),
    "text": Kind(text, has_shapes=False),
    "flags": Kind(flags),
    "tensors": Kind(tensors),
    "arrays": Kind(arrays),
    "scalars": Kind(scalars, has_shapes=False),
    "texts": Kind(texts, has_shapes=False),
    "nest": Kind(nest),
    "empties": Kind(empties),
    "strided": Kind(strided),
    "twice": Kind(twice),
    "collated": Kind(collated),
    "looped": Kind(looped),
    "record": Kind(record, is_cacheable=False),
    "plain colour": Kind(plain_colour, transforms=("none", "crop", "crop to tensor")),
    "draws": Kind(known_draws, has_shapes=False, transforms=("draws",)),
}
