"""Claims about results with made-up rates: medians, spread, JSON and words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.bench.report import ending_lines, report_lines
from fastload.bench.result import Ratio, verdict_of
from tests.bench.made_up import PLAIN, RAM, TORCH, rates, result, results, row

if TYPE_CHECKING:
    from fastload.bench.result import Result, Row


@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=7))
def test_the_ratio_of_medians_lies_within_the_spread_of_the_rounds(pairs: list[tuple[float, float]]) -> None:
    """The lowest and the highest ratio of a round bound it."""
    ratio = Ratio.of(row(RAM, *(a for a, _ in pairs)), row(TORCH, *(b for _, b in pairs)))
    assert ratio.low <= ratio.value * (1 + 1e-9)
    assert ratio.value <= ratio.high * (1 + 1e-9)


@pytest.mark.parametrize(
    ("mine", "theirs", "is_within"),
    [
        ([110, 90, 120], [100, 100, 100], True),
        ([110, 105, 120], [100, 100, 100], False),
        ([90, 80, 95], [100, 100, 100], False),
        ([300, 30, 300], [100, 10, 100], False),  # a round that was slow was slow for both
        ([500], [100], True),  # one round shows no spread
    ],
)
def test_rounds_that_disagree_show_no_difference(mine: Any, theirs: Any, is_within: bool) -> None:
    """A gain counts only if every round shows it."""
    assert Ratio.of(row(RAM, *mine), row(TORCH, *theirs)).is_within_spread == is_within


@given(results())
def test_the_fastest_has_the_highest_median_of_all_that_were_measured(some: Result) -> None:
    """Rows that failed never win, whatever they measured before."""
    measured = [one for one in some.rows if not one.problem]
    verdict = verdict_of(some.rows)
    assert (verdict is None) == (not measured)
    if verdict is not None:
        assert verdict.fastest.rate == max(one.rate for one in measured)
        assert not verdict.fastest.problem
        assert (verdict.gain is None) == (verdict.torch is None or verdict.fastload is None)


@given(results())
def test_a_result_survives_json(some: Result) -> None:
    """Nothing is lost on the way to a file and back."""
    assert json.loads(json.dumps(some.as_dict())) == some.as_dict()


SETUP = ["dataset = []"]
CACHED, OURS = (
    'DataLoader(CachedDataset(dataset, cache="ram"), batch_size=64',
    "from fastload import DataLoader",
)
# The rates of torch's loader, of another one, the fastest code, and the words below it.
ENDINGS: list[tuple[Any, Any, str, str]] = [
    (
        [100, 102, 98],
        row(RAM, 300, 290, 310),
        CACHED,
        "3.00 times torch's best here (spread 2.84 to 3.16 over 3",
    ),
    (
        [1, 1],
        row(RAM, 1234, 1234),
        CACHED,
        "1,234 times torch's best here (spread 1,234 to 1,234 over 2 rounds)",
    ),
    ([9, 9], row(RAM, 18, 18), CACHED, "rounds), from the second epoch on"),
    (
        [100, 102, 98],
        row(PLAIN, 80, 81, 79),
        "from torch.utils",
        "the fastest here: fastload's best has 0.80 of",
    ),
    (
        [100, 120, 80],
        row(PLAIN, 101, 90, 110),
        OURS,
        "The difference is within the spread: the rounds disagree",
    ),
    (
        [100],
        row(PLAIN, 300),
        OURS,
        "3.00 times torch's best here, from the second epoch on. One round shows no",
    ),
    ([], row(PLAIN, 300), OURS, "torch's loader has no figures here, so there is no comparison"),
]


@pytest.mark.parametrize(("torchs", "other", "code", "said"), ENDINGS)
def test_the_ending_has_the_fastest_code_and_its_gain(torchs: Any, other: Row, code: str, said: str) -> None:
    """Also if torch's loader is the fastest, or the rounds show no difference."""
    lines = ending_lines(result(row(TORCH, *torchs, problem="" if torchs else "failed"), other), SETUP)
    assert lines[0] == "fastest on this machine:"
    assert code in "\n".join(lines[1:4])
    assert len(lines) == 5
    assert said in lines[4]
    assert ("is within the spread" in lines[4]) == ("is within the spread" in said)


def test_a_problem_is_shown_once_below_the_table_with_its_number() -> None:
    """A warning comes between the table and the fastest loader."""
    text = "failed: KeyError: [bold]"
    rows = row(TORCH, 10.0, 12.0), row(PLAIN, problem=text), row(RAM, problem=text)
    lines = report_lines(result(*rows, warnings=["the machine was busy"]), SETUP)
    assert [line for line in lines if text in line] == [f"[1] {text}"]
    assert sum(line.endswith(" [1]") for line in lines) == 2
    assert sum("10 to 12" in line and line.endswith("1.00x") for line in lines) == 1
    ends = (f"[1] {text}", "warning: the machine was busy", "fastest on this machine:")
    places = [lines.index(line) for line in ends]
    assert places == sorted(places)


@pytest.mark.parametrize(("nbytes", "is_told"), [(1000, True), (0, False)])
def test_a_size_that_is_not_known_is_not_told(nbytes: int, is_told: bool) -> None:
    """As of samples that a cache cannot hold."""
    lines = report_lines(result(row(TORCH, 10.0), sample_nbytes=nbytes), SETUP)
    assert any(line.startswith("a decoded sample takes") for line in lines) == is_told
