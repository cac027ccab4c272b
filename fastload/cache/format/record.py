"""Encodes one sample as bytes, in a closed, documented, versioned format without pickle.

All numbers are little-endian:

    offset  bytes
    0       4      magic, b"FLrc"
    4       2      format version, 2
    6       2      zero
    8       4      S, number of bytes of the spec
    12      4      L, number of leaves
    16      8      number of bytes of the whole record
    24      S      the spec: JSON as in `spec`, ASCII
    ...     8 * L  number of bytes of each leaf's payload, at the next multiple of 8
    ...            the payloads in order, each at the next multiple of its alignment from the record's start:
                   64 for arrays and tensors, 8 for other leaves; the gaps are zero

Payloads: arrays, tensors and NumPy scalars are their elements in C order and in the dtype's own byte order.
An int is two's complement in 8 bytes or more, a float is IEEE 754 binary64, a bool is one byte, a str is
UTF-8 (lone surrogates as three bytes each), bytes are stored unchanged, and None has no payload. NumPy's str_
and bytes_ are stored like str and bytes.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

from fastload.errors import CacheCorruptError
from fastload.memory.segment import round_up
from fastload.nested.leaf import Leaf, fixed_nbytes
from fastload.nested.leaves import from_bytes, to_bytes
from fastload.nested.spec import Spec, flatten

FORMAT_VERSION = 2
ALIGNMENT_BYTES = 64

_MAGIC = b"FLrc"
_HEADER = struct.Struct("<4sHHIIQ")
_WORD_BYTES = 8


def encode(sample: Any) -> bytes:
    """A sample as one record.

    Raises:
        UnsupportedSampleError: A value in it cannot be cached; names its path.
    """
    return b"".join(record_parts(*flatten(sample))[0])


def record_parts(spec: Spec, values: list[Any]) -> tuple[list[Any], int]:
    """The record as buffers, to be written one after another, and its length in bytes.

    Args:
        spec: Of the sample.
        values: As `flatten` returns them; arrays are not copied.
    """
    payloads = [to_bytes(leaf, value) for leaf, value in zip(spec.leaves, values, strict=True)]
    sizes_at = round_up(_HEADER.size + len(spec.text), _WORD_BYTES)
    end = sizes_at + _WORD_BYTES * len(payloads)
    parts: list[Any] = [spec.text, bytes(sizes_at - _HEADER.size - len(spec.text))]
    parts.append(struct.pack(f"<{len(payloads)}Q", *map(len, payloads)))
    for leaf, payload in zip(spec.leaves, payloads, strict=True):
        start = round_up(end, _alignment_bytes(leaf))
        parts += [bytes(start - end), payload]
        end = start + len(payload)
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, len(spec.text), len(payloads), end)
    return [header, *parts], end


class Outline(NamedTuple):
    """The positions of the payloads in a record; records with the same `prefix` have the same outline.

    Attributes:
        spec: The structure of the sample.
        prefix: All bytes before the payloads.
        spans: Start and number of bytes of each leaf's payload.
    """

    spec: Spec
    prefix: bytes
    spans: list[tuple[int, int]]


def outline(record: bytes | memoryview) -> Outline:
    """The positions of all parts of a record, checked against its length.

    Raises:
        CacheCorruptError: The bytes are not a record of this format version.
    """
    memory = memoryview(record)
    if len(memory) < _HEADER.size:
        raise CacheCorruptError(f"a record of {len(memory)} bytes is shorter than its header")
    magic, version, _, spec_bytes, num_leaves, total = _HEADER.unpack_from(memory)
    if magic != _MAGIC or version != FORMAT_VERSION:
        raise CacheCorruptError(
            f"not a record of format {FORMAT_VERSION}: it starts with {bytes(memory[:6])!r}"
        )
    payloads_at = round_up(_HEADER.size + spec_bytes, _WORD_BYTES) + _WORD_BYTES * num_leaves
    if not payloads_at <= total <= len(memory):
        raise CacheCorruptError(f"a record claims {total:,} bytes, but only {len(memory):,} are there")
    return _outline_of(bytes(memory[:payloads_at]))


@lru_cache(maxsize=1024)  # samples of one shape differ only in their payloads
def _outline_of(prefix: bytes) -> Outline:
    _, _, _, spec_bytes, num_leaves, total = _HEADER.unpack_from(prefix)
    spec = Spec.parse(prefix[_HEADER.size : _HEADER.size + spec_bytes])
    if len(spec.leaves) != num_leaves:
        raise CacheCorruptError(f"a record describes {len(spec.leaves)} values, but holds {num_leaves}")
    lengths = struct.unpack_from(f"<{num_leaves}Q", prefix, len(prefix) - _WORD_BYTES * num_leaves)
    spans = []
    end = len(prefix)
    for leaf, nbytes in zip(spec.leaves, lengths, strict=True):
        start = round_up(end, _alignment_bytes(leaf))
        end = start + nbytes
        if end > total or fixed_nbytes(leaf) not in (None, nbytes):
            raise CacheCorruptError(f"a record's {leaf.kind} claims {nbytes:,} bytes, which is impossible")
        spans.append((start, nbytes))
    return Outline(spec, prefix, spans)


def decode(record: bytes | memoryview) -> Any:
    """The sample of a record that starts at `record[0]`; bytes after it are ignored.

    Arrays are views of `record`, read-only if it is, and keep it alive. All other values are copies.

    Raises:
        CacheCorruptError: The bytes are not a record of this format version.
        CacheError: The class of a namedtuple is not imported in this process.
    """
    memory = memoryview(record)
    spec, _, spans = outline(memory)
    return spec.build(
        [from_bytes(leaf, memory, *span) for leaf, span in zip(spec.leaves, spans, strict=True)]
    )


def _alignment_bytes(leaf: Leaf) -> int:
    return ALIGNMENT_BYTES if leaf.kind in ("array", "tensor") else _WORD_BYTES
