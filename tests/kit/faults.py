"""Systems that refuse: system calls by a filter, as in containers, limits of a process, and a missing /proc.

The filter and the missing /proc cannot be taken back: use these in a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import resource
import select
import socket
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NUMBERS = {  # of system calls, on x86_64 and on aarch64
    "memfd_create": (319, 279),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "flock": (73, 32),
    "fcntl": (72, 25),
    "socketpair": (53, 199),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "ftruncate": (77, 46),
    "pwrite64": (18, 68),
    "madvise": (28, 233),
    "mlock": (149, 228),
    "clone": (56, 220),
    "clone3": (435, 435),
}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_FILTER_MODE = 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # seccomp(2), linux/filter.h
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def refuse(call: str, error: int) -> None:
    """Let a system call fail with an error, in this process and its children, for good."""
    refuse_numbers([_NUMBERS[call][["x86_64", "aarch64"].index(platform.machine())]], error)


def refuse_numbers(numbers: Sequence[int], error: int) -> None:
    """The same for system calls that are given as this machine's numbers."""
    steps = [
        (_LOAD, 0, 0, 0),
        *((_JUMP_IF_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | error),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(code)))
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.c_void_p(ctypes.addressof(program)), 0, 0))


def hide_proc() -> bool:
    """Mount an empty directory over /proc for this process and its children; False if that is not allowed."""
    return mount_over("/proc")


def mount_over(path: str, options: str = "") -> bool:
    """The same for another directory, with options of tmpfs, such as "size=1m"."""
    if _libc.unshare(_CLONE_NEWNS) and _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        return False
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(_libc.mount(b"none", path.encode(), b"tmpfs", 0, options.encode()))
    return not os.listdir(path)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def limited(limit: int, allowed: int) -> Iterator[None]:
    """Lower a limit of this process, such as resource.RLIMIT_FSIZE, for a while."""
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (allowed, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


OTHER_KINDS = ["socket", "epoll", "pipe", "directory", "executable"]


@contextlib.contextmanager
def something_else(kind: str) -> Iterator[int]:
    """A descriptor of something that is not memory, of one of OTHER_KINDS."""
    with contextlib.ExitStack() as stack:
        if kind == "socket":
            yield stack.enter_context(socket.socket()).fileno()
        elif kind == "epoll":
            yield stack.enter_context(select.epoll()).fileno()
        elif kind == "pipe":
            read, write = os.pipe()
            stack.callback(os.close, read)
            stack.callback(os.close, write)
            yield read
        else:
            fd = os.open("/" if kind == "directory" else sys.executable, os.O_RDONLY)
            stack.callback(os.close, fd)
            yield fd


def log_lines() -> list[str]:
    """Lines that fastload logs from now on; this list grows."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastload").addHandler(handler)
    return lines


def mapped_bytes() -> int:
    """The address space that this process uses."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def leave_address_space(spare_bytes: int) -> None:
    """Let this process map so much more, for good."""
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + spare_bytes,) * 2)
