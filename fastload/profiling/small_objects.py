"""Containers of many small Python objects in a dataset, whose pages each worker copies.

Reading an object changes its reference count, and so its page: see `memory.shared_list`. Sizes are estimates
from a few elements of each container.
"""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from fastload.memory.segment import PAGE_BYTES
from fastload.system.humanize import readable_size

if TYPE_CHECKING:
    from collections.abc import Iterator

MIN_BYTES = 16_000_000  # of a container that is worth a change
CURE = "fastload.SharedList(items) keeps the items once, for all workers"

_CONTAINERS = (list, tuple, dict, set, frozenset)
_FEW = 64  # the elements of shorter containers, such as the datasets of a ConcatDataset, are named
_NAME_DEPTH, _MAX_VISITS = 6, 10_000
_PROBES, _DEPTH = 16, 4  # elements of longer containers, and how deep they are measured
_HEAD_BYTES = 64  # of a list, dict or set; its table has no reference counts


class SmallObjects(NamedTuple):
    """A container of small objects.

    Attributes:
        path: Where it is, such as `"dataset.items"`.
        length: Its number of elements.
        nbytes: Roughly what a worker that reads all of them copies.
    """

    path: str
    length: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.path} ({self.length:,} elements, about {readable_size(self.nbytes)})"


def find_small_objects(dataset: Any) -> list[SmallObjects]:
    """The containers with at least `MIN_BYTES` that attributes of the dataset lead to."""
    return list(_below(dataset, "dataset", _NAME_DEPTH, set()))


def _below(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[SmallObjects]:
    if isinstance(value, _CONTAINERS) and len(value) > _FEW:
        nbytes = round(_estimate(value, _DEPTH, seen))
        if nbytes >= MIN_BYTES:
            yield SmallObjects(path, len(value), nbytes)
    elif depth and len(seen) < _MAX_VISITS and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, dict):
            parts = {f"[{key!r}]": part for key, part in value.items()}
        elif isinstance(value, (list, tuple)):
            parts = {f"[{number}]": part for number, part in enumerate(value)}
        else:
            parts = {f".{name}": part for name, part in _attributes(value).items()}
        for name, part in parts.items():
            yield from _below(part, path + name, depth - 1, seen)


def _estimate(value: Any, depth: int, seen: set[int]) -> float:
    """Roughly how many bytes are copied when this object, and all that it leads to, is read."""
    if not depth or id(value) in seen:
        return 0.0
    seen.add(id(value))
    parts: Any = value if isinstance(value, _CONTAINERS) else _attributes(value)
    length = len(parts)
    if isinstance(parts, dict):
        parts, length = itertools.chain.from_iterable(parts.items()), 2 * length
    probed = [_estimate(part, depth - 1, seen) for part in itertools.islice(parts, _PROBES)]
    own_bytes = _HEAD_BYTES if isinstance(value, (list, dict, set, frozenset)) else sys.getsizeof(value)
    # Of a large object, only the page with its reference count is copied.
    return min(own_bytes, PAGE_BYTES) + sum(probed) * length / max(len(probed), 1)


def _attributes(value: Any) -> dict[str, Any]:
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, ModuleType):
        return attributes.copy()
    return {}
