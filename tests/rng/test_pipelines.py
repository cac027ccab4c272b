"""The search for pipelines: found wherever a dataset holds them, with bounded work and no user code run."""

from __future__ import annotations

import collections
import functools
import multiprocessing.util
import weakref
from typing import Any

import albumentations as A  # the name its own documentation uses
import pytest
from torch.utils.data import ConcatDataset, Subset

from fastload import CachedDataset
from fastload.rng import pipelines
from fastload.rng.pipelines import find_pipelines
from fastload.rng.seeding import seed_albumentations
from tests.rng.pipelines_zoo import crop


class Plain:
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def apply(self, image: Any, *, transform: Any = None) -> Any:
        return self.transform(image=image)


def default(transform: Any) -> Any:
    return functools.partial(lambda image, *, transform=transform: transform(image=image))


def class_with(transform: Any) -> Any:
    class OnClass:
        shared = transform

    return type("Below", (OnClass,), {})()


def hostile_metaclass(transform: Any) -> Any:
    """Its class raises when it is touched."""

    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise ZeroDivisionError("user code was run")

        __eq__ = __hash__ = None  # type: ignore[assignment]

    class Hostile(metaclass=Meta):
        def __init__(self) -> None:
            self.transform = transform

    return Hostile()


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


def on_a_class_over_the_library_s(transform: Any) -> Any:
    return type("Cached", (CachedDataset,), {"on_class": transform})([0, 1])


HOLDERS = {
    "itself": lambda t: t,
    "attribute": Plain,
    "namedtuple": collections.namedtuple("Named", "transform"),
    "dict": lambda t: {"a": t},
    "list": lambda t: [1, t],
    "set": lambda t: {t},
    "deque": lambda t: collections.deque([t]),
    "list subclass": lambda t: type("Own", (list,), {"__iter__": None})([t]),
    "subset": lambda t: Subset(ConcatDataset([Subset(class_with(t), [0])]), [0]),
    "bound method": lambda t: Plain(t).apply,
    "partial": lambda t: functools.partial(print, 3, image={"a": t}),
    "closure": lambda t: lambda image: t(image=image),
    "default": default,
    "class attribute": class_with,
    "hostile metaclass": hostile_metaclass,
    "hostile object": lambda t: [Raises(t), Raises(None)],
    "user's class over the library's": on_a_class_over_the_library_s,
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS.keys())
def test_pipelines_are_found_in(holder: Any) -> None:
    """A pipeline is found in every kind of holder, once, alone and below another object."""
    transform = crop()

    assert find_pipelines(holder(transform)) == [transform]
    assert find_pipelines(Plain([holder(transform), transform])) == [transform]


on_module = crop()


def uses_global(image: Any) -> Any:
    return on_module(image=image)


class CallsGlobal:
    def __getitem__(self, index: int) -> Any:
        def inner() -> Any:
            return uses_global(None)

        return inner()


class NamesNoGlobal:
    """Its method uses the name of a global pipeline for an attribute."""

    on_module: Any = None

    def call_attribute(self) -> Any:
        return self.on_module(image=None), lambda: self.on_module(image=None)


def test_globals_that_methods_name_are_found() -> None:
    """Through the functions that load them; an attribute of that name is no global."""
    assert find_pipelines(CallsGlobal()) == [on_module]
    assert find_pipelines(NamesNoGlobal()) == []


def test_cycles_end() -> None:
    """Objects, and transforms, that hold each other in a circle are visited once."""
    first, second = A.HorizontalFlip(), A.VerticalFlip()
    first.partner, second.partner = second, first
    holder = Plain([])
    holder.transform += [holder, first, second]

    assert find_pipelines(holder) == [first]
    assert seed_albumentations(holder, 7) == 1
    assert first.py_random is second.py_random


# --- the bound -------------------------------------------------------------------------------------------


def count_visits(monkeypatch: pytest.MonkeyPatch, root: Any) -> int:
    visits = 0
    visit = pipelines.Search._visit

    def counted(self: Any, value: Any, found: Any) -> None:
        nonlocal visits
        visits += 1
        visit(self, value, found)

    monkeypatch.setattr(pipelines.Search, "_visit", counted)
    find_pipelines(root)
    return visits


def test_clients_of_stores_are_not_walked() -> None:
    """One of botocore's refers to 36,000 objects, which would take a second for each loader."""
    session = pytest.importorskip("botocore.session").get_session()
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    dataset = Plain([session.create_client("s3", **keys), A.Compose([A.HorizontalFlip()])])

    search = pipelines.Search(dataset)

    assert len(search.of_dataset.pipelines) == 1
    assert len(search._seen) < 300


def test_the_order_of_pipelines_in_a_set_is_that_of_their_names() -> None:
    """A set has another order in each run, and each pipeline gets its stream by its place."""
    for kind in (set, frozenset):
        found = find_pipelines(kind([A.VerticalFlip(), A.Blur(), A.HorizontalFlip()]))
        assert [type(part) for part in found] == [A.Blur, A.HorizontalFlip, A.VerticalFlip]


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of a million pairs costs one chunk, and one more after a pipeline; strings cost little."""
    pairs = [("a.jpg", number) for number in range(1_000_000)]
    plain = {"paths": ["a.jpg"] * 1_000_000, "labels": list(range(1_000_000)), "t": crop()}

    assert count_visits(monkeypatch, plain) < 100
    assert count_visits(monkeypatch, pairs) <= pipelines._CHUNK_ELEMENTS + 1
    assert count_visits(monkeypatch, [pairs, crop()]) <= 2 * pipelines._CHUNK_ELEMENTS + 100
    assert count_visits(monkeypatch, CachedDataset([0, 1], A.NoOp())) < 300


def test_finalizers_of_other_objects_are_not_walked() -> None:
    """A finalizer leads only to its own callback, not to the pipelines of the finalizers of other objects."""
    pipeline = A.HorizontalFlip()
    others = (
        weakref.finalize(pipeline, print, [A.HorizontalFlip()]),
        multiprocessing.util.Finalize(None, print, (pipeline,), exitpriority=1),
    )
    holder = [
        weakref.finalize(CallsGlobal, print),
        multiprocessing.util.Finalize(None, print, exitpriority=1),
    ]
    try:
        assert find_pipelines(holder) == []
    finally:
        others[0].detach(), holder[0].detach()
        others[1].cancel(), holder[1].cancel()


def test_a_search_without_end_ends_with_a_warning(monkeypatch: Any, caplog: Any) -> None:
    """The number of objects visited has a limit; reaching it is said, and what was found is returned."""
    monkeypatch.setattr(pipelines, "_MAX_VISITS", 50)
    near, far = crop(), crop()
    chain: Any = far
    for _ in range(100):
        chain = [chain]

    assert find_pipelines([chain, near]) == [near]
    assert "ended after 50 objects" in caplog.text
