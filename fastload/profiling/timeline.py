"""What the recordings say about one loader: waits, computing, and where its batches' time went.

Seconds throughout. "Steady" steps are those after the warm-up: neither the first batch of an epoch, which
waits for workers to start, nor the first few of all.
"""

from __future__ import annotations

import functools
import itertools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastload.profiling import probes
from fastload.profiling.hot_lines import LINE
from fastload.profiling.recording import OTHER, Recorded, Row, Sums, read_recording
from fastload.profiling.spans import OWN_CODE
from fastload.profiling.watching import NEW, REPLAYED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastload.profiling.watching import LoaderWatch, Step

NUM_WARM_UP = 10  # steps at most, and a tenth of the first epoch at most
_TAKEN = 0.2  # of the CPUs: less hardly changes a verdict
_SATURATED = 0.9  # from this share of busy CPUs on, waiting for a CPU explains time without one


@dataclass(frozen=True)
class Machine:
    """What the machine offered while the profile ran.

    Attributes:
        num_cpus: The CPUs that this process may use.
        busy_share: How busy the CPUs were that this process may run on; None if the system does not say.
        others_share: The share of them that processes outside the script used; None likewise.
    """

    num_cpus: float
    busy_share: float | None
    others_share: float | None = None

    @property
    def is_saturated(self) -> bool:
        """Whether threads had to wait for a CPU."""
        return self.busy_share is not None and self.busy_share >= _SATURATED

    @property
    def taken_share(self) -> float:
        """The share of the CPUs that other processes took from the script; 0 if there were CPUs for all."""
        share = self.others_share or 0.0
        return share if self.is_saturated and share >= _TAKEN else 0.0


@dataclass(frozen=True)
class Stage:
    """A part of the work on batches.

    Attributes:
        stage: One of the stages in `probes`.
        name: The function, class or transform.
        wall_s: Seconds per batch, without the stages that it calls.
        cpu_s: CPU seconds per batch.
        count: Calls per batch.
        nbytes: Bytes of an image that it returned, on average; 0 if unknown.
        num_pixels: Pixels of an image that it returned, on average; 0 if unknown.
    """

    stage: str
    name: str
    wall_s: float
    cpu_s: float
    count: float
    nbytes: float = 0
    num_pixels: float = 0

    @property
    def blocked_s(self) -> float:
        """Seconds per batch in which the thread did not compute."""
        return max(self.wall_s - self.cpu_s, 0.0)


@dataclass
class Timeline:
    """One loader's times.

    Attributes:
        watched: What was recorded in the consumer's process.
        machine: The machine.
        waits: Of the steady steps: how long the loop waited for the batch.
        wait_cpus: CPU seconds of the consumer's thread in these waits.
        computes: Of the same steps: how long the loop was busy with the batch.
        replayed: Of the steps with held batches: wait and computing together.
        starts: Of each epoch: from `iter()` to the first batch.
        total_s: Seconds in loops over the loader, without the very first wait, which happens once.
        rows: The batches that were made, by worker; -1: in the consumer's process.
        stages: Where the time of making a batch goes, largest first.
        lines: The user's lines in which workers were seen, with their share, most often first.
        outside: Stages outside of making a batch, in seconds per batch: sending, receiving, pinning, copying.
    """

    watched: LoaderWatch
    machine: Machine
    waits: list[float] = field(default_factory=list)
    wait_cpus: list[float] = field(default_factory=list)
    computes: list[float] = field(default_factory=list)
    replayed: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    total_s: float = 0.0
    rows: dict[int, list[Row]] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    lines: list[tuple[str, float]] = field(default_factory=list)
    outside: list[Stage] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        """The loader's settings."""
        return self.watched.facts

    @property
    def step_s(self) -> float:
        """The mean time of a steady step."""
        return mean(self.waits) + mean(self.computes)

    @property
    def wait_share(self) -> float:
        """The share of the steady steps' time that the loop waited."""
        waited_s, computed_s = sum(self.waits), sum(self.computes)
        return waited_s / (waited_s + computed_s) if waited_s + computed_s else 0.0

    @property
    def start_share(self) -> float:
        """The share of all time that the loop waited for first batches, after the first epoch's."""
        return min(sum(self.starts[1:]) / self.total_s, 1.0) if self.total_s > 0 else 0.0

    @property
    def data_share(self) -> float:
        """The share of all time that the loop waited for data: first batches and steady waits."""
        return self.start_share + (1 - self.start_share) * self.wait_share

    @property
    def make_s(self) -> float:
        """The mean time of making a batch, as seen by the worker that makes it."""
        return mean([seconds(row.end_ns - row.start_ns) for row in self.all_rows])

    @property
    def make_cpu_s(self) -> float:
        """The mean CPU time of making a batch."""
        return mean([seconds(row.cpu_ns) for row in self.all_rows])

    @functools.cached_property
    def all_rows(self) -> list[Row]:
        """The batches of all workers after the warm-up, by the time they were begun."""
        rows = sorted((row for rows in self.rows.values() for row in rows), key=lambda row: row.start_ns)
        warm = [row for rows in self.rows.values() for row in rows[1:]]  # a worker's first batch warms it up
        return sorted(warm, key=lambda row: row.start_ns) or rows

    @functools.cached_property
    def consumer_cpu_s(self) -> float:
        """CPU time of the consumer's process per step; without workers, making batches is part of it."""
        steps = [step for step in self.watched.steps if step.kind == NEW]
        spans = [
            after.process_cpu_ns - before.process_cpu_ns
            for before, after in itertools.pairwise(steps)
            if before.epoch == after.epoch
        ]
        return mean([seconds(span) for span in spans])

    def stage_s(self, *stages: str) -> float:
        """Seconds per batch in these stages."""
        return sum(stage.wall_s for stage in self.stages if stage.stage in stages)

    def stage_cpu_s(self, *stages: str) -> float:
        """CPU seconds per batch in these stages."""
        return sum(stage.cpu_s for stage in self.stages if stage.stage in stages)

    @property
    def samples_per_batch(self) -> float:
        """The mean number of samples of a batch; 1 if it is not known."""
        return mean([float(row.num_samples) for row in self.all_rows]) or 1.0

    @property
    def receiving_s(self) -> float:
        """Seconds per batch in which the consumer's thread receives a batch, instead of waiting for it."""
        if not self.facts["num_workers"]:
            return 0.0
        if self.facts["is_fastload"] or self.facts["pin_memory"]:  # other threads unpickle, or none
            return mean(self.wait_cpus)
        return sum(part.wall_s for part in self.outside if part.stage == probes.RECEIVE)

    @property
    def utilisation(self) -> float | None:
        """The share of their time that workers made batches; None without workers."""
        if not self.facts["num_workers"] or not self.all_rows:
            return None
        busy_ns = sum(row.end_ns - row.start_ns for row in self.all_rows)
        idle_ns = sum(max(row.waited_ns, 0) for row in self.all_rows)
        return busy_ns / (busy_ns + idle_ns) if busy_ns else 0.0


def mean(values: list[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def median(values: list[float]) -> float:
    """The median; 0 of nothing."""
    ordered, middle = sorted(values), len(values) // 2
    if not ordered:
        return 0.0
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def seconds(ns: float) -> float:
    """Nanoseconds in seconds."""
    return ns / 1e9


def read_recordings(directory: str) -> list[Recorded]:
    """All recordings in a directory."""
    names = [name for name in os.listdir(directory) if name.endswith(".rec")]
    found = [read_recording(os.path.join(directory, name)) for name in names]
    return [recorded for recorded in found if recorded is not None]


def timeline_of(watched: LoaderWatch, recordings: Iterable[Recorded], machine: Machine) -> Timeline:
    """Put together what was recorded of one loader.

    Args:
        watched: The recording of the consumer's process.
        recordings: Of all processes; those of other loaders are left out.
        machine: The machine.
    """
    timeline = Timeline(watched, machine)
    _add_steps(timeline)
    mine = [recorded for recorded in recordings if recorded.loader == watched.number]
    general = [recorded for recorded in recordings if recorded.loader < 0]
    for recorded in mine:
        if recorded.rows:
            timeline.rows.setdefault(recorded.worker, []).extend(recorded.rows)
    for rows in timeline.rows.values():
        rows.sort(key=lambda row: row.start_ns)
    _add_stages(timeline, mine, general)
    return timeline


def _add_steps(timeline: Timeline) -> None:
    steps, epochs = timeline.watched.steps, timeline.watched.epochs
    first_epoch = sum(step.epoch == 0 for step in steps)
    num_warm_up = min(NUM_WARM_UP, first_epoch // 10)
    by_epoch: dict[int, list[Step]] = {}
    for step in steps:
        by_epoch.setdefault(step.epoch, []).append(step)
    for number, own in sorted(by_epoch.items()):
        epoch = epochs[number]
        timeline.starts.append(seconds(own[0].end_ns - epoch.start_ns))
        first_ns = epoch.start_ns if len(timeline.starts) > 1 else own[0].end_ns
        timeline.total_s += seconds((epoch.asked_ns or own[-1].end_ns) - first_ns)
        asked_ns = [*(step.start_ns for step in own[1:]), epoch.asked_ns]
        skipped = 1 + (num_warm_up if number == 0 else 0)
        for step, next_ns in list(zip(own, asked_ns, strict=True))[skipped:]:
            if not next_ns:
                continue  # the loop was left in this step
            wait_s, compute_s = seconds(step.end_ns - step.start_ns), seconds(next_ns - step.end_ns)
            if step.kind == NEW:
                timeline.waits.append(wait_s)
                timeline.wait_cpus.append(seconds(step.cpu_ns))
                timeline.computes.append(compute_s)
            elif step.kind == REPLAYED:
                timeline.replayed.append(wait_s + compute_s)


def _add_stages(timeline: Timeline, mine: list[Recorded], general: list[Recorded]) -> None:
    num_batches = sum(recorded.num_batches for recorded in mine)
    sums: dict[tuple[str, str], Sums] = {}
    for recorded in mine:
        for key, value in recorded.sums.items():
            sums[key] = sums.get(key, Sums()).plus(value)
    num_detailed = sums.get(OWN_CODE, Sums()).calls  # also of batches whose rows were overwritten
    num_looks = sum(value.calls for (stage, _), value in sums.items() if stage == LINE)
    outside = (probes.SEND, probes.RECEIVE, probes.PIN, probes.COPY)
    for (stage, name), value in sums.items():
        if stage == LINE:
            timeline.lines.append((name, value.calls / num_looks))
        elif stage in outside:
            num_done = num_batches if stage == probes.SEND else timeline.watched.num_steps
            timeline.outside.append(_stage(stage, name, value, num_done))
        elif num_detailed:
            timeline.stages += _split(_stage(stage, name, value, num_detailed), timeline.machine)
    pins = timeline.facts["pin_memory"] or timeline.facts["device"] is not None
    for recorded in general:  # one call for each batch of any loader
        for (stage, name), value in recorded.sums.items():
            if pins or stage == probes.COPY:
                timeline.outside.append(_stage(stage, name, value, value.calls))
    timeline.lines = [line for line in timeline.lines if line[0] != OTHER]
    timeline.lines.sort(key=lambda line: -line[1])
    timeline.stages.sort(key=lambda stage: -stage.wall_s)
    timeline.outside.sort(key=lambda stage: -stage.wall_s)


def _stage(stage: str, name: str, sums: Sums, num_batches: int) -> Stage:
    per_batch, count = max(num_batches, 1), max(sums.calls, 1)
    return Stage(
        stage,
        name,
        seconds(sums.wall_ns) / per_batch,
        seconds(sums.cpu_ns) / per_batch,
        sums.calls / per_batch,
        sums.nbytes / count,
        sums.num_pixels / count,
    )


def _split(stage: Stage, machine: Machine) -> list[Stage]:
    """A function that reads and decodes as two stages: the time in which it did not compute is reading."""
    reads_too = stage.name.rpartition(".")[2] in probes.READING_DECODERS and stage.name != "ImageFile.load"
    if (
        stage.stage != probes.DECODE
        or not reads_too
        or machine.is_saturated
        or stage.blocked_s < 0.1 * stage.wall_s
    ):
        return [stage]
    read = Stage(probes.READ, stage.name, stage.blocked_s, 0.0, stage.count)
    decode = Stage(
        probes.DECODE, stage.name, stage.cpu_s, stage.cpu_s, stage.count, stage.nbytes, stage.num_pixels
    )
    return [read, decode]
