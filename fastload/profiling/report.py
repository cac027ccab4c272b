"""The result of a profile: a report for people and programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fastload.profiling.suggestions import MIN_DATA_SHARE, STAGE_NAMES, Suggestion, find_bottleneck, suggest
from fastload.profiling.timeline import Timeline, mean, median

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_SUGGESTIONS = 4
_FEW_STEPS = 20  # with fewer steady steps, the figures are uncertain


@dataclass(frozen=True)
class StageShare:
    """A part of making a batch.

    Attributes:
        stage: "read", "decode", "transform", "collate", "cache", "lock", or "dataset" for its own code.
        name: The function, class or transform; empty for the dataset's own code.
        share: Its share of the time in which workers make batches.
        ms_per_batch: Milliseconds per batch.
        cpu_share: How much of that time it computed; the rest it waited for storage, a lock or a CPU.
    """

    stage: str
    name: str
    share: float
    ms_per_batch: float
    cpu_share: float


@dataclass(frozen=True)
class LoaderReport:
    """What a profile says about one loader.

    Attributes:
        name: The variable that held the loader, or its class.
        dataset: The class of its dataset.
        settings: Its number of workers, batch size, and so on, as plain values.
        num_epochs: The number of loops over it.
        num_batches: The batches that the loops got.
        num_steady: The steady steps among them, on which the waits are measured.
        total_s: Seconds in these loops, without the very first wait, which happens once.
        wait_p50_ms: The median wait of a steady step.
        wait_p95_ms: The 95th percentile of the same.
        compute_ms: The mean time that the loop computes with a batch.
        first_start_s: The time from the first `iter()` to its first batch, which happens once.
        start_s: The mean of the same for later epochs; None with one epoch.
        data_share: The share of all time that the loops waited for data.
        speedup_if_free: The speed-up if loading were free, by the waits.
        make_ms: The mean time of making a batch, in the worker.
        worker_utilization: The share of their time that workers made batches; None without workers.
        stages: Where that time goes, largest first.
        outside: Milliseconds per batch of sending, receiving, pinning and copying.
        lines: The user's lines that workers ran most often, with their shares of the stack samples.
        bottleneck: The stage that the verdict names, "worker" or "start"; empty if the loop hardly waits.
        bottleneck_text: The same in one sentence; empty likewise.
        verdict: The most important fact in one or two sentences.
        suggestions: At most four changes, the largest gain first.
    """

    name: str
    dataset: str
    settings: dict[str, Any]
    num_epochs: int
    num_batches: int
    num_steady: int
    total_s: float
    wait_p50_ms: float
    wait_p95_ms: float
    compute_ms: float
    first_start_s: float
    start_s: float | None
    data_share: float
    speedup_if_free: float
    make_ms: float
    worker_utilization: float | None
    stages: list[StageShare]
    outside: dict[str, float]
    lines: list[tuple[str, float]]
    bottleneck: str
    bottleneck_text: str
    verdict: str
    suggestions: list[Suggestion] = field(default_factory=list)

    def lines_of_text(self) -> list[str]:
        """This report as lines of text."""
        settings = self.settings
        kind = "thread" if settings["worker_type"] == "thread" else "worker"
        workers = f"{settings['num_workers']} {kind}{'' if settings['num_workers'] == 1 else 's'}"
        samples = "" if settings["num_samples"] is None else f", {settings['num_samples']:,} samples"
        loader = f"{self.dataset}{samples}, batch_size={settings['batch_size']}"
        loops = f"{self.num_batches:,} batches, {self.num_epochs} epochs, {self.total_s:,.1f} s"
        lines = [f"{self.name}: {self.verdict}", f"  {loader}, {workers}: {loops}"]
        if not self.num_batches:
            return lines
        starts = f"very first batch: {self.first_start_s:,.2f} s"
        if self.start_s is not None:
            starts += f", first batch of later epochs: {self.start_s:,.2f} s"
        if self.num_steady:
            waits = f"{self.wait_p50_ms:,.1f} ms median, {self.wait_p95_ms:,.1f} ms p95"
            starts = f"wait per batch: {waits}; computing: {self.compute_ms:,.1f} ms; {starts}"
        lines.append(f"  {starts}")
        if self.bottleneck_text:
            free = f"  if loading were free: {self.speedup_if_free:.2f} times as fast"
            lines += [free, *self._table()]
            lines += [
                f"  {number}. {suggestion.gain:.2f}x: {suggestion.text}"
                for number, suggestion in enumerate(self.suggestions, start=1)
            ] or ["  No known change of the loader would gain 3% or more."]
        return lines

    def _table(self) -> list[str]:
        if not self.make_ms:
            return []  # the workers were started before the profile
        shown = [stage for stage in self.stages if stage.share >= 0.01][:10]
        head = f"  making a batch takes {self.make_ms:,.1f} ms"
        if self.worker_utilization is not None:
            head += f", and workers are busy {self.worker_utilization:.0%} of the time"
        lines = [head + (":" if shown else "; too few batches were made to say what takes that time")]
        for stage in shown:
            label = ": ".join(filter(None, (STAGE_NAMES[stage.stage], stage.name)))
            waits = "" if stage.cpu_share > 0.5 else f"  ({1 - stage.cpu_share:.0%} of it waiting)"
            lines.append(f"    {stage.share:>4.0%}  {stage.ms_per_batch:>9,.2f} ms  {label}{waits}")
        for name, cost_ms in self.outside.items():
            if cost_ms >= 0.01 * self.make_ms:
                lines.append(f"          {cost_ms:>9,.2f} ms  {STAGE_NAMES[name]} (beside it)")
        return lines


@dataclass(frozen=True)
class ProfileReport:
    """The result of `fastload.profile`: one `LoaderReport` for each loader, in the order of first use.

    Attributes:
        loaders: The reports.
        num_cpus: The CPUs that the process can use.
        busy_share: How busy these CPUs were; None if unknown.
        notes: What makes the figures uncertain.
    """

    loaders: list[LoaderReport]
    num_cpus: float
    busy_share: float | None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.loaders:
            return "No DataLoader was used."
        by_waits = sorted(self.loaders, key=lambda loader: -loader.data_share * loader.total_s)
        texts = ["\n".join(loader.lines_of_text()) for loader in by_waits]
        return "\n".join(["\n\n".join(texts), *(f"Note: {note}" for note in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        """This report as plain values, for JSON."""
        return {"version": 1, **asdict(self)}


def report_of(timelines: Sequence[Timeline], available_bytes: int) -> ProfileReport:
    """The report on these loaders.

    Args:
        timelines: What was recorded of each.
        available_bytes: The host memory that is free.
    """
    notes = [
        f"{timeline.info['name']}: only {len(timeline.waits)} steps after the warm-up were measured; let it "
        "run longer for reliable figures"
        for timeline in timelines
        if 0 < len(timeline.waits) < _FEW_STEPS
    ]
    if not timelines:
        return ProfileReport([], 0, None)
    machine = timelines[0].machine
    if machine.is_saturated:
        notes.append(
            f"the CPUs were busy all the time, {machine.others_share or 0:.0%} of them with other processes: "
            "times of single stages contain waits for a CPU, and a change that spares CPU time can gain more "
            "than the waits"
        )
    loaders = [_report_on(timeline, available_bytes) for timeline in timelines]
    return ProfileReport(loaders, machine.num_cpus, machine.busy_share, notes)


def _report_on(timeline: Timeline, available_bytes: int) -> LoaderReport:
    info = timeline.info
    is_bound = timeline.data_share >= MIN_DATA_SHARE and timeline.record.num_steps > 0
    bottleneck, bottleneck_text = find_bottleneck(timeline) if is_bound else ("", "")
    waits, starts = sorted(timeline.waits), timeline.starts
    total_s = sum(stage.wall_s for stage in timeline.stages)
    return LoaderReport(
        name=info["name"],
        dataset=info["dataset"],
        settings={key: value for key, value in info.items() if key not in ("name", "dataset")},
        num_epochs=len(timeline.record.epochs),
        num_batches=timeline.record.num_steps,
        num_steady=len(waits),
        total_s=timeline.total_s,
        wait_p50_ms=median(waits) * 1e3,
        wait_p95_ms=waits[int(0.95 * (len(waits) - 1))] * 1e3 if waits else 0.0,
        compute_ms=mean(timeline.computes) * 1e3,
        first_start_s=starts[0] if starts else 0.0,
        start_s=mean(starts[1:]) if len(starts) > 1 else None,
        data_share=timeline.data_share,
        speedup_if_free=1 / max(1 - timeline.data_share, 1e-3),
        make_ms=timeline.make_s * 1e3,
        worker_utilization=timeline.utilization,
        stages=[
            StageShare(
                stage.stage,
                stage.name,
                stage.wall_s / max(total_s, 1e-9),
                stage.wall_s * 1e3,
                min(stage.cpu_s / stage.wall_s, 1.0) if stage.wall_s else 1.0,
            )
            for stage in timeline.stages
        ],
        outside={stage: spent_s * 1e3 for stage, spent_s in timeline.outside.items()},
        lines=timeline.lines[:5],
        bottleneck=bottleneck,
        bottleneck_text=bottleneck_text,
        verdict=_verdict(timeline, bottleneck_text),
        suggestions=suggest(timeline, available_bytes)[:_MAX_SUGGESTIONS] if is_bound else [],
    )


def _verdict(timeline: Timeline, bottleneck_text: str) -> str:
    num_batches = timeline.record.num_steps
    share = f"{timeline.data_share:.{1 if timeline.data_share < 0.1 else 0}%} of the time"
    if not num_batches:
        return "No batch was loaded."
    if not bottleneck_text and not timeline.waits:
        return f"Too few batches for a verdict: {num_batches}, all of them during the warm-up."
    if not bottleneck_text:
        return f"Data is not your bottleneck: training waits for it {share}."
    return f"Training waits for data {share}. {bottleneck_text}"
