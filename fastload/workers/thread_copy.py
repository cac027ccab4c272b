"""Copy the dataset and the collate_fn for each worker thread: what is random in them, and its holders only.

A pipeline keeps its generators and the parameters of the current call in its attributes, so two threads must
not call the same pipeline. With `rng="sample"` two threads must not draw from the same generator either. But
a copy of the whole dataset would copy its images. Therefore this module makes
deep copies of both and shallow copies of the few objects that hold them, and shares all other objects.
`threads` calls it in the consumer's process.
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

from fastload.rng.generators import FIXED, held_generators
from fastload.rng.pipelines import Search, attributes


def copies_for_threads(
    dataset: Any, collate_fn: Any, num_threads: int, *, with_generators: bool
) -> list[tuple[Any, Any]]:
    """For each thread, copies of ``dataset`` and ``collate_fn`` with their own pipelines.

    An object without pipelines is not copied. An object that both hold is one object in a thread's copies,
    too.

    Args:
        dataset: The dataset.
        collate_fn: The function that collates.
        num_threads: The number of copies.
        with_generators: Whether the copies also have their own generators, except those that cannot be seeded
            or replaced.

    Raises:
        ValueError: A pipeline is held where it cannot be replaced: by a function, a class, or a set.
    """
    search = Search(dataset, collate_fn)
    random_ones = [
        value
        for found in (search.of_dataset, search.of_collate)
        for value in found.transforms + found.randomizables
    ]
    if with_generators:
        random_ones += [
            held.generator
            for held in held_generators(search)
            if held.seed is not None and held.fixed_by is None
        ]
    holders = search.holding(random_ones)
    copiers = [_Copier(random_ones, holders) for _ in range(num_threads)]
    return [(copier.copied(dataset), copier.copied(collate_fn)) for copier in copiers]


class _Copier:
    """Makes one copy."""

    def __init__(self, random_ones: list[Any], holders: dict[int, Any]) -> None:
        self._holders = holders
        self._random_ones = {id(value) for value in random_ones}
        self._copies: dict[
            int, Any
        ] = {}  # also deepcopy's memo: an object shared by two pipelines is shared by their copies

    def _holds(self, value: Any) -> bool:
        return id(value) in self._holders

    def copied(self, value: Any) -> Any:
        """The counterpart of a value in the copy."""
        if not self._holds(value):
            return value
        if id(value) not in self._copies:
            if id(value) in self._random_ones:
                self._copies[id(value)] = copy.deepcopy(value, self._copies)
            else:
                self._copies[id(value)] = self._rebuilt(value)
        return self._copies[id(value)]

    def _rebuilt(self, value: Any) -> Any:
        """A shallow copy that holds copies."""
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.copied(value.__self__))
        if isinstance(value, functools.partial):
            named = {name: self.copied(part) for name, part in value.keywords.items()}
            return type(value)(self.copied(value.func), *map(self.copied, value.args), **named)
        if isinstance(value, tuple):
            parts = map(self.copied, value)
            return value._make(parts) if hasattr(value, "_make") else tuple(parts)
        fixed = [value] if isinstance(value, FIXED) else [c for c in type(value).__mro__ if self._holds(c)]
        if fixed:
            raise ValueError(
                "each worker thread needs its own copy of every albumentations pipeline, and one is held by "
                f"{fixed[0]!r:.100}, where it cannot be replaced: hold it in an attribute of the dataset, or "
                'of an object that is the collate_fn, or use worker_method="process"'
            )
        twin = self._copies[id(value)] = copy.copy(value)  # before its parts, which may refer to it
        if isinstance(value, dict):
            twin.update({key: self.copied(part) for key, part in value.items()})
        elif hasattr(type(value), "extend") and hasattr(type(value), "clear"):  # lists and deques
            twin.clear()
            twin.extend(map(self.copied, value))
        for name, part in attributes(value).items():
            if self._holds(part):
                object.__setattr__(twin, name, self.copied(part))
        return twin
