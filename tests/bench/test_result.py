"""Claims about results: medians, spread, which contender is the fastest, and the JSON format."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.bench.result import Ratio, Result, verdicts
from tests.bench.made_up import PLAIN, RAM, TORCH, rates, result, results, row


class TestRatio:
    @given(st.lists(st.tuples(rates, rates), min_size=1, max_size=7))
    def test_the_ratio_of_medians_lies_within_the_spread_of_the_rounds(
        self, pairs: list[tuple[float, float]]
    ) -> None:
        """The lowest and the highest ratio of a round bound it."""
        ratio = Ratio.of(row(RAM, *(a for a, _ in pairs)), row(TORCH, *(b for _, b in pairs)))

        assert ratio.low <= ratio.value * (1 + 1e-9)
        assert ratio.value <= ratio.high * (1 + 1e-9)

    def test_runs_of_one_round_are_compared_with_each_other(self) -> None:
        """A machine that was slow in one round was slow for both, so that the ratio has no spread."""
        ratio = Ratio.of(row(RAM, 300, 30, 300), row(TORCH, 100, 10, 100))

        assert (ratio.value, ratio.low, ratio.high) == (3.0, 3.0, 3.0)
        assert not ratio.is_within_spread

    @pytest.mark.parametrize(
        ("mine", "theirs", "is_within"),
        [
            ([110, 90, 120], [100, 100, 100], True),
            ([110, 105, 120], [100, 100, 100], False),
            ([90, 80, 95], [100, 100, 100], False),
            ([500], [100], True),  # one round shows no spread
        ],
    )
    def test_rounds_that_disagree_show_no_difference(
        self, mine: list[float], theirs: list[float], is_within: bool
    ) -> None:
        """A gain counts only if every round shows it."""
        assert Ratio.of(row(RAM, *mine), row(TORCH, *theirs)).is_within_spread == is_within


class TestVerdict:
    @given(results())
    def test_the_fastest_has_the_highest_median_of_all_that_were_measured(self, some: Result) -> None:
        """Rows that failed never win, whatever they measured before."""
        measured = [one for one in some.rows if not one.problem]
        found = verdicts(some.rows)

        assert len(found) == (1 if measured else 0)
        for verdict in found:
            assert verdict.fastest.rate == max(one.rate for one in measured)
            assert not verdict.fastest.problem
            assert (verdict.gain is None) == (verdict.torch is None or verdict.fastload is None)

    def test_sizes_do_not_compete(self) -> None:
        """Smaller images are less work: each size has a verdict of its own."""
        rows = [
            row(dataclasses.replace(contender, size=size), rate)
            for size, rate in (("32x32", 1000.0), ("64x64", 250.0))
            for contender in (TORCH, PLAIN)
        ]

        found = verdicts(rows)

        assert [(one.size, one.fastest.rate) for one in found] == [("32x32", 1000.0), ("64x64", 250.0)]


class TestJSON:
    @given(results())
    def test_a_result_survives_json(self, some: Result) -> None:
        """Nothing is lost on the way to a file and back."""
        assert Result.from_dict(json.loads(json.dumps(some.as_dict()))).as_dict() == some.as_dict()

    @pytest.mark.parametrize(
        ("plain", "said"),
        [
            ([], "missing or wrong"),
            ({}, "missing or wrong"),
            ({"format": "fastload bench", "version": 99}, "version 99"),
            ({"format": "fastload bench", "version": 2}, "missing or wrong"),
        ],
    )
    def test_other_data_are_refused_with_the_reason(self, plain: Any, said: str) -> None:
        """A baseline that was edited or is of another version raises no KeyError."""
        with pytest.raises(ValueError, match=said):
            Result.from_dict(plain)

    @pytest.mark.parametrize("name", ["rows", "machine", "num_samples"])
    def test_a_part_that_is_missing_is_named(self, name: str) -> None:
        """The error names the part."""
        plain = result(row(TORCH, 1.0)).as_dict()
        del plain[name]

        with pytest.raises(ValueError, match=name):
            Result.from_dict(plain)
