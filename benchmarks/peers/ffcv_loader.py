"""FFCV: its own file format, compiled pipelines and threads.

Its writer encodes each JPEG anew, as RGBImageField takes pixels. The quality is chosen to give files
about as large as the photographs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from common import CROP_SIDE, FLIP, NUM_WORKERS, PADDING, RATIO, SCALE, Job, Photos
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, RandomTranslate, Squeeze, ToTensor
from ffcv.writer import DatasetWriter

if TYPE_CHECKING:
    from collections.abc import Iterable

PACKAGE = "ffcv"


class Decoded:
    """Images and labels as the writer takes them."""

    def __init__(self, job: Job) -> None:
        if job.task.side:
            self._images: Any = np.load(job.images)
        else:
            photos = Photos(job)
            photos.transform = None
            self._images = photos
        self._labels = job.labels
        self._of_photos = not job.task.side

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self._images[index]
        return (image[0] if self._of_photos else image), self._labels[index]


def prepare(job: Job) -> None:
    """Write the images in FFCV's format."""
    # "Working with Image Data in FFCV": raw "will usually yield the best performance" where memory suffices.
    photo = RGBImageField(write_mode="jpg", jpeg_quality=job.task.jpeg_quality)
    fields = {"image": RGBImageField(write_mode="raw") if job.task.side else photo, "label": IntField()}
    DatasetWriter(str(job.work / "images.beton"), fields, num_workers=2).from_indexed_dataset(Decoded(job))


def epochs(job: Job, variant: str) -> Iterable[Any]:
    """Each iteration is an epoch."""
    # "Working with Image Data in FFCV", Decoding options.
    image: list[Any] = [SimpleRGBImageDecoder()]
    if job.task.crops:
        decoder = RandomResizedCropRGBImageDecoder((CROP_SIDE, CROP_SIDE), scale=SCALE, ratio=RATIO)
        image = [decoder, RandomHorizontalFlip(FLIP)]
    elif job.task.pads:  # "Training CIFAR-10 in 36 seconds on a single A100"
        image += [RandomHorizontalFlip(FLIP), RandomTranslate(padding=PADDING)]
    # "Tuning Guide", Scenario: Small dataset: os_cache=True with OrderOption.RANDOM or QUASI_RANDOM.
    return Loader(
        str(job.work / "images.beton"),
        batch_size=job.task.batch_size,
        num_workers=NUM_WORKERS,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={"image": [*image, ToTensor()], "label": [IntDecoder(), ToTensor(), Squeeze(1)]},
    )
