"""What this machine offers a data loader, for `fastload doctor`.

It changes nothing and ends no process. No function raises: if something cannot be determined, the report says
why.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import mmap
import os
import platform
import re
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from fastload.device.devices import choose_backend, why_unavailable
from fastload.system.cpus import cpu_quota, usable_cpus
from fastload.system.humanize import readable_memory
from fastload.system.linux import huge_pages_report
from fastload.training.report import lines_of, memory_report
from fastload.version import __version__

WORKS = "works"

_PROBE_BYTES = 64 * 2**20
_SHARED_BYTES = 2**20
_REPEATS = 8
# Of a GPU; page_locking is whether batches in shared memory need no copy to pinned memory.
_FIGURES = ("total_bytes", "free_bytes", "page_locking", "pinned_bytes_per_s", "pageable_bytes_per_s")
_LIBRARIES = ("numpy", "pillow", "albumentations", "lmdb", "opencv-python-headless", "opencv-python")


def machine_report() -> tuple[dict[str, Any], list[str]]:
    """Examine this machine; takes about a second, and makes a CUDA context on every GPU.

    Returns:
        Plain data, ready for JSON, and lines of text.
    """
    memory = memory_report()  # before there is a CUDA context
    gpus_note = why_unavailable(None) or ""
    report = {
        "versions": _versions(),
        "num_cpus": os.cpu_count() or 1,
        "num_usable_cpus": usable_cpus(),
        "cpu_quota": cpu_quota(),
        "shm_bytes": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        "huge_pages": huge_pages_report(),
        "memory": memory.as_dict(),
        "gpus": [] if gpus_note else [examine_gpu(index) for index in range(torch.cuda.device_count())],
        "gpus_note": gpus_note,
    }
    verdict = _verdict(report)
    return {"verdict": verdict, **report}, [verdict, *lines_of(report)]


def _verdict(report: dict[str, Any]) -> str:
    """Whether something here slows a loader down, or keeps it from working, in one sentence."""
    problems = []
    for gpu in report["gpus"]:
        problem = gpu["problem"]
        if not problem and gpu["page_locking"] != WORKS:
            problem = f"it cannot read batches in place, which costs a copy: {gpu['page_locking']}"
        problems += [f"GPU {gpu['index']}: {problem}"] if problem else []
    if problems:
        return f"{len(problems)} problem{'s' * (len(problems) > 1)}: {'; '.join(problems)}"
    cpus, gpus = report["num_usable_cpus"], len(report["gpus"])
    free = readable_memory(report["memory"]["host_available_bytes"])
    counts = f"{cpus} CPU{'s' * (cpus != 1)}, {free} of free memory, {gpus or 'no'} GPU{'s' * (gpus != 1)}"
    return f"no problems: {counts}"


# --- the software ----------------------------------------------------------------------------------------


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"fastload": __version__, "python": platform.python_version()}
    versions |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        found = re.search(r"NVRM version: .*?(\d+\.[\d.]+)", text)
        versions["NVIDIA driver"] = None if found is None else found[1]
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


# --- the GPUs --------------------------------------------------------------------------------------------


def examine_gpu(index: int) -> dict[str, Any]:
    """One GPU, and how it gets data from the host; takes some tens of milliseconds."""
    gpu: dict[str, Any] = {"index": index, "name": "unknown", **dict.fromkeys(_FIGURES), "problem": ""}
    try:
        gpu["name"] = torch.cuda.get_device_name(index)
        with torch.cuda.device(index):
            gpu["free_bytes"], gpu["total_bytes"] = torch.cuda.mem_get_info()
            gpu["page_locking"] = try_page_locking(index)
            target = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cuda")
            for kind in ("pinned", "pageable"):
                source = torch.ones(_PROBE_BYTES, dtype=torch.uint8, pin_memory=kind == "pinned")
                gpu[f"{kind}_bytes_per_s"] = _bytes_per_s(source, target)
    except Exception as error:  # noqa: BLE001  # no memory, a device that has failed, or one that went
        gpu["problem"] = next(iter(str(error).splitlines()), type(error).__name__)
    return gpu


def try_page_locking(index: int) -> str:
    """Page-lock a little shared memory, as a loader does with the slots of its workers.

    Returns:
        `WORKS`, or why not.
    """
    backend: Any = choose_backend(index, "fastload doctor")
    tensor = torch.frombuffer(mmap.mmap(-1, _SHARED_BYTES), dtype=torch.uint8).fill_(1)  # it has its pages
    if reason := backend.register(tensor.data_ptr(), tensor.nbytes):
        return str(reason)
    refused = "" if tensor.is_pinned() else "torch does not treat registered memory as pinned"
    return backend.unregister(tensor.data_ptr()) or refused or WORKS


def _bytes_per_s(source: torch.Tensor, target: torch.Tensor) -> float:
    target.copy_(source)
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(_REPEATS):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return _REPEATS * source.numel() / (time.perf_counter() - started_s)
