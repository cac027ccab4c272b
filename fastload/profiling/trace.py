"""A profile as a trace that Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from fastload.profiling.watching import REPLAYED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastload.profiling.timeline import Timeline
    from fastload.profiling.watching import Step


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


def _next_ns(timeline: Timeline, steps: list[Step]) -> list[int]:
    """For each step, when the loop asked for the next batch; 0 if it did not, or is not known."""
    found = []
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if after is not None and after.epoch == step.epoch:
            found.append(after.start_ns)
        else:
            found.append(timeline.watched.epochs[step.epoch].asked_ns)
    return found


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
