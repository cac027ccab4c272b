"""`prepare()` for Accelerate and Ray: a rank's share of the batches, with all arguments kept.

Neither framework is a dependency of the tests. The classes and functions that fastload uses of them stand
here, cut short, for two ranks that exchange nothing: they follow accelerate/data_loader.py of version 1.15
and ray/train/v2/torch/train_loop_utils.py of version 2.60.
"""

from __future__ import annotations

import copy
import enum
import importlib
import pickle
import sys
import types
from typing import Any

import pytest
import torch
import torch.utils.data as tud

import fastload
from fastload import DataLoader
from tests.kit import datasets

RANKS = 2


class DistributedType(enum.Enum):
    NO = "NO"
    XLA = "XLA"


class SeedableRandomSampler(tud.RandomSampler):
    """Seeds its generator in each epoch."""

    epoch = 0

    def __iter__(self) -> Any:
        self.generator = torch.Generator().manual_seed(self.epoch + 3)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class BatchSamplerShard(tud.BatchSampler):
    """Every second batch, for as many batches as the other rank has."""

    def __init__(self, batch_sampler: Any, rank: int) -> None:
        self.batch_sampler = batch_sampler
        self.rank = rank

    def __len__(self) -> int:
        return len(self.batch_sampler) // RANKS

    def __iter__(self) -> Any:
        batches = list(self.batch_sampler)
        return iter(batches[self.rank : len(batches) // RANKS * RANKS : RANKS])


class DataLoaderAdapter:
    """Holds a loader, and looks like one."""

    end_of_dataloader = False

    def __init__(self, dataset: Any, **arguments: Any) -> None:
        self.base_dataloader = tud.DataLoader(dataset, **arguments)
        self.iteration = 0

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError
        return getattr(self.base_dataloader, name)

    @property
    def __class__(self) -> Any:
        return type(self.base_dataloader)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def state_dict(self) -> Any:
        return self.dl_state_dict

    def load_state_dict(self, state: Any) -> None:
        self.base_dataloader.load_state_dict(state)  # type: ignore[attr-defined]

    def _update(self) -> None:
        if hasattr(self.base_dataloader, "state_dict"):
            self.dl_state_dict = self.base_dataloader.state_dict()
            self.dl_state_dict["_iterator_finished"] = self.end_of_dataloader


class DataLoaderShard(DataLoaderAdapter):
    """Reads one batch ahead."""

    def __init__(self, dataset: Any, device: Any = None, **arguments: Any) -> None:
        super().__init__(dataset, **arguments)
        self.device = device

    def set_epoch(self, epoch: int) -> None:
        self.iteration = epoch
        inner = getattr(self.batch_sampler, "batch_sampler", None)
        if hasattr(getattr(inner, "sampler", None), "set_epoch"):
            inner.sampler.set_epoch(epoch)

    def __iter__(self) -> Any:
        self.end_of_dataloader = False
        self.set_epoch(self.iteration)
        batches = iter(self.base_dataloader)
        batch = next(batches)
        while True:
            self._update()
            try:
                following = next(batches)
            except StopIteration:
                self.end_of_dataloader = True
                self._update()
                yield batch
                break
            yield batch
            batch = following
        self.iteration += 1


_NAMES = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


class Accelerator:
    """One of two ranks on the CPU."""

    distributed_type = DistributedType.NO
    device = torch.device("cpu")

    def __init__(self, rank: int = 0, *, seedable: bool = False, device_placement: bool = True) -> None:
        self.rank = rank
        self.seedable = seedable
        self.device_placement = device_placement
        self.dataloader_config = types.SimpleNamespace(use_stateful_dataloader=False)
        self.prepared: list[Any] = []

    def prepare_data_loader(self, loader: Any) -> Any:
        if getattr(loader, "_is_accelerate_prepared", False):
            return loader
        assert not self.dataloader_config.use_stateful_dataloader, "torchdata's loader would start workers"
        shard = BatchSamplerShard(loader.batch_sampler, self.rank)
        prepared = DataLoaderShard(
            loader.dataset,
            device=self.device if self.device_placement else None,
            batch_sampler=shard,
            **{name: getattr(loader, name) for name in _NAMES},
        )
        if self.seedable:
            sampler = SeedableRandomSampler(loader.dataset)
            shard.sampler = shard.batch_sampler.sampler = sampler
        self.prepared.append(prepared)
        return prepared


def skip_first_batches(prepared: Any, num_batches: int) -> Any:
    """A new loader, whose first epoch begins later."""
    later = list(prepared.batch_sampler)[num_batches:]
    arguments = {name: getattr(prepared, name) for name in _NAMES}
    return DataLoaderShard(prepared.dataset, device=prepared.device, batch_sampler=later, **arguments)


DATA_LOADER = types.SimpleNamespace(
    DataLoaderShard=DataLoaderShard,
    DataLoaderDispatcher=type("DataLoaderDispatcher", (), {}),
    SeedableRandomSampler=SeedableRandomSampler,
    get_sampler=lambda loader: getattr(loader.batch_sampler, "sampler", None),
    skip_first_batches=skip_first_batches,
)
ACCELERATE = types.SimpleNamespace(
    Accelerator=Accelerator, DistributedType=DistributedType, data_loader=DATA_LOADER
)
IMAGES = datasets.Made(datasets.image, 24)
OWN: dict[str, Any] = (
    {"memory_format": torch.channels_last, "max_prefetch_memory": "1GB", "seed_albumentations": False}
    | {
        "seeding": "sample",
        "device": "cpu",
        "device_transform": tuple,
        "on_error": "replace",
        "max_errors": 3,
    }
    | {"max_worker_restarts": 1}
)
TORCH: dict[str, Any] = {
    "num_workers": 1,
    "prefetch_factor": 3,
    "persistent_workers": True,
    "timeout": 60,
    "collate_fn": list,
} | {"multiprocessing_context": "fork"}


def imported(name: str, modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of fastload that imports a framework, with this one in the framework's place."""
    for key, module in modules.items():
        monkeypatch.setitem(sys.modules, key, module)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)  # removed at the end of the test
    return module


@pytest.fixture
def hf(monkeypatch: pytest.MonkeyPatch) -> Any:
    modules = {"accelerate": ACCELERATE, "accelerate.data_loader": DATA_LOADER}
    return imported("fastload.integrations.accelerate", modules, monkeypatch)


def for_ray(monkeypatch: pytest.MonkeyPatch, *, num_ranks: int = 2, rank: int = 0) -> Any:
    """`fastload.integrations.ray` in a worker of Ray Train."""

    def prepare_data_loader(loader: Any, add_dist_sampler: bool = True, move_to_device: bool = True) -> Any:
        assert not move_to_device, "Ray's wrapper would copy each batch"
        if num_ranks == 1 or not add_dist_sampler or isinstance(loader.sampler, tud.DistributedSampler):
            return loader
        names = ("batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout")
        arguments = {name: getattr(loader, name) for name in (*names, "worker_init_fn", "generator")}
        shuffle = not isinstance(loader.sampler, tud.SequentialSampler)
        sampler = tud.DistributedSampler(loader.dataset, num_ranks, rank, shuffle=shuffle)
        return tud.DataLoader(loader.dataset, shuffle=False, sampler=sampler, **arguments)

    device = torch.device("cpu")
    inner = types.SimpleNamespace(prepare_data_loader=prepare_data_loader, get_device=lambda: device)
    train = types.SimpleNamespace(torch=inner)
    modules = {"ray": types.SimpleNamespace(train=train), "ray.train": train, "ray.train.torch": inner}
    return imported("fastload.integrations.ray", modules, monkeypatch)


def draw(index: int) -> Any:
    return index, torch.rand(1).item()


def shuffled(**options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(datasets.Made(draw, 24), 3, shuffle=True, generator=generator, **options)


def plain(batches: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "num_workers"), [(0, 1), (1, 0)])
def test_accelerate_gives_the_batches_of_torch_s_loader(hf: Any, rank: int, num_workers: int) -> None:
    """Over two epochs, with the order and the draws of torch's loader that Accelerate itself prepared."""
    epochs = []
    for make in (DataLoader, tud.DataLoader):
        torch.manual_seed(2)
        loader = make(datasets.Made(draw, 24), 3, shuffle=True, num_workers=num_workers)
        accelerator = Accelerator(rank)
        ours = make is DataLoader
        prepared = hf.prepare(accelerator, loader) if ours else accelerator.prepare_data_loader(loader)
        epochs.append([plain(prepared), plain(prepared)])
    assert epochs[0] == epochs[1]
    assert [len(epoch) for epoch in epochs[0]] == [4, 4]


def assert_kept(prepared: Any, loader: Any) -> None:
    assert type(prepared) is DataLoader
    assert {name: getattr(prepared, name) for name in OWN} == {**OWN, "device": torch.device("cpu")}
    assert all(getattr(prepared, name) == getattr(loader, name) for name in TORCH)


def test_accelerate_keeps_all_arguments(hf: Any) -> None:
    """Those of torch's and of fastload; `device` and `num_workers="auto"`, which keeps its number."""
    loader = DataLoader(IMAGES, 4, **OWN | {"device": "auto"}, **TORCH)
    loader._auto_workers = auto = type("Auto", (), {})()
    accelerator = Accelerator()
    accelerator.dataloader_config.use_stateful_dataloader = True  # by our state, without torchdata's loader
    prepared = hf.prepare(accelerator, loader)
    kept = prepared.base_dataloader
    assert_kept(kept, loader)
    assert kept._auto_workers is auto
    assert prepared.use_stateful_dataloader
    assert accelerator.dataloader_config.use_stateful_dataloader
    assert prepared.state_dict()["_num_yielded"] == 0
    assert isinstance(prepared, fastload.DataLoader)
    assert kept.batch_sampler.batch_sampler is loader.batch_sampler


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_batches", "num_workers", "seedable"),
    [(1, 1, False), (3, 0, False), (3, 1, True), (4, 0, True), (4, 1, False)],
)
def test_the_position_is_kept(hf: Any, num_batches: int, num_workers: int, seedable: bool) -> None:
    """The rest of the second epoch and the third one are those of a run that went on."""
    options: Any = {"seeding": "sample", "num_workers": num_workers}
    prepared = hf.prepare(Accelerator(1, seedable=seedable), shuffled(**options))
    epochs = [plain(prepared)]
    second = []
    for number, batch in enumerate(prepared, 1):
        second.append(batch)
        if number == num_batches:
            state = copy.deepcopy(prepared.state_dict())
    epochs += [plain(second), plain(prepared)]
    again = hf.prepare(Accelerator(1, seedable=seedable), shuffled(**options))
    again.load_state_dict(state)
    assert again.state_dict()["_num_yielded"] == num_batches
    if num_batches < 4:
        assert plain(again) == epochs[1][num_batches:]
    assert plain(again) == epochs[2]


def test_set_epoch_reaches_the_loader(hf: Any) -> None:
    """With seeding="sample", the draws of an epoch follow from its number, also one that was set before."""
    options: Any = {"seeding": "sample"}
    loader = DataLoader(datasets.Made(draw, 6), 3, **options)
    first, second = (plain(hf.prepare(Accelerator(), loader)) for _ in range(2))
    prepared = hf.prepare(Accelerator(), loader)
    prepared.set_epoch(5)
    fifth = plain(prepared)
    loader.set_epoch(5)
    assert first == second != fifth
    assert plain(hf.prepare(Accelerator(), loader)) == fifth


def test_a_prepared_loader_can_be_pickled_and_skipped_in(hf: Any) -> None:
    """It is prepared only once; a loader of its later batches has all arguments, too."""
    prepared = hf.prepare(Accelerator(), shuffled(seeding="sample"))
    assert plain(pickle.loads(pickle.dumps(prepared))) == plain(prepared)
    assert hf.prepare(Accelerator(), prepared) is prepared
    prepared = hf.prepare(Accelerator(), DataLoader(range(24), 3, **OWN))
    skipping = hf.skip_first_batches(prepared, 1)
    assert list(skipping.batch_sampler) == list(prepared.batch_sampler)[1:]
    assert skipping.base_dataloader.seeding == "sample"
    assert skipping.base_dataloader.device_transform is tuple


def test_loaders_that_cannot_be_prepared(hf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Accelerate keeps them: torch's own, two devices, a state that does not fit, any for a TPU."""
    accelerator, loader = Accelerator(), DataLoader(IMAGES, 4)
    for loader.device in ("mps", 1):  # type: ignore[assignment]
        with pytest.raises(ValueError, match="framework moves batches to cpu"):
            hf.prepare(accelerator, loader)
    loader.device = "cuda:1"  # which counts without Accelerate's device placement
    assert hf.prepare(Accelerator(device_placement=False), loader).base_dataloader.device == "cuda:1"
    with pytest.raises(TypeError, match="takes a result of prepare"):
        hf.skip_first_batches(loader, 1)
    loader = DataLoader(IMAGES, 4)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(TypeError, match=r"takes a fastload\.DataLoader, but got a list"):
        hf.prepare(accelerator, [1])
    with pytest.raises(ValueError, match="prepare the loader first"):
        hf.prepare(accelerator, loader)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.XLA)
    with pytest.raises(NotImplementedError, match="TPU"):
        hf.prepare(accelerator, DataLoader(IMAGES, 4))
    assert accelerator.prepared == []


@pytest.mark.parametrize("rank", [0, 1])
def test_ray_gives_the_samples_of_its_sampler(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """With all arguments, also those that Ray itself drops; set_epoch() reaches its sampler."""
    loader = DataLoader(IMAGES, 4, shuffle=True, **OWN, **TORCH)
    prepared = for_ray(monkeypatch, rank=rank).prepare(loader)
    prepared.set_epoch(2)
    expected = tud.DistributedSampler(IMAGES, 2, rank, shuffle=True)
    expected.set_epoch(2)
    assert_kept(prepared, loader)
    assert isinstance(prepared.sampler, tud.DistributedSampler)
    assert [index for batch in prepared.batch_sampler for index in batch] == list(expected)
    assert prepared.batch_size == 4


def test_ray_moves_batches_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader copies them, unless the caller wants them on the host; one rank keeps the samplers."""
    module, loader = for_ray(monkeypatch, num_ranks=1), shuffled()
    prepared = module.prepare(loader)
    assert prepared.sampler is loader.sampler
    assert prepared.device is None  # a CPU worker leaves batches as they are
    assert len(plain(prepared)) == 8
    module = for_ray(monkeypatch)
    monkeypatch.setattr(sys.modules["ray.train.torch"], "get_device", lambda: torch.device("cuda:3"))
    loader.set_epoch(4)
    prepared = module.prepare(loader)
    assert prepared.device == torch.device("cuda:3")
    assert prepared.state_dict()["epoch"] == prepared.sampler.epoch == 4
    assert module.prepare(loader, move_to_device=False).device is None
    assert module.prepare(loader, add_dist_sampler=False).sampler is loader.sampler
    loader.device = "cpu"
    with pytest.raises(ValueError, match="framework moves batches to cuda:3"):
        module.prepare(loader)
