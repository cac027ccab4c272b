"""The times of one loader, from the recordings: waits, computing, and where its batches' time went.

Seconds throughout. "Steady" steps are those after the warm-up: neither the first batch of an epoch, which
waits for workers to start, nor the first few of all.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastload.profiling import probes
from fastload.profiling.line_sampler import LINE
from fastload.profiling.spans import OWN_CODE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fastload.profiling.recorder import LoaderRecord, Step
    from fastload.profiling.recording import Batch, Event

NUM_WARM_UP = 10  # steps at most, and a tenth of the first epoch at most
_SATURATED = 0.9  # above this share of busy CPUs, waiting for a CPU explains time without one


@dataclass(frozen=True)
class Machine:
    """What the machine offered while the profile ran.

    Attributes:
        num_cpus: The CPUs that this process can use.
        busy_share: How busy these CPUs were; None if unknown.
        others_share: Their share used by processes outside the script; None if unknown.
    """

    num_cpus: float
    busy_share: float | None
    others_share: float | None = None

    @property
    def is_saturated(self) -> bool:
        """Whether threads had to wait for a CPU."""
        return (self.busy_share or 0.0) >= _SATURATED


@dataclass(frozen=True)
class Stage:
    """A part of the work on batches.

    Attributes:
        stage: One of the stages in `probes`.
        name: The function, class or transform.
        wall_s: Seconds per batch, without the stages that it calls.
        cpu_s: CPU seconds per batch.
        nbytes: Bytes of an image that it returned, on average; 0 if unknown.
        num_pixels: Pixels of an image that it returned, or a resize got, on average; 0 if unknown.
        num_calls: Calls per batch.
    """

    stage: str
    name: str
    wall_s: float
    cpu_s: float
    nbytes: float = 0
    num_pixels: float = 0
    num_calls: float = 0

    @property
    def blocked_s(self) -> float:
        """Seconds per batch in which the thread did not compute."""
        return max(self.wall_s - self.cpu_s, 0.0)


@dataclass
class Timeline:
    """One loader's times.

    Attributes:
        record: What was recorded in the consumer's process.
        machine: What the machine offered.
        waits: Of the steady steps: how long the loop waited for the batch.
        wait_cpus: CPU seconds of the consumer's thread in these waits.
        computes: Of the same steps: how long the loop was busy with the batch.
        starts: Of each epoch: from `iter()` to the first batch.
        total_s: Seconds in loops over the loader, without the very first wait, which happens once.
        batches: The finished batches, by worker; -1: in the consumer's process.
        stages: Where the time of making a batch goes, largest first.
        lines: The user's lines that workers ran, with their shares of the stack samples, largest first.
        outside: Sending, receiving, pinning and copying, outside of making a batch, in seconds per batch; the
            largest first.
    """

    record: LoaderRecord
    machine: Machine
    waits: list[float] = field(default_factory=list)
    wait_cpus: list[float] = field(default_factory=list)
    computes: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    total_s: float = 0.0
    batches: dict[int, list[Batch]] = field(default_factory=lambda: defaultdict(list))
    stages: list[Stage] = field(default_factory=list)
    lines: list[tuple[str, float]] = field(default_factory=list)
    outside: dict[str, float] = field(default_factory=dict)

    @property
    def info(self) -> dict[str, Any]:
        """The loader's settings, and what is known of its batches."""
        return self.record.info

    @property
    def step_s(self) -> float:
        """The mean time of a steady step."""
        return mean(self.waits) + mean(self.computes)

    @property
    def start_share(self) -> float:
        """The share of all time that the loop waited for first batches, after the first epoch's."""
        return min(sum(self.starts[1:]) / self.total_s, 1.0) if self.total_s > 0 else 0.0

    @property
    def data_share(self) -> float:
        """The share of all time that the loop waited for data: first batches and steady waits."""
        wait_share = mean(self.waits) / self.step_s if self.step_s else 0.0
        return self.start_share + (1 - self.start_share) * wait_share

    @functools.cached_property
    def warm(self) -> list[Batch]:
        """The batches of all workers except the first of each, which warms it up."""
        by_worker = self.batches.values()
        warm = [batch for batches in by_worker for batch in batches[1:]]
        return warm or [batch for batches in by_worker for batch in batches]

    @property
    def make_s(self) -> float:
        """The mean time of making a batch, as seen by the worker that makes it."""
        return mean([batch.make_s for batch in self.warm])

    @property
    def make_cpu_s(self) -> float:
        """The mean CPU time of making a batch."""
        return mean([seconds(batch.cpu_ns) for batch in self.warm])

    @property
    def consumer_cpu_s(self) -> float:
        """CPU time of the consumer's process per step; without workers, making batches is part of it."""
        pairs = itertools.pairwise(self.record.steps)
        return mean([seconds(b.process_cpu_ns - a.process_cpu_ns) for a, b in pairs if a.epoch == b.epoch])

    def parts(self, *stages: str) -> list[Stage]:
        """What belongs to these stages of making a batch, the largest first."""
        return [part for part in self.stages if part.stage in stages]

    def stage_s(self, stage: str) -> float:
        """Seconds per batch in a stage, of making a batch or outside of it."""
        return sum(part.wall_s for part in self.parts(stage)) + self.outside.get(stage, 0.0)

    @property
    def receiving_s(self) -> float:
        """Seconds per batch in which the consumer's thread receives a batch, instead of waiting for it."""
        if not self.info["num_workers"]:
            return 0.0
        if self.info["is_fastload"] or self.info["pin_memory"]:  # other threads unpickle, or none
            return mean(self.wait_cpus)
        return self.stage_s(probes.RECEIVE)

    @property
    def utilization(self) -> float | None:
        """The share of their time that workers made batches; None without workers."""
        if not self.info["num_workers"] or not self.warm:
            return None
        idle_s = mean([seconds(batch.waited_ns) for batch in self.warm])
        return self.make_s / (self.make_s + idle_s) if self.make_s else 0.0


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def median(values: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return statistics.median(values) if values else 0.0


def seconds(ns: float) -> float:
    """Nanoseconds in seconds."""
    return ns / 1e9


def timeline_of(
    record: LoaderRecord, batches: Sequence[Batch], events: Sequence[Event], machine: Machine
) -> Timeline:
    """Put together what was recorded of one loader.

    Args:
        record: What was recorded in the consumer's process.
        batches: Of all loaders, by their time.
        events: Of all loaders.
        machine: What the machine offered.
    """
    timeline = Timeline(record, machine)
    for batch in batches:
        if batch.loader == record.number:
            timeline.batches[batch.worker].append(batch)
    _add_steps(timeline)
    _add_stages(timeline)
    _add_events(timeline, events)
    return timeline


def _add_steps(timeline: Timeline) -> None:
    by_epoch: dict[int, list[Step]] = defaultdict(list)
    for step in timeline.record.steps:
        by_epoch[step.epoch].append(step)
    num_warm_up = min(NUM_WARM_UP, len(by_epoch[0]) // 10)
    for number, steps in sorted(by_epoch.items()):
        if not steps:
            continue
        epoch, first_ns = timeline.record.epochs[number], steps[0].end_ns
        nexts_ns = [*(step.start_ns for step in steps[1:]), epoch.end_ns]  # 0: the loop asked for no more
        last_ns = nexts_ns[-1] or steps[-1].end_ns
        timeline.total_s += seconds(last_ns - (epoch.start_ns if timeline.starts else first_ns))
        timeline.starts.append(seconds(first_ns - epoch.start_ns))
        for step, next_ns in list(zip(steps, nexts_ns, strict=True))[1 if number else 1 + num_warm_up :]:
            if not next_ns:
                continue  # the loop was left in this step
            wait_s, compute_s = seconds(step.end_ns - step.start_ns), seconds(next_ns - step.end_ns)
            timeline.waits.append(wait_s)
            timeline.wait_cpus.append(seconds(step.cpu_ns))
            timeline.computes.append(compute_s)


def _add_stages(timeline: Timeline) -> None:
    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for batches in timeline.batches.values():
        for batch in batches:
            for stage, name, sums in batch.stages:
                total = totals[stage, name]
                total[:] = map(int.__add__, total, sums)
    num_detailed = totals[OWN_CODE][0] if totals else 0
    for (stage, name), sums in totals.items():
        calls, wall_ns, cpu_ns, nbytes, num_pixels = sums
        times = seconds(wall_ns) / num_detailed, seconds(cpu_ns) / num_detailed
        sizes = nbytes / max(calls, 1), num_pixels / max(calls, 1)
        timeline.stages += _split(Stage(stage, name, *times, *sizes, calls / num_detailed), timeline.machine)
    timeline.stages.sort(key=lambda stage: -stage.wall_s)


def _add_events(timeline: Timeline, events: Iterable[Event]) -> None:
    info = timeline.info
    num_samples: dict[str, int] = defaultdict(int)  # stack samples, by line
    times_ns: dict[str, list[int]] = defaultdict(list)
    pins = info["pin_memory"] or info["device"] is not None
    for event in events:
        is_mine = event.loader == timeline.record.number
        # In which direction a queue is used: workers send batches, and the consumer receives them.
        is_of_batch = (event.stage != probes.SEND) == (event.worker < 0)
        if event.stage == LINE:
            if is_mine:
                num_samples[event.line] += 1
        elif is_of_batch and (is_mine or (event.loader < 0 and (pins or event.stage == probes.COPY))):
            times_ns[event.stage].append(event.wall_ns)
    means = {stage: seconds(mean(times)) for stage, times in times_ns.items()}
    timeline.outside = dict(sorted(means.items(), key=lambda each: -each[1]))
    total = sum(num_samples.values())
    timeline.lines = [(line, number / total) for line, number in num_samples.items()]
    timeline.lines.sort(key=lambda line: -line[1])


def _split(stage: Stage, machine: Machine) -> list[Stage]:
    """Split a function that reads and decodes into two stages: time without computing is reading."""
    reads_too = stage.name.rpartition(".")[2] in probes.READING_DECODERS
    is_pure = stage.stage != probes.DECODE or not reads_too or machine.is_saturated
    if is_pure or stage.blocked_s < 0.1 * stage.wall_s:
        return [stage]
    return [
        Stage(probes.READ, stage.name, stage.blocked_s, 0.0),
        replace(stage, wall_s=stage.cpu_s),
    ]
