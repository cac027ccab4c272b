"""Everything that only a real GPU can tell, in one call of a few minutes.

Questions: does registered shared memory count as pinned, what does registering cost, how does it fail; what
do loaders bring whose slots are registered; how fast are copies from pageable, pinned and registered memory,
and do they overlap with compute; is every batch of the prefetcher what was sent, with flat memory; what do
Normalize, retry_on_oom and tune_backends do there; what does it cost to train from a cache.

Each check stands alone: what it raises is written down and the next one runs. Results are written after every
check to benchmarks/results/gpu.json, or to $OUT/gpu.json. Exit status: 0, or 1 if no check succeeded, or 2
("no CUDA device").

Command: python benchmarks/gpu_checks.py [--only NAME ...] [--limit-s 230]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_slots
import gpu_training
import torch
from gpu_tools import CHECKS, MB, Busy, check, gpu_ms, run_all, sources, wall_ms
from harness import RESULTS

from fastload.device.prefetch import DevicePrefetcher
from fastload.training.backends import tune_backends
from fastload.training.oom import find_batch_size, retry_on_oom
from fastload.training.report import memory_report
from fastload.transforms.normalize import Normalize

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["gpu_slots", "gpu_training"]  # whose checks are the first


# --- copies -----------------------------------------------------------------------------------------------


@check
def copy_bandwidth() -> dict[str, Any]:
    found = {}
    for nbytes in (64 * MB, 256 * MB):
        target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        for kind, source in sources(nbytes):
            target.zero_()
            elapsed_ms = gpu_ms(lambda s=source, t=target: t.copy_(s, non_blocking=True), repeats=20)
            start_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            call_ms = (time.perf_counter() - start_s) * 1000
            found[f"{kind}, {nbytes // MB} MB"] = {
                "GB_per_s": nbytes / elapsed_ms / MB,
                "call_returns_after_ms": call_ms,
                "is_right": bool((target == 1).all()),
            }
    return found


@check
def copies_overlap_with_compute() -> dict[str, Any]:
    nbytes, side = 256 * MB, torch.cuda.Stream()
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    found = {}
    for kind, source in sources(nbytes):

        def copy(source: torch.Tensor = source) -> None:
            with torch.cuda.stream(side):
                target.copy_(source, non_blocking=True)

        copy_ms = wall_ms(copy)
        step = Busy(1.5 * copy_ms)

        def both(step: Busy = step, copy: Callable[[], None] = copy) -> None:
            step()
            copy()

        step_ms, both_ms = wall_ms(step), wall_ms(both)
        found[kind] = {
            "copy_ms": copy_ms,
            "step_ms": step_ms,
            "both_ms": both_ms,
            "hidden_share_of_copy": (copy_ms + step_ms - both_ms) / min(copy_ms, step_ms),
        }
    return found


# --- the prefetcher ---------------------------------------------------------------------------------------


@check
def prefetcher_against_plain_loops() -> dict[str, Any]:
    shape, num_batches = (256, 224, 224, 3), 40
    pageable = [torch.full(shape, n, dtype=torch.uint8) for n in range(4)]
    pinned = [batch.pin_memory() for batch in pageable]
    resident = [batch.cuda() for batch in pageable]
    found: dict[str, Any] = {}
    for step_target_ms in (3.0, 12.0):
        step = Busy(step_target_ms)

        def epoch(batches: Any, move: Callable[[torch.Tensor], Any], step: Busy = step) -> None:
            for batch in batches:
                move(batch)
                step()

        def repeated(batches: list[torch.Tensor]) -> list[torch.Tensor]:
            return [batches[n % len(batches)] for n in range(num_batches)]

        ways: dict[str, tuple[Any, Callable[[torch.Tensor], Any]]] = {
            "resident": (repeated(resident), lambda batch: batch),
            "plain, pageable": (repeated(pageable), lambda batch: batch.to("cuda")),
            "plain, pinned": (repeated(pinned), lambda batch: batch.to("cuda", non_blocking=True)),
            "prefetcher, pageable": (DevicePrefetcher(repeated(pageable)), lambda batch: batch),
            "prefetcher, pinned": (DevicePrefetcher(repeated(pinned)), lambda batch: batch),
        }
        found[f"step of {step_target_ms} ms"] = {
            name: wall_ms(lambda way=way: epoch(*way)) / num_batches for name, way in ways.items()
        }
    return {"ms_per_step": found}


def numbered(number: int) -> torch.Tensor:
    """A pinned batch that differs everywhere from its neighbours."""
    return (torch.arange(64 * 257, dtype=torch.int32).reshape(64, 257) + number * 1_000_003).pin_memory()


@check
def every_batch_is_what_was_sent() -> dict[str, Any]:
    found = {}
    for cycles in (0, 200_000):
        wrong, held, aliases = [], [], []
        for number, batch in enumerate(DevicePrefetcher(map(numbered, range(300)))):
            torch.cuda._sleep(cycles)
            wrong.append((batch != numbered(number).cuda(non_blocking=True)).sum())
            if number % 10 == 0:
                held.append((number, batch))
            if number % 7 == 0:
                aliases.append((number, batch[3:5].detach()))
        del batch
        found[f"consumer sleeps {cycles} cycles"] = {
            "wrong": int(torch.stack(wrong).sum()),
            "wrong_held": sum(not torch.equal(b.cpu(), numbered(n)) for n, b in held),
            "wrong_aliases": sum(not torch.equal(b.cpu(), numbered(n)[3:5]) for n, b in aliases),
        }
    return found


@check
def memory_is_flat_and_the_host_never_waits() -> dict[str, Any]:
    batches = [torch.ones(64, 224, 224, 3, dtype=torch.uint8).pin_memory() for _ in range(4)]
    prefetcher = DevicePrefetcher([batches[n % 4] for n in range(50)])
    reserved = []
    for _ in range(6):
        for batch in prefetcher:
            batch.float().mean()
        del batch
        reserved.append(torch.cuda.memory_reserved())
    torch.cuda.set_sync_debug_mode("error")
    try:
        waits = ""
        for batch in prefetcher:
            batch.float().mean()
    except RuntimeError as error:
        waits = str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"reserved_bytes_after_epochs": reserved, "is_flat": len(set(reserved[1:])) == 1, "waits": waits}


# --- Normalize, out of memory, switches -------------------------------------------------------------------

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@check
def normalize() -> dict[str, Any]:
    images = torch.randint(0, 256, (256, 224, 224, 3), dtype=torch.uint8, device="cuda")
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (MEAN, STD))
    exact = (images[:8].cpu().permute(0, 3, 1, 2).double() / 255 - mean) / std
    mean_there, std_there = mean.float().cuda(), std.float().cuda()

    def naive(dtype: torch.dtype) -> torch.Tensor:
        chw = images.permute(0, 3, 1, 2).float().div(255)
        return chw.sub(mean_there).div(std_there).to(dtype)

    found = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        module = Normalize(MEAN, STD, dtype).to("cuda")
        result = module(images)
        elapsed_ms = gpu_ms(lambda m=module: m(images))
        nbytes = images.numel() * (1 + result.element_size())
        found[str(dtype)] = {
            "largest_error": float((result[:8].cpu().double() - exact).abs().max()),
            "is_channels_last": result.is_contiguous(memory_format=torch.channels_last),
            "ms": elapsed_ms,
            "GB_per_s": nbytes / elapsed_ms / MB,
            "naive_ms": gpu_ms(lambda d=dtype: naive(d)),
        }
    return found


@check
def kernels_of_normalize() -> dict[str, Any]:
    images = torch.ones(8, 224, 224, 3, dtype=torch.uint8, device="cuda")
    module = Normalize(MEAN, STD, torch.bfloat16).to("cuda")
    module(images)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        module(images)
        torch.cuda.synchronize()
    return {"events": [event.key[:80] for event in profile.key_averages()]}


@check
def out_of_memory() -> dict[str, Any]:
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    weights = torch.nn.Parameter(torch.ones(4, device="cuda"))
    sizes, reserved = [], []

    def step(part: torch.Tensor, weight: float) -> float:
        sizes.append(len(part))
        reserved.append(torch.cuda.memory_reserved())
        ((weights.sum() * part.float().mean()) * weight).backward()
        activation = torch.empty(len(part) * (total_bytes // 5), dtype=torch.uint8, device="cuda")
        return activation.numel() / total_bytes

    batch = torch.arange(16, device="cuda")
    shares = retry_on_oom(step, batch, model=[weights])
    gradient = weights.grad is not None and weights.grad.tolist()
    largest = find_batch_size(lambda part: step(part, 1.0), lambda size: torch.ones(size, device="cuda"))
    return {
        "sizes_tried": sizes,
        "reserved_at_each_start": reserved,
        "shares_of_memory": shares,
        "gradient": gradient,  # of the mean of 0 to 15
        "find_batch_size": largest,
    }


@check
def tf32() -> dict[str, Any]:
    left, right = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    found = {}
    for allowed in (False, True, None):
        with tune_backends(tf32=allowed):
            found[f"tf32={allowed}"] = {"TFLOP_per_s": 2 * 4096**3 / gpu_ms(lambda: left @ right) / 1e9}
    return found


# --- what else is there -----------------------------------------------------------------------------------


@check
def report_and_nvml() -> dict[str, Any]:
    found: dict[str, Any] = {"report": memory_report().as_dict(), "table": str(memory_report()).splitlines()}
    found["pynvml"] = importlib.util.find_spec("pynvml") is not None
    for name in ("utilization", "list_gpu_processes"):
        try:
            found[name] = str(getattr(torch.cuda, name)())
        except Exception as error:  # noqa: BLE001  # whether it works is the question
            found[name] = f"{type(error).__name__}: {error}"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), metavar="NAME")
    parser.add_argument("--limit-s", type=float, default=230.0, help="start no check after so many seconds")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 2
    folder = Path(os.environ["OUT"]) if os.environ.get("OUT") else RESULTS
    return run_all({name: CHECKS[name] for name in args.only}, folder / "gpu.json", args.limit_s)


if __name__ == "__main__":
    sys.exit(main())
