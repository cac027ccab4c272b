"""Loaders with every kind of sampler, made anew at each call, as a new process would make them."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastload import DataLoader
from fastload.epochs.order import Sources
from tests.resume.zoo import Draws, Numbers, Stateful

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTH = 50


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Each makes the arguments of a loader anew, as a new process would.
SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffle": lambda: {"shuffle": True},
    "shuffle, generator": lambda: {"shuffle": True, "generator": seeded()},
    "sampler's own generator": lambda: {"sampler": RandomSampler(range(LENGTH), generator=seeded())},
    "with replacement": lambda: {
        "sampler": RandomSampler(range(LENGTH), replacement=True, num_samples=70, generator=seeded())
    },
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * LENGTH, 60, generator=seeded())},
    "weighted, default": lambda: {"sampler": WeightedRandomSampler([1.0] * LENGTH, 60)},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(0, LENGTH, 2), generator=seeded())},
    "distributed": lambda: {"sampler": DistributedSampler(Numbers(LENGTH), 3, 1, seed=3)},
    "batch sampler": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(LENGTH), generator=seeded()), 4, False),
        "batch_size": 1,
    },
    "no batches": lambda: {"sampler": Draws(LENGTH), "batch_size": None},
    "eager draws": lambda: {"sampler": Draws(LENGTH)},
    "stateful": lambda: {"sampler": Stateful(LENGTH)},
}


def make(kind: str, num_workers: int = 0, *, persistent: bool = False) -> DataLoader:
    options = {"batch_size": 4, "num_workers": num_workers} | SAMPLERS[kind]()
    return DataLoader(Numbers(LENGTH), persistent_workers=persistent and num_workers > 0, **options)


def order_states(loader: DataLoader) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The states of the generators and of the samplers that determine the loader's order."""
    sources = Sources(loader)
    return sources.generator_states(), sources.sampler_states()


def labels(batches: Any) -> list[list[int]]:
    return [batch.flatten().tolist() for batch in batches]


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
