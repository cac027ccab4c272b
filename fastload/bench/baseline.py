"""Compares a benchmark with an earlier one, contender by contender, for a check that can fail.

Only later epochs are compared: the first ones depend on the start of processes. There are two comparisons:

- of samples per second, on one machine. It notices everything that slows loading down, including changes of
  the user's dataset. It also fails if the machine is slower today.
- relative: each rate is divided by the rate of torch's loader in the same run (the geometric mean of its
  rows). A slower or different machine slows both, so the quotient stays. This comparison does not notice that
  the user's dataset has become slower, because this also slows both loaders.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastload.bench.result import Result


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

    contender: str
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
        tolerance: The share of its rate that a contender can lose.
        torch_ratio: How fast torch's loader was in this run, where 1 is its rate in the baseline; the
            geometric mean of its rows. None if no row is in both runs.
        changes: The contenders with figures in both runs; in a relative comparison, without torch's.
        failed: Contenders that have figures in the baseline and a problem in this run.
        only_before: Contenders that this run does not have.
        only_now: Contenders that have no figures in the baseline.
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
        """The contenders that are slower by more than the tolerance."""
        return [change for change in self.changes if change.is_slower]


def compare(baseline: Result, now: Result, *, tolerance: float, is_relative: bool) -> Comparison:
    """Compare a run with its baseline.

    Args:
        baseline: The earlier run.
        now: The later run.
        tolerance: The share of its rate that a contender can lose.
        is_relative: Whether rates are divided by torch's in the same run.
    """
    before = {row.contender: row.rate for row in baseline.rows if row.is_measured}
    here = {row.contender: row.rate for row in now.rows if row.is_measured}
    present = {row.contender for row in now.rows}
    ratios = {one: here[one] / rate for one, rate in before.items() if one in here}
    of_torch = [ratio for one, ratio in ratios.items() if one.is_torch]
    torch_ratio = statistics.geometric_mean(of_torch) if of_torch else None
    if is_relative:  # without torch's rows there is nothing to be relative to
        ratios = {one: ratio / (torch_ratio or 1) for one, ratio in ratios.items() if not one.is_torch}
        ratios = {} if torch_ratio is None else ratios
    changes = [
        Change(str(one), before[one], here[one], ratio, ratio < 1.0 - tolerance)
        for one, ratio in ratios.items()
    ]
    failed = [str(one) for one in before if one in present and one not in here]
    return Comparison(
        has_passed=bool(changes) and not failed and not any(change.is_slower for change in changes),
        is_relative=is_relative,
        tolerance=tolerance,
        torch_ratio=torch_ratio,
        changes=changes,
        failed=failed,
        only_before=[str(one) for one in before if one not in present],
        only_now=[str(one) for one in here if one not in before],
    )


def differences(baseline: Result, now: Result) -> list[str]:
    """The differences between two runs apart from speed, as sentences."""
    facts = []
    for result in (baseline, now):
        machine = dict(result.machine)
        hardware = f"{machine.pop('cpu')} with {machine.pop('cores')} cores"
        facts.append(
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
        f"{name} was {before} in the baseline, and is {facts[1][name]} now"
        for name, before in facts[0].items()
        if facts[1].get(name, before) != before
    ]
