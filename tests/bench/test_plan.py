"""Claims about the plan and the machine: configurations, their code, samples, rounds, a busy machine."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

import fastload
from fastload.bench.configurations import CACHES, Configuration, configurations_of
from fastload.bench.run import default_workers, in_turn
from fastload.cache.build.random_check import spread_indices
from fastload.system.cpus import CpuTimes, busy_share, others_share
from tests.bench.made_up import PLAIN, row

if TYPE_CHECKING:
    from pathlib import Path


@given(st.integers(1, 10**6), st.data())
def test_spread_indices_are_distinct_and_in_order(length: int, data: st.DataObject) -> None:
    """As many as asked for, all of them indices of the dataset."""
    count = data.draw(st.integers(1, min(length, 1000)))
    found = spread_indices(length, count)
    assert len(found) == count
    assert found == sorted(set(found))
    assert 0 <= found[0] <= found[-1] < length


@pytest.mark.parametrize(
    ("num_cpus", "expected"), [(1, (0, 1)), (2, (0, 1, 2)), (9, (0, 5, 9)), (128, (0, 32))]
)
def test_default_workers_are_a_few_numbers_up_to_the_cpus(num_cpus: int, expected: tuple[int, ...]) -> None:
    """None, half and all, but never hundreds."""
    assert default_workers(num_cpus) == expected


@given(rounds=st.integers(1, 6), count=st.integers(1, 40))
def test_each_round_runs_every_configuration_once_from_another_start(rounds: int, count: int) -> None:
    """The order rotates, so that no configuration is always the first."""
    rows = [row(PLAIN) for _ in range(count)]
    orders = [[*map(id, in_turn(rows, number, rounds))] for number in range(rounds)]
    assert all(sorted(order) == sorted(map(id, rows)) for order in orders)
    assert len({order[0] for order in orders}) >= min(rounds, count)


@pytest.mark.parametrize(
    ("busy_s", "own_s", "share"), [(8.0, 8.0, 0.0), (8.0, 4.0, 0.2), (20.0, 0.0, 1.0), (1.0, 3.0, 0.0)]
)
def test_the_share_of_others_is_cpu_time_not_ours(busy_s: float, own_s: float, share: float) -> None:
    """Of two CPUs over ten seconds."""
    before, after = CpuTimes(100.0, 50.0, 7.0), CpuTimes(110.0, 50.0 + busy_s, 7.0 + own_s)
    assert others_share(before, after, num_cpus=2) == pytest.approx(share)
    assert busy_share(before, after, num_cpus=2) == pytest.approx(min(busy_s / 20, 1.0))


def test_the_clocks_are_those_of_our_cpus_without_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU 1 is not ours; idle and iowait are no work, and the time of guests is counted already."""
    names = "user nice system idle iowait irq softirq steal guest guest_nice"
    times = collections.namedtuple("times", names)  # type: ignore[misc]
    readings = [times(1.0, 0.2, 0.3, 9.9, 9.9, 0.04, 0.05, 0.41, 0.7, 0.7), times(*[9.0] * 10)]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: readings)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert CpuTimes.now().busy_s == pytest.approx(2.0)

    def fail(percpu: bool) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", fail)  # without /proc, the share is unknown
    reading = CpuTimes.now()
    assert (reading.busy_s, others_share(reading, reading)) == (None, None)


@pytest.mark.slow
def test_children_are_ours_while_they_live() -> None:
    """Workers of a loader may live on after the last reading."""
    burn = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); sys.stdin.read()"
    command = [sys.executable, "-S", "-c", burn]
    before = CpuTimes.now()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = CpuTimes.now()
        child.communicate()
    assert during.own_s - before.own_s >= 0.15
    assert CpuTimes.now().own_s >= during.own_s - 1e-6  # they are sums of floats


SWEEPS = st.fixed_dictionaries(
    {
        "workers": st.lists(st.integers(0, 4), min_size=1, unique=True),
        "batch_sizes": st.lists(st.integers(1, 512), min_size=1, max_size=3, unique=True),
        "caches": st.lists(st.sampled_from(CACHES), min_size=1, unique=True),
    }
)


@given(SWEEPS)
def test_every_setting_takes_part_once_with_both_loaders(sweep: dict[str, list[Any]]) -> None:
    """Torch's loader has no cache: one configuration for each number of workers and batch size."""
    found = configurations_of(**sweep)
    assert len(set(found)) == len(found)
    for loader in ("torch", "fastload"):
        some = [one for one in found if one.loader == loader]
        assert {one.num_workers for one in some} == set(sweep["workers"])
        assert {one.batch_size for one in some} == set(sweep["batch_sizes"])
        assert {one.cache for one in some} == (set(sweep["caches"]) if loader == "fastload" else {"none"})


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("transform", [None, len])
@pytest.mark.parametrize(("loader", "cache"), [("torch", "none"), *(("fastload", cache) for cache in CACHES)])
def test_the_lines_make_the_loader_that_was_measured(
    loader: str, cache: str, transform: Any, num_workers: int, tmp_path: Path
) -> None:
    """They run, and give a loader of that class with these settings."""
    configuration = Configuration(loader, cache, num_workers, 3)
    lines = configuration.code(has_transform=transform is not None, lmdb_path=str(tmp_path / "cache"))
    dataset = [(np.full((4, 4, 3), number, np.uint8), number) for number in range(6)]
    names: dict[str, Any] = {"dataset": dataset, "transform": transform}
    exec("\n".join(lines), names)
    made = names["loader"]
    assert isinstance(made, fastload.DataLoader) == (loader == "fastload")
    assert isinstance(made, torch.utils.data.DataLoader)
    assert (made.num_workers, made.batch_size) == (num_workers, 3)
    assert made.persistent_workers == (num_workers > 0)
    assert isinstance(made.dataset, fastload.CachedDataset) == (cache != "none" or transform is not None)
    if isinstance(made.dataset, fastload.CachedDataset):
        assert made.dataset.transform is transform
        assert made.dataset.cache.layout == {"none": "none", "ram": "uniform", "lmdb": "lmdb"}[cache]
