"""Converts the values that a cached sample can hold to bytes and back.

Rules:

1. The kinds of values are those of `leaf`. Pickle is never used.
2. Type, dtype and shape are restored exactly; restored arrays and tensors are C-contiguous.
3. Restored arrays are views of the memory. Restored tensors are always private copies, because torch has no
   read-only memory: an in-place operation on a read-only mapping would kill the process.
4. torch is imported only when a tensor occurs: it would add two seconds to the commands that read caches.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping, Sequence, Set
from functools import cache
from typing import Any

import numpy as np

from fastload.errors import CacheCorruptError, UnsupportedSampleError
from fastload.nested.leaf import TEXT_KINDS, Array, Leaf, dtype_name, numpy_dtype, storage_dtype

_FLOAT = struct.Struct("<d")
_INT_BYTES = 8  # the minimum for an int; larger ints take more


@cache
def tensor_functions() -> Any:
    """The module `tensors`, which imports torch, on the first call.

    Every lazy import of it is here: later calls are faster than an import statement.
    """
    from fastload.nested import tensors

    return tensors


# --- from a value to its leaf ----------------------------------------------------------------------------


def describe(value: Any) -> tuple[Leaf, Any]:
    """The leaf of one value, and the value as it is stored: arrays and tensors C-contiguous.

    Raises:
        UnsupportedSampleError: Values of this type cannot be cached. The caller adds the path.
    """
    kind = type(value)
    leaf = _LEAF_OF_TYPE.get(kind)
    if leaf is not None:
        return leaf, value
    if kind is np.ndarray or kind is np.memmap:  # a memory map is restored as an array: its content is cached
        return Leaf("array", _dtype_name(value), value.shape), np.asarray(value, order="C")
    torch: Any = sys.modules.get("torch")  # if torch is not imported, the value is not a tensor
    if torch is not None and kind is torch.Tensor:
        name, tensor = tensor_functions().describe_tensor(value)
        return Leaf("tensor", name, tuple(tensor.shape)), tensor
    if isinstance(value, np.generic):
        return Leaf("scalar", _dtype_name(value)), value
    raise UnsupportedSampleError(
        f"{kind.__module__}.{kind.__qualname__} cannot be cached: {suggestion(value)}"
    )


_LEAF_OF_TYPE: dict[type, Leaf] = {
    **{kind: Leaf(kind.__name__) for kind in (int, float, bool, str, bytes, np.str_, np.bytes_)},
    type(None): Leaf("none"),
}


def _dtype_name(value: Any) -> str:
    try:
        return dtype_name(value.dtype)
    except ValueError as error:
        raise UnsupportedSampleError(f"{error}: return numbers, or arrays of numbers") from None


# By the package that defines the value's class, or a class that it inherits from.
_BY_PACKAGE = {
    "PIL": 'return numpy.asarray(image.convert("RGB")), or numpy.asarray(image) for a mask',
    **dict.fromkeys(("datetime", "decimal", "pathlib", "uuid"), "return str(value)"),
}
_BY_TYPE = (
    (np.ma.MaskedArray, "return (array.data, numpy.ma.getmaskarray(array))"),
    (np.ndarray, "return numpy.asarray(array)"),
    ((int, float, str, bytes, bytearray, memoryview), "return a plain int, float, str or bytes"),
    (Mapping, "return a plain dict"),
    ((Set, Sequence), "return a plain list or tuple"),
)
_CACHEABLE = "return arrays, tensors, numbers, str, bytes or None in dicts, lists and tuples"


def suggestion(value: Any, otherwise: str = _CACHEABLE) -> str:
    """What to return instead of a value that cannot be cached, as a clause that begins with "return".

    Args:
        value: The value.
        otherwise: The suggestion for values of unknown classes.
    """
    for base in type(value).__mro__:  # no library is imported here
        text = _BY_PACKAGE.get(base.__module__.partition(".")[0])
        if text is not None:
            return text
    if isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ())):
        if getattr(value, "is_nested", False):
            return "return list(tensor.unbind())"
        return "return a plain tensor, for instance tensor.as_subclass(torch.Tensor)"
    return next((text for kinds, text in _BY_TYPE if isinstance(value, kinds)), otherwise)


# --- values to bytes and back ----------------------------------------------------------------------------


def to_bytes(leaf: Leaf, value: Any) -> bytes | Array:
    """The payload of one value: bytes, or the array's own memory as `(nbytes,) uint8`."""
    kind = leaf.kind
    if kind == "array":
        return _raw(value)
    if kind == "tensor":
        return _raw(tensor_functions().tensor_array(value))
    if kind == "scalar":
        return np.asarray(value).tobytes()
    if kind == "int":
        magnitude = value if value >= 0 else ~value
        nbytes = max(_INT_BYTES, magnitude.bit_length() // 8 + 1)
        return bytes(value.to_bytes(nbytes, "little", signed=True))
    if kind == "float":
        return _FLOAT.pack(value)
    if kind == "bool":
        return b"\x01" if value else b"\x00"
    if kind in ("str", "str_"):
        return bytes(value.encode("utf-8", "surrogatepass"))  # paths can hold undecodable bytes
    return bytes(value) if kind in ("bytes", "bytes_") else b""


def _raw(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)


def from_bytes(leaf: Leaf, memory: memoryview, offset: int, nbytes: int) -> Any:
    """The value whose payload lies at `memory[offset:offset + nbytes]`.

    Arrays are views of `memory` and keep it alive; everything else is a copy.

    Raises:
        CacheCorruptError: The payload does not belong to this leaf.
    """
    kind = leaf.kind
    try:
        if kind == "array":
            return view_array(numpy_dtype(leaf.dtype), leaf.shape, memory, offset)
        if kind == "tensor":
            array = view_array(storage_dtype(leaf), leaf.shape, memory, offset)
            return tensor_functions().array_tensor(array.copy(), leaf.dtype)
        if kind == "scalar":
            return view_array(numpy_dtype(leaf.dtype), (), memory, offset).copy()[()]
        payload = bytes(memory[offset : offset + nbytes])
        if kind in TEXT_KINDS:
            return text_value(kind, payload)
        if kind == "int":
            return int.from_bytes(payload, "little", signed=True)
        if kind == "float":
            return _FLOAT.unpack(payload)[0]
        return payload != b"\x00" if kind == "bool" else None
    except (ValueError, TypeError, OverflowError, MemoryError, struct.error) as error:
        raise CacheCorruptError(f"a record's {kind} of {nbytes:,} bytes cannot be read: {error}") from error


def text_value(kind: str, payload: bytes) -> Any:
    """The value of a text kind.

    Raises:
        CacheCorruptError: The payload is not UTF-8 text.
    """
    if kind in ("bytes", "bytes_"):
        return payload if kind == "bytes" else np.bytes_(payload)
    try:
        text = payload.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise CacheCorruptError(
            f"a record's {kind} of {len(payload):,} bytes cannot be read: {error}"
        ) from error
    return text if kind == "str" else np.str_(text)


def view_array(dtype: np.dtype[Any], shape: tuple[int, ...], memory: Any, offset: int) -> Array:
    """A view of `memory`, read-only if the memory is; an empty array is read-only and not a view."""
    if 0 in shape:
        array: Array = np.empty(shape, dtype)
        array.flags.writeable = False
        return array
    return np.ndarray(shape, dtype, memory, offset)
