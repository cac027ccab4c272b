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
import operator
import struct
from typing import Any, NamedTuple

import xxhash

from fastload.errors import CacheCorruptError
from fastload.memory.segment import round_up
from fastload.nested.leaf import Leaf, fixed_nbytes
from fastload.nested.leaves import from_bytes, to_bytes
from fastload.nested.spec import Spec, flatten

FORMAT_VERSION = 4
ALIGNMENT_BYTES = 64
LMDB_PLACE = (
    16  # bytes behind the start of a page, of large values. Copies from elsewhere take a quarter longer
)

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
    place = 0 if key is None else LMDB_PLACE
    sizes_at = round_up(_HEADER_BYTES + len(spec.text), _WORD_BYTES)
    end = sizes_at + _WORD_BYTES * len(payloads)
    parts: list[Any] = [b"", spec.text, bytes(sizes_at - _HEADER_BYTES - len(spec.text))]
    parts.append(struct.pack(f"<{len(payloads)}Q", *map(len, payloads)))
    for leaf, payload in zip(spec.leaves, payloads, strict=True):
        start = round_up(place + end, _alignment_bytes(leaf)) - place
        parts += [bytes(start - end), payload]
        end = start + len(payload)
    parts[0] = _HEADER.pack(_MAGIC, FORMAT_VERSION, place, len(spec.text), len(payloads), end)
    checksum = xxhash.xxh3_64(seed=seed_of(key or b""))
    for part in parts if key is not None else ():
        checksum.update(part)
    return [bytes(PREFIX_AT) if key is None else checksum.digest(), *parts], end


def seed_of(key: bytes) -> int:
    """The numbers that a key consists of, 8 big-endian bytes each, joined by exclusive or."""
    words = range(0, len(key), _WORD_BYTES)
    return functools.reduce(operator.xor, (int.from_bytes(key[at : at + _WORD_BYTES]) for at in words), 0)


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


@functools.lru_cache(maxsize=1024)  # values of one shape differ only in their payloads
def _outline_of(prefix: bytes) -> Outline:
    _, _, place, spec_bytes, num_leaves, total = _HEADER.unpack_from(prefix)
    spec = Spec.parse(prefix[_HEADER.size : _HEADER.size + spec_bytes])
    if len(spec.leaves) != num_leaves:
        raise CacheCorruptError(f"a record describes {len(spec.leaves)} values, but holds {num_leaves}")
    lengths = struct.unpack_from(f"<{num_leaves}Q", prefix, len(prefix) - _WORD_BYTES * num_leaves)
    spans = []
    end = PREFIX_AT + len(prefix)
    for leaf, nbytes in zip(spec.leaves, lengths, strict=True):
        start = round_up(place + end, _alignment_bytes(leaf)) - place
        end = start + nbytes
        if end > total or fixed_nbytes(leaf) not in (None, nbytes):
            raise CacheCorruptError(f"a record's {leaf.kind} claims {nbytes:,} bytes, which is impossible")
        spans.append((start, nbytes))
    return Outline(spec, prefix, spans)


def decode(record: bytes | memoryview) -> Any:
    """The value of a record that starts at `record[0]`; bytes after it are ignored.

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
