"""What may stand at the ends of a sample: dtypes by name, tensors over arrays, values to bytes and back.

Called by `spec`, `record` and `columns`, in any process. Rules:

1. The kinds are closed: array, tensor, scalar (NumPy's), int, float, bool, str, bytes, none, and str_ and
   bytes_, which are NumPy's own. No pickle.
2. Type, dtype and shape come back exactly; arrays and tensors come back C-contiguous.
3. Arrays come back as views of the memory they were given; tensors always as private copies, because torch
   knows no read-only memory: an in-place operation on a read-only mapping would end the process.
"""

from __future__ import annotations

import ast
import struct
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fastload.errors import CacheCorruptError, UnsupportedSampleError

Array = npt.NDArray[Any]

# A torch dtype that NumPy lacks is stored as integers of the same width.
_REINTERPRETED: dict[torch.dtype, torch.dtype] = {torch.bfloat16: torch.int16, torch.complex32: torch.int32}
_NATIVE_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
)
_FLOAT8_NAMES = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
for _name in _FLOAT8_NAMES.split():
    if hasattr(torch, _name):  # each torch release adds some
        _REINTERPRETED[getattr(torch, _name)] = torch.uint8

TENSOR_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NATIVE_NAMES.split()}
TENSOR_DTYPES.update({str(dtype).removeprefix("torch."): dtype for dtype in _REINTERPRETED})
_NAMES = {dtype: name for name, dtype in TENSOR_DTYPES.items()}

TEXT_KINDS = ("str", "bytes", "str_", "bytes_")  # of any length
_FLOAT = struct.Struct("<d")
_MOST_BYTES = (1 << 63) - 1  # of an array
_INT_BYTES = 8  # the least that an int takes; longer ones take what they need


class Leaf(NamedTuple):
    """One value of a sample, without the value.

    Attributes:
        kind: One of the closed set above.
        dtype: NumPy's or torch's dtype by name; empty where the kind says it all.
        shape: Of an array or tensor; else empty.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()


# --- dtypes ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """A NumPy dtype in text: `dtype.str`, or the field list of a structured one as .npy files spell it.

    Raises:
        ValueError: The dtype holds objects, has no fixed size, or does not survive the way there and back.
    """
    if dtype.hasobject or dtype.kind == "T" or dtype.itemsize == 0:
        raise ValueError(f"dtype {dtype} has no fixed size in bytes")
    name = dtype.str if dtype.names is None else repr(np.lib.format.dtype_to_descr(dtype))
    if numpy_dtype(name) != dtype:
        raise ValueError(f"dtype {dtype} is an extension of NumPy's own dtypes")
    return name


@lru_cache(maxsize=256)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype that `dtype_name` named.

    Raises:
        ValueError: The text names no dtype of fixed size.
    """
    try:
        # literal_eval builds literals only, it calls nothing; .npy headers are read the same way.
        dtype = np.lib.format.descr_to_dtype(ast.literal_eval(name)) if name[:1] == "[" else np.dtype(name)
    except (TypeError, ValueError, SyntaxError, MemoryError, RecursionError, KeyError, IndexError) as error:
        raise ValueError(f"{name!r} names no dtype") from error
    if dtype.hasobject or dtype.kind == "T" or dtype.itemsize == 0:
        raise ValueError(f"dtype {name!r} has no fixed size in bytes")
    return dtype


def storage_dtype(leaf: Leaf) -> np.dtype[Any]:
    """What NumPy stores an array, tensor or scalar leaf as.

    Raises:
        ValueError: The leaf's dtype is unknown.
    """
    if leaf.kind != "tensor":
        return numpy_dtype(leaf.dtype)
    if leaf.dtype not in TENSOR_DTYPES:
        raise ValueError(f"torch.{leaf.dtype} is not a dtype that is cached")
    dtype = TENSOR_DTYPES[leaf.dtype]
    return np.dtype(str(_REINTERPRETED.get(dtype, dtype)).removeprefix("torch."))


# --- tensors over arrays ---------------------------------------------------------------------------------


def tensor_array(tensor: torch.Tensor) -> Array:
    """The memory of a contiguous tensor as an array of its storage dtype, without a copy."""
    reinterpreted = _REINTERPRETED.get(tensor.dtype)
    array: Array = (tensor if reinterpreted is None else tensor.view(reinterpreted)).numpy()
    return array


def array_tensor(array: Array, name: str) -> torch.Tensor:
    """A tensor of torch dtype `name` over the memory of a writable array, without a copy."""
    tensor = torch.from_numpy(array)
    dtype = TENSOR_DTYPES[name]
    return tensor.view(dtype) if dtype in _REINTERPRETED else tensor


# --- from a value to its leaf ----------------------------------------------------------------------------


def describe(value: Any) -> tuple[Leaf, Any]:
    """The leaf of one value, and the value in its plain form: C-contiguous, detached.

    Raises:
        UnsupportedSampleError: The value is of no kind that is cached. The caller adds the path.
    """
    kind = type(value)
    if kind is np.ndarray or kind is np.memmap:  # a memory map comes back as an array: its file is read
        try:
            name = dtype_name(value.dtype)
        except ValueError as error:
            raise UnsupportedSampleError(f"{error}: return an array of numbers") from None
        return Leaf("array", name, value.shape), np.asarray(value, order="C")
    if kind is int or kind is float or kind is bool or kind is str or kind is bytes:
        return Leaf(kind.__name__), value
    if value is None:
        return Leaf("none"), value
    if kind is np.str_ or kind is np.bytes_:
        return Leaf(kind.__name__), value
    if kind is torch.Tensor:
        return _describe_tensor(value)
    if isinstance(value, np.generic):
        try:
            return Leaf("scalar", dtype_name(value.dtype)), value
        except ValueError as error:
            raise UnsupportedSampleError(f"{error}: return a plain number or str") from None
    raise UnsupportedSampleError(f"{kind.__module__}.{kind.__qualname__} is not cached: {_advice(value)}")


def _describe_tensor(tensor: torch.Tensor) -> tuple[Leaf, torch.Tensor]:
    if tensor.device.type != "cpu":
        raise UnsupportedSampleError(f"a tensor on {tensor.device} is not cached: return tensor.cpu()")
    if tensor.layout is not torch.strided:
        raise UnsupportedSampleError(f"a {tensor.layout} tensor is not cached: return tensor.to_dense()")
    if tensor.requires_grad:
        raise UnsupportedSampleError("a tensor that requires grad is not cached: return tensor.detach()")
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise UnsupportedSampleError(f"a tensor of {tensor.dtype} is not cached: return a plain dtype")
    return Leaf("tensor", name, tuple(tensor.shape)), tensor.resolve_conj().resolve_neg().contiguous()


def _advice(value: Any) -> str:
    module = type(value).__module__.partition(".")[0]
    if module == "PIL":
        return "return numpy.asarray(image)"
    if isinstance(value, np.ndarray):
        return "return numpy.asarray(array)"
    if isinstance(value, torch.Tensor):
        return "return a plain tensor, for instance tensor.as_subclass(torch.Tensor)"
    if isinstance(value, (int, float, str, bytes)):
        return "return a plain int, float, str or bytes"
    if module == "pathlib":
        return "return str(path)"
    if isinstance(value, dict):
        return "return a plain dict"
    if isinstance(value, (set, frozenset, tuple, list)):
        return "return a plain list or tuple"
    return "return arrays, tensors, numbers, str, bytes or None in dicts, lists and tuples"


# --- values to bytes and back ----------------------------------------------------------------------------


def to_bytes(leaf: Leaf, value: Any) -> bytes | Array:
    """The payload of one plain value: bytes, or the array's own memory as `(nbytes,) uint8`."""
    kind = leaf.kind
    if kind == "array":
        return _raw(value)
    if kind == "tensor":
        return _raw(tensor_array(value))
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
        return bytes(value.encode("utf-8", "surrogatepass"))  # paths may hold undecodable bytes
    return bytes(value) if kind in ("bytes", "bytes_") else b""


def _raw(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)


def fixed_nbytes(leaf: Leaf) -> int | None:
    """Bytes of the payload where the leaf alone tells; None for int, str and bytes.

    Raises:
        ValueError: The leaf's dtype is unknown, or no array can have its shape.
    """
    if leaf.kind in ("array", "tensor", "scalar"):
        itemsize = storage_dtype(leaf).itemsize
        if prod(filter(None, leaf.shape)) * itemsize > _MOST_BYTES:  # NumPy leaves zeros out, too
            raise ValueError(f"no array has the shape {leaf.shape}")
        return prod(leaf.shape) * itemsize
    return {"float": 8, "bool": 1, "none": 0}.get(leaf.kind)


def from_bytes(leaf: Leaf, memory: memoryview, offset: int, nbytes: int) -> Any:
    """The value whose payload lies at `memory[offset:offset + nbytes]`.

    Arrays are views of `memory` and keep it alive; everything else is a copy.

    Raises:
        CacheCorruptError: The payload is not one of this leaf.
    """
    kind = leaf.kind
    if kind in TEXT_KINDS:
        return text_value(kind, bytes(memory[offset : offset + nbytes]))
    try:
        if kind == "array":
            return view_array(numpy_dtype(leaf.dtype), leaf.shape, memory, offset)
        if kind == "tensor":
            return array_tensor(
                view_array(storage_dtype(leaf), leaf.shape, memory, offset).copy(), leaf.dtype
            )
        if kind == "scalar":
            return view_array(numpy_dtype(leaf.dtype), (), memory, offset).copy()[()]
        payload = bytes(memory[offset : offset + nbytes])
        if kind == "int":
            return int.from_bytes(payload, "little", signed=True)
        if kind == "float":
            return _FLOAT.unpack(payload)[0]
        if kind == "bool":
            return payload != b"\x00"
    except (ValueError, TypeError, OverflowError, MemoryError, struct.error) as error:
        raise CacheCorruptError(f"a record's {kind} of {nbytes:,} bytes cannot be read: {error}") from error
    return None


def text_value(kind: str, payload: bytes) -> Any:
    """The value of a text kind.

    Raises:
        CacheCorruptError: The payload is no UTF-8 text.
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
    """A view of `memory`, read-only if the memory is; an empty array views nothing and is read-only."""
    if 0 in shape:
        array: Array = np.empty(shape, dtype)
        array.flags.writeable = False
        return array
    return np.ndarray(shape, dtype, memory, offset)
