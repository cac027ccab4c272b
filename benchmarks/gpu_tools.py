"""What the GPU checks are made of: how checks are run and written down, timing, registered shared memory.

Used by gpu_checks.py and gpu_slots.py. A check is a function without arguments that gives plain data; what
it raises is written down as text, and the next one runs.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

# On a machine with a GPU and torch, nothing else need be installed, this library neither.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fastload.memory.segment import Segment, populate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MB = 1_000_000
GIB = 2**30
PORTABLE, READ_ONLY = 1, 8  # cudaHostRegister's flags


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {}


def check(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Add a check under its function's name."""
    CHECKS[function.__name__] = function
    return function


# --- running them -----------------------------------------------------------------------------------------


def run(name: str, function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One check's result, or the text of what it raised; starts with the device memory free."""
    start_s = time.perf_counter()
    try:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        outcome: dict[str, Any] = {"is_ok": True, "result": function()}
    except ModuleNotFoundError as error:
        outcome = {"is_ok": False, "error": f"left out: needs {error.name}"}
    except Exception:  # noqa: BLE001  # the next check has to run
        outcome = {"is_ok": False, "error": traceback.format_exc()}
    outcome["seconds"] = round(time.perf_counter() - start_s, 2)
    ended = "ok" if outcome["is_ok"] else "FAILED" if "Traceback" in outcome["error"] else outcome["error"]
    print(f"{name}: {ended}, {outcome['seconds']} s", flush=True)
    return outcome


def run_all(checks: dict[str, Callable[[], dict[str, Any]]], path: Path) -> int:
    """Run checks in turn, write all results after each, give the exit status."""
    results: dict[str, Any] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, function in checks.items():
        results[name] = run(name, function)
        path.write_text(json.dumps(results, default=str))
    return 0 if any(result["is_ok"] for result in results.values()) else 1


# --- time, and shared memory ---


def gpu_ms(work: Callable[[], Any], repeats: int = 10) -> float:
    """Milliseconds per call on the current stream, by events, after two calls that do not count."""
    for _ in range(2):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def wall_ms(work: Callable[[], Any], repeats: int = 3) -> float:
    """Milliseconds of the host until the device is idle, the median, after one call that does not count."""
    figures = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        figures.append((time.perf_counter() - start_s) * 1000)
    return statistics.median(figures[1:])


def register(address: int, nbytes: int, flags: int = PORTABLE) -> int:
    """The error number that cudaHostRegister gave; 0 is success."""
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, flags))


def unregister(address: int) -> int:
    """The error number that cudaHostUnregister gave; 0 is success."""
    return int(torch.cuda.cudart().cudaHostUnregister(address))


def shared_tensor(nbytes: int, *, is_populated: bool = True) -> torch.Tensor:
    """A uint8 tensor over anonymous shared memory, as a slot of the ring is."""
    segment = Segment.create(nbytes, name="fastload-slot")
    mapping = segment.map(writable=True)
    segment.close()
    if is_populated:
        populate(mapping)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def sources(nbytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Host memory of each kind, written to."""
    yield "pageable", torch.ones(nbytes, dtype=torch.uint8)
    yield "pinned", torch.ones(nbytes, dtype=torch.uint8).pin_memory()
    registered = shared_tensor(nbytes)
    code = register(registered.data_ptr(), registered.numel())
    if code:
        raise RuntimeError(f"cudaHostRegister gave {code}")
    try:
        yield "registered", registered.fill_(1)[:nbytes]
    finally:
        torch.cuda.synchronize()
        unregister(registered.data_ptr())


def cuda_runtime() -> ctypes.CDLL | None:
    """The libcudart that torch loaded."""
    found = re.search(r"(/\S*libcudart\S*)", Path("/proc/self/maps").read_text())
    return ctypes.CDLL(found[1]) if found else None


def launch() -> str:
    """A small kernel: "" or the error that it meets."""
    try:
        torch.zeros(8, device="cuda").add_(1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def status_kb() -> dict[str, str]:
    """Locked and pinned pages as the kernel counts them."""
    return dict(re.findall(r"^(VmLck|VmPin):\s*(.*)$", Path("/proc/self/status").read_text(), re.MULTILINE))


def sized(full: int, small: int) -> int:
    """A size: the full one, or the small one in a dry run."""
    return small if os.environ.get("FASTLOAD_GPU_DRY_RUN") else full


class Busy:
    """A step that computes for about so long and launches without waiting."""

    def __init__(self, target_ms: float) -> None:
        self.matrix = torch.randn(sized(4096, 8), sized(4096, 8), device="cuda", dtype=torch.bfloat16)
        self.repeats = 1
        self.repeats = max(1, round(target_ms / gpu_ms(self)))

    def __call__(self) -> None:
        """Launch the work."""
        for _ in range(self.repeats):
            self.matrix @ self.matrix
