"""Datasets and functions whose albumentations pipelines tell what they drew; started workers import them."""

from __future__ import annotations

import itertools
import os
import random
import threading
from typing import Any

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # its import would ask the network for a newer version

import albumentations as A  # the name its own documentation uses
import numpy as np
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import fastload
from tests.rng.draws_zoo import state_of

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


class Notes:
    """A worker function that notes its name and a draw in the dataset, the first sample of `Calls`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Notes) and other.name == self.name

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, worker_id: int) -> None:
        info: Any = get_worker_info()
        assert info.id == worker_id
        info.dataset.append((self.name, random.random()))


class Calls(list[Any]):
    """Its one sample is what the worker's functions noted."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return list(self)


class Corners(Dataset[int]):
    """Each sample: the position of a random crop. The pipeline is the only thing that is random.

    Args:
        num_samples: The length.
        seed: Of the pipeline.
        error: Raised once, by sample 2.
    """

    def __init__(
        self, num_samples: int = 12, seed: int | None = None, error: type[BaseException] | None = None
    ) -> None:
        self.num_samples = num_samples
        self.transform = crop(seed)
        self.error = error

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        error = self.error
        if index == 2 and error is not None:
            self.error = None
            raise error
        return corner(self.transform)

    def stand(self) -> Any:
        """Which generators the pipeline has, and where they stand."""
        parts = [self.transform, *self.transform.transforms]
        kept = [generator for part in parts for generator in (part.py_random, part.random_generator)]
        return list(map(id, kept)), list(map(state_of, kept))


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
    """A collate_fn: each batch is what the dataset drew, and two crops of its own pipeline.

    Args:
        pipeline: The pipeline; None: a new one.
    """

    def __init__(self, pipeline: Any = None) -> None:
        self.pipeline = crop() if pipeline is None else pipeline
        self.calls: list[tuple[Any, Any]] = []

    def __call__(self, samples: Any) -> Any:
        self.calls.append((fastload.get_worker_info(), self.pipeline))
        return samples, [corner(self.pipeline), corner(self.pipeline)]


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
