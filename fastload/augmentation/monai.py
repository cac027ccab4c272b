"""MONAI: a transform is a function of a sample; random ones draw from a RandomState in the attribute `R`."""

from __future__ import annotations

from typing import Any

from fastload.augmentation.library import AugmentationLibrary, RandomClass


class Monai(AugmentationLibrary):
    """MONAI, as far as its transforms draw random numbers."""

    random_classes = (RandomClass("monai.transforms.transform", "Randomizable", {"R": "legacy"}),)

    def owns(self, transform: Any) -> bool:
        """Whether MONAI defines a base class of the transform."""
        return any(base.__module__.partition(".")[0] == "monai" for base in type(transform).__mro__)
