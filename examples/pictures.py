"""Shared by the examples, and not part of the templates: a folder of pictures, and a small network to train.

The other examples import it as a module, which newly started workers and ranks can import, too.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

PHOTOS = ("astronaut", "chelsea", "coffee", "rocket")  # in the wheel of scikit-image; each is a class
CROPS = 6  # of each
HEIGHT, WIDTH = 150, 200  # of a crop
SIZE = (90, 120)  # (height, width) to which the examples decode


@contextlib.contextmanager
def photo_folder() -> Iterator[Path]:
    """The folder on the command line, else `build/photos` (`make photos`), else one that is drawn now."""
    if len(sys.argv) > 1:
        yield Path(sys.argv[1])
    elif Path("build/photos").is_dir():
        yield Path("build/photos")
    else:
        with tempfile.TemporaryDirectory() as directory:
            draw(Path(directory))
            yield Path(directory)


def draw(folder: Path) -> None:
    """Save crops of some photographs as JPEGs, in a folder for each photograph."""
    try:
        from skimage import data
    except ImportError:
        raise SystemExit("Name a folder of pictures, or: pip install scikit-image") from None

    rng = np.random.default_rng(0)
    for name in PHOTOS:
        (folder / name).mkdir()
        photo = getattr(data, name)()
        for number in range(CROPS):
            top, left = rng.integers(0, np.subtract(photo.shape[:2], (HEIGHT, WIDTH)))
            crop = photo[top : top + HEIGHT, left : left + WIDTH]
            Image.fromarray(crop).save(folder / name / f"{number}.jpg", quality=90)


def small_network(num_outputs: int) -> nn.Module:
    """(B, 3, H, W) floats to (B, num_outputs), with channels-last weights; your model takes its place."""
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, num_outputs),
    )
    return network.to(memory_format=torch.channels_last)
