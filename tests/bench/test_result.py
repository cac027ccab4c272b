"""Claims about results with made-up rates: medians, spread, JSON, baselines, words and the chart."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fastload.bench import report
from fastload.bench.report import baseline_lines, ending_lines, report_lines
from fastload.bench.result import Ratio, Result, compare, differences, verdicts
from tests.bench.made_up import MACHINE, PLAIN, RAM, TORCH, rates, result, results, row

if TYPE_CHECKING:
    from pathlib import Path

    from fastload.bench.result import Row


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
    found = verdicts(some.rows)
    assert len(found) == (1 if measured else 0)
    for verdict in found:
        assert verdict.fastest.rate == max(one.rate for one in measured)
        assert not verdict.fastest.problem
        assert (verdict.gain is None) == (verdict.torch is None or verdict.fastload is None)


def test_sizes_do_not_compete() -> None:
    """Smaller images are less work: each size has a verdict of its own."""
    rows = [
        row(dataclasses.replace(configuration, size=size), rate)
        for size, rate in (("32x32", 1000.0), ("64x64", 250.0))
        for configuration in (TORCH, PLAIN)
    ]
    found = verdicts(rows)
    assert [(one.size, one.fastest.rate) for one in found] == [("32x32", 1000.0), ("64x64", 250.0)]


@given(results())
def test_a_result_survives_json(some: Result) -> None:
    """Nothing is lost on the way to a file and back."""
    assert Result.from_dict(json.loads(json.dumps(some.as_dict()))).as_dict() == some.as_dict()


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        *(([], "missing or wrong"), ({}, "missing or wrong")),
        ({"format": "fastload bench", "version": 99}, "version 99"),
        *((name, name) for name in ("rows", "machine", "num_samples")),
    ],
)
def test_other_data_are_refused_with_the_reason(plain: Any, said: str) -> None:
    """A baseline that was edited or is of another version raises no KeyError; a missing part is named."""
    if isinstance(plain, str):
        plain = {name: part for name, part in result(row(TORCH, 1.0)).as_dict().items() if name != plain}
    with pytest.raises(ValueError, match=said):
        Result.from_dict(plain)


@given(some=results(), factor=st.floats(0.1, 10.0))
def test_a_slower_machine_changes_the_rates_but_not_what_is_relative(some: Result, factor: float) -> None:
    """All rates are slower by its factor, and their quotients by torch's rate stay."""
    rows = [
        row(one.configuration, *(factor * n for n in one.later), problem=one.problem) for one in some.rows
    ]
    other = dataclasses.replace(some, rows=rows)
    for now, is_relative, ratio in ((some, False, 1.0), (other, False, factor), (other, True, 1.0)):
        found = compare(some, now, tolerance=0.05, is_relative=is_relative)
        assert [change.ratio for change in found.changes] == pytest.approx([ratio] * len(found.changes))
        assert found.failed == []
        if ratio == 1.0:
            assert found.slower == []
            assert found.has_passed == bool(found.changes)


LOSES = [row(TORCH, 100.0), row(RAM, 300.0)], [row(TORCH, 200.0), row(RAM, 310.0)]  # against torch alone
BROKE = [[row(TORCH, 100.0), row(PLAIN, 1.0), ram] for ram in (row(RAM, 100.0), row(RAM, problem="it broke"))]


@pytest.mark.parametrize(
    ("before", "now", "is_relative", "slower", "failed", "has_passed"),
    [
        *(
            ([row(PLAIN, *[100.0] * len(rates))], [row(PLAIN, *rates)], False, slower, [], not slower)
            for rates, slower in (([90], []), ([89], [PLAIN]), ([1000], []), ([1, 100, 101], []))
        ),
        (*LOSES, False, [], [], True),
        (*LOSES, True, [RAM], [], False),
        *((*BROKE, is_relative, [], [RAM], False) for is_relative in (False, True)),
        # A check that compares nothing would hide every regression.
        ([row(PLAIN, 1.0)], [row(RAM, 1.0)], False, [], [], False),
        ([row(PLAIN, 1.0)], [row(PLAIN, 1.0)], True, [], [], False),  # torch's loader has no figures
        ([row(TORCH, 1.0)], [row(TORCH, 1.0)], True, [], [], False),  # nothing but torch's loader
    ],
)
def test_what_passes(
    before: Any, now: Any, is_relative: bool, slower: list[Any], failed: list[Any], has_passed: bool
) -> None:
    """A loss of 10% of the medians is tolerated; more, or a configuration that fails now, fails the check."""
    found = compare(result(*before), result(*now), tolerance=0.1, is_relative=is_relative)
    assert [change.configuration for change in found.slower] == [str(one) for one in slower]
    assert found.failed == [str(one) for one in failed]
    assert found.has_passed == has_passed


def test_configurations_of_one_side_are_named() -> None:
    """They are no failure: the user asked for other settings."""
    before, now = (result(row(TORCH, 100.0), row(other, 100.0)) for other in (PLAIN, RAM))
    found = compare(before, now, tolerance=0.1, is_relative=False)
    assert (found.only_before, found.only_now) == ([str(PLAIN)], [str(RAM)])
    assert found.has_passed


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


SETUP = {None: ["dataset = []"]}
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
    """Text in brackets is no markup. A warning comes between the table and the fastest loader."""
    text = "failed: KeyError: [bold]"
    rows = row(TORCH, 10.0, 12.0), row(PLAIN, problem=text), row(RAM, problem=text)
    lines = report_lines(result(*rows, warnings=["the machine was busy"]), SETUP)
    assert [line for line in lines if text in line] == [f"[1] {text}"]
    assert sum(line.endswith(" [1]") for line in lines) == 2
    assert sum("10 to 12" in line and line.endswith("1.00x") for line in lines) == 1
    ends = (f"[1] {text}", "warning: the machine was busy", "fastest on this machine:")
    places = [lines.index(line) for line in ends]
    assert places == sorted(places)


def test_a_baseline_that_torch_fails_too_is_told_with_the_way_out() -> None:
    """If torch's loader is slower as well, the loader of fastload is probably not the cause."""
    before = result(row(TORCH, 100.0), row(RAM, 300.0))
    now = result(row(TORCH, 50.0), row(RAM, 150.0))
    lines = baseline_lines(compare(before, now, tolerance=0.1, is_relative=False), "old.json")
    assert sum(line.startswith("  SLOWER") for line in lines) == 2
    assert "  torch's loader runs at 0.50 of its rate in the baseline" in lines
    assert lines[-1].startswith("slower or failed: 2 of the baseline's configurations. torch's loader")


@pytest.mark.slow
def test_the_chart_has_a_place_for_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More configurations make a higher picture. Pyplot, which chooses a window system, is not imported."""
    few, many = tmp_path / "few", tmp_path / "many.png"
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    report.draw(result(row(TORCH, problem="failed")), str(few))  # nothing was measured
    report.draw(
        result(row(TORCH, 1.0, 2.0), *[row(PLAIN, problem="failed: $x_$ \\ it broke")] * 9), str(many)
    )
    with Image.open(few) as low, Image.open(many) as high:
        assert (low.format, high.format) == ("PNG", "PNG")
        assert low.width == high.width
        assert low.height < high.height
