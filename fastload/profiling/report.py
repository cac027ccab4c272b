"""The result of a profile: a report for people and programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fastload.profiling.advice import STAGE_NAMES, bottleneck_of, suggest

if TYPE_CHECKING:
    from fastload.profiling.advice import Suggestion
    from fastload.profiling.measures import LoaderReport, Machine

_MAX_SUGGESTIONS = 4
_FEW_STEPS = 20  # with fewer steady steps, the figures are uncertain


@dataclass(frozen=True)
class ProfileReport:
    """The result of `fastload.profile`; `print(report)` shows it as text.

    Attributes:
        loaders: One `LoaderReport` for each loader, in the order of first use.
        machine: What the machine offered.
        available_bytes: The host memory that was free at the end.
    """

    loaders: list[LoaderReport]
    machine: Machine
    available_bytes: int

    def bottleneck(self, loader: LoaderReport) -> str:
        """What limits a loader: a stage, "cpus" or "start"; empty if its loop hardly waits."""
        return bottleneck_of(loader)[0]

    def verdict(self, loader: LoaderReport) -> str:
        """The most important facts about a loader, in one to three sentences."""
        text = bottleneck_of(loader)[1]
        share = f"{loader.data_share:.{1 if loader.data_share < 0.1 else 0}%} of the time"
        if not loader.num_batches:
            return "No batch was loaded."
        if not text and not loader.num_steady:
            return f"Too few batches for a verdict: {loader.num_batches}, all of them during the warm-up."
        if not text:
            return f"Data is not your bottleneck: training waits for it {share}."
        return f"Training waits for data {share}. {text}"

    def suggestions(self, loader: LoaderReport) -> list[Suggestion]:
        """At most four changes of a loader whose loop waits, the largest gain first."""
        found = suggest(loader, self.available_bytes) if self.bottleneck(loader) else []
        return found[:_MAX_SUGGESTIONS]

    @property
    def notes(self) -> list[str]:
        """What makes the figures uncertain."""
        few = [each.name for each in self.loaders if 0 < each.num_steady < _FEW_STEPS]
        notes = [f"of {name}, only a few steps were measured: let it run longer" for name in few]
        if self.loaders and self.machine.is_busy:
            notes.append(
                f"the CPUs were busy all the time, {self.machine.others_share or 0:.0%} of them with other "
                "processes: times of single stages contain waits for a CPU"
            )
        return notes

    def __str__(self) -> str:
        if not self.loaders:
            return "No DataLoader was used."
        by_waits = sorted(self.loaders, key=lambda loader: -loader.data_share * loader.total_s)
        texts = ["\n".join(self._lines(loader)) for loader in by_waits]
        return "\n".join(["\n\n".join(texts), *(f"Note: {note}" for note in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        """This report as plain values, for JSON."""
        loaders = [
            {
                **asdict(loader),
                "bottleneck": self.bottleneck(loader),
                "verdict": self.verdict(loader),
                "suggestions": [asdict(one) for one in self.suggestions(loader)],
            }
            for loader in self.loaders
        ]
        return {"version": 2, "loaders": loaders, "machine": asdict(self.machine), "notes": self.notes}

    def _lines(self, loader: LoaderReport) -> list[str]:
        settings = loader.settings
        samples = "" if settings["num_samples"] is None else f", {settings['num_samples']:,} samples"
        kind = "thread" if settings["worker_type"] == "thread" else "worker"
        batches = f"{settings['dataset']}{samples}, batch_size={settings['batch_size']}, "
        batches += f"{_counted(settings['num_workers'], kind, kind + 's')}: "
        batches += f"{_counted(loader.num_batches, 'batch', 'batches')}, "
        batches += f"{_counted(loader.num_epochs, 'epoch', 'epochs')}, {loader.total_s:,.1f} s"
        times: list[str] = []
        if loader.num_steady:
            times = [f"wait per batch: {_ms(loader.wait_s)}", f"computing: {_ms(loader.compute_s)}"]
        times += [f"first batch of later epochs: {loader.start_s:,.2f} s"] if loader.start_s else []
        lines = [f"{loader.name}: {self.verdict(loader)}", f"  {batches}"]
        lines += [f"  {'; '.join(times)}"] if times else []
        if not self.bottleneck(loader):
            return lines
        if loader.data_share < 0.999:  # else the loop does nothing but load
            lines.append(f"  if loading were free: {1 / (1 - loader.data_share):.2f} times as fast")
        if loader.make_s:
            busy = []
            if loader.worker_utilization is not None:
                busy = [f"workers are busy {loader.worker_utilization:.0%}"]
            if loader.num_steady:
                cpus = loader.cpu_s / (loader.step_s * self.machine.num_cpus)
                busy.append(f"the script takes {cpus:.0%} of the CPUs")
            facts = "; ".join(filter(None, (_ms(loader.make_s), ", ".join(busy))))
            lines.append(f"  making a batch takes {facts}:")
        for stage in [each for each in loader.stages if each.wall_s >= 0.01 * loader.make_s][:10]:
            waiting = max(1 - stage.cpu_s / stage.wall_s, 0.0)
            waits = f"  ({waiting:.0%} of it waiting)" if waiting > 0.5 and not self.machine.is_busy else ""
            label = ": ".join(filter(None, (STAGE_NAMES[stage.stage], stage.name)))
            lines.append(f"    {stage.wall_s / loader.make_s:>4.0%}  {_ms(stage.wall_s):>12}  {label}{waits}")
        lines += [f"  your slowest line: {line}, {share:.0%}" for line, share in loader.lines[:1]]
        advice = enumerate(self.suggestions(loader), start=1)
        none = ["  No known change of the loader would gain 5% or more."] if loader.num_steady else []
        return lines + ([f"  {number}. {one.gain:.2f}x: {one.text}" for number, one in advice] or none)


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
