"""Everything that only a real GPU can tell, in one call of less than ten minutes.

Questions: does registered shared memory count as pinned, what does registering cost, how does it fail; what
do loaders bring whose slots are registered; how fast are copies from pageable, pinned and registered memory,
and do they overlap with compute; is every batch what was sent, with flat memory; do the loader's own figures
agree with the device's; what happens in forks, captures, under a default device, after kill -9; what do
transforms cost there; what does it cost to train from a cache.

Each group of checks is a process of its own with its own limit, so that a crash, a hang or a broken device
costs one group; each check stands alone: what it raises is written down and the next one runs. Results are
written after every group to benchmarks/results/gpu.json, or to $OUT/gpu.json (in a dry run, to $OUT alone).
Needs a GPU, torch and NumPy; nothing need be installed, and a check that needs another package says so. Exit
status: 0, or 1 if no check succeeded, or 2 ("no CUDA device").

Command: python benchmarks/gpu_checks.py [--only NAME ...] [--groups NAME ...] [--limit-s 500] [--dry-run]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_dry
import gpu_loader
import gpu_slots
import gpu_tools  # the first: it makes fastload importable
import gpu_training
import gpu_transforms
import torch
from gpu_tools import CHECKS, MB, Busy, check, gpu_ms, run_all, sized, sources, wall_ms
from harness import RESULTS, machine

from fastload.device.device_prefetcher import DevicePrefetcher
from fastload.training.backends import tune_backends
from fastload.training.oom import find_batch_size, retry_on_oom
from fastload.training.report import memory_report
from fastload.transforms.normalize import Normalize

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["gpu_loader", "gpu_slots", "gpu_tools", "gpu_training", "gpu_transforms"]  # whose checks are run

# Most valuable first. Seconds: after so many the group is ended.
GROUPS: dict[str, tuple[float, tuple[str, ...]]] = {
    "memory": (
        60,
        (
            "import_makes_no_context",
            "torch_pinned_memory",
            "memory_written_by_a_child",
            "cost_of_registering",
            "registering_shared_memory",
            "ways_in_which_registering_fails",
        ),
    ),
    "loaders": (
        70,
        (
            "every_batch_is_what_was_sent",
            "loaders_to_the_device",
            "waits_against_the_devices_idle_time",
            "memory_is_flat_and_nothing_synchronizes",
        ),
    ),
    "transforms": (60, ("transforms_on_the_device", "ways_to_crop_and_resize", "dataset_on_the_device")),
    "situations": (
        80,
        (
            "forks_with_recorded_tensors",
            "two_loaders_and_a_killed_worker",
            "default_device",
            "cost_of_leaves",
            "an_array_in_the_batch",
            "threads_and_no_workers",
            "memory_of_2000_batches",
        ),
    ),
    "copies": (60, ("copy_bandwidth", "copies_overlap_with_compute", "prefetcher_against_plain_loops")),
    "capture": (45, ("capture_of_a_step_between_batches",)),
    "compiled": (60, ("compiled_transform_with_cuda_graphs",)),
    "normalize": (45, ("normalize", "kernels_of_normalize", "out_of_memory", "tf32", "report_and_nvml")),
    "decode": (30, ("decode_on_the_device",)),
    "training": (120, ("resnet_50_from_a_cache",)),
}


# --- copies -----------------------------------------------------------------------------------------------


@check
def copy_bandwidth() -> dict[str, Any]:
    found = {}
    for nbytes in (sized(64, 1) * MB, sized(256, 2) * MB):
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
    nbytes, side = sized(256, 2) * MB, torch.cuda.Stream()
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
    shape, num_batches = (sized(256, 2), 224, 224, 3), 40
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
    """A pinned batch that differs everywhere from its neighbors."""
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
def memory_is_flat_and_nothing_synchronizes() -> dict[str, Any]:
    batches = [torch.ones(sized(64, 2), 224, 224, 3, dtype=torch.uint8).pin_memory() for _ in range(4)]
    prefetcher = DevicePrefetcher([batches[n % 4] for n in range(sized(50, 8))])
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
    images = torch.randint(0, 256, (sized(256, 8), 224, 224, 3), dtype=torch.uint8, device="cuda")
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
    left, right = (torch.randn(sized(4096, 8), sized(4096, 8), device="cuda") for _ in range(2))
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


def run_group(name: str, limit_s: float, only: list[str], *, is_dry: bool) -> dict[str, Any]:
    """The results of one group's checks, run in a process of its own that ends after ``limit_s``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "group.json"
        command = [sys.executable, __file__, "--in-process", str(path), "--only", *only]
        command += ["--dry-run"] * is_dry
        start_s = time.perf_counter()
        try:
            ended = f"exit code {subprocess.run(command, timeout=limit_s, check=False).returncode}"
        except subprocess.TimeoutExpired:
            ended = f"ended after {limit_s:g} s"
        results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    print(f"--- {name}: {ended} after {time.perf_counter() - start_s:.0f} s", flush=True)
    missing = {
        each: {"is_ok": False, "error": f"did not end: {ended}"} for each in only if each not in results
    }
    return results | missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), metavar="NAME")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS), metavar="NAME")
    parser.add_argument("--limit-s", type=float, default=500.0, help="start no group after so many seconds")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, small: its figures mean nothing")
    parser.add_argument("--in-process", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dry_run:
        gpu_dry.install()
    if args.in_process is not None:
        return run_all({name: CHECKS[name] for name in args.only}, args.in_process)
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 2
    if args.dry_run and not os.environ.get("OUT"):
        parser.error("a dry run writes no results: set OUT to a folder for what it finds")
    folder = Path(os.environ["OUT"]) if os.environ.get("OUT") else RESULTS
    end_s = time.perf_counter() + args.limit_s
    results: dict[str, Any] = {}
    for name in args.groups:
        limit_s, checks = GROUPS[name]
        limit_s = min(limit_s, end_s - time.perf_counter())
        only = [each for each in checks if each in args.only]
        if only and limit_s > 5:
            results |= run_group(name, limit_s, only, is_dry=args.dry_run)
        content = {"command": "python benchmarks/gpu_checks.py", "machine": machine(), "checks": results}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu.json").write_text(json.dumps(content, indent=1) + "\n")
    for name, result in results.items():
        print(
            f"{name:45} {'ok' if result['is_ok'] else 'FAILED: ' + result['error'].strip().splitlines()[-1]}"
        )
    return 0 if any(result["is_ok"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
