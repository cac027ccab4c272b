"""Says what to return in place of a value that cannot be cached.

Classes of other libraries are recognised by the names of their modules; no library is imported here.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

# By the package that defines the value's class, or a class that it inherits from.
_BY_PACKAGE = {
    "PIL": 'return numpy.asarray(image.convert("RGB")), or numpy.asarray(image) for a mask',
    "monai": "return tensor.as_tensor(), with the entries of tensor.meta that you need as plain values; "
    "monai.transforms.EnsureTyped(keys, track_meta=False) does so without the meta",
    "torch_geometric": "return data.to_dict(), and make the graph again in transform=, by Data.from_dict",
    **dict.fromkeys(("datetime", "decimal", "pathlib", "uuid"), "return str(value)"),
}


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
    if isinstance(value, np.ndarray):
        return "return numpy.asarray(array)"
    if isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ())):
        return "return a plain tensor, for instance tensor.as_subclass(torch.Tensor)"
    if isinstance(value, (int, float, str, bytes)):
        return "return a plain int, float, str or bytes"
    if isinstance(value, Mapping):
        return "return a plain dict"
    if isinstance(value, (Set, Sequence)):
        return "return a plain list or tuple"
    if dataclasses.is_dataclass(value):
        return "return a dict or a namedtuple of its fields"
    return otherwise
