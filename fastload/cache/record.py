"""One sample as bytes: a closed, documented, versioned format that holds no pickle.

All numbers are little-endian:

    offset  bytes
    0       4      magic, b"FLrc"
    4       2      format version, 1
    6       2      codec: 0 raw, 1 jpeg, 2 png, 3 webp; see `codecs` for which leaves it applies to
    8       4      S, bytes of the spec
    12      4      L, number of leaves
    16      8      bytes of the whole record
    24      S      the spec: JSON as in `spec`, ASCII
    ...     8 * L  bytes of each leaf's payload, at the next multiple of 8
    ...            the payloads in order, each at the next multiple of its alignment from the record's start:
                   64 for arrays and tensors, 8 for all else; the gaps are zero

Payloads: a leaf that the codec applies to is an image file. Other arrays, tensors and NumPy scalars are their
elements in C order and in the dtype's own byte order; int is two's complement in 8 bytes or more; float is
IEEE 754 binary64; bool one byte; str is UTF-8 (lone surrogates as three bytes each); bytes are themselves;
None has none. NumPy's own str and bytes, str_ and bytes_, are stored as str and bytes are.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

from fastload.cache.lmdb.codecs import BEST_QUALITY, CODECS, codec_of_leaf, decode_image, encode_image
from fastload.errors import CacheCorruptError
from fastload.memory.segment import round_up
from fastload.nested.leaves import Leaf, fixed_nbytes, from_bytes, to_bytes
from fastload.nested.spec import Spec, flatten

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


def record_parts(
    spec: Spec, values: list[Any], codec: str = "raw", quality: int = BEST_QUALITY
) -> tuple[list[Any], int]:
    """The record as buffers to be written one after another, and its length in bytes.

    Args:
        spec: Of the sample.
        values: As `flatten` gives them; arrays that stay raw are not copied.
        codec: How images are written, one of `CODECS`.
        quality: Of jpeg and webp, 1 to 100.
    """
    payloads = [
        _payload(leaf, value, codec, quality) for leaf, value in zip(spec.leaves, values, strict=True)
    ]
    sizes = [len(payload) for payload in payloads]
    sizes_at = round_up(_HEADER.size + len(spec.text), _WORD_BYTES)
    end = sizes_at + _WORD_BYTES * len(sizes)
    parts: list[Any] = [spec.text, bytes(sizes_at - _HEADER.size - len(spec.text))]
    parts.append(struct.pack(f"<{len(sizes)}Q", *sizes))
    for leaf, payload in zip(spec.leaves, payloads, strict=True):
        start = round_up(end, _alignment_bytes(leaf))
        parts += [bytes(start - end), payload]
        end = start + len(payload)
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, CODECS.index(codec), len(spec.text), len(sizes), end)
    return [header, *parts], end


def _payload(leaf: Leaf, value: Any, codec: str, quality: int) -> Any:
    way = codec_of_leaf(codec, leaf)
    return to_bytes(leaf, value) if way == "raw" else encode_image(way, value, quality)


class Outline(NamedTuple):
    """Where the payloads of a record lie; records that begin with the same `prefix` have the same outline.

    Attributes:
        spec: The structure of the sample.
        codec: How its images are written.
        prefix: All bytes in front of the payloads.
        places: Start and number of bytes of each leaf's payload.
        ways: How each leaf is written: `"raw"`, or the codec of an image.
    """

    spec: Spec
    codec: str
    prefix: bytes
    places: list[tuple[int, int]]
    ways: list[str]


def outline(record: bytes | memoryview) -> Outline:
    """Where everything lies in a record, all checked against its length.

    Raises:
        CacheCorruptError: The bytes are no record of this format version.
    """
    memory = memoryview(record)
    if len(memory) < _HEADER.size:
        raise CacheCorruptError(f"a record of {len(memory)} bytes is shorter than its header")
    magic, version, codec, spec_bytes, num_leaves, total = _HEADER.unpack_from(memory)
    if magic != _MAGIC or version != FORMAT_VERSION:
        raise CacheCorruptError(f"no record of format {FORMAT_VERSION}: it starts with {bytes(memory[:6])!r}")
    if codec >= len(CODECS):
        raise CacheCorruptError(f"a record names codec {codec}, there are {len(CODECS)}")
    payloads_at = round_up(_HEADER.size + spec_bytes, _WORD_BYTES) + _WORD_BYTES * num_leaves
    if not payloads_at <= total <= len(memory):
        raise CacheCorruptError(f"a record claims {total:,} bytes, {len(memory):,} are there")
    return _outline_of(bytes(memory[:payloads_at]))


@lru_cache(maxsize=1024)  # samples of one shape differ in their payloads alone
def _outline_of(prefix: bytes) -> Outline:
    _, _, number, spec_bytes, num_leaves, total = _HEADER.unpack_from(prefix)
    codec = CODECS[number]
    spec = Spec.parse(prefix[_HEADER.size : _HEADER.size + spec_bytes])
    if len(spec.leaves) != num_leaves:
        raise CacheCorruptError(f"a record describes {len(spec.leaves)} values and holds {num_leaves}")
    ways = [codec_of_leaf(codec, leaf) for leaf in spec.leaves]
    sizes = struct.unpack_from(f"<{num_leaves}Q", prefix, len(prefix) - _WORD_BYTES * num_leaves)
    places = []
    end = len(prefix)
    for leaf, way, nbytes in zip(spec.leaves, ways, sizes, strict=True):
        start = round_up(end, _alignment_bytes(leaf))
        end = start + nbytes
        expected = fixed_nbytes(leaf) if way == "raw" else None
        if end > total or (expected is not None and expected != nbytes):
            raise CacheCorruptError(f"a record's {leaf.kind} claims {nbytes:,} bytes, which cannot be")
        places.append((start, nbytes))
    return Outline(spec, codec, prefix, places, ways)


def decode(record: bytes | memoryview) -> Any:
    """The sample of a record that starts at `record[0]`; bytes after it are ignored.

    Arrays are views of `record`, read-only if it is, and keep it alive; decoded images are read-only arrays
    of their own; all else is a copy.

    Raises:
        CacheCorruptError: The bytes are no record of this format version.
        CacheError: The class of a namedtuple is not imported in this process.
    """
    memory = memoryview(record)
    spec, _, _, places, ways = outline(memory)
    values = []
    for leaf, way, (start, nbytes) in zip(spec.leaves, ways, places, strict=True):
        if way == "raw":
            values.append(from_bytes(leaf, memory, start, nbytes))
        else:
            values.append(decode_image(way, bytes(memory[start : start + nbytes]), leaf))
    return spec.build(values)


def spec_of(record: bytes | memoryview) -> Spec:
    """The structure of the sample in a record.

    Raises:
        CacheCorruptError: The bytes are no record of this format version.
    """
    return outline(record).spec


def spec_text(record: bytes | memoryview) -> bytes:
    """The structure of the sample in a record, as the text that the record stores; it is not parsed.

    Raises:
        CacheCorruptError: The record is shorter than its header.
    """
    if len(record) < _HEADER.size:
        raise CacheCorruptError(f"a record of {len(record)} bytes is shorter than its header")
    _, _, _, spec_bytes, _, _ = _HEADER.unpack_from(record)
    return bytes(record[_HEADER.size : _HEADER.size + spec_bytes])


def _alignment_bytes(leaf: Leaf) -> int:
    return ALIGNMENT_BYTES if leaf.kind in ("array", "tensor") else _WORD_BYTES
