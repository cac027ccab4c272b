"""GPU checks of pinned memory: what registering shared memory does, and loaders whose slots are registered.

Run by gpu_checks.py.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpu_tools import (
    GIB,
    MB,
    PORTABLE,
    READ_ONLY,
    check,
    cuda_runtime,
    launch,
    register,
    shared_tensor,
    sized,
    status_kb,
    unregister,
)

from fastload import DataLoader, DevicePrefetcher
from fastload.memory.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# --- pinned memory ----------------------------------------------------------------------------------------


@check
def import_makes_no_context() -> dict[str, Any]:
    code = (
        "import torch, fastload; from fastload.training.report import memory_report; r = memory_report(); "
        "import json; print(json.dumps([torch.cuda.is_initialized(), r.devices_note]))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    is_initialized, note = json.loads(output)
    return {"is_initialized": is_initialized, "note": note}


@check
def torch_pinned_memory() -> dict[str, Any]:
    pinned = torch.empty(MB, dtype=torch.uint8, pin_memory=True)
    return {
        "pinned": pinned.is_pinned(),
        "view": pinned[4096:].is_pinned(),
        "other": torch.empty(9).is_pinned(),
    }


@check
def registering_shared_memory() -> dict[str, Any]:
    found: dict[str, Any] = {"limit": resource.getrlimit(resource.RLIMIT_MEMLOCK), "before": status_kb()}
    for nbytes, is_populated in ((sized(64, 1) * MB, True), (sized(GIB, MB), True), (sized(GIB, MB), False)):
        tensor = shared_tensor(nbytes, is_populated=is_populated)
        row: dict[str, Any] = {"is_pinned_before": tensor.is_pinned()}
        start_s = time.perf_counter()
        row["register"] = register(tensor.data_ptr(), tensor.numel())
        row["register_s_per_GiB"] = (time.perf_counter() - start_s) / (nbytes / GIB)
        row["status"] = status_kb()
        row["is_pinned"] = tensor.is_pinned()
        row["is_pinned_view"] = tensor[4097:].is_pinned()
        row["pin_memory_is_same"] = tensor.pin_memory().data_ptr() == tensor.data_ptr()
        start_s = time.perf_counter()
        row["unregister"] = unregister(tensor.data_ptr())
        row["unregister_s_per_GiB"] = (time.perf_counter() - start_s) / (nbytes / GIB)
        row["is_pinned_after"] = tensor.is_pinned()
        row["launch"] = launch()
        found[f"{nbytes} bytes, populated={is_populated}"] = row
        del tensor
    return found


@check
def ways_in_which_registering_fails() -> dict[str, Any]:
    runtime = cuda_runtime()
    tensor = shared_tensor(MB)
    address, nbytes = tensor.data_ptr(), tensor.numel()
    segment = Segment.create(MB, name="fastload-slot")
    read_only = np.frombuffer(segment.map(writable=False), np.uint8)
    segment.close()
    tries: dict[str, Callable[[], int]] = {
        "unregister what is not registered": lambda: unregister(address),
        "no bytes": lambda: register(address, 0),
        "read-only mapping": lambda: register(read_only.ctypes.data, read_only.nbytes),
        "read-only mapping, with the flag": lambda: register(
            read_only.ctypes.data, read_only.nbytes, PORTABLE | READ_ONLY
        ),
        "unregister the read-only one": lambda: unregister(read_only.ctypes.data),
        "first time": lambda: register(address, nbytes),
        "second time": lambda: register(address, nbytes),
        "part of it": lambda: register(address + 4096, 4096),
        "unregister by an inner address": lambda: unregister(address + 4096),
        "unregister": lambda: unregister(address),
        "unaligned": lambda: register(address + 1, 4096),
        "unregister the unaligned one": lambda: unregister(address + 1),
    }
    found: dict[str, Any] = {"libcudart": None if runtime is None else runtime._name}
    for name, attempt in tries.items():
        code = attempt()
        pending = None if runtime is None else runtime.cudaPeekAtLastError()
        found[name] = {"code": code, "pending": pending, "launch": launch(), "second launch": launch()}
    if runtime is not None:
        code = register(address, 0)
        cleared = runtime.cudaGetLastError()
        found["cleared by cudaGetLastError"] = {"code": code, "was": cleared, "launch": launch()}
    return found


# --- slots ------------------------------------------------------------------------------------------------


class Pictures(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Pictures as a cache gives them: different in their first pixels, and free of charge."""

    def __init__(self, size: int, *, reuses: bool = True) -> None:
        self.size = size
        self.reuses = reuses  # one array for all samples: a worker process writes each into its batch at once
        self.pixels = np.zeros((224, 224, 3), np.uint8)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], int]:
        """``(224, 224, 3) uint8`` and its index."""
        pixels = self.pixels if self.reuses else self.pixels.copy()
        pixels[0, :2, 0] = divmod(index, 256)
        return pixels, index


@check
def loaders_to_the_device() -> dict[str, Any]:
    dataset, batch_size, num_epochs = Pictures(sized(4096, 256)), 128, 4
    found: dict[str, Any] = {}

    def moved(loader: Iterable[Any]) -> Iterable[Any]:
        for batch in loader:
            yield [part.to("cuda", non_blocking=True) for part in batch]

    def loader(**options: Any) -> DataLoader:
        return DataLoader(dataset, batch_size, num_workers=8, persistent_workers=True, **options)

    loaders = [loader(device="cuda"), loader(), loader(pin_memory=True)]
    prefetcher = DevicePrefetcher(loaders[1])
    ways: dict[str, Callable[[], Any]] = {
        "device=": lambda: loaders[0],
        "prefetcher": lambda: prefetcher,
        "pin_memory and to()": lambda: moved(loaders[2]),
    }
    for name, batches in ways.items():
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        seconds, cpu_seconds = [], []
        for _ in range(num_epochs):
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            for images, labels in batches():
                first = images[:, 0, :2, 0].to(torch.int64)
                wrong += (first[:, 0] * 256 + first[:, 1] != labels).sum()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start_s)
            cpu_seconds.append(time.process_time() - start_cpu_s)
        found[name] = {
            "images_per_s": [len(dataset) / each for each in seconds],
            "cpu_s_of_this_process": cpu_seconds,
            "wrong": int(wrong),
            "status": status_kb(),
        }
    for each in loaders:
        each.close()
    found["launch after unregistering"] = launch()
    return found
