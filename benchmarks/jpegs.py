"""JPEGs of some sizes for benchmarks: crops of the photographs in scikit-image and scikit-learn.

Each is scaled to its size and encoded at quality 90; large ones get the grain of a sensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from photos import SOURCES, encode_jpeg, load_photo
from PIL import Image

if TYPE_CHECKING:
    from pathlib import Path

NUM_CLASSES = 10
QUALITY = 90
CROP_SHARE = (0.6, 1.0)  # of the largest crop of a photograph with the right aspect


@dataclass(frozen=True)
class Size:
    """Images of one size.

    Attributes:
        width: In pixels.
        height: In pixels.
        num_images: In an epoch.
        grain: Standard deviation of the sensor's grain, in gray levels.
    """

    width: int
    height: int
    num_images: int
    grain: float

    @property
    def title(self) -> str:
        """As the tables have it."""
        return f"{self.width} x {self.height}"


SMALL, LARGE = Size(500, 375, 768, 0.0), Size(2048, 1536, 128, 3.0)


def make_images(folder: Path, size: Size) -> None:
    """Write the JPEGs of an epoch below ``folder``, in a folder for each of ten photographs."""
    for number in range(size.num_images):
        source = SOURCES[number % NUM_CLASSES]
        path = folder / source.name / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_image(load_photo(source), size, number))


def make_image(photo: Image.Image, size: Size, number: int) -> bytes:
    """A random crop of a photograph, scaled and encoded; it depends on the size and on ``number`` alone."""
    rng = np.random.default_rng([size.width, number])
    scale = min(photo.width / size.width, photo.height / size.height) * rng.uniform(*CROP_SHARE)
    width, height = size.width * scale, size.height * scale
    left, top = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
    box = (left, top, left + width, top + height)
    image = photo.resize((size.width, size.height), Image.Resampling.LANCZOS, box=box)
    if size.grain:
        grain = rng.standard_normal((size.height, size.width, 1), dtype=np.float32) * size.grain
        image = Image.fromarray((np.asarray(image) + grain).round().clip(0, 255).astype(np.uint8))
    return encode_jpeg(image, QUALITY)
