"""Pieces of ten photographs, a class for each, and a small network that learns to tell them apart.

A sample is a gray piece of 500 x 375 pixels, turned by a multiple of 90 degrees, with changed contrast and
with grain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jpegs import QUALITY
from photos import SOURCES, encode_jpeg, load_photo
from PIL import Image

if TYPE_CHECKING:
    from pathlib import Path

NUM_CLASSES = 10
PIECE_SHARE = (0.3, 0.6)
GRAIN = 20.0


def make_pieces(folder: Path, count: int, seed: int) -> None:
    """Gray pieces of ten photographs, a folder for each."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        source = SOURCES[number % NUM_CLASSES]
        photo = load_photo(source).convert("L")
        scale = min(photo.width / 500, photo.height / 375) * rng.uniform(*PIECE_SHARE)
        width, height = 500 * scale, 375 * scale
        left, top = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
        box = (left, top, left + width, top + height)
        piece = np.asarray(photo.resize((500, 375), Image.Resampling.BICUBIC, box=box)).astype(np.float32)
        piece = np.rot90(piece, rng.integers(4))
        piece = 128 + (piece - piece.mean()) * rng.uniform(0.4, 1.0) + rng.normal(0, GRAIN, piece.shape)
        path = folder / source.name / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(piece.round().clip(0, 255).astype(np.uint8)).convert("RGB")
        path.write_bytes(encode_jpeg(image, QUALITY))


def network() -> torch.nn.Module:
    """Three convolutions and a linear layer."""
    layers: list[torch.nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [
            torch.nn.Conv2d(before, after, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(after),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
        ]
    return torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, NUM_CLASSES)
    )


def pixels(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 3, 1, 2).float().sub(128).div(64)
