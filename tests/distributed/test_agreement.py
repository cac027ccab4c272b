"""The ranks' loaders are compared at their first epoch; ranks that differ for a good reason raise nothing.

One process plays all ranks: each has a ledger of its own, and all have one store.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler

from fastload import DataLoader, NodePartitionSampler
from fastload.epochs import rank_consistency
from fastload.errors import RanksDisagreeError
from tests.resume.zoo import Numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path


class Ranks:
    """Makes this process one of several ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Any, size: int = 2) -> None:
        self._patch = monkeypatch
        self._ledgers: dict[int, rank_consistency._Ledger] = {}
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: size)
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

    def become(self, rank: int) -> None:
        self._patch.setattr(dist, "get_rank", lambda: rank)
        self._patch.setattr(
            rank_consistency, "_ledger", self._ledgers.setdefault(rank, rank_consistency._Ledger())
        )


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch, dist.HashStore())


def make(length: int, rank: int, batch_size: int = 4, epoch: int = 0, **options: Any) -> DataLoader:
    sampler: Any = DistributedSampler(range(length), 2, rank, **options)
    loader = DataLoader(Numbers(length), batch_size, sampler=sampler)
    loader.set_epoch(epoch)
    return loader


def partitioned(length: int, rank: int, **options: Any) -> DataLoader:
    sampler = NodePartitionSampler(range(length), 2, rank, **({"num_nodes": 2} | options))
    return DataLoader(Numbers(length), 4, sampler=sampler)


def run(ranks: Ranks, program: Callable[[int], Iterable[DataLoader]], order: Iterable[int] = (0, 1)) -> None:
    """Run the program of each rank, one after another, and begin an epoch of each loader that it gives."""
    for rank in order:
        ranks.become(rank)
        for loader in program(rank):
            iter(loader)


LENGTH = r"length of the dataset is 39 on rank 1 \(host .+\), but 40 on rank 0 \(host .+\)\. .*files"


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (lambda rank: [make(40 - rank, rank)], LENGTH),
        (lambda rank: [make(length, rank) for length in (40, 20 - rank)], "19 on rank 1"),
        (lambda rank: [make(40, rank, seed=rank)], r"seed of the sampler is 1 on rank 1 .* but 0 on rank 0"),
        (lambda rank: [make(41, rank, drop_last=rank == 0)], "drop_last of the sampler is 0 on rank 1"),
        (lambda rank: [partitioned(40 + rank, rank)], "length of the dataset is 41 on rank 1"),
        (lambda rank: [partitioned(40, rank, num_nodes=1 + rank)], "num_nodes of the sampler is 2 on rank 1"),
    ],
)
def test_ranks_that_split_in_different_ways_are_an_error(program: Any, text: str, ranks: Ranks) -> None:
    """The error has both ranks and both values; it comes again at each iter() of the later rank."""
    run(ranks, program, order=[0])
    ranks.become(1)
    loaders = program(1)
    for _ in range(2):
        with pytest.raises(RanksDisagreeError, match=text):
            list(map(iter, loaders))


def test_a_file_store_compares_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The store of init_method="file://", below a prefix. Rank 1 comes first, and compares with nobody."""
    store = dist.PrefixStore("default_pg", dist.FileStore(str(tmp_path / "store"), 2))
    with pytest.raises(RanksDisagreeError, match=r"is 40 on rank 0 .*, but 39 on rank 1"):
        run(Ranks(monkeypatch, store), lambda rank: [make(40 - rank, rank)], (1, 0))


def sampled(sampler: Any, length: int = 40) -> DataLoader:
    return DataLoader(Numbers(length), 4, sampler=sampler)


def batched(sampler: Any, size: int) -> DataLoader:
    return DataLoader(Numbers(40), batch_sampler=BatchSampler(sampler, size, False))


class OwnShard(DistributedSampler[int]):
    """Each rank reads its whole dataset, in an order of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.dataset)))  # type: ignore[arg-type]


class SetsUpLate(OwnShard):
    """Lacks attributes of its class."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.num_replicas = 2


class NotTorchs(BatchSampler):
    """A sampler with an attribute of torch's."""

    num_replicas = 2


GOOD_REASONS: dict[str, Callable[[int], Iterable[DataLoader]]] = {
    "extra on rank 0": lambda rank: [make(n, rank) for n in ((10, 40, 20) if rank == 0 else (40, 20))],
    "another order": lambda rank: [make(length, rank) for length in ((10, 40) if rank == 0 else (40, 10))],
    "another kind": lambda rank: [make(40, rank) if rank else make(10, rank, shuffle=False)],
    "another epoch": lambda rank: [make(40, rank, epoch=rank)],
    "own shard": lambda rank: [sampled(OwnShard(Numbers(40 - rank), 2, rank), 40 - rank)],
    "without attributes": lambda rank: [sampled(SetsUpLate(range(40 - rank)))],
    "in batch samplers": lambda rank: [batched(DistributedSampler(Numbers(40), 2, rank), 4 + rank)],
    "group of one": lambda rank: [sampled(DistributedSampler(range(40 - rank), 1, 0))],
    "another sampler": lambda rank: [sampled(NotTorchs(range(40 - rank), 1, False))],
    "other batch sizes": lambda rank: [make(40, rank, batch_size=4 * (rank + 1))],
    "without shuffle": lambda rank: [make(40, rank, shuffle=False, seed=rank)],
}


@pytest.mark.parametrize("name", GOOD_REASONS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_may_differ_for_a_good_reason(name: str, order: tuple[int, int], ranks: Ranks) -> None:
    """No alarm, whichever rank comes first."""
    run(ranks, GOOD_REASONS[name], order)


def test_a_group_within_the_ranks_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four ranks that share a dataset of their own have nothing to do with the other two."""
    four = Ranks(monkeypatch, dist.HashStore(), size=4)
    run(four, lambda rank: [make(40 - rank, rank % 2)], order=range(4))


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "MASTER_PORT", "TORCHELASTIC_RUN_ID"])
def test_another_start_of_the_ranks_is_not_compared(name: str, ranks: Ranks, monkeypatch: Any) -> None:
    """The store of torchrun's agent outlives the ranks; the dataset may have grown since."""

    def program(rank: int) -> list[DataLoader]:
        monkeypatch.setenv(name, str(rank))
        return [make(40 - rank, rank)]

    run(ranks, program)


def test_a_new_process_of_a_rank_is_not_compared_with_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of the nodes, torchrun's names may be the same."""
    store = dist.HashStore()
    for length in (40, 41):
        run(Ranks(monkeypatch, store), lambda rank, length=length: [make(length, rank)])


def test_a_store_that_fails_means_no_check(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Training goes on; the reason is logged at level DEBUG."""
    with caplog.at_level(logging.DEBUG, "fastload"):
        run(Ranks(monkeypatch, None), lambda rank: [make(40 - rank, rank)])
    assert "the store cannot be used" in caplog.text


def test_a_loader_is_compared_once_when_there_is_a_group(ranks: Ranks, monkeypatch: Any) -> None:
    """One that is read before the group exists is compared when it does; later epochs ask nothing."""
    ranks.become(0)
    loader = make(40, 0)
    asked: list[int] = []
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: asked.append(1) or store)
    numbers = []
    for is_initialized in (False, True, True):
        monkeypatch.setattr(dist, "is_initialized", lambda is_initialized=is_initialized: is_initialized)
        iter(loader)
        numbers.append(len(asked))
    assert numbers[0] == 0 < numbers[1] == numbers[2]


def test_a_forked_process_leaves_the_connection_of_its_rank_alone(ranks: Ranks) -> None:
    """It shares the socket: two processes would read each other's answers."""
    ranks.become(0)
    loader = make(40, 0)
    child = os.fork()
    if child == 0:
        dist.distributed_c10d._get_default_store = lambda: os._exit(1)
        iter(loader)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
