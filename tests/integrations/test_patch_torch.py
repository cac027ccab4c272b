"""`patch_torch()`: calls that were written for torch's loader build ours, and `unpatch_torch()` ends it."""

from __future__ import annotations

import abc
import copy
import functools
import inspect
import pickle
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pytest
import torch
import torch.utils.data as tud
from torch.utils.data import DataLoader as ImportedBefore

import fastload
from fastload.integrations.patch_status import status
from tests.kit import datasets
from tests.kit.batches import assert_same_batches
from tests.test_rebuilt_loaders import prepared_as_accelerate_does, prepared_as_ray_does

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IMAGES = datasets.Made(datasets.image, 12)
TORCH_INIT = vars(ImportedBefore)["__init__"]
T = TypeVar("T")


class DefinedBefore(ImportedBefore[Any]):
    """As PyG's loader: arguments of its own, and a collate_fn."""

    def __init__(self, dataset: Any, batch_size: int = 1, *, extra: str = "", **options: Any) -> None:
        self.extra = extra
        super().__init__(dataset, batch_size, **options)


class NamedBefore(ImportedBefore[Any]):
    """Calls its base by name."""

    def __init__(self, dataset: Any, *args: Any, **options: Any) -> None:
        ImportedBefore.__init__(self, dataset, *args, **options)


def by_default_argument(*args: Any, kind: Any = ImportedBefore, **options: Any) -> Any:
    return kind(*args, **options)


WAYS: dict[str, Callable[..., Any]] = {
    "torch.utils.data.DataLoader": lambda *args, **options: tud.DataLoader(*args, **options),
    "a name imported before": lambda *args, **options: ImportedBefore(*args, **options),
    "a default argument": by_default_argument,
    "with a type": lambda *args, **options: ImportedBefore[int](*args, **options),
}


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    fastload.unpatch_torch()
    assert vars(ImportedBefore)["__init__"] is TORCH_INIT


@pytest.mark.slow
@pytest.mark.parametrize(("way", "num_workers"), [(way, row % 2 * 2) for row, way in enumerate(WAYS)])
def test_every_name_of_torch_s_class_builds_ours(way: str, num_workers: int) -> None:
    """Also names that a module imported before, and default arguments; the batches and draws are torch's."""
    kinds, epochs = [], []
    for change in (lambda: None, fastload.patch_torch, fastload.unpatch_torch):
        change()
        generator = torch.Generator().manual_seed(5)
        loader = WAYS[way](IMAGES, 4, shuffle=True, num_workers=num_workers, generator=generator)
        assert isinstance(loader, tud.DataLoader)
        assert issubclass(type(loader), tud.DataLoader)
        kinds.append(type(loader))
        epochs.append([*loader, *loader])
    assert kinds[0] is kinds[2] is tud.DataLoader
    assert issubclass(kinds[1], fastload.DataLoader)
    assert_same_batches(epochs[0], epochs[1])
    assert_same_batches(epochs[0], epochs[2])


def test_defaults_apply_where_a_call_written_for_torch_does_not_give_them() -> None:
    """Those of the last patch_torch() are added; unpatch_torch() forgets them. The loaders are counted."""
    before = status.num_replaced
    fastload.patch_torch(seeding="sample")
    fastload.patch_torch(max_worker_restarts=3)
    loader: Any = tud.DataLoader(IMAGES)
    other: Any = tud.DataLoader(IMAGES, seeding="worker")  # type: ignore[call-arg]
    assert (loader.seeding, loader.max_worker_restarts) == ("sample", 3)
    assert (other.seeding, other.max_worker_restarts) == ("worker", 3)
    assert fastload.DataLoader(IMAGES).seeding == "worker"
    with pytest.raises(ValueError, match="sample") as caught:  # the error says where the argument comes from
        tud.DataLoader(datasets.Stream())
    assert "`fastload run` added these arguments: seeding='sample'" in caught.value.__notes__[0]
    fastload.unpatch_torch()
    assert type(tud.DataLoader(IMAGES)) is ImportedBefore
    fastload.patch_torch()
    assert tud.DataLoader(IMAGES).seeding == "worker"  # type: ignore[attr-defined]
    assert status.num_replaced - before == 3


@pytest.mark.parametrize(
    ("defaults", "error", "said"),
    [
        *(({name: 1}, TypeError, f"argument '{name}'") for name in ("num_workers", "rngs", "self")),
        ({"seeding": "samples"}, ValueError, 'seeding should be "worker", "sample" or "torch"'),
        ({"cache": "disk"}, ValueError, 'cache should be "ram", "ram:32G", "lmdb:PATH" or None'),
    ],
)
def test_other_names_and_values_are_refused_at_once(defaults: dict[str, Any], error: Any, said: str) -> None:
    """Names that torch's loader has, too: the code that is not changed gives them. Nothing is patched."""
    with pytest.raises(error, match=said):
        fastload.patch_torch(**defaults)
    assert type(tud.DataLoader(IMAGES)) is ImportedBefore


def test_a_subclass_defined_before_stays_torch_s() -> None:
    """Its constructor and its batches are what they were."""
    before = [labels.tolist() for _, labels in DefinedBefore(IMAGES, 5, extra="x")]
    fastload.patch_torch(seeding="sample")
    loader = DefinedBefore(IMAGES, 5, extra="x")
    assert not isinstance(loader, fastload.DataLoader)
    assert [labels.tolist() for _, labels in loader] == before
    assert loader.extra == "x"


def test_a_subclass_defined_after_is_ours() -> None:
    """With a constructor and an iterator of its own; it stays ours after unpatch_torch()."""
    fastload.patch_torch(seeding="sample")

    class Late(tud.DataLoader[Any]):
        def __init__(self, dataset: Any, *args: Any, extra: str = "", **options: Any) -> None:
            self.extra = extra
            super().__init__(dataset, *args, **options)

        def __iter__(self) -> Any:
            return ((self.extra, batch) for batch in super().__iter__())

    loader: Any = Late(IMAGES, 5, extra="x")
    fastload.unpatch_torch()
    assert isinstance(loader, fastload.DataLoader)
    assert issubclass(Late, tud.DataLoader)
    assert loader.seeding == "sample"
    assert [(extra, len(labels)) for extra, (_, labels) in loader] == [("x", 5), ("x", 5), ("x", 2)]
    assert Late(IMAGES).seeding == "worker"  # type: ignore[attr-defined]


def _subclasses_that_call_their_base() -> dict[str, Any]:
    """Classes defined while torch is patched, by the way in which each calls the base's constructor."""

    class Named(tud.DataLoader[Any]):
        def __init__(self, dataset: Any, *args: Any, **options: Any) -> None:
            tud.DataLoader.__init__(self, dataset, *args, **options)

    class SuperOfNamed(Named):
        def __init__(self, dataset: Any, *args: Any, **options: Any) -> None:
            super().__init__(dataset, *args, **options)

    class Mixin:
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)

    class Mixed(Mixin, tud.DataLoader[Any]):
        pass

    class WithEarly(NamedBefore, tud.DataLoader[Any]):
        pass

    class NamedIterator(Named):
        def __iter__(self) -> Any:
            return tud.DataLoader.__iter__(self)

    kinds = (Named, SuperOfNamed, Mixed, WithEarly, NamedIterator)
    return {kind.__name__: kind for kind in kinds}


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_subclass_can_call_its_base_in_any_way(num_workers: int) -> None:
    """By name, by an earlier name, through a mixin; after unpatch_torch() as well, without the defaults."""
    fastload.patch_torch(seeding="sample")
    kinds = _subclasses_that_call_their_base()
    loaders: dict[str, Any] = {
        name: kind(IMAGES, 5, num_workers=num_workers, shuffle=True) for name, kind in kinds.items()
    }
    assert {name: loader.seeding for name, loader in loaders.items()} == dict.fromkeys(kinds, "sample")
    fastload.unpatch_torch()
    late: dict[str, Any] = {name: kind(IMAGES, 5, num_workers=num_workers) for name, kind in kinds.items()}
    assert {name: loader.seeding for name, loader in late.items()} == dict.fromkeys(kinds, "worker")
    for loader in (*loaders.values(), *late.values()):
        assert isinstance(loader, fastload.DataLoader)
        assert sorted(label for _, labels in loader for label in labels.tolist()) == list(range(12))


def test_subclasses_that_are_generic_abstract_or_ours() -> None:
    """A class that is ours already does not change, and one that is torch's indirectly stays torch's."""
    fastload.patch_torch()

    class Typed(tud.DataLoader[T], Generic[T], metaclass=abc.ABCMeta):
        @abc.abstractmethod
        def name(self) -> str: ...

    class Concrete(Typed[T]):
        def name(self) -> str:
            return "concrete"

    loader: Any = Concrete[int](IMAGES)
    assert (isinstance(loader, fastload.DataLoader), loader.name()) == (True, "concrete")
    with pytest.raises(TypeError, match="abstract"):
        Typed(IMAGES)  # type: ignore[abstract]

    class Both(fastload.DataLoader, tud.DataLoader[Any]):
        pass

    assert ImportedBefore in Both.__bases__
    Early = type("Early", (DefinedBefore,), {})
    assert not issubclass(Early, fastload.DataLoader)
    assert len(list(Both(IMAGES, 4))) == len(list(Early(IMAGES, 4))) == 3


def test_signatures_are_kept() -> None:
    """Frameworks read them; they are those of the classes without patch_torch()."""
    kinds = (ImportedBefore, DefinedBefore)
    before = [(inspect.signature(kind), inspect.signature(kind.__init__)) for kind in kinds]
    fastload.patch_torch()
    assert [(inspect.signature(kind), inspect.signature(kind.__init__)) for kind in kinds] == before
    ours = inspect.signature(type(tud.DataLoader(IMAGES)))
    assert ours.parameters == inspect.signature(fastload.DataLoader).parameters


@pytest.mark.parametrize("prepare", [prepared_as_accelerate_does, prepared_as_ray_does])
def test_arguments_of_ours_are_kept_where_frameworks_build_a_loader(prepare: Any) -> None:
    """Without patch_torch(), some are an error, and the others are lost."""
    options: dict[str, Any] = {"seeding": "sample", "device": "cpu", "device_transform": _doubled}
    options |= {"on_error": "replace", "memory_format": torch.channels_last}
    loader = fastload.DataLoader(IMAGES, 4, **options)
    fastload.patch_torch(seeding="worker", max_worker_restarts=1)
    prepared: Any = prepare(loader)
    batches = list(prepared)
    assert isinstance(prepared, fastload.DataLoader)
    assert {name: getattr(prepared, name) for name in options} == options
    for ours, expected in zip(batches, loader, strict=True):
        assert torch.equal(ours[0], expected[0])
    other: Any = tud.DataLoader(list(range(4)), collate_fn=loader.collate_fn)  # by the program itself
    assert other.seeding == "worker"


def test_other_ways_to_build_a_loader_keep_them() -> None:
    """A part of a stream for each rank, as Accelerate; public attributes, as ignite; a new sampler."""
    stream, part = datasets.Stream(), datasets.Stream()
    part.dataset = stream  # type: ignore[attr-defined]
    ours = fastload.DataLoader(stream, 4, max_prefetch_memory="1GB")
    fastload.patch_torch(seeding="sample")
    loader = tud.DataLoader(IMAGES, 4)
    left_out = ("batch_size", "sampler", "drop_last")
    public = {name: value for name, value in vars(loader).items() if name[0] != "_" and name not in left_out}
    rebuilt: Any = type(loader)(**public)
    assert rebuilt.seeding == "sample"
    assert len(list(rebuilt)) == 3
    assert type(loader)(IMAGES, sampler=[1]).seeding == "sample"  # type: ignore[attr-defined]  # as Lightning
    fastload.unpatch_torch()
    fastload.patch_torch()
    prepared: Any = tud.DataLoader(part, collate_fn=ours.collate_fn)
    assert prepared.max_prefetch_memory == "1GB"


def test_loaders_are_pickled_and_copied() -> None:
    """A copy works while patched and after unpatch_torch(), as in a process that patched nothing."""
    fastload.patch_torch(seeding="sample")
    loader = tud.DataLoader(IMAGES, 4)
    stored = pickle.dumps(loader)
    twins: list[Any] = [pickle.loads(stored), copy.copy(loader), copy.deepcopy(loader)]
    fastload.unpatch_torch()
    for twin in (*twins, pickle.loads(stored), loader):
        assert isinstance(twin, fastload.DataLoader)
        assert twin.seeding == "sample"
        assert [len(labels) for _, labels in twin] == [4, 4, 4]


def test_copies_of_torch_s_loaders_stay_torch_s() -> None:
    """Of loaders that were made before, and of their pickles."""
    loader = tud.DataLoader(IMAGES, 4)
    stored = pickle.dumps(loader)
    fastload.patch_torch(seeding="sample")
    twins: list[Any] = [pickle.loads(stored), copy.copy(loader), copy.deepcopy(loader)]
    for twin in twins:
        assert type(twin) is ImportedBefore
        assert [len(labels) for _, labels in twin] == [4, 4, 4]


class _Counted:
    """Another base that makes its objects itself."""

    made = 0

    def __new__(cls, *args: Any, **options: Any) -> Any:
        _Counted.made += 1 + len(args)
        return super().__new__(cls)


def test_another_base_that_makes_objects_is_asked_as_before() -> None:
    """With the same arguments, before and after patch_torch(), in earlier classes and in later ones."""
    Early = type("Early", (ImportedBefore, _Counted), {})
    before = _Counted.made
    Early(IMAGES, 4)
    fastload.patch_torch()
    Late = type("Late", (tud.DataLoader, _Counted), {})
    for kind in (Early, Late):
        assert len(list(kind(IMAGES, 4))) == 3
    assert _Counted.made - before == 9
    assert issubclass(Late, fastload.DataLoader)


def _doubled(batch: Any) -> Any:
    return [2 * part for part in batch]


def test_a_method_that_another_library_wrapped_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It builds torch's loader again, and ours after another patch_torch()."""
    fastload.patch_torch()
    inner, calls = vars(ImportedBefore)["__init__"], []

    @functools.wraps(inner)
    def wrapper(self: Any, *args: Any, **options: Any) -> None:
        calls.append(args)
        inner(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ImportedBefore, "__init__", wrapper)
        fastload.unpatch_torch()
        first = tud.DataLoader(IMAGES)
        fastload.patch_torch()
        second = tud.DataLoader(IMAGES)
    assert type(first) is ImportedBefore
    assert isinstance(second, fastload.DataLoader)
    assert calls[0] == (IMAGES,)


def test_caches_on_disk_are_built_as_before(tmp_path: Any) -> None:
    """The use of torch's loader inside fastload does not change."""
    fastload.patch_torch(seeding="sample")
    samples = [(torch.arange(3), n) for n in range(4)]
    built = fastload.CachedDataset.build(
        samples, tmp_path / "cache", cache_key="built", num_workers=1, progress=False
    )
    assert fastload.CachedDataset(samples, cache=built, cache_key="built")[3][1] == 3
    built.close()
