"""The search for generators: found in attributes, with bounded work and no user code run."""

from __future__ import annotations

import collections
import functools
from typing import Any

import albumentations as A  # the name its own documentation uses
import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Subset

from fastload import CachedDataset
from fastload.rng import generators
from fastload.rng.generators import Search
from tests.rng.draws_zoo import Randomizable


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value

    def apply(self) -> Any:
        return self.value


class Raises:
    """Runs no code when it is only looked at; raises at every other touch."""

    __slots__ = ("__dict__", "inner", "never_set")

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "inner", inner)

    def _refuse(self, *_: Any) -> Any:
        raise ZeroDivisionError("user code was run")

    __getattribute__ = __getattr__ = __iter__ = __len__ = __eq__ = __hash__ = __bool__ = _refuse
    __class__ = property(_refuse)
    anything = property(_refuse)


def hostile_metaclass(value: Any) -> Any:
    """Its class raises when it is touched."""

    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise ZeroDivisionError("user code was run")

        __eq__ = __hash__ = None  # type: ignore[assignment]

    class Hostile(metaclass=Meta):
        def __init__(self) -> None:
            self.value = value

    return Hostile()


HOLDERS = {
    "itself": lambda g: g,
    "attribute": Plain,
    "namedtuple": collections.namedtuple("Named", "value"),
    "dict": lambda g: {"a": g},
    "list": lambda g: [1, g],
    "deque": lambda g: collections.deque([g]),
    "list subclass": lambda g: type("Own", (list,), {"__iter__": None})([g]),
    "subset": lambda g: Subset(ConcatDataset([Subset(Plain(g), [0])]), [0]),  # type: ignore[list-item, arg-type]
    "bound method": lambda g: Plain(g).apply,
    "partial": lambda g: functools.partial(print, 3, image={"a": g}),
    "hostile metaclass": hostile_metaclass,
    "hostile object": lambda g: [Raises(g), Raises(None)],
    "transform": lambda g: A.Compose([A.Lambda(image=functools.partial(print, g))]),
}


def found_in(root: Any) -> list[Any]:
    return [held.generator for held in Search(root).held]


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS.keys())
def test_generators_are_found_in(holder: Any) -> None:
    """A generator is found in every kind of holder, once, alone and below another object."""
    generator = np.random.default_rng(1)

    assert found_in(holder(generator)) == [generator]
    assert found_in(Plain([holder(generator), generator])) == [generator]


def test_generators_of_transforms_are_theirs() -> None:
    """What albumentations and MONAI draw from is not the dataset's; cycles end."""
    holder = Plain([A.HorizontalFlip(), Randomizable().set_random_state(1)])
    holder.value.append(holder)

    assert found_in(holder) == []
    assert Search(holder).transforms == holder.value[:2]


def num_visits(root: Any) -> int:
    return len(Search(root)._seen)


def test_clients_of_stores_are_not_walked() -> None:
    """One of botocore's refers to 36,000 objects, which would take a second for each loader."""
    session = pytest.importorskip("botocore.session").get_session()
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}

    assert num_visits(Plain([session.create_client("s3", **keys)])) < 10


def test_the_work_is_bounded() -> None:
    """A list of a million pairs costs its first elements; strings cost nothing."""
    pairs = [("a.jpg", number) for number in range(1_000_000)]
    plain = {"paths": ["a.jpg"] * 1_000_000, "labels": list(range(1_000_000))}

    assert num_visits(plain) < 10
    assert num_visits(pairs) <= generators._MAX_ELEMENTS + 2
    assert num_visits(CachedDataset([0, 1], A.NoOp())) < 300


def test_the_generators_of_a_long_list_are_found() -> None:
    """As in a dataset of many parts, up to a limit."""
    many = [Plain(np.random.default_rng(number)) for number in range(1_001)]

    assert len(found_in(Plain(many))) == generators._MAX_ELEMENTS


def test_a_search_without_end_ends_with_a_warning(monkeypatch: Any, caplog: Any) -> None:
    """The number of objects visited has a limit; reaching it is said, and what was found is returned."""
    monkeypatch.setattr(generators, "_MAX_VISITS", 50)
    near = np.random.default_rng(1)
    chain: Any = np.random.default_rng(2)
    for _ in range(100):
        chain = [chain]

    assert found_in([chain, near]) == [near]
    assert "ended after 50 objects" in caplog.text
