"""The table of the libraries of transforms that fastload knows."""

from __future__ import annotations

from typing import Any

from fastload.augmentation.albumentations.library import Albumentations
from fastload.augmentation.library import AugmentationLibrary
from fastload.augmentation.monai import Monai

LIBRARIES: tuple[AugmentationLibrary, ...] = (Albumentations(), Monai())
ANY_CALLABLE = AugmentationLibrary()  # of all other transforms


def library_of(transform: Any) -> AugmentationLibrary:
    """The library of a transform, or of a class of transforms that has a metaclass of its library."""
    return next((library for library in LIBRARIES if library.owns(transform)), ANY_CALLABLE)
