"""The result of a benchmark: the rates of each configuration, the fastest, the comparison with a baseline."""

from __future__ import annotations

import dataclasses
import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastload.bench.configurations import Configuration
from fastload.system.cpus import worthwhile_cpus
from fastload.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FORMAT, VERSION = "fastload bench", 2


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
    """The fastest rows among configurations that deliver samples of one size.

    Attributes:
        size: Their `--size`.
        fastest: The fastest of all.
        torch: The fastest of torch's loader; None if it has no figures.
        fastload: The fastest of fastload's loader; None if it has no figures.
    """

    size: str | None
    fastest: Row
    torch: Row | None
    fastload: Row | None

    @property
    def gain(self) -> Ratio | None:
        """The fastest of fastload's loader against the fastest of torch's."""
        if self.torch is None or self.fastload is None:
            return None
        return Ratio.of(self.fastload, self.torch)


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """A verdict for each size, because the size of images changes the work."""
    by_size: dict[str | None, list[Row]] = {}
    for row in rows:
        if row.is_measured:
            by_size.setdefault(row.configuration.size, []).append(row)
    return [
        Verdict(
            size,
            _fastest(rows),
            _fastest([row for row in rows if row.configuration.is_torch]),
            _fastest([row for row in rows if not row.configuration.is_torch]),
        )
        for size, rows in by_size.items()
    ]


def _fastest(rows: Sequence[Row]) -> Any:
    return max(rows, key=lambda row: row.rate, default=None)


def this_machine() -> dict[str, Any]:
    """The hardware and the versions on which the speed depends."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []  # Linux alone has it
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
        length: The number of samples of the dataset.
        num_samples: The number of samples of an epoch.
        sample_nbytes: Bytes of a decoded sample, by size.
        rounds: How often each configuration was to run.
        machine: Where it ran, see `this_machine`.
        rows: Of each configuration.
        build_s: Seconds that each LMDB cache took to build, by size.
        others_share: The share of the CPUs that other processes used; None if unknown.
        warnings: Sentences about conditions that make the figures doubtful.
    """

    source: str
    transform: str | None
    length: int
    num_samples: int
    sample_nbytes: dict[str, int]
    rounds: int
    machine: dict[str, Any]
    rows: list[Row]
    build_s: dict[str, float] = field(default_factory=dict)
    others_share: float | None = None
    warnings: list[str] = field(default_factory=list)

    def settings(self, name: str) -> tuple[Any, ...]:
        """The values of an attribute of the configurations, such as `batch_size`."""
        values = dict.fromkeys(getattr(row.configuration, name) for row in self.rows)
        return tuple(value for value in values if value is not None)

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

    @classmethod
    def from_dict(cls, plain: Any) -> Result:
        """Undo `as_dict`.

        Raises:
            ValueError: The data are not a result of this version.
        """
        try:
            if (plain["format"], plain["version"]) != (FORMAT, VERSION):
                raise ValueError(f"it is of {plain['format']!r}, version {plain['version']!r}")
            values = {field.name: plain[field.name] for field in dataclasses.fields(cls)}
            names = [field.name for field in dataclasses.fields(Configuration)]
            values["rows"] = [
                Row(
                    Configuration(**{name: row[name] for name in names}),
                    *(row[name] for name in ("first", "later", "problem")),
                )
                for row in plain["rows"]
            ]
        except (KeyError, TypeError) as error:
            raise ValueError(f"a part of it is missing or wrong: {error!r}") from error
        return cls(**values)


# --- the comparison with a baseline ----------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """The change of one configuration between two runs.

    Attributes:
        configuration: Its settings.
        before: Samples per second in the baseline.
        now: Samples per second in this run.
        ratio: `now / before`; in a relative comparison, after both were divided by torch's rate.
        is_slower: Whether it is slower by more than the tolerance.
    """

    configuration: str
    before: float
    now: float
    ratio: float
    is_slower: bool


@dataclass(frozen=True)
class Comparison:
    """A run and its baseline.

    Attributes:
        has_passed: Whether something was compared, and nothing has become slower or failed.
        is_relative: Whether rates were divided by torch's.
        tolerance: The share of its rate that a configuration can lose.
        torch_ratio: How fast torch's loader was in this run, where 1 is its rate in the baseline; the
            geometric mean of its rows. None if no row is in both runs.
        changes: The configurations with figures in both runs; in a relative comparison, without torch's.
        failed: Configurations that have figures in the baseline and a problem in this run.
        only_before: Configurations that this run does not have.
        only_now: Configurations that have no figures in the baseline.
    """

    has_passed: bool
    is_relative: bool
    tolerance: float
    torch_ratio: float | None
    changes: list[Change]
    failed: list[str]
    only_before: list[str]
    only_now: list[str]

    @property
    def slower(self) -> list[Change]:
        """The configurations that are slower by more than the tolerance."""
        return [change for change in self.changes if change.is_slower]


def compare(baseline: Result, now: Result, *, tolerance: float, is_relative: bool) -> Comparison:
    """Compare a run with its baseline, configuration by configuration.

    Only later epochs are compared: the first ones depend on the start of processes.

    Args:
        baseline: The earlier run.
        now: The later run.
        tolerance: The share of its rate that a configuration can lose.
        is_relative: Whether each rate is divided by the rate of torch's loader in the same run (the geometric
            mean of its rows). A slower or different machine slows both, so the quotient stays; but so does a
            dataset that has become slower, which this comparison does not notice.
    """
    rates_before = {row.configuration: row.rate for row in baseline.rows if row.is_measured}
    rates = {row.configuration: row.rate for row in now.rows if row.is_measured}
    configurations = {row.configuration for row in now.rows}
    ratios = {key: rates[key] / rate for key, rate in rates_before.items() if key in rates}
    torch_ratios = [ratio for key, ratio in ratios.items() if key.is_torch]
    torch_ratio = statistics.geometric_mean(torch_ratios) if torch_ratios else None
    if is_relative:  # without torch's rows there is nothing to be relative to
        ratios = {key: ratio / (torch_ratio or 1) for key, ratio in ratios.items() if not key.is_torch}
        ratios = {} if torch_ratio is None else ratios
    changes = [
        Change(str(key), rates_before[key], rates[key], ratio, ratio < 1.0 - tolerance)
        for key, ratio in ratios.items()
    ]
    failed = [str(key) for key in rates_before if key in configurations and key not in rates]
    return Comparison(
        has_passed=bool(changes) and not failed and not any(change.is_slower for change in changes),
        is_relative=is_relative,
        tolerance=tolerance,
        torch_ratio=torch_ratio,
        changes=changes,
        failed=failed,
        only_before=[str(key) for key in rates_before if key not in configurations],
        only_now=[str(key) for key in rates if key not in rates_before],
    )


def differences(baseline: Result, now: Result) -> list[str]:
    """The differences between two runs apart from speed, as sentences."""
    properties = []
    for result in (baseline, now):
        machine = dict(result.machine)
        hardware = f"{machine.pop('cpu')} with {machine.pop('cores')} cores"
        properties.append(
            {
                "the machine": hardware,
                "the number of samples of the dataset": result.length,
                "the number of samples of an epoch": result.num_samples,
                "the transform": result.transform,
                **{f"the version of {name}": machine[name] for name in ("torch", "fastload", "python")},
                **{f"bytes of a sample {size}".strip(): n for size, n in result.sample_nbytes.items()},
            }
        )
    return [
        f"{name} was {before} in the baseline, and is {properties[1][name]} now"
        for name, before in properties[0].items()
        if properties[1].get(name, before) != before
    ]
