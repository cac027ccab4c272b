"""Decides which transforms can run on the cache's own read-only memory, without a copy.

Rules:

1. NumPy and OpenCV do not write to an array marked read-only. Other libraries ignore the mark and write to
   the pages, which kills the process: torch makes writable tensors of read-only arrays, and older releases of
   stringzilla write in place. So a transform gets private copies unless all of its code is known.
2. The code of one release of albumentations is known: the tests run each of its transforms on sealed memory.
   A pipeline is known if it holds only objects of that library and plain data, and no user subclasses or
   functions. Parts added to a pipeline later are not checked. All such transforms accept the memory of uint8
   images; Normalize divides float32 images in place.
"""

from __future__ import annotations

import random
import types
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.augmentation.albumentations.steps import is_tested_release
from fastload.nested.attributes import attributes

if TYPE_CHECKING:
    from collections.abc import Iterable

# Both call stringzilla, which writes to a grayscale image in place.
_WRITERS = frozenset({"AutoContrast", "Equalize"})
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, np.ndarray, np.random.Generator, random.Random}
)


def only_reads(transform: Any) -> bool:
    """Whether a transform is an albumentations pipeline whose code all respects the read-only mark.

    ToTensorV2 is not accepted: it passes a read-only array to torch.from_numpy, which warns.
    """
    if not is_tested_release() or not _is_known_class(type(transform)):
        return False
    seen = {id(transform): transform}  # keeps the objects alive, so their ids stay unique
    queue = [transform]
    while queue:
        parts = _parts(queue.pop())
        if parts is None:
            return False
        new = {id(part): part for part in parts if id(part) not in seen}
        seen |= new
        queue += new.values()
    return True


def _parts(value: Any) -> Iterable[Any] | None:
    """The parts of an object, or None if it can run unknown code."""
    cls = type(value)
    if cls in _PLAIN or issubclass(cls, (np.generic, np.dtype)):
        return ()
    if isinstance(value, type):  # such as the type of the labels that a pipeline got last
        return () if value.__module__ in ("builtins", "numpy") else None
    if cls is dict or cls is defaultdict:
        return list(value.values())
    if cls in (list, tuple, set, frozenset):
        return list(value)
    if cls is types.MethodType:
        return value.__self__, value.__func__
    if cls is types.FunctionType:
        return () if _is_known_module(value.__module__) else None
    return list(attributes(value).values()) if _is_known_class(cls) else None


def _is_known_class(cls: type) -> bool:
    return _is_known_module(cls.__module__) and cls.__name__ not in _WRITERS


def _is_known_module(name: Any) -> bool:
    names = name.split(".") if isinstance(name, str) else [""]
    return names[0] == "albumentations" and names[1:2] != ["pytorch"]
