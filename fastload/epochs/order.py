"""The rank of a loader, and the facts about its order that are the same on every rank.

Frameworks save the state of one rank, and load it on all of them. Each rank reads other indices, so a
checksum of indices says nothing about another rank's state; these facts are compared instead.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from fastload.epochs.sampler_state import initial_seed_of
from fastload.system.process_group import process_group

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.utils.data import DataLoader

# Attributes for the rank and for the number of ranks: of torch's DistributedSampler (and of classes like it,
# such as Lightning's), of other libraries' samplers, and of Accelerate's BatchSamplerShard.
_RANK_ATTRIBUTES = (("rank", "num_replicas"), ("rank", "world_size"), ("process_index", "num_processes"))
_MAX_DEPTH = 6


@dataclass(frozen=True, kw_only=True)
class Order:
    """Facts about a loader's order that are the same on every rank.

    A fact is None if it is unknown, or if the loader has nothing of the kind.

    Attributes:
        num_samples: The length of a map-style dataset.
        batch_size: The number of samples in a full batch.
        sampler: The classes of the sampler and of the samplers inside it.
        seed: The sampler's seed; without one, the seed of the generator that it draws from.
        num_ranks: The number of ranks among which the sampler splits the dataset.
    """

    num_samples: int | None = None
    batch_size: int | None = None
    sampler: str | None = None
    seed: int | None = None
    num_ranks: int | None = None


UNKNOWN = Order()


def rank_and_order(
    loader: DataLoader[Any], generators: Mapping[str, bytes] | None = None
) -> tuple[int | None, Order]:
    """The rank that the loader reads for, and the facts about its order that are the same on every rank.

    The rank comes from the sampler or else from torch.distributed; None: unknown.

    Args:
        loader: Its sampler, or iterable dataset, is asked now.
        generators: States of generators, by place: the order of an epoch depends on their states before its
            first draw. A generator whose place is missing is taken as it is now.
    """
    is_iterable = loader._dataset_kind == _DatasetKind.Iterable
    samplers = nested_samplers(loader)
    rank, num_ranks = _split(loader, samplers)
    owners = (loader, *samplers)
    sizes = (integer_or_none(getattr(owner, "batch_size", None)) for owner in owners)
    order = Order(
        num_samples=None if is_iterable else length_or_none(loader.dataset),
        batch_size=next((size for size in sizes if size is not None), None),
        sampler=" of ".join(type(sampler).__name__ for sampler in samplers),
        seed=_seed(loader, samplers, generators or {}, is_split=num_ranks is not None),
        num_ranks=num_ranks,
    )
    return rank, order


def rank_of(loader: DataLoader[Any]) -> int | None:
    """The rank that the loader reads for, as `rank_and_order` finds it; None: unknown."""
    return _split(loader, nested_samplers(loader))[0]


def _split(loader: DataLoader[Any], samplers: list[Any]) -> tuple[int | None, int | None]:
    """The rank that the loader reads for, and the number of ranks that share its samples; None: unknown."""
    is_iterable = loader._dataset_kind == _DatasetKind.Iterable
    split = _split_of([loader.dataset] if is_iterable else samplers)
    return (_rank_of_process(), None) if split is None else split


def _rank_of_process() -> int | None:
    group = process_group()
    return None if group is None else int(group.get_rank())


def nested_samplers(loader: DataLoader[Any]) -> list[Any]:
    """The loader's sampler, and the samplers inside it, from the outside in."""
    found: list[Any] = []
    sampler: Any = loader._index_sampler
    while sampler is not None and len(found) < _MAX_DEPTH and not any(sampler is other for other in found):
        found.append(sampler)
        inner = _attribute(sampler, "batch_sampler")
        sampler = _attribute(sampler, "sampler") if inner is None else inner
    return found


def _split_of(owners: list[Any]) -> tuple[int, int] | None:
    """The rank and the number of ranks of the first sampler, or iterable dataset, that splits by rank."""
    for owner in owners:
        for names in _RANK_ATTRIBUTES:
            rank, num_ranks = (integer_or_none(_attribute(owner, name)) for name in names)
            if rank is not None and num_ranks is not None and 0 <= rank < num_ranks:
                return rank, num_ranks
    return None


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except Exception:  # noqa: BLE001  # a property of the user's, which may need a process group
        return None


def _seed(
    loader: DataLoader[Any], samplers: list[Any], generators: Mapping[str, bytes], *, is_split: bool
) -> int | None:
    for sampler in samplers:
        seed = integer_or_none(_attribute(sampler, "seed"))
        if seed is not None:
            return seed
    if is_split:  # the ranks share the order below, and the state that is loaded sets its generator
        return None
    for sampler in samplers:
        if hasattr(sampler, "generator"):  # as in torch's samplers, None stands for the default generator
            generator = torch.default_generator if sampler.generator is None else sampler.generator
            if not isinstance(generator, torch.Generator):
                return None
            return initial_seed_of(loader, generator, generators)
    return None


def integer_or_none(value: Any) -> int | None:
    """The value as an int; None for a bool, and for what is no integer."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def length_or_none(dataset: Any) -> int | None:
    """The length of a dataset; None if it has none."""
    try:
        return len(dataset)
    except Exception:  # noqa: BLE001  # with a sampler, torch does not need the dataset's length
        return None
