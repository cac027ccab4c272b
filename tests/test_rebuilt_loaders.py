"""Loaders that frameworks build from ours: no argument that changes batches is lost on the way."""

from __future__ import annotations

import functools
import inspect
import logging
import pickle
import re
from typing import Any

import pytest
import torch
import torch.utils.data as tud

import fastload
from fastload import DataLoader
from fastload.batch.loader_collate import LoaderCollate
from tests.kit import datasets
from tests.kit.batches import assert_same_batches

IMAGES = datasets.Made(datasets.image, 12)
CHANNELS_LAST = {"memory_format": torch.channels_last}
LOST: dict[str, dict[str, Any]] = {
    'seeding="sample"': {"seeding": "sample"},
    "memory_format": CHANNELS_LAST,
    "device_transform": {"device": "cpu", "device_transform": datasets.mixed_up},
    'seeding="sample", memory_format': {"seeding": "sample", "device": "auto", **CHANNELS_LAST},
}
OTHERS: dict[str, Any] = {"seeding": "sample", "device": "cpu", "device_transform": datasets.mixed_up}


def prepared_as_accelerate_does(loader: Any, **options: Any) -> Any:
    """accelerate/data_loader.py, prepare_data_loader, version 1.15: torch's loader, with these attributes."""
    names = (
        *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
        *("generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
    )
    arguments = {name: getattr(loader, name, None) for name in names}
    return tud.DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **arguments | options)


def prepared_as_ray_does(loader: Any) -> Any:
    """ray/train/torch/train_loop_utils.py, prepare_data_loader: torch's loader, with a sampler of its own."""
    names = ("batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout")
    arguments = {name: getattr(loader, name) for name in (*names, "worker_init_fn", "generator")}
    sampler = tud.DistributedSampler(loader.dataset, 1, 0, shuffle=False)
    return tud.DataLoader(loader.dataset, shuffle=False, sampler=sampler, **arguments)


def noted_as_lightning_does(init: Any) -> Any:
    """lightning/fabric/utilities/data.py, _wrap_init_method, version 2.6: how a loader is rebuilt."""

    @functools.wraps(init)
    def wrapper(loader: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(loader, "__pl_saved_args"):
            object.__setattr__(loader, "__pl_saved_args", args)
            object.__setattr__(loader, "__pl_saved_kwargs", kwargs)
        init(loader, *args, **kwargs)

    return wrapper


REFUSED = "cannot do what these arguments say: {}. Call fastload.patch_torch() before"


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("prepare", "names"),
    [(prepared_as_accelerate_does, names) for names in LOST] + [(prepared_as_ray_does, 'seeding="sample"')],
)
def test_torch_s_loader_refuses_what_it_cannot_do(names: str, prepare: Any, num_workers: int) -> None:
    """At its first batch, with the names of the arguments that would change it, and what to do."""
    loader = DataLoader(IMAGES, 4, num_workers=num_workers, **LOST[names])

    with pytest.raises(RuntimeError, match=re.escape(REFUSED.format(names))):
        next(iter(prepare(loader)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_arguments_that_change_no_batch_are_named_once(num_workers: int, tmp_path: Any) -> None:
    """Torch's loader does without them, and one line of the log says so, of whichever worker."""
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("fastload").addHandler(handler)
    options: Any = {"num_workers": num_workers, "max_worker_restarts": 1, "cache": "ram"}
    loader = DataLoader(IMAGES, 4, seeding="torch", **options)
    expected = list(tud.DataLoader(IMAGES, 4))
    prepared = prepared_as_accelerate_does(loader)
    try:
        for _ in range(2):
            assert_same_batches(list(prepared), expected)
    finally:
        logging.getLogger("fastload").removeHandler(handler)
        handler.close()
    told = "have no effect: cache='ram', max_worker_restarts=1. Call fastload.patch_torch()"
    assert (tmp_path / "log").read_text().count(told) == 1


@pytest.mark.parametrize("num_workers", [1, "auto"])
@pytest.mark.parametrize("classes", [(tud.DataLoader,), (tud.DataLoader, DataLoader)], ids=["late", "early"])
def test_lightning_keeps_all_arguments(monkeypatch: Any, classes: Any, num_workers: Any) -> None:
    """Also if our class is first imported in a hook, when it has wrapped the classes that it knew."""
    for one in classes:
        monkeypatch.setattr(one, "__init__", noted_as_lightning_does(one.__init__))
    options: Any = {"num_workers": num_workers, **OTHERS, **CHANNELS_LAST}
    loader = DataLoader(IMAGES, 4, **options)
    args, kwargs = (vars(loader)[f"__pl_saved_{name}"] for name in ("args", "kwargs"))
    again: Any = DataLoader(*args, **kwargs | {"sampler": [1, 2], "shuffle": False})
    assert {name: getattr(again, name) for name in OTHERS} == OTHERS
    assert (again.memory_format, again.num_workers) == (torch.channels_last, loader.num_workers)
    assert list(again.sampler) == [1, 2]


@pytest.mark.parametrize("way", [{}, {"in_order": False}, {"worker_type": "thread"}], ids=str)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_our_own_iterators_use_the_collate_fn_itself(num_workers: int, way: dict[str, Any]) -> None:
    """Nothing is lost here, and nothing is refused."""
    options: Any = {"num_workers": num_workers, "collate_fn": _collate, **way, **CHANNELS_LAST}
    lost: Any = {"seeding": "sample", "device": "cpu", "device_transform": _first}
    batches = DataLoader(IMAGES, 4, **options, **lost)
    assert [tuple(batch.shape) for batch in batches] == [(4, 3, 8, 8)] * 3


def _collate(samples: Any) -> Any:
    return tud.default_collate(samples)


def _first(batch: Any) -> Any:
    return batch[0]


# --- the callable itself ---------------------------------------------------------------------------------


def test_it_follows_from_the_arguments_as_they_are_now() -> None:
    """Without such arguments it is the user's, or torch's default."""
    assert DataLoader(IMAGES, 4).collate_fn is tud.default_collate
    assert DataLoader(IMAGES, None).collate_fn is tud.DataLoader(IMAGES, None).collate_fn
    loader = DataLoader(IMAGES, 4, collate_fn=_collate)
    assert loader.collate_fn is _collate
    loader.batch_transform = _first
    with pytest.raises(RuntimeError, match="batch_transform"):
        next(iter(prepared_as_accelerate_does(loader)))
    loader.batch_transform = None
    assert loader.collate_fn is _collate


class Mixup:
    """As timm's collate function, which training switches off through the loader."""

    mixup_enabled = True

    def __call__(self, samples: Any) -> Any:
        return self.mixup_enabled, len(samples)


def test_it_looks_like_the_user_s_own() -> None:
    """Attributes are read, set and deleted on the inner one; equality, hash and signature are its own."""
    mixup = Mixup()
    loader = DataLoader(IMAGES, 2, seeding="sample", collate_fn=mixup)
    collate: Any = loader.collate_fn
    collate.mixup_enabled = False
    assert loader.collate_fn.mixup_enabled is mixup.mixup_enabled is False  # type: ignore[attr-defined]
    del collate.mixup_enabled
    assert mixup.mixup_enabled
    assert collate == mixup == collate == loader.collate_fn != Mixup()
    assert len({collate, mixup}) == 1
    assert repr(mixup) in repr(collate)
    assert inspect.signature(collate) == inspect.signature(mixup)
    assert DataLoader(IMAGES, 2, seeding="sample", collate_fn=_collate).collate_fn.__name__ == "_collate"
    with pytest.raises(AttributeError, match="nothing"):
        collate.nothing  # noqa: B018


def test_it_can_be_pickled() -> None:
    """With what it knows of its loader."""
    loader = DataLoader(IMAGES, 4, seeding="sample", collate_fn=_collate, **CHANNELS_LAST)  # type: ignore[arg-type]
    twin = pickle.loads(pickle.dumps(loader.collate_fn))
    assert twin == _collate
    with pytest.raises(RuntimeError, match=r'seeding="sample", memory_format'):
        next(iter(tud.DataLoader(IMAGES, 4, collate_fn=twin)))


def test_a_loader_of_ours_takes_the_inner_one() -> None:
    """Frameworks that build our class again (Lightning, ignite), by attributes or by vars, nest nothing."""
    loader = DataLoader(IMAGES, 4, seeding="sample", collate_fn=_collate)
    assert type(loader.collate_fn) is LoaderCollate
    assert DataLoader(IMAGES, 4, collate_fn=loader.collate_fn).collate_fn is _collate
    others = ("sampler", "batch_sampler")
    public = {name: one for name, one in vars(loader).items() if name[0] != "_" and name not in others}
    rebuilt = fastload.DataLoader(**public)
    assert public["collate_fn"] is vars(rebuilt)["collate_fn"] is _collate
    assert type(rebuilt.collate_fn) is LoaderCollate
    assert len(list(rebuilt)) == 3


def test_a_subclass_may_have_a_method_of_this_name() -> None:
    """As with torch's class, a collate_fn that is a method of the loader can be given to the constructor."""

    class Own(DataLoader):
        def __init__(self, dataset: Any) -> None:
            super().__init__(dataset, 4, collate_fn=self.collate_fn, seeding="sample")

        def collate_fn(self, samples: Any) -> Any:
            return len(samples)

    assert list(Own(IMAGES)) == [4, 4, 4]
