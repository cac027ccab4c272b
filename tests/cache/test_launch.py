"""Ranks of one launch share caches without fingerprint and key, if their datasets are equal.

tests/distributed/test_launchers.py has real launchers. Here ranks are forks of the test.
"""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Subset

from fastload.cache import launch
from fastload.cache.dataset import CachedDataset
from fastload.cache.likeness import likeness, probed_indices
from fastload.cache.ram import owners
from fastload.memory.shared_list import SharedList
from fastload.nested.tree import first_difference
from fastload.system import logs
from tests.cache.build_zoo import BrokenImages, exit_codes
from tests.cache.zoo import BareImages, Images

pytestmark = pytest.mark.usefixtures("registry")
LENGTH = 30
UNPROBED = next(index for index in range(LENGTH) if index not in probed_indices(LENGTH))


def join(rank: int, store: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def run_ranks(start: Any, folder: Any, cases: Any, caplog: Any) -> list[Any]:
    """Open caches in two ranks; for each, by rank: which rank made it, why it is used, and the warnings."""

    def open_in_turn(rank: int) -> tuple[Any, Any]:
        join(rank, folder / "store")
        opened, found = [], []
        for make in cases:
            dataset, options = make(rank)
            caplog.clear()
            logs.say_once.cache_clear()
            for turn in range(2):  # rank 0 first
                if turn == rank:
                    ds = CachedDataset(dataset, **options)
                    ds.fill(num_workers=0)
                dist.barrier()
            assert all(first_difference(ds._view(i), ds._source[i]) is None for i in range(len(ds)))
            opened.append(ds)
            found.append((ds.cache.origin.pid, ds.explain(), caplog.messages))
        return opened, found

    ranks = [start(open_in_turn, rank) for rank in range(2)]
    pids = [rank.pid for rank in ranks]
    both = zip(*[rank.answer() for rank in ranks], strict=True)
    return [[(pids.index(maker), *others) for maker, *others in found] for found in both]


class Holding(Images):
    """Images with one more attribute."""

    def __init__(self, held: Any) -> None:
        super().__init__(LENGTH)
        self.held = held


EQUAL: dict[str, Any] = {
    "a class": lambda rank: Images(LENGTH),
    "a list": lambda rank: [np.full((4, 4, 3), index, np.uint8) for index in range(LENGTH)],
    "a subset": lambda rank: Subset(Images(40), range(5, 35)),
    "one sample": lambda rank: Images(1),
    "a function": lambda rank: Holding([lambda: rank]),
    "generators": lambda rank: Holding((random.Random(rank), np.random.default_rng(rank), torch.Generator())),
    "a pipeline": lambda rank: Holding(A.Compose([A.Normalize(), A.HorizontalFlip()])),
    "a lock": lambda rank: Holding({"lock": threading.Lock(), "local": threading.local()}),
    "a file": lambda rank: Holding(open(f"/proc/{os.getpid()}/stat")),  # noqa: SIM115  # ends with the rank
    "tensors": lambda rank: Holding([torch.arange(9.0), torch.ones(3, dtype=torch.bfloat16)[::2]]),
    "an array of objects": lambda rank: Holding(np.array(["a", None, {1}], dtype=object)),
    "a shared list": lambda rank: Holding(SharedList([{"label": 1}, {"label": 2}])),
    "a list twice or two equal lists": lambda rank: Holding([[1, 2]] * 2 if rank else [[1, 2], [1, 2]]),
    "a list that contains itself": lambda rank: Holding(ENDLESS),
}
ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
PREPARED: dict[str, Any] = {"a pipeline": A.Resize(8, 8), "a function": lambda sample: sample}


def test_samples_are_read_once_but_for_those_compared(start: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """The second rank reads what it compares, readable or not; forks and workers of a rank are no ranks."""
    probed = probed_indices(LENGTH)
    images = Images(LENGTH, log=tmp_path / "reads"), BrokenImages(LENGTH, bad=probed[-1:])

    def fill(rank: int, store: Any) -> tuple[Any, Any]:
        join(rank, store)
        opened = [CachedDataset(dataset) for dataset in images]
        dist.barrier()
        if rank == 0:
            opened[0].fill(num_workers=0)
        dist.barrier()
        names, codes = launch.names(), exit_codes(lambda: os._exit(7 if launch.names() == [] else 1))
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: "a worker")
        helpers = names != [], codes, launch.names()
        return opened, (opened[0].fill(num_workers=0).num_cached, opened[1].cache.origin.pid, helpers)

    ranks = [start(fill, rank, tmp_path / "store") for rank in range(2)]
    counts, makers, helpers = zip(*(rank.answer() for rank in ranks), strict=True)

    assert counts == (LENGTH, LENGTH)
    assert makers[0] == makers[1]
    assert helpers == ((True, [7], []),) * 2
    assert {i for i, count in enumerate(images[0].reads) if count != 1} == set(probed)
    assert sum(images[0].reads) == LENGTH + len(probed) + 4  # each rank reads two samples again


class Globals(Images):
    """What it gives depends on what no attribute tells."""

    offset = 0

    def sample(self, index: int) -> Any:
        return super().sample(index + Globals.offset)


class Blank(Globals):
    """The samples that are compared are all alike; others depend on what no attribute tells."""

    def sample(self, index: int) -> Any:
        return super().sample(index) if index == UNPROBED else np.zeros((4, 4, 3), np.uint8)


def with_offset(kind: type[Globals], rank: int) -> Globals:
    Globals.offset = rank
    return kind(LENGTH)


def swapped(rank: int) -> list[int]:
    """The same indices, but for one that is not compared."""
    return [35 if rank and index == UNPROBED else index for index in range(LENGTH)]


DIFFERENT: dict[str, tuple[Any, str]] = {
    "classes": (lambda rank: [Images, BareImages][rank](LENGTH), 'class is "tests.cache.zoo.BareImages in'),
    "lengths": (lambda rank: Images(LENGTH + rank), "num_samples is"),
    "indices": (lambda rank: Subset(Images(40), swapped(rank)), "attribute indices is"),
    "folds": (lambda rank: Holding(swapped(rank)), "attribute held is"),
    "folds below a lock": (lambda rank: Holding([threading.Lock(), swapped(rank)]), "attribute held is"),
    "arrays": (lambda rank: Holding(np.array(swapped(rank))), "attribute held is"),
    "tensors": (lambda rank: Holding(torch.tensor(swapped(rank))), "attribute held is"),
    "an attribute more": (lambda rank: [Images(LENGTH), Holding(0)][rank], "class is"),
    "samples": (lambda rank: with_offset(Globals, rank), "samples 0, 15, 29"),
    "samples that are alike": (lambda rank: with_offset(Blank, rank), "are all alike"),
    "elements": (lambda rank: [np.full(4, i) for i in swapped(rank)], "attribute content is"),
}


@pytest.mark.slow
def test_ranks_share_a_cache_if_their_datasets_are_equal(start: Any, tmp_path: Any, caplog: Any) -> None:
    """Nobody need name the samples; others keep their own, and a warning names the part that differs."""
    cases = [
        *((lambda rank, make=make: (make(rank), {}), "") for make in EQUAL.values()),
        *((lambda rank, part=part: (Images(LENGTH), {"prepare": part}), "") for part in PREPARED.values()),
        *((lambda rank, make=make: (make(rank), {}), said) for make, said in DIFFERENT.values()),
        (lambda rank: (Images(LENGTH), {"prepare": A.Resize(8, 8 + rank)}), "prepare"),
    ]
    names = [*EQUAL, *PREPARED, *DIFFERENT, "prepare"]
    found = run_ranks(start, tmp_path, [make for make, _ in cases], caplog)
    for name, (_, said), (first, second) in zip(names, cases, found, strict=True):
        assert (name, first[0], second[0]) == (name, 0, 1 if said else 0)
        if said:
            (warning,) = second[2]
            assert "private to this process and its workers" in warning
            assert said in warning
            assert warning.removeprefix("cache: ") in second[1].replace("\n", " ")
            continue
        for _, why, warnings in (first, second):
            assert (name, warnings) == (name, [])
            assert "shared as cache" in why
            assert "of the ranks of process group" in why


@pytest.mark.slow
def test_a_cache_that_only_one_rank_makes_costs_the_others_no_wait(start: Any, tmp_path: Any) -> None:
    """The n-th caches are then of different datasets, and each rank keeps its own; so do two jobs."""

    def open_more(rank: int, store: Any, is_uneven: bool) -> tuple[Any, Any]:
        join(rank, store)
        extra = CachedDataset(Images(7)) if rank == 0 and is_uneven else None
        dist.barrier()
        ds = CachedDataset(Images(LENGTH))
        ds.fill(num_workers=0)
        return (ds, extra), (ds.cache.origin.pid, first_difference(ds[4], Images(LENGTH).sample(4)))

    jobs = [("one", True), ("two", False), ("three", False)]
    ranks = [start(open_more, rank, tmp_path / job, uneven) for job, uneven in jobs for rank in range(2)]
    makers, differences = zip(*(rank.answer() for rank in ranks), strict=True)
    assert makers[:2] == tuple(rank.pid for rank in ranks[:2])
    assert makers[2] == makers[3] != makers[4] == makers[5]
    assert differences == (None,) * 6


TORCHRUN = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("one", "other", "is_one"),
    [
        ({}, {"LOCAL_RANK": "1"}, True),
        ({}, {"LOCAL_RANK": "1", "MASTER_PORT": "2"}, False),
        ({}, {"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "again"}, False),
        ({}, {"LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({"LOCAL_WORLD_SIZE": "1"}, {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "1"}, False),
        ({"MASTER_PORT": None}, {"MASTER_PORT": None, "LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": None}, {"LOCAL_RANK": None}, False),  # two scripts of a shell
        ({"LOCAL_WORLD_SIZE": None}, {"LOCAL_WORLD_SIZE": None, "LOCAL_RANK": "1"}, True),
        ({}, {"LOCAL_RANK": "1", "parent": os.getppid()}, False),  # as two nodes on one host
    ],
)
def test_the_launcher_s_variables_tell_ranks_from_other_processes(
    one: Any, other: Any, is_one: bool, start: Any, monkeypatch: Any
) -> None:
    """Two processes are ranks of one launch only if one parent numbered them, in one job."""
    here = os.getpid()

    def look(variables: dict[str, Any]) -> tuple[Any, Any]:
        started_with = {k: v for k, v in (TORCHRUN | variables).items() if v is not None}
        monkeypatch.setattr(os, "getppid", lambda: started_with.get("parent", here))
        monkeypatch.setattr(launch, "started_with", lambda: started_with)
        ds = CachedDataset(Images(LENGTH))
        return ds, ds.cache.origin.pid

    first = start(look, one)
    maker = first.answer()
    second = start(look, other)
    assert maker == first.pid
    assert second.answer() == (first.pid if is_one else second.pid)


def test_a_store_that_cannot_be_used_is_no_error(monkeypatch: Any) -> None:
    """The ranks then share nothing."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    assert "private to this process" in CachedDataset(Images(LENGTH)).explain()
    assert owners.entries() == []


def texts(changed: int = -1) -> list[str]:
    """More bytes than are compared; one text can be another."""
    return [f"{10**9 if number == changed else number:050}" for number in range(5000)]


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        ({0, 8}, {8, 0}, True),  # sets of strings have another order in each process
        ([{"held": frozenset({0, 8})}], [{"held": frozenset({8, 0})}], True),
        ({"a", "b"}, {"a", "c"}, False),
        ({"a": 1}, {"a": 2}, False),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int32), False),
        (np.array(["a", None], dtype=object), np.array(["a", "b"], dtype=object), False),
        (SharedList([1, {"a": 2}]), SharedList([0, 1, {"a": 2}])[1:], True),  # each rank makes its own
        (SharedList([1, {"a": 2}]), SharedList([{"a": 2}]), False),
        (max, min, False),
        (Images, BareImages, False),
        (texts(), texts(changed=4999), True),
        (texts(), texts(changed=3), False),
        (np.zeros(5000), np.ones(5000), False),  # of a large one, a part of the elements
    ],
)
def test_attributes_are_compared(one: Any, other: Any, are_equal: bool, monkeypatch: Any) -> None:
    """By their content, up to a number of bytes: a list of gigabytes would delay the start of every rank."""
    samples = {0: Images().sample(0)}
    monkeypatch.setattr("fastload.cache.likeness._MAX_BYTES", 10_000)
    assert (likeness(Holding(one), None, samples) == likeness(Holding(other), None, samples)) == are_equal
