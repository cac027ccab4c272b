"""Find the images in a batch, and the meaning of their dimensions: shared by all transforms of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastload.images.layout import IMAGE_CHANNELS, fitting_layouts

LAYOUTS = ("auto", "HWC", "CHW")

_IMAGE_KEYS = ("image", "images")


def find_images(batch: Any, key: Any, asker: str, expected: str = "a tensor") -> tuple[str, torch.Tensor]:
    """The place of the images in a batch, for messages, and the images.

    Args:
        batch: A tensor, a sequence, or a mapping.
        key: The place of the images: an index, or the key of a mapping; None: the first of a sequence, or
            "image" or "images" in a mapping.
        asker: The subject of messages.
        expected: What messages say that images are.

    Raises:
        TypeError: There is no tensor in the images' place.
        ValueError: The batch has no such place.
    """
    where, found = _look_up(batch, key, asker)
    if not isinstance(found, torch.Tensor):
        raise TypeError(
            f"{asker} expects images as {expected} at {where}, but got {type(found).__name__}; "
            f"name another place with key=, or write a function that calls {asker} on the images of "
            "your batch"
        )
    return where, found


def _look_up(batch: Any, key: Any, asker: str) -> tuple[str, Any]:
    if isinstance(batch, torch.Tensor):
        if key is not None:
            raise ValueError(f"{asker} has key={key!r}, but the batch is a tensor; leave out key=")
        return "$", batch
    if isinstance(batch, Mapping):
        if key is None:
            keys = [name for name in _IMAGE_KEYS if name in batch]
            if len(keys) != 1:
                raise ValueError(
                    f'{asker} expects "image" or "images" in a mapping, but got the keys '
                    f"{list(batch)}; name the key of the images with key="
                )
            key = keys[0]
        elif key not in batch:
            raise ValueError(f"{asker} has key={key!r}, but the batch has the keys {list(batch)}")
        return f"$[{key!r}]", batch[key]
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        index = 0 if key is None else key
        if not isinstance(index, int) or not -len(batch) <= index < len(batch):
            raise ValueError(f"{asker} has key={index!r}, but the batch is a sequence of {len(batch)}")
        return f"$[{index}]", batch[index]
    return "$", batch


def check_layout(layout: str) -> str:
    """``layout`` itself.

    Raises:
        ValueError: It is not in `LAYOUTS`.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout should be one of {', '.join(LAYOUTS)}, but got {layout!r}")
    return layout


def layout_of(images: torch.Tensor, where: str, layout: str, asker: str, num_channels: int = 0) -> str:
    """The layout of a batch of images: "HWC" or "CHW".

    Args:
        images: The batch.
        where: Its place, for messages.
        layout: What the user says, one of `LAYOUTS`.
        asker: The subject of messages.
        num_channels: How many channels images have; 0: "auto" means 1, 3 or 4, a named layout any number.

    Raises:
        ValueError: There are not four dimensions, or the shape fits no layout or both.
    """
    if layout != "auto" and not num_channels and images.ndim == 4:
        return layout
    shape = tuple(images.shape)
    channels = (num_channels,) if num_channels else IMAGE_CHANNELS
    fitting = fitting_layouts(shape, channels) if images.ndim == 4 else []
    named = [found for found in fitting if layout in (found, "auto")]
    if len(named) != 1:
        raise ValueError(
            f"{asker} expects images of shape (B, H, W, C) or (B, C, H, W) at {where}, but got {shape}: with "
            f"{' or '.join(map(str, channels))} channels and layout={layout!r} it fits "
            f'{" and ".join(named) or "neither"}; give layout="HWC" or layout="CHW"'
        )
    return named[0]
