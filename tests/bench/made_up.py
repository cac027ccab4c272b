"""Results with made-up rates: no test of a decision depends on the speed of a machine."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from fastload.bench.configurations import Configuration
from fastload.bench.result import Result, Row

MACHINE = {
    "cpu": "a processor",
    "cores": 4,
    "kernel": "6.1",
    "python": "3.11.7",
    "torch": "2.13.0",
    "fastload": "0.1.0",
}
TORCH = Configuration("torch", "none", 2, 64)
PLAIN = Configuration("fastload", "none", 2, 64)
RAM = Configuration("fastload", "ram", 2, 64)


def row(configuration: Configuration, *later: float, problem: str = "") -> Row:
    """A row with these rates in later epochs."""
    return Row(configuration, [rate / 2 for rate in later], list(later), problem)


def result(*rows: Row, **changed: Any) -> Result:
    """A result with these rows."""
    facts: dict[str, Any] = {
        "source": "photos",
        "length": 2000,
        "num_samples": 500,
        "sample_nbytes": 1000,
        "transform": None,
        "size": None,
        "rounds": max((len(one.later) for one in rows), default=1),
        "machine": MACHINE,
    }
    return Result(rows=list(rows), **{**facts, **changed})


rates = st.floats(1.0, 1e6)


@st.composite
def results(draw: st.DrawFn) -> Result:
    """Results of three configurations over some rounds; some of them failed."""
    rounds = draw(st.integers(1, 5))
    series = st.lists(rates, min_size=rounds, max_size=rounds)
    rows = [
        row(configuration, *draw(series), problem=draw(st.sampled_from(["", "", "", "failed"])))
        for configuration in (TORCH, PLAIN, RAM)
    ]
    return result(*rows)
