"""The steps of albumentations' pipelines: whose they are, and copies of them for one call.

A copy shares the generators that the original has at this moment, because seeding can replace them. So copies
are made for each call, and never kept.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_RELEASE = "2.0.8"


def is_tested_release() -> bool:
    """Whether albumentations is of the one release whose code the tests compare and run."""
    return getattr(sys.modules.get("albumentations"), "__version__", None) == _RELEASE


def is_of_albumentations(step: Any) -> bool:
    """Whether a pipeline or step is of a class of albumentations itself."""
    return type(step).__module__.partition(".")[0] == "albumentations"


def is_replayed(step: Any) -> bool:
    """Whether a step belongs to a pipeline that records or replays its parameters."""
    return bool(getattr(step, "replay_mode", False) or getattr(step, "deterministic", False))


def shallow_copy(step: Any) -> Any:
    """A copy with the same attributes; albumentations does not define `__copy__`, and copy.copy is slower."""
    clone = object.__new__(type(step))
    clone.__dict__.update(step.__dict__)
    return clone


def with_image_part(step: Any, apply: Callable[..., Any]) -> Any:
    """A copy of a step that calls ``apply`` for the image; it draws, and treats other targets, as before."""
    copied = shallow_copy(step)
    copied._key2func = {**step._key2func, "image": apply}
    return copied
