"""Several transforms of batches as one function."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from fastload.memory.lease import allocating_in
from fastload.transforms.crop_and_flip import RandomHorizontalFlip, RandomResizedCrop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Transform = Callable[[Any], Any]


def compose(transforms: Transform | Sequence[Transform]) -> Transform:
    """One function for a transform, or for a list of them; can be pickled if they can.

    A `RandomHorizontalFlip` right after a `RandomResizedCrop` of the same images becomes part of the crop,
    which saves a pass over memory. Draws and values stay the same. Subclasses are never merged.
    """
    if not isinstance(transforms, (list, tuple)):
        return transforms  # type: ignore[return-value]
    steps: list[Transform] = []
    for transform in transforms:
        last = steps[-1] if steps else None
        if (
            type(last) is RandomResizedCrop
            and type(transform) is RandomHorizontalFlip
            and last.key == transform.key
            and transform.layout in ("auto", last.layout)
        ):
            steps[-1] = last.with_flip(transform)
        else:
            steps.append(transform)
    return functools.partial(_apply, steps)


def _apply(steps: list[Transform], batch: Any) -> Any:
    if not steps:
        return batch
    with allocating_in(None):  # intermediate values do not belong in the memory of the result
        for step in steps[:-1]:
            batch = step(batch)
    return steps[-1](batch)
