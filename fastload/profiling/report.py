"""The result of a profile, for people, notebooks and programs."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fastload.profiling import probes
from fastload.profiling.suggestions import (
    MIN_DATA_SHARE,
    STAGE_NAMES,
    Culprit,
    Suggestion,
    find_culprit,
    suggest,
)
from fastload.profiling.timeline import Timeline, mean, median

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        num_epochs: How often a loop over it began.
        num_batches: The batches that the loops got.
        num_steady: The steady steps among them, on which the waits are measured.
        taken_share: The share of the CPUs that other processes took; 0 if there were CPUs for all.
        total_s: Seconds in these loops, without the very first wait, which happens once.
        wait_share: The share of steady steps that the loop waited for data.
        wait_p50_ms: The median wait of a steady step.
        wait_p95_ms: The wait that 95% of the steady steps stay below.
        compute_ms: The mean time that the loop computes with a batch.
        start_share: The share of that time that loops waited for first batches.
        first_start_s: The time from the first `iter()` to its first batch, which happens once.
        start_s: The mean of the same for later epochs; None with one epoch.
        data_share: The share of all time that the loops waited for data.
        speedup_if_free: How many times as fast the loops were if loading cost nothing, by the waits.
        speedup_replayed: The same, measured with held batches; None without `replay`.
        make_ms: The mean time of making a batch, in the worker.
        worker_utilisation: The share of their time that workers made batches; None without workers.
        stages: Where that time goes, largest first.
        outside: Milliseconds per batch of sending, receiving, pinning and copying.
        lines: The user's lines in which workers were seen most often, with their share.
        bottleneck: The culprit in one sentence; empty if data is not the bottleneck.
        culprit: The stage that the sentence names; empty likewise.
        suggestions: What to change, largest gain first.
    """

    name: str
    dataset: str
    settings: dict[str, Any]
    num_epochs: int
    num_batches: int
    num_steady: int
    taken_share: float
    total_s: float
    wait_share: float
    wait_p50_ms: float
    wait_p95_ms: float
    compute_ms: float
    start_share: float
    first_start_s: float
    start_s: float | None
    data_share: float
    speedup_if_free: float
    speedup_replayed: float | None
    make_ms: float
    worker_utilisation: float | None
    stages: list[StageShare]
    outside: dict[str, float]
    lines: list[tuple[str, float]]
    bottleneck: str
    culprit: str
    suggestions: list[Suggestion] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The most important fact in one or two sentences."""
        if not self.num_batches:
            return "No batch was loaded."
        share = f"{_percent(self.data_share)} of the time"
        if not self.bottleneck and not self.num_steady:
            return f"Too few batches for a verdict: {self.num_batches}, all of them during the warm-up."
        if self.taken_share:
            during = f"While other processes used {self.taken_share:.0%} of the CPUs, "
            if not self.bottleneck:
                return f"{during}data was not your bottleneck: {share}."
            return f"{during}training waited for data {share}. {self.bottleneck}"
        if not self.bottleneck:
            return f"Data is not your bottleneck: {share}."
        return f"Training waits for data {share}. {self.bottleneck}"

    def lines_of_text(self) -> list[str]:
        """This report as lines of text."""
        settings, ms = self.settings, "{:,.1f} ms"
        workers = settings["num_workers"]
        kind = "threads" if settings["worker_method"] == "thread" else "workers"
        head = f"{self.name} ({self.dataset}"
        if settings["num_samples"] is not None:
            head += f", {settings['num_samples']:,} samples"
        head += f", batch_size={settings['batch_size']}, {workers} {kind})"
        lines = [f"{head}: {self.num_batches:,} batches, {self.num_epochs} epochs, {self.total_s:,.1f} s"]
        lines.append(f"  {self.verdict}")
        if not self.num_batches:
            return lines
        waits = (
            f"wait per batch: {ms.format(self.wait_p50_ms)} median, {ms.format(self.wait_p95_ms)} p95; "
            f"computing: {ms.format(self.compute_ms)}; "
        )
        lines.append(
            f"  {waits if self.num_steady else ''}very first batch: {self.first_start_s:,.2f} s"
            + ("" if self.start_s is None else f", first batch of later epochs: {self.start_s:,.2f} s")
        )
        if self.bottleneck:
            free = f"  if loading cost nothing: {self.speedup_if_free:.2f} times as fast"
            if self.speedup_replayed is not None:
                free += f" by the waits, {self.speedup_replayed:.2f} measured with batches held in memory"
            lines += [free, *self._table()]
            lines += [
                f"  {number}. {one.gain:.2f}x: {one.text}"
                for number, one in enumerate(self.suggestions, start=1)
            ]
            if not self.suggestions:
                lines.append("  No change of the loader that is known here would gain 3% or more.")
        return lines

    def _table(self) -> list[str]:
        if not self.make_ms:
            return []  # the workers were started before the profile
        shown = [stage for stage in self.stages if stage.share >= 0.01][:10]
        head = f"  making a batch takes {self.make_ms:,.1f} ms"
        if self.worker_utilisation is not None:
            head += f", and workers are busy {self.worker_utilisation:.0%} of the time"
        lines = [head + (":" if shown else "; too few batches were made to say what takes that time")]
        for stage in shown:
            label = f"{STAGE_NAMES[stage.stage]}: {stage.name}" if stage.name else STAGE_NAMES[stage.stage]
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
        num_cpus: The CPUs that the process may use.
        busy_share: How busy the CPUs were that the process may use; None if the system does not say.
        notes: What makes the figures uncertain.
    """

    loaders: list[LoaderReport]
    num_cpus: float
    busy_share: float | None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.loaders:
            return "No DataLoader was used."
        lines = [line for loader in self.loaders for line in [*loader.lines_of_text(), ""]]
        return "\n".join([*lines[:-1], *(f"Note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        parts = []
        for loader in self.loaders:
            rows = "".join(
                f"<tr><td>{html.escape(STAGE_NAMES[stage.stage])}</td><td>{html.escape(stage.name)}</td>"
                f"<td style='text-align:right'>{stage.share:.0%}</td>"
                f"<td style='text-align:right'>{stage.ms_per_batch:,.2f} ms</td></tr>"
                for stage in loader.stages[:10]
            )
            items = "".join(
                f"<li><b>{one.gain:.2f}x</b> {html.escape(one.text)}</li>" for one in loader.suggestions
            )
            head, verdict = (html.escape(text.strip()) for text in loader.lines_of_text()[:2])
            parts.append(
                f"<p><b>{head}</b><br>{verdict}</p><table><tr><th>stage</th><th></th><th>share</th>"
                f"<th>per batch</th></tr>{rows}</table><ol>{items}</ol>"
            )
        parts += [f"<p><i>{html.escape(note)}</i></p>" for note in self.notes]
        return "".join(parts) or "<p>No DataLoader was used.</p>"

    def as_dict(self) -> dict[str, Any]:
        """This report as plain values, for JSON."""
        return {"version": 1, **asdict(self)}


def report_of(timelines: Sequence[Timeline], available_bytes: int) -> ProfileReport:
    """The report on these loaders.

    Args:
        timelines: What was recorded of each.
        available_bytes: The host memory that is free.
    """
    machine = timelines[0].machine if timelines else None
    few = [timeline for timeline in timelines if 0 < len(timeline.waits) < _FEW_STEPS]
    notes = [
        f"{timeline.facts['name']}: only {len(timeline.waits)} steps after the warm-up were measured; let it "
        "run longer for reliable figures"
        for timeline in few
    ]
    if machine is not None and machine.is_saturated:
        notes.append(
            "the CPUs were busy all the time: times of single stages contain waits for a CPU, other "
            "programs on this machine change the figures, and a change that spares CPU time can gain more "
            "than the waits"
        )
    loaders = [_report_on(timeline, available_bytes) for timeline in timelines]
    return ProfileReport(
        loaders, machine.num_cpus if machine else 0, machine.busy_share if machine else None, notes
    )


def _report_on(timeline: Timeline, available_bytes: int) -> LoaderReport:
    facts = timeline.facts
    is_bound = timeline.data_share >= MIN_DATA_SHARE and bool(timeline.watched.steps)
    culprit = find_culprit(timeline) if is_bound else None
    waits = sorted(timeline.waits)
    total_s = sum(stage.wall_s for stage in timeline.stages)
    outside: dict[str, float] = {}
    for stage in timeline.outside:
        outside[stage.stage] = outside.get(stage.stage, 0.0) + stage.wall_s * 1e3
    step_s = timeline.step_s
    replayed = step_s / mean(timeline.replayed) if timeline.replayed and step_s else None
    return LoaderReport(
        name=facts["name"],
        dataset=facts["dataset"],
        settings={key: value for key, value in facts.items() if key not in ("name", "dataset")},
        num_epochs=len(timeline.watched.epochs),
        num_batches=timeline.watched.num_steps,
        num_steady=len(timeline.waits),
        taken_share=timeline.machine.taken_share,
        total_s=timeline.total_s,
        wait_share=timeline.wait_share,
        wait_p50_ms=median(waits) * 1e3,
        wait_p95_ms=waits[int(0.95 * (len(waits) - 1))] * 1e3 if waits else 0.0,
        compute_ms=mean(timeline.computes) * 1e3,
        start_share=timeline.start_share,
        first_start_s=timeline.starts[0] if timeline.starts else 0.0,
        start_s=mean(timeline.starts[1:]) if len(timeline.starts) > 1 else None,
        data_share=timeline.data_share,
        speedup_if_free=1 / max(1 - timeline.data_share, 1e-3),
        speedup_replayed=replayed,
        make_ms=timeline.make_s * 1e3,
        worker_utilisation=timeline.utilisation,
        stages=[
            StageShare(
                stage.stage,
                stage.name,
                stage.wall_s / total_s,
                stage.wall_s * 1e3,
                min(stage.cpu_s / stage.wall_s, 1.0) if stage.wall_s else 1.0,
            )
            for stage in timeline.stages
        ]
        if total_s
        else [],
        outside=outside,
        lines=timeline.lines[:5],
        bottleneck=_sentence(culprit) if is_bound else "",
        culprit=culprit.stage if culprit else "",
        suggestions=suggest(timeline, available_bytes) if is_bound else [],
    )


def _sentence(culprit: Culprit | None) -> str:
    if culprit is None:
        return "Nothing was recorded about where loading spends its time."
    detail = f" ({culprit.detail})" if culprit.detail else ""
    if culprit.stage == "start":
        return "The bottleneck is the starts of epochs: the loop waits for the first batch of each epoch."
    if culprit.stage == "worker":
        return f"The bottleneck is one slow worker: {culprit.detail}."
    if culprit.stage in (probes.SEND, probes.RECEIVE, probes.PIN, probes.COPY):
        return f"The bottleneck is {STAGE_NAMES[culprit.stage]}{detail}: workers wait for work meanwhile."
    return (
        f"The bottleneck is {STAGE_NAMES[culprit.stage]}: {culprit.share:.0%} of the time of making a batch"
        f"{detail}."
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
