"""One sample as bytes: a closed, documented, versioned format that holds no pickle.

Called by the caches and by the builder, in any process. All numbers are little-endian:

    offset  bytes
    0       4      magic, b"FLrc"
    4       2      format version, 1
    6       2      zero
    8       4      S, bytes of the spec
    12      4      L, number of leaves
    16      8      bytes of the whole record
    24      S      the spec: JSON as in `spec`, ASCII
    ...     8 * L  bytes of each leaf's payload, at the next multiple of 8
    ...            the payloads in order, each at the next multiple of its alignment from the record's start:
                   64 for arrays and tensors, 8 for all else; the gaps are zero

Payloads: arrays, tensors and NumPy scalars are their elements in C order and in the dtype's own byte order;
int is two's complement in 8 bytes or more; float is IEEE 754 binary64; bool one byte; str is UTF-8 (lone
surrogates as three bytes each); bytes are themselves; None has none. NumPy's own str and bytes, str_ and
bytes_, are stored as str and bytes are.
"""

from __future__ import annotations

import struct
from typing import Any

from fastload.cache.leaves import Leaf, fixed_nbytes, from_bytes, to_bytes
from fastload.cache.spec import Spec, flatten
from fastload.errors import CacheCorruptError
from fastload.transport.segment import round_up

FORMAT_VERSION = 1
ALIGNMENT_BYTES = 64

_MAGIC = b"FLrc"
_HEADER = struct.Struct("<4sHHIIQ")
_WORD_BYTES = 8


def encode(sample: Any) -> bytes:
    """A sample as one record.

    Raises:
        UnsupportedSampleError: Something in it is of no kind that is cached; names its path.
    """
    return encode_values(*flatten(sample))


def encode_values(spec: Spec, values: list[Any]) -> bytes:
    """The record of a sample that `flatten` has taken apart."""
    return b"".join(record_parts(spec, values)[0])


def record_parts(spec: Spec, values: list[Any]) -> tuple[list[Any], int]:
    """The record as buffers to be written one after another, arrays not copied, and its length in bytes."""
    payloads = [to_bytes(leaf, value) for leaf, value in zip(spec.leaves, values, strict=True)]
    sizes = [len(payload) for payload in payloads]
    sizes_at = round_up(_HEADER.size + len(spec.text), _WORD_BYTES)
    end = sizes_at + _WORD_BYTES * len(sizes)
    parts: list[Any] = [spec.text, bytes(sizes_at - _HEADER.size - len(spec.text))]
    parts.append(struct.pack(f"<{len(sizes)}Q", *sizes))
    for leaf, payload in zip(spec.leaves, payloads, strict=True):
        start = round_up(end, _alignment_bytes(leaf))
        parts += [bytes(start - end), payload]
        end = start + len(payload)
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, len(spec.text), len(sizes), end)
    return [header, *parts], end


def decode(record: bytes | memoryview) -> Any:
    """The sample of a record that starts at `record[0]`; bytes after it are ignored.

    Arrays are views of `record`, read-only if it is, and keep it alive; all else is a copy.

    Raises:
        CacheCorruptError: The bytes are no record of this format version.
        CacheError: The class of a namedtuple is not imported in this process.
    """
    memory = memoryview(record)
    spec, sizes_at, num_leaves, total = _read_header(memory)
    sizes = struct.unpack_from(f"<{num_leaves}Q", memory, sizes_at)
    end = sizes_at + _WORD_BYTES * num_leaves
    values = []
    for leaf, nbytes in zip(spec.leaves, sizes, strict=True):
        start = round_up(end, _alignment_bytes(leaf))
        end = start + nbytes
        expected = fixed_nbytes(leaf)
        if end > total or (expected is not None and expected != nbytes):
            raise CacheCorruptError(f"a record's {leaf.kind} claims {nbytes:,} bytes, which cannot be")
        values.append(from_bytes(leaf, memory, start, nbytes))
    return spec.build(values)


def spec_of(record: bytes | memoryview) -> Spec:
    """The structure of the sample in a record.

    Raises:
        CacheCorruptError: The bytes are no record of this format version.
    """
    return _read_header(memoryview(record))[0]


def _read_header(memory: memoryview) -> tuple[Spec, int, int, int]:
    """Spec, offset of the sizes, number of leaves and length of a record, all checked against each other."""
    if len(memory) < _HEADER.size:
        raise CacheCorruptError(f"a record of {len(memory)} bytes is shorter than its header")
    magic, version, _, spec_bytes, num_leaves, total = _HEADER.unpack_from(memory)
    if magic != _MAGIC or version != FORMAT_VERSION:
        raise CacheCorruptError(f"no record of format {FORMAT_VERSION}: it starts with {bytes(memory[:6])!r}")
    sizes_at = round_up(_HEADER.size + spec_bytes, _WORD_BYTES)
    if not sizes_at + _WORD_BYTES * num_leaves <= total <= len(memory):
        raise CacheCorruptError(f"a record claims {total:,} bytes, {len(memory):,} are there")
    spec = Spec.parse(bytes(memory[_HEADER.size : _HEADER.size + spec_bytes]))
    if len(spec.leaves) != num_leaves:
        raise CacheCorruptError(f"a record describes {len(spec.leaves)} values and holds {num_leaves}")
    return spec, sizes_at, num_leaves, total


def _alignment_bytes(leaf: Leaf) -> int:
    return ALIGNMENT_BYTES if leaf.kind in ("array", "tensor") else _WORD_BYTES
