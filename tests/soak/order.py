"""The indices of each batch of an epoch: torch's samplers draw them, or the workers share a stream."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data as tud

from tests.soak.datasets import Buckets, OddBatches, raises_at, share_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.soak.case import Case


@dataclass(frozen=True)
class Due:
    """One batch that is due.

    Attributes:
        indices: The indices of its samples, as the sampler gives them.
        is_single: Whether the loader has batch_size=None, so that the batch is one sample.
        occurrences: For each index, the number of its earlier occurrences in the epoch.
        error: The index of a sample that raises, so that an error is due in place of the batch; or None.
    """

    indices: tuple[int, ...]
    is_single: bool
    occurrences: tuple[int, ...]
    error: int | None


def sampling(case: Case, generator: torch.Generator) -> dict[str, Any]:
    """The arguments of a DataLoader that determine the order of the samples."""
    size = range(case.num_samples)
    batches = {"batch_size": case.batch_size, "drop_last": case.drop_last}
    if case.order == "in order":
        return batches
    if case.order == "shuffle":
        return {**batches, "shuffle": True}
    if case.order == "shuffle by a generator":
        return {**batches, "shuffle": True, "generator": generator}
    if case.order in ("buckets", "odd batches"):
        kind = Buckets if case.order == "buckets" else OddBatches
        batch_sampler = kind(case.num_samples, case.batch_size or 1, generator)
        return {"batch_sampler": batch_sampler, "generator": generator}
    sampler: Any
    if case.order == "subset sampler":
        sampler = tud.SubsetRandomSampler(list(size)[::2], generator=generator)
    elif case.order == "with replacement":
        count = 2 * case.num_samples
        sampler = tud.RandomSampler(size, replacement=True, num_samples=count, generator=generator)
    elif case.order == "weighted":
        weights = [1 + index % 3 for index in size]
        sampler = tud.WeightedRandomSampler(weights, case.num_samples + 3, generator=generator)
    else:
        sampler = tud.DistributedSampler(size, num_replicas=2, rank=1, seed=case.seed % 1000)  # type: ignore[arg-type]
    return {**batches, "sampler": sampler, "generator": generator}


def due_batches(case: Case, epoch: int, generator: torch.Generator, *, draws_base_seed: bool) -> list[Due]:
    """The batches of an epoch that begins now. The generators of the loader are left as they are.

    Args:
        case: The settings of the loader.
        epoch: The number of the epoch.
        generator: The loader's generator.
        draws_base_seed: Whether the loader draws the base seed of its workers before the sampler draws.
    """
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
        indices = list(range(*share_of(case, worker, case.num_workers)))
        size = case.batch_size
        if size is None:
            shares.append(collections.deque[Any](indices))
            continue
        batches = [indices[start : start + size] for start in range(0, len(indices), size)]
        if case.drop_last and batches and len(batches[-1]) < size:
            batches.pop()
        shares.append(collections.deque[Any](batches))
    while shares := [share for share in shares if share]:
        for share in shares:
            yield share.popleft()


def _with_occurrences(case: Case, batches: Iterable[Any]) -> Iterator[Due]:
    seen: collections.Counter[int] = collections.Counter()
    for batch in batches:
        is_single = case.batch_size is None
        indices = (int(batch),) if is_single else tuple(int(index) for index in batch)
        occurrences = []
        for index in indices:
            occurrences.append(seen[index])
            seen[index] += 1
        error = next((source_index(case, index) for index in indices if _raises(case, index)), None)
        yield Due(indices, is_single, tuple(occurrences), error)


def _raises(case: Case, index: int) -> bool:
    return case.raises and raises_at(source_index(case, index))


def source_index(case: Case, index: int) -> int:
    """The index in the dataset under torch's Subset, which turns the order round."""
    return case.num_samples - 1 - index if "subset" in case.source else index
