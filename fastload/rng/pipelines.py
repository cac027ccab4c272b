"""Find every albumentations pipeline and every generator that a dataset or a collate_fn holds, at any depth.

The search changes no object. Rules:

1. albumentations is never imported; its objects are recognised by the names of their classes.
2. The search runs no code of the user's: no property, no ``__getattr__``, no ``__iter__``, no ``__eq__``.
   Therefore none of them can raise.
3. The work is bounded, however large the dataset is.
"""

from __future__ import annotations

import collections
import dis
import functools
import itertools
import logging
import random
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert

from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_CHUNK_ELEMENTS = 1_000  # elements of a container that one round of the search visits
_MAX_VISITS = 200_000  # objects in one search; a fraction of a second


def find_pipelines(root: Any) -> list[Any]:
    """Every outermost albumentations pipeline or single transform that is reachable from ``root``.

    The search follows attributes (also in ``__slots__`` and on the class), elements of dicts, lists, tuples,
    sets and deques, partials, bound methods, and functions: their closures, their defaults, and the globals
    that they load, except functions of another module. It does not follow modules, classes as values, object
    arrays, and objects that code creates later.

    The work is bounded. Containers are visited 1,000 elements at a time, in rounds; the search ends after a
    round that finds no new pipeline. A list of a million paths therefore takes no longer than a list of a
    thousand, and in a list of 1,001 datasets with one pipeline each all pipelines are found. After 200,000
    objects the search ends with a warning in the log.

    Returns:
        Each pipeline once, the nearest to ``root`` first. The order is the same in every run, except
        among pipelines of the same class in one set, for which Python guarantees no order.
    """
    return _outermost(_Search(root).run().transforms)


def _outermost(found: list[Any]) -> list[Any]:
    parts = {id(part) for outer in found for part in parts_of([outer]).values() if part is not outer}
    outermost = [transform for transform in found if id(transform) not in parts]
    # Transforms that refer to each other in a cycle have no outermost one: take the first one found.
    covered = parts_of(outermost)
    for transform in found:
        if id(transform) not in covered:
            outermost.append(transform)
            covered |= parts_of([transform])
    return outermost


class FoundRandom(NamedTuple):
    """All that is random below a root, the nearest to it first.

    Attributes:
        pipelines: Those of `find_pipelines`.
        randomizables: The objects whose class has MONAI's `set_random_state(self, seed, state)`.
        generators: The generators of numpy, random and torch, except the libraries' own, and those that
            pipelines and randomizables draw from.
        holders: By id, the objects that hold an object, first the one through which it was found.
    """

    pipelines: list[Any]
    randomizables: list[Any]
    generators: list[Any]
    holders: dict[int, list[Any]]


def find_random(root: Any) -> FoundRandom:
    """Find all that is random below ``root`` in one search."""
    search = _Search(root, notes_holders=True).run()
    return FoundRandom(_outermost(search.transforms), search.randomizables, search.generators, search.holders)


def find_more_random(dataset: Any, collate_fn: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Find the pipelines of a dataset, and then what else a collate_fn holds.

    The dataset's pipelines are those of ``find_pipelines(dataset)``. An object that both hold, such as the
    dataset itself if the collate_fn is a method of it, is searched once, as a part of the dataset.

    Returns:
        The dataset's pipelines; the other pipelines of the collate_fn; and the collate_fn's other objects
        with MONAI's `set_random_state`.
    """
    search = _Search(dataset).run()
    of_dataset = _outermost(search.transforms)
    if collate_fn is None or collate_fn is default_collate or collate_fn is default_convert:
        return of_dataset, [], []  # torch's own hold no pipelines; saves time at the start of an epoch
    more = _Search(collate_fn, after=search).run()
    return of_dataset, _outermost(more.transforms), more.randomizables


def find_holders(root: Any) -> tuple[list[Any], dict[int, Any]]:
    """Find the random objects below ``root``, and all objects through which they are reached.

    Returns:
        All transforms and all random objects of MONAI's kind, also nested ones; and by id these and all
        objects that hold them, directly or indirectly, up to ``root``.
    """
    search = _Search(root, notes_holders=True).run()
    found = search.transforms + search.randomizables
    return found, with_holders(found, search.holders)


def with_holders(found: list[Any], holders: dict[int, list[Any]]) -> dict[int, Any]:
    """By id, these objects and all objects that hold them, directly or indirectly."""
    held = {id(value): value for value in found}
    queue = collections.deque(found)
    while queue:
        for holder in holders.get(id(queue.popleft()), ()):
            if id(holder) not in held:
                held[id(holder)] = holder
                queue.append(holder)
    return held


class _Search:
    """A breadth-first search: it visits objects near the dataset before, for example, deep annotations."""

    def __init__(self, root: Any, *, notes_holders: bool = False, after: _Search | None = None) -> None:
        self._notes_holders = notes_holders
        self._queue: collections.deque[Any] = collections.deque()
        # Keeps the objects alive, so that ids stay unique. This search skips those that `after` has seen.
        self._seen: dict[int, Any] = {} if after is None else after._seen
        self._most_seen = len(self._seen) + _MAX_VISITS
        if id(root) not in self._seen:
            self._seen[id(root)] = root
            self._queue.append(root)
        self._long: list[tuple[Any, int]] = []  # containers, and how many of their elements were visited
        self.holders: collections.defaultdict[int, list[Any]] = collections.defaultdict(list)
        self.transforms: list[Any] = []
        self.randomizables: list[Any] = []
        self.generators: list[Any] = []

    @property
    def _num_found(self) -> int:
        return len(self.transforms) + len(self.randomizables) + len(self.generators)

    def run(self) -> _Search:
        """Search until a round finds nothing new."""
        num_before = -1
        while self._num_found > num_before:
            num_before = self._num_found
            unfinished, self._long = self._long, []
            for container, offset in unfinished:
                self._add_elements(container, offset)
            if not self._drain():
                break
        return self

    def _drain(self) -> bool:
        while self._queue:
            if len(self._seen) > self._most_seen:
                log.warning(
                    "The search for albumentations pipelines and generators ended after %d objects; those "
                    "deeper in the dataset or the collate_fn keep their random state, maybe the same in "
                    "every worker. Keep them in an attribute of the dataset, or seed them in a "
                    "worker_init_fn.",
                    _MAX_VISITS,
                )
                return False
            self._visit(self._queue.popleft())
        return True

    def _visit(self, value: Any) -> None:
        kind = _kind(type(value))
        if kind.is_transform:
            self.transforms.append(value)
        if kind.is_randomizable:
            self.randomizables.append(value)
        if kind.elements is not None:
            self._add_elements(value, 0)
        if type(value) is types.FunctionType:
            self._add(value, _inside_function(value))
        else:
            self._add(value, _inside_other(value))
        held = attributes(value)
        if kind.is_transform or kind.is_randomizable:
            held = {name: part for name, part in held.items() if name not in GENERATORS_OF_TRANSFORMS}
        self._add(value, held.values())
        self._add_classes(value, kind)

    def _add(self, holder: Any, values: Iterable[Any]) -> None:
        for value in values:
            kind = _kind(type(value))
            if kind.is_leaf and (not kind.is_generator or id(value) in _LIBRARY_GENERATORS):
                continue
            if self._notes_holders:
                self.holders[id(value)].append(holder)
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                (self.generators if kind.is_generator else self._queue).append(value)

    def _add_elements(self, container: Any, offset: int) -> None:
        elements, has_more = _elements(container, offset)
        self._add(container, elements)
        if has_more:
            self._long.append((container, offset + _CHUNK_ELEMENTS))

    def _add_classes(self, value: Any, kind: _Kind) -> None:
        for cls in kind.user_classes:
            if self._notes_holders:
                self.holders[id(cls)].append(value)
            if id(cls) not in self._seen:
                self._seen[id(cls)] = cls
                own = _class_dict(cls)
                self._add(
                    cls, [part for name, part in own.items() if name != "R" or not kind.is_randomizable]
                )


def parts_of(pipelines: list[Any]) -> dict[int, Any]:
    """By id, the pipelines and all transforms in them, at any depth, in lists and attributes."""
    held = {id(pipeline): pipeline for pipeline in pipelines}
    queue = collections.deque(pipelines)
    containers: dict[int, Any] = {}
    while queue:
        value = queue.popleft()
        for part in [*_elements(value, 0)[0], *attributes(value).values()]:
            kind = _kind(type(part))
            if kind.is_transform and id(part) not in held:
                held[id(part)] = part
                queue.append(part)
            elif kind.elements is not None and id(part) not in containers:
                containers[id(part)] = part
                queue.append(part)
    return held


def seeds_itself(transform: Any) -> bool:
    """Whether a pipeline sets its generators in each worker process, from torch's seed of that worker.

    AlbumentationsX does, the successor of albumentations; albumentations 2.0.8 does not.
    """
    return _kind(type(transform)).seeds_itself


# --- the contents of an object, read without running its code --------------------------------------------

# As in inspect.getattr_static: a metaclass cannot intercept these.
_read_class_dict = type.__dict__["__dict__"].__get__
_read_mro = type.__dict__["__mro__"].__get__

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)

_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, memoryview, range, slice),
    *(np.generic, np.ndarray, torch.Tensor, *_GENERATORS),
    *(type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType),
    logging.Logger,  # refers to all other loggers
)

# Objects of these modules hold pipelines and generators that other objects hold, and generators of their own.
_OUR_HOLDERS = ("fastload.rng.sample_rng", "fastload.rng.local_pipelines")

# random.random(), np.random.rand() and torch.rand() draw from these.
_LIBRARY_GENERATORS = frozenset(map(id, (random._inst, np.random.mtrand._rand, torch.default_generator)))

# Attributes of the transforms of albumentations 2.0.8.
ALBUMENTATIONS_GENERATORS = ("random_generator", "py_random")
# AlbumentationsX derives its generators from these; in 2.5.1, `random_generator` is a property. Its releases
# have some of them.
ALBUMENTATIONS_X_GENERATORS = (
    *ALBUMENTATIONS_GENERATORS,
    *("_configured_random_generator", "_configured_py_random"),
    *("_concurrent_random_generator", "_concurrent_py_random", "_thread_rng_streams"),
    *("_manual_random_state", "_rng_context", "_rng_initialized", "_rng_epoch", "_invocation_index"),
    *("_rng_process_id", "_rng_source_thread_id"),
)
# They get their generators from `set_random_state`; R is MONAI's.
GENERATORS_OF_TRANSFORMS = frozenset((*ALBUMENTATIONS_X_GENERATORS, "R"))

_ELEMENTS: tuple[tuple[type, Callable[[Any], Iterable[Any]]], ...] = (
    (dict, dict.values),
    (list, list.__iter__),
    (tuple, tuple.__iter__),
    (collections.deque, collections.deque.__iter__),
    (set, set.__iter__),
    (frozenset, frozenset.__iter__),
)

_OTHER_MAKERS = (
    "builtins",
    "fastload",
    "torch",
    "numpy",
    "albumentations",
    # A class of these lists the finalizers of all objects in the process, with other loaders' pipelines.
    "weakref",
    "multiprocessing",
    "tempfile",  # names its files with a generator
)  # classes of these packages, and the globals of their functions, hold no pipelines of users


@dataclass(frozen=True)
class _Kind:
    """The facts about all objects of one class."""

    is_leaf: bool
    is_generator: bool
    is_transform: bool
    seeds_itself: bool
    is_randomizable: bool
    elements: Callable[[Any], Iterable[Any]] | None
    is_unordered: bool
    dict_of: Any  # the descriptor that reads an object's __dict__, or None
    slots: tuple[tuple[str, Any], ...]  # name and descriptor
    user_classes: tuple[type, ...]  # the classes whose attributes may be a user's pipeline


@functools.lru_cache(maxsize=4096)
def _kind_of(key: _ById) -> _Kind:
    mro: tuple[type, ...] = _read_mro(key.value)
    dicts = [_class_dict(cls) for cls in mro]
    bases = {id(cls) for cls in mro}
    elements = next((read for cls, read in _ELEMENTS if id(cls) in bases), None)
    dict_of = next((d["__dict__"] for d in dicts if "__dict__" in d), None)
    return _Kind(
        is_leaf=any(id(leaf) in bases for leaf in _LEAVES) or _module(dicts[0]) in _OUR_HOLDERS,
        is_generator=any(id(generator) in bases for generator in _GENERATORS),
        is_transform=(
            any(_is_albumentations(cls, own) for cls, own in zip(mro, dicts, strict=True))
            and any("set_random_state" in own for own in dicts)
        ),
        seeds_itself=any("_get_effective_seed" in own for own in dicts),
        is_randomizable=any(_is_monai(own.get("set_random_state")) for own in dicts),
        elements=elements,
        is_unordered=id(set) in bases or id(frozenset) in bases,
        dict_of=dict_of if type(dict_of) is types.GetSetDescriptorType else None,
        slots=tuple(
            (name, member)
            for own in dicts
            if "__slots__" in own
            for name, member in own.items()
            if type(member) is types.MemberDescriptorType
        ),
        user_classes=tuple(
            cls for cls, own in zip(mro, dicts, strict=True) if not _is_other_maker(_module(own))
        ),
    )


class _ById:
    """A class or a code object as a key for a cache.

    The metaclass of a class may define ``__eq__`` and ``__hash__``; the hash of code takes its whole length.
    """

    __slots__ = ("value",)

    def __init__(self, value: type | types.CodeType) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is _ById and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _kind(cls: type) -> _Kind:
    return _kind_of(_ById(cls))


def _class_dict(cls: type) -> types.MappingProxyType[str, Any]:
    found: types.MappingProxyType[str, Any] = _read_class_dict(cls)
    return found


def _module(class_dict: types.MappingProxyType[str, Any]) -> str:
    name = class_dict.get("__module__", "builtins")
    return name if type(name) is str else "builtins"


def _is_other_maker(module: Any) -> bool:
    return type(module) is str and module.split(".")[0] in _OTHER_MAKERS


def _is_albumentations(cls: type, class_dict: types.MappingProxyType[str, Any]) -> bool:
    name: str = type.__dict__["__name__"].__get__(cls)
    return name in ("BaseCompose", "BasicTransform") and _module(class_dict).split(".")[0] == "albumentations"


def _is_monai(method: Any) -> bool:
    if type(method) is not types.FunctionType:
        return False
    code = method.__code__
    return code.co_varnames[: code.co_argcount] == ("self", "seed", "state")


def own_attributes(value: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """The instance attributes of these names, if the object has them; faster than `attributes`."""
    kind = _kind(type(value))
    own = None if kind.slots or kind.dict_of is None else kind.dict_of.__get__(value)
    if type(own) is not dict:
        own = attributes(value)
    return {name: own[name] for name in names if name in own}


def attributes(value: Any) -> dict[str, Any]:
    """The instance attributes by name, in the order they were set; slots last."""
    kind = _kind(type(value))
    found: dict[str, Any] = {}
    if kind.dict_of is not None:
        own = kind.dict_of.__get__(value)
        if _kind(type(own)).elements is dict.values:
            found.update(zip(dict.keys(own), dict.values(own), strict=True))
    for name, member in kind.slots:
        try:
            found.setdefault(name, member.__get__(value))
        except AttributeError:
            continue  # the slot was never set
    return found


def _elements(value: Any, offset: int) -> tuple[list[Any], bool]:
    """One chunk of a container, and whether there is more."""
    kind = _kind(type(value))
    if kind.elements is None:
        return [], False
    stop = offset + _CHUNK_ELEMENTS
    chunk = list(itertools.islice(kind.elements(value), offset, stop + 1))
    has_more = len(chunk) > _CHUNK_ELEMENTS
    del chunk[_CHUNK_ELEMENTS:]
    if kind.is_unordered:
        chunk.sort(key=_class_name)
    return chunk, has_more


def _class_name(value: Any) -> str:
    cls = type(value)
    name: str = type.__dict__["__qualname__"].__get__(cls)
    return f"{_module(_class_dict(cls))}.{name}"


def _inside_function(function: types.FunctionType) -> list[Any]:
    values: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:
            continue  # the cell is still empty
    values += function.__defaults__ or ()
    values += (function.__kwdefaults__ or {}).values()
    names = () if _is_other_maker(function.__globals__.get("__name__")) else _global_names(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if type(value) is types.FunctionType and value.__globals__ is not function.__globals__:
            continue
        if _kind(type(value)).is_generator and _is_installed(function.__globals__.get("__file__")):
            continue  # names temporary files, or the like
        values.append(value)
    return values


def _is_installed(file: Any) -> bool:
    return type(file) is str and ("site-packages" in file or "dist-packages" in file)


_GLOBAL_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names that a function, and the functions within it, load from its module, each once."""
    return _global_names_of(_ById(code))


@functools.lru_cache(maxsize=4096)
def _global_names_of(key: _ById) -> tuple[str, ...]:
    code: Any = key.value
    # co_names has the names of attributes, too: self.transform is not the global of that name.
    names = [load.argval for load in dis.get_instructions(code) if load.opname in _GLOBAL_LOADS]
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            names += _global_names(constant)
    return tuple(dict.fromkeys(names))


def _inside_other(value: Any) -> list[Any]:
    """The objects inside the interpreter's own wrappers (methods, properties, partials)."""
    cls = type(value)
    if cls is types.MethodType:
        return [value.__self__, value.__func__]
    if cls is staticmethod or cls is classmethod:
        return [value.__func__]
    if cls is property:
        return [value.fget]
    if any(base is functools.partial for base in _read_mro(cls)):
        own = functools.partial.__dict__
        return [own[name].__get__(value) for name in ("func", "args", "keywords")]
    return []
