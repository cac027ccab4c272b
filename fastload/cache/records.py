"""Encodes one value as bytes, in a closed, documented, versioned format without pickle.

All numbers are little-endian, except for the checksum, which is in XXH3's canonical order, big-endian:

    offset  bytes
    0       8      XXH3-64 of all bytes from offset 8 on, with the seed of the key
    8       4      magic, b"FLrc"
    12      2      format version, 4
    14      2      P, how far behind a multiple of 64 the record begins: 16 if it has a key, else 0
    16      4      S, number of bytes of the spec
    20      4      L, number of leaves
    24      8      number of bytes of the whole record
    32      S      the spec: JSON as in `spec`, ASCII
    ...     8 * L  number of bytes of each leaf's payload, at the next multiple of 8
    ...            the payloads in order, each P bytes before the next multiple of 64 (arrays, tensors) or 8
                   (other leaves); the gaps are zero

Payloads: arrays, tensors and NumPy scalars are their elements in C order and in the dtype's own byte order.
An int is two's complement in 8 bytes or more, a float is IEEE 754 binary64, a bool is one byte, a str is
UTF-8 (lone surrogates as three bytes each), bytes are stored unchanged, and None has no payload. NumPy's str_
and bytes_ are stored like str and bytes.

The checksum finds any changed bit, what a power failure leaves, and a record in the place of another one. It
takes a quarter of the time of a copy. It protects against accidents only, so what a record says is checked
before it is used.
"""

from __future__ import annotations

import functools
import itertools
import struct
from typing import Any, NamedTuple

import xxhash

from fastload.errors import CacheCorruptError
from fastload.memory.segment import round_up
from fastload.nested.leaf import fixed_nbytes
from fastload.nested.leaves import from_bytes, to_bytes
from fastload.nested.spec import Spec, flatten

FORMAT_VERSION = 4
ALIGNMENT_BYTES = 64
# LMDB's large values begin so many bytes behind the start of a page. Copies of arrays that are not aligned in
# memory take a quarter longer.
LMDB_PLACE = 16

_HEADER = struct.Struct("<4sHHIIQ")  # magic, version, place, bytes of the spec, leaves, bytes of the record
_MAGIC = b"FLrc"
PREFIX_AT = 8
_HEADER_BYTES = PREFIX_AT + _HEADER.size
_WORD_BYTES = 8


def encode(value: Any, key: bytes = b"") -> bytes:
    """A value as one record.

    Args:
        value: The value.
        key: Under which it will be stored.

    Raises:
        UnsupportedSampleError: A part of it cannot be cached; names its path.
    """
    return b"".join(record_parts(*flatten(value), key)[0])


def record_parts(spec: Spec, values: list[Any], key: bytes | None = b"") -> tuple[list[Any], int]:
    """The record as buffers, to be written one after another, and its length in bytes.

    Args:
        spec: Of the value.
        values: As `flatten` returns them; arrays are not copied.
        key: Under which the record will be stored; None: without a checksum, for memory.
    """
    payloads = [to_bytes(leaf, value) for leaf, value in zip(spec.leaves, values, strict=True)]
    head, gaps, nbytes = _frame(spec, tuple(map(len, payloads)), 0 if key is None else LMDB_PLACE)
    parts: list[Any] = [bytes(PREFIX_AT), head, *itertools.chain(*zip(gaps, payloads, strict=True))]
    if key is not None:
        checksum = xxhash.xxh3_64(seed=seed_of(key))
        for part in parts[1:]:
            checksum.update(part)
        parts[0] = checksum.digest()
    return parts, nbytes


@functools.lru_cache(maxsize=1024)  # values of one shape differ only in their payloads
def _frame(spec: Spec, lengths: tuple[int, ...], place: int) -> tuple[bytes, list[bytes], int]:
    """What is before the payloads, but for the checksum, and before each of them; bytes of the record."""
    sizes_at = round_up(_HEADER_BYTES + len(spec.text), _WORD_BYTES)
    spans = _spans(spec, lengths, sizes_at + _WORD_BYTES * len(lengths), place)
    ends = [sizes_at + _WORD_BYTES * len(lengths), *(start + nbytes for start, nbytes in spans)]
    gaps = [bytes(start - end) for (start, _), end in zip(spans, ends, strict=False)]
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, place, len(spec.text), len(lengths), ends[-1])
    text = spec.text.ljust(sizes_at - _HEADER_BYTES, b"\0")
    return header + text + struct.pack(f"<{len(lengths)}Q", *lengths), gaps, ends[-1]


def _spans(spec: Spec, lengths: tuple[int, ...], end: int, place: int) -> list[tuple[int, int]]:
    """Start and length of each payload; `end` is that of what is before them."""
    spans = []
    for leaf, nbytes in zip(spec.leaves, lengths, strict=True):
        unit = ALIGNMENT_BYTES if leaf.kind in ("array", "tensor") else _WORD_BYTES
        spans.append((round_up(place + end, unit) - place, nbytes))
        end = sum(spans[-1])
    return spans


def seed_of(key: bytes) -> int:
    """The numbers that a key of 24 bytes at most consists of, 8 big-endian bytes each, by exclusive or."""
    return int.from_bytes(key[:8]) ^ int.from_bytes(key[8:16]) ^ int.from_bytes(key[16:24])


def checksum_of(record: bytes | memoryview, seed: int) -> bytes:
    """What a record should begin with."""
    return xxhash.xxh3_64_digest(record[PREFIX_AT:], seed)


def is_intact(record: bytes | memoryview, key: bytes) -> bool:
    """Whether these are exactly the bytes that were encoded for this key."""
    memory = memoryview(record)
    return bytes(memory[:PREFIX_AT]) == checksum_of(memory, seed_of(key))


class Outline(NamedTuple):
    """The positions of the payloads in a record; records with the same `prefix` have the same outline.

    Attributes:
        spec: The structure of the value.
        prefix: All bytes between the checksum and the payloads, at `PREFIX_AT`.
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
    if len(memory) < _HEADER_BYTES:
        raise CacheCorruptError(f"a record of {len(memory)} bytes is shorter than its header")
    magic, version, _, spec_bytes, num_leaves, total = _HEADER.unpack_from(memory, PREFIX_AT)
    if magic != _MAGIC or version != FORMAT_VERSION:
        raise CacheCorruptError(
            f"not a record of format {FORMAT_VERSION}: it starts with {bytes(memory[8:14])!r}"
        )
    payloads_at = round_up(_HEADER_BYTES + spec_bytes, _WORD_BYTES) + _WORD_BYTES * num_leaves
    if not payloads_at <= total <= len(memory):
        raise CacheCorruptError(f"a record claims {total:,} bytes, but only {len(memory):,} are there")
    return _outline_of(bytes(memory[PREFIX_AT:payloads_at]))


@functools.lru_cache(maxsize=1024)
def _outline_of(prefix: bytes) -> Outline:
    _, _, place, spec_bytes, num_leaves, total = _HEADER.unpack_from(prefix)
    spec = Spec.parse(prefix[_HEADER.size : _HEADER.size + spec_bytes])
    if len(spec.leaves) != num_leaves:
        raise CacheCorruptError(f"a record describes {len(spec.leaves)} values, but holds {num_leaves}")
    lengths = struct.unpack_from(f"<{num_leaves}Q", prefix, len(prefix) - _WORD_BYTES * num_leaves)
    spans = _spans(spec, lengths, PREFIX_AT + len(prefix), place)
    for leaf, (start, nbytes) in zip(spec.leaves, spans, strict=True):
        if start + nbytes > total or fixed_nbytes(leaf) not in (None, nbytes):
            raise CacheCorruptError(f"a record's {leaf.kind} claims {nbytes:,} bytes, which is impossible")
    return Outline(spec, prefix, spans)


def decode(record: bytes | memoryview) -> Any:
    """The value of a record that starts at `record[0]`; bytes after it are ignored.

    Arrays are views of `record`, read-only if it is, and keep it alive. All other values are copies.

    Raises:
        CacheCorruptError: The bytes are not a record of this format version.
    """
    memory = memoryview(record)
    spec, _, spans = outline(memory)
    return spec.build(from_bytes(leaf, memory, *span) for leaf, span in zip(spec.leaves, spans, strict=True))
