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
    ...     8 * L  number of bytes of each leaf's payload, in 7 bytes, and its codec, in the eighth, at the
                   next multiple of 8; codecs are 0 raw, 1 jpeg, 2 png, 3 webp
    ...            the payloads in order, each at the next multiple of its alignment from the record's start:
                   64 for arrays and tensors, 8 for other leaves; the gaps are zero

Payloads: a leaf with a codec is an image file. Other arrays, tensors and NumPy scalars are their
elements in C order and in the dtype's own byte order. An int is two's complement in 8 bytes or more, a float
is IEEE 754 binary64, a bool is one byte, a str is UTF-8 (lone surrogates as three bytes each), bytes are
stored unchanged, and None has no payload. NumPy's str_ and bytes_ are stored like str and bytes. An encoded
image is the length of its path in 4 bytes, the path in UTF-8, and the content of the file.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

from fastload.cache.format.codecs import (
    BEST_QUALITY,
    CODECS,
    codec_of_leaf,
    decode_image,
    encode_image,
    encoded_image,
    is_lossy,
)
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
_CODEC_SHIFT = 56  # of a codec in the word that has the number of bytes of a payload
_MAX_BYTES = (1 << _CODEC_SHIFT) - 1


def encode(sample: Any) -> bytes:
    """A sample as one record.

    Raises:
        UnsupportedSampleError: A value in it cannot be cached; names its path.
    """
    return b"".join(record_parts(*flatten(sample))[0])


def record_parts(
    spec: Spec,
    values: list[Any],
    codec: str = "raw",
    quality: int = BEST_QUALITY,
    lossy_leaf: str | None = None,
) -> tuple[list[Any], int]:
    """The record as buffers, to be written one after another, and its length in bytes.

    Args:
        spec: Of the sample.
        values: As `flatten` returns them; raw arrays are not copied.
        codec: How images are written, one of `CODECS`.
        quality: Quality of jpeg and webp, 1 to 100.
        lossy_leaf: The path of the leaf that a lossy codec applies to; other images are written as png.
    """
    codecs = _codecs_of(spec, "png" if is_lossy(codec, quality) else codec, codec, lossy_leaf)
    payloads = [
        to_bytes(leaf, value) if leaf_codec == "raw" else encode_image(leaf_codec, value, quality)
        for leaf, value, leaf_codec in zip(spec.leaves, values, codecs, strict=True)
    ]
    words = [
        len(payload) | CODECS.index(leaf_codec) << _CODEC_SHIFT
        for payload, leaf_codec in zip(payloads, codecs, strict=True)
    ]
    sizes_at = round_up(_HEADER.size + len(spec.text), _WORD_BYTES)
    end = sizes_at + _WORD_BYTES * len(words)
    parts: list[Any] = [spec.text, bytes(sizes_at - _HEADER.size - len(spec.text))]
    parts.append(struct.pack(f"<{len(words)}Q", *words))
    for leaf, payload in zip(spec.leaves, payloads, strict=True):
        start = round_up(end, _alignment_bytes(leaf))
        parts += [bytes(start - end), payload]
        end = start + len(payload)
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, len(spec.text), len(words), end)
    return [header, *parts], end


@lru_cache(maxsize=1024)
def _codecs_of(spec: Spec, codec: str, lossy_codec: str, lossy_leaf: str | None) -> list[str]:
    """The codec of each leaf."""
    return [
        codec_of_leaf(lossy_codec if path == lossy_leaf else codec, leaf)
        for path, leaf in zip(spec.paths(), spec.leaves, strict=True)
    ]


class Outline(NamedTuple):
    """The positions of the payloads in a record; records with the same `prefix` have the same outline.

    Attributes:
        spec: The structure of the sample.
        prefix: All bytes before the payloads.
        spans: Start and number of bytes of each leaf's payload.
        codecs: How each leaf is encoded: `"raw"`, or the codec of an image.
    """

    spec: Spec
    prefix: bytes
    spans: list[tuple[int, int]]
    codecs: list[str]


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
    words = struct.unpack_from(f"<{num_leaves}Q", prefix, len(prefix) - _WORD_BYTES * num_leaves)
    spans, codecs = [], []
    end = len(prefix)
    for leaf, word in zip(spec.leaves, words, strict=True):
        number, nbytes = word >> _CODEC_SHIFT, word & _MAX_BYTES
        leaf_codec = CODECS[number] if number < len(CODECS) else None
        if leaf_codec is None or codec_of_leaf(leaf_codec, leaf) != leaf_codec:
            raise CacheCorruptError(f"a record's {leaf.kind} names codec {number}, which is impossible")
        start = round_up(end, _alignment_bytes(leaf))
        end = start + nbytes
        expected = fixed_nbytes(leaf) if leaf_codec == "raw" else None
        if end > total or (expected is not None and expected != nbytes):
            raise CacheCorruptError(f"a record's {leaf.kind} claims {nbytes:,} bytes, which is impossible")
        spans.append((start, nbytes))
        codecs.append(leaf_codec)
    return Outline(spec, prefix, spans, codecs)


def decode(record: bytes | memoryview, *, undecoded: bool = False) -> Any:
    """The sample of a record that starts at `record[0]`; bytes after it are ignored.

    Arrays are views of `record`, read-only if it is, and keep it alive. Decoded images are new, read-only
    arrays. All other values are copies.

    Args:
        record: The bytes.
        undecoded: Return images in jpeg as `EncodedImage`, except for small ones.

    Raises:
        CacheCorruptError: The bytes are not a record of this format version.
        CacheError: The class of a namedtuple is not imported in this process.
    """
    memory = memoryview(record)
    spec, _, spans, codecs = outline(memory)
    values = []
    for leaf, leaf_codec, (start, nbytes) in zip(spec.leaves, codecs, spans, strict=True):
        if leaf_codec == "raw":
            values.append(from_bytes(leaf, memory, start, nbytes))
        else:
            payload = memory[start : start + nbytes]
            image = encoded_image(leaf_codec, payload, leaf) if undecoded else None
            values.append(decode_image(leaf_codec, bytes(payload), leaf) if image is None else image)
    return spec.build(values)


def _alignment_bytes(leaf: Leaf) -> int:
    return ALIGNMENT_BYTES if leaf.kind in ("array", "tensor") else _WORD_BYTES
