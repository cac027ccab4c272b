"""Datasets and worker functions for the seeding tests, in a module that spawned workers can import."""

from __future__ import annotations

import itertools
import os
import random
import threading
from typing import Any

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # its import would ask the network for a newer version

import albumentations as A  # the name its own documentation uses
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import fastload

# A crop of a picture whose pixels are their own positions tells where it was taken.
SIDE = 256
POSITIONS = np.arange(SIDE * SIDE, dtype=np.int32).reshape(SIDE, SIDE, 1).astype(np.float32)


def crop(seed: int | None = None) -> A.Compose:
    return A.Compose([A.RandomCrop(8, 8)], seed=seed)


def nested() -> tuple[A.Compose, list[Any]]:
    """A pipeline with every kind of composition in it, and all transforms below it."""
    flip = A.VerticalFlip()
    sequential = A.Sequential([flip])
    one_of = A.OneOf([A.HorizontalFlip(), sequential])
    replay = A.ReplayCompose([A.RandomCrop(2, 2)])
    some_of = A.SomeOf([A.Compose([A.Transpose()])], n=1)
    outer = A.Compose(
        [one_of, replay, some_of],
        bbox_params=A.BboxParams("coco", label_fields=[]),
        keypoint_params=A.KeypointParams("xy"),
    )
    parts = [one_of, *one_of, flip, replay, *replay, some_of, *some_of, some_of[0][0]]
    return outer, parts


def corner(pipeline: Any) -> int:
    """Where one random crop starts."""
    return int(pipeline(image=POSITIONS)["image"][0, 0, 0])


class Crops(Dataset[Any]):
    """Each sample: (worker, position of a random crop)."""

    def __init__(self, num_samples: int = 16) -> None:
        self.num_samples = num_samples
        self.transform = crop()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        return (-1 if info is None else info.id), corner(self.transform)


class Draws(Dataset[Any]):
    """Each sample: one draw of random, numpy and torch."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))


class Raises:
    """Runs no code when it is only looked at; raises at every other touch."""

    __slots__ = ("__dict__", "inner", "never_set")

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "inner", inner)

    def _refuse(self, *_: Any) -> Any:
        raise ZeroDivisionError("user code was run")

    __getattribute__ = __getattr__ = __iter__ = __len__ = __eq__ = __hash__ = __bool__ = _refuse
    __class__ = property(_refuse)
    anything = property(_refuse)


def append_zero(worker_id: int) -> None:
    _calls(worker_id).append(("zero", random.random()))


def append_one(worker_id: int) -> None:
    _calls(worker_id).append(("one", random.random()))


def _calls(worker_id: int) -> list[tuple[str, float]]:
    info = get_worker_info()
    if info is None or info.id != worker_id:
        raise ValueError("called with another worker's id")
    return info.dataset.calls  # type: ignore[attr-defined,no-any-return]


class Calls(Dataset[Any]):
    """Its one sample is what the worker's functions noted, and the next draw."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> list[tuple[str, float]]:
        return self.calls


class Corners(Dataset[int]):
    """Each sample: the position of a random crop. The pipeline is the only thing that is random."""

    def __init__(self, num_samples: int = 12, seed: int | None = None) -> None:
        self.num_samples = num_samples
        self.transform = crop(seed)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return corner(self.transform)

    def stand(self) -> Any:
        """Which generators the pipeline has, and where they stand."""
        parts = [self.transform, *self.transform.transforms]
        return [
            (
                id(part.random_generator),
                id(part.py_random),
                part.py_random.getstate(),
                str(part.random_generator.bit_generator.state),
            )
            for part in parts
        ]


class CornersAtOnce(Corners):
    """Fetches many samples with one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


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
    """A stream of positions."""

    def __init__(self) -> None:
        self.transform = crop()

    def __iter__(self) -> Any:
        for _ in range(10):
            yield corner(self.transform)


class EagerCornerStream(CornerStream):
    """Draws all when iter() is called."""

    def __iter__(self) -> Any:
        return iter([corner(self.transform) for _ in range(10)])


class CornerOf:
    """A function for a datapipe."""

    def __init__(self) -> None:
        self.transform = crop()

    def __call__(self, number: int) -> int:
        return corner(self.transform)


_of_sample = A.RandomCrop(4, 4)


def corner_of_sample(sample: Any) -> Any:
    image, label = sample
    return int(_of_sample(image=image)["image"][0, 0, 0]), label


class InnerLoader(Corners):
    """Reads its samples through a loader of its own, over a dataset that draws from the same pipeline."""

    def __getitem__(self, index: int) -> Any:
        inner = Corners(2)
        inner.transform = self.transform
        first = corner(self.transform)
        found = [int(value) for value in fastload.DataLoader(inner, None)]
        return [first, *found, corner(self.transform)]


class Recursive(Corners):
    """Iterates a loader over itself in its middle."""

    depth = 0

    def __getitem__(self, index: int) -> Any:
        if self.depth:
            return super().__getitem__(index)
        self.depth = 1
        rng: Any = "sample" if index % 2 else "worker"
        try:
            list(itertools.islice(fastload.DataLoader(self, None, rng=rng), 2))
        finally:
            self.depth = 0
        return super().__getitem__(index)


class DrawsAroundALoader(Corners):
    """Draws from the sample's generator before and after it iterates a loader that has samples of its own."""

    def __init__(self, *, iterates: bool) -> None:
        super().__init__()
        self.iterates = iterates

    def __getitem__(self, index: int) -> Any:
        before = fastload.sample_rng().integers(1 << 40)
        if self.iterates:
            list(fastload.DataLoader(Corners(2), None, rng="sample"))
        return [int(before), int(fastload.sample_rng().integers(1 << 40)), corner(self.transform)]


class DrawsAndCrops(Draws):
    """As Draws, with a pipeline that is called and whose result is not used."""

    def __init__(self) -> None:
        self.transform = crop()

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        self.transform(image=POSITIONS)
        return super().__getitem__(index)


class FailsOnce(Corners):
    """Fails in the middle of its first batch."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error: type[BaseException] | None = error

    def __getitem__(self, index: int) -> Any:
        error, self.error = self.error, None if index == 2 else self.error
        if index == 2 and error is not None:
            raise error
        return super().__getitem__(index)


class Stubborn(A.RandomCrop):  # type: ignore[misc]  # albumentations has no types
    """A transform that cannot be seeded."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def set_random_state(self, *generators: Any) -> None:
        raise ZeroDivisionError


class Waits(Corners):
    """Waits in the middle of each sample until it may go."""

    is_blocking = True

    def __init__(self) -> None:
        super().__init__(2)
        self.is_in = [threading.Event() for _ in range(2)]
        self.may_go = [threading.Event() for _ in range(2)]

    def __getitem__(self, index: int) -> Any:
        self.is_in[index].set()
        if self.is_blocking and not self.may_go[index].wait(30):
            raise TimeoutError
        return super().__getitem__(index)


class CropsBatch:
    """A collate_fn: each batch is the worker, what the dataset drew, and two crops of its own pipeline.

    Args:
        pipeline: The pipeline; None: a new one.
    """

    def __init__(self, pipeline: Any = None) -> None:
        self.pipeline = crop() if pipeline is None else pipeline

    def __call__(self, samples: Any) -> Any:
        info = fastload.get_worker_info()
        return -1 if info is None else info.id, samples, [corner(self.pipeline), corner(self.pipeline)]


def crops_batch(samples: Any, batch: Any) -> Any:
    """As `CropsBatch`, with its pipeline as an argument."""
    return CropsBatch(batch)(samples)


_of_batch = crop()


def global_crops_batch(samples: Any) -> Any:
    """As `CropsBatch`, with a pipeline of its module."""
    return CropsBatch(_of_batch)(samples)


class AttributeOfTheName:
    """As `CropsBatch`, with a pipeline in an attribute that has the name of a global pipeline."""

    def __init__(self) -> None:
        self._of_batch = crop()

    def __call__(self, samples: Any) -> Any:
        return CropsBatch(self._of_batch)(samples)


def closed_crops_batch() -> Any:
    """As `CropsBatch`, with a pipeline in its closure; cannot be pickled."""
    pipeline = crop()
    return lambda samples: CropsBatch(pipeline)(samples)


class CollatingCorners(Corners):
    """Its `collate` draws from its own pipeline, as its samples do."""

    def collate(self, samples: Any) -> Any:
        return CropsBatch(self.transform)(samples)
