"""Several transforms of a batch, one after another: a `device_transform` that is a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastload.device.augment import RandomHorizontalFlip, RandomResizedCrop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def chained(transforms: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """One function that applies all transforms in their order.

    A `RandomHorizontalFlip` right after a `RandomResizedCrop` of the same images becomes a part of the crop,
    which saves a pass over memory. Draws and values stay the same. Subclasses are called as they are.
    """
    steps: list[Callable[[Any], Any]] = []
    for transform in transforms:
        last = steps[-1] if steps else None
        if (
            type(last) is RandomResizedCrop
            and type(transform) is RandomHorizontalFlip
            and last.key == transform.key
            and transform.layout in ("auto", last.layout)
        ):
            steps[-1] = last._with_flip(transform)
        else:
            steps.append(transform)

    def apply(batch: Any) -> Any:
        for step in steps:
            batch = step(batch)
        return batch

    return apply
