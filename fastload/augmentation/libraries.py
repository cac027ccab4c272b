"""The table of the libraries of transforms that fastload knows.

To add a library, derive a class from `AugmentationLibrary`, here or in a folder beside this file, and add an
instance to `LIBRARIES`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fastload.augmentation.albumentations.library import Albumentations
from fastload.augmentation.library import AugmentationLibrary, RandomClass
from fastload.augmentation.torchvision import OfOneImage
from fastload.system.torchvision_arrays import V1_MODULE


class Monai(AugmentationLibrary):
    """MONAI: a transform is a function of a sample; random ones draw from a RandomState in `R`."""

    package = "monai"
    random_classes = (RandomClass("monai.transforms.transform", "Randomizable", {"R": "legacy"}),)


LIBRARIES: tuple[AugmentationLibrary, ...] = (Albumentations(), Monai(), OfOneImage())
ANY_CALLABLE = AugmentationLibrary()  # of all other transforms


def library_of(transform: Any) -> AugmentationLibrary:
    """The library of a transform, or of a class of transforms that has a metaclass of its library."""
    return next((library for library in LIBRARIES if library.owns(transform)), ANY_CALLABLE)


def check_is_no_class(role: str, function: Any) -> None:
    """Check that a user's function is not a class of transforms, which makes a transform when it is called.

    Raises:
        TypeError: It is; the error begins with the role, the name of the user's argument.
    """
    if isinstance(function, type) and (
        library_of(function) is not ANY_CALLABLE
        or function.__module__.startswith(V1_MODULE)
        or issubclass(function, nn.Module)
    ):
        raise TypeError(
            f"{role} is the class {function.__name__}: pass an instance of it, such as "
            f"{role}={function.__name__}(...)"
        )


def check_takes_batches(role: str, function: Any) -> None:
    """Check a user's function of whole batches.

    Raises:
        TypeError: It is a class of transforms, or takes single arrays, as albumentations does.
    """
    check_is_no_class(role, function)
    called = next((base for base in type(function).__mro__ if "__call__" in vars(base)), object)
    if called.__module__.partition(".")[0] == Albumentations.package:
        raise TypeError(
            f"{role} gets whole batches, but albumentations' {type(function).__name__} augments single "
            "arrays: pass it to fastload.CachedDataset(dataset, transform), or call it in the dataset"
        )
