"""WebDataset: tar files that are read in sequence, one share of them in each worker.

It shuffles the order of the tar files and, of the samples, a buffer: less than all others do.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import webdataset as wds
from common import NUM_WORKERS, Crop, Job

if TYPE_CHECKING:
    from collections.abc import Iterable

PACKAGE = "webdataset"
NUM_SHARDS = 16  # the same number for each worker


def prepare(job: Job) -> None:
    """Write the tar files: pixels as NumPy's files, photographs as they are."""
    images = np.load(job.images) if job.task.side else None
    per_shard = job.task.num_images // NUM_SHARDS
    # A whole number as the files' time saves readers a header of 1 kB for each file.
    with wds.ShardWriter(str(job.work / "%04d.tar"), maxcount=per_shard, verbose=0, mtime=0) as writer:
        for index, label in enumerate(job.labels):
            sample: dict[str, Any] = {"__key__": f"{index:06d}", "cls": label}
            if images is None:
                with open(job.photos[index][0], "rb") as file:
                    sample["jpg"] = file.read()
            else:
                buffer = io.BytesIO()
                np.save(buffer, images[index])
                sample["npy"] = buffer.getvalue()
            writer.write(sample)


class Cropped:
    """Crops the image of a sample."""

    def __init__(self) -> None:
        self._crop = Crop()

    def __call__(self, sample: tuple[Any, int]) -> tuple[Any, int]:
        """The sample with its image cropped."""
        return self._crop(sample[0]), sample[1]


def epochs(job: Job, variant: str) -> Iterable[Any]:
    """Each iteration is an epoch."""
    urls = sorted(str(path) for path in job.work.glob("*.tar"))
    # "The webdataset Pipeline API" and "Resnet 50 Training on (Fake)Imagenet with WebDataset": shards in
    # random order, .shuffle(1000), decode, and batches made in the workers. Their batches are not mixed
    # again in this process (.unbatched().shuffle().batched()), which would cost a copy more.
    samples = wds.WebDataset(urls, shardshuffle=NUM_SHARDS).shuffle(1000).decode("rgb8")
    samples = samples.to_tuple("npy" if job.task.side else "jpg", "cls")
    if job.task.crops:
        samples = samples.map(Cropped())
    batches = samples.batched(job.task.batch_size)
    return wds.WebLoader(batches, batch_size=None, num_workers=NUM_WORKERS, persistent_workers=True)
