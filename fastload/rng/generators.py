"""Finds and seeds the generators in attributes of a dataset or a collate_fn: a part of `seeding="sample"`.

Nothing tells when a generator of numpy or torch draws, so the search finds them, and `sample_rng` seeds them
before each sample. Rules:

1. Generators draw from different random streams: the stream of a generator depends on the sample and on the
   generator's position among those of the dataset, or among those of the collate_fn.
2. Only generators of numpy, random and torch are seeded whose classes are known, and of torch those on the
   CPU. Unseeded generators get a warning, once each.
3. The search changes no object, and its work is bounded, however large the dataset is. It runs no user code:
   no property, no ``__getattr__``, no ``__iter__``, no ``__eq__``. So none of them can raise.
"""

from __future__ import annotations

import collections
import itertools
import logging
import random
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fastload.augmentation.libraries import LIBRARIES
from fastload.nested.attributes import attributes, read_class_dict, read_mro
from fastload.rng.entry_points import RandomStreams, random_bases
from fastload.rng.states import LIBRARY_GENERATORS
from fastload.system.logs import log, say_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MAX_ELEMENTS = 1_000  # of a container, that are visited
_MAX_VISITS = 100_000  # objects in one search; a fraction of a second

Path = tuple[tuple[bool, Any], ...]  # steps: whether it is an element, and its key or name


class Search:
    """Find the generators in attributes of a dataset, and then what others a collate_fn has.

    The search is breadth-first. It follows attributes, also in ``__slots__`` and of partials and bound
    methods, and the first thousand elements of dicts, lists, tuples and deques. It does not follow functions,
    classes, modules, sets and object arrays.

    Attributes:
        held: The generators in the dataset, nearest first, then those that only the collate_fn has. Not the
            libraries' own, nor those that random transforms draw from.
        transforms: The random transforms on the way, of the libraries in `augmentation`.
    """

    def __init__(self, dataset: Any, collate_fn: Any = None) -> None:
        self.held: list[HeldGenerator] = []
        self.transforms: list[Any] = []
        self._holders: collections.defaultdict[int, list[Any]] = collections.defaultdict(list)
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so ids stay unique
        self._walk("dataset", dataset)
        self._walk("collate_fn", collate_fn)

    @property
    def seedable(self) -> list[HeldGenerator]:
        """The generators that can be seeded."""
        return [described for described in self.held if described.seed is not None]

    def holding(self, values: list[Any]) -> dict[int, Any]:
        """By id, these objects and all objects that hold them, directly or indirectly."""
        holders = {id(value): value for value in values}
        queue = collections.deque(values)
        while queue:
            for holder in self._holders.get(id(queue.popleft()), ()):
                if id(holder) not in holders:
                    holders[id(holder)] = holder
                    queue.append(holder)
        return holders

    def _walk(self, owner: str, root: Any) -> None:
        num_held = len(self.held)
        bases = {id(cls) for _, cls in random_bases()}
        self._seen[id(root)] = root
        queue: collections.deque[tuple[Any, Path]] = collections.deque([(root, ())])
        max_seen = len(self._seen) + _MAX_VISITS
        while queue:
            value, path = queue.popleft()
            is_transform = not bases.isdisjoint(map(id, read_mro(type(value))))
            if issubclass(type(value), _GENERATORS):
                stream = f"{owner} {len(self.held) - num_held}".encode()
                steps = (f"[{name!r:.40}]" if is_element else f".{name}" for is_element, name in path)
                self.held.append(HeldGenerator(value, stream, _seeder_of(value), "".join((owner, *steps))))
            elif is_transform:
                self.transforms.append(value)
            parts = [((True, key), part) for key, part in itertools.islice(_elements(value), _MAX_ELEMENTS)]
            if id(type(value)) not in _BUILTIN and not issubclass(type(value), _LEAVES):
                passed_over = _OF_TRANSFORMS if is_transform else ()
                named = attributes(value).items()
                parts += [((False, name), part) for name, part in named if name not in passed_over]
            for step, part in parts:
                if id(type(part)) not in _PLAIN and not _is_closed(part):
                    self._holders[id(part)].append(value)
                    if id(part) not in self._seen:
                        self._seen[id(part)] = part
                        queue.append((part, (*path, step)))
            if len(self._seen) > max_seen:
                log.warning(
                    "The search for random generators ended after %d objects; those deeper in the dataset or "
                    "the collate_fn are not seeded. Keep them in attributes of the dataset.",
                    _MAX_VISITS,
                )
                return


# --- what the search passes over ---------------------------------------------------------------------------

_OF_LIBRARIES = frozenset(map(id, LIBRARY_GENERATORS))

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_CONTAINERS = (dict, list, tuple, collections.deque)
_BUILTIN = frozenset(map(id, _CONTAINERS))  # without attributes
_PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, np.ndarray, torch.Tensor)
_PLAIN = frozenset(map(id, _PLAIN_TYPES))  # most values of a large dataset
_LEAVES = (
    *_PLAIN_TYPES,
    *(bytearray, memoryview, range, slice, set, frozenset, np.generic, *_GENERATORS),
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType),
    logging.Logger,  # refers to all other loggers
    RandomStreams,  # has its own generators
)
# Clients of stores and tables refer to tens of thousands of objects, none of them the user's generators.
_CLIENTS = frozenset(
    (
        *("fsspec", "s3fs", "gcsfs", "adlfs", "obstore", "huggingface_hub"),
        *("botocore", "aiobotocore", "boto3", "google", "azure", "aiohttp", "httpx", "requests", "urllib3"),
        *("pandas", "pyarrow", "polars", "h5py", "zarr", "lmdb", "sqlite3", "sqlalchemy", "pymongo", "redis"),
    )
)
# Where transforms keep the generators that they draw from.
_OF_TRANSFORMS = frozenset(
    name
    for library in LIBRARIES
    for names in (library.private_generators, *(base.generators for base in library.random_classes))
    for name in names
)


def _is_closed(value: Any) -> bool:
    """Whether a value neither is a generator of the user's nor has any."""
    cls = type(value)
    if issubclass(cls, _GENERATORS):
        return id(value) in _OF_LIBRARIES
    module = read_class_dict(cls).get("__module__")
    return issubclass(cls, _LEAVES) or (type(module) is str and module.partition(".")[0] in _CLIENTS)


def _elements(value: Any) -> Iterable[tuple[Any, Any]]:
    """The elements of a container, with keys or positions."""
    if issubclass(type(value), dict):
        return dict.items(value)
    base: Any = next((base for base in _CONTAINERS[1:] if issubclass(type(value), base)), None)
    return () if base is None else enumerate(base.__iter__(value))


# --- seeds -----------------------------------------------------------------------------------------------


class HeldGenerator(NamedTuple):
    """A generator that a dataset or a collate_fn holds.

    Attributes:
        generator: The generator.
        stream: Bytes that differ between the generators of one loader, and are the same in every process.
        seed: A function that seeds it from 64 bytes; None: it cannot be seeded.
        path: Where it was found, such as ``dataset.transform.transforms[0]``.
    """

    generator: Any
    stream: bytes
    seed: Any
    path: str


def warn_of_unseeded(dataset: Any, collate_fn: Any) -> None:
    """Warn if the dataset or the collate_fn holds generators that `seeding="sample"` does not seed."""
    for described in Search(dataset, collate_fn).held:
        if described.seed is None:
            say_once(
                f'seeding="sample" does not seed {described.path}, {described.generator!r:.80}: what it '
                "draws depends on the workers. Keep a numpy.random.default_rng(), a random.Random or a "
                "torch.Generator on the CPU instead, or draw from fastload.sample_rng()"
            )


def pcg64_state(state: int, increment: int) -> Any:
    """The state of numpy's PCG64 from two numbers of 128 bits."""
    # An odd increment: O'Neill, PCG: A Family of Simple Fast Space-Efficient ... Generators, 2014.
    values = {"state": state, "inc": increment | 1}
    return {"bit_generator": "PCG64", "state": values, "has_uint32": 0, "uinteger": 0}


def _seeder_of(generator: Any) -> Callable[[bytes], object] | None:
    """A function that seeds a generator from 64 bytes; None if its kind is unknown."""
    if type(generator) is np.random.RandomState:
        is_known = generator.get_state(legacy=False)["bit_generator"] == "MT19937"
        return (lambda seeds: generator.seed(number(seeds[:4]))) if is_known else None
    if type(generator) is random.Random:
        return lambda seeds: generator.seed(number(seeds[:8]))
    if type(generator) is torch.Generator and generator.device.type == "cpu":
        return lambda seeds: generator.manual_seed(number(seeds[:8]))
    bits = getattr(generator, "bit_generator", None)
    kind = type(bits)
    if kind is np.random.PCG64:  # default_rng(); this takes a tenth of the time of the general way below
        return lambda seeds: setattr(bits, "state", pcg64_state(number(seeds[:16]), number(seeds[16:32])))
    if kind in (np.random.MT19937, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64):
        return lambda seeds: setattr(bits, "state", kind(np.frombuffer(seeds, np.uint32)).state)
    return None


def number(data: bytes) -> int:
    """The integer of these bytes."""
    return int.from_bytes(data, "little")
