"""Datasets, transforms, collate functions and samplers of the soak; started workers import them."""

from __future__ import annotations

import functools
import operator
import random
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

import fastload
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
    """The samples of a case by index.

    Args:
        case: The settings.
        num_samples: The length of the dataset.
        with_transform: Whether the dataset itself applies the transform of the case.
    """

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
    """The samples of a case as an iterable-style dataset; each worker reads a share, or all samples."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.samples = Samples(case, case.num_samples, with_transform=True)

    def __iter__(self) -> Iterator[Any]:
        for index in range(*_own_share(self.case)):
            yield self.samples[index]


class StatefulStream(Stream):
    """A stream with `state_dict()` and `load_state_dict()`."""

    _next: int | None = None
    _loaded: int | None = None

    def __iter__(self) -> Iterator[Any]:
        first, stop, step = _own_share(self.case)
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


def _own_share(case: Case) -> tuple[int, int, int]:
    """The share of this process."""
    info = get_worker_info()
    return share_of(case, 0, 0) if info is None else share_of(case, info.id, info.num_workers)


def known_sample(case: Case, index: int) -> Any:
    """The sample of an index before its transform."""
    if case.shapes == "one":
        group = 0
    else:
        group = index // (case.batch_size or 1) if case.shapes == "by batch" else index
    return KINDS[case.kind].make(index, group)


# --- transforms ------------------------------------------------------------------------------------------


def plus_one(sample: Any) -> Any:
    return sample[0] + np.uint8(1), sample[1]


def in_place(sample: Any) -> Any:
    sample[0][...] += np.uint8(1)
    return sample


def in_place_by_torch(sample: Any) -> Any:
    torch.from_numpy(sample[0]).add_(1)
    return sample


def rarely_in_place(sample: Any) -> Any:
    return in_place_by_torch(sample) if random.random() < 0.05 else plus_one(sample)


def alias(sample: Any) -> Any:
    return sample


def part(sample: Any) -> Any:
    return sample[0][::2, 1:], sample[1]


def turned(sample: Any) -> Any:
    return sample[0].transpose(2, 0, 1), sample[1]


def as_tensor(sample: Any) -> Any:
    return torch.from_numpy(sample[0]).permute(2, 0, 1), sample[1]


class Draws:
    """Adds random numbers to a sample, drawn from the generators that `rng="sample"` sets.

    Args:
        with_globals: Whether to draw from random, numpy and torch as well; worker threads share these.
    """

    def __init__(self, *, with_globals: bool) -> None:
        self.with_globals = with_globals

    def __call__(self, sample: Any) -> Any:
        numbers = [fastload.sample_rng().random()]
        if self.with_globals:
            numbers += [random.random(), np.random.rand(), float(torch.rand(1, dtype=torch.float64))]
        return {**sample, "noise": np.array(numbers)}


def _crop(case: Case, *, to_tensor: bool) -> Any:
    import albumentations

    steps: list[Any] = [albumentations.RandomCrop(*CROP), albumentations.HorizontalFlip(p=0.5)]
    if to_tensor:
        steps.append(albumentations.ToTensorV2())
    return albumentations.Compose(steps)


class _CallByName:
    """An albumentations pipeline that takes a dict sample, for datasets without a cache."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def __call__(self, sample: Any) -> Any:
        return self.pipeline(**sample)


def _cropped(sample: Any) -> Any:
    return {**sample, "image": sample["image"][: CROP[0], : CROP[1]].copy()}


def _cropped_to_tensor(sample: Any) -> Any:
    image = _cropped(sample)["image"]
    return {**sample, "image": torch.from_numpy(image.transpose(2, 0, 1).copy())}


class Transform(NamedTuple):
    """A transform of a case."""

    make: Callable[[Case], Any]  # gives the transform for CachedDataset, or None
    known: Callable[[Any], Any]  # gives the expected output for a fresh sample


def _constant(function: Any) -> Callable[[Case], Any]:
    return lambda case: function


def _pipeline(case: Case, *, to_tensor: bool) -> Any:
    made = _crop(case, to_tensor=to_tensor)
    return made if case.is_cached else _CallByName(made)


TRANSFORMS = {
    "none": Transform(_constant(None), alias),
    "plus one": Transform(_constant(plus_one), plus_one),
    "in place": Transform(_constant(in_place), plus_one),
    "in place by torch": Transform(_constant(in_place_by_torch), plus_one),
    "rarely in place": Transform(_constant(rarely_in_place), plus_one),
    "alias": Transform(_constant(alias), alias),
    "part": Transform(_constant(part), part),
    "turned": Transform(_constant(turned), turned),
    "as tensor": Transform(_constant(as_tensor), as_tensor),
    "draws": Transform(lambda case: Draws(with_globals=case.method != "thread"), alias),
    "crop": Transform(functools.partial(_pipeline, to_tensor=False), _cropped),
    "crop to tensor": Transform(functools.partial(_pipeline, to_tensor=True), _cropped_to_tensor),
}


# --- collate functions -----------------------------------------------------------------------------------

_kept = threading.local()  # the batches that `keeps_batches` keeps in this thread of this process


def as_list(samples: Any) -> Any:
    """The list of samples."""
    return samples


def stacked_arrays(samples: list[Any]) -> Any:
    images, labels = zip(*samples, strict=True)
    return {"images": np.stack(images), "names": [f"{label}" for label in labels]}


def keeps_batches(samples: list[Any]) -> Any:
    """The default collate function; it keeps its last batches, and raises if one of them has changed."""
    batches = _kept.__dict__.setdefault("batches", deque(maxlen=3))
    for leaves, copies in batches:
        if not all(torch.equal(leaf, copy) for leaf, copy in zip(leaves, copies, strict=True)):
            raise AssertionError("a batch that the collate function in a worker kept has changed")
    batch = default_collate(samples)
    leaves = list(tensors_of(batch))
    batches.append((leaves, [leaf.clone() for leaf in leaves]))
    return batch


def forget_kept_batches() -> None:
    """Drop the batches that `keeps_batches` keeps in this thread."""
    _kept.__dict__.clear()


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_of(value)


class Collate(NamedTuple):
    """A collate function of a case."""

    given: Any  # the function for the loader, or None for the default one
    known: Any  # makes the expected batch from the expected samples


COLLATES = {
    "default": Collate(None, default_collate),
    "list": Collate(as_list, as_list),
    "arrays": Collate(stacked_arrays, stacked_arrays),
    "keeps": Collate(keeps_batches, default_collate),
}


# --- on the device ---------------------------------------------------------------------------------------


def passed_on(batch: Any) -> Any:
    """A batch_transform; without gradients, as the loader promises."""
    if torch.is_grad_enabled():
        raise RuntimeError("a batch_transform runs with gradients")
    return batch


def on_device(batch: Any) -> Any:
    """A device_transform that puts the batch into a dict."""
    return {"on device": batch}


# --- samplers --------------------------------------------------------------------------------------------


class Buckets:
    """A batch sampler: each batch has consecutive indices, and the order of the batches is random.

    Args:
        num_samples: The length of the dataset.
        batch_size: The size of all batches except the last one.
        generator: The order of the batches is drawn from it.
    """

    def __init__(self, num_samples: int, batch_size: int, generator: torch.Generator) -> None:
        indices = list(range(num_samples))
        self.batches = [indices[start : start + batch_size] for start in range(0, num_samples, batch_size)]
        self.generator = generator

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for number in torch.randperm(len(self.batches), generator=self.generator).tolist():
            yield self.batches[number]


class OddBatches(Buckets):
    """The same; a batch is a tuple, a tensor, an array or a list of indices."""

    def __iter__(self) -> Iterator[Any]:
        kinds: list[Any] = [tuple, torch.tensor, np.array, list]
        for number, batch in enumerate(super().__iter__()):
            yield kinds[number % len(kinds)](batch)
