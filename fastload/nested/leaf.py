"""The type of one value in a sample: its kind, dtype and shape, and the NumPy dtype that stores it.

The set of kinds is closed: array, tensor, scalar (NumPy's), int, float, bool, str, bytes, none, str_ and
bytes_ (NumPy's). A new kind needs an entry here, its conversions in `leaves`, and, if default_collate batches
it, its batch in `tensors`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

TEXT_KINDS = ("str", "bytes", "str_", "bytes_")  # these have no fixed length
NUMBER_DTYPES: dict[str, np.dtype[Any]] = {
    "int": np.dtype("<i8"),  # larger ints fit into a record, but not into a column
    "float": np.dtype("<f8"),
    "bool": np.dtype("?"),
}
BARE_KINDS = (*NUMBER_DTYPES, "none", *TEXT_KINDS)  # these have neither a dtype nor a shape

_MAX_BYTES = (1 << 63) - 1  # of an array
# What `dtype.str` gives. NumPy's parser takes much more, and some of it ends the process: "M8[Y/0]".
_PLAIN_NAME = re.compile(r"[<>|](?:[biufcSUV]\d+|[mM]8(?:\[\d*[A-Za-z]+\])?)")

# The NumPy dtype that stores a tensor, by torch's name of the tensor's dtype. A dtype that NumPy lacks is
# stored as integers of the same width; `tensors` lists those of these dtypes that this release of torch has.
TENSOR_STORAGE: dict[str, np.dtype[Any]] = {
    **{
        name: np.dtype(name)
        for name in (
            *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        )
    },
    "bfloat16": np.dtype("int16"),
    "complex32": np.dtype("int32"),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        np.dtype("uint8"),
    ),
}


@lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """A NumPy dtype as text, `dtype.str`.

    Raises:
        ValueError: The dtype has fields, holds objects, has no fixed size, or is an extension of NumPy's.
    """
    if dtype.names is not None:
        raise ValueError("an array with fields")
    if numpy_dtype(dtype.str) != dtype:
        raise ValueError(f"dtype {dtype} is an extension of NumPy's own dtypes")
    return dtype.str


@lru_cache(maxsize=256)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a name that `dtype_name` returned.

    Raises:
        ValueError: The text is not the name of a dtype of fixed size.
    """
    if not _PLAIN_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a dtype")
    try:
        dtype = np.dtype(name)
    except (TypeError, ArithmeticError, MemoryError) as error:
        raise ValueError(f"{name!r} is not the name of a dtype") from error
    if dtype.itemsize == 0:
        raise ValueError(f"dtype {name!r} has no fixed size in bytes")
    return dtype


class Leaf(NamedTuple):
    """The type of one value of a sample.

    Attributes:
        kind: One of the closed set above.
        dtype: Name of NumPy's or torch's dtype; empty if the kind determines it.
        shape: Shape of an array or tensor; else empty.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()


def storage_dtype(leaf: Leaf) -> np.dtype[Any]:
    """The NumPy dtype that stores the rows of a leaf: of an array, a tensor, a scalar or a number.

    Raises:
        ValueError: The leaf's dtype is unknown.
    """
    if leaf.kind in NUMBER_DTYPES:
        return NUMBER_DTYPES[leaf.kind]
    if leaf.kind != "tensor":
        return numpy_dtype(leaf.dtype)
    if leaf.dtype not in TENSOR_STORAGE:
        raise ValueError(f"torch.{leaf.dtype} is not a dtype that can be cached")
    return TENSOR_STORAGE[leaf.dtype]


def fixed_nbytes(leaf: Leaf) -> int | None:
    """Bytes of the payload if the leaf alone determines them; None for int, str and bytes.

    Raises:
        ValueError: The leaf's dtype is unknown, or its shape is too large for any array.
    """
    if leaf.kind in ("array", "tensor", "scalar"):
        itemsize = storage_dtype(leaf).itemsize
        if prod(filter(None, leaf.shape)) * itemsize > _MAX_BYTES:  # NumPy also leaves zeros out
            raise ValueError(f"the shape {leaf.shape} is too large for an array")
        return prod(leaf.shape) * itemsize
    return {"float": 8, "bool": 1, "none": 0}.get(leaf.kind)
