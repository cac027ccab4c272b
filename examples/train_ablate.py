"""The table of `train.py --ablate`: each technique off and on, all others as the command line has them.

1. Both sides are built, warmed up and timed in one process, in turns: off, on, off, on, ...
2. A turn is at a steady pace before its clock starts: it first trains on the batches that its workers made
   ready in the other side's turn, and on a few more (cudnn.benchmark and the compiler do their work there).
3. The caches are filled before. A figure is the median of the turns.
4. Peak memory is what a fresh model takes at most in its first two steps: weights, gradients and the
   optimizer's state included, batches on the host not.
5. CUDA_LAUNCH_BLOCKING is read when CUDA starts: the row of `debug` shows its other two parts.
6. Before the table, a line estimates how long it takes. The estimate rests on the time of one set-up and a
   few steps with the options as they are; it leaves out the work of the compiler.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from train_data import Data
from train_step import Metrics, Trainer
from train_techniques import TECHNIQUES, Technique, vary

WARM_UP_STEPS = 3
PROBE_STEPS = 5
WIDTHS = (17, 17, 15, 7)  # of the columns behind the technique's name


@dataclass
class Figures:
    """One side of a row."""

    images_per_s: float
    step_ms: float
    peak_bytes: int


class Side:
    """A technique on or off: a model, and batches without end."""

    def __init__(
        self, options: argparse.Namespace, device: torch.device, phase: str, stack: contextlib.ExitStack
    ) -> None:
        self.options = options
        self.device = device
        self.phase = phase
        data = Data(options, device)
        data.fill()
        self.num_classes = len(data.classes)
        generator = torch.Generator().manual_seed(options.seed)
        loader = data.train_loader(generator) if phase == "train" else data.held_out_loader()
        self.batches = endless(stack.enter_context(loader))
        stack.callback(self.batches.close)  # before the loader: the stack runs backwards
        self.peak_bytes = self.measure_peak()
        self.trainer = Trainer(options, self.num_classes, device)
        self.turns: list[tuple[float, int]] = []  # seconds and images

    def measure_peak(self) -> int:
        """What two steps of a fresh model take: rule 4."""
        batches = [next(self.batches) for _ in range(2)]

        def two_steps() -> None:
            self.take(Trainer(self.options, self.num_classes, self.device), batches, 2)

        return peak_bytes(two_steps, self.device)

    def run_turn(self) -> None:
        """Warm up, then time some steps."""
        self.take(self.trainer, self.batches, steps_before_the_clock(self.options))
        started = time.perf_counter()
        num_images = self.take(self.trainer, self.batches, self.options.steps)
        self.turns.append((time.perf_counter() - started, num_images))

    def take(self, trainer: Trainer, batches: Iterable[Any], steps: int) -> int:
        """Some steps, which the device has done on return; how many images they had."""
        with trainer.backends():
            run = trainer.train_epoch if self.phase == "train" else trainer.evaluate
            metrics: Metrics = run(batches, steps)
            metrics.read()
        return metrics.num_images

    def figures(self) -> Figures:
        """Medians of the turns so far."""
        images_per_s = statistics.median(images / seconds for seconds, images in self.turns)
        step_s = statistics.median(seconds for seconds, _ in self.turns) / self.options.steps
        return Figures(images_per_s, step_s * 1e3, self.peak_bytes)


def steps_before_the_clock(options: argparse.Namespace) -> int:
    """Steps of a turn that are not timed: those on batches that were made ready before it, and a few more."""
    return 2 * options.workers + 2 + WARM_UP_STEPS


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def compare(
    options: argparse.Namespace, device: torch.device, technique: Technique
) -> tuple[Figures, Figures]:
    """The technique off and on."""
    with contextlib.ExitStack() as stack:
        sides = [
            Side(vary(options, technique, value), device, technique.phase, stack) for value in (False, True)
        ]
        for _ in range(options.rounds):
            for side in sides:
                side.run_turn()
        off, on = (side.figures() for side in sides)
    return off, on


def peak_bytes(work: Any, device: torch.device) -> int:
    """What ``work()`` holds at most in tensors, above what was there before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    # The CPU's allocator keeps no peak, but the profiler's trace has the sum after each allocation.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes to stderr when it starts and stops
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        work()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")


def estimate(options: argparse.Namespace, device: torch.device, num_techniques: int) -> str:
    """How long the table of so many techniques takes, from one set-up and a few steps measured now."""
    with contextlib.ExitStack() as stack:
        started = time.perf_counter()
        side = Side(options, device, "train", stack)
        set_up_s = time.perf_counter() - started
        probed = steps_before_the_clock(options) + PROBE_STEPS
        started = time.perf_counter()
        side.take(side.trainer, side.batches, probed)
        step_s = (time.perf_counter() - started) / probed
    steps = options.rounds * (steps_before_the_clock(options) + options.steps)
    seconds = 2 * num_techniques * (set_up_s + steps * step_s)
    length = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    return (
        f"takes about {length}: {num_techniques} techniques x 2 sides, each with {set_up_s:.1f} s of set-up "
        f"and {steps} steps of {step_s * 1e3:.0f} ms\n"
        "(measured just now with the options as they are; a slower side and the compiler take longer)"
    )


def run(options: argparse.Namespace, device: torch.device) -> None:
    """Print the table, for the techniques that --ablate names or for all, row by row as they are timed."""
    keep = Data(argparse.Namespace(**{**vars(options), "shared_cache": True}), device)
    keep.fill()  # lives as long as this function: the sides find it filled
    techniques = [
        technique for technique in TECHNIQUES if not options.ablate or technique.name in options.ablate
    ]
    num_timed = sum(technique.obstacle(device) is None for technique in techniques)
    if num_timed:
        print(estimate(options, device, num_timed), flush=True)
    print(f"off > on: batches of {options.batch_size} at {options.size} x {options.size}")
    print_row("technique", "images/s", "step ms", "peak MB", "speed")
    notes = []
    for technique in techniques:
        obstacle = technique.obstacle(device)
        if obstacle:
            print_row(technique.name, obstacle)
            continue
        off, on = compare(options, device, technique)
        print_row(
            technique.name,
            f"{off.images_per_s:,.0f} > {on.images_per_s:,.0f}",
            f"{off.step_ms:.1f} > {on.step_ms:.1f}",
            f"{off.peak_bytes / 1e6:.1f} > {on.peak_bytes / 1e6:.1f}",
            f"{on.images_per_s / off.images_per_s:.2f}x",
        )
        if technique.beside:
            shared = ", ".join(f"{name}={value}" for name, value in technique.beside.items())
            notes.append(f"{technique.name}: both sides with {shared}")
    print(*notes, sep="\n")


def print_row(technique: str, *cells: str) -> None:
    """At once: a row can take a minute."""
    print(
        f"{technique:<20}",
        *(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=False)),
        flush=True,
    )
