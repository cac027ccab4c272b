"""The memory report: the memory of the host, of this process and of its CUDA devices, at one moment.

1. The report makes no CUDA context, and does not call the driver before there is one. Devices on which this
   process has no context are left out, and the report says so.
2. A figure that the system does not report is None, never a guess.
3. Each segment is counted once, by inode. With a descriptor, all pages of the segment count; with only a
   mapping, the pages that this process touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastload.system.budget import available_bytes, cgroup_limit_bytes
from fastload.system.humanize import readable_memory
from fastload.system.limits import read_counter, read_text, resource
from fastload.system.torch_private import has_cuda_context

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC = Path("/proc/self")
_STAT_BLOCK_BYTES = 512  # the unit of st_blocks on every file system (stat(2))
_SEGMENT_LINK = re.compile(r"/memfd:fastload(?:-(\w+))?")
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ (\S+) (\d+) +(.*)")  # proc(5), /proc/PID/maps


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The memory of one CUDA device, as reported by torch's allocator and the driver.

    Attributes:
        index: torch's number of the device.
        name: The driver's name of the device.
        allocated_bytes: In tensors of this process.
        reserved_bytes: Held by this process's allocator, including its tensors.
        peak_allocated_bytes: The maximum since the start or the last `MemoryReport.reset_peak`.
        peak_reserved_bytes: The maximum since the start or the last `MemoryReport.reset_peak`.
        free_bytes: Free on the device, for all processes.
        total_bytes: The device's memory.
    """

    index: int
    name: str
    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    free_bytes: int
    total_bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """A snapshot; `str()` returns a table, `as_dict()` plain data.

    Attributes:
        host_total_bytes: The machine's memory.
        host_available_bytes: How much this process could still allocate, by MemAvailable and every cgroup.
        cgroup_limit_bytes: The lowest limit of this process's cgroups; None without one.
        process_rss_bytes: Resident pages of this process; shared pages count in full; None if unknown.
        process_pss_bytes: Resident pages of this process, each shared page divided by the number of processes
            that map it; None if unknown.
        locked_bytes: Pages locked by this process (mlock); None if unknown. Memory pinned by the CUDA driver
            can be missing.
        locked_limit_bytes: RLIMIT_MEMLOCK; None without a limit.
        cache_bytes: In RAM caches that this process uses, shared with all their other users.
        prefetch_bytes: In slots for batches in flight.
        other_segment_bytes: In fastload's other shared segments (messages, datasets sent to workers).
        devices: One entry for each CUDA device on which this process has a context.
        devices_note: Why ``devices`` is empty; "" if it is not.
    """

    host_total_bytes: int
    host_available_bytes: int
    cgroup_limit_bytes: int | None
    process_rss_bytes: int | None
    process_pss_bytes: int | None
    locked_bytes: int | None
    locked_limit_bytes: int | None
    cache_bytes: int
    prefetch_bytes: int
    other_segment_bytes: int
    devices: list[DeviceMemory]
    devices_note: str

    def as_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, numbers, strings and None, ready for JSON."""
        return dataclasses.asdict(self)

    def reset_peak(self) -> None:
        """Reset the peaks of all devices on which this process has a context now.

        This report keeps its figures; call `memory_report` again later for new ones.
        """
        for index in _devices_with_context():
            torch.cuda.reset_peak_memory_stats(index)

    def __str__(self) -> str:
        return "\n".join(lines_of(self.as_dict()))


def lines_of(values: dict[str, Any], indent: str = "") -> list[str]:
    """Nested plain data as text: one line per value, one heading per dict."""
    lines = []
    for name, value in values.items():
        label = f"{indent}{name.removesuffix('_bytes').replace('_', ' ')}"
        parts = value if isinstance(value, list) else [value]
        if parts and isinstance(parts[0], dict):
            for part in parts:
                lines += [label, *lines_of(part, f"{indent}  ")]
        elif value != "":
            text = ", ".join(map(str, parts)) or "none"
            if value is None:
                text = "none" if "limit" in name or "quota" in name else "unknown"
            elif name.endswith(("_bytes", "_bytes_per_s")):
                text = readable_memory(value)
            lines.append(f"{label:32}  {text}")
    return lines


def memory_report() -> MemoryReport:
    """The memory of the host, of this process and of its CUDA devices now; takes some milliseconds.

    Makes no CUDA context: before the first CUDA call of this process the report has no devices.
    """
    segments = _segment_bytes()
    devices = [_read_device(index) for index in _devices_with_context()]
    return MemoryReport(
        host_total_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        host_available_bytes=available_bytes(),
        cgroup_limit_bytes=cgroup_limit_bytes(),
        process_rss_bytes=read_counter(read_text(_PROC / "status"), "VmRSS"),
        process_pss_bytes=read_counter(read_text(_PROC / "smaps_rollup"), "Pss"),
        locked_bytes=read_counter(read_text(_PROC / "status"), "VmLck"),
        locked_limit_bytes=_locked_limit(),
        cache_bytes=segments.pop("cache", 0),
        prefetch_bytes=segments.pop("slot", 0),
        other_segment_bytes=sum(segments.values()),
        devices=devices,
        devices_note="" if devices else _why_no_devices(),
    )


# --- the host ---------------------------------------------------------------------------------------------


def _locked_limit() -> int | None:
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _segment_bytes() -> dict[str, int]:
    """The bytes in fastload's segments, by the word after ``fastload-`` in their names."""
    segments: dict[tuple[int, int], tuple[str, int]] = {}  # by device and inode
    for identity, kind, nbytes in _mappings():
        # Two mappings of one segment share pages: the larger figure is the better bound.
        segments[identity] = kind, max(nbytes, segments.get(identity, ("", 0))[1])
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(FileNotFoundError):  # closed since, such as the listing's own descriptor
            link = _SEGMENT_LINK.match(os.readlink(f"/proc/self/fd/{fd}"))
            if link is not None:
                status = os.stat(f"/proc/self/fd/{fd}")
                segments[status.st_dev, status.st_ino] = link[1] or "", status.st_blocks * _STAT_BLOCK_BYTES
    total: dict[str, int] = {}
    for kind, nbytes in segments.values():
        total[kind] = total.get(kind, 0) + nbytes
    return total


def _mappings() -> Iterator[tuple[tuple[int, int], str, int]]:
    """The device and inode, the kind and the resident bytes of each mapped segment."""
    identity, kind = (0, 0), None
    for line in read_text(_PROC / "smaps").splitlines():
        header = _MAPPING.match(line)
        if header is not None:
            major, _, minor = header[1].partition(":")
            identity = (os.makedev(int(major, 16), int(minor, 16)), int(header[2]))
            link = _SEGMENT_LINK.match(header[3])
            kind = None if link is None else link[1] or ""
        elif kind is not None and line.startswith("Rss:"):
            yield identity, kind, int(line.split()[1]) * 1024


# --- the devices ------------------------------------------------------------------------------------------


def _devices_with_context() -> list[int]:
    if not torch.cuda.is_initialized():
        return []

    def is_used(index: int) -> bool:
        has_context = has_cuda_context(index)
        return torch.cuda.memory_reserved(index) > 0 if has_context is None else has_context

    return [index for index in range(torch.cuda.device_count()) if is_used(index)]


def _why_no_devices() -> str:
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without CUDA"
    return "no context yet in this process"


def _read_device(index: int) -> DeviceMemory:
    return DeviceMemory(
        index,
        torch.cuda.get_device_name(index),
        torch.cuda.memory_allocated(index),
        torch.cuda.memory_reserved(index),
        torch.cuda.max_memory_allocated(index),
        torch.cuda.max_memory_reserved(index),
        *torch.cuda.mem_get_info(index),
    )
