"""What is known of the code of albumentations' pipelines, and copies of their steps for one call.

1. A copy of a step shares the generators that the original has at this moment, because seeding can replace
   them. So copies are made for each call, and never kept.
2. A transform can run on the cache's own read-only memory, without a copy, if all of its code respects the
   read-only mark. NumPy and OpenCV do. Other libraries ignore the mark and write to the pages, which kills
   the process: torch makes writable tensors of read-only arrays, and older releases of stringzilla write in
   place. So a transform gets private copies unless all of its code is known.
3. The code of one release of albumentations is known: the tests run each of its transforms on sealed memory.
   A pipeline is known if it holds only objects of that library and plain data, and no user subclasses or
   functions. Parts added to a pipeline later are not checked. All such transforms accept the memory of uint8
   images; Normalize divides float32 images in place.
"""

from __future__ import annotations

import random
import sys
import types
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.nested.attributes import attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_RELEASE = "2.0.8"
# Both call stringzilla, which writes to a grayscale image in place.
_WRITERS = frozenset({"AutoContrast", "Equalize"})
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, np.ndarray, np.random.Generator, random.Random}
)

# --- steps ------------------------------------------------------------------------------------------------


def is_tested_release() -> bool:
    """Whether albumentations is of the one release whose code the tests compare and run."""
    return getattr(sys.modules.get("albumentations"), "__version__", None) == _RELEASE


def is_of_albumentations(step: Any) -> bool:
    """Whether a pipeline or step is of a class of albumentations itself."""
    return type(step).__module__.partition(".")[0] == "albumentations"


def is_replayed(step: Any) -> bool:
    """Whether a step belongs to a pipeline that records or replays its parameters."""
    return bool(getattr(step, "replay_mode", False) or getattr(step, "deterministic", False))


def shallow_copy(step: Any) -> Any:
    """A copy with the same attributes; albumentations does not define `__copy__`, and copy.copy is slower."""
    clone = object.__new__(type(step))
    clone.__dict__.update(step.__dict__)
    return clone


def with_image_part(step: Any, apply: Callable[..., Any]) -> Any:
    """A copy of a step that calls ``apply`` for the image; it draws, and treats other targets, as before."""
    copied = shallow_copy(step)
    copied._key2func = {**step._key2func, "image": apply}
    return copied


# --- memory that is only read -----------------------------------------------------------------------------


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
