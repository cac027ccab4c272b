"""NodePartitionSampler: coverage, equal lengths, resuming with other ranks, and caches."""

from __future__ import annotations

import functools
import itertools
import os
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from fastload import CachedDataset, DataLoader, NodePartitionSampler
from fastload.cache.ram import arena, registry
from fastload.errors import ResumeError
from tests.kit import datasets

if TYPE_CHECKING:
    from pathlib import Path

VARIABLES = (
    *("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests run as if no launcher had started them."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def every_rank(length: int, num_nodes: int, per_node: int, **options: Any) -> list[NodePartitionSampler]:
    make = functools.partial(NodePartitionSampler, range(length), num_nodes * per_node, num_nodes=num_nodes)
    return [make(rank, **options) for rank in range(num_nodes * per_node)]


@settings(max_examples=100)
@given(
    length=st.integers(0, 200),
    num_nodes=st.integers(1, 6),
    per_node=st.integers(1, 4),
    epoch=st.integers(0, 12),
    drop_last=st.booleans(),
    options=st.fixed_dictionaries({"shuffle": st.booleans(), "seed": st.integers(0, 2**40)}),
)
def test_an_epoch_has_every_sample_once_in_disjoint_parts(
    length: int, num_nodes: int, per_node: int, epoch: int, drop_last: bool, options: dict[str, Any]
) -> None:
    """Parts are a partition, ranks are as long as torch's, and only the padding comes twice."""
    assume(length >= num_nodes or length == 0)
    generators = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    samplers = every_rank(length, num_nodes, per_node, drop_last=drop_last, **options)
    orders = []
    for sampler in samplers:
        sampler.set_epoch(epoch)
        orders.append(list(pickle.loads(pickle.dumps(sampler))))
        torch_s = DistributedSampler(range(length), len(samplers), sampler.rank, drop_last=drop_last)
        assert len(sampler) == len(orders[-1]) == len(torch_s)
        assert all(type(index) is int for index in orders[-1][:1])

    parts = [sampler.part.tolist() for sampler in samplers[::per_node]]
    assert sorted(itertools.chain(*parts)) == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for node, part in enumerate(parts):
        of_node = list(itertools.chain(*orders[node * per_node : (node + 1) * per_node]))
        num_distinct = len(set(of_node))
        assert set(of_node) <= set(part)
        assert num_distinct == (len(of_node) if drop_last else len(part))
    if not options["shuffle"]:  # all ranks together read the dataset in order, as with torch's sampler
        num_ranks = len(samplers)
        steps = [sorted(step) for step in zip(*orders, strict=True)]
        for number in range(length // num_ranks):
            assert steps[number] == list(range(num_ranks * number, num_ranks * (number + 1)))
    # Nothing is drawn from the user's generators.
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert np.random.get_state()[1].tolist() == generators[1]  # type: ignore[index]


def test_a_node_keeps_its_part_and_the_order_changes_in_each_epoch() -> None:
    """Other seeds give other parts, which nobody can change."""
    sampler, other = (every_rank(100, 2, 1, seed=seed)[1] for seed in (0, 1))
    part = set(sampler.part.tolist())
    assert part != set(other.part.tolist())
    with pytest.raises(ValueError, match="read-only"):
        sampler.part[0] = 1
    orders = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        orders.append(tuple(sampler))
    assert [set(order) for order in orders] == [part] * 4
    assert len(set(orders)) == 4


def loader_of(num_nodes: int, per_node: int, rank: int) -> DataLoader:
    sampler = every_rank(60, num_nodes, per_node, seed=5)[rank]
    return DataLoader(datasets.Made(int, 60), 3, sampler=sampler)


def numbers(loader: Any) -> list[int]:
    return [int(number) for batch in loader for number in batch]


def state_in_epoch_1(num_batches: int) -> dict[str, Any]:
    """The state of a loader of 2 nodes of 2 ranks after this many batches, at most 5."""
    saver = loader_of(2, 2, 0)
    saver.set_epoch(1)
    numbers(itertools.islice(saver, num_batches))
    return saver.state_dict()


@pytest.mark.parametrize(("num_nodes", "per_node"), [(3, 2), (1, 2), (4, 1)])
def test_another_number_of_nodes_begins_anew(num_nodes: int, per_node: int) -> None:
    """The state of a whole epoch loads anywhere; within an epoch, the rank that saved it finds out."""
    ranks = [loader_of(num_nodes, per_node, rank) for rank in range(num_nodes * per_node)]
    ranks[0].load_state_dict(state_in_epoch_1(2))
    with pytest.raises(ResumeError, match=r"before batch 2, .* and number of ranks"):
        numbers(ranks[0])
    for resumed in ranks:
        resumed.load_state_dict(state_in_epoch_1(6))
        resumed.set_epoch(2)
    assert sorted(number for resumed in ranks for number in numbers(resumed)) == list(range(60))


def test_the_process_group_and_torchrun_give_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 5 of 6 ranks on 3 nodes is the second rank of the third one; all nodes have as many ranks."""
    group = {"is_initialized": True, "get_rank": 5, "get_world_size": 6}
    for name, value in group.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    sampler = NodePartitionSampler(range(60))
    assert (sampler.num_nodes, sampler.node, sampler.local_rank, len(sampler)) == (3, 2, 1, 10)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="6 ranks on 2 nodes, of which this one has 4"):
        NodePartitionSampler(range(60))
    sampler = NodePartitionSampler(range(60), num_nodes=2)
    assert (sampler.num_replicas, sampler.node, sampler.local_rank) == (6, 1, 2)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        *(({name: None}, ValueError, "process group has not been") for name in ("num_replicas", "rank")),
        ({"num_nodes": None}, RuntimeError, "num_nodes is unknown"),
        ({"num_nodes": "4"}, TypeError, "num_nodes should be an int, but got '4'"),
        ({"seed": None}, TypeError, "seed should be an int, but got None"),
        ({"rank": 4}, ValueError, "Invalid rank 4"),
        ({"num_nodes": 3}, ValueError, "4 ranks on 3 nodes"),
        ({"num_nodes": 0}, ValueError, "4 ranks on 0 nodes"),
        ({"num_replicas": 8, "num_nodes": 8}, ValueError, "5 samples, fewer than the 8 nodes"),
    ],
)
def test_arguments_out_of_range_are_errors(changed: Any, error: Any, text: str) -> None:
    """Each error names the argument."""
    with pytest.raises(error, match=text):
        NodePartitionSampler(range(5), **{"num_replicas": 4, "rank": 0, "num_nodes": 2} | changed)


NUM_IMAGES, IMAGE_BYTES = 64, 16 * 1024
EXAMINED = 0, 32, 63  # by CachedDataset, before it makes a cache


def image(index: int) -> Any:
    return np.full((64, 64, 4), index, np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_workers": 1, "persistent_workers": True}], ids=["local", "workers"]
)
def test_the_cache_of_each_node_holds_its_part(options: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Two nodes, whose caches have room for little more than half of the samples each."""
    monkeypatch.setenv(registry.DIRECTORY_VARIABLE, str(tmp_path / "registry"))
    # A worker that finds the lock of the cache taken leaves its sample to a later epoch. Here it tries on.
    monkeypatch.setattr(arena, "_LOCK_WAIT_S", 60.0)
    images = datasets.Made(image, NUM_IMAGES)
    caches, samplers, loaders = [], [], []
    for node in range(2):
        key = f"node {node} of {os.getpid()}"
        caches.append(CachedDataset(images, cache_key=key, max_memory=f"{40 * IMAGE_BYTES}B"))
        samplers.append(NodePartitionSampler(caches[node], 2, node, num_nodes=2))
        loaders.append(DataLoader(caches[node], 8, sampler=samplers[node], **options))
    for epoch in range(2):
        seen = []
        for cache, sampler, loader in zip(caches, samplers, loaders, strict=True):
            loader.set_epoch(epoch)
            seen += [value for batch in loader for value in batch[:, 0, 0, 0].tolist()]
            cached = [index for index in range(NUM_IMAGES) if index in cache.cache]
            assert set(sampler.part.tolist()) <= set(cached) <= {*sampler.part.tolist(), *EXAMINED}
        assert sorted(seen) == list(range(NUM_IMAGES))
    for loader in loaders:
        loader.close()
