"""Draws the result of a benchmark as a PNG picture, with matplotlib, an optional dependency."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastload.bench.result import Result

_COLOURS = {"none": "#2f6fb3", "ram": "#2e8b57", "lmdb": "#8a6fb3"}
_TORCH_COLOUR = "#9aa5b1"
_ROW_INCHES = 0.32


def draw(result: Result, path: str) -> None:
    """Write a PNG: a bar for each contender with its spread, or its problem.

    Raises:
        OSError: The file cannot be written.
    """
    import matplotlib as mpl

    with mpl.rc_context({"text.parse_math": False}):
        _draw(result, path)


def _draw(result: Result, path: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, and pyplot keeps no figure
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.8 + _ROW_INCHES * len(result.rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, row in enumerate(result.rows):
        text, end = f" {row.problem:.90}", 0.0
        if row.is_measured:
            contender = row.contender
            colour = _TORCH_COLOUR if contender.is_torch else _COLOURS[contender.cache]
            spread = [[row.rate - min(row.later)], [max(row.later) - row.rate]]
            axes.barh(place, row.rate, color=colour, xerr=spread, capsize=2)
            text, end = f" {row.rate:,.0f}", max(row.later)
        axes.text(end, place, text, va="center", fontsize="small")
    axes.set_yticks(range(len(result.rows)), [str(row.contender) for row in result.rows], fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("samples/s in later epochs; higher is better")
    axes.set_title(f"{result.source}: {result.num_samples:,} of {result.length:,} samples", fontsize="medium")
    machine = f"{result.machine['cpu']}, {result.machine['cores']} cores, torch {result.machine['torch']}"
    note = (
        f"Medians of {result.rounds} rounds; the thin lines span all of them. Nothing is trained.\n{machine}"
    )
    figure.supxlabel("\n".join([note, *result.warnings]), fontsize="x-small", color="#555555", wrap=True)
    figure.savefig(path, dpi=150, format="png")
