"""NVIDIA DALI, its CPU pipeline: images from memory through ExternalSource, photographs by its reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from common import CROP_SIDE, FLIP, NUM_WORKERS, RATIO, SCALE, Job
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PACKAGE = "nvidia-dali-cuda120"


class FromMemory:
    """Shuffled batches, one epoch an iteration: a list of views for each batch, or an array.

    "ExternalSource operator" takes either. Small images are cheaper to copy into an array than to list.
    """

    def __init__(self, job: Job) -> None:
        self._images = np.load(job.images)
        self._labels = np.array(job.labels, dtype=np.int64).reshape(-1, 1)
        self._batch_size = job.task.batch_size
        self._rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        order = self._rng.permutation(len(self._images))
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            small = self._images[0].nbytes < 10_000
            images = self._images[batch] if small else [self._images[index] for index in batch]
            yield images, self._labels[batch]


def augmented(images: Any, *, resized: bool) -> Any:
    """Crop, resize and flip by DALI's operators."""
    # The interpolation is linear and without a low-pass filter, as OpenCV's in the other contenders.
    linear = {"interp_type": types.INTERP_LINEAR, "antialias": False}
    if resized:
        images = fn.resize(images, size=(CROP_SIDE, CROP_SIDE), **linear)
    else:
        images = fn.random_resized_crop(
            images,
            size=(CROP_SIDE, CROP_SIDE),
            random_area=SCALE,
            random_aspect_ratio=RATIO,
            **linear,
        )
    return fn.flip(images, horizontal=fn.random.coin_flip(probability=FLIP))


@pipeline_def
def from_memory(job: Job) -> Any:
    """Images that exist already."""
    # nvidia.dali.fn.external_source: with no_copy=True, DALI reads the user's memory.
    images, labels = fn.external_source(
        FromMemory(job),
        num_outputs=2,
        cycle="raise",
        no_copy=True,
        layout=["HWC", None],
        dtype=[types.UINT8, types.INT64],
    )
    return (augmented(images, resized=False) if job.task.crops else images), labels


@pipeline_def
def from_photos(job: Job) -> Any:
    """JPEG files, decoded and cropped in one step."""
    # "ImageNet Training in PyTorch": readers.file, decoders.image_random_crop, resize.
    files, labels = fn.readers.file(
        files=[name for name, _ in job.photos],
        labels=[label for _, label in job.photos],
        random_shuffle=True,
        initial_fill=1024,
        name="reader",
    )
    images = fn.decoders.image_random_crop(
        files, device="cpu", output_type=types.RGB, random_area=SCALE, random_aspect_ratio=RATIO
    )
    return augmented(images, resized=True), labels


class Epochs:
    """Each iteration is an epoch."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for outputs in self._iterator:
            batch = outputs[0]
            yield batch["image"], batch["label"].flatten()


def epochs(job: Job, variant: str) -> Iterable[Any]:
    """Each iteration is an epoch."""
    make = from_memory if job.task.side else from_photos
    built = make(
        job,
        batch_size=job.task.batch_size,
        num_threads=NUM_WORKERS,
        device_id=None,  # "Pipeline": device_id=None for pipelines that use the CPU alone
        seed=0,
    )
    policy: dict[str, Any] = {"last_batch_policy": LastBatchPolicy.PARTIAL, "auto_reset": True}
    if job.task.side:
        return Epochs(DALIGenericIterator(built, ["image", "label"], size=-1, **policy))
    return Epochs(DALIGenericIterator(built, ["image", "label"], reader_name="reader", **policy))
