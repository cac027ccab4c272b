"""What this machine offers to a data loader, and how to look for an error, for `fastload doctor`.

It changes nothing and ends no process.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import multiprocessing
import os
import platform
import shutil
from typing import Any

import torch

import fastload
from fastload.device.probe import GPUCopies, GPUProcess, driver_version, gpu_processes, measure_copies
from fastload.system.cpus import cpu_quota, usable_cpus
from fastload.system.sizes import readable_memory, readable_size
from fastload.system.tables import table
from fastload.training.report import MemoryReport, memory_report

_DISTRIBUTIONS = {  # OpenCV is distributed under four names
    "numpy": ("numpy",),
    "albumentations": ("albumentations",),
    "lmdb": ("lmdb",),
    "opencv": (
        "opencv-python-headless",
        "opencv-python",
        "opencv-contrib-python",
        "opencv-contrib-python-headless",
    ),
}

HINTS = (
    "an error in a worker: DataLoader(num_workers=0) runs the same code in your process, under your debugger",
    "a traceback without frames of fastload and torch: FASTLOAD_DEBUG=1 python ... shows them",
    "an error on the GPU that names the wrong line: CUDA_LAUNCH_BLOCKING=1 python ... waits for each kernel",
    "an unclear error on the GPU: run the same step on the CPU, for example with device='cpu'",
    "memory that grows: print(fastload.memory_report()) between epochs",
)


@dataclasses.dataclass(frozen=True)
class MachineReport:
    """The machine at one moment; `str()` returns tables, `as_dict()` plain data.

    Attributes:
        versions: The versions of the software, by name; None if it is not installed.
        num_cpus: The CPUs of this machine.
        num_usable_cpus: The CPUs on which this process may run.
        cpu_quota: The CPU time that the tightest cgroup allows, in CPUs; None without a limit.
        shm_bytes: The size of /dev/shm; None without one. fastload does not send batches through it.
        shm_free_bytes: The free part of /dev/shm.
        start_methods: How this platform can start workers, the default method first.
        memory: The memory report.
        gpus: The properties of each GPU, and how fast it gets data.
        gpus_note: Why there are no GPUs; "" if there are.
        gpu_processes: The processes that hold memory on GPUs; None if unknown.
        gpu_processes_note: Why they are unknown; "" if they are known.
    """

    versions: dict[str, str | None]
    num_cpus: int
    num_usable_cpus: int
    cpu_quota: float | None
    shm_bytes: int | None
    shm_free_bytes: int | None
    start_methods: list[str]
    memory: MemoryReport
    gpus: list[GPUCopies]
    gpus_note: str
    gpu_processes: list[GPUProcess] | None
    gpu_processes_note: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {**dataclasses.asdict(self), "memory": self.memory.as_dict(), "hints": list(HINTS)}

    def __str__(self) -> str:
        quota = "no limit by a cgroup" if self.cpu_quota is None else f"{self.cpu_quota:g} by cgroup"
        shm = "none"
        if self.shm_bytes is not None and self.shm_free_bytes is not None:
            shm = f"{readable_memory(self.shm_bytes)}, {readable_memory(self.shm_free_bytes)} free"
        rows = [
            *([name, version or "not installed"] for name, version in self.versions.items()),
            ["CPUs", f"{self.num_cpus}, usable {self.num_usable_cpus}, {quota}"],
            ["/dev/shm", shm],
            ["start methods", f"{', '.join(self.start_methods)} (the first is the default)"],
        ]
        # Without its lines on GPUs: it was made before there was a CUDA context, and the GPUs follow.
        memory = str(dataclasses.replace(self.memory, devices=(), devices_note=""))
        hints = ["to find an error", *(f"  {hint}" for hint in HINTS)]
        return "\n".join([*table(rows), "", memory, "", *self._gpu_lines(), "", *hints])

    def _gpu_lines(self) -> list[str]:
        lines = [f"GPU bandwidth: n/a, {self.gpus_note}"] if self.gpus_note else []
        for gpu in self.gpus:
            lines += [f"cuda:{gpu.index} {gpu.name}", *table(_gpu_rows(gpu))]
        if self.gpu_processes is None:
            return [*lines, f"processes on GPUs: unknown, {self.gpu_processes_note}"]
        for process in self.gpu_processes:
            used = "unknown" if process.used_bytes is None else readable_memory(process.used_bytes)
            lines.append(f"process {process.pid} on GPU {process.index}: {used}")
        return lines if self.gpu_processes else [*lines, "processes on GPUs: none"]


def _gpu_rows(gpu: GPUCopies) -> list[list[str]]:
    memory = copies = "unknown"
    if gpu.total_bytes is not None and gpu.free_bytes is not None:
        memory = f"{readable_memory(gpu.total_bytes)}, {readable_memory(gpu.free_bytes)} free"
    if gpu.pinned_bytes_per_s is not None and gpu.pageable_bytes_per_s is not None:
        copies = (
            f"{readable_size(gpu.pinned_bytes_per_s)}/s from pinned memory, "
            f"{readable_size(gpu.pageable_bytes_per_s)}/s from pageable memory"
        )
    return [
        ["  compute capability", gpu.capability or "unknown"],
        ["  memory", memory],
        ["  copies", gpu.problem or copies],
        ["  page-locking of shared memory", gpu.page_locking or "unknown"],
    ]


def machine_report() -> MachineReport:
    """Examine this machine; takes about a second, and makes a CUDA context on every GPU."""
    memory = memory_report()  # before there is a CUDA context
    processes, processes_note = gpu_processes()
    gpus, gpus_note = measure_copies()
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return MachineReport(
        versions=_versions(),
        num_cpus=os.cpu_count() or 1,
        num_usable_cpus=usable_cpus(),
        cpu_quota=cpu_quota(),
        shm_bytes=None if shm is None else shm.total,
        shm_free_bytes=None if shm is None else shm.free,
        start_methods=multiprocessing.get_all_start_methods(),
        memory=memory,
        gpus=gpus,
        gpus_note=gpus_note,
        gpu_processes=processes,
        gpu_processes_note=processes_note,
    )


def _versions() -> dict[str, str | None]:
    return {
        "fastload": fastload.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cuda driver": driver_version(),
        **{name: _version(distributions) for name, distributions in _DISTRIBUTIONS.items()},
    }


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
