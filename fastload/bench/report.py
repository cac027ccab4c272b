"""The result of a benchmark as text: the rates, and the fastest loader's line of code."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from fastload.bench.configurations import Cache
from fastload.system.budget import parse_memory
from fastload.system.humanize import readable_size, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastload.bench.configurations import Configuration
    from fastload.bench.run import Benchmark

_COLUMNS = ["loader", "cache", "workers", "first epoch", "later epochs", "range", "to torch's best"]


def best_of(rows: Sequence[Configuration], loader: str = "") -> Configuration | None:
    """The row with the highest rate, of one loader or of all; None if none was measured."""
    measured = [row for row in rows if row.rate and row.loader.startswith(loader)]
    return max(measured, key=lambda row: row.rate, default=None)


def table_lines(benchmark: Benchmark) -> list[str]:
    """A row for each configuration, with samples per second; problems are numbered, and follow below."""
    torch = best_of(benchmark.rows, "torch")
    problems = list(dict.fromkeys(row.problem for row in benchmark.rows if row.problem))
    rows = [_COLUMNS]
    for row in benchmark.rows:
        if row.problem:
            figures = ["", "", "", f"[{problems.index(row.problem) + 1}]"]
        else:
            figures = [
                f"{statistics.median(row.first):11,.0f}",
                f"{row.rate:12,.0f}",
                f"{min(row.later):,.0f} to {max(row.later):,.0f}",
                "" if torch is None else f"{row.rate / torch.rate:.2f}x",
            ]
        cache = "" if row.loader == "torch" else row.cache
        rows.append([row.loader, cache, str(row.num_workers), *figures])
    lines = [*table(rows), *(f"[{number}] {problem}" for number, problem in enumerate(problems, start=1))]
    if benchmark.sample_nbytes:
        needed, free = map(readable_size, _needed_and_free(benchmark))
        lines.append(f"a cache of all {benchmark.length:,} samples takes {needed}; RAM has room for {free}")
    return lines


def _needed_and_free(benchmark: Benchmark) -> tuple[int, int]:
    """The bytes of a cache of the whole dataset, and those that one in RAM may take."""
    return benchmark.length * benchmark.sample_nbytes, parse_memory("auto")


def verdict_lines(benchmark: Benchmark, code: str, *, has_transform: bool) -> list[str]:
    """The line of code that was fastest on this machine, and its gain; no lines if nothing was measured.

    A cache in RAM is left out where the whole dataset, of which a part was measured, has no room.

    Args:
        benchmark: What was measured.
        code: An expression for the dataset.
        has_transform: Whether a variable `transform` has the random part.
    """
    needed_bytes, free_bytes = _needed_and_free(benchmark)
    rows = [row for row in benchmark.rows if row.cache != Cache.RAM or needed_bytes <= free_bytes]
    best, torch, ours = (best_of(rows, loader) for loader in ("", "torch", "fastload"))
    if best is None:
        return []
    heading = "fastest here:" if len(rows) == len(benchmark.rows) else "fastest here of what has room:"
    lines = [heading, f"    {best.line(code, has_transform=has_transform)}"]
    if torch is None or ours is None:
        return lines
    # Runs of one round are compared with each other: a slow minute slows both.
    ratios = [rate / torchs for rate, torchs in zip(ours.later, torch.later, strict=False)]
    low, high = min(ratios), max(ratios)
    gain = f"fastload's best is {ours.rate / torch.rate:.2f} times as fast as torch's best"
    lines.append(f"{gain} from the second epoch on ({low:.2f} to {high:.2f}, rounds: {len(ratios)})")
    doubt = ["this does not show which one is faster: use more --rounds"]
    return [*lines, *(doubt if len(ratios) < 2 or low <= 1 <= high else [])]
