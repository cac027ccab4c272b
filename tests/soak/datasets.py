"""Datasets, transforms, collate functions and samplers of the soak; started workers import them."""

from __future__ import annotations

import itertools
import operator
import random
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

import fastload
from tests.kit.datasets import as_arrays
from tests.soak.samples import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.soak.case import Case

RAISES_EVERY = 11  # samples, in a case with `raises`
CROP = (6, 5)
SUBSET_MARGIN = 5  # samples of a dataset that its subset leaves out


def raises_at(index: int) -> bool:
    return index % RAISES_EVERY == 4


class Samples(Dataset[Any]):
    """The samples of a case by index; the dataset itself may apply the transform of the case."""

    def __init__(self, case: Case, num_samples: int, *, with_transform: bool) -> None:
        self.case = case
        self.num_samples = num_samples
        self.transform = TRANSFORMS[case.transform].make(case) if with_transform else None

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: Any) -> Any:
        index = operator.index(index)
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        if self.case.delay_ms and index % 3 == 0:
            time.sleep(self.case.delay_ms / 1000)
        if self.case.raises and raises_at(index):
            raise ValueError(f"sample {index}")
        sample = known_sample(self.case, index)
        return sample if self.transform is None else self.transform(sample)


class BulkSamples(Samples):
    """The same with `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    """The samples of a case with a state of their own; each worker reads a share, or all samples."""

    _next: int | None = None
    _loaded: int | None = None

    def __init__(self, case: Case) -> None:
        self.case = case
        self.samples = Samples(case, case.num_samples, with_transform=True)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, stop, step = share_of(self.case, info.id if info else 0, info.num_workers if info else 0)
        begin, self._loaded = first if self._loaded is None else self._loaded, None
        for index in range(begin, stop, step):
            self._next = index + step
            yield self.samples[index]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state["next"]


def share_of(case: Case, worker: int, num_workers: int) -> tuple[int, int, int]:
    """The first index, the stop and the step of one worker's share of a stream."""
    if case.is_sharded and num_workers:
        return worker, case.num_samples, num_workers
    return 0, case.num_samples, 1


def known_sample(case: Case, index: int) -> Any:
    """The sample of an index before its transform."""
    if case.shapes == "one":
        group = 0
    else:
        group = index // (case.batch_size or 1) if case.shapes == "by batch" else index
    return KINDS[case.kind].make(index, group)


def alias(sample: Any) -> Any:
    """A transform or a collate function that gives what it gets."""
    return sample


def plus_one(sample: Any) -> Any:
    return sample[0] + np.uint8(1), sample[1]


def in_place(sample: Any) -> Any:
    sample[0][...] += np.uint8(1)
    return sample


def rarely_in_place(sample: Any) -> Any:
    """Mostly not in place; by torch, which does not heed that an array is read-only."""
    if random.random() > 0.05:
        return plus_one(sample)
    torch.from_numpy(sample[0]).add_(1)
    return sample


def part(sample: Any) -> Any:
    return sample[0][::2, 1:], sample[1]


def as_tensor(sample: Any) -> Any:
    return torch.from_numpy(sample[0]).permute(2, 0, 1), sample[1]


class Draws:
    """Adds random numbers to a sample, drawn from the generators that `seeding="sample"` sets."""

    def __init__(self, *, with_globals: bool) -> None:
        self.with_globals = with_globals  # of random, numpy and torch; worker threads share these

    def __call__(self, sample: Any) -> Any:
        numbers = [fastload.sample_rng().random()]
        if self.with_globals:
            numbers += [random.random(), np.random.rand(), float(torch.rand(1, dtype=torch.float64))]
        return {**sample, "noise": np.array(numbers)}


def _pipeline(case: Case) -> Any:
    import albumentations as A

    return A.Compose([A.RandomCrop(*CROP), A.HorizontalFlip(p=0.5), A.ToTensorV2()])


def _cropped_to_tensor(sample: Any) -> Any:
    image = sample["image"][: CROP[0], : CROP[1]].transpose(2, 0, 1)
    return {**sample, "image": torch.from_numpy(image.copy())}


class Transform(NamedTuple):
    make: Callable[[Case], Any]  # gives the transform for CachedDataset, or None
    known: Callable[[Any], Any]  # gives the expected output for a fresh sample


TRANSFORMS = {
    "none": Transform(lambda case: None, alias),
    "in place": Transform(lambda case: in_place, plus_one),
    "rarely in place": Transform(lambda case: rarely_in_place, plus_one),
    "alias": Transform(lambda case: alias, alias),
    "part": Transform(lambda case: part, part),
    "as tensor": Transform(lambda case: as_tensor, as_tensor),
    "draws": Transform(lambda case: Draws(with_globals=case.method != "thread"), alias),
    "crop to tensor": Transform(_pipeline, _cropped_to_tensor),
}


kept = threading.local()  # the batches that `keeps_batches` keeps in this thread of this process


def keeps_batches(samples: list[Any]) -> Any:
    """The default collate function; it keeps its last batches, and raises if one of them has changed."""
    batches = kept.__dict__.setdefault("batches", deque(maxlen=3))
    for tensors, copies in batches:
        if not all(map(torch.equal, tensors, copies)):
            raise AssertionError("a batch that the collate function in a worker kept has changed")
    batch = default_collate(samples)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    batches.append((tensors, [tensor.clone() for tensor in tensors]))
    return batch


class Collate(NamedTuple):
    given: Any  # the function for the loader, or None for the default one
    known: Any  # makes the expected batch from the expected samples


COLLATES = {
    "default": Collate(None, default_collate),
    "list": Collate(alias, alias),
    "arrays": Collate(as_arrays, as_arrays),
    "keeps": Collate(keeps_batches, default_collate),
}


class Buckets:
    """Batches of consecutive indices, in random order, in a list or another kind of sequence."""

    def __init__(self, num_samples: int, batch_size: int, generator: torch.Generator) -> None:
        firsts = range(0, num_samples, batch_size)
        self.batches = [range(first, min(first + batch_size, num_samples)) for first in firsts]
        self.generator = generator

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.batches), generator=self.generator).tolist()
        kinds: Any = itertools.cycle([list, tuple, torch.tensor, np.array])
        for kind, number in zip(kinds, order, strict=False):
            yield kind(list(self.batches[number]))
