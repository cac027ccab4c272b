"""The layout of a segment that holds samples by index: a table, columns for uniform samples, and records.

The process that makes the segment plans the layout; other processes read it from the segment. In the space of
the segment (see `arena`):

    table        8 bytes a sample: 0 = empty, an odd number 2 * row + 1 = a uniform row, else the offset of a
                 record
    columns      uniform samples (see `columns`), if all of them fit; row = index. If not, all are records, so
                 that any subset can be stored: small rows of a random subset would touch nearly all pages
    records      all others
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastload.cache.columns import Column, plan_columns
from fastload.cache.fingerprint import Fingerprint
from fastload.cache.ram.arena import (
    DESCRIPTION_AT,
    ENTRY_BYTES,
    TABLE_AT,
    Cursor,
    claimed_bytes,
    create_segment,
    read_description,
)
from fastload.cache.records import ALIGNMENT_BYTES, record_parts
from fastload.errors import CacheMismatchError, SharedMemoryError
from fastload.memory.segment import PAGE_BYTES, Segment, round_up
from fastload.nested.leaf import dtype_name, numpy_dtype
from fastload.nested.spec import Spec, flatten
from fastload.system.humanize import readable_size
from fastload.system.locks import flocked
from fastload.system.logs import log

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

_RAGGED_MULTIPLE = 8
_MIN_RAGGED_BYTES = 256 << 20
_NUMBER_FIELDS = (*("num_samples", "max_bytes", "ragged_at", "ragged_bytes", "room_bytes", "record_bytes"),)


@dataclass(frozen=True)
class Origin:
    """Which process made a cache, when, and from which samples.

    Attributes:
        cache_id: A random name, different for each cache of all machines.
        pid: The process.
        created_s: Seconds since 1970.
        fingerprint: Of the samples; None for a private cache.
    """

    cache_id: str
    pid: int
    created_s: float
    fingerprint: Fingerprint | None

    @classmethod
    def new(cls, fingerprint: Fingerprint | None) -> Origin:
        """The origin of a cache that this process makes now."""
        return cls(os.urandom(8).hex(), os.getpid(), time.time(), fingerprint)


@dataclass(frozen=True)
class Layout:
    """The offsets and sizes of all parts of a segment; the same in every process."""

    num_samples: int
    max_bytes: int
    spec: Spec | None  # of uniform samples; None if the layout is ragged
    columns: tuple[Column, ...]
    ragged_at: int
    ragged_bytes: int  # address space; not all of it need be used
    room_bytes: int  # what records can take
    record_bytes: int  # what each of them takes; 0: that differs
    origin: Origin = field(compare=False)

    @classmethod
    def plan(
        cls, num_samples: int, max_bytes: int, examples: Sequence[Any], origin: Origin, segment_limit: int = 0
    ) -> Layout:
        """Plan columns if the examples all have the same spec and all samples fit, else records only.

        The ragged area is address space: pages are allocated when they are written. A segment as large as the
        maximum would cost nothing, but RLIMIT_AS and RLIMIT_FSIZE also count untouched pages. So the area has
        eight times the size of `num_samples` records of the largest example, at least 256 MiB (because a few
        examples tell little about a small dataset), and at most `max_bytes`. If samples are larger than that
        on average, the rest is read from the dataset, and a log line says so.

        Args:
            num_samples: Number of samples of the dataset.
            max_bytes: The maximum memory of the cache.
            examples: Samples that are typical of the dataset; without any, the area has `max_bytes`.
            origin: The process that makes the cache, and the fingerprint of the samples.
            segment_limit: The largest segment that the system grants; 0 to plan without one. Columns come
                first, and the ragged area gets the rest.
        """
        if segment_limit:
            max_bytes = max(1, min(max_bytes, segment_limit - TABLE_AT))
        flat = [flatten(example) for example in examples]
        specs = {spec.node: spec for spec, _ in flat}
        spec = next(iter(specs.values())) if len(specs) == 1 else None
        columns_at = round_up(TABLE_AT + num_samples * ENTRY_BYTES, PAGE_BYTES)
        fingerprint = origin.fingerprint
        described_bytes = 0 if fingerprint is None else len(json.dumps([*fingerprint.parts.items()]))
        described_bytes += 0 if spec is None else 4 * len(spec.text)
        described_bytes = round_up(DESCRIPTION_AT + 512 + described_bytes, PAGE_BYTES)
        # Two more are for partly used pages.
        taken_bytes = described_bytes + columns_at - TABLE_AT + 2 * PAGE_BYTES
        room = max(0, max_bytes - taken_bytes)
        columns: tuple[Column, ...] = ()
        end, ragged_bytes = columns_at, room
        if spec is not None:
            columns, end = plan_columns(spec, [values for _, values in flat], columns_at, num_samples)
            if end - columns_at > room:
                spec, columns, end = None, (), columns_at
        sizes = {claimed_bytes(record_parts(*example, None)[1]) for example in flat}
        if sizes:
            ragged_bytes = min(room, max(_MIN_RAGGED_BYTES, _RAGGED_MULTIPLE * num_samples * max(sizes)))
        ragged_at = round_up(end, PAGE_BYTES)
        if segment_limit:
            ragged_bytes = max(0, min(ragged_bytes, segment_limit - ragged_at))
        return cls(
            num_samples=num_samples,
            max_bytes=max_bytes,
            spec=spec,
            columns=columns,
            ragged_at=ragged_at,
            ragged_bytes=round_up(ragged_bytes + ALIGNMENT_BYTES, PAGE_BYTES),
            room_bytes=max(0, room - (end - columns_at)),
            record_bytes=sizes.pop() if len(sizes) == 1 and not columns else 0,
            origin=origin,
        )

    def on_machine(self, max_bytes: int, origin: Origin) -> Layout:
        """The layout of a cache of the same samples on another machine, with its maximum memory."""
        if max_bytes >= self.max_bytes:
            return replace(self, origin=origin)
        if self.columns and self.ragged_at <= max_bytes:
            room_bytes = max(0, self.room_bytes - (self.max_bytes - max_bytes))
            return replace(self, origin=origin, max_bytes=max_bytes, room_bytes=room_bytes)
        return Layout.plan(self.num_samples, max_bytes, (), origin)  # any samples that fit

    @property
    def row_bytes(self) -> int:
        """Bytes of one uniform sample."""
        return sum(column.row_bytes for column in self.columns)

    @property
    def capacity(self) -> int | None:
        """How many samples fit; None if their sizes differ."""
        if self.columns:
            return self.num_samples
        return min(self.num_samples, self.room_bytes // self.record_bytes) if self.record_bytes else None

    def after(self, cursor: Cursor, nbytes: int) -> Cursor:
        """The cursor behind a record of ``nbytes``, which leaves the pages of its row to it."""
        space_bytes = claimed_bytes(nbytes)
        # No sample touches these pages of the row.
        pages = sum(max(0, column.row_bytes // PAGE_BYTES - 1) for column in self.columns)
        return cursor.after(space_bytes, space_bytes - pages * PAGE_BYTES)

    @property
    def limits(self) -> Cursor:
        """How much of the space can be claimed."""
        return Cursor(self.ragged_bytes - ALIGNMENT_BYTES, self.num_samples, self.room_bytes)

    def create_segment(self) -> tuple[Segment, mmap.mmap]:
        """A new segment with this layout, and a read-only mapping; most of it takes no memory yet.

        Raises:
            SharedMemoryError: The memory could not be allocated.
        """
        description = {
            **{name: getattr(self, name) for name in _NUMBER_FIELDS},
            "spec": None if self.spec is None else self.spec.text.decode("ascii"),
            "columns": [(dtype_name(dtype), shape, at) for _, dtype, shape, at in self.columns],
            "origin": asdict(self.origin),
        }
        return create_segment(self.ragged_at + self.ragged_bytes, description)

    @classmethod
    def read(cls, segment: Segment) -> Layout:
        """The layout that a segment describes.

        Raises:
            CacheMismatchError: The segment is not a cache of this format version, or its size could change.
        """
        fields = read_description(segment)
        if "spec" not in fields:
            raise CacheMismatchError("not a cache of samples")
        spec = None if fields["spec"] is None else Spec.parse(fields["spec"].encode("ascii"))
        columns = [
            Column(leaf, numpy_dtype(dtype), tuple(shape), at)
            for leaf, (dtype, shape, at) in zip(spec.leaves if spec else (), fields["columns"], strict=True)
        ]
        origin = Origin(**fields["origin"])
        if fields["origin"]["fingerprint"] is not None:
            origin = replace(origin, fingerprint=Fingerprint(**fields["origin"]["fingerprint"]))
        return cls(
            **{name: fields[name] for name in _NUMBER_FIELDS},
            spec=spec,
            columns=tuple(columns),
            origin=origin,
        )


def make_segment(
    num_samples: int, max_bytes: int, examples: Sequence[Any], origin: Origin
) -> tuple[Segment, Layout, mmap.mmap]:
    """Make the segment, layout and mapping of a new cache, smaller than `max_bytes` if the system demands it.

    The arguments are those of `Layout.plan`.

    Raises:
        SharedMemoryError: The system denied even a segment that holds little more than the examples, or the
            lock under which space is claimed.
    """
    min_bytes = 1 + sum(claimed_bytes(record_parts(*flatten(example), None)[1]) for example in examples)
    layout, reason = Layout.plan(num_samples, max_bytes, examples, origin), ""
    while True:
        try:
            segment, mapping = layout.create_segment()
            break
        except SharedMemoryError as error:
            reason = reason or str(error)
            half_bytes = TABLE_AT + (layout.ragged_at + layout.ragged_bytes - TABLE_AT) // 2
            layout = Layout.plan(num_samples, max_bytes, examples, origin, half_bytes)
            if not layout.columns and layout.room_bytes < min_bytes:
                raise
    if not layout.columns:
        try:
            with flocked(segment.reopen):
                pass
        except OSError as error:
            segment.close()
            raise SharedMemoryError(f"the system does not allow locks on shared memory: {error}") from error
    if reason:
        level = logging.INFO if layout.columns else logging.WARNING
        log.log(level, "the cache has a segment of %s: %s", readable_size(segment.nbytes), reason)
    return segment, layout, mapping
