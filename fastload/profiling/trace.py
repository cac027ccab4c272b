"""A profile as a trace that Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fastload.profiling.watching import REPLAYED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fastload.profiling.timeline import Timeline


def write_trace(timelines: Sequence[Timeline], path: str) -> None:
    """Write every recorded batch as a Chrome trace: one process per loader, one line per worker.

    Args:
        timelines: The loaders.
        path: The JSON file.

    Raises:
        OSError: The file cannot be written.
    """
    events = [
        {"pid": timeline.watched.number, "args": {}, **event}
        for timeline in timelines
        for event in _events_of(timeline)
    ]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _events_of(timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _named("process_name", 0, timeline.facts["name"])
    yield _named("thread_name", 0, "training loop")
    for epoch in timeline.watched.epochs:
        yield _event("start of an epoch", 0, epoch.start_ns, epoch.ready_ns)
    for step, next_ns in timeline.steps():
        name = "held batch" if step.kind == REPLAYED else "waiting for data"
        yield _event(name, 0, step.start_ns, step.end_ns)
        if next_ns:
            yield _event("computing", 0, step.end_ns, next_ns)
    for worker, batches in timeline.batches.items():
        line = worker + 2  # 1 is this process
        yield _named(
            "thread_name", line, f"worker {worker}" if worker >= 0 else "batches made in this process"
        )
        for batch in batches:
            yield _event("making a batch", line, batch.start_ns, batch.end_ns)


def _event(name: str, thread: int, start_ns: int, end_ns: int) -> dict[str, Any]:
    return {"name": name, "ph": "X", "tid": thread, "ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "tid": thread, "args": {"name": name}}
