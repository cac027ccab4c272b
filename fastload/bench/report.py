"""The result of a benchmark as text: the rates, and the fastest loader's code."""

from __future__ import annotations

import io
import multiprocessing
import re
import statistics
from typing import TYPE_CHECKING

from fastload.bench.result import verdicts
from fastload.system.humanize import readable_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastload.bench.result import Result, Verdict

_WIDE = 1000  # columns: a table is never wrapped, because a file or a pipe has no width
_VARIED = {"batch_size": "batch", "start_method": "start", "size": "size"}  # columns if rows differ in them


def report_lines(result: Result, setup: Mapping[str | None, list[str]]) -> list[str]:
    """The whole readable output; see `ending_lines`."""
    notes = []
    for size, nbytes in result.sample_nbytes.items():
        whole = readable_size(nbytes * result.length)
        notes.append(f"a decoded sample {size} takes {readable_size(nbytes)}, the whole dataset {whole}")
    for size, build_s in result.build_s.items():
        notes.append(f"the LMDB cache {size} was built once, in {build_s:.1f} s, before the first round")
    return [
        *_heading(result),
        "",
        *table_lines(result),
        *(note.replace("  ", " ") for note in notes),
        *(f"warning: {text}" for text in result.warnings),
        "",
        *ending_lines(result, setup),
    ]


def _heading(result: Result) -> list[str]:
    shared = [f"{result.num_samples:,} of {result.length:,} samples"]
    for name, text in (("batch_size", "batches of {}"), ("start_method", "workers by {}"), ("size", "{}")):
        values = result.settings(name)
        if len(values) == 1:
            shared.append(text.format(values[0]))
    if result.transform is not None:
        shared.append(f"transform {result.transform}")
    machine = result.machine
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "fastload"))
    return [
        f"{result.source}: {', '.join(shared)}; medians of {result.rounds} rounds",
        f"{machine['cpu']}, {machine['cores']} cores, {versions}; nothing is trained",
    ]


def table_lines(result: Result) -> list[str]:
    """A row for each configuration; problems are numbered, and follow below."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    varied = [name for name in _VARIED if len(result.settings(name)) > 1]
    table = Table(box=box.ASCII, show_edge=False, pad_edge=False)
    for column in ("loader", "cache"):
        table.add_column(column, no_wrap=True)
    for column in ("workers", *(_VARIED[name] for name in varied)):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("first epoch\nsamples/s", "later epochs\nsamples/s", "spread", "to torch's\nbest"):
        table.add_column(column, justify="right")
    torch_rates = {each.size: each.torch.rate for each in verdicts(result.rows) if each.torch is not None}
    problems = list(dict.fromkeys(row.problem for row in result.rows if row.problem))
    for row in result.rows:
        configuration = row.configuration
        settings = [getattr(configuration, name) for name in varied]
        figures = ["", "", "", "not run"]
        if row.problem:
            figures = ["", "", "", f"[{problems.index(row.problem) + 1}]"]
        elif row.later:
            torch_rate = torch_rates.get(configuration.size)
            figures = [
                f"{statistics.median(row.first):,.0f}",
                f"{row.rate:,.0f}",
                f"{min(row.later):,.0f} to {max(row.later):,.0f}",
                "" if torch_rate is None else f"{_times(row.rate / torch_rate)}x",
            ]
        cache = "" if configuration.is_torch else configuration.cache
        cells = [configuration.loader, cache, configuration.num_workers, *settings, *figures]
        table.add_row(*("" if cell is None else str(cell).replace("[", "\\[") for cell in cells))
    text = io.StringIO()
    Console(file=text, width=_WIDE, color_system=None).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    return [*lines, *(f"[{number}] {problem}" for number, problem in enumerate(problems, start=1))]


def _times(ratio: float) -> str:
    """Three digits."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


# --- the ending ------------------------------------------------------------------------------------------


def ending_lines(result: Result, setup: Mapping[str | None, list[str]]) -> list[str]:
    """The code that was fastest on this machine, and the gain, for each size.

    Args:
        result: The result.
        setup: By size, the lines of Python that make the variables `dataset` and `transform`.
    """
    by_size = verdicts(result.rows)
    if not by_size:
        return ["no configuration could be measured"]
    lines = []
    for verdict in by_size:
        # A name in the working directory for the cache of a folder, a URL or MODULE:NAME.
        words = [re.split(r"[:/]", result.source.rstrip("/"))[-1], verdict.size]
        path = re.sub(r"[^\w.-]+", "-", "-".join(filter(None, words))) + ".lmdb"
        code = verdict.fastest.configuration.code(
            multiprocessing.get_start_method(), has_transform=result.transform is not None, lmdb_path=path
        )
        code = [*setup[verdict.size], *code]
        code.sort(key=lambda line: not line.startswith(("import ", "from ")))
        of_size = f" at size {verdict.size}" if len(by_size) > 1 else ""
        lines += [f"fastest on this machine{of_size}:", *(f"    {line}" for line in code), _gain(verdict)]
    return lines


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
