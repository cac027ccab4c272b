"""The memory layout of a shared cache's segment, and its description in the segment itself.

The process that creates the segment plans the layout; other processes read it from the segment. In order:

    header       magic, format version; crc32, length and offset of the description
    stamp        at byte 32: which generation of which cache this is, and which samples it retains
    cursor       at byte 64: how much of the rows and of the ragged area is used (see `generation`)
    successor    at byte 128: the number of the next generation and a process that holds it (see `generation`)
    description  at byte 1024: JSON, ASCII; in pages of its own at the end if it is too long
    table        from the second page on, 8 bytes a sample: 0 = empty, 2 = not retained, an odd number
                 2 * row + 1 = a uniform row, else the offset of a ragged record
    columns      uniform samples (see `columns`). If all samples fit, row = index; otherwise the rows are
                 given out one after another, so that any subset of the samples can be stored
    ragged       records (see `record`), each after a frame that names its sample

Rows that are given out one after another fill whole pages. If each sample had a row of its own in a larger,
sparse segment, small rows of a random subset would touch nearly all pages, and so take much more memory than
the samples themselves.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fastload.cache.columns import COLUMN_ALIGNMENT_BYTES, Column, plan_columns
from fastload.cache.fingerprint import Fingerprint
from fastload.cache.locks import locked
from fastload.cache.record import ALIGNMENT_BYTES, record_parts
from fastload.errors import CacheMismatchError, SegmentError
from fastload.memory.segment import PAGE_BYTES, Segment, round_up
from fastload.nested.dtypes import dtype_name, numpy_dtype
from fastload.nested.leaves import IMAGE
from fastload.nested.spec import Spec, flatten
from fastload.system.logs import log
from fastload.system.sizes import readable_size

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

SEGMENT_NAME = "fastload-cache"
STAMP_AT = 32
CURSOR_AT = 64
SUCCESSOR_AT = 128
DESCRIPTION_AT = 1024
TABLE_AT = PAGE_BYTES
ENTRY_BYTES = 8
FRAME_BYTES = ALIGNMENT_BYTES

_RAGGED_MULTIPLE = 8
_LEAST_RAGGED_BYTES = 256 << 20

_HEADER = struct.Struct("<8sIIQQ")  # magic, version; crc32, length and offset of the description
_STAMP = struct.Struct("<QQ16s")  # number of the generation, id of the cache, digest of the retained samples
_MAGIC = b"FLcache\0"
_VERSION = 3
_MOST_DESCRIPTION_BYTES = 1 << 24


RETAINS_ALL = bytes(16)
"""The digest of a generation in which every sample may be stored."""


class Stamp(NamedTuple):
    """Which generation of which cache a segment is.

    Attributes:
        number: Of the generation; the first one is 1.
        cache_id: A random number that all generations of a cache share.
        digest: Of the indices that may be stored; `RETAINS_ALL` for all of them.
    """

    number: int
    cache_id: int
    digest: bytes

    @classmethod
    def of_new_cache(cls) -> Stamp:
        """The stamp of a first generation."""
        return cls(1, int.from_bytes(os.urandom(8), "little"), RETAINS_ALL)

    @classmethod
    def parse(cls, header: bytes | memoryview) -> Stamp:
        """The stamp in the first bytes of a segment."""
        return cls(*_STAMP.unpack_from(header, STAMP_AT))

    @classmethod
    def read(cls, segment: Segment) -> Stamp | None:
        """The stamp of a segment; None if the segment is not a cache of this format version."""
        header = os.pread(segment.fd, STAMP_AT + _STAMP.size, 0)
        if len(header) < STAMP_AT + _STAMP.size:
            return None
        magic, version, *_ = _HEADER.unpack_from(header)
        return cls.parse(header) if (magic, version) == (_MAGIC, _VERSION) else None

    def write(self, segment: Segment) -> None:
        """Write the stamp to a segment.

        Raises:
            OSError: The system refused the memory.
        """
        segment.write(_STAMP.pack(*self), STAMP_AT)


@dataclass(frozen=True)
class Origin:
    """Which process made a cache, when, and from which samples.

    Attributes:
        pid: The process.
        created_s: Seconds since 1970.
        fingerprint: Of the samples; None for a private cache.
    """

    pid: int
    created_s: float
    fingerprint: Fingerprint | None


@dataclass(frozen=True)
class Layout:
    """The places of all parts of the segment; the same in every process."""

    num_samples: int
    budget_bytes: int
    spec: Spec | None  # of uniform samples; None if the layout is ragged
    columns: tuple[Column, ...]
    rows: int
    is_packed: bool  # rows are given out one after another, because not all samples have one
    ragged_at: int
    ragged_bytes: int  # address space; less of it may be used
    spare_bytes: int  # the part of the budget that header, table and columns leave free
    origin: Origin = field(compare=False)

    @classmethod
    def plan(
        cls,
        num_samples: int,
        budget_bytes: int,
        examples: Sequence[Any],
        origin: Origin,
        *,
        segment_bytes: int | None = None,
    ) -> Layout:
        """Plan columns if the examples all have the same spec, else ragged records only.

        The ragged area is address space: pages are allocated when they are written. A segment as large as the
        budget would cost nothing, but RLIMIT_AS and RLIMIT_FSIZE also count untouched pages. So the area has
        eight times the size of `num_samples` records of the largest example, at least 256 MiB (because a few
        examples tell little about a small dataset), and at most the budget. If samples are larger than that
        on average, the rest is read from the dataset, and a log line says so (see `shared`).

        Args:
            num_samples: Number of samples of the dataset.
            budget_bytes: The most memory that the cache may take.
            examples: Samples that are typical of the dataset; without any, the area is the budget.
            origin: The process that makes the cache, and the fingerprint of the samples.
            segment_bytes: The largest segment that the system may grant; None to plan without such a limit.
                Columns come first, and the ragged area gets the rest.
        """
        budget_bytes = budget_bytes if segment_bytes is None else min(budget_bytes, segment_bytes)
        flat = [flatten(example) for example in examples]
        specs = {spec.node: spec for spec, _ in flat}
        spec = next(iter(specs.values())) if len(specs) == 1 else None
        columns_at = round_up(TABLE_AT + num_samples * ENTRY_BYTES, PAGE_BYTES)
        left = max(0, budget_bytes - columns_at - _overhead_bytes(spec, origin))
        columns: tuple[Column, ...] = ()
        rows, end = 0, columns_at
        if spec is not None and any(leaf.kind == IMAGE for leaf in spec.leaves):
            spec = None  # files differ in length
        if spec is not None:
            values = [values for _, values in flat]
            columns, rows, end = plan_columns(spec, values, columns_at, left, num_samples)
            if any(
                column.pack(value) is None
                for row in values
                for column, value in zip(columns, row, strict=True)
            ):
                spec, columns, rows, end = None, (), 0, columns_at
        spare = max(0, left - (end - columns_at))
        at = round_up(end, PAGE_BYTES)
        # A sample that does not fit its row is stored in the ragged area, and its row stays untouched.
        ragged_bytes = spare + (end - columns_at)
        if flat:
            largest_bytes = max(_ragged_bytes(*one) for one in flat)
            needed_bytes = _RAGGED_MULTIPLE * num_samples * largest_bytes
            ragged_bytes = min(ragged_bytes, max(_LEAST_RAGGED_BYTES, needed_bytes))
        if segment_bytes is not None:
            ragged_bytes = min(ragged_bytes, max(0, segment_bytes - at))
        ragged_bytes = round_up(ragged_bytes, PAGE_BYTES)
        is_packed = spec is not None and rows < num_samples
        return cls(num_samples, budget_bytes, spec, columns, rows, is_packed, at, ragged_bytes, spare, origin)

    @property
    def row_bytes(self) -> int:
        """Bytes of one uniform sample."""
        return sum(column.row_bytes for column in self.columns)

    @property
    def shared_bytes(self) -> int:
        """An upper bound of what pages at the ends of columns hold in vain while not all rows are used."""
        return 2 * PAGE_BYTES * len(self.columns)

    @property
    def untouched_bytes(self) -> int:
        """Bytes of the pages that no sample touches if its row, one of a full column, is never written."""
        return sum(PAGE_BYTES * max(0, column.row_bytes // PAGE_BYTES - 1) for column in self.columns)

    def create_segment(self, stamp: Stamp | None = None) -> tuple[Segment, mmap.mmap]:
        """A new sealed segment with this layout, and a read-only mapping; most of it takes no memory yet.

        Args:
            stamp: Which generation it is; None for the first one of a new cache.

        Raises:
            SegmentError: The system refused the memory.
        """
        text = json.dumps(self._description()).encode("ascii")
        end = self.ragged_at + self.ragged_bytes
        text_at = DESCRIPTION_AT if DESCRIPTION_AT + len(text) <= TABLE_AT else end
        segment = Segment.create(max(end, text_at + len(text)), name=SEGMENT_NAME, sealed=True)
        try:
            mapping = segment.map(writable=False)
            segment.write(text, text_at)
            (stamp or Stamp.of_new_cache()).write(segment)
            header = _HEADER.pack(_MAGIC, _VERSION, zlib.crc32(text), len(text), text_at)
            segment.write(header)  # last: a segment without a header is not a cache
        except SegmentError:
            segment.close()
            raise
        except OSError as error:
            segment.close()
            raise SegmentError(f"cannot write to a new shared segment: {error}") from error
        return segment, mapping

    def _description(self) -> dict[str, Any]:
        fingerprint = self.origin.fingerprint
        return {
            **{name: getattr(self, name) for name in _PLAIN_FIELDS},
            "spec": None if self.spec is None else self.spec.text.decode("ascii"),
            "columns": [(dtype_name(dtype), shape, at) for _, dtype, shape, at in self.columns],
            "pid": self.origin.pid,
            "created_s": self.origin.created_s,
            "parts": None if fingerprint is None else dict(fingerprint.parts),
            "key": None if fingerprint is None else fingerprint.key,
        }

    @classmethod
    def read(cls, segment: Segment) -> Layout:
        """The layout that a segment describes.

        Raises:
            CacheMismatchError: The segment is not a cache of this format version.
        """
        header = os.pread(segment.fd, _HEADER.size, 0)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise CacheMismatchError(f"not a shared cache: it starts with {header[: len(_MAGIC)]!r}")
        _, version, crc, length, text_at = _HEADER.unpack(header)
        if version != _VERSION:
            raise CacheMismatchError(
                f"a shared cache of format {version}, but this release of fastload uses format {_VERSION}"
            )
        text = os.pread(segment.fd, min(length, _MOST_DESCRIPTION_BYTES), text_at)
        if zlib.crc32(text) != crc:
            raise CacheMismatchError("not a shared cache: its description is damaged")
        fields = json.loads(text)
        spec = None if fields["spec"] is None else Spec.parse(fields["spec"].encode("ascii"))
        leaves = () if spec is None else spec.leaves
        columns = [
            Column(leaf, numpy_dtype(dtype), tuple(shape), at)
            for leaf, (dtype, shape, at) in zip(leaves, fields["columns"], strict=True)
        ]
        fingerprint = None if fields["parts"] is None else Fingerprint(fields["parts"], fields["key"])
        return cls(
            **{name: fields[name] for name in _PLAIN_FIELDS},
            spec=spec,
            columns=tuple(columns),
            origin=Origin(fields["pid"], fields["created_s"], fingerprint),
        )


def create(
    num_samples: int, budget_bytes: int, examples: Sequence[Any], origin: Origin
) -> tuple[Layout, Segment, mmap.mmap]:
    """Make the layout, segment and mapping of a new cache; if the system refuses, try smaller segments.

    Args:
        num_samples: As for `Layout.plan`.
        budget_bytes: As for `Layout.plan`.
        examples: As for `Layout.plan`.
        origin: As for `Layout.plan`.

    Raises:
        SegmentError: The system refused even a segment that holds little more than the examples, or it
            refused the lock that samples of several sizes need.
    """
    planned = layout = Layout.plan(num_samples, budget_bytes, examples, origin)
    example_bytes = [_ragged_bytes(*flatten(example)) for example in examples]
    least_bytes = TABLE_AT + num_samples * ENTRY_BYTES + sum(example_bytes)
    ragged_bytes = 0 if planned.rows else num_samples * max(example_bytes, default=0)
    padding_bytes = COLUMN_ALIGNMENT_BYTES * len(planned.columns) + _overhead_bytes(planned.spec, origin)
    needed_bytes = planned.ragged_at + padding_bytes + ragged_bytes
    segment_bytes = planned.ragged_at + planned.ragged_bytes
    refusal: SegmentError | None = None
    while True:
        try:
            segment, mapping = layout.create_segment()
            break
        except SegmentError as error:
            refusal = refusal or error
            if segment_bytes <= least_bytes:
                raise refusal from refusal.__cause__
            half_bytes = max(segment_bytes // 2, least_bytes)
            # Also try the size that all samples need if they are as large as the examples.
            segment_bytes = needed_bytes if half_bytes < needed_bytes < segment_bytes else half_bytes
        layout = Layout.plan(num_samples, budget_bytes, examples, origin, segment_bytes=segment_bytes)
    refused_lock = _why_no_lock(segment) if layout.spec is None or layout.is_packed else None
    if refused_lock is not None:
        segment.close()
        if layout.spec is None:
            raise SegmentError(
                f"samples of several sizes need a lock on their shared memory, which the system refuses: "
                f"{refused_lock}"
            ) from refused_lock
        log.info("cache: only the first %d samples have a row, as the system refuses locks", layout.rows)
        layout = replace(layout, is_packed=False)
        segment, mapping = layout.create_segment()
    if refusal is not None:
        is_enough = layout.rows == planned.rows and layout.ragged_bytes >= ragged_bytes
        log.log(
            logging.INFO if is_enough else logging.WARNING,
            "the cache has a segment of %s instead of %s: %s",
            readable_size(segment.nbytes),
            readable_size(planned.ragged_at + planned.ragged_bytes),
            str(refusal),  # the error itself would keep this frame alive in a log handler
        )
    return layout, segment, mapping


def _overhead_bytes(spec: Spec | None, origin: Origin) -> int:
    """An upper bound of the bytes of a description at the end, and of pages that are used in part."""
    fingerprint = origin.fingerprint
    texts = [] if fingerprint is None else [*fingerprint.parts, *fingerprint.parts.values(), fingerprint.key]
    num_columns = 0 if spec is None else len(spec.leaves)
    spec_bytes = 0 if spec is None else 3 * len(spec.text)  # in quotes, and the columns repeat it
    described_bytes = 512 + 64 * num_columns + spec_bytes + len(json.dumps(texts)) + 8 * len(texts)
    is_apart = described_bytes > TABLE_AT - DESCRIPTION_AT
    return is_apart * round_up(described_bytes, PAGE_BYTES) + 2 * PAGE_BYTES


def _ragged_bytes(spec: Spec, values: list[Any]) -> int:
    """Bytes that a sample takes in the ragged area."""
    return round_up(FRAME_BYTES + record_parts(spec, values)[1], ALIGNMENT_BYTES)


def _why_no_lock(segment: Segment) -> OSError | None:
    """The error with which the system refuses the lock under which space is claimed; None if it grants it."""
    try:
        with locked(segment.reopen):
            return None
    except OSError as error:
        return error


_PLAIN_FIELDS = (
    "num_samples",
    "budget_bytes",
    "rows",
    "is_packed",
    "ragged_at",
    "ragged_bytes",
    "spare_bytes",
)
