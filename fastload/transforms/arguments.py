"""Check the arguments that transforms share."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any


def height_and_width(size: Any) -> tuple[int, int]:
    """Height and width from one or two ints.

    Raises:
        TypeError: It is not one or two ints.
        ValueError: A side has no pixel.
    """
    sizes = tuple(size) if isinstance(size, Sequence) and not isinstance(size, (str, bytes)) else (size, size)
    try:
        numbers = tuple(operator.index(number) for number in sizes)
    except TypeError:
        numbers = ()
    if len(numbers) != 2:
        raise TypeError(
            f"size should be an int, or the height and the width, two ints, but got {size!r:.200}"
        )
    if min(numbers) < 1:
        raise ValueError(f"size should be at least 1 pixel, but got {size!r}")
    return numbers[0], numbers[1]


def range_of(name: str, values: Any, maximum: float = math.inf) -> tuple[float, float]:
    """Two positive numbers, the lower one first.

    Raises:
        ValueError: They are not.
    """
    try:
        low, high = (float(value) for value in values)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (0 < low <= high <= maximum and high < math.inf):
        limit = "" if maximum == math.inf else f" and at most {maximum}"
        raise ValueError(
            f"{name} should be two numbers above 0{limit}, the lower one first, but got {values!r}"
        )
    return low, high


def probability(p: Any) -> float:
    """A number from 0 to 1.

    Raises:
        TypeError: It is not a number.
        ValueError: It is out of its range.
    """
    try:
        number = float(p)
    except (TypeError, ValueError):
        raise TypeError(f"p should be a probability from 0 to 1, but got {p!r:.200}") from None
    if not 0 <= number <= 1:
        raise ValueError(f"p should be a probability from 0 to 1, but got {p!r}")
    return number
