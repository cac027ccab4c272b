"""Claims about baselines: what counts as slower, what cannot be compared, and what a relative check sees."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.bench.baseline import compare, differences
from tests.bench.made_up import MACHINE, PLAIN, RAM, TORCH, result, results, row

if TYPE_CHECKING:
    from fastload.bench.result import Result

BOTH = pytest.mark.parametrize("is_relative", [False, True])


def scaled(some: Result, factor: float) -> Result:
    """The same on a machine that is this many times as fast."""
    rows = [
        row(one.contender, *(factor * rate for rate in one.later), problem=one.problem) for one in some.rows
    ]
    return dataclasses.replace(some, rows=rows)


@BOTH
@given(some=results(), tolerance=st.floats(0.0, 1.0))
def test_nothing_is_slower_than_itself(some: Result, tolerance: float, is_relative: bool) -> None:
    """A run compared with itself has ratios of 1, whatever the tolerance is."""
    found = compare(some, some, tolerance=tolerance + 1e-9, is_relative=is_relative)

    assert found.slower == []
    assert found.failed == []
    assert [change.ratio for change in found.changes] == pytest.approx([1.0] * len(found.changes))
    assert found.has_passed == bool(found.changes)


@given(some=results(), factor=st.floats(0.1, 10.0))
def test_a_slower_machine_changes_the_rates_but_not_what_is_relative(some: Result, factor: float) -> None:
    """All rates are slower by its factor, and their quotients by torch's rate stay."""
    other = scaled(some, factor)

    plain = compare(some, other, tolerance=0.05, is_relative=False)
    relative = compare(some, other, tolerance=0.05, is_relative=True)

    assert [change.ratio for change in plain.changes] == pytest.approx([factor] * len(plain.changes))
    assert [change.ratio for change in relative.changes] == pytest.approx([1.0] * len(relative.changes))
    assert relative.slower == []


@pytest.mark.parametrize(
    ("rates", "is_slower"), [([90], False), ([89], True), ([1000], False), ([1, 100, 101], False)], ids=str
)
def test_slower_is_a_loss_of_more_than_the_tolerance(rates: list[float], is_slower: bool) -> None:
    """Of 100 samples/s, 10% may be lost; a gain is no error. Medians of the rounds are compared."""
    before, now = result(row(PLAIN, *[100.0] * len(rates))), result(row(PLAIN, *rates))
    found = compare(before, now, tolerance=0.1, is_relative=False)

    assert [change.is_slower for change in found.changes] == [is_slower]
    assert found.has_passed != is_slower


def test_a_loss_against_torch_is_seen_on_a_faster_machine() -> None:
    """Torch's loader is twice as fast here, and fastload's only as fast as before: relative to it, half."""
    before = result(row(TORCH, 100.0), row(RAM, 300.0))
    now = result(row(TORCH, 200.0), row(RAM, 310.0))

    assert compare(before, now, tolerance=0.1, is_relative=False).has_passed
    slower = compare(before, now, tolerance=0.1, is_relative=True).slower
    assert [(change.contender, round(change.ratio, 2)) for change in slower] == [(str(RAM), 0.52)]


def test_contenders_of_one_side_are_named() -> None:
    """They are no failure: the user asked for other settings."""
    found = compare(
        result(row(TORCH, 100.0), row(PLAIN, 100.0)),
        result(row(TORCH, 100.0), row(RAM, 100.0)),
        tolerance=0.1,
        is_relative=False,
    )

    assert (found.only_before, found.only_now) == ([str(PLAIN)], [str(RAM)])
    assert found.has_passed


@BOTH
def test_a_contender_that_fails_now_fails_the_check(is_relative: bool) -> None:
    """It had figures in the baseline, so that something broke."""
    found = compare(
        result(row(TORCH, 100.0), row(PLAIN, 1.0), row(RAM, 100.0)),
        result(row(TORCH, 100.0), row(PLAIN, 1.0), row(RAM, problem="failed: it broke")),
        tolerance=0.1,
        is_relative=is_relative,
    )

    assert found.failed == [str(RAM)]
    assert not found.has_passed


@pytest.mark.parametrize(
    ("before", "now", "is_relative"),
    [
        (result(row(PLAIN, 1.0)), result(row(RAM, 1.0)), False),
        (result(row(PLAIN, 1.0)), result(row(PLAIN, 1.0)), True),  # torch's loader has no figures
        (result(row(TORCH, 1.0)), result(row(TORCH, 1.0)), True),  # nothing but torch's loader
    ],
)
def test_a_check_that_compares_nothing_does_not_pass(before: Result, now: Result, is_relative: bool) -> None:
    """It would hide every regression."""
    assert not compare(before, now, tolerance=0.1, is_relative=is_relative).has_passed


def test_differences_apart_from_speed_are_said() -> None:
    """Another dataset, part of it, torch or machine makes the comparison doubtful."""
    before = result(row(TORCH, 1.0))
    machine = {**MACHINE, "torch": "2.14.0", "cores": 8}
    now = result(row(TORCH, 1.0), length=2100, num_samples=400, sample_nbytes={"": 2000}, machine=machine)

    assert differences(before, before) == []
    assert differences(before, now) == [
        "the machine was a processor with 4 cores in the baseline, and is a processor with 8 cores now",
        "the number of samples of the dataset was 2000 in the baseline, and is 2100 now",
        "the number of samples of an epoch was 500 in the baseline, and is 400 now",
        "the version of torch was 2.13.0 in the baseline, and is 2.14.0 now",
        "bytes of a sample was 1000 in the baseline, and is 2000 now",
    ]
