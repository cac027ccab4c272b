"""Results of decoders as bytes and back: arrays and tensors, alone or in nests of plain values.

What comes back has memory of its own, and is equal in all that a caller can see: types, dtypes, shapes,
strides, and whether it can be written to. What would not is not packed: objects, subclasses, views with gaps,
arrays that share memory.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.nested.leaf import TENSOR_STORAGE, dtype_name, numpy_dtype
from fastload.nested.tree import map_leaves
from fastload.readers.identity import is_plain

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

_BLOCK = "\0block"  # begins the tuple that stands for an array or a tensor in a note


def pack(result: Any) -> tuple[npt.NDArray[Any], Any] | None:
    """The bytes of all arrays in a result, `(n,) uint8`, and a note of plain values; None for others.

    An ordinary array needs no note, and is returned itself.
    """
    blocks: list[Bytes] = []
    try:
        if type(result) is np.ndarray and result.flags.carray and result.size:
            return _checked(result), None
        note = map_leaves(result, partial(_laid, blocks))
    except (TypeError, ValueError, RecursionError):  # a value of another type; a container in itself
        return None
    if not blocks or not is_plain(note) or _overlap(blocks):
        return None
    return (blocks[0] if len(blocks) == 1 else np.concatenate(blocks)), note


def unpack(memory: npt.NDArray[Any], note: Any) -> Any:
    """A result like the one that `pack` was given.

    Raises:
        ValueError, TypeError, LookupError, RuntimeError, AttributeError: The note is none of `pack`'s. It can
            be forged, so what it says of memory is checked before it is used.
    """
    if note is None:
        return memory.copy()
    restore = partial(_restored, memory)
    return restore(note) if _is_block(note) else map_leaves(note, restore, _is_block)


def _is_block(note: Any) -> bool:
    return type(note) is tuple and note[:1] == (_BLOCK,)


def _overlap(blocks: list[Bytes]) -> bool:
    """Whether a write to one would change another one."""
    bounds = sorted((block.ctypes.data, block.ctypes.data + block.nbytes) for block in blocks)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(bounds))


def _laid(blocks: list[Bytes], value: Any) -> Any:
    """What stands for a leaf in the note; adds its memory, as it lies, to the blocks.

    Raises:
        TypeError, ValueError: It would not come back as it is.
    """
    kind = type(value)
    if kind is torch.Tensor:
        block, dtype, origin, is_writable = _memory_of_plain(value), str(value.dtype)[6:], 0, True
        shape, strides = tuple(value.shape), value.stride()
    elif kind is np.ndarray or (isinstance(value, np.generic) and kind is value.dtype.type):
        array = _checked(np.asarray(value))
        dtype, is_writable = array.dtype.str, array.flags.writeable
        shape, strides = array.shape, array.strides
        steps = [stride * (length - 1) for stride, length in zip(strides, shape, strict=True)]
        origin = -sum(step for step in steps if step < 0)  # where its first element is
        if not array.size or sum(map(abs, steps)) + array.itemsize != array.nbytes:
            raise TypeError("an array with gaps, or an empty one")
        block = _bytes_at(array.__array_interface__["data"][0] - origin, array.nbytes, array)
    else:
        return value
    start = sum(map(len, blocks))
    blocks.append(block)
    return _BLOCK, kind.__name__, dtype, shape, strides, start, len(block), origin, is_writable


def _checked(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    dtype_name(array.dtype)  # raises for objects and fields
    return array


def _restored(memory: Bytes, note: Any) -> Any:
    """The array, scalar or tensor that a tuple stands for; other leaves as they are."""
    if not _is_block(note):
        return note
    _, kind, dtype, shape, strides, start, nbytes, origin, is_writable = note
    storage = TENSOR_STORAGE[dtype] if kind == "Tensor" else numpy_dtype(dtype)
    length = math.prod(shape)
    if not length * storage.itemsize == nbytes == len(memory[start : start + nbytes]):
        raise ValueError("a shape that its memory does not have")
    if kind == "Tensor":
        if 1 + sum(step * (side - 1) for step, side in zip(strides, shape, strict=True)) != length:
            raise ValueError("a tensor with gaps")
        tensor = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="cpu")
        np.copyto(memory_of(tensor), memory[start : start + nbytes])
        return tensor
    view = np.ndarray(shape, dtype, memory, start + origin, strides)
    array = view.copy(order="K")
    if array.strides != strides:  # some are negative
        array = np.ndarray(shape, dtype, memory[start : start + nbytes].copy(), origin, strides)
    array.flags.writeable = is_writable
    return array if kind == "ndarray" else array[()]


def _memory_of_plain(tensor: torch.Tensor) -> Bytes:
    """The memory of a tensor; raises TypeError if its memory or state is special."""
    is_plain_one = tensor.device.type == "cpu" and str(tensor.dtype)[6:] in TENSOR_STORAGE
    is_plain_one = is_plain_one and tensor.layout == torch.strided and not tensor.__dict__
    if not is_plain_one or tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        raise TypeError("a tensor with a device, layout or history of its own")
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        raise TypeError("a tensor that is a part of another one")
    return memory_of(tensor)


def memory_of(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor without gaps, `(n,) uint8`, without a copy; it can still be resized later.

    Its own `numpy()` would keep it from that.
    """
    return _bytes_at(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)


class _Memory:
    """The bytes at an address, which an object owns."""

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self._owner = owner
        data = address, False
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": data}


def _bytes_at(address: int, nbytes: int, owner: Any) -> Bytes:
    return np.asarray(_Memory(address, nbytes, owner))
