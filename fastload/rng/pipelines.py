"""Find every albumentations pipeline and every generator that a dataset or a collate_fn holds, at any depth.

The search changes no object. Rules:

1. albumentations is never imported; its objects are recognised by the names of their classes.
2. The search runs no user code: no property, no ``__getattr__``, no ``__iter__``, no ``__eq__``. So none of
   them can raise.
3. The work is bounded, however large the dataset is.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import itertools
import logging
import random
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_CHUNK_ELEMENTS = 1_000  # elements of a container that one round of the search visits
_MAX_VISITS = 200_000  # objects in one search; a fraction of a second


@dataclass
class Found:
    """What is random below a root, nearest first.

    Attributes:
        transforms: The transforms of albumentations, including nested ones.
        randomizables: The objects whose class has MONAI's `set_random_state(self, seed, state)`.
        generators: The generators of numpy, random and torch, except the libraries' own, and those that
            transforms and randomizables draw from.
    """

    transforms: list[Any] = field(default_factory=list)
    randomizables: list[Any] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.transforms) + len(self.randomizables) + len(self.generators)

    @property
    def pipelines(self) -> list[Any]:
        """The outermost transforms."""
        parts = {id(part) for outer in self.transforms for part in parts_of([outer])[1:]}
        outermost = [transform for transform in self.transforms if id(transform) not in parts]
        # Transforms that refer to each other in a cycle have no outermost one: take the first one found.
        covered = set(map(id, parts_of(outermost)))
        for transform in self.transforms:
            if id(transform) not in covered:
                outermost.append(transform)
                covered.update(map(id, parts_of([transform])))
        return outermost


def find_pipelines(root: Any) -> list[Any]:
    """Every outermost albumentations pipeline or single transform that is reachable from ``root``."""
    return Search(root).of_dataset.pipelines


class Search:
    """Find all that is random in a dataset, and then what else is random in a collate_fn.

    The search is breadth-first. It follows attributes (also in ``__slots__`` and on the class), elements of
    dicts, lists, tuples, sets and deques, partials, bound methods, and functions: their closures, their
    defaults, and the globals that they load, except functions of other modules. It does not follow modules,
    classes as values, object arrays, clients of stores, and objects that code creates later.

    The work is bounded. Containers are visited 1,000 elements at a time, in rounds; the search ends after a
    round that finds nothing new. So a list of a million paths takes no longer than a list of a thousand, and
    in a list of 1,001 datasets with one pipeline each all pipelines are found. After 200,000 objects the
    search ends with a warning in the log.

    Attributes:
        of_dataset: What the dataset holds.
        of_collate: What only the collate_fn holds.
        holders: By id, the objects that hold an object, first the one through which it was found.
    """

    def __init__(self, dataset: Any, collate_fn: Any = None) -> None:
        self.holders: collections.defaultdict[int, list[Any]] = collections.defaultdict(list)
        self._roots = {"dataset": dataset, "collate_fn": collate_fn}
        self._queue: collections.deque[Any] = collections.deque()
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so ids stay unique
        # Containers of this round, and how many of their elements were visited.
        self._long: list[tuple[Any, int]] = []
        self.of_dataset = self._below(dataset)
        self.of_collate = self._below(collate_fn)

    def holding(self, values: list[Any]) -> dict[int, Any]:
        """By id, these objects and all objects that hold them, directly or indirectly."""
        held = {id(value): value for value in values}
        queue = collections.deque(values)
        while queue:
            for holder in self.holders.get(id(queue.popleft()), ()):
                if id(holder) not in held:
                    held[id(holder)] = holder
                    queue.append(holder)
        return held

    def path(self, value: Any) -> str:
        """Where an object was found, such as ``dataset.transform.transforms[0]``."""
        path = ""
        while True:
            for name, root in self._roots.items():
                if value is root:
                    return name + path
            holder = self.holders[id(value)][0]
            names = (name for name, part in (*_elements(holder), *_contents(holder)) if part is value)
            name = next(names, "")
            is_element = isinstance(holder, (dict, list, tuple, collections.deque))
            path = (f"[{name!r:.40}]" if is_element else f".{name}" if name else "") + path
            value = holder

    def _below(self, root: Any) -> Found:
        found = Found()
        max_seen = len(self._seen) + _MAX_VISITS
        self._long = []
        self._add(self._roots, [root])
        num_before = -1
        while len(found) > num_before:
            num_before = len(found)
            unfinished, self._long = self._long, []
            for container, start in unfinished:
                self._add_elements(container, start)
            while self._queue:
                if len(self._seen) > max_seen:
                    log.warning(
                        "The search for albumentations pipelines and generators ended after %d objects; "
                        "those deeper in the dataset or the collate_fn keep their random state, which can "
                        "be the same in every worker. Keep them in an attribute of the dataset, or seed "
                        "them in a "
                        "worker_init_fn.",
                        _MAX_VISITS,
                    )
                    self._queue.clear()
                    return found
                self._visit(self._queue.popleft(), found)
        return found

    def _visit(self, value: Any, found: Found) -> None:
        kind = _kind(type(value))
        if kind.is_generator:
            found.generators.append(value)
            return
        if kind.is_transform:
            found.transforms.append(value)
        if kind.is_randomizable:
            found.randomizables.append(value)
        self._add_elements(value, 0)
        self._add(value, [part for _, part in _contents(value)])
        for cls in kind.user_classes:
            self._queue_once(value, cls)

    def _add_elements(self, container: Any, start: int) -> None:
        elements = [part for _, part in _elements(container, start)]
        self._add(container, elements)
        if len(elements) == _CHUNK_ELEMENTS:
            self._long.append((container, start + _CHUNK_ELEMENTS))

    def _add(self, holder: Any, values: Iterable[Any]) -> None:
        for value in values:
            kind = _kind(type(value))
            if not kind.is_leaf or (kind.is_generator and id(value) not in _LIBRARY_GENERATORS):
                self._queue_once(holder, value)

    def _queue_once(self, holder: Any, value: Any) -> None:
        self.holders[id(value)].append(holder)
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            self._queue.append(value)


def parts_of(pipelines: list[Any]) -> list[Any]:
    """The pipelines, and all transforms in them, at any depth, in lists and attributes."""
    seen = {id(pipeline): pipeline for pipeline in pipelines}
    queue = collections.deque(pipelines)
    while queue:
        value = queue.popleft()
        for part in [*(part for _, part in _elements(value)), *attributes(value).values()]:
            kind = _kind(type(part))
            if (kind.is_transform or kind.elements is not None) and id(part) not in seen:
                seen[id(part)] = part
                queue.append(part)
    return [value for value in seen.values() if _kind(type(value)).is_transform]


def seeds_itself(transform: Any) -> bool:
    """Whether a pipeline sets its generators in each worker process, from torch's seed of that worker.

    AlbumentationsX, the successor of albumentations, does; albumentations 2.0.8 does not.
    """
    return _kind(type(transform)).seeds_itself


# --- the contents of an object, read without running its code --------------------------------------------

# As in inspect.getattr_static: a metaclass cannot intercept these.
_read_class_dict = type.__dict__["__dict__"].__get__
_read_mro = type.__dict__["__mro__"].__get__
_read_name = type.__dict__["__name__"].__get__

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)

_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, memoryview, range, slice),
    *(np.generic, np.ndarray, torch.Tensor, *_GENERATORS),
    *(type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType),
    logging.Logger,  # refers to all other loggers
)

# Clients of stores and tables refer to tens of thousands of objects, none of them the user's generators.
_CLIENTS = frozenset(
    (
        *("fsspec", "s3fs", "gcsfs", "adlfs", "obstore", "huggingface_hub"),
        *("botocore", "aiobotocore", "boto3", "google", "azure", "aiohttp", "httpx", "requests", "urllib3"),
        *("pandas", "pyarrow", "polars", "h5py", "zarr", "lmdb", "sqlite3", "sqlalchemy", "pymongo", "redis"),
    )
)

# Objects of these modules hold other objects' pipelines and generators, and their own generators.
_OUR_HOLDERS = ("fastload.rng.sample_rng", "fastload.rng.takeover")

# random.random(), np.random.rand() and torch.rand() draw from these.
LIBRARY_GENERATORS = (random._inst, np.random.mtrand._rand, torch.default_generator)
_LIBRARY_GENERATORS = frozenset(map(id, LIBRARY_GENERATORS))

# The attributes in which transforms keep what they get from `set_random_state`, or derive from it.
GENERATOR_ATTRIBUTES = frozenset(
    (
        "R",  # MONAI
        *("random_generator", "py_random"),  # albumentations 2.0.8
        # AlbumentationsX; in 2.5.1, `random_generator` is a property. Its releases have some of them.
        *("_configured_random_generator", "_configured_py_random"),
        *("_concurrent_random_generator", "_concurrent_py_random", "_thread_rng_streams"),
        *("_manual_random_state", "_rng_context", "_rng_initialized", "_rng_epoch", "_invocation_index"),
        *("_rng_process_id", "_rng_source_thread_id"),
    )
)

_ELEMENTS: tuple[tuple[type, Callable[[Any], Iterable[tuple[Any, Any]]]], ...] = (
    (dict, dict.items),
    (list, lambda value: enumerate(list.__iter__(value))),
    (tuple, lambda value: enumerate(tuple.__iter__(value))),
    (collections.deque, lambda value: enumerate(collections.deque.__iter__(value))),
    (set, lambda value: enumerate(set.__iter__(value))),
    (frozenset, lambda value: enumerate(frozenset.__iter__(value))),
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


class _Kind:
    """The facts about all objects of one class."""

    def __init__(self, cls: type) -> None:
        mro: tuple[type, ...] = _read_mro(cls)
        dicts: list[types.MappingProxyType[str, Any]] = list(map(_read_class_dict, mro))
        bases = set(map(id, mro))
        self.cls = cls
        module = _module(dicts[0])
        is_closed = module in _OUR_HOLDERS or module.partition(".")[0] in _CLIENTS
        self.is_leaf = is_closed or any(id(leaf) in bases for leaf in _LEAVES)
        self.is_class = id(type) in bases
        self.is_generator = any(id(generator) in bases for generator in _GENERATORS)
        self.is_transform = any(map(_is_albumentations, mro, dicts)) and any(
            "set_random_state" in own for own in dicts
        )
        self.seeds_itself = any("_get_effective_seed" in own for own in dicts)
        self.is_randomizable = any(_is_monai(own.get("set_random_state")) for own in dicts)
        self.elements = next((read for base, read in _ELEMENTS if id(base) in bases), None)
        self.is_set = not bases.isdisjoint((id(set), id(frozenset)))
        # The descriptor that reads an object's __dict__, and those of its slots.
        dict_of = next((own["__dict__"] for own in dicts if "__dict__" in own), None)
        self.dict_of = dict_of if type(dict_of) in _DESCRIPTORS else None
        self.slots = [
            (name, member)
            for own in dicts
            for name, member in own.items()
            if type(member) is types.MemberDescriptorType and name != "__dict__"
        ]
        # The classes whose attributes can be a user's pipeline.
        self.user_classes = [
            base for base, own in zip(mro, dicts, strict=True) if not _is_other_maker(_module(own))
        ]


_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_kinds: dict[int, _Kind] = {}  # by id: a class might not be hashable; each kind keeps its class alive


def _kind(cls: type) -> _Kind:
    kind = _kinds.get(id(cls))
    if kind is None:
        kind = _kinds[id(cls)] = _Kind(cls)
    return kind


def _module(class_dict: types.MappingProxyType[str, Any]) -> str:
    name = class_dict.get("__module__", "builtins")
    return name if type(name) is str else "builtins"


def _is_other_maker(module: Any) -> bool:
    return type(module) is str and module.split(".")[0] in _OTHER_MAKERS


def _class_name(item: tuple[Any, Any]) -> str:
    return str(_read_name(type(item[1])))


def _is_albumentations(cls: type, class_dict: types.MappingProxyType[str, Any]) -> bool:
    return (
        _read_name(cls) in ("BaseCompose", "BasicTransform")
        and _module(class_dict).split(".")[0] == "albumentations"
    )


def _is_monai(method: Any) -> bool:
    if type(method) is not types.FunctionType:
        return False
    code = method.__code__
    return code.co_varnames[: code.co_argcount] == ("self", "seed", "state")


def attributes(value: Any) -> dict[str, Any]:
    """The instance attributes by name, in the order they were set; slots last.

    What methods, properties and partials wrap are slots, too.
    """
    kind = _kind(type(value))
    own = None if kind.dict_of is None else kind.dict_of.__get__(value)
    found: dict[str, Any] = dict(dict.items(own)) if isinstance(own, dict) else {}
    for name, member in kind.slots:
        with contextlib.suppress(AttributeError):  # the slot was never set
            found.setdefault(name, member.__get__(value))
    return found


def _elements(value: Any, start: int = 0) -> Iterable[tuple[Any, Any]]:
    """One chunk of a container, with keys or positions."""
    kind = _kind(type(value))
    if kind.elements is None:
        return ()
    chunk = itertools.islice(kind.elements(value), start, start + _CHUNK_ELEMENTS)
    # The order of a set differs between runs, and the streams of pipelines depend on the order.
    return sorted(chunk, key=_class_name) if kind.is_set else chunk


def _contents(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds beside elements, by name."""
    kind = _kind(type(value))
    if kind.cls is types.FunctionType:
        yield from _inside_function(value)
    elif kind.is_class:
        is_randomizable = _kind(value).is_randomizable
        yield from (item for item in _read_class_dict(value).items() if item[0] != "R" or not is_randomizable)
    else:
        hides = kind.is_transform or kind.is_randomizable
        held = attributes(value).items()
        yield from (item for item in held if not hides or item[0] not in GENERATOR_ATTRIBUTES)


def _inside_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield from vars(function).items()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is still empty
            yield name, cell.cell_contents
    yield from (("__defaults__", function.__defaults__), ("__kwdefaults__", function.__kwdefaults__))
    names, file = function.__globals__, function.__globals__.get("__file__")
    is_installed = type(file) is str and ("site-packages" in file or "dist-packages" in file)
    for name in () if _is_other_maker(names.get("__name__")) else _global_names(function.__code__):
        value = names.get(name)
        if type(value) is types.FunctionType and value.__globals__ is not names:
            continue
        if is_installed and _kind(type(value)).is_generator:
            continue  # names temporary files, or the like
        yield name, value


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names that a function, and the functions within it, load from its module, each once."""
    # co_names has the names of attributes, too: self.transform is not the global of that name.
    loads = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    names = [load.argval for load in dis.get_instructions(code) if load.opname in loads]
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            names += _global_names(constant)
    return tuple(dict.fromkeys(names))
