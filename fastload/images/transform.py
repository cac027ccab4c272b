"""Call a transform of images by its library's convention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def is_albumentations(value: Any) -> bool:
    """Whether a value is an albumentations pipeline or transform, without importing albumentations."""
    return any(base.__module__.partition(".")[0] == "albumentations" for base in type(value).__mro__)


def transform_image(transform: Callable[..., Any], image: Any) -> Any:
    """The transformed image: albumentations takes and returns it by name, all others by position."""
    return transform(image=image)["image"] if is_albumentations(transform) else transform(image)
