"""The result of a benchmark as text: the table, the code of the fastest loader, the baseline."""

from __future__ import annotations

import io
import multiprocessing
import re
import statistics
from typing import TYPE_CHECKING

from fastload.bench.result import readable_rounds, verdicts
from fastload.system.sizes import readable_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fastload.bench.baseline import Comparison
    from fastload.bench.contenders import Contender
    from fastload.bench.result import Ratio, Result, Row, Verdict

_WIDE = 1000  # columns: a table is never wrapped, because a file or a pipe has no width


def report_lines(result: Result, setup: Mapping[str | None, list[str]]) -> list[str]:
    """The whole readable output, apart from the baseline; see `ending_lines`."""
    return [
        *_heading(result),
        "",
        *table_lines(result),
        *_notes(result),
        *(f"warning: {text}" for text in result.warnings),
        "",
        *ending_lines(result, setup),
    ]


def _heading(result: Result) -> list[str]:
    sweep = result.sweep
    shared = []
    if len(sweep.batch_sizes) == 1:
        shared.append(f"batches of {sweep.batch_sizes[0]}")
    if len(sweep.start_methods) == 1:
        shared.append(f"workers by {sweep.start_methods[0]}")
    if len(sweep.sizes) == 1 and sweep.sizes[0] is not None:
        shared.append(f"size {sweep.sizes[0]}")
    if result.transform is not None:
        shared.append(f"transform {result.transform}")
    some = f"{result.num_samples:,} of {result.length:,} samples"
    machine = result.machine
    what = ", ".join([f"{result.source}: {some}", *shared])
    versions = f"Python {machine.python}, torch {machine.torch}, fastload {machine.fastload}"
    return [
        f"{what}; medians of {readable_rounds(result.rounds)}",
        f"{machine}, {versions}; nothing is trained",
    ]


# --- the table -------------------------------------------------------------------------------------------


def table_lines(result: Result) -> list[str]:
    """A row for each contender; problems are numbered, and follow below."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    sweep = result.sweep
    cells_of: dict[str, Callable[[Contender], str]] = {}  # of the settings that differ between rows
    if len(sweep.batch_sizes) > 1:
        cells_of["batch"] = lambda contender: f"{contender.batch_size:,}"
    if len(sweep.start_methods) > 1:
        cells_of["start"] = lambda contender: contender.start_method or ""
    if len(sweep.sizes) > 1:
        cells_of["size"] = lambda contender: contender.size or ""
    table = Table(box=box.ASCII, show_edge=False, pad_edge=False)
    for name in ("loader", "cache"):
        table.add_column(name, no_wrap=True)
    for name in ("workers", *cells_of):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("first epoch\nsamples/s", "later epochs\nsamples/s", "spread", "to torch's\nbest"):
        table.add_column(name, justify="right")
    torch_rates = {one.size: one.torch.rate for one in verdicts(result.rows) if one.torch is not None}
    problems = _problems(result)
    for row in result.rows:
        contender = row.contender
        settings = [cell(contender) for cell in cells_of.values()]
        figures = (
            ["", "", "", f"[{problems.index(row.problem) + 1}]"]
            if row.problem
            else _figures(row, torch_rates)
        )
        cache = "" if contender.is_torch else contender.cache
        cells = [contender.loader, cache, str(contender.num_workers), *settings, *figures]
        table.add_row(*(cell.replace("[", "\\[") for cell in cells))
    text = io.StringIO()
    Console(file=text, width=_WIDE, color_system=None).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    return [*lines, *(f"[{number}] {problem}" for number, problem in enumerate(problems, start=1))]


def _problems(result: Result) -> list[str]:
    return list(dict.fromkeys(row.problem for row in result.rows if row.problem))


def _figures(row: Row, torch_rates: dict[str | None, float]) -> list[str]:
    if not row.later:
        return ["", "", "", "not run"]
    torch_rate = torch_rates.get(row.contender.size)
    return [
        f"{statistics.median(row.first):,.0f}",
        f"{row.rate:,.0f}",
        f"{min(row.later):,.0f} to {max(row.later):,.0f}",
        "" if torch_rate is None else f"{_times(row.rate / torch_rate)}x",
    ]


def _notes(result: Result) -> list[str]:
    lines = []
    for size, nbytes in result.sample_nbytes.items():
        of_size = f" of size {size}" if len(result.sample_nbytes) > 1 else ""
        whole = readable_size(nbytes * result.length)
        lines.append(f"a decoded sample{of_size} takes {readable_size(nbytes)}, the whole dataset {whole}")
    for size, took_s in result.build_s.items():
        of_size = f" of size {size}" if len(result.build_s) > 1 else ""
        lines.append(f"the LMDB cache{of_size} was built once, in {took_s:.1f} s, before the first round")
    return lines


# --- the ending ------------------------------------------------------------------------------------------


def ending_lines(result: Result, setup: Mapping[str | None, list[str]]) -> list[str]:
    """The code that was fastest on this machine, and the gain, for each size.

    Args:
        result: The result.
        setup: By size, the lines of Python that make the variables `dataset` and `transform`.
    """
    found = verdicts(result.rows)
    if not found:
        return ["no contender could be measured"]
    lines = []
    method, has_transform = multiprocessing.get_start_method(), result.transform is not None
    for verdict in found:
        of_size = f" at size {verdict.size}" if len(found) > 1 else ""
        code = verdict.fastest.contender.code(
            method, has_transform=has_transform, lmdb_path=_lmdb_path(result.source, verdict.size)
        )
        code = sorted(
            [*setup[verdict.size], *code], key=lambda line: not line.startswith(("import ", "from "))
        )
        lines += [f"fastest on this machine{of_size}:", *(f"    {line}" for line in code), _gain(verdict)]
    return lines


def _lmdb_path(source: str, size: str | None) -> str:
    """A name in the working directory for the cache of a folder, a URL or MODULE:NAME."""
    name = re.split(r"[:/]", source.rstrip("/"))[-1]
    return re.sub(r"[^\w.-]+", "-", name if size is None else f"{name}-{size}") + ".lmdb"


def _gain(verdict: Verdict) -> str:
    gain = verdict.gain
    if gain is None:
        missing = "torch's loader" if verdict.torch is None else "fastload's loader"
        return f"{missing} has no figures here, so there is no comparison"
    spread = f"{_times(gain.low)} to {_times(gain.high)} over {readable_rounds(gain.num_rounds)}"
    if verdict.fastest is verdict.torch:
        said = f"torch's own loader is the fastest here: fastload's best has {_times(gain.value)} of its rate"
    else:
        said = f"{_times(gain.value)} times torch's best here"
    said += f" (spread {spread})" if gain.num_rounds > 1 else ""
    return f"{said}, from the second epoch on{_doubt(gain)}"


def _times(ratio: float) -> str:
    """Three digits."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def _doubt(gain: Ratio) -> str:
    if not gain.is_within_spread:
        return ""
    if gain.num_rounds < 2:
        return ". One round shows no spread: use --rounds 3 before you rely on it"
    return ". The difference lies within the spread: the rounds disagree on which loader is faster"


# --- the baseline ----------------------------------------------------------------------------------------


def baseline_lines(comparison: Comparison, path: str) -> list[str]:
    """How this run compares with the baseline."""
    unit = "rate relative to torch's" if comparison.is_relative else "samples/s"
    lines = ["", f"compared with {path}, {unit}, tolerance {comparison.tolerance:.0%}:"]
    for change in comparison.changes:
        mark = "SLOWER" if change.is_slower else "ok"
        lines.append(
            f"  {mark:6}  {change.ratio:.2f} of the baseline  {change.contender}: "
            f"{change.before:,.0f} samples/s then, {change.now:,.0f} now"
        )
    lines += [f"  FAILED  measured in the baseline, but not in this run  {one}" for one in comparison.failed]
    lines += [f"  not in this run  {one}" for one in comparison.only_before]
    lines += [f"  not in the baseline  {one}" for one in comparison.only_now]
    if not comparison.changes:
        lines.append("  nothing could be compared: no contender has figures in both runs")
    elif comparison.torch_ratio is not None and not comparison.is_relative:
        lines.append(f"  torch's loader runs at {comparison.torch_ratio:.2f} of its rate in the baseline")
    return [*lines, _outcome(comparison)]


def _outcome(comparison: Comparison) -> str:
    if comparison.has_passed:
        return "no contender is slower than the baseline by more than the tolerance"
    if not comparison.changes:
        return "the check failed, because nothing could be compared"
    count = len(comparison.slower) + len(comparison.failed)
    outcome = f"{count} of the contenders of the baseline {'is' if count == 1 else 'are'} slower or failed"
    ratio = comparison.torch_ratio
    if (
        comparison.slower
        and not comparison.is_relative
        and ratio is not None
        and ratio < 1 - comparison.tolerance
    ):
        outcome += (
            ". torch's loader is slower, too: the machine or your dataset has become slower. --relative "
            "compares each rate with torch's in the same run"
        )
    return outcome
