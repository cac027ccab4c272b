"""How a shared cache moves to a new segment, its next generation, and how other processes follow.

`SharedMemoryCache.retain` makes a new generation. The process that makes it writes to the old segment where
the new one can be reached: a descriptor of its own, as an entry of the registry would tell it. Rules:

1. A generation is complete before any other process can find it. If the maker dies before that, nothing has
   changed for the others.
2. The pointer in the old segment has a checksum and is written before the number that announces it, so a
   process sees it complete or not at all.
3. Every access of a process compares the announced number with the number that it has dealt with. If they
   differ, the process attaches to the new generation and gives up the old one.
4. The descriptor in the pointer is the maker's anchor (see `shared`), which always refers to the newest
   generation that the maker holds. So one step is enough for a process that missed several generations.
5. If the maker is gone, other owners of the cache are asked, if it is registered. If the new generation
   cannot be reached at all, the process goes on with the old one.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from fastload.cache.ram import owners
from fastload.cache.ram.generation import WORD_BYTES, Generation
from fastload.cache.ram.layout import RETAINS_ALL, SUCCESSOR_AT, Stamp
from fastload.cache.ram.owners import Entry
from fastload.errors import SegmentError
from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from fastload.memory.segment import Segment

_POINTER = struct.Struct("<QQQQQ")  # number of the generation; pid, start, descriptor and namespace
_CRC = struct.Struct("<I")
_WORD = struct.Struct("<Q")
_POINTER_AT = SUCCESSOR_AT + WORD_BYTES


def digest_of(retained: npt.NDArray[np.bool_]) -> bytes:
    """The digest by which processes compare the samples that they retain.

    Args:
        retained: `(num_samples,) bool`.
    """
    if retained.all():
        return RETAINS_ALL
    return hashlib.blake2b(np.packbits(retained).tobytes(), digest_size=len(RETAINS_ALL)).digest()


def announce(old: Generation, number: int, holder: Entry) -> None:
    """Write to an old generation where its successor is; the caller holds the old generation's lock.

    Args:
        old: The old generation.
        number: The successor's number.
        holder: The process that holds the successor, and its descriptor.

    Raises:
        OSError: The system refused the memory.
    """
    pointer = _POINTER.pack(number, holder.pid, holder.started, holder.fd, holder.namespace)
    old.segment.write(pointer + _CRC.pack(zlib.crc32(pointer)), _POINTER_AT)
    os.pwrite(old.segment.fd, _WORD.pack(number), SUCCESSOR_AT)  # last


def attach(old: Generation) -> Generation | None:
    """The newest generation that this process can reach and map; None if there is none after the old one."""
    stamp = old.stamp
    for entry in _holders(old):
        segment = _open(entry, stamp)
        if segment is None:
            continue
        try:
            return old.next(segment, segment.map(writable=False))
        except SegmentError as error:  # of this process only: other processes may have other limits
            segment.close()
            log.info("cache: process %d keeps an older part of it: %s", os.getpid(), str(error))
    return None


def attach_to(entry: Entry, cache_id: int) -> Segment:
    """The segment of a cache that another process holds, for a process that had no generation of it.

    Raises:
        SegmentError: The process is gone, or may not be asked, or its descriptor is not this cache.
    """
    segment = _open(entry, Stamp(0, cache_id, RETAINS_ALL))
    if segment is None:
        raise SegmentError(
            f"cannot attach the shared cache at /proc/{entry.pid}/fd/{entry.fd}. "
            "Its owner must be alive, of the same user and in the same PID namespace."
        )
    return segment


def _holders(old: Generation) -> Iterator[Entry]:
    """Processes that may hold a later generation."""
    fingerprint = old.plan.origin.fingerprint
    name = "" if fingerprint is None else fingerprint.name
    raw = os.pread(old.segment.fd, _POINTER.size + _CRC.size, _POINTER_AT)
    pointer = raw[: _POINTER.size]
    if _CRC.unpack_from(raw, _POINTER.size)[0] == zlib.crc32(pointer):
        _, pid, started, fd, namespace = _POINTER.unpack(pointer)
        yield Entry(name, pid, started, fd, namespace)
    if name:
        yield from owners.entries(name)


def _open(entry: Entry, after: Stamp) -> Segment | None:
    """The segment behind an entry, if it is a later generation of the same cache than a stamp's."""
    if not entry.is_alive:
        return None
    try:
        segment = entry.attach()
    except (owners.UnreachableOwnerError, owners.StaleEntryError) as error:
        log.info("cache: process %d does not reach process %d: %s", os.getpid(), entry.pid, str(error))
        return None
    stamp = Stamp.read(segment) if segment.is_sealed and segment.is_own else None
    if stamp is None or stamp.cache_id != after.cache_id or stamp.number <= after.number:
        segment.close()
        return None
    return segment
