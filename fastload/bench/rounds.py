"""Runs all contenders in turn, round after round.

In each round every contender runs once, so that a slow minute of the machine reaches all of them. Each round
begins with another contender.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastload.bench.apart import RunFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastload.bench.contenders import Contender
    from fastload.bench.measure import Epochs
    from fastload.bench.result import Row


def order_of(number: int, rounds: int, count: int) -> list[int]:
    """The order of `count` contenders in a round: each starts at another place of the list."""
    first = number * max(1, count // max(1, rounds)) % max(1, count)
    return [(first + place) % count for place in range(count)]


def run_rounds(
    rows: Sequence[Row],
    rounds: int,
    measure: Callable[[Contender], Epochs],
    on_run: Callable[[int, Row], None] = lambda number, row: None,
) -> None:
    """Measure all rows that have no problem; an error of one becomes its problem, and the others go on.

    Rows are filled as the runs end, so that an interruption leaves what was measured.

    Args:
        rows: Of the contenders.
        rounds: How often each one runs.
        measure: Runs a contender once.
        on_run: Called before each run, with the number of the round from 0.
    """
    for number in range(rounds):
        for place in order_of(number, rounds, len(rows)):
            row = rows[place]
            if row.problem:
                continue
            on_run(number, row)
            try:
                epochs = measure(row.contender)
            except RunFailedError as error:
                row.problem = f"failed: {error}"
            else:
                row.first.append(epochs.first)
                row.later.append(epochs.later)
