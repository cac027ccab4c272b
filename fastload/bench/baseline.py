"""Compares a benchmark with an earlier one, contender by contender, for a check that can fail.

Only later epochs are compared: the first ones depend on the start of processes. There are two comparisons:

- of samples per second, on one machine. It notices everything that makes loading slower, including changes of
  the user's dataset. It also fails if the machine is slower today.
- relative: each rate is divided by the rate of torch's loader in the same run (the geometric mean of its
  rows). A slower machine, or another one, slows both, so the quotient stays. This comparison does not notice
  that the user's dataset has become slower, because this slows both loaders too.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastload.bench.contenders import Contender
    from fastload.bench.result import Result, Row


@dataclass(frozen=True)
class Change:
    """A contender in both runs.

    Attributes:
        contender: Its settings.
        before: Samples per second in the baseline.
        now: Samples per second in this run.
        ratio: `now / before`; in a relative comparison, after both were divided by torch's rate.
        is_slower: Whether it is slower by more than the tolerance.
    """

    contender: Contender
    before: float
    now: float
    ratio: float
    is_slower: bool


@dataclass(frozen=True)
class Comparison:
    """A run and its baseline.

    Attributes:
        changes: The contenders with figures in both runs; in a relative comparison, without torch's.
        failed: Contenders that have figures in the baseline and a problem in this run.
        only_before: Contenders that this run does not have.
        only_now: Contenders that have no figures in the baseline.
        torch_ratio: How fast torch's loader was in this run, where 1 is its rate in the baseline; the
            geometric mean of its rows. None if no row is in both runs.
        is_relative: Whether rates were divided by torch's.
        tolerance: As given.
    """

    changes: list[Change]
    failed: list[Contender]
    only_before: list[Contender]
    only_now: list[Contender]
    torch_ratio: float | None
    is_relative: bool
    tolerance: float

    @property
    def slower(self) -> list[Change]:
        """The contenders that are slower by more than the tolerance."""
        return [change for change in self.changes if change.is_slower]

    @property
    def has_passed(self) -> bool:
        """Whether something was compared, and nothing has become slower or has failed."""
        return bool(self.changes) and not self.slower and not self.failed

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "has_passed": self.has_passed,
            "is_relative": self.is_relative,
            "tolerance": self.tolerance,
            "torch_ratio": self.torch_ratio,
            "changes": [{**asdict(change), "contender": str(change.contender)} for change in self.changes],
            "failed": list(map(str, self.failed)),
            "only_before": list(map(str, self.only_before)),
            "only_now": list(map(str, self.only_now)),
        }


def compare(baseline: Result, now: Result, *, tolerance: float, is_relative: bool) -> Comparison:
    """Compare a run with its baseline.

    Args:
        baseline: The earlier run.
        now: The later run.
        tolerance: The share of its rate that a contender may lose.
        is_relative: Whether rates are divided by torch's in the same run.
    """
    before = {row.contender: row for row in baseline.rows if row.is_measured}
    here = {row.contender: row for row in now.rows}
    both = {
        contender: (row, here[contender])
        for contender, row in before.items()
        if contender in here and here[contender].is_measured
    }
    torch_ratio = _torch_ratio(both)
    scale = torch_ratio if is_relative and torch_ratio is not None else 1.0
    changes = []
    for contender, (old, new) in both.items():
        if not (is_relative and contender.is_torch):
            ratio = new.rate / old.rate / scale
            changes.append(Change(contender, old.rate, new.rate, ratio, ratio < 1.0 - tolerance))
    return Comparison(
        # Without torch's rows there is nothing to be relative to.
        changes=[] if is_relative and torch_ratio is None else changes,
        failed=[contender for contender in before if contender in here and contender not in both],
        only_before=[contender for contender in before if contender not in here],
        only_now=[
            contender for contender, row in here.items() if row.is_measured and contender not in before
        ],
        torch_ratio=torch_ratio,
        is_relative=is_relative,
        tolerance=tolerance,
    )


def _torch_ratio(both: dict[Contender, tuple[Row, Row]]) -> float | None:
    ratios = [new.rate / old.rate for contender, (old, new) in both.items() if contender.is_torch]
    return statistics.geometric_mean(ratios) if ratios else None


def differences(baseline: Result, now: Result) -> list[str]:
    """The differences between two runs apart from speed, as sentences."""
    pairs: dict[str, tuple[Any, Any]] = {
        "the machine": (_named(baseline), _named(now)),
        "the number of samples of the dataset": (baseline.length, now.length),
        "the number of samples of an epoch": (baseline.num_samples, now.num_samples),
        "the transform": (baseline.transform, now.transform),
        "the version of torch": (baseline.machine.torch, now.machine.torch),
        "the version of fastload": (baseline.machine.fastload, now.machine.fastload),
        "the version of Python": (baseline.machine.python, now.machine.python),
    }
    for size in baseline.sample_nbytes.keys() & now.sample_nbytes.keys():
        pairs["bytes of a decoded sample"] = baseline.sample_nbytes[size], now.sample_nbytes[size]
    return [
        f"{name} was {before} in the baseline, and is {here} now"
        for name, (before, here) in pairs.items()
        if before != here
    ]


def _named(result: Result) -> str:
    return f"{result.machine.cpu} with {result.machine.cores} cores"
