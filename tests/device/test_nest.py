"""Nested batches: leaves replaced, everything around them kept."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fastload.nested.device_tree import map_movable, move_leaf


class Point(NamedTuple):
    x: Any
    name: str


class Tagged(list):
    tag = ""


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any
    label: str = "cat"
    seen: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.seen.append("init")


@dataclasses.dataclass
class Slotted:
    __slots__ = ("image", "unset")
    image: Any
    unset: Any

    def __init__(self, image: Any) -> None:
        self.image = image


class Keyed(Mapping):
    """A mapping that keeps its data in an attribute, which copy.copy would share."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


class KeyedByArguments(Keyed):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__({"first": first, "second": second})


class Listed(Sequence):
    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __getitem__(self, index: Any) -> Any:
        return self.parts[index]

    def __len__(self) -> int:
        return len(self.parts)


def doubled(leaf: Any) -> Any:
    return leaf * 2 if isinstance(leaf, torch.Tensor) else "moved"


ONE = torch.tensor([1])
TWO = torch.tensor([2])


def with_default(value: Any) -> Any:
    return collections.defaultdict(list, a=value)


CONTAINERS = {
    "tensor": lambda x: x,
    "dict": lambda x: {"a": x, "b": "text"},
    "defaultdict": with_default,
    "mapping": lambda x: Keyed({"a": x, "b": 3}),
    "list": lambda x: [x, None, 1.5],
    "deque": lambda x: collections.deque([x, 2]),
    "sequence": lambda x: Listed([x, b"bytes"]),
    "tuple": lambda x: (x, True),
    "namedtuple": lambda x: Point(x, "p"),
    "dataclass": lambda x: Frozen(x),
    "dataclass with slots": lambda x: Slotted(x),
    "nest": lambda x: {"a": [(x, {"b": Point(Frozen(x), "q")})]},
}


def flat(value: Any) -> Any:
    """The content as plain dicts and lists, for comparison."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: flat(part) for key, part in value.items()}
    if dataclasses.is_dataclass(value):
        return {f.name: flat(getattr(value, f.name, None)) for f in dataclasses.fields(value)}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [flat(part) for part in value]
    return value


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_leaves_are_replaced_and_types_kept(make: Any) -> None:
    """Each container comes back as a new one of its type with new leaves, and the old one is unchanged."""
    value = make(ONE)
    mapped = map_movable(value, doubled)
    assert type(mapped) is type(value)
    assert flat(mapped) == flat(make(TWO))
    assert flat(value) == flat(make(ONE))
    assert map_movable(value, lambda leaf: leaf) is value  # as what does not change
    without = make("no tensor")
    assert map_movable(without, doubled) is without


def test_what_containers_carry_is_kept() -> None:
    """A default factory, attributes of a list subclass, what __post_init__ did, and torch.max's own tuple.

    As with torch's pin_memory, a mapping whose constructor takes no mapping becomes a dict.
    """
    tagged, found = Tagged([ONE]), torch.max(torch.tensor([[1, 5]]), dim=1)
    tagged.tag = "t"
    assert map_movable(with_default(ONE), doubled).default_factory is list
    assert map_movable(tagged, doubled).tag == "t"
    assert map_movable(Frozen(ONE), doubled).seen == ["init"]
    assert type(map_movable(found, doubled)) is type(found)
    assert flat(map_movable(found, doubled)) == [[10], [2]]
    plain = map_movable(KeyedByArguments(ONE, 1), doubled)
    assert type(plain) is dict
    assert flat(plain) == {"first": [2], "second": 1}


class Graph:
    """Moves itself, as a graph library's batch does."""

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        return device, non_blocking


class Boxes:
    """Has a ``to`` of the shortest kind."""

    def to(self, device: Any) -> Any:
        return device


class Quantity:
    """Its ``to`` converts units."""

    def to(self, unit: str) -> Any:
        raise AssertionError("not a device")


def test_objects_with_torchs_to_are_leaves() -> None:
    """Ones that take a device alone are moved by it alone; a ``to`` of other meaning is left alone."""
    there = torch.device("meta")
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(3)])
    moved = map_movable([packed, Graph(), Boxes()], lambda leaf: move_leaf(leaf, there))
    assert moved[0].data.device == there
    assert moved[1:] == [(there, True), there]
    values = [Quantity(), np.zeros(2), Graph, "text", {1, 2}]
    assert map_movable(values, doubled) is values


def test_more_kinds_of_leaves_can_be_named() -> None:
    """``is_leaf`` is asked about containers before their content, and what it takes is not walked."""
    value = {"names": ["a", "b"], "pair": (ONE, ["c", ONE])}
    mapped = map_movable(value, lambda leaf: len(leaf), lambda part: part == ["a", "b"])
    assert mapped == {"names": 2, "pair": (1, ["c", 1])}
