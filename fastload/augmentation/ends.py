"""Where the ends of pipelines take a shorter way: where samples are read, with and without a cache."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fastload.readers import patches

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

# As `patches.READERS`.
ENDS = {
    "torchvision.transforms": "fastload.augmentation.torchvision_end",
    "torchvision.transforms.v2": "fastload.augmentation.torchvision_end:patches_of_v2",
}
_met = patches.installed(ENDS)


def met() -> AbstractContextManager[None] | None:
    """Meet the libraries of the ends during a fetch; None: none of them is imported."""
    return _met if "torchvision.transforms" in sys.modules else None
