"""Anonymous shared memory: create, attach, map, prefault and close segments.

A segment is a memfd (memfd_create(2)): pages with a descriptor and no name. So no 64 MB limit of a mount
applies, and SIGKILL leaks nothing: the kernel frees the pages with the last descriptor and mapping.

The code that creates or attaches a segment closes it. Closing gives up the descriptor: it affects neither
other holders nor mappings, which outlive the segment object.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import sys
import threading
from multiprocessing import context, reduction
from typing import TYPE_CHECKING, Any

from fastload.errors import SharedMemoryError
from fastload.system import linux
from fastload.system.limits import resource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE_BYTES = mmap.PAGESIZE

# Python 3.11's mmap module has no name for it; the value is from linux/mman.h (kernel 5.14).
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25  # kernel 6.1
HUGE_PAGE_BYTES = 2 << 20  # of processors with pages of 4 KiB; fastload uses no others


# These errors mean that a resource is used up, not that the system lacks support for segments.
_SCARCITIES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_LIMITS = {errno.EFBIG: "RLIMIT_FSIZE", errno.ENOMEM: "RLIMIT_AS", errno.EMFILE: "RLIMIT_NOFILE"}


@functools.cache
def why_unsupported() -> str | None:
    """Why segments do not work here, as a readable clause; None if they work.

    The function makes, seals and maps a segment of one page, once per process: in containers memfd_create
    often exists, but is denied.
    """
    if (reason := linux.why_no_memfd()) is not None:
        return reason
    try:
        trial = Segment.create(PAGE_BYTES, name="fastload-trial", sealed=True)
        try:
            trial.map(writable=True).close()
        finally:
            trial.close()
    except SharedMemoryError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _SCARCITIES:
            return None  # the next attempt to create a segment might succeed
        return f"this system denies anonymous shared memory: {error}"
    return None


def round_up(nbytes: int, multiple: int) -> int:
    """``nbytes``, rounded up to a multiple of ``multiple``."""
    return -(-nbytes // multiple) * multiple


class Segment:
    """A piece of anonymous shared memory, which this process holds by a descriptor.

    Args:
        fd: An open memfd descriptor; the segment owns it from here on.
        nbytes: Its size in bytes.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._huge_in: mmap.mmap | None = None  # a mapping through which blocks become huge pages

    @classmethod
    def create(cls, nbytes: int, *, name: str = "fastload", sealed: bool = False) -> Segment:
        """Make a segment of ``nbytes`` zero bytes; pages are allocated on first touch.

        Args:
            nbytes: Size; rounded up to whole pages, at least one.
            name: Shown in /proc/PID/maps only; need not be unique.
            sealed: Forbid every later change of the size, so no mapping can cause a SIGBUS.

        Raises:
            SharedMemoryError: The memory or the descriptor is not available.
        """
        nbytes = max(round_up(nbytes, PAGE_BYTES), PAGE_BYTES)
        try:
            fd = linux.memfd(name)
        except OSError as error:
            raise SharedMemoryError(
                f"cannot create a shared segment of {nbytes:,} bytes: {with_limit(error)}"
            ) from error
        try:
            os.fchmod(fd, 0o600)  # by default, any user who can reach the descriptor can open a memfd
            os.ftruncate(fd, nbytes)
            if sealed:  # after its size is set, which the seal would forbid
                linux.seal_size(fd)
        except OSError as error:
            os.close(fd)
            raise SharedMemoryError(
                f"cannot size a shared segment to {nbytes:,} bytes: {with_limit(error)}"
            ) from error
        return cls(fd, nbytes)

    @classmethod
    def attach(cls, fd: int) -> Segment:
        """The segment behind a received descriptor; it owns ``fd`` from here on."""
        return cls(fd, os.fstat(fd).st_size)

    @property
    def is_sealed(self) -> bool:
        """Whether the segment's size can never change."""
        return linux.is_size_sealed(self.fd)

    @property
    def is_own(self) -> bool:
        """Whether the segment belongs to this process's user, and other users cannot open it."""
        status = os.fstat(self.fd)
        return status.st_uid == os.geteuid() and not status.st_mode & 0o077

    def map(self, *, writable: bool, nbytes: int | None = None, sparing: bool = False) -> mmap.mmap:
        """Map the segment, shared; the mapping stays valid after close().

        Args:
            writable: Whether this process can write through the mapping.
            nbytes: How much of the segment to map, from its start; None for all of it.
            sparing: Whether to leave at least as much address space to the program.

        Raises:
            SharedMemoryError: The address space or the limit on mappings is used up.
        """
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        nbytes = self.nbytes if nbytes is None else nbytes
        try:
            if sparing:  # pages without access take no memory
                mmap.mmap(-1, 2 * nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0).close()
            return mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED, protection)
        except OSError as error:
            raise SharedMemoryError(
                f"cannot map a shared segment of {nbytes:,} bytes: {with_limit(error)}"
            ) from error

    def write(self, data: bytes | memoryview, offset: int = 0) -> None:
        """Write all of ``data``, without a mapping.

        Raises:
            OSError: The memory could not be allocated.
        """
        view = memoryview(data)
        start = offset - offset % HUGE_PAGE_BYTES
        while view:
            written = os.pwrite(self.fd, view, offset)
            view, offset = view[written:], offset + written
        while self._huge_in is not None and start < offset:
            self._collapse(self._huge_in, start, offset)
            start += HUGE_PAGE_BYTES

    def collapse_into(self, mapping: mmap.mmap) -> None:
        """Let each block become a huge page as soon as `write` has filled it, if the system has them enabled.

        Blocks with a hole stay small pages: as a huge page, they would take memory that nothing fills.

        Args:
            mapping: All of this segment.
        """
        self._huge_in = mapping if linux.has_shared_huge_pages() else None

    def _collapse(self, mapping: mmap.mmap, start: int, written_to: int) -> None:
        """Let the block at ``start`` become a huge page if it has no hole."""
        end = start + HUGE_PAGE_BYTES
        # Data that comes in order has a hole behind it: the block is not searched for each write.
        places = (min(written_to, end - 1), start)
        try:
            if end <= self.nbytes and all(os.lseek(self.fd, at, os.SEEK_HOLE) >= end for at in places):
                mapping.madvise(_MADV_COLLAPSE, start, HUGE_PAGE_BYTES)
        except OSError as error:
            if error.errno != errno.EAGAIN:  # there is no free huge page, or the kernel cannot do it
                self._huge_in = None

    def reopen(self) -> int:
        """A new descriptor with its own file description; the caller closes it.

        flock(2) locks belong to the file description: processes that share an inherited or duplicated one
        do not exclude each other.

        Raises:
            OSError: There is no /proc, or this process has no descriptor left.
        """
        return os.open(linux.link_of(self.fd), os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Close this process's descriptor; idempotent."""
        fd, self.fd, self._huge_in = self.fd, -1, None
        if fd >= 0:
            os.close(fd)

    def __reduce__(self) -> tuple[Any, ...]:
        # A handle, never the bytes: whoever unpickles it maps the same pages.
        if self.fd < 0:
            return Segment, (-1, 0)
        if is_for_child():
            return _attach_inherited, (reduction.DupFd(self.fd),)
        # Not pickled to start a child process: the reading process must belong to the same user, and must
        # open the descriptor while this process lives (proc(5), /proc/PID/fd).
        status = os.fstat(self.fd)
        return _attach_through_proc, (os.getpid(), self.fd, status.st_dev, status.st_ino)


def is_for_child() -> bool:
    """Whether this thread now pickles what a child process gets at its start."""
    return context.get_spawning_popen() is not None


class _Pickling(threading.local):
    """How this thread pickles what holds segments."""

    is_for_other_machines = False


_pickling = _Pickling()


@contextlib.contextmanager
def pickled_for_other_machines() -> Iterator[None]:
    """A block in which what is pickled can be read on other machines, which cannot reach a segment."""
    _pickling.is_for_other_machines = True
    try:
        yield
    finally:
        _pickling.is_for_other_machines = False


def is_for_other_machines() -> bool:
    """Whether this thread is inside `pickled_for_other_machines`."""
    return _pickling.is_for_other_machines


def with_limit(error: OSError) -> str:
    """The system's message, and the limit of this process that might be the cause, if it is set."""
    name = _LIMITS.get(error.errno or 0)
    if name is None:
        return str(error)
    allowed, _ = resource.getrlimit(getattr(resource, name))
    return str(error) if allowed == resource.RLIM_INFINITY else f"{error} ({name} is {allowed:,})"


def _attach_inherited(duplicate: Any) -> Segment:
    return Segment.attach(duplicate.detach())


def _attach_through_proc(pid: int, fd: int, device: int, inode: int) -> Segment:
    try:
        return open_in_process(pid, fd, lambda status, _: (status.st_dev, status.st_ino) == (device, inode))
    except OSError as error:
        raise SharedMemoryError(
            f"cannot attach the shared segment at {linux.link_of(fd, pid)}: {error}. "
            "Its owner must be alive, of the same user and in the same PID namespace."
        ) from error


def open_in_process(pid: int, fd: int, is_meant: Callable[[os.stat_result, str], bool]) -> Segment:
    """The segment behind a descriptor of a different process, with its own file description.

    The descriptor might refer to a different file by now, and opening a pipe, a device or a terminal would
    change it. So the file is checked before it is opened, through an O_PATH descriptor (open(2)), which
    refers to a file without opening it.

    Args:
        pid: The process.
        fd: The number of the descriptor in that process.
        is_meant: Takes the file's status and the target of the descriptor's link in /proc; returns whether
            it is the segment that the caller wants.

    Raises:
        OSError: The process or the descriptor is gone, or this process cannot open its descriptors.
        SharedMemoryError: The descriptor now refers to a different file.
    """
    path_fd = os.open(linux.link_of(fd, pid), os.O_PATH | os.O_CLOEXEC)
    try:
        path = linux.link_of(path_fd)
        link = os.readlink(path)
        if not is_meant(os.fstat(path_fd), link):
            raise SharedMemoryError(
                f"descriptor {fd} of process {pid} is now {link}, and no longer the segment"
            )
        # Through this descriptor: the number in the other process may mean another file by now.
        return Segment.attach(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    finally:
        os.close(path_fd)


def create_slot_segment(nbytes: int) -> tuple[Segment, mmap.mmap]:
    """A new segment for a slot and its writable mapping, all pages allocated; the caller closes the segment.

    Raises:
        SharedMemoryError: The memory is not available.
    """
    segment = Segment.create(nbytes, name="fastload-slot")
    try:
        mapping = segment.map(writable=True)
        populate(mapping)
    except BaseException:
        segment.close()  # frees the pages that were allocated
        raise
    return segment, mapping


def populate(mapping: mmap.mmap, start: int = 0, nbytes: int | None = None) -> None:
    """Allocate pages of a writable mapping now, in one call instead of one page fault each.

    Args:
        mapping: The mapping.
        start: Offset of the first page.
        nbytes: How much; None for all that follows.

    Raises:
        SharedMemoryError: There is not enough memory (instead of a SIGBUS on first touch).
    """
    if sys.platform != "linux":
        return  # pages are allocated on first touch: slower, but just as correct
    nbytes = len(mapping) - start if nbytes is None else nbytes
    try:
        if nbytes >= HUGE_PAGE_BYTES and linux.has_shared_huge_pages():
            mapping.madvise(mmap.MADV_HUGEPAGE, start, nbytes)
        mapping.madvise(_MADV_POPULATE_WRITE, start, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.EFAULT, errno.ENOSPC):
            raise SharedMemoryError(f"cannot take {nbytes:,} bytes of memory: {error}") from error
        # EINVAL: the kernel is older than 5.14; pages are allocated on first touch.
