"""Loaders with every kind of sampler and stream, made anew at each call, and runs that are interrupted."""

from __future__ import annotations

import functools
import io
import itertools
import json
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler
from torch.utils.data import SubsetRandomSampler as Subset
from torch.utils.data import WeightedRandomSampler as Weighted

from fastload import DataLoader
from fastload.epochs.order import Order
from tests.resume import zoo
from tests.resume.zoo import Draws, Numbers, Stateful

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LENGTH = 50


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Each makes the arguments of a loader anew, as a new process would.
SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffle": lambda: {"shuffle": True},
    "shuffle, generator": lambda: {"shuffle": True, "generator": seeded()},
    "sampler's own generator": lambda: {"sampler": RandomSampler(range(LENGTH), generator=seeded())},
    "with replacement": lambda: {"sampler": RandomSampler(range(LENGTH), True, 70, generator=seeded())},
    "weighted": lambda: {"sampler": Weighted([1.0] * LENGTH, 60, generator=seeded())},
    "weighted, default": lambda: {"sampler": Weighted([1.0] * LENGTH, 60)},
    "subset": lambda: {"sampler": Subset(range(0, LENGTH, 2), generator=seeded())},
    "distributed": lambda: {"sampler": DistributedSampler(Numbers(LENGTH), 3, 1, seed=3)},
    "batch sampler": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(LENGTH), generator=seeded()), 4, False),
        "batch_size": 1,
    },
    "no batches": lambda: {"sampler": Draws(LENGTH), "batch_size": None},
    "eager draws": lambda: {"sampler": Draws(LENGTH)},
    "stateful": lambda: {"sampler": Stateful(LENGTH)},
}
STREAMS = ["Mute", "Stream", "MakesSamples", "MakesBoth", "StartsOver", "ContinuesOnce"]
DATASETS: dict[str, Callable[[], dict[str, Any]]] = {
    **{kind: lambda kind=kind: {"dataset": getattr(zoo, kind)(), "batch_size": 3} for kind in STREAMS},
    "Shuffled, draws": lambda: {"dataset": zoo.Shuffled(), "batch_size": 3, "collate_fn": zoo.draw},
}


def make(kind: str, num_workers: int = 0, *, persistent: bool = False, **options: Any) -> DataLoader:
    usual = {"dataset": Numbers(LENGTH), "batch_size": 4} | (SAMPLERS | DATASETS)[kind]()
    workers = {"num_workers": num_workers, "persistent_workers": persistent and num_workers > 0}
    return DataLoader(**usual | workers | options)


def distributed(length: int, batch_size: int, num_ranks: int, rank: int, seed: int = 3) -> DataLoader:
    """Samples that torch's sampler splits between ranks."""
    sampler: DistributedSampler[Any] = DistributedSampler(range(length), num_ranks, rank, seed=seed)
    return DataLoader(Numbers(length), batch_size, sampler=sampler)


def sharded(length: int, batch_size: int, num_ranks: int, rank: int) -> DataLoader:
    """Batches that are split between ranks as Accelerate does it."""
    batches = BatchSampler(RandomSampler(range(length), generator=seeded()), batch_size, False)
    return DataLoader(Numbers(length), batch_sampler=zoo.Sharded(batches, num_ranks, rank))


def order_states(loader: DataLoader) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The states of the generators and of the samplers that determine the loader's order."""
    order = Order(loader)
    return order.generator_states(), order.sampler_states()


def labels(batches: Any) -> list[list[int]]:
    return [torch.as_tensor(batch).flatten().tolist() for batch in batches]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """The state as it comes out of a checkpoint in JSON."""
    found: dict[str, Any] = json.loads(json.dumps(state))
    return found


def through_torch_save(state: dict[str, Any]) -> dict[str, Any]:
    """The state as it comes out of a checkpoint that torch wrote, and read without running code from it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def state_after(loader: DataLoader, num_batches: int, send: Any = through_json) -> dict[str, Any]:
    """The state after some batches of an epoch; one more than there are reaches its end."""
    with loader:
        list(itertools.islice(loader, num_batches))
        found: dict[str, Any] = send(loader.state_dict())
        return found


Points = tuple[tuple[int, int], ...]


def run(
    kind: str,
    epochs: int,
    points: Points = (),
    workers: Iterable[int] = (0,),
    *,
    send: Callable[[dict[str, Any]], dict[str, Any]] = through_json,
    **options: Any,
) -> list[list[list[int]]]:
    """What each epoch brings in a training that is interrupted, and goes on in a new process each time.

    The training draws from torch's generator itself, and saves its state beside the loader's. Points are
    epochs and how many of their batches have come; each loader has the next number of workers.
    """
    counts = itertools.cycle(workers)
    torch.manual_seed(11)
    loader = make(kind, next(counts), **options)
    found: list[list[list[int]]] = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        found.append([])
        default = None
        for point in [*(number for where, number in points if where == epoch), None]:
            other, num_read = torch.get_rng_state(), getattr(loader.dataset, "reads", 0)
            iterator = iter(loader)
            num_asked = None if point is None else max(point - len(found[-1]), 0)
            batches = labels(itertools.islice(iterator, num_asked))
            found[-1] += batches
            if loader.num_workers == 0 and type(loader.dataset) is Numbers:  # what was received is not read
                assert loader.dataset.reads - num_read == sum(map(len, batches)) // 2
            if default is not None:  # an epoch that goes on draws nothing where the training draws
                assert torch.equal(torch.get_rng_state(), other)
                torch.set_rng_state(default)
            if num_asked is None:
                break
            state = send(loader.state_dict())
            assert loader.state_dict() == state  # asking changes nothing
            assert state["_iterator_finished"] == (len(batches) < num_asked)
            assert state["_num_yielded"] == len(found[-1])
            loader.close()
            default = torch.get_rng_state()
            torch.manual_seed(99)  # as in another process
            loader = make(kind, next(counts), **options)
            assert loader.state_dict()["epoch"] == 0
            loader.load_state_dict(state)
            if not state["_num_yielded"] or state["_iterator_finished"]:  # the order is not drawn yet
                torch.set_rng_state(default)
                default = None
            if state["_iterator_finished"]:
                break
        torch.rand(3)
    loader.close()
    return found


@functools.cache
def uninterrupted(kind: str, epochs: int, num_workers: int = 0, *, persistent: bool = False) -> Any:
    return run(kind, epochs, workers=[num_workers], persistent=persistent)
