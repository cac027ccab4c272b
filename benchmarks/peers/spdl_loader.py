"""SPDL: stages in threads of this process, or in worker processes.

Photographs are decoded by Pillow and cropped by albumentations, as in other contenders; or spdl.io decodes,
crops and mirrors them through FFmpeg's filters.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import spdl.io
import torch
from common import FLIP, NUM_WORKERS, RATIO, SCALE, Crop, Job, decoded
from spdl.pipeline import PipelineBuilder
from spdl.pipeline.defs import MAIN_PROCESS, ProcessPoolExecutorConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PACKAGE = "spdl"


class Batches:
    """Shuffled lists of indices, one epoch an iteration."""

    def __init__(self, job: Job) -> None:
        self._num_images = job.task.num_images
        self._batch_size = job.task.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self._num_images))
        random.shuffle(order)
        for start in range(0, len(order), self._batch_size):
            yield order[start : start + self._batch_size]


class Make:
    """A stage that makes a batch of a list of indices.

    "Best Practices": "Avoid creating intermediate tensors", so a batch is written once. A worker process
    that gets the stage by pickling reads the images itself.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._labels = torch.tensor(job.labels)
        self._images: Any = None
        self._crop = Crop() if job.task.crops else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_images": None}

    def _image(self, index: int) -> Any:
        if self._job.task.side:
            return self._images[index]
        # "Migrating from PyTorch DataLoader", Decoding images in threads: Pillow releases the GIL.
        return decoded(self._job.photos[index][0])

    def read(self) -> None:
        """Read the images that are to be in memory."""
        if self._images is None and self._job.task.side:
            self._images = np.load(self._job.images)

    def __call__(self, indices: list[int]) -> tuple[Any, Any]:
        """Images and labels."""
        self.read()
        if self._crop is None:
            batch = np.take(self._images, indices, axis=0)
        else:
            side = self._job.task.out_side
            batch = np.empty((len(indices), side, side, 3), np.uint8)
            for row, index in enumerate(indices):
                batch[row] = self._crop(self._image(index))
        return torch.from_numpy(batch), self._labels[indices]


class MakeBySpdl:
    """The same of photographs, with everything done by spdl.io.

    "Migrating from PyTorch DataLoader", Switching to SPDL I/O: demux, decode with filters, convert_frames.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._labels = torch.tensor(job.labels)

    def _frames(self, index: int) -> Any:
        packets = spdl.io.demux_image(self._job.photos[index][0])
        width, height, left, top = random_box(packets.width, packets.height)
        side = self._job.task.out_side
        steps = [f"crop={width}:{height}:{left}:{top}", f"scale={side}:{side}:flags=bilinear"]
        if random.random() < FLIP:
            steps.append("hflip")
        return spdl.io.decode_packets(packets, filter_desc=",".join([*steps, "format=pix_fmts=rgb24"]))

    def __call__(self, indices: list[int]) -> tuple[Any, Any]:
        """Images and labels."""
        batch = spdl.io.convert_frames([self._frames(index) for index in indices])
        return spdl.io.to_torch(batch), self._labels[indices]


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Width, height, left and top of what RandomResizedCrop keeps; where ten draws miss, a square."""
    for _ in range(10):
        area = width * height * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            break
    else:
        box_width = box_height = min(width, height)
    left, top = random.randint(0, width - box_width), random.randint(0, height - box_height)
    return box_width, box_height, left, top


class Epochs:
    """Each iteration is an epoch."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._pipeline.start()

    def __iter__(self) -> Iterator[Any]:
        yield from self._pipeline

    def close(self) -> None:
        """End its threads and processes."""
        self._pipeline.stop()


def epochs(job: Job, variant: str) -> Iterable[Any]:
    """Each iteration is an epoch."""
    # "Execution Models: MT, MTP, and MP": a continuous source keeps the pipeline over epochs.
    builder = PipelineBuilder().add_source(Batches(job), continuous=True)
    if variant == "processes":
        # The same page: MP, for stages that hold the GIL.
        workers = ProcessPoolExecutorConfig(max_workers=NUM_WORKERS)
        builder = builder.to(workers).pipe(Make(job)).to(MAIN_PROCESS).add_sink(2)
        return Epochs(builder.build(num_threads=1))
    # The same page: MT, "start with MT when the heavy stages release the GIL".
    make: Any = MakeBySpdl(job) if variant == "spdl.io" else Make(job)
    if variant == "threads":
        make.read()
    builder = builder.pipe(make, concurrency=NUM_WORKERS).add_sink(2)
    return Epochs(builder.build(num_threads=NUM_WORKERS))
