"""Draws the result of a benchmark as a PNG picture, with matplotlib, which is an optional dependency."""

from __future__ import annotations

import statistics
import warnings
from typing import TYPE_CHECKING

from fastload.bench.result import readable_rounds

if TYPE_CHECKING:
    from fastload.bench.result import Result, Row

_COLOURS = {"none": "#2f6fb3", "ram": "#2e8b57", "lmdb": "#8a6fb3"}
_TORCH_COLOUR = "#9aa5b1"
_ROW_INCHES = 0.32


def draw(result: Result, path: str) -> None:
    """Write a PNG: a bar for each contender, its spread, and a mark for the first epoch.

    Raises:
        OSError: The file cannot be written.
    """
    import matplotlib as mpl

    with mpl.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about characters of a path that the font lacks
        _draw(result, path)


def _draw(result: Result, path: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, and pyplot keeps no figure
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = result.rows
    figure = Figure(figsize=(10, 2.2 + _ROW_INCHES * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    highest = max((max(row.later) for row in rows if row.later), default=1.0)
    for place, row in enumerate(rows):
        if not row.is_measured:
            axes.text(
                0.01 * highest, place, _shortened(row.problem), va="center", color="#a33", fontsize="small"
            )
            continue
        low, high = min(row.later), max(row.later)
        axes.barh(
            place,
            row.rate,
            color=_colour(row),
            xerr=[[row.rate - low], [high - row.rate]],
            capsize=2,
            height=0.75,
            error_kw={"linewidth": 1},
        )
        axes.plot(statistics.median(row.first), place, marker="|", color="black", markersize=9)
        axes.text(high + 0.01 * highest, place, f"{row.rate:,.0f}", va="center", fontsize="small")
    axes.set_yticks(range(len(rows)), [_label(row, result) for row in rows], fontsize="small")
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlim(0, 1.12 * highest)
    axes.set_xlabel("samples/s in later epochs; higher is better")
    axes.spines[["top", "right"]].set_visible(False)
    kinds = {row.contender.kind: _colour(row) for row in rows}
    handles = [Patch(color=colour, label=kind) for kind, colour in kinds.items()]
    figure.legend(handles=handles, frameon=False, ncols=len(handles), loc="outside upper center")
    axes.set_title(f"{result.source}: {result.num_samples:,} of {result.length:,} samples", fontsize="medium")
    note = (
        f"Medians of {readable_rounds(result.rounds)}; the thin lines span all of them, a tick marks the "
        f"first epoch. Nothing is trained.\n{result.machine}, torch {result.machine.torch}"
    )
    figure.supxlabel("\n".join([note, *result.warnings]), fontsize="x-small", color="#555555", wrap=True)
    figure.savefig(path, dpi=150, format="png")


def _colour(row: Row) -> str:
    return _TORCH_COLOUR if row.contender.is_torch else _COLOURS[row.contender.cache]


def _label(row: Row, result: Result) -> str:
    """The contender, without the settings that all contenders share."""
    contender, sweep = row.contender, result.sweep
    parts = [contender.kind, contender.workers]
    if len(sweep.batch_sizes) > 1:
        parts.append(f"batch {contender.batch_size}")
    if len(sweep.start_methods) > 1 and contender.start_method:
        parts.append(contender.start_method)
    if contender.size is not None and len(sweep.sizes) > 1:
        parts.append(contender.size)
    return ", ".join(parts)


def _shortened(text: str, most: int = 90) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
