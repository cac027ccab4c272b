"""Says what to return instead of a value that cannot be cached.

Classes of other libraries are recognized by the names of their modules; no library is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

# By the package that defines the value's class, or a class that it inherits from.
_BY_PACKAGE = {
    "PIL": 'return numpy.asarray(image.convert("RGB")), or numpy.asarray(image) for a mask',
    **dict.fromkeys(("datetime", "decimal", "pathlib", "uuid"), "return str(value)"),
}
_BY_TYPE = (
    (np.ndarray, "return numpy.asarray(array)"),
    ((int, float, str, bytes, bytearray, memoryview), "return a plain int, float, str or bytes"),
    (Mapping, "return a plain dict"),
    ((Set, Sequence), "return a plain list or tuple"),
)
_CACHED = "return arrays, tensors, numbers, str, bytes or None in dicts, lists and tuples"


def advice(value: Any, otherwise: str = _CACHED) -> str:
    """What to return instead of a value, as a clause that begins with "return".

    Args:
        value: The value.
        otherwise: The advice for values of unknown classes.
    """
    for base in type(value).__mro__:
        text = _BY_PACKAGE.get(base.__module__.partition(".")[0])
        if text is not None:
            return text
    if isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ())):
        return "return a plain tensor, for instance tensor.as_subclass(torch.Tensor)"
    return next((text for kinds, text in _BY_TYPE if isinstance(value, kinds)), otherwise)
