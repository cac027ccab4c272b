"""Nested batches: leaves replaced, everything around them kept."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fastload.nested.tree import map_device_leaves, move_leaf


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


@dataclasses.dataclass(slots=True)
class Slotted:
    image: Any
    unset: Any = dataclasses.field(init=False, compare=False)


class KeyedByArguments(Mapping):
    def __init__(self, first: Any, second: Any) -> None:
        self.data = {"first": first, "second": second}

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


def doubled(leaf: Any) -> Any:
    return leaf * 2 if isinstance(leaf, torch.Tensor) else "moved"


ONE, TWO = torch.tensor([1]), torch.tensor([2])  # containers of single elements can be compared
CONTAINERS = {
    "tensor": lambda x: x,
    "dict": lambda x: {"a": x, "b": "text"},
    "defaultdict": lambda x: collections.defaultdict(list, a=x),
    "mapping": lambda x: types.MappingProxyType({"a": x, "b": 3}),
    "list": lambda x: [x, None, 1.5],
    "deque": lambda x: collections.deque([x, b"bytes"]),
    "tuple": lambda x: (x, True),
    "namedtuple": lambda x: Point(x, "p"),
    "dataclass": lambda x: Frozen(x),
    "dataclass with slots": lambda x: Slotted(x),
    "nest": lambda x: {"a": [(x, {"b": Point(Frozen(x), "q")})]},
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_leaves_are_replaced_and_types_kept(make: Any) -> None:
    """Each container comes back as a new one of its type with new leaves, and the old one is unchanged."""
    value = make(ONE)
    mapped = map_device_leaves(value, doubled)
    assert type(mapped) is type(value)
    assert mapped == make(TWO) != value == make(ONE)
    assert map_device_leaves(value, lambda leaf: leaf) is value  # as what does not change
    without = make("no tensor")
    assert map_device_leaves(without, doubled) is without


def test_what_containers_carry_is_kept() -> None:
    """A default factory, attributes, what __post_init__ did, torch.max's tuple; or a dict, as in torch."""
    tagged, found = Tagged([ONE]), torch.max(torch.tensor([[1, 5]]), dim=1)
    tagged.tag = "t"
    assert map_device_leaves(CONTAINERS["defaultdict"](ONE), doubled).default_factory is list
    assert map_device_leaves(tagged, doubled).tag == "t"
    assert map_device_leaves(Frozen(ONE), doubled).seen == ["init"]
    assert type(map_device_leaves(found, doubled)) is type(found)
    assert list(map_device_leaves(found, doubled)) == [torch.tensor([10]), TWO]
    plain = map_device_leaves(KeyedByArguments(ONE, 1), doubled)
    assert type(plain) is dict
    assert plain == {"first": TWO, "second": 1}


Graph = type("Graph", (), {"to": lambda self, device, non_blocking=False: (device, non_blocking)})
Boxes = type("Boxes", (), {"to": lambda self, device: device})


def test_objects_with_torchs_to_are_leaves() -> None:
    """Ones whose ``to`` takes a device alone are moved by it alone; a class is no leaf."""
    there = torch.device("meta")
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(3)])
    moved = map_device_leaves([packed, Graph(), Boxes()], lambda leaf: move_leaf(leaf, there))
    assert moved[0].data.device == there
    assert moved[1:] == [(there, True), there]
    values = [np.zeros(2), Graph, "text", {1, 2}]
    assert map_device_leaves(values, doubled) is values


def test_more_kinds_of_leaves_can_be_named() -> None:
    """``is_leaf`` is asked about containers before their content, and what it takes is not walked."""
    value = {"names": ["a", "b"], "pair": (ONE, ["c", ONE])}
    mapped = map_device_leaves(value, lambda leaf: len(leaf), lambda part: part == ["a", "b"])
    assert mapped == {"names": 2, "pair": (1, ["c", 1])}
