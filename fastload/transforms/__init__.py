"""Transforms of whole batches of images, in workers and on the device.

Give them to a `fastload.DataLoader` as `device_transform`, or call them on batches of your own.
"""

from fastload.transforms.crop_and_flip import (
    RandomHorizontalFlip as RandomHorizontalFlip,
)
from fastload.transforms.crop_and_flip import (
    RandomResizedCrop as RandomResizedCrop,
)
from fastload.transforms.normalize import Normalize as Normalize

__all__ = ["Normalize", "RandomHorizontalFlip", "RandomResizedCrop"]
