"""Anonymous shared memory: create, attach, map, prefault, close.

A segment is a memfd: pages with a descriptor and no name, so no mount of 64 MB limits it and no SIGKILL
leaks it; the kernel frees it with its last descriptor and mapping (memfd_create(2)).

Rules:
1. Whoever creates or attaches a segment closes it; closing never touches what others hold.
2. A mapping outlives its segment object: close() gives up the descriptor, not the pages in use.
3. A segment pickles as a handle (a descriptor to duplicate), never as bytes.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from multiprocessing import context, reduction
from typing import Any

from fastload.errors import SegmentError

try:
    import fcntl
except ImportError:  # Windows, where is_supported() is False
    fcntl = None  # type: ignore[assignment]

PAGE_BYTES = mmap.PAGESIZE

# Not named by Python 3.11's mmap module; values from linux/mman.h (kernel 5.14).
_MADV_POPULATE_WRITE = 23


def is_supported() -> bool:
    """Whether this platform has what segments need (Linux with memfd_create)."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


def round_up(nbytes: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``nbytes``."""
    return -(-nbytes // multiple) * multiple


class Segment:
    """A piece of anonymous shared memory, known to this process by a descriptor.

    Args:
        fd: An open memfd descriptor; the segment owns it from here on.
        nbytes: Its size in bytes.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes

    @classmethod
    def create(cls, nbytes: int, *, name: str = "fastload", sealed: bool = False) -> Segment:
        """Make a segment of ``nbytes`` zero bytes; pages are taken when first touched.

        Args:
            nbytes: Size; rounded up to whole pages, at least one.
            name: Shown in /proc/PID/maps only; needs not be unique.
            sealed: Forbid every later change of the size, so that no mapping can ever fault with SIGBUS.

        Raises:
            SegmentError: The system refused the memory or the descriptor.
        """
        nbytes = max(round_up(nbytes, PAGE_BYTES), PAGE_BYTES)
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise SegmentError(f"cannot create a shared segment of {nbytes:,} bytes: {error}") from error
        try:
            os.fchmod(fd, 0o600)  # a memfd is open to everyone who can reach its descriptor
            os.ftruncate(fd, nbytes)
            if sealed:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            os.close(fd)
            raise SegmentError(f"cannot size a shared segment to {nbytes:,} bytes: {error}") from error
        return cls(fd, nbytes)

    @classmethod
    def attach(cls, fd: int) -> Segment:
        """The segment behind a descriptor that was received; owns ``fd`` from here on."""
        return cls(fd, os.fstat(fd).st_size)

    @property
    def is_sealed(self) -> bool:
        """Whether its size can never change."""
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        try:
            return fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & seals == seals
        except OSError:  # no memfd
            return False

    @property
    def is_own(self) -> bool:
        """Whether it belongs to this process's user, and is open to no other."""
        status = os.fstat(self.fd)
        return status.st_uid == os.geteuid() and not status.st_mode & 0o077

    def map(self, *, writable: bool) -> mmap.mmap:
        """Map the whole segment, shared; the mapping stays valid after close().

        Raises:
            SegmentError: The address space or the limit on mappings is used up.
        """
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            return mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED, protection)
        except OSError as error:
            raise SegmentError(f"cannot map a shared segment of {self.nbytes:,} bytes: {error}") from error

    def reopen(self) -> int:
        """A new descriptor with a file description of its own, which the caller closes.

        flock(2) locks belong to the file description: one that was inherited or duplicated excludes nobody.
        """
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Give up this process's descriptor; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is not None:
            return _attach_inherited, (reduction.DupFd(self.fd),)
        # Not on its way to a child process of ours: the reader must belong to the same user and open the
        # descriptor while this process lives (proc(5), /proc/PID/fd).
        status = os.fstat(self.fd)
        return _attach_through_proc, (os.getpid(), self.fd, status.st_dev, status.st_ino)


def _attach_inherited(duplicate: Any) -> Segment:
    return Segment.attach(duplicate.detach())


def _attach_through_proc(pid: int, fd: int, device: int, inode: int) -> Segment:
    path = f"/proc/{pid}/fd/{fd}"
    try:
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SegmentError(
            f"cannot attach the shared segment at {path}: {error}. "
            "Its owner must be alive, of the same user and in the same PID namespace."
        ) from error
    status = os.fstat(own)
    if (status.st_dev, status.st_ino) != (device, inode):
        os.close(own)
        raise SegmentError(f"{path} is no longer the shared segment it was when the handle was made")
    return Segment.attach(own)


def populate(mapping: mmap.mmap) -> None:
    """Take all pages of a writable mapping now, in one call instead of one fault each.

    Raises:
        SegmentError: There is not that much memory (instead of SIGBUS at the first touch).
    """
    if sys.platform != "linux":
        return  # pages come one fault at a time, slower and no less right
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.EFAULT, errno.ENOSPC):
            raise SegmentError(f"cannot take {len(mapping):,} bytes of shared memory: {error}") from error
        # EINVAL: a kernel before 5.14, which is as above.
