"""The table of the libraries of transforms that fastload knows.

To add a library, derive a class from `AugmentationLibrary`, here or in a folder beside this file, and add an
instance to `LIBRARIES`.
"""

from __future__ import annotations

from typing import Any

from fastload.augmentation.albumentations.library import Albumentations
from fastload.augmentation.library import AugmentationLibrary, RandomClass
from fastload.augmentation.torchvision import OfOneImage


class Monai(AugmentationLibrary):
    """MONAI: a transform is a function of a sample; random ones draw from a RandomState in `R`."""

    package = "monai"
    random_classes = (RandomClass("monai.transforms.transform", "Randomizable", {"R": "legacy"}),)


LIBRARIES: tuple[AugmentationLibrary, ...] = (Albumentations(), Monai(), OfOneImage())
ANY_CALLABLE = AugmentationLibrary()  # of all other transforms


def library_of(transform: Any) -> AugmentationLibrary:
    """The library of a transform, or of a class of transforms that has a metaclass of its library."""
    return next((library for library in LIBRARIES if library.owns(transform)), ANY_CALLABLE)
