"""Pack a nested batch into bytes in a slot and a short skeleton, and unpack it without a copy.

pack() runs in a worker, unpack() in the parent. The format is used for one message and never stored:

* The skeleton is a pickle of the batch without its plain tensors and arrays, which pickle takes for buffers
  out of band (PEP 574). A long one, such as one with the bytes of files, lies in the slot, too.
* A leaf says where such a tensor or array lies in the slot: offset, dtype, shape, strides.
* Leaves that the collate function already wrote into the slot stay where they are; others are copied once.
* Other tensors and arrays (a subclass, requires_grad, sparse, objects, a structure, the other byte order) are
  pickled as by torch.
"""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
from typing import Any, NamedTuple

import numpy as np
import torch

from fastload.memory.lease import ALIGNMENT_BYTES, SMALL_BYTES, BumpAllocator
from fastload.memory.segment import round_up
from fastload.system import by_value

# Where one tensor or array lies in a slot, as built-in types, which pickle in a sixth of the time:
#   offset: bytes from the start of the slot; meaningless when the span is 0
#   span: elements from the first to the last, gaps included
#   dtype: as text, such as "torch.uint8" or "|u1"
#   shape, and strides: in elements for tensors, in bytes for arrays
PackedLeaf = tuple[int, int, str, tuple[int, ...], tuple[int, ...]]


# A longer skeleton does not fit into a message beside the leaves (see `workers.channel`).
_LONG_SKELETON_BYTES = 2048

# Small leaves are copied out of their slot: a loop that keeps all labels, for a metric, would otherwise keep
# all images. At most SMALL_BYTES of a batch are copied, or this share of it, whichever is more.
_SMALL_SHARE = 1 / 32


class Packed(NamedTuple):
    """The part of a batch sent as a message; the bytes of its leaves are in the slot."""

    skeleton: bytes | tuple[int, int]  # or where it lies in the slot: first and last offset
    leaves: list[PackedLeaf]
    used_bytes: int  # of the slot, from its start

    @property
    def small_bytes(self) -> int:
        """How many bytes of small leaves are copied, for a caller who keeps them alone."""
        return max(SMALL_BYTES, int(self.used_bytes * _SMALL_SHARE))


@functools.lru_cache(maxsize=256)
def _text_of(dtype: torch.dtype | np.dtype[Any]) -> str | None:
    """A dtype as text; None if text cannot describe it."""
    if isinstance(dtype, torch.dtype):
        return str(dtype)
    return dtype.str if np.dtype(dtype.str) == dtype else None


@functools.lru_cache(maxsize=256)
def _dtype_of(text: str) -> Any:
    return getattr(torch, text.removeprefix("torch.")) if text.startswith("torch.") else np.dtype(text)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is only its values: exact type, dense CPU memory, no autograd or flags."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def is_leaf(value: Any) -> bool:
    """Whether a value is sent as a leaf."""
    if type(value) is torch.Tensor:
        return is_plain(value)
    if type(value) is not np.ndarray:
        return False
    dtype = value.dtype  # NumPy's equality, and so a cache, ignores metadata and alignment
    # Pickle brings the other byte order into the machine's, as every batch of torch's workers has it.
    return not (dtype.hasobject or dtype.names or dtype.metadata) and dtype.isnative and bool(_text_of(dtype))


# Stands for a leaf. Writable: pickle makes a memoryview of what stands for a read-only buffer.
_PLACE = pickle.PickleBuffer(bytearray())


def _is_in_band(buffer: pickle.PickleBuffer) -> bool:
    return buffer is not _PLACE


def _itself(leaf: Any) -> Any:
    return leaf


def _storage_of(content: torch.Tensor) -> torch.UntypedStorage:
    return content.untyped_storage()


class Packer(pickle.Pickler):
    """Pickles a batch without its leaves, and collects the leaves."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=_is_in_band)
        self.leaves: list[torch.Tensor | np.ndarray[Any, Any]] = []

    # Pickle calls it for all values but Python's own containers, numbers and texts; it would call
    # `persistent_id` for each of these, too. A leaf that is twice in the batch comes once.
    def reducer_override(self, value: Any) -> Any:
        """How pickle writes a value; NotImplemented: as always."""
        if is_leaf(value):
            self.leaves.append(value)
            return _itself, (_PLACE,)
        if type(value) is np.ndarray:  # as torch's workers do: HIGHEST_PROTOCOL would keep it read-only
            return value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        if type(value) is torch.UntypedStorage and value.device.type == "cpu":  # which pickle cannot write
            return _storage_of, (torch.empty(0, dtype=torch.uint8).set_(value),)
        return by_value.reduce_class(value)


def pack(batch: Any, allocator: BumpAllocator) -> Packed:
    """Lay ``batch`` out in the allocator's memory, which grows if necessary.

    Leaves whose bytes lie there already are not moved, unless it must grow.

    Args:
        batch: The batch.
        allocator: Owns the memory.
    """
    file = io.BytesIO()
    packer = Packer(file)
    packer.dump(batch)
    text = file.getvalue()
    # As one more leaf, so that it needs neither memory of its own nor another copy.
    skeleton = np.frombuffer(text, np.uint8) if len(text) > _LONG_SKELETON_BYTES else None
    values = packer.leaves if skeleton is None else [*packer.leaves, skeleton]
    leaves = _place(values, allocator)
    if leaves is None:
        # The batch outgrew its slot: lay all leaves out again in larger memory.
        total_bytes = sum(round_up(_span(leaf) * leaf.itemsize, ALIGNMENT_BYTES) for leaf in values)
        allocator.begin()
        allocator.reserve(total_bytes)
        allocator.used_bytes = 0
        leaves = _place(values, allocator)
        if leaves is None:
            raise AssertionError(f"{total_bytes} bytes were reserved for a batch that needs more")
    if skeleton is None:
        return Packed(text, leaves, allocator.used_bytes)
    start, *_ = leaves.pop()
    return Packed((start, start + len(text)), leaves, allocator.used_bytes)


def unpack(packed: Packed, lease: Any, max_copied_bytes: int = 0) -> Any:
    """Restore the batch from ``lease`` (a buffer that holds the slot's bytes); see `views`."""
    return restore(packed, lease, views(packed, lease, max_copied_bytes))


def views(packed: Packed, lease: Any, max_copied_bytes: int = 0) -> list[Any]:
    """The leaves of the batch, as views of ``lease``.

    Args:
        packed: The batch.
        lease: A writable buffer that holds the slot's bytes.
        max_copied_bytes: Leaves are copied, in their order, as long as the copies together take at most this.
            Each gets memory of its own, so whoever keeps it keeps nothing else of the batch.
    """
    leaves = []
    for leaf in packed.leaves:
        offset, span, code, shape, strides = leaf
        nbytes = span * _dtype_of(code).itemsize
        if 0 < nbytes <= max_copied_bytes:
            max_copied_bytes -= nbytes
            own = np.frombuffer(lease, np.uint8, nbytes, offset).copy()
            leaves.append(_view((0, span, code, shape, strides), own))
        else:
            leaves.append(_view(leaf, lease))
    return leaves


def restore(packed: Packed, lease: Any, leaves: list[Any]) -> Any:
    """The batch with these leaves; what is not a leaf is copied out of ``lease``."""
    skeleton = packed.skeleton
    if not isinstance(skeleton, bytes):
        return pickle.loads(memoryview(lease)[slice(*skeleton)], buffers=leaves)
    return pickle.loads(skeleton, buffers=leaves)


def _place(batch_leaves: list[Any], allocator: BumpAllocator) -> list[PackedLeaf] | None:
    """Copy leaves into the memory if they lie elsewhere; return where all lie, or None if they do not fit."""
    placed = []
    start = end = 0
    if allocator.lease is not None and allocator.memory is not None:
        start = ctypes.addressof(allocator.lease)
        end = start + allocator.memory.nbytes
    for value in batch_leaves:
        span = _span(value)
        is_array = isinstance(value, np.ndarray)
        strides = value.strides if is_array else value.stride()
        address = (value.ctypes.data if is_array else value.data_ptr()) if span else start
        is_dense = not is_array or value.flags.forc
        offset = address - start
        if span and not (is_dense and start <= address < end):
            place = allocator.reserve(span * value.itemsize)
            if place is None:
                return None
            offset = place
            if is_array:
                # As in pickle: an array is restored as C-contiguous unless it is Fortran-contiguous.
                order: Any = "F" if value.flags.fnc else "C"
                target: Any = np.ndarray(value.shape, value.dtype, allocator.lease, offset, order=order)
                target[...] = value
                strides = target.strides
            else:
                # Copy all memory from the first to the last element, to keep any strides.
                ctypes.memmove(ctypes.addressof(allocator.lease) + offset, address, span * value.itemsize)
        text = str(_text_of(value.dtype))  # see `is_leaf`
        placed.append((offset, span, text, tuple(value.shape), strides))
    return placed


def _span(value: torch.Tensor | np.ndarray[Any, Any]) -> int:
    """Elements from the first to the last of a leaf, gaps included; 0 when it has none."""
    if isinstance(value, np.ndarray):
        return value.size if value.nbytes else 0
    if value.numel() == 0 or value.is_contiguous():
        return value.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))


def _view(leaf: PackedLeaf, lease: Any) -> Any:
    offset, span, code, shape, strides = leaf
    dtype = _dtype_of(code)
    if isinstance(dtype, torch.dtype):
        if not span:  # torch.frombuffer does not accept a count of zero
            return torch.empty_strided(shape, strides, dtype=dtype)
        return torch.frombuffer(lease, dtype=dtype, count=span, offset=offset).as_strided(shape, strides)
    return np.ndarray(shape, dtype, lease, offset, strides) if span else np.empty(shape, dtype)
