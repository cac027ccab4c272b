"""Claims about configurations with made-up rates: no test of a decision depends on the speed of a machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

import fastload
from fastload.bench.configurations import Cache, Configuration, configurations_of, default_workers
from fastload.bench.report import best_of, table_lines, verdict_lines
from fastload.bench.run import Benchmark, in_turn
from fastload.cache.random_check import spread_indices

if TYPE_CHECKING:
    from pathlib import Path


def torchs(*later: float, **changed: Any) -> Configuration:
    """Torch's loader with these rates in later epochs."""
    return ours(*later, loader="torch", **changed)


def ours(*later: float, **changed: Any) -> Configuration:
    """Fastload's loader with these rates in later epochs."""
    settings: Any = {"loader": "fastload", "cache": Cache.NONE, "num_workers": 2, "batch_size": 64, **changed}
    return Configuration(**settings, first=[rate / 2 for rate in later], later=list(later))


def benchmark(*rows: Configuration, sample_nbytes: int = 0) -> Benchmark:
    return Benchmark(list(rows), 3, length=2000, num_samples=500, sample_nbytes=sample_nbytes)


# --- the plan ---------------------------------------------------------------------------------------------


@given(st.integers(1, 10**6), st.data())
def test_spread_indices_are_distinct_and_in_order(length: int, data: st.DataObject) -> None:
    """As many as asked for, all of them indices of the dataset."""
    count = data.draw(st.integers(1, min(length, 1000)))
    found = spread_indices(length, count)
    assert len(found) == count
    assert found == sorted(set(found))
    assert 0 <= found[0] <= found[-1] < length


@pytest.mark.parametrize(
    ("num_cpus", "expected"), [(1, [0, 1]), (2, [0, 1, 2]), (9, [0, 5, 9]), (128, [0, 32])]
)
def test_default_workers_are_a_few_numbers_up_to_the_cpus(num_cpus: int, expected: list[int]) -> None:
    """None, half and all, but never hundreds."""
    assert default_workers(num_cpus) == expected


@given(rounds=st.integers(1, 6), count=st.integers(1, 40))
def test_each_round_runs_every_configuration_once_from_another_start(rounds: int, count: int) -> None:
    """The order rotates, so that no configuration is always the first."""
    rows = [ours() for _ in range(count)]
    orders = [[*map(id, in_turn(rows, number, rounds))] for number in range(rounds)]
    assert all(sorted(order) == sorted(map(id, rows)) for order in orders)
    assert len({order[0] for order in orders}) >= min(rounds, count)


def test_every_setting_takes_part_once_with_both_loaders() -> None:
    """Torch's loader has no cache: one configuration for each number of workers."""
    made = configurations_of([0, 3], 8, list(Cache), by_file=False)
    found = [(one.loader, one.cache, one.num_workers) for one in made]
    kinds = [("torch", Cache.NONE), *(("fastload", cache) for cache in Cache)]
    assert found == [(*kind, count) for kind in kinds for count in (0, 3)]


@pytest.mark.parametrize(("num_workers", "by_file"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("transform", [None, len])
@pytest.mark.parametrize(("loader", "cache"), [("torch", Cache.NONE), *(("fastload", one) for one in Cache)])
def test_the_line_makes_the_loader_that_was_measured(
    loader: str, cache: Cache, transform: Any, num_workers: int, by_file: bool, tmp_path: Path
) -> None:
    """It runs, and gives a loader of that class with these settings."""
    configuration = Configuration(loader, cache, num_workers, 3, by_file)
    line = configuration.line("dataset", has_transform=transform is not None)
    dataset = [(np.full((4, 4, 3), number, np.uint8), number) for number in range(6)]
    names: dict[str, Any] = {"dataset": dataset, "transform": transform, "fastload": fastload, "torch": torch}
    exec(line.replace("PATH", str(tmp_path / "cache")), names)
    made = names["loader"]
    assert isinstance(made, fastload.DataLoader) == (loader == "fastload")
    assert isinstance(made, torch.utils.data.DataLoader)
    assert (made.num_workers, made.batch_size) == (num_workers, 3)
    assert made.persistent_workers == (num_workers > 0)
    stores = cache != Cache.NONE and not by_file
    assert isinstance(made.dataset, fastload.CachedDataset) == (stores or transform is not None)
    assert bool(getattr(made, "cache", None)) == (by_file and cache != Cache.NONE)
    if isinstance(made.dataset, fastload.CachedDataset):
        assert made.dataset.transform is transform
        layout = {"none": "none", "ram": "uniform", "lmdb": "lmdb"}[cache] if stores else "none"
        assert made.dataset.cache_info().layout == layout


# --- the figures ------------------------------------------------------------------------------------------


rates = st.floats(1.0, 1e6)


@given(st.lists(st.tuples(rates, rates, st.booleans()), min_size=1, max_size=6))
def test_the_fastest_has_the_highest_median_of_all_that_were_measured(rows: list[Any]) -> None:
    """Rows that failed never win, whatever they measured before; nothing is lost on the way through JSON."""
    made = [
        kind(first, last, problem="failed" * failed)
        for first, last, failed in rows
        for kind in (torchs, ours)
    ]
    measured = [one for one in made if not one.problem]
    best = best_of(made)
    assert (best is None) == (not measured)
    if best is not None:
        assert best.rate == max(one.rate for one in measured)
        assert best_of(made, "torch") in [one for one in measured if one.loader == "torch"]
    plain = benchmark(*made).as_dict()
    assert json.loads(json.dumps(plain)) == plain


CACHED = "loader = fastload.DataLoader(fastload.CachedDataset(data, cache='ram'), batch_size=64"
RAM = Cache.RAM
DOUBT = "this does not show which one is faster: use more --rounds"
# The rows, the beginning of the fastest line, and what follows below it.
ENDINGS: list[tuple[Any, str, list[str]]] = [
    (
        [torchs(100, 102, 98), ours(300, 290, 310, cache=RAM)],
        CACHED,
        ["is 3.00 times as fast as torch's best from the second epoch on (2.84 to 3.16, rounds: 3)"],
    ),
    (
        [torchs(100, 102, 98), ours(80, 81, 79)],
        "loader = torch.utils.data.DataLoader(data, ",
        ["is 0.80 times as fast as torch's best from the second epoch on (0.79 to 0.81, rounds: 3)"],
    ),
    (  # a round that was slow was slow for both
        [torchs(100, 10, 100), ours(300, 30, 300)],
        "loader = fastload.DataLoader(data, ",
        ["(3.00 to 3.00, rounds: 3)"],
    ),
    (
        [torchs(100, 120, 80), ours(101, 90, 110)],
        "loader = fastload.DataLoader(data, ",
        ["(0.75 to 1.38, rounds: 3)", DOUBT],
    ),
    ([torchs(100), ours(300)], "loader = fastload.DataLoader(data, ", [", rounds: 1)", DOUBT]),
    ([torchs(problem="failed"), ours(300)], "loader = fastload.DataLoader(data, ", []),
]


@pytest.mark.parametrize(("rows", "code", "said"), ENDINGS)
def test_the_ending_has_the_fastest_line_and_its_gain(rows: Any, code: str, said: list[str]) -> None:
    """Also if torch's loader is the fastest; a gain that not every round shows is doubted."""
    first, line, *rest = verdict_lines(benchmark(*rows), "data", has_transform=False)
    assert first == "fastest here:"
    assert line.startswith(f"    {code}")
    assert len(rest) == len(said)
    assert all(text in line for text, line in zip(said, rest, strict=True))


def test_a_problem_is_shown_once_below_the_table_with_its_number() -> None:
    """Beside rows with figures."""
    text = "KeyError: [bold]"
    rows = (torchs(10.0, 12.0), ours(problem=text), ours(cache=RAM, problem=text))
    lines = table_lines(benchmark(*rows))
    assert [line for line in lines if text in line] == [f"[1] {text}"]
    assert [line.split()[-1] for line in lines[1:4]] == ["1.00x", "[1]", "[1]"]
    assert "10 to 12" in lines[1]
    assert verdict_lines(benchmark(*rows[1:]), "data", has_transform=False) == []


def test_a_cache_in_ram_that_has_no_room_for_the_whole_dataset_is_not_advised() -> None:
    """Its rates are those of the part that was measured."""
    rows = (torchs(10.0), ours(40.0, cache=RAM), ours(30.0, cache=Cache.LMDB))
    for nbytes, best, said in (1000, "'ram'", "here:"), (1 << 50, "'lmdb:PATH'", "of what has room:"):
        first, line, gain, *_ = verdict_lines(
            benchmark(*rows, sample_nbytes=nbytes), "data", has_transform=False
        )
        assert first.endswith(said)
        assert f"cache={best}" in line
        assert f" is {4 if nbytes == 1000 else 3}.00 times" in gain


@pytest.mark.parametrize(("nbytes", "said"), [(1000, ["a cache of all 2,000 samples takes 2.0 MB"]), (0, [])])
def test_the_size_of_a_cache_is_told_if_one_was_filled(nbytes: int, said: list[str]) -> None:
    """Of the whole dataset, beside the room that there is."""
    lines = table_lines(benchmark(torchs(10.0), sample_nbytes=nbytes))[2:]
    assert [line.partition(";")[0] for line in lines] == said
