"""Claims about the words and the chart of a benchmark, with made-up rates."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from fastload.bench import chart
from fastload.bench.baseline import compare
from fastload.bench.report import baseline_lines, ending_lines, report_lines, table_lines
from tests.bench.made_up import PLAIN, RAM, TORCH, result, row

if TYPE_CHECKING:
    from pathlib import Path

    from fastload.bench.result import Row


SETUP = {None: ["dataset = []"]}


@pytest.mark.parametrize(
    ("rows", "code", "said"),
    [
        (
            [row(TORCH, 100, 102, 98), row(RAM, 300, 290, 310)],
            'DataLoader(CachedDataset(dataset, cache="ram"), batch_size=64',
            "3.00 times torch's best here (spread 2.84 to 3.16 over 3 rounds), from the second epoch on",
        ),
        (
            [row(TORCH, 1, 1), row(RAM, 1234, 1234)],
            'cache="ram"',
            "1,234 times torch's best here (spread 1,234 to 1,234 over 2 rounds), from the second epoch on",
        ),
        (
            [row(TORCH, 100, 102, 98), row(PLAIN, 80, 81, 79)],
            "from torch.utils.data import DataLoader",
            "torch's own loader is the fastest here: fastload's best has 0.80 of its rate",
        ),
        (
            [row(TORCH, 100, 120, 80), row(PLAIN, 101, 90, 110)],
            "from fastload import DataLoader",
            "The difference is within the spread: the rounds disagree on which loader is faster",
        ),
        (
            [row(TORCH, 100), row(PLAIN, 300)],
            "from fastload import DataLoader",
            "3.00 times torch's best here, from the second epoch on. One round shows no spread",
        ),
        (
            [row(TORCH, problem="failed"), row(PLAIN, 300)],
            "from fastload import DataLoader",
            "torch's loader has no figures here, so there is no comparison",
        ),
    ],
)
def test_the_ending_has_the_fastest_code_and_only_the_gain_that_was_shown(
    rows: list[Row], code: str, said: str
) -> None:
    """Also if torch's loader is the fastest, or the rounds show no difference."""
    lines = ending_lines(result(*rows), SETUP)

    assert lines[0] == "fastest on this machine:"
    assert code in "\n".join(lines[1:4])
    assert len(lines) == 5
    assert said in lines[4]
    assert ("is within the spread" in lines[4]) == ("is within the spread" in said)


def test_a_problem_is_shown_once_below_the_table_with_its_number() -> None:
    """Text in brackets is no markup."""
    text = "failed: KeyError: [bold]"

    lines = table_lines(result(row(TORCH, 10.0, 12.0), row(PLAIN, problem=text), row(RAM, problem=text)))

    assert [line for line in lines if text in line] == [f"[1] {text}"]
    assert sum(line.endswith(" [1]") for line in lines) == 2
    assert sum("10 to 12" in line and line.endswith("1.00x") for line in lines) == 1


def test_warnings_follow_the_table() -> None:
    """A busy machine cannot be overlooked between the figures and the fastest loader."""
    lines = report_lines(result(row(TORCH, 1.0), warnings=["the machine was busy"]), SETUP)

    assert lines.index("warning: the machine was busy") < lines.index("fastest on this machine:")


def test_a_baseline_that_torch_fails_too_is_told_with_the_way_out() -> None:
    """If torch's loader is slower as well, the loader of fastload is probably not the cause."""
    before = result(row(TORCH, 100.0), row(RAM, 300.0))
    now = result(row(TORCH, 50.0), row(RAM, 150.0))

    lines = baseline_lines(compare(before, now, tolerance=0.1, is_relative=False), "old.json")

    assert sum(line.startswith("  SLOWER") for line in lines) == 2
    assert "  torch's loader runs at 0.50 of its rate in the baseline" in lines
    assert lines[-1].startswith("slower or failed: 2 of the baseline's contenders. torch's loader")


@pytest.mark.slow
def test_the_chart_has_a_place_for_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More contenders make a higher picture, with the reasons of those that failed.

    It needs no window: pyplot, which chooses a window system, is not imported.
    """
    few, many = tmp_path / "few", tmp_path / "many.png"
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)

    chart.draw(result(row(TORCH, problem="failed")), str(few))  # nothing was measured
    chart.draw(result(row(TORCH, 1.0, 2.0), *[row(PLAIN, problem="failed: $x_$ \\ it broke")] * 9), str(many))

    with Image.open(few) as low, Image.open(many) as high:
        assert (low.format, high.format) == ("PNG", "PNG")
        assert low.width == high.width
        assert low.height < high.height
