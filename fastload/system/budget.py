"""Compute how many bytes a cache, or the batches of a loader, can take from the free memory.

Free memory is the minimum of three numbers: MemAvailable; for this process's cgroup and each of its
ancestors, the limit minus the usage, where page cache that the kernel can reclaim counts as free; and
RLIMIT_AS minus the address space in use, because every process maps the whole cache.

What is free when a cache is made is not reserved for it: other caches, ranks, jobs and the model take memory
from the same amount. So a cache reads the free memory again while it grows, and stops before it is used up.
Nobody has to know of anybody else, and a process that dies leaves nothing behind.
"""

from __future__ import annotations

import functools
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fastload.system.limits import cgroup_directories, read_counter, read_text, resource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AUTO_SHARE = 0.7  # of the free memory; the rest is for the model, the workers and the batches in flight
# A cache that grows reads the free memory, which takes 0.4 ms, again after so many bytes, or so much time.
_MAX_GROWTH_BYTES, _MIN_GROWTH_BYTES = 64 << 20, 1 << 20
_CHECK_EVERY_S = 0.25
_GROWING_CACHES = 16  # that grow at the same time, and together stay within the free memory
# Share of the memory that is free when an epoch starts; other loaders and the caches need the rest.
_BATCHES_SHARE = 0.25

_UNITS = {"B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}I"] = _UNITS[f"{_letter}IB"] = 1024**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")
_USAGE = (
    'pass "auto", a size such as "40GB", "40G" or "512MiB", bytes as an int, or a share of free memory such '
    "as 0.5"
)
_MIN_INT_BYTES = 1_000_000  # whoever passes a smaller int means gigabytes, or a share
_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


class _CgroupFiles(NamedTuple):
    """The files in which a version of cgroups keeps its counters."""

    limits: tuple[str, ...]
    used: str
    reclaimable: str  # the line of memory.stat that counts the memory that the kernel can reclaim


_V2 = _CgroupFiles(("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = _CgroupFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def parse_memory(amount: str | float, *, name: str = "max_memory", available: int | None = None) -> int:
    """Convert an amount of memory to bytes.

    Args:
        amount: `"auto"` (70% of free memory), an int (bytes), a size (`"40GB"` is 40e9 bytes, `"40GiB"` is
            40 * 2**30; the B may be omitted), or a float above 0 and up to 1 (a share of free memory).
        name: The name of the user's argument, for the error.
        available: Free bytes; read from the system if None.

    Raises:
        ValueError: The amount has a different form, or is not above zero.
    """
    share = AUTO_SHARE if amount == "auto" else amount
    nbytes = None
    if isinstance(share, float) and 0 < share <= 1:
        return int(share * (available_bytes() if available is None else available))
    if isinstance(amount, str):
        match = _SIZE.fullmatch(amount)
        if match is not None and match[2].upper() in _UNITS:
            nbytes = int(float(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(amount, int) and not isinstance(amount, bool):
        nbytes = amount
    if nbytes is None or nbytes <= 0:
        raise ValueError(f"{name}={amount!r} is not an amount of memory: {_USAGE}")
    return nbytes


def limit_bytes(amount: str | float, free_bytes: int) -> int:
    """The limit for a cache: at most what is free; 30% of limited address space is left to the program.

    Args:
        amount: As in `parse_memory`.
        free_bytes: What the cache could take.

    Raises:
        ValueError: As `parse_memory`.
    """
    mappable = (int(AUTO_SHARE * nbytes) for nbytes in _address_space_free(Path("/")))
    return max(1, min([parse_memory(amount, available=free_bytes), free_bytes, *mappable]))


def check_memory(amount: str | float, *, name: str) -> None:
    """Check a user's amount of memory.

    Raises:
        ValueError: `parse_memory` does not accept it; or it is an int of less than a megabyte, which hardly
            anybody means as bytes.
    """
    nbytes = parse_memory(amount, name=name)
    if isinstance(amount, int) and nbytes < _MIN_INT_BYTES:
        unit, share = ("byte", 1.0) if amount == 1 else ("bytes", 0.5)
        raise ValueError(
            f'{name}={amount} is {amount} {unit}: write {name}="{amount}GB" for gigabytes, {name}={share} '
            f'for a share of free memory, or {name}="{amount}B" if you mean bytes'
        )


def parse_prefetch_memory(max_prefetch_memory: int | float | str) -> int:
    """The limit on the memory for a loader's batches, in bytes; used with and without workers.

    Args:
        max_prefetch_memory: The loader's argument: `"auto"` is a quarter of the memory that was free within
            the last second; else as `parse_memory`.

    Raises:
        ValueError: As `parse_memory`.
    """
    if max_prefetch_memory == "auto":
        return int(_BATCHES_SHARE * _read_in(int(time.monotonic()), available_bytes))
    return parse_memory(max_prefetch_memory, name="max_prefetch_memory")


@functools.lru_cache(maxsize=1)
def _read_in(_second: int, read: Callable[[], int]) -> int:
    """The free memory, read once a second: it takes 0.4 ms, and some scripts make thousands of loaders."""
    return read()


def available_bytes(root: str | Path = "/") -> int:
    """Bytes of memory that this process can still take.

    Args:
        root: The directory that holds `proc` and `sys`; only tests pass anything but `/`.
    """
    return max(0, min([unused_bytes(root), *_address_space_free(Path(root))]))


def unused_bytes(root: str | Path = "/") -> int:
    """Bytes of memory that this process can still take where its address space is mapped already.

    Args:
        root: As for `available_bytes`.
    """
    root = Path(root)
    free = [_system_free(root)]
    for directory, is_v2 in cgroup_directories("memory", root):
        free.append(_cgroup_free(directory, _V2 if is_v2 else _V1))
    return max(0, min(free))


class GrowthCheck:
    """Whether a cache can grow: compares the free memory, which it reads now and then, with a reserve.

    Args:
        read_free: Returns the free bytes.

    Attributes:
        free_bytes: What was free when it was read last.
    """

    def __init__(self, read_free: Callable[[], int]) -> None:
        self.free_bytes = 0
        self._read_free = read_free
        self._check_at_s = 0.0
        self._check_at_bytes = 0

    def allows(self, size_bytes: int, nbytes: int, reserved_bytes: int) -> bool:
        """Whether a cache of ``size_bytes`` can take ``nbytes`` more and leave ``reserved_bytes`` free."""
        now_s = time.monotonic()
        if now_s < self._check_at_s:
            if size_bytes + nbytes <= self._check_at_bytes:
                return True
            if not self._check_at_bytes:
                return False
        self.free_bytes = self._read_free()
        room = self.free_bytes - reserved_bytes
        self._check_at_s = now_s + _CHECK_EVERY_S
        if room < nbytes:
            self._check_at_bytes = 0
            return False
        growth = max(_MIN_GROWTH_BYTES, min(_MAX_GROWTH_BYTES, room // _GROWING_CACHES))
        self._check_at_bytes = size_bytes + nbytes + growth
        return True


def cgroup_limit_bytes(root: str | Path = "/") -> int | None:
    """The lowest memory limit among the cgroups of this process; None if no cgroup has a limit.

    Args:
        root: As for `available_bytes`.
    """
    limits = [
        _cgroup_limit(directory, _V2 if is_v2 else _V1)
        for directory, is_v2 in cgroup_directories("memory", root)
    ]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _system_free(root: Path) -> int:
    available = read_counter(read_text(root / "proc/meminfo"), "MemAvailable")
    if available is not None:
        return available
    try:
        import psutil  # imported here because it is slow to import, and Linux hardly ever needs it

        return int(psutil.virtual_memory().available)
    except OSError:  # there is no /proc; this number leaves out page cache that the kernel can reclaim
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _address_space_free(root: Path) -> Iterator[int]:
    """RLIMIT_AS minus the address space that this process has mapped; yields nothing without that limit."""
    limit = -1 if resource is None else resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != -1:  # RLIM_INFINITY, or not POSIX
        mapped_pages = read_text(root / "proc/self/statm").partition(" ")[0]
        yield limit - int(mapped_pages or 0) * os.sysconf("SC_PAGE_SIZE")


def _cgroup_limit(directory: Path, files: _CgroupFiles) -> int:
    return min(_number(read_text(directory / name)) for name in files.limits)


def _cgroup_free(directory: Path, files: _CgroupFiles) -> int:
    used = _number(read_text(directory / files.used))
    reclaimable = read_counter(read_text(directory / "memory.stat"), files.reclaimable) or 0
    if used >= _NO_LIMIT:
        return _NO_LIMIT
    return _cgroup_limit(directory, files) - used + min(reclaimable, used)


def _number(text: str) -> int:
    """The number in a cgroup file; `max` and a missing file count as no limit."""
    text = text.strip()
    return int(text) if text.isdigit() else _NO_LIMIT
