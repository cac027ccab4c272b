"""Find out what the GPUs of this machine can do and which processes use them, for `fastload doctor`.

No function raises: if a value cannot be found out, the result gives the reason instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import torch

from fastload.device.cuda import choose_backend, why_unavailable
from fastload.errors import FastloadError
from fastload.memory.lease import Memory
from fastload.memory.segment import Segment, populate

WORKS = "works"

_PROBE_BYTES = 64 * 2**20
_SHARED_BYTES = 2**20
_REPEATS = 8


@dataclasses.dataclass(frozen=True)
class GPUCopies:
    """One GPU, and how it gets data from the host.

    Attributes:
        index: torch's number of the device.
        name: The driver's name of the device.
        pinned_bytes_per_s: Copies from page-locked memory; None if not measured.
        pageable_bytes_per_s: Copies from any other memory; None if not measured.
        problem: Why the copies could not be measured; "" if they were.
        capability: The compute capability, as "9.0"; None if unknown.
        total_bytes: The device's memory; None if unknown.
        free_bytes: The device's free memory, once this process has its context; None if unknown.
        page_locking: Whether shared memory can be page-locked, so that batches need no copy to pinned memory:
            "works", or the reason why not; None if it could not be tried.
    """

    index: int
    name: str
    pinned_bytes_per_s: float | None
    pageable_bytes_per_s: float | None
    problem: str
    capability: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    page_locking: str | None = None


@dataclasses.dataclass(frozen=True)
class GPUProcess:
    """A process that holds memory on a GPU, as reported by NVML.

    Attributes:
        index: The driver's number of the GPU.
        pid: The driver's process id; inside a container the process may have another id.
        used_bytes: The memory that it holds; None if the driver does not say.
    """

    index: int
    pid: int
    used_bytes: int | None


def measure_copies() -> tuple[list[GPUCopies], str]:
    """Measure every GPU that torch sees, some tens of milliseconds each; or return no GPU and a reason."""
    reason = why_unavailable(None)
    if reason is not None:
        return [], reason
    return [_measure(index) for index in range(torch.cuda.device_count())], ""


def _measure(index: int) -> GPUCopies:
    found = GPUCopies(index, torch.cuda.get_device_name(index), None, None, "")
    try:
        with torch.cuda.device(index):
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            major, minor = torch.cuda.get_device_capability()
            found = dataclasses.replace(
                found,
                capability=f"{major}.{minor}",
                total_bytes=total_bytes,
                free_bytes=free_bytes,
                page_locking=_try_page_locking(index),
            )
            target = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cuda")
            pinned = _bytes_per_s(torch.ones(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True), target)
            pageable = _bytes_per_s(torch.ones(_PROBE_BYTES, dtype=torch.uint8), target)
    except RuntimeError as error:  # out of memory, or a device that has failed
        return dataclasses.replace(found, problem=str(error).splitlines()[0])
    return dataclasses.replace(found, pinned_bytes_per_s=pinned, pageable_bytes_per_s=pageable)


def _try_page_locking(index: int) -> str:
    """Page-lock a small segment of shared memory, as a loader does with the slots of its workers."""
    backend: Any = choose_backend(index, "fastload doctor")
    try:
        segment = Segment.create(_SHARED_BYTES, name="fastload-slot")
        memory = Memory(segment.map(writable=True), shared=True)
        segment.close()
        populate(memory._mapping)
    except (FastloadError, OSError) as error:
        return str(error)
    reason: str = backend.register(memory.address, memory.nbytes)
    if reason:
        return reason
    is_pinned = torch.frombuffer(memory.lease(), dtype=torch.uint8).is_pinned()
    reason = backend.unregister(memory.address)
    return reason or (WORKS if is_pinned else "torch does not treat registered memory as pinned")


def _bytes_per_s(source: torch.Tensor, target: torch.Tensor) -> float:
    target.copy_(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_REPEATS):
        target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    elapsed_s = float(start.elapsed_time(end)) / 1000
    return _REPEATS * source.numel() / elapsed_s


def driver_version(root: str | Path = "/") -> str | None:
    """The release of NVIDIA's driver and the newest CUDA that it can run; None without a driver.

    Makes no CUDA context.

    Args:
        root: The directory that contains `proc`; tests use another one than `/`.
    """
    known = []
    with contextlib.suppress(OSError):
        text = (Path(root) / "proc/driver/nvidia/version").read_text()
        known += re.findall(r"^NVRM version: .*?(\d+\.[\d.]+)", text, re.MULTILINE)
    with contextlib.suppress(OSError, AttributeError):  # the library is missing, or is not NVIDIA's
        newest = ctypes.c_int()
        # torch does not call this function of the driver's library; it needs no cuInit().
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(newest)) == 0:
            known.append(f"CUDA up to {newest.value // 1000}.{newest.value % 1000 // 10}")
    return ", ".join(known) or None


def gpu_processes() -> tuple[list[GPUProcess] | None, str]:
    """The processes that compute on any GPU of this machine; or None, and why they are unknown."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None, "NVML's Python module is not installed (pip install nvidia-ml-py)"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, f"NVML: {error}"
    try:
        found: list[GPUProcess] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            found += [GPUProcess(index, process.pid, process.usedGpuMemory) for process in running]
        return found, ""
    except nvml.NVMLError as error:
        return None, f"NVML: {error}"
    finally:
        nvml.nvmlShutdown()
