"""What the benchmarks share: contenders, interleaved runs, medians, a table, and a results file.

Every figure is a median over runs that were interleaved in one go, so a noisy moment affects all
contenders alike; what is compared are ratios of such medians.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset

import fastload

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).parent / "results"


class Noise(Dataset[Any]):
    """Images `(side, side, 3) uint8` of one shape that cost nothing to make."""

    def __init__(self, num_samples: int, side: int) -> None:
        self.num_samples = num_samples
        self.image = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return self.image, index


@dataclass
class Contender:
    """One way to do the job.

    Attributes:
        label: What the table calls it.
        group: Contenders of a group compete for its best row (say, "torch").
        run: Does the job once and gives the figure.
        close: Gives back what `run` keeps between runs.
    """

    label: str
    group: str
    run: Callable[[], float]
    close: Callable[[], None] = lambda: None
    figures: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The middle one of all figures."""
        return statistics.median(self.figures)


def interleave(contenders: list[Contender], runs: int) -> None:
    """Run all contenders in turn, ``runs`` times, after one run of each that does not count."""
    for contender in contenders:
        contender.run()
    for _ in range(runs):
        for contender in contenders:
            contender.figures.append(contender.run())
    for contender in contenders:
        contender.close()


def in_own_process(function: Callable[..., None], *args: Any) -> None:
    """Run a function in a new process and wait for it."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{function.__name__} ended with exit code {process.exitcode}")


def images_per_s(loader: Any, num_images: int) -> float:
    """One epoch over a loader whose workers are up (or will be): images per second."""
    start_s = time.perf_counter()
    seen = 0
    for batch in loader:
        seen += len(batch[0] if isinstance(batch, (list, tuple)) else batch)
    elapsed_s = time.perf_counter() - start_s
    if seen != num_images:
        raise RuntimeError(f"expected {num_images} images, got {seen}")
    return seen / elapsed_s


def contender(label: str, group: str, make: Callable[[], Any], num_images: int) -> Contender:
    """A loader that is made at its first run and kept: images a second over its epochs."""
    loader = functools.cache(make)

    def close() -> None:
        made = loader()
        loader.cache_clear()
        if hasattr(made, "close"):
            made.close()
        made._iterator = None

    return Contender(label, group, lambda: images_per_s(loader(), num_images), close)


def best(contenders: list[Contender], group: str, *, highest: bool = True) -> Contender:
    """The best row of a group."""
    choose = max if highest else min
    return choose((c for c in contenders if c.group == group), key=lambda c: c.median)


def cpu_model() -> str:
    """The name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def has_gil() -> bool:
    """Whether this interpreter runs one thread at a time; a free-threaded build need not."""
    return not hasattr(sys, "_is_gil_enabled") or sys._is_gil_enabled()


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version() + ("" if has_gil() else " without the GIL"),
        "torch": torch.__version__,
    }


def commit(checkout: Path = RESULTS.parent.parent) -> str:
    """The commit that is measured, with a plus if the package differs from it; empty outside a repository."""
    git = ("git", "-C", str(checkout))
    head = subprocess.run((*git, "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False)
    differs = subprocess.run(
        (*git, "diff", "--quiet", "HEAD", "--", "fastload"), capture_output=True, check=False
    ).returncode
    return head.stdout.strip() + "+" * (differs and not head.returncode)


def report(
    title: str,
    unit: str,
    contenders: list[Contender],
    ratios: dict[str, tuple[float, float]],
    *,
    digits: int = 0,
) -> dict[str, Any]:
    """Print one question's table and give it as plain data.

    Args:
        title: The question.
        unit: Of the figures.
        contenders: All rows.
        ratios: Name -> (ratio, target).
        digits: Decimals of the figures.
    """
    console = Console()
    table = Table(title=title)
    table.add_column("contender")
    for column in (unit, "lowest", "highest"):
        table.add_column(column, justify="right")
    for contender in contenders:
        figures = (contender.median, min(contender.figures), max(contender.figures))
        table.add_row(contender.label, *(f"{figure:,.{digits}f}" for figure in figures))
    console.print(table)
    for name, (ratio, target) in ratios.items():
        console.print(f"  {name}: {ratio:.2f} (target {target:g})")
    return {
        "title": title,
        "unit": unit,
        "rows": {c.label: {"median": c.median, "figures": c.figures} for c in contenders},
        "ratios": {name: {"value": ratio, "target": target} for name, (ratio, target) in ratios.items()},
    }


def save(name: str, command: str, questions: list[dict[str, Any]]) -> Path:
    """Write the results where the README takes its figures from."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    head = {"command": command, "date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit()}
    results = {**head, "version": fastload.__version__, "machine": machine(), "questions": questions}
    path.write_text(json.dumps(results, indent=1) + "\n")
    Console().print(f"written to {path}")
    return path
