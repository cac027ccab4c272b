"""What this machine offers a data loader, for `fastload doctor`.

It changes nothing and ends no process. No function raises: if something cannot be determined, the report says
why.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import multiprocessing
import os
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from fastload.device.devices import choose_backend, why_unavailable
from fastload.errors import FastloadError
from fastload.memory.lease import Memory
from fastload.memory.segment import Segment, populate
from fastload.system.cpus import cpu_quota, usable_cpus
from fastload.system.humanize import readable_memory
from fastload.training.report import lines_of, memory_report
from fastload.version import __version__

WORKS = "works"

_PROBE_BYTES = 64 * 2**20
_SHARED_BYTES = 2**20
_REPEATS = 8
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


def machine_report() -> tuple[dict[str, Any], list[str]]:
    """Examine this machine; takes about a second, and makes a CUDA context on every GPU.

    Returns:
        Plain data, ready for JSON, and lines of text.
    """
    memory = memory_report()  # before there is a CUDA context
    gpus_note = why_unavailable(None) or ""
    gpus = [] if gpus_note else [examine_gpu(index) for index in range(torch.cuda.device_count())]
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    report = {
        "versions": _versions(),
        "num_cpus": os.cpu_count() or 1,
        "num_usable_cpus": usable_cpus(),
        "cpu_quota": cpu_quota(),
        "shm_bytes": None if shm is None else shm.total,
        "shm_free_bytes": None if shm is None else shm.free,
        "start_methods": multiprocessing.get_all_start_methods(),
        "memory": memory.as_dict(),
        "gpus": gpus,
        "gpus_note": gpus_note,
    }
    verdict = _verdict(report)
    return {"verdict": verdict, **report}, [verdict, *lines_of(report)]


def _verdict(report: dict[str, Any]) -> str:
    """Whether something here slows a loader down, or keeps it from working, in one sentence."""
    problems = [f"GPU {gpu['index']}: {gpu['problem']}" for gpu in report["gpus"] if gpu["problem"]]
    problems += [
        f"GPU {gpu['index']} cannot read batches in place, which costs a copy: {gpu['page_locking']}"
        for gpu in report["gpus"]
        if gpu["page_locking"] not in (None, WORKS)
    ]
    if problems:
        return f"{len(problems)} problem{'s' * (len(problems) > 1)}: {'; '.join(problems)}"
    cpus, gpus = report["num_usable_cpus"], len(report["gpus"])
    free = readable_memory(report["memory"]["host_available_bytes"])
    counts = f"{cpus} CPU{'s' * (cpus != 1)}, {free} of free memory, {gpus or 'no'} GPU{'s' * (gpus != 1)}"
    return f"no problems: {counts}"


# --- the software ----------------------------------------------------------------------------------------


def _versions() -> dict[str, str | None]:
    driver = None
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        driver = next(iter(re.findall(r"^NVRM version: .*?(\d+\.[\d.]+)", text, re.MULTILINE)), None)
    return {
        "fastload": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "NVIDIA driver": driver,
        **{name: _version(distributions) for name, distributions in _DISTRIBUTIONS.items()},
    }


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


# --- the GPUs --------------------------------------------------------------------------------------------


def examine_gpu(index: int) -> dict[str, Any]:
    """One GPU, and how it gets data from the host; takes some tens of milliseconds."""
    gpu: dict[str, Any] = {
        "index": index,
        "name": "unknown",
        "capability": None,
        "total_bytes": None,
        "free_bytes": None,
        "page_locking": None,  # whether batches in shared memory need no copy to pinned memory
        "pinned_bytes_per_s": None,
        "pageable_bytes_per_s": None,
        "problem": "",
    }
    try:
        gpu["name"] = torch.cuda.get_device_name(index)
        with torch.cuda.device(index):
            gpu["free_bytes"], gpu["total_bytes"] = torch.cuda.mem_get_info()
            gpu["capability"] = "{}.{}".format(*torch.cuda.get_device_capability())
            gpu["page_locking"] = try_page_locking(index)
            target = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cuda")
            for kind in ("pinned", "pageable"):
                source = torch.ones(_PROBE_BYTES, dtype=torch.uint8, pin_memory=kind == "pinned")
                gpu[f"{kind}_bytes_per_s"] = _bytes_per_s(source, target)
    except Exception as error:  # noqa: BLE001  # no memory, a device that has failed, or one that went
        gpu["problem"] = next(iter(str(error).splitlines()), type(error).__name__)
    return gpu


def try_page_locking(index: int) -> str:
    """Page-lock a small segment of shared memory, as a loader does with the slots of its workers.

    Returns:
        `WORKS`, or why not.
    """
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
