"""Images for train.py: four fifths to train on, one fifth to evaluate, from a cache or from the files.

A class of the demo holds crops of one photograph: the accuracy shows that something is learnt, no more.
"""

import argparse
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import albumentations as A
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import fastload

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


class Transformed(Dataset):
    """What one writes without a cache: read an image, transform it."""

    def __init__(self, source: Dataset, transform: A.Compose) -> None:
        self.source = source
        self.transform = transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self.source[index]
        return self.transform(image=image)["image"], label


class Data:
    """The two datasets, and new loaders of them.

    Batches are `(B, H, W, 3)` uint8, or float32 if the workers normalize, and `(B,)` int64 labels.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        if not options.photos.is_dir():
            raise SystemExit(
                f"There is no folder {options.photos}. `make photos` draws build/photos; --photos can name "
                "any folder that has a folder of images for each class."
            )
        self.options = options
        self.device = device
        side = options.size * 9 // 8  # a little more than the crop takes
        folder = fastload.ImageFolder(options.photos, size=(side, side))
        self.classes = folder.classes
        numbers = range(len(folder))
        train = Subset(folder, [number for number in numbers if number % 5])
        held_out = Subset(folder, [number for number in numbers if number % 5 == 0])
        size = options.size
        self.train = self._open(train, A.RandomCrop(size, size), A.HorizontalFlip(p=0.5))
        self.held_out = self._open(held_out, A.CenterCrop(size, size))

    def _open(self, source: Dataset, *steps: A.BasicTransform) -> Dataset:
        in_workers = not self.options.normalize_on_device and not self.options.input_batchnorm
        normalize = [A.Normalize(MEAN, STD)] if in_workers else []
        # The seed counts without workers; each worker makes a stream of its own of it.
        transform = A.Compose([*steps, *normalize], seed=self.options.seed)
        if self.options.shared_cache:
            return fastload.CachedDataset(source, transform=transform, cache="ram")
        return Transformed(source, transform)

    def fill(self) -> None:
        """Read every image into the cache now, if there is one; else the first epoch does."""
        for dataset in (self.train, self.held_out):
            if isinstance(dataset, fastload.CachedDataset):
                dataset.fill(self.options.workers, progress=False)

    @contextlib.contextmanager
    def train_loader(self, generator: torch.Generator) -> Iterator[Iterable[Any]]:
        """Shuffled batches on the device; a short last one is omitted: all have one shape."""
        whole = len(self.train) >= self.options.batch_size
        with self._loader(self.train, shuffle=True, drop_last=whole, generator=generator) as loader:
            yield loader

    @contextlib.contextmanager
    def held_out_loader(self) -> Iterator[Iterable[Any]]:
        """All images that are not trained on, in order, on the device."""
        with self._loader(self.held_out, generator=torch.Generator()) as loader:
            yield loader

    @contextlib.contextmanager
    def _loader(self, dataset: Dataset, **arguments: Any) -> Iterator[Iterable[Any]]:
        options = self.options
        on_cuda = self.device.type == "cuda"
        arguments |= {
            "batch_size": options.batch_size,
            "num_workers": 0 if options.debug else options.workers,
            # The prefetcher pins what it copies by itself.
            "pin_memory": on_cuda and options.pinned and not options.prefetcher,
        }
        with contextlib.ExitStack() as stack:
            if options.fastload_loader:
                # Stops its workers at the end of the block, also after an error.
                loader = stack.enter_context(fastload.DataLoader(dataset, **arguments))
            else:
                # torch's loader repeats albumentations' crops in each worker without this.
                loader = DataLoader(dataset, worker_init_fn=fastload.seed_worker, **arguments)
            if on_cuda and options.prefetcher:
                yield fastload.DevicePrefetcher(loader, self.device, depth=2)
            else:
                yield Moved(loader, self.device)


class Moved:
    """Copies each batch to the device when it is asked for: at once, or behind the host if it is pinned."""

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self.loader = loader
        self.device = device

    def __iter__(self) -> Iterator[Any]:
        for images, labels in self.loader:
            # Without pinned memory, non_blocking has no effect on copies to the device.
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
