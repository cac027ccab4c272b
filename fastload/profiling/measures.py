"""What was measured of one loader: the numbers behind the table, the verdict and the advice.

Seconds throughout. "Steady" steps are those after the warm-up: neither the first batch of an epoch, which
waits for workers to start, nor the first few of all.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.profiling.stages import CACHE, COPY, IDLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastload.profiling.loader_info import LoaderRecord
    from fastload.profiling.sampler import Sums

NUM_WARM_UP = 10  # steps at most, and a tenth of the first epoch at most
_NS = 1e-9
_BUSY = 0.9


@dataclass(frozen=True)
class Machine:
    """What the machine offered while the profile ran.

    Attributes:
        num_cpus: The CPUs that this process can use.
        busy_share: How busy these CPUs were; None if unknown.
        others_share: Their share used by processes outside the script; None if unknown.
    """

    num_cpus: float
    busy_share: float | None = None
    others_share: float | None = None

    @property
    def free_cpus(self) -> float:
        """The CPUs that other programs leave to the script: a tenth of one at least."""
        return max(self.num_cpus * (1 - (self.others_share or 0.0)), 0.1)

    @property
    def is_busy(self) -> bool:
        """Whether threads had to wait for a CPU, so that time without one says nothing."""
        return (self.busy_share or 0.0) >= _BUSY


@dataclass(frozen=True)
class Stage:
    """A part of making a batch, in seconds per batch.

    Attributes:
        stage: "open", "read", "decode", "resize", "transform", "collate", "cache", "lock", or "code": the
            user's own.
        name: The function, class or call.
        wall_s: Its time.
        cpu_s: CPU time of it; in the rest it waited for storage, a lock or a CPU.
    """

    stage: str
    name: str
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class LoaderReport:
    """What a profile says about one loader. Times are seconds per step or batch, unless stated otherwise.

    Attributes:
        name: The variable that held the loader, or its class.
        settings: Its dataset, number of workers, batch size, and so on, as plain values.
        num_epochs: The number of loops over it.
        num_batches: The batches that the loops got.
        num_steady: The steady steps among them, on which waits are measured.
        total_s: All time in these loops, without the very first wait, which happens once.
        wait_s: The mean wait of a steady step.
        compute_s: The mean time that the loop computes with a batch.
        start_s: From `iter()` to the first batch, the mean of the epochs after the first; 0 with one epoch.
        data_share: The share of all time that the loops waited for data.
        start_share: The share of all time that they waited for first batches, after the first epoch's.
        make_s: Making a batch, in a worker; 0 if nothing is known of it.
        cpu_s: CPU time of all processes of the script.
        copy_s: The loop's copying to a device.
        worker_utilization: The share of their time that workers made batches; None without workers.
        machine: What the machine offered.
        stages: Where the time of making a batch goes, largest first.
        lines: The user's lines in which batches are made, with their shares of that time, largest first.
        stage_lines: For each stage, the user's line in which it takes longest.
        file_bytes: What `cache="ram"` would keep of an epoch; None if unknown.
        known_share: Of the images that were decoded, those that it would keep.
        resized_share: Of these, those that it would keep resized.
        memory_share: Of these, those that the dataset has read to memory itself, with a cache, too.
        lookup_s: What it takes to know the files of a batch, as a cache does; not a part of `make_s`.
        lookup_cpu_s: CPU time of it.
    """

    name: str
    settings: dict[str, Any]
    num_epochs: int
    num_batches: int
    num_steady: int
    total_s: float
    wait_s: float
    compute_s: float
    start_s: float
    data_share: float
    start_share: float
    make_s: float
    cpu_s: float
    copy_s: float
    worker_utilization: float | None
    machine: Machine
    stages: list[Stage]
    lines: list[tuple[str, float]]
    stage_lines: dict[str, str]
    file_bytes: int | None = None
    known_share: float = 1.0
    resized_share: float = 0.0
    memory_share: float = 0.0
    lookup_s: float = 0.0
    lookup_cpu_s: float = 0.0

    @property
    def step_s(self) -> float:
        """A steady step."""
        return self.wait_s + self.compute_s

    def part(self, *stages: str) -> Stage:
        """The sum of these stages."""
        parts = [each for each in self.stages if each.stage in stages]
        return Stage(stages[0], "", sum(each.wall_s for each in parts), sum(each.cpu_s for each in parts))

    def share(self, *stages: str) -> float:
        """The share of these stages in making a batch."""
        return self.part(*stages).wall_s / self.make_s if self.make_s else 0.0


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return statistics.fmean(values) if values else 0.0


def measured(
    record: LoaderRecord, sums: Sequence[Sums], counts: Sequence[Any], machine: Machine
) -> LoaderReport:
    """Put together what was recorded of one loader.

    Args:
        record: What was recorded in the consumer's process.
        sums: Of all processes and loaders.
        counts: What all counters took.
        machine: What the machine offered.
    """
    waits, computes, starts, total_s, steady_ns = _steps(record)
    own = [each for each in sums if each.loader == record.number]
    steady = [each for each in own if each.start_ns >= steady_ns]
    steps = [step for step in record.steps if step.end_ns > steady_ns]
    if not steady or len(steps) < 2:
        steady, steps = own, list(record.steps)
    num_steps = max(len(steps), 1)
    parts: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    by_line: dict[str, float] = defaultdict(float)
    by_stage: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for stage, name, line, wall_ns, cpu_ns in itertools.chain.from_iterable(each.work for each in steady):
        sums_of_part = parts[stage, "" if stage in (IDLE, COPY) else name]
        sums_of_part[:] = sums_of_part[0] + wall_ns * _NS, sums_of_part[1] + cpu_ns * _NS
        if line and stage not in (IDLE, COPY):
            by_line[line] += wall_ns * _NS
            by_stage[stage][line] += wall_ns
    idle_s, copy_s = (parts.pop((stage, ""), [0.0])[0] for stage in (IDLE, COPY))
    lookup_s = lookup_cpu_s = 0.0
    if not record.settings["has_cache"]:  # then this is the counter, which counts one epoch
        parts = {key: spent for key, spent in parts.items() if key[0] != CACHE}
        work = [each for one in own for each in one.work if each[0] == CACHE]
        num_counted = max(sum(step.epoch == 0 for step in record.steps), 1)
        lookup_s = sum(wall_ns for *_, wall_ns, _ in work) * _NS / num_counted
        lookup_cpu_s = sum(cpu_ns for *_, cpu_ns in work) * _NS / num_counted
    making_s = sum(wall_s for wall_s, _ in parts.values())
    waits_of_all = [(step.end_ns - step.start_ns) * _NS for step in steps]
    wait_s, num_workers = mean(waits), record.settings["num_workers"]
    make_s = making_s / num_steps if num_workers else mean(waits or waits_of_all) * bool(making_s)
    scale = make_s / max(making_s, _NS)
    cpu_s = mean([b.cpu_ns - a.cpu_ns for a, b in itertools.pairwise(steps) if a.epoch == b.epoch]) * _NS
    if num_workers and record.settings["worker_type"] != "thread":
        cpu_s += sum(each.cpu_ns for each in steady) * _NS / num_steps
    lines = [(line, spent_s / making_s) for line, spent_s in by_line.items() if spent_s]
    step_s = wait_s + mean(computes)
    start_share = min(sum(starts[1:]) / total_s, 1.0) if total_s > 0 else 0.0
    return LoaderReport(
        record.name,
        record.settings,
        num_epochs=len(record.epochs),
        num_batches=record.num_steps,
        num_steady=len(waits),
        total_s=total_s,
        wait_s=wait_s,
        compute_s=mean(computes),
        start_s=mean(starts[1:]),
        data_share=start_share + (1 - start_share) * (wait_s / step_s if step_s else 0.0),
        start_share=start_share,
        make_s=make_s,
        cpu_s=cpu_s,
        copy_s=copy_s / num_steps,
        worker_utilization=making_s / max(making_s + idle_s, _NS) if num_workers and own else None,
        machine=machine,
        stages=sorted(
            (Stage(*key, spent[0] * scale, spent[1] * scale) for key, spent in parts.items()),
            key=lambda stage: -stage.wall_s,
        ),
        lines=sorted(lines, key=lambda line: -line[1])[:5],
        stage_lines={stage: max(lines, key=lines.__getitem__) for stage, lines in by_stage.items()},
        lookup_s=lookup_s,
        lookup_cpu_s=lookup_cpu_s,
        **_files(record, [each[1:] for each in counts if each[0] == record.number]),
    )


def _steps(record: LoaderRecord) -> tuple[list[float], list[float], list[float], float, int]:
    """Waits, computes, starts, the total, and when the warm-up ended."""
    by_epoch: dict[int, list[Any]] = defaultdict(list)
    for step in record.steps:
        by_epoch[step.epoch].append(step)
    waits: list[float] = []
    computes: list[float] = []
    starts: list[float] = []
    total_s, steady_ns = 0.0, 0
    for number, steps in sorted(by_epoch.items()):
        (start_ns, end_ns), first_ns = record.epochs[number], steps[0].end_ns
        if len(steps) == 1 and not end_ns:  # next(iter(loader)), in a loop of another kind
            end_ns = record.epochs[number + 1][0] if number + 1 < len(record.epochs) else 0
        nexts_ns = [*(step.start_ns for step in steps[1:]), end_ns]  # 0: the loop asked for no more
        total_s += ((nexts_ns[-1] or steps[-1].end_ns) - (start_ns if starts else first_ns)) * _NS
        num_skipped = 1 if starts else 1 + min(NUM_WARM_UP, len(steps) // 10)
        steady_ns = steady_ns or steps[min(num_skipped, len(steps)) - 1].end_ns
        starts.append((first_ns - start_ns) * _NS)
        for step, next_ns in list(zip(steps, nexts_ns, strict=True))[num_skipped:]:
            if next_ns:  # else the loop was left in this step
                waits.append((step.end_ns - step.start_ns) * _NS)
                computes.append((next_ns - step.end_ns) * _NS)
    return waits, computes, starts, total_s, steady_ns


def _files(record: LoaderRecord, counts: Sequence[Any]) -> dict[str, Any]:
    """The fields about the files of an epoch."""
    known, resized, in_memory, unknown = (sum(each[index] for each in counts) for index in range(4))
    if not known:
        return {"known_share": 0.0 if unknown else 1.0}
    nbytes: float = sum({name: nbytes for each in counts for name, nbytes in each[4].items()}.values())
    settings, num_batches = record.settings, record.num_steps
    if len(record.epochs) == 1 and not record.epochs[0][1] and settings["num_samples"]:
        num_batches += settings["num_workers"] * settings["prefetch_factor"]  # less than an epoch was seen
        nbytes *= max(1.0, settings["num_samples"] / (num_batches * (settings["batch_size"] or 1)))
    shares = {"resized_share": resized / known, "memory_share": min(in_memory / known, 1.0)}
    return {"file_bytes": round(nbytes), "known_share": known / (known + unknown), **shares}
