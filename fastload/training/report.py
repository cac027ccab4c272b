"""The memory report: the memory of the host, of this process and of its CUDA devices, at one moment.

1. The report makes no CUDA context, and does not call the driver before there is one. Devices on which this
   process has no context are left out, and the report says so.
2. A figure that the system does not report is None, never a guess.
3. Each segment is counted once, by inode. If this process has a descriptor, all pages of the segment count;
   if it has only a mapping, the pages that this process touched count.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from fastload.system.budget import available_bytes, cgroup_limit_bytes
from fastload.system.cgroups import figure, read_text
from fastload.system.posix import resource
from fastload.system.sizes import readable_memory

_PROC = Path("/proc/self")
_STAT_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own (stat(2))
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
        process_pss_bytes: Resident pages of this process; each shared page is divided by the number of
            processes that map it; None if unknown.
        locked_bytes: Pages that this process locked (mlock); None if unknown. This may leave out memory that
            the CUDA driver pinned.
        locked_limit_bytes: RLIMIT_MEMLOCK; None without a limit.
        cache_bytes: In RAM caches that this process uses; shared with the other processes that use them.
        ring_bytes: In slots for batches in flight.
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
    ring_bytes: int
    other_segment_bytes: int
    devices: tuple[DeviceMemory, ...]
    devices_note: str

    def as_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, numbers, strings and None, ready for JSON."""
        plain = dataclasses.asdict(self)
        plain["devices"] = list(plain["devices"])
        return plain

    def reset_peak(self) -> None:
        """Reset the peaks of all devices on which this process has a context now.

        This report keeps its figures; call `memory_report` again later for new ones.
        """
        for index in _devices_with_context():
            torch.cuda.reset_peak_memory_stats(index)

    def __str__(self) -> str:
        rows: list[tuple[str, str]] = [
            ("host", ""),
            ("  total", _size(self.host_total_bytes)),
            ("  available", _size(self.host_available_bytes)),
            ("  cgroup limit", _size(self.cgroup_limit_bytes, "none")),
            ("process", ""),
            ("  resident (RSS)", _size(self.process_rss_bytes, "unknown")),
            ("  proportional (PSS)", _size(self.process_pss_bytes, "unknown")),
            ("  locked", _size(self.locked_bytes, "unknown")),
            ("  locked, limit", _size(self.locked_limit_bytes, "none")),
            ("fastload, shared", ""),
            ("  caches", _size(self.cache_bytes)),
            ("  ring", _size(self.ring_bytes)),
            ("  other segments", _size(self.other_segment_bytes)),
        ]
        for device in self.devices:
            rows += [
                (f"cuda:{device.index} {device.name}", ""),
                ("  allocated", _size(device.allocated_bytes)),
                ("  allocated, peak", _size(device.peak_allocated_bytes)),
                ("  reserved", _size(device.reserved_bytes)),
                ("  reserved, peak", _size(device.peak_reserved_bytes)),
                ("  free", _size(device.free_bytes)),
                ("  total", _size(device.total_bytes)),
            ]
        label_width = max(len(label) for label, text in rows if text)
        text_width = max(len(text) for _, text in rows)
        lines = [f"{label:<{label_width}}  {text:>{text_width}}" if text else label for label, text in rows]
        if self.devices_note:
            lines.append(f"cuda: {self.devices_note}")
        return "\n".join(lines)


def memory_report() -> MemoryReport:
    """The memory of the host, of this process and of its CUDA devices now; takes some milliseconds.

    Makes no CUDA context: before the first CUDA call of this process the report has no devices.
    """
    segments = _segment_bytes()
    devices = tuple(_read_device(index) for index in _devices_with_context())
    return MemoryReport(
        host_total_bytes=_total_bytes(),
        host_available_bytes=available_bytes(),
        cgroup_limit_bytes=cgroup_limit_bytes(),
        process_rss_bytes=_resident_bytes(),
        process_pss_bytes=figure(read_text(_PROC / "smaps_rollup"), "Pss"),
        locked_bytes=figure(read_text(_PROC / "status"), "VmLck"),
        locked_limit_bytes=_locked_limit(),
        cache_bytes=segments.pop("cache", 0),
        ring_bytes=segments.pop("slot", 0),
        other_segment_bytes=sum(segments.values()),
        devices=devices,
        devices_note="" if devices else _why_no_devices(),
    )


def _size(nbytes: int | None, without: str = "") -> str:
    return without if nbytes is None else readable_memory(nbytes)


# --- the host ---------------------------------------------------------------------------------------------


def _total_bytes() -> int:
    try:
        return int(psutil.virtual_memory().total)
    except OSError:  # there is no /proc
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _resident_bytes() -> int | None:
    try:
        return int(psutil.Process().memory_info().rss)
    except (OSError, psutil.Error):  # there is no /proc, or it hides this process
        return None


def _locked_limit() -> int | None:
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


class _SegmentPart(NamedTuple):
    """The information about a segment from one descriptor or one mapping."""

    identity: tuple[int, int]  # device and inode
    kind: str
    nbytes: int


def _segment_bytes() -> dict[str, int]:
    """The bytes in fastload's segments, by the word after ``fastload-`` in their names."""
    held = {part.identity: part for part in _descriptors()}
    mapped: dict[tuple[int, int], int] = {}
    total: dict[str, int] = {}
    for part in _mappings():
        if part.identity not in held:
            # Two mappings of one segment share pages: the larger figure is the better bound.
            before = mapped.get(part.identity, 0)
            mapped[part.identity] = max(before, part.nbytes)
            total[part.kind] = total.get(part.kind, 0) + mapped[part.identity] - before
    for part in held.values():
        total[part.kind] = total.get(part.kind, 0) + part.nbytes
    return total


def _descriptors() -> list[_SegmentPart]:
    found = []
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            link = _SEGMENT_LINK.match(os.readlink(f"/proc/self/fd/{fd}"))
            status = os.stat(f"/proc/self/fd/{fd}") if link else None
        except FileNotFoundError:  # closed since the listing, such as the listing's own descriptor
            continue
        if link is not None and status is not None:
            identity = (status.st_dev, status.st_ino)
            found.append(_SegmentPart(identity, link[1] or "", status.st_blocks * _STAT_BLOCK_BYTES))
    return found


def _mappings() -> list[_SegmentPart]:
    found = []
    identity, kind = (0, 0), None
    for line in read_text(_PROC / "smaps").splitlines():
        header = _MAPPING.match(line)
        if header is not None:
            major, _, minor = header[1].partition(":")
            identity = (os.makedev(int(major, 16), int(minor, 16)), int(header[2]))
            link = _SEGMENT_LINK.match(header[3])
            kind = None if link is None else link[1] or ""
        elif kind is not None and line.startswith("Rss:"):
            found.append(_SegmentPart(identity, kind, int(line.split()[1]) * 1024))
    return found


# --- the devices ------------------------------------------------------------------------------------------


def _devices_with_context() -> list[int]:
    if not torch.cuda.is_initialized():
        return []
    core: Any = torch._C  # torch has no public function for this
    return [index for index in range(torch.cuda.device_count()) if core._cuda_hasPrimaryContext(index)]


def _why_no_devices() -> str:
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without it"
    return "no context yet in this process"


def _read_device(index: int) -> DeviceMemory:
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return DeviceMemory(
        index=index,
        name=torch.cuda.get_device_name(index),
        allocated_bytes=torch.cuda.memory_allocated(index),
        reserved_bytes=torch.cuda.memory_reserved(index),
        peak_allocated_bytes=torch.cuda.max_memory_allocated(index),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(index),
        free_bytes=free_bytes,
        total_bytes=total_bytes,
    )
