"""Describes the structure of a sample without its values: dicts, lists and tuples around leaves.

A spec's node is a nest of tuples, such as `("tuple", (("array", "|u1", (32, 32, 3)), ("int",)))`. Only exact
built-in containers are allowed; dict keys are str and keep their order.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fastload.errors import CacheCorruptError, UnsupportedSampleError
from fastload.nested.leaf import BARE_KINDS, TEXT_KINDS, Leaf, fixed_nbytes
from fastload.nested.leaves import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Node = tuple[Any, ...]

MAX_DEPTH = 64  # nested containers; far more than samples have, far below Python's recursion limit
_CONTAINERS = ("tuple", "list", "dict")
_WHERE_TO_CHANGE_IT = (
    "Change it in the dataset, or in a function that you pass as CachedDataset(pre_transform=function); or "
    'cache by file, which takes any samples: DataLoader(dataset, cache="ram")'
)


class Spec:
    """A sample's structure, dtypes and shapes; only `flatten` and `Spec.parse` make specs. Equal by value.

    Attributes:
        node: The structure as a nest of tuples.
        leaves: Its leaves in order.
        text: The structure as JSON, which is what a record stores.
    """

    __slots__ = ("_flat_type", "leaves", "node", "text")

    def __init__(self, node: Node) -> None:
        self.node = node
        is_flat = node[0] in ("tuple", "list") and not any(child[0] in _CONTAINERS for child in node[1])
        self._flat_type: Any = {"tuple": tuple, "list": list}[node[0]] if is_flat else None
        self.leaves: tuple[Leaf, ...] = tuple(
            Leaf(*part) for _, part in _walk(node) if part[0] not in _CONTAINERS
        )
        self.text = json.dumps(node, separators=(",", ":")).encode("ascii")

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: bytes) -> Spec:
        """The spec that JSON text describes.

        Raises:
            CacheCorruptError: The text is not a spec.
        """
        try:
            node = _parse_node(json.loads(text))
            spec = _spec_of(node)
            for leaf in spec.leaves:
                fixed_nbytes(leaf)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError, MemoryError) as error:
            raise CacheCorruptError(f"a record's description cannot be read: {error}") from error
        return spec

    @property
    def builder(self) -> Callable[[list[Any]], Any]:
        """`build`, or a type that does the same."""
        return self._flat_type or self.build

    def build(self, values: Iterable[Any]) -> Any:
        """The sample with these values, one per leaf, in order."""
        if self._flat_type is not None:  # most samples: faster than the walk
            return self._flat_type(values)
        return _build(self.node, iter(values))

    def paths(self) -> list[str]:
        """The path of every leaf, such as `sample["image"]` or `sample[1][0]`."""
        return [path for path, part in _walk(self.node) if part[0] not in _CONTAINERS]

    def __eq__(self, other: object) -> bool:
        if self is other:  # the usual case, because `_spec_of` keeps specs
            return True
        return self.node == other.node if isinstance(other, Spec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)  # not of the node: Python keeps the hash of bytes, but not of a tuple

    def __reduce__(self) -> tuple[Callable[..., Spec], tuple[bytes]]:
        return Spec.parse, (self.text,)

    def __repr__(self) -> str:
        return f"Spec({self.text.decode()})"


@lru_cache(maxsize=1024)
def _spec_of(node: Node) -> Spec:
    return Spec(node)


# --- from a sample to its spec ---------------------------------------------------------------------------


def flatten(sample: Any) -> tuple[Spec, list[Any]]:
    """A sample's spec and its values: arrays and tensors C-contiguous, copied only if they are not.

    Raises:
        UnsupportedSampleError: A value in the sample cannot be cached; names its path.
    """
    values: list[Any] = []
    try:
        node = _describe(sample, (), values)
    except UnsupportedSampleError as error:
        raise UnsupportedSampleError(f"{error}. {_WHERE_TO_CHANGE_IT}") from None
    return _spec_of(node), values


def _describe(value: Any, path: tuple[Any, ...], values: list[Any]) -> Node:
    kind: Any = type(value)
    if kind is tuple or kind is list:
        _check_depth(path)
        return kind.__name__, tuple([_describe(item, (*path, i), values) for i, item in enumerate(value)])
    if kind is dict:
        _check_depth(path)
        for key in value:
            if type(key) is not str:
                raise UnsupportedSampleError(
                    f"{path_text(path)}: dict key {key!r} is a {type(key).__name__}: use plain str keys"
                )
        return "dict", tuple([(key, _describe(item, (*path, key), values)) for key, item in value.items()])
    try:
        leaf, stored = describe(value)
    except UnsupportedSampleError as error:
        raise UnsupportedSampleError(f"{path_text(path)}: {error}") from None
    values.append(stored)
    return _leaf_node(leaf)


def _leaf_node(leaf: Leaf) -> Node:
    if leaf.kind in ("array", "tensor"):
        return tuple(leaf)
    return leaf[:2] if leaf.kind == "scalar" else leaf[:1]


def _check_depth(path: tuple[Any, ...]) -> None:
    if len(path) >= MAX_DEPTH:
        raise UnsupportedSampleError(
            f"the sample is nested more than {MAX_DEPTH} levels deep: {path_text(path[:8])}…"
        )


def path_text(path: Iterable[Any]) -> str:
    """The path of a leaf as text."""
    return "sample" + "".join(f"[{json.dumps(part)}]" for part in path)


# --- from a spec to a sample -----------------------------------------------------------------------------


def build_batch(node: Node, values: Iterator[Any]) -> Any:
    """The batch that torch's default_collate makes of such samples, from one batched value per leaf.

    Like `Spec.build`, but tuples become lists, and texts in a sequence become a tuple.
    """
    return _build(node, values, is_batch=True)


def _build(node: Node, values: Iterator[Any], *, is_batch: bool = False) -> Any:
    kind = node[0]
    if kind not in _CONTAINERS:
        return next(values)
    if kind == "dict":
        return {key: _build(child, values, is_batch=is_batch) for key, child in node[1]}
    items = []
    for child in node[1]:
        item = _build(child, values, is_batch=is_batch)
        items.append(tuple(item) if is_batch and child[0] in TEXT_KINDS else item)
    return tuple(items) if kind == "tuple" and not is_batch else items


def _walk(node: Node, path: str = "sample") -> Iterator[tuple[str, Node]]:
    """The path of every node, and the node."""
    yield path, node
    if node[0] in _CONTAINERS:
        for key, child in node[1] if node[0] == "dict" else enumerate(node[1]):
            yield from _walk(child, f"{path}[{json.dumps(key)}]")


# --- from JSON to a node ---------------------------------------------------------------------------------


def _parse_node(data: Any, depth: int = 0) -> Node:
    """A node from JSON; lists become tuples. Checks every kind and type: a file can hold anything."""
    if depth > MAX_DEPTH:
        raise ValueError(f"a node is nested more than {MAX_DEPTH} levels deep")
    match data:
        case ["tuple" | "list" as kind, list(items)]:
            return kind, tuple([_parse_node(item, depth + 1) for item in items])
        case ["dict", list(pairs)]:
            nodes = tuple([(key, _parse_node(item, depth + 1)) for key, item in pairs])
            if all(type(key) is str for key, _ in nodes):
                return "dict", nodes
        case ["array" | "tensor" as kind, str(dtype), list(shape)]:
            if len(shape) <= MAX_DEPTH and all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
                return kind, dtype, tuple(shape)
        case ["scalar", str(dtype)]:
            return "scalar", dtype
        case [str(kind)] if kind in BARE_KINDS:
            return (kind,)
    raise ValueError(f"{data!r:.80} describes no node")
