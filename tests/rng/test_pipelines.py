"""The search for pipelines: found wherever a dataset holds them, with bounded work and no user code run."""

from __future__ import annotations

import collections
import functools
import multiprocessing.util
import weakref
from dataclasses import dataclass
from typing import Any

import albumentations as A  # the name its own documentation uses
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from fastload import CachedDataset
from fastload.rng import pipelines
from fastload.rng.pipelines import find_pipelines
from fastload.rng.seeding import seed_albumentations
from tests.rng import pipelines_zoo as zoo


class Slots:
    __slots__ = ("never_set", "transform")

    def __init__(self, transform: Any) -> None:
        self.transform = transform


class Plain:
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def apply(self, image: Any) -> Any:
        return self.transform(image=image)


class Module(torch.nn.Module):
    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.transform = transform


@dataclass(frozen=True)
class Data:
    transform: Any


Named = collections.namedtuple("Named", "path transform")
on_module = zoo.crop()


def uses_global(image: Any) -> Any:
    return on_module(image=image)


class CallsGlobal:
    def __getitem__(self, index: int) -> Any:
        def inner() -> Any:
            return uses_global(None)

        return inner()


class CallsGlobalInClass:
    def __getitem__(self, index: int) -> Any:
        class Local:
            transform = on_module

        return Local


def function_with_a_late_name() -> Any:
    """Names more than 256 other globals first, so that the place of `on_module` takes more than a byte."""
    others = "; ".join(f"name_{number}" for number in range(300))
    names: dict[str, Any] = {"on_module": on_module}
    exec(f"def function(): {others}; on_module", names)
    return names["function"]


class NamesNoGlobal:
    """Its methods use the name of a global pipeline for other things."""

    on_module: Any = None

    def call_attribute(self) -> Any:
        return self.on_module(image=None)

    def call_attribute_in_a_function_within(self) -> Any:
        return lambda: self.on_module(image=None)

    def set_attribute(self, value: Any) -> None:
        self.on_module = value
        del self.on_module

    def import_it(self) -> Any:
        from tests.rng.test_pipelines import on_module

        return on_module


def closure(transform: Any) -> Any:
    return lambda image: transform(image=image)


def default(transform: Any) -> Any:
    def apply(image: Any, *, transform: Any = transform) -> Any:
        return transform(image=image)

    return apply


def class_with(transform: Any) -> Any:
    class OnClass:
        shared = transform

    class Below(OnClass):
        pass

    return Below()


def property_with(transform: Any) -> Any:
    class WithProperty:
        @property
        def pipeline(self) -> Any:
            return transform

    return WithProperty()


def partial_with(transform: Any) -> Any:
    return functools.partial(print, 3, image={"a": transform})


def object_subclass(base: type) -> Any:
    return type("Own" + base.__name__, (base,), {"__iter__": None})


HOLDERS = {
    "itself": lambda t: t,
    "attribute": Plain,
    "slot": Slots,
    "module": Module,
    "dataclass": Data,
    "namedtuple": lambda t: Named("a", t),
    "dict": lambda t: {"a": t},
    "list": lambda t: [1, t],
    "set": lambda t: {t},
    "deque": lambda t: collections.deque([t]),
    "list subclass": lambda t: object_subclass(list)([t]),
    "subset": lambda t: Subset(ConcatDataset([Subset(class_with(t), [0])]), [0]),
    "bound method": lambda t: Plain(t).apply,
    "partial": partial_with,
    "closure": closure,
    "default": default,
    "class attribute": class_with,
    "property's own closure": property_with,
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS.keys())
def test_pipelines_are_found_in(holder: Any) -> None:
    """A pipeline is found in every kind of holder, once, alone and below another object."""
    transform = zoo.crop()

    assert find_pipelines(holder(transform)) == [transform]
    assert find_pipelines(Plain([holder(transform), transform])) == [transform]


@pytest.mark.parametrize(
    ("user", "pipeline"),
    [
        (CallsGlobal(), on_module),
        (CallsGlobalInClass(), on_module),
        (function_with_a_late_name(), on_module),
    ],
)
def test_globals_that_methods_name_are_found(user: Any, pipeline: Any) -> None:
    """Scripts keep the transform in a global; it is found through the functions that load it."""
    assert find_pipelines(user) == [pipeline]


def test_names_that_are_not_loaded_as_globals_are_not_followed() -> None:
    """An attribute or an import that has the name of a global pipeline does not hold that pipeline."""
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


def test_classes_with_a_hostile_metaclass_are_looked_through() -> None:
    """No code of the user's is run: objects that raise at every touch are looked through, too."""

    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise ZeroDivisionError("user code was run")

        __eq__ = __hash__ = None  # type: ignore[assignment]

    class Holder(metaclass=Meta):
        def __init__(self, transform: Any) -> None:
            self.transform = transform

    transform = zoo.crop()

    assert find_pipelines(Holder(transform)) == [transform]
    assert find_pipelines([zoo.Raises(transform), zoo.Raises(None)]) == [transform]


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
    """One of botocore's refers to 36,000 objects, and the search would take a second for each loader."""
    session = pytest.importorskip("botocore.session").get_session()
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    dataset = Plain([session.create_client("s3", **keys), A.Compose([A.HorizontalFlip()])])

    search = pipelines.Search(dataset)

    assert len(search.of_dataset.pipelines) == 1
    assert len(search._seen) < 300


@pytest.mark.parametrize("kind", [set, frozenset])
def test_the_order_of_pipelines_in_a_set_is_that_of_their_names(kind: type) -> None:
    """A set has another order in each run, and each pipeline gets its stream by its place."""
    found = [type(part) for part in find_pipelines(kind([A.VerticalFlip(), A.Blur(), A.HorizontalFlip()]))]

    assert found == [A.Blur, A.HorizontalFlip, A.VerticalFlip]


def test_of_a_million_tuples_only_two_chunks_are_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of (path, label) costs one chunk, and one more after a pipeline; strings cost nothing."""
    samples = [("a.jpg", i) for i in range(1_000_000)]
    plain = {"paths": ["a.jpg"] * 1_000_000, "labels": list(range(1_000_000)), "t": zoo.crop()}

    assert count_visits(monkeypatch, plain) < 100

    assert count_visits(monkeypatch, samples) <= pipelines._CHUNK_ELEMENTS + 1
    assert count_visits(monkeypatch, [samples, zoo.crop()]) <= 2 * pipelines._CHUNK_ELEMENTS + 100


def test_the_library_s_own_code_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the classes of fastload hold is no pipeline of the user's; a class of the user's over them may."""

    class Cached(CachedDataset):
        on_class = zoo.crop()

    assert count_visits(monkeypatch, CachedDataset([0, 1], A.NoOp())) < 300
    assert find_pipelines(Cached([0, 1])) == [Cached.on_class]


def test_finalizers_of_other_objects_are_not_walked() -> None:
    """A finalizer leads only to its own callback, not to the pipelines of the finalizers of other objects."""

    class Owner:
        """An object that can be referred to weakly."""

    owner, other = Owner(), Owner()
    pipeline = A.Compose([A.HorizontalFlip()])
    finalizers = (
        weakref.finalize(other, print, pipeline),
        multiprocessing.util.Finalize(None, print, (pipeline,), exitpriority=1),
    )
    holder = [weakref.finalize(owner, print), multiprocessing.util.Finalize(None, print, exitpriority=1)]
    try:
        assert find_pipelines(holder) == []
    finally:
        finalizers[0].detach(), holder[0].detach()
        finalizers[1].cancel(), holder[1].cancel()


def test_a_search_without_end_ends_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The number of objects visited has a limit; reaching it is said, and what was found is returned."""
    monkeypatch.setattr(pipelines, "_MAX_VISITS", 50)
    near, far = zoo.crop(), zoo.crop()
    chain: Any = far
    for _ in range(100):
        chain = [chain]

    assert find_pipelines([chain, near]) == [near]
    assert "ended after 50 objects" in caplog.text
