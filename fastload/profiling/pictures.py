"""A profile as a picture (PNG) and as a trace that Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from fastload.profiling.timeline import seconds
from fastload.profiling.watching import REPLAYED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastload.profiling.timeline import Timeline
    from fastload.profiling.watching import Step

_NUM_STEPS = 300  # drawn at most
_WAITING, _COMPUTING, _MAKING, _HELD = "#d62728", "#2ca02c", "#1f77b4", "#9467bd"


def draw(timelines: Sequence[Timeline], path: str) -> None:
    """Draw the loop's waits and computing, and the workers' batches, of the last few hundred steps.

    Args:
        timelines: One row of pictures each; loaders without a batch are left out.
        path: The PNG file.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'a picture needs matplotlib: pip install matplotlib, or the extra "plot" of fastload-torch'
        ) from error
    shown = [timeline for timeline in timelines if timeline.watched.steps]
    figure = Figure(figsize=(14, max(1.2 + 2.4 * len(shown), 2.5)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(len(shown), 1), 1, squeeze=False)[:, 0]
    for axis, timeline in zip(axes, shown, strict=False):
        _draw_one(axis, timeline)
    figure.savefig(path, format="png", dpi=110)


def _draw_one(axis: Any, timeline: Timeline) -> None:
    steps = list(timeline.watched.steps)[-_NUM_STEPS:]
    origin_ns, last_ns = steps[0].start_ns, steps[-1].end_ns
    names = ["training loop"]
    waits: list[tuple[float, float]] = []
    held: list[tuple[float, float]] = []
    computes: list[tuple[float, float]] = []
    for step, next_ns in zip(steps, _next_ns(timeline, steps), strict=True):
        kind = held if step.kind == REPLAYED else waits
        kind.append(_bar(step.start_ns, step.end_ns, origin_ns))
        if next_ns:
            computes.append(_bar(step.end_ns, next_ns, origin_ns))
    axis.broken_barh(computes, (-0.4, 0.8), color=_COMPUTING, label="computing")
    axis.broken_barh(waits, (-0.4, 0.8), color=_WAITING, label="waiting for data")
    if held:
        axis.broken_barh(held, (-0.4, 0.8), color=_HELD, label="held batch")
    for place, (worker, rows) in enumerate(sorted(timeline.rows.items()), start=1):
        bars = [
            _bar(row.start_ns, row.end_ns, origin_ns)
            for row in rows
            if row.end_ns > origin_ns and row.start_ns < last_ns
        ]
        label = "making a batch" if place == 1 else None
        axis.broken_barh(
            bars, (place - 0.4, 0.8), color=_MAKING, edgecolor="white", linewidth=0.4, label=label
        )
        names.append(f"worker {worker}" if worker >= 0 else "this process")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlim(0, max(seconds(last_ns - origin_ns), 1e-6))
    axis.set_xlabel("seconds")
    facts = timeline.facts
    axis.set_title(
        f"{facts['name']}: the last {len(steps)} of {timeline.watched.num_steps} steps; "
        f"waits for data {timeline.data_share:.0%} of the time",
        loc="left",
    )
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _bar(start_ns: int, end_ns: int, origin_ns: int) -> tuple[float, float]:
    return seconds(start_ns - origin_ns), seconds(end_ns - start_ns)


def _next_ns(timeline: Timeline, steps: list[Step]) -> list[int]:
    """For each step, when the loop asked for the next batch; 0 if it did not, or is not known."""
    found = []
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if after is not None and after.epoch == step.epoch:
            found.append(after.start_ns)
        else:
            found.append(timeline.watched.epochs[step.epoch].asked_ns)
    return found


def write_trace(timelines: Sequence[Timeline], path: str) -> None:
    """Write every recorded batch as a Chrome trace: one process per loader, one line per worker.

    Args:
        timelines: The loaders.
        path: The JSON file.

    Raises:
        OSError: The file cannot be written.
    """
    events: list[dict[str, Any]] = []
    for timeline in timelines:
        events += _events_of(timeline)
    scratch = f"{path}.{os.getpid()}.tmp"
    with open(scratch, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
    os.replace(scratch, path)


def _events_of(timeline: Timeline) -> list[dict[str, Any]]:
    number, facts = timeline.watched.number, timeline.facts
    events = [
        _named("process_name", number, 0, facts["name"]),
        _named("thread_name", number, 0, "training loop"),
    ]
    events += [
        _event("start of an epoch", number, 0, epoch.start_ns, epoch.ready_ns)
        for epoch in timeline.watched.epochs
    ]
    steps = list(timeline.watched.steps)
    for count, (step, next_ns) in enumerate(zip(steps, _next_ns(timeline, steps), strict=True)):
        name = "held batch" if step.kind == REPLAYED else "waiting for data"
        events.append(_event(name, number, 0, step.start_ns, step.end_ns, batch=count, epoch=step.epoch))
        if next_ns:
            events.append(_event("computing", number, 0, step.end_ns, next_ns, batch=count))
    for worker, rows in sorted(timeline.rows.items()):
        line = worker + 2  # 1 is this process
        label = f"worker {worker}" if worker >= 0 else "batches made in this process"
        events.append(_named("thread_name", number, line, label))
        for row in rows:
            details = {"samples": row.num_samples, "cpu_ms": row.cpu_ns / 1e6}
            events.append(_event("making a batch", number, line, row.start_ns, row.end_ns, **details))
    return events


def _event(
    name: str, process: int, thread: int, start_ns: int, end_ns: int, **details: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": start_ns / 1e3,
        "dur": max(end_ns - start_ns, 0) / 1e3,
        "args": details,
    }


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
