"""What the GPUs of this machine can do, and who uses them: for `fastload doctor`.

Called in a process of the command line's own: measuring makes a CUDA context on every GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch

from fastload.device.cuda import why_unavailable

_PROBE_BYTES = 64 * 2**20
_REPEATS = 8


@dataclasses.dataclass(frozen=True)
class GPUCopies:
    """How fast one GPU gets data from the host.

    Attributes:
        index: torch's number of the device.
        name: The driver's name of it.
        pinned_bytes_per_s: From page-locked memory; None if it could not be measured.
        pageable_bytes_per_s: From any other memory; None if it could not be measured.
        problem: Why it could not be measured; "" if it was.
    """

    index: int
    name: str
    pinned_bytes_per_s: float | None
    pageable_bytes_per_s: float | None
    problem: str


@dataclasses.dataclass(frozen=True)
class GPUProcess:
    """A process that holds memory on a GPU, as NVML tells it.

    Attributes:
        index: The driver's number of the GPU.
        pid: Its process id, in the driver's eyes: containers may number processes in another way.
        used_bytes: What it holds; None where the driver does not say.
    """

    index: int
    pid: int
    used_bytes: int | None


def measure_copies() -> tuple[list[GPUCopies], str]:
    """Every GPU that torch sees, measured for some tens of milliseconds each; or none, and why."""
    reason = why_unavailable(None)
    if reason is not None:
        return [], reason
    return [_measure(index) for index in range(torch.cuda.device_count())], ""


def _measure(index: int) -> GPUCopies:
    name = torch.cuda.get_device_name(index)
    try:
        with torch.cuda.device(index):
            target = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cuda")
            pinned = _bytes_per_s(torch.ones(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True), target)
            pageable = _bytes_per_s(torch.ones(_PROBE_BYTES, dtype=torch.uint8), target)
    except RuntimeError as error:  # out of memory, or a device that has failed
        return GPUCopies(index, name, None, None, str(error).splitlines()[0])
    return GPUCopies(index, name, pinned, pageable, "")


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


def gpu_processes() -> tuple[list[GPUProcess] | None, str]:
    """The processes that compute on any GPU of this machine; or None, and why that is unknown."""
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
