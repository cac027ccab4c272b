"""What the examples read: the folder that you name, the demo's photographs, or a few crops drawn on the spot.

Imported by the other examples, so that started workers and ranks can import it too.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import fastload

PHOTOS = ("astronaut", "chelsea", "coffee", "rocket")  # in the wheel of scikit-image; each is a class
CROPS = 6  # of each
HEIGHT, WIDTH = 150, 200  # of a crop
SIZE = (90, 120)  # (height, width) to which the examples decode


@contextlib.contextmanager
def photo_folder() -> Iterator[Path]:
    """The folder on the command line, else `build/photos` (`make photos`), else one drawn now."""
    if len(sys.argv) > 1:
        yield Path(sys.argv[1])
    elif Path("build/photos").is_dir():
        yield Path("build/photos")
    else:
        with tempfile.TemporaryDirectory() as directory:
            draw(Path(directory))
            yield Path(directory)


def draw(folder: Path) -> None:
    from skimage import data

    rng = np.random.default_rng(0)
    for name in PHOTOS:
        (folder / name).mkdir()
        photo = getattr(data, name)()
        for number in range(CROPS):
            top, left = rng.integers(0, np.subtract(photo.shape[:2], (HEIGHT, WIDTH)))
            crop = photo[top : top + HEIGHT, left : left + WIDTH]
            Image.fromarray(crop).save(folder / name / f"{number}.jpg", quality=90)


class CountedFolder(fastload.ImageFolder):
    """An ImageFolder that notes the number of each picture it decodes in a file, whichever process it is."""

    def __init__(self, root: Path, log: Path) -> None:
        super().__init__(root, SIZE)
        self.log = log
        log.touch()

    def __getitem__(self, index: int) -> Any:
        with self.log.open("a") as log:  # short lines that are appended do not mix
            log.write(f"{index}\n")
        return super().__getitem__(index)

    def decoded(self) -> list[int]:
        """The number of each picture read so far, by any process, in order."""
        return [int(line) for line in self.log.read_text().splitlines()]
