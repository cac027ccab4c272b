"""What all contenders share: the tasks, their images, and the crop that Python transforms use.

This file runs in every contender's environment, so it imports nothing but torch and NumPy at the top.
"""

from __future__ import annotations

import functools
import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

NUM_WORKERS = 2
NUM_CLASSES = 10
CROP_SIDE = 224
# The standard rule of RandomResizedCrop, written out so each contender's operator gets the same.
SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
FLIP = 0.5
PADDING = 4


@dataclass(frozen=True)
class Task:
    """What each contender has to deliver.

    Attributes:
        name: Names the task on the command line.
        title: What the table calls it.
        num_images: Images an epoch. Two workers get equal shares of whole batches.
        side: Height and width of the images in memory; 0 stands for photographs of several sizes.
        batch_size: Images a batch.
        crops: Whether each image is cropped to 224 x 224 and perhaps mirrored.
        jpeg_quality: For a contender that encodes photographs anew: its files become about as large.
        pads: Whether each image is padded, cropped to its size again, and perhaps mirrored.
        modules: The contenders that take part; empty for all.
    """

    name: str
    title: str
    num_images: int
    side: int
    batch_size: int
    crops: bool
    jpeg_quality: int = 94
    pads: bool = False
    modules: tuple[str, ...] = ()

    @property
    def out_side(self) -> int:
        """Height and width of the images in a batch."""
        return CROP_SIDE if self.crops else self.side

    @property
    def is_random(self) -> bool:
        """Whether the images differ from epoch to epoch."""
        return self.crops or self.pads


TASKS = [
    Task("cached_224", "224 x 224 x 3 uint8, decoded and in memory, batch 256", 4096, 224, 256, False),
    Task("cached_32", "32 x 32 x 3 uint8, decoded and in memory, batch 256", 51200, 32, 256, False),
    Task(
        "cached_crop", "256 x 256 in memory -> RandomResizedCrop(224) + flip, batch 64", 2048, 256, 64, True
    ),
    Task("jpeg_folder", "JPEG folder -> RandomResizedCrop(224) + flip, batch 64", 1920, 0, 64, True),
    Task(
        "small_images",
        "32 x 32 in memory -> padded random crop + flip, batch 512",
        51200,
        32,
        512,
        False,
        pads=True,
        modules=("torch_loader", "fastload_loader", "ffcv_loader"),
    ),
]


@dataclass(frozen=True)
class Job:
    """A task and where its files are.

    Attributes:
        task: The task, perhaps with fewer images.
        images: The array of decoded images, a file of NumPy's.
        photos: The photographs with their labels.
        work: The contender's own folder, where it writes the images in its format.
    """

    task: Task
    images: Path
    photos: list[tuple[str, int]]
    work: Path

    def save(self, path: Path) -> None:
        """Write the job for the process that will do it."""
        values = {"task": asdict(self.task), "images": str(self.images), "photos": self.photos}
        path.write_text(json.dumps({**values, "work": str(self.work)}))

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read what `save` wrote."""
        values = json.loads(path.read_text())
        photos = [(name, label) for name, label in values["photos"]]
        values["task"]["modules"] = tuple(values["task"]["modules"])
        return cls(Task(**values["task"]), Path(values["images"]), photos, Path(values["work"]))

    @property
    def labels(self) -> list[int]:
        """The label of each image."""
        if self.task.side:
            return [index % NUM_CLASSES for index in range(self.task.num_images)]
        return [label for _, label in self.photos]


@functools.cache
def pipeline(side: int = 0) -> Any:
    """The crop and the flip as albumentations has them; of images of ``side`` the padded crop.

    OpenCV's own threads are off, as albumentations' documentation advises beside workers.
    """
    import albumentations as A
    import cv2

    cv2.setNumThreads(0)
    if side:
        padded = side + 2 * PADDING
        pad = A.PadIfNeeded(padded, padded, border_mode=cv2.BORDER_CONSTANT)
        return A.Compose([pad, A.RandomCrop(side, side), A.HorizontalFlip(p=FLIP)])
    return A.Compose(
        [
            A.RandomResizedCrop((CROP_SIDE, CROP_SIDE), scale=SCALE, ratio=RATIO),
            A.HorizontalFlip(p=FLIP),
        ]
    )


class Crop:
    """The same as a function of one image, which threads can share: each thread has its own pipeline."""

    def __init__(self, side: int = 0) -> None:
        self._side = side
        self._local = threading.local()

    def __reduce__(self) -> Any:
        return Crop, (self._side,)

    def __call__(self, image: Any) -> Any:
        """The cropped and perhaps mirrored image."""
        if not hasattr(self._local, "pipeline"):
            self._local.pipeline = pipeline.__wrapped__(self._side)
        return self._local.pipeline(image=image)["image"]


class InMemory:
    """Decoded images in one array, as users write it: sample k is an image and its label.

    A process that gets the object by pickling reads the array again, so it is never sent.
    """

    def __init__(self, job: Job) -> None:
        self._path = job.images
        self._num_images = job.task.num_images
        self._pixels: Any = None
        self.transform = Crop(job.task.side if job.task.pads else 0) if job.task.is_random else None

    def read(self) -> None:
        """Read the images, unless this process has them."""
        if self._pixels is None:
            self._pixels = np.load(self._path)

    @property
    def pixels(self) -> Any:
        """All images."""
        self.read()
        return self._pixels

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pixels": None}

    def __len__(self) -> int:
        return self._num_images

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.pixels[index]
        if self.transform is not None:
            image = self.transform(image)
        return image, int(index) % NUM_CLASSES


class Photos:
    """JPEG files that are decoded by Pillow on every access."""

    def __init__(self, job: Job) -> None:
        self.photos = job.photos
        self.transform: Any = Crop()

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.photos[index]
        image = decoded(path)
        return (image if self.transform is None else self.transform(image)), label


def decoded(file: Any) -> Any:
    """The pixels of a JPEG file, through Pillow."""
    from PIL import Image

    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


def dataset(job: Job) -> Any:
    """The images of a job as a dataset with `__len__` and `__getitem__`, its transform included."""
    if not job.task.side:
        return Photos(job)
    images = InMemory(job)
    images.read()  # before workers are forked
    return images
