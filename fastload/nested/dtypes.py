"""Converts NumPy dtypes to text and back, and maps torch dtypes to the NumPy dtypes that store them."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

import numpy as np

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
    **{
        name: np.dtype("uint8")
        for name in (
            *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        )
    },
}


@lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """A NumPy dtype as text: `dtype.str`, or for a structured dtype its field list as in .npy files.

    Raises:
        ValueError: The dtype holds objects, has no fixed size, or differs after conversion to text and back.
    """
    name = dtype.str if dtype.names is None else repr(np.lib.format.dtype_to_descr(dtype))
    if numpy_dtype(name) != dtype:
        raise ValueError(f"dtype {dtype} is an extension of NumPy's own dtypes")
    return name


@lru_cache(maxsize=256)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a name that `dtype_name` returned.

    Raises:
        ValueError: The text is not the name of a dtype of fixed size.
    """
    try:
        # literal_eval builds literals only and calls no code; .npy headers are read in the same way.
        dtype = np.lib.format.descr_to_dtype(ast.literal_eval(name)) if name[:1] == "[" else np.dtype(name)
    except (TypeError, ValueError, SyntaxError, MemoryError, RecursionError, KeyError, IndexError) as error:
        raise ValueError(f"{name!r} is not the name of a dtype") from error
    if dtype.hasobject or dtype.kind == "T" or dtype.itemsize == 0:
        raise ValueError(f"dtype {name!r} has no fixed size in bytes")
    return dtype
