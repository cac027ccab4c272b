"""A selection of an array (`[3, ..., 2:8]`) as plain values for a key."""

from __future__ import annotations

from typing import Any

import numpy as np


def plain_selection(index: Any) -> Any:
    """What stands for an index; object() stands for one that is unusual, and is no part of a key."""
    if type(index) is tuple:
        return tuple(map(plain_selection, index))
    if type(index) is list:
        return [*map(plain_selection, index)]
    if type(index) is slice:
        return ("slice", *map(plain_selection, (index.start, index.stop, index.step)))
    if index is Ellipsis:
        return "..."
    if isinstance(index, np.integer):
        return int(index)
    return index if index is None or type(index) in (int, str) else object()
