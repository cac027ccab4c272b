"""The result of a benchmark as text: the rates, and the fastest loader's code."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING

from fastload.bench.result import verdict_of
from fastload.system.humanize import readable_size, table

if TYPE_CHECKING:
    from fastload.bench.result import Result, Verdict

_COLUMNS = ["loader", "cache", "workers", "batch", "first epoch", "later epochs", "spread", "to torch's best"]


def report_lines(result: Result, setup: list[str]) -> list[str]:
    """The whole readable output; see `ending_lines`."""
    notes = []
    if nbytes := result.sample_nbytes:
        whole = readable_size(nbytes * result.length)
        notes.append(f"a decoded sample takes {readable_size(nbytes)}, the whole dataset {whole}")
    if result.build_s is not None:
        notes.append(f"the LMDB cache was built once, in {result.build_s:.1f} s, before the first round")
    return [
        *_heading(result),
        "",
        *table_lines(result),
        *notes,
        *(f"warning: {text}" for text in result.warnings),
        "",
        *ending_lines(result, setup),
    ]


def _heading(result: Result) -> list[str]:
    shared = [f"{result.num_samples:,} of {result.length:,} samples"]
    if result.size is not None:
        shared.append(f"size={result.size}")
    if result.transform is not None:
        shared.append(f"transform {result.transform}")
    machine = result.machine
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "fastload"))
    return [
        f"{result.source}: {', '.join(shared)}; samples/s, medians of {result.rounds} rounds",
        f"{machine['cpu']}, {machine['cores']} cores, {versions}; nothing is trained",
    ]


def table_lines(result: Result) -> list[str]:
    """A row for each configuration; problems are numbered, and follow below."""
    verdict = verdict_of(result.rows)
    torch = None if verdict is None else verdict.torch
    problems = list(dict.fromkeys(row.problem for row in result.rows if row.problem))
    rows = [_COLUMNS]
    for row in result.rows:
        figures = ["", "", "", "not run"]
        if row.problem:
            figures = ["", "", "", f"[{problems.index(row.problem) + 1}]"]
        elif row.later:
            figures = [
                f"{statistics.median(row.first):11,.0f}",
                f"{row.rate:12,.0f}",
                f"{min(row.later):,.0f} to {max(row.later):,.0f}",
                "" if torch is None else f"{_times(row.rate / torch.rate)}x",
            ]
        setting = row.configuration
        cache = "" if setting.is_torch else setting.cache
        rows.append([setting.loader, cache, str(setting.num_workers), str(setting.batch_size), *figures])
    return [*table(rows), *(f"[{number}] {problem}" for number, problem in enumerate(problems, start=1))]


def _times(ratio: float) -> str:
    """Three digits."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


# --- the ending ------------------------------------------------------------------------------------------


def ending_lines(result: Result, setup: list[str]) -> list[str]:
    """The code that was fastest on this machine, and the gain.

    Args:
        result: The result.
        setup: The lines of Python that make the variables `dataset` and `transform`.
    """
    verdict = verdict_of(result.rows)
    if verdict is None:
        return ["no configuration could be measured"]
    # A name in the working directory for the cache of a folder, a URL or MODULE:NAME.
    path = re.sub(r"[^\w.-]+", "-", re.split(r"[:/]", result.source.rstrip("/"))[-1]) + ".lmdb"
    made = verdict.fastest.configuration.code(has_transform=result.transform is not None, lmdb_path=path)
    code = sorted([*setup, *made], key=lambda line: not line.startswith(("import ", "from ")))
    return ["fastest on this machine:", *(f"    {line}" for line in code), _gain(verdict)]


def _gain(verdict: Verdict) -> str:
    gain = verdict.gain
    if gain is None:
        missing = "torch's" if verdict.torch is None else "fastload's"
        return f"{missing} loader has no figures here, so there is no comparison"
    text = f"{_times(gain.value)} times torch's best here"
    if verdict.fastest is verdict.torch:
        text = f"torch's own loader is the fastest here: fastload's best has {_times(gain.value)} of its rate"
    if gain.num_rounds < 2:
        doubt = ". One round shows no spread: use --rounds 3 before you rely on it"
    else:
        text += f" (spread {_times(gain.low)} to {_times(gain.high)} over {gain.num_rounds} rounds)"
        doubt = ". The difference is within the spread: the rounds disagree on which loader is faster"
    return f"{text}, from the second epoch on{doubt if gain.is_within_spread else ''}"
