"""Several transforms of batches as one function."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from fastload.memory.lease import allocating_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Transform = Callable[[Any], Any]


def compose(transforms: Transform | Sequence[Transform]) -> Transform:
    """One function for a transform, or for a list of them; can be pickled if they can."""
    steps: Any = transforms if isinstance(transforms, (list, tuple)) else [transforms]
    return functools.partial(_apply, list(steps))


def _apply(steps: list[Transform], batch: Any) -> Any:
    try:
        with allocating_in(None):  # intermediate values do not belong in the memory of the result
            for step in steps[:-1]:
                batch = step(batch)
        return steps[-1](batch) if steps else batch
    except StopIteration as error:  # the epoch would end here, without a word
        raise RuntimeError("a transform of batches raised StopIteration") from error
