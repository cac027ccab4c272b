"""Datasets and functions whose albumentations pipelines tell what they drew; started workers import them."""

from __future__ import annotations

import itertools
from typing import Any

import albumentations as A  # the name its own documentation uses
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import fastload
from tests.rng.draws_zoo import corner, stand_of


def crop(seed: int | None = None) -> A.Compose:
    return A.Compose([A.RandomCrop(8, 8)], seed=seed)


class Crops(Dataset[Any]):
    """Each sample: (worker, position of a random crop)."""

    def __init__(self) -> None:
        self.transform = crop()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        return (-1 if info is None else info.id), corner(self.transform)


class Corners(Dataset[int]):
    """Each sample: the position of a random crop; sample 2 raises the error once. Nothing else is random."""

    def __init__(self, num_samples: int = 12, seed: int | None = None, error: Any = None) -> None:
        self.num_samples = num_samples
        self.transform = crop(seed)
        self.error = error

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        if index == 2 and self.error is not None:
            error, self.error = self.error, None
            raise error
        return corner(self.transform)

    def stand(self) -> Any:
        return stand_of([self.transform])


class WithCrop(A.ImageOnlyTransform):  # type: ignore[misc]  # albumentations has no types
    """A user's transform that keeps a pipeline in an attribute."""

    def __init__(self) -> None:
        super().__init__(p=1.0)
        self.inner = crop()

    def apply(self, img: Any, **params: Any) -> Any:
        return self.inner(image=img)["image"]


class ManyCorners(Corners):
    """Three pipelines; one is in another, and one is alone."""

    def __init__(self) -> None:
        super().__init__()
        self.more = [A.Compose([WithCrop()]), A.RandomCrop(4, 4)]

    def __getitem__(self, index: int) -> Any:
        return [corner(pipeline) for pipeline in (self.transform, *self.more)]


class CornerStream(IterableDataset[int]):
    """A stream of positions, which it draws while it is read, or when iter() is called."""

    def __init__(self, kind: Any = iter) -> None:
        self.kind = kind
        self.transform = crop()

    def __iter__(self) -> Any:
        return iter(self.kind(corner(self.transform) for _ in range(10)))


class CornerOf:
    """A function of an index."""

    def __init__(self) -> None:
        self.transform = crop()

    def __call__(self, number: int) -> int:
        return corner(self.transform)


class InnerLoader(Corners):
    """Reads a loader over a dataset that draws from the same pipeline, in its middle, and not to its end."""

    def __init__(self, seeding: Any = "worker") -> None:
        super().__init__()
        self.seeding = seeding

    def __getitem__(self, index: int) -> Any:
        inner = Corners(3)
        inner.transform = self.transform
        first = corner(self.transform)
        found = itertools.islice(fastload.DataLoader(inner, None, seeding=self.seeding), 2)
        return [first, *map(int, found), corner(self.transform)]


class CropsBatch:
    """A collate_fn: each batch is what the dataset drew, and two crops of its own pipeline."""

    def __init__(self, pipeline: Any = None) -> None:
        self.pipeline = crop() if pipeline is None else pipeline
        self.calls: list[tuple[Any, Any]] = []

    def __call__(self, samples: Any) -> Any:
        self.calls.append((fastload.get_worker_info(), self.pipeline))
        return samples, [corner(self.pipeline), corner(self.pipeline)]


_of_batch = crop()


def global_crops_batch(samples: Any) -> Any:
    """As `CropsBatch`, with a pipeline of its module."""
    return CropsBatch(_of_batch)(samples)


class CollatingCorners(Corners):
    """Its `collate` draws from its own pipeline, as its samples do."""

    def collate(self, samples: Any) -> Any:
        return CropsBatch(self.transform)(samples)
