"""What fastload uses of Linux that other systems, containers or old kernels lack.

Here: anonymous memory (memfd), handles of processes (pidfd), and what /proc says of processes. Locks on
files are in `locks`, limits of containers in `limits`, sockets that carry descriptors in `workers.channel`.
Without any of them, fastload works in a different way: docs/index.md has the table.
"""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

from fastload.errors import CacheError
from fastload.system.limits import read_text
from fastload.system.locks import fcntl

SHARED_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_START_TIME_FIELD = 19  # of /proc/PID/stat, counted after the name of the command


# --- anonymous memory -------------------------------------------------------------------------------------


def why_no_memfd() -> str | None:
    """Why there cannot be anonymous memory; None if this system might grant it."""
    if hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS"):
        return None
    return "this platform has no anonymous shared memory (memfd_create)"


def memfd(name: str) -> int:
    """A descriptor of new, empty anonymous memory; seals can be added.

    Raises:
        OSError: The system denies it.
    """
    if (reason := why_no_memfd()) is not None:
        raise OSError(errno.ENOSYS, reason)
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal_size(fd: int) -> None:
    """Forbid every later change of the size of a memfd.

    Raises:
        OSError: The system denies it.
    """
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def is_size_sealed(fd: int) -> bool:
    """Whether the size of a file can never change."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals
    except OSError:  # not a memfd
        return False


def has_shared_huge_pages() -> bool | None:
    """Whether the system is set to give shared memory huge pages; None if it has no such setting."""
    setting = read_text(SHARED_HUGE_PAGES).partition("[")[2].partition("]")[0]
    return setting not in ("never", "deny") if setting else None


def huge_pages_report() -> str:
    """For `fastload doctor`: whether huge pages are on, and how to enable them; empty without the setting."""
    is_on = has_shared_huge_pages()
    if is_on is None:
        return ""
    brings = "off; batches of samples in RAM come faster with them, once the cache is full"
    return "on" if is_on else f"{brings}: echo advise | sudo tee {SHARED_HUGE_PAGES}"


# --- handles of processes ---------------------------------------------------------------------------------


def why_no_pidfd() -> str | None:
    """Why processes have no handles here, or cannot be signalled through them; None if they can.

    Raises:
        OSError: The system denies it.
    """
    if not hasattr(os, "pidfd_open"):
        return "this platform has no pidfd_open"
    pidfd = os.pidfd_open(os.getpid())
    try:
        send_signal(pidfd, 0)  # number 0 sends no signal
    finally:
        os.close(pidfd)
    return None


def open_process(pid: int) -> int:
    """A descriptor of a process, which becomes readable when the process ends.

    Raises:
        ProcessLookupError: It has ended, and its parent has waited for it.
        AttributeError, OSError: The system has no handles of processes, or denies them.
    """
    return os.pidfd_open(pid)


def send_signal(pidfd: int, number: int) -> None:
    """Send a signal to the process of a descriptor.

    Raises:
        ProcessLookupError: It has ended.
    """
    signal.pidfd_send_signal(pidfd, number)


def check_disk_caches(path: str) -> None:
    """Check that this system has what caches on disk need.

    Raises:
        CacheError: It has not.
    """
    if fcntl is None or not os.path.exists("/proc/self/fd"):
        raise CacheError(
            f"the cache {path} cannot be used here: caches on disk need /proc and locks on files, as on Linux"
        )


# --- what /proc says --------------------------------------------------------------------------------------


def link_of(fd: int, pid: int | None = None) -> str:
    """The path under which a descriptor of this process, or of a different one, can be opened again."""
    return f"/proc/{pid or 'self'}/fd/{fd}"


def pid_namespace() -> int | None:
    """The inode of this process's PID namespace; None if /proc does not give it."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def start_time(pid: int) -> int | None:
    """The start of a process in clock ticks since boot; None if there is no process with that number."""
    fields = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return None if not fields or fields[0] in "ZX" else int(fields[_START_TIME_FIELD])
