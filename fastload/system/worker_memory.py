"""Tunes malloc and the garbage collector for worker processes.

A decoder allocates megabytes for each image, and frees them. glibc gives such memory back to the system at
once, and each page of the next image is faulted in and zeroed again, which takes up to half of the time of
decoding (benchmarks/NOTES.md, "Freed memory").
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys

from fastload.system.budget import available_bytes

# Of mallopt(3), and in malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_MAX_KEPT_BYTES = 128 << 20  # by each process
_MIN_KEPT_BYTES = 4 << 20  # less would not hold the memory of an image
_SHARE_OF_FREE = 1 / 16  # of the machine's free memory, for all workers together
# The largest allocation without its own mapping, which glibc would unmap when freed. Releases before 2.35
# accept at most 32 MiB.
_LARGEST_BYTES = (64 << 20, 32 << 20)
# The user has already made these choices.
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def memory_to_keep(num_processes: int) -> int:
    """The bytes of freed memory that each of so many processes of this machine can keep."""
    return min(_MAX_KEPT_BYTES, int(available_bytes() * _SHARE_OF_FREE) // max(1, num_processes))


def keep_freed_memory(num_processes: int, kept_bytes: int | None = None) -> int:
    """Let this process keep memory that it frees.

    Does nothing if an environment variable sets glibc's thresholds, or without glibc.

    Args:
        num_processes: How many processes of this machine do the same.
        kept_bytes: The result of `memory_to_keep`, if it is known: to ask takes a new process milliseconds.

    Returns:
        The maximum of freed memory to keep, in bytes; 0 if nothing was changed.
    """
    if any(name in os.environ for name in _OWN_SETTINGS) or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return 0
    if kept_bytes is None:
        kept_bytes = memory_to_keep(num_processes)
    if kept_bytes < _MIN_KEPT_BYTES:
        return 0
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return 0
    if not any(mallopt(_M_MMAP_THRESHOLD, min(nbytes, kept_bytes)) for nbytes in _LARGEST_BYTES):
        return 0
    return kept_bytes if mallopt(_M_TRIM_THRESHOLD, kept_bytes) else 0


def freeze_inherited() -> None:
    """Keep the garbage collector of this process away from all objects that it was started with.

    A full collection would walk the parent's heap and write to each object: this takes a tenth of a second,
    and copies hundreds of megabytes of pages that the processes share. Free-threaded builds go without: in
    releases before 2026, objects in use can be destroyed after gc.freeze() (issues 126312 and 142975 of
    CPython).
    """
    if "t" not in sys.abiflags:
        gc.freeze()
