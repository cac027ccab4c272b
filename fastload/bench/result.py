"""The result of a benchmark: the rates of each configuration, and the fastest."""

from __future__ import annotations

import dataclasses
import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastload.system.cpus import worthwhile_cpus
from fastload.system.limits import read_text
from fastload.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fastload.bench.configurations import Configuration

FORMAT, VERSION = "fastload bench", 3


@dataclass
class Row:
    """The rates of one configuration, in samples per second.

    Attributes:
        configuration: Its settings.
        first: Of the first epoch of each round, with the start of the workers and the filling of a RAM cache.
        later: Of the later epochs of each round.
        problem: Why there are no figures; "" if there are.
    """

    configuration: Configuration
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    problem: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether it has figures, and no round failed."""
        return bool(self.later) and not self.problem

    @property
    def rate(self) -> float:
        """The median of the later epochs."""
        return statistics.median(self.later)


@dataclass(frozen=True)
class Ratio:
    """The speed-up of one row over another: the ratio of medians, and its spread over the rounds."""

    value: float
    low: float
    high: float
    num_rounds: int

    @property
    def is_within_spread(self) -> bool:
        """Whether the rounds disagree on which row is faster, or a single round cannot show it."""
        return self.num_rounds < 2 or self.low <= 1.0 <= self.high

    @classmethod
    def of(cls, row: Row, other: Row) -> Ratio:
        """The ratio of two rows; runs of the same round are compared with each other."""
        ratios = [rate / other_rate for rate, other_rate in zip(row.later, other.later, strict=False)]
        return cls(row.rate / other.rate, min(ratios), max(ratios), len(ratios))


@dataclass(frozen=True)
class Verdict:
    """The fastest rows.

    Attributes:
        fastest: The fastest of all.
        torch: The fastest of torch's loader; None if it has no figures.
        fastload: The fastest of fastload's loader; None if it has no figures.
    """

    fastest: Row
    torch: Row | None
    fastload: Row | None

    @property
    def gain(self) -> Ratio | None:
        """The fastest of fastload's loader against the fastest of torch's."""
        if self.torch is None or self.fastload is None:
            return None
        return Ratio.of(self.fastload, self.torch)


def verdict_of(rows: Iterable[Row]) -> Verdict | None:
    """The fastest of these rows; None if none was measured."""
    measured = [row for row in rows if row.is_measured]
    if not measured:
        return None
    return Verdict(
        _fastest(measured),
        _fastest([row for row in measured if row.configuration.is_torch]),
        _fastest([row for row in measured if not row.configuration.is_torch]),
    )


def _fastest(rows: Sequence[Row]) -> Any:
    return max(rows, key=lambda row: row.rate, default=None)


def this_machine() -> dict[str, Any]:
    """The hardware and the versions on which the speed depends."""
    lines = read_text(Path("/proc/cpuinfo")).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": worthwhile_cpus(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastload": __version__,
    }


@dataclass
class Result:
    """A benchmark.

    Attributes:
        source: The user's SOURCE.
        transform: The user's `--transform`; None without one.
        size: The user's `--size`; None without one.
        length: The number of samples of the dataset.
        num_samples: The number of samples of an epoch.
        sample_nbytes: Bytes of a decoded sample; 0 if unknown.
        rounds: How often each configuration was to run.
        machine: Where it ran, see `this_machine`.
        rows: Of each configuration.
        build_s: Seconds that the LMDB cache took to build; None without one.
        others_share: The share of the CPUs that other processes used; None if unknown.
        warnings: Sentences about conditions that make the figures doubtful.
    """

    source: str
    transform: str | None
    size: int | tuple[int, int] | None
    length: int
    num_samples: int
    sample_nbytes: int
    rounds: int
    machine: dict[str, Any]
    rows: list[Row]
    build_s: float | None = None
    others_share: float | None = None
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; see docs/command-line.md."""
        rows = [
            {
                **dataclasses.asdict(row.configuration),
                "first": row.first,
                "later": row.later,
                "median": row.rate if row.later else None,
                "problem": row.problem,
            }
            for row in self.rows
        ]
        header = {"format": FORMAT, "version": VERSION, "unit": "samples/s"}
        return {**header, **dataclasses.asdict(self), "rows": rows}
