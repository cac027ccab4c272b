"""One pipeline of every shape, and a digest of what two epochs draw from it; started workers import them."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from pathlib import Path
from typing import Any

import albumentations as A  # the name its own documentation uses
import numpy as np
from PIL import Image

from fastload import CachedDataset, ImageFolder
from tests.rng.draws_zoo import plain, run
from tests.rng.pipelines_zoo import Corners, CornerStream, CropsBatch, WithCrop

PIXELS = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


def nested() -> Any:
    """Compositions in compositions, with draws between them."""
    some_of = A.SomeOf([A.VerticalFlip(p=0.5), A.Transpose(p=0.5), A.HorizontalFlip(p=0.5)], n=2)
    one_of = A.OneOf([A.Sequential([A.RandomCrop(9, 9), A.HorizontalFlip()], p=0.7), A.RandomCrop(8, 8)], p=1)
    return A.Compose([A.Compose([A.RandomCrop(99, 99)], p=0.8), some_of, A.RandomOrder([one_of]), WithCrop()])


def cropping(*last: Any) -> Any:
    """A pipeline whose crop can be decoded alone."""
    return A.Compose([A.RandomCrop(16, 16), A.HorizontalFlip(p=0.5), *last])


def of_dataset(pipeline: Any) -> Any:
    dataset = Corners()
    dataset.transform = pipeline
    return dataset, {}


class Images:
    """Images with their labels."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return PIXELS + np.uint8(index), index


@functools.cache
def photos() -> tempfile.TemporaryDirectory[str]:
    """A folder of classes with one image each, which lives as long as this process."""
    folder = tempfile.TemporaryDirectory()
    for label in range(12):
        (Path(folder.name) / f"{label:02}").mkdir()
        image = Image.fromarray(np.kron(PIXELS[:16, :16], np.ones((9, 9, 1), np.uint8)))
        image.save(Path(folder.name) / f"{label:02}" / "0.png")
    return folder


# Each makes a dataset and the options of its loader anew, with one pipeline.
KINDS: dict[str, Any] = {
    "crop": lambda: of_dataset(A.Compose([A.RandomCrop(8, 8)])),
    "single transform": lambda: of_dataset(A.RandomCrop(8, 8)),
    "seed": lambda: of_dataset(A.Compose([A.RandomCrop(8, 8)], seed=5)),
    "nested": lambda: of_dataset(nested()),
    "replay": lambda: of_dataset(A.ReplayCompose([A.HorizontalFlip(), A.RandomCrop(8, 8)])),
    "stream": lambda: (CornerStream(), {}),
    "collate_fn": lambda: ([*range(12)], {"collate_fn": CropsBatch()}),
    "cached": lambda: (CachedDataset(Images(), cropping(A.ToTensorV2())), {}),
    "encoded": lambda: (CachedDataset(ImageFolder(photos().name), cropping(), cache=None), {}),
}
WAYS: dict[str, Any] = {
    "alone": {},
    "one worker": {"num_workers": 1},
    "two workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 2, "worker_type": "thread"},
}


def digest(kind: str, way: str, seeding: Any) -> str:
    """Eight digits that decide what two epochs bring."""
    dataset, options = KINDS[kind]()
    epochs = run(dataset, 2, seeding=seeding, shuffle=kind != "stream", **options, **WAYS[way])
    return hashlib.blake2b(repr(plain(epochs)).encode(), digest_size=4).hexdigest()
