"""Several transforms of batches as one function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastload.memory.lease import allocating_in
from fastload.transforms.crop_and_flip import RandomHorizontalFlip, RandomResizedCrop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Compose:
    """Applies transforms of batches in order; can be pickled if they can.

    A `RandomHorizontalFlip` right after a `RandomResizedCrop` of the same images becomes part of the crop,
    which saves a pass over memory. Draws and values stay the same. Subclasses are never merged.
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self._steps: list[Callable[[Any], Any]] = []
        for transform in transforms:
            last = self._steps[-1] if self._steps else None
            if (
                type(last) is RandomResizedCrop
                and type(transform) is RandomHorizontalFlip
                and last.key == transform.key
                and transform.layout in ("auto", last.layout)
            ):
                self._steps[-1] = last.with_flip(transform)
            else:
                self._steps.append(transform)

    def __call__(self, batch: Any) -> Any:
        """Apply all transforms to a batch."""
        if not self._steps:
            return batch
        with allocating_in(None):  # intermediate values do not belong in the memory of the result
            for step in self._steps[:-1]:
                batch = step(batch)
        return self._steps[-1](batch)


def compose(transforms: Callable[[Any], Any] | Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """One function for a transform, or for a list of them."""
    return Compose(transforms) if isinstance(transforms, (list, tuple)) else transforms  # type: ignore[return-value]
