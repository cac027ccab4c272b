"""Modules that stand for Accelerate and Ray Train: the classes and functions that fastload uses, cut short.

They follow accelerate/data_loader.py of version 1.15 and ray/train/v2/torch/train_loop_utils.py of version
2.60, for two ranks that exchange nothing.
"""

from __future__ import annotations

import enum
import types
from typing import Any

import torch
import torch.utils.data as tud

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


class DataLoaderDispatcher(DataLoaderAdapter):
    """Never made here."""


def get_sampler(loader: Any) -> Any:
    """The sampler of a loader's batch sampler."""
    return getattr(loader.batch_sampler, "sampler", None)


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
    skipping = Skipping(prepared.batch_sampler, 1, drop_last=False)
    skipping.num_batches = num_batches
    arguments = {name: getattr(prepared, name) for name in _NAMES}
    return DataLoaderShard(prepared.dataset, device=prepared.device, batch_sampler=skipping, **arguments)


class Skipping(tud.BatchSampler):
    num_batches: int

    def __len__(self) -> int:
        return len(self.sampler) - self.num_batches  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return iter(list(self.sampler)[self.num_batches :])  # type: ignore[call-overload, arg-type]


def accelerate_modules() -> dict[str, types.ModuleType]:
    """Accelerate, for sys.modules."""
    package, part = types.ModuleType("accelerate"), types.ModuleType("accelerate.data_loader")
    vars(package).update(Accelerator=Accelerator, DistributedType=DistributedType, data_loader=part)
    loaders = (DataLoaderShard, DataLoaderDispatcher)
    for thing in (*loaders, SeedableRandomSampler, get_sampler, skip_first_batches):
        setattr(part, thing.__name__, thing)
    return {"accelerate": package, "accelerate.data_loader": part}


def ray_modules(*, num_ranks: int, rank: int) -> dict[str, types.ModuleType]:
    """Ray Train in one of its workers, for sys.modules."""

    def prepare_data_loader(loader: Any, add_dist_sampler: bool = True, move_to_device: bool = True) -> Any:
        assert not move_to_device, "Ray's wrapper would copy each batch"
        if num_ranks == 1 or not add_dist_sampler or isinstance(loader.sampler, tud.DistributedSampler):
            return loader
        names = ("batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout")
        arguments = {name: getattr(loader, name) for name in (*names, "worker_init_fn", "generator")}
        shuffle = not isinstance(loader.sampler, tud.SequentialSampler)
        sampler = tud.DistributedSampler(loader.dataset, num_ranks, rank, shuffle=shuffle)
        return tud.DataLoader(loader.dataset, shuffle=False, sampler=sampler, **arguments)

    modules = {name: types.ModuleType(name) for name in ("ray", "ray.train", "ray.train.torch")}
    vars(modules["ray"])["train"] = modules["ray.train"]
    vars(modules["ray.train"])["torch"] = modules["ray.train.torch"]
    vars(modules["ray.train.torch"]).update(
        prepare_data_loader=prepare_data_loader, get_device=lambda: torch.device("cpu")
    )
    return modules
