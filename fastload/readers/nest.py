"""Results of any function as bytes and back: arrays, tensors and plain values, in tuples, lists and dicts.

What comes back has memory of its own, and is equal in all that a caller can see: types, dtypes, shapes,
strides, and whether it can be written to. What would not is not packed: objects, subclasses, views with gaps,
arrays that share memory.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.memory.segment import round_up
from fastload.readers.identity import is_plain

if TYPE_CHECKING:
    import numpy.typing as npt

_ALIGNMENT_BYTES = 64


def pack(result: Any) -> tuple[npt.NDArray[np.uint8], Any] | None:
    """The bytes of all arrays in a result, `(n,) uint8`, and a note of plain values; None for others."""
    packing = _Packing()
    try:
        note = packing.note(result, 0)
    except TypeError:
        return None
    blocks = packing.blocks
    if not blocks or _is_shared(blocks):
        return None
    return (blocks[0] if len(blocks) == 1 else packing.joined()), note


def unpack(memory: npt.NDArray[Any], note: Any) -> Any:
    """A result like the one that `pack` was given."""
    kind, *fields = note
    if kind == "plain":
        return fields[0]
    if kind in ("tuple", "list"):
        parts = [unpack(memory, part) for part in fields[0]]
        return parts if kind == "list" else tuple(parts)
    if kind == "dict":
        return {key: unpack(memory, part) for key, part in fields[0]}
    start, nbytes, dtype, shape, axes, flips, is_writable = fields
    block = memory[start : start + nbytes].copy().view(dtype).reshape(shape)
    array = _turned(block.transpose(axes), flips)
    if kind == "scalar":
        return array[()]
    if kind == "tensor":
        return sys.modules["torch"].from_numpy(array)
    array.flags.writeable = is_writable
    return array


def _turned(array: npt.NDArray[Any], flips: list[bool]) -> npt.NDArray[Any]:
    """A view in the opposite direction along some axes."""
    return array[(..., *(slice(None, None, -1) if flip else slice(None) for flip in flips))]


def _is_shared(blocks: list[npt.NDArray[np.uint8]]) -> bool:
    """Whether two blocks overlap: a write to one would change the other."""
    bounds = sorted((block.ctypes.data, block.ctypes.data + block.nbytes) for block in blocks)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(bounds))


class _Packing:
    """The blocks of memory of one result."""

    def __init__(self) -> None:
        self.blocks: list[npt.NDArray[np.uint8]] = []
        self._nbytes = 0
        self._containers: set[int] = set()

    def note(self, value: Any, depth: int) -> Any:
        """What `unpack` reads; adds the memory of arrays to the blocks.

        Raises:
            TypeError: The value cannot be packed.
        """
        kind = type(value)
        if kind in (tuple, list, dict):
            if depth > 8 or (kind is not tuple and id(value) in self._containers):
                raise TypeError("a container that is in the result twice, or in itself")
            self._containers.add(id(value))
            if kind is dict:
                if not all(map(is_plain, value)):
                    raise TypeError("keys that are not plain")
                return ("dict", [(key, self.note(part, depth + 1)) for key, part in value.items()])
            return (kind.__name__, [self.note(part, depth + 1) for part in value])
        if is_plain(value):
            return ("plain", value)
        if kind is np.ndarray:
            return ("array", *self._array(value))
        if isinstance(value, np.generic) and kind is value.dtype.type:
            return ("scalar", *self._array(np.array(value)))
        torch = sys.modules.get("torch")
        if torch is not None and kind is torch.Tensor:
            return ("tensor", *self._array(_memory_of(value)))
        raise TypeError("a value of another type")

    def _array(self, array: Any) -> tuple[Any, ...]:
        dtype = array.dtype
        if dtype.hasobject or dtype.names is not None or np.dtype(dtype.str) != dtype or not array.size:
            raise TypeError("an array of objects or fields, or an empty one")
        flips = [stride < 0 for stride in array.strides]
        ahead = _turned(array, flips)
        order = sorted(range(array.ndim), key=lambda axis: -ahead.strides[axis])
        block = ahead.transpose(order)
        if not block.flags.c_contiguous:
            raise TypeError("an array with gaps")
        axes = tuple(order.index(axis) for axis in range(array.ndim))
        start = self._nbytes
        self.blocks.append(block.reshape(-1).view(np.uint8))
        self._nbytes += round_up(block.nbytes, _ALIGNMENT_BYTES)
        return start, block.nbytes, dtype.str, block.shape, axes, flips, array.flags.writeable

    def joined(self) -> npt.NDArray[np.uint8]:
        """The blocks one after another, aligned."""
        memory, start = np.zeros(self._nbytes, np.uint8), 0
        for block in self.blocks:
            memory[start : start + block.nbytes] = block
            start += round_up(block.nbytes, _ALIGNMENT_BYTES)
        return memory


def _memory_of(tensor: Any) -> Any:
    """A plain tensor as an array; raises TypeError for others, whose memory or state is special."""
    is_plain_one = tensor.device.type == "cpu" and tensor.layout == sys.modules["torch"].strided
    if not is_plain_one or tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        raise TypeError("a tensor with a device, layout or history of its own")
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        raise TypeError("a tensor that is a part of another one")
    return tensor.numpy()  # TypeError for dtypes that NumPy has not
