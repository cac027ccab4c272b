"""The indices of each batch of an epoch: torch's samplers draw them, or the workers share a stream."""

from __future__ import annotations

import collections
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data as tud

from tests.soak.datasets import Buckets, raises_at, share_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.soak.case import Case


@dataclass(frozen=True)
class Due:
    """One batch that is due."""

    indices: tuple[int, ...]  # as the sampler gives them
    is_single: bool  # the loader has batch_size=None: the batch is one sample
    occurrences: tuple[int, ...]  # of each index, earlier in the epoch
    error: int | None  # the index of a sample that raises, so that an error is due in place of the batch


def sampling(case: Case, generator: torch.Generator) -> dict[str, Any]:
    """The arguments of a DataLoader that determine the order of the samples."""
    size = range(case.num_samples)
    batches = {"batch_size": case.batch_size, "drop_last": case.drop_last}
    if case.order == "in order":
        return batches
    if case.order.startswith("shuffle"):
        given = {} if case.order == "shuffle" else {"generator": generator}
        return {**batches, "shuffle": True, **given}
    if case.order == "buckets":
        batch_sampler = Buckets(case.num_samples, case.batch_size or 1, generator)
        return {"batch_sampler": batch_sampler, "generator": generator}
    sampler: Any
    if case.order == "with replacement":
        count = 2 * case.num_samples
        sampler = tud.RandomSampler(size, replacement=True, num_samples=count, generator=generator)
    else:
        sampler = tud.DistributedSampler(size, num_replicas=2, rank=1, seed=case.seed % 1000)  # type: ignore[arg-type]
    return {**batches, "sampler": sampler, "generator": generator}


def due_batches(case: Case, epoch: int, generator: torch.Generator, *, draws_base_seed: bool) -> list[Due]:
    """The batches of an epoch that begins now; a new loader draws the base seed of its workers first."""
    if case.is_stream:
        return list(_with_occurrences(case, _stream_batches(case)))
    twin = torch.Generator()
    twin.set_state(generator.get_state())
    with torch.random.fork_rng(devices=[]):
        given = sampling(case, twin)
        if draws_base_seed:
            torch.empty((), dtype=torch.int64).random_(generator=given.get("generator"))
        return list(_with_occurrences(case, _drawn(case, given, epoch)))


def _drawn(case: Case, given: dict[str, Any], epoch: int) -> Iterable[Any]:
    if "batch_sampler" in given:
        return list(given["batch_sampler"])
    sampler: Any = range(case.num_samples)
    if "sampler" in given:
        sampler = given["sampler"]
    elif "shuffle" in given:
        sampler = tud.RandomSampler(sampler, generator=given.get("generator"))
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    size = case.batch_size
    return list(sampler if size is None else tud.BatchSampler(sampler, size, case.drop_last))


def _stream_batches(case: Case) -> Iterator[Any]:
    """The workers take turns; each makes batches of its own share until the share is used up."""
    shares = []
    for worker in range(max(1, case.num_workers)):
        share: Any = range(*share_of(case, worker, case.num_workers))
        if case.batch_size is not None:
            share = tud.BatchSampler(share, case.batch_size, case.drop_last)
        shares.append(iter(share))
    for turn in itertools.zip_longest(*shares):
        yield from (batch for batch in turn if batch is not None)


def _with_occurrences(case: Case, batches: Iterable[Any]) -> Iterator[Due]:
    seen: collections.Counter[int] = collections.Counter()
    for batch in batches:
        is_single = case.batch_size is None
        indices = (int(batch),) if is_single else tuple(int(index) for index in batch)
        occurrences = []
        for index in indices:
            occurrences.append(seen[index])
            seen[index] += 1
        failing = (one for one in (source_index(case, index) for index in indices) if raises_at(one))
        yield Due(indices, is_single, tuple(occurrences), next(failing, None) if case.raises else None)


def source_index(case: Case, index: int) -> int:
    """The index in the dataset under torch's Subset, which turns the order round."""
    return case.num_samples - 1 - index if case.source == "subset of ram" else index
