"""Loaders that Accelerate and Ray Train prepare after `patch_torch()`: a rank's share, with all arguments.

Neither framework is a dependency of the tests. What they do with a loader stands here, cut short, for two
ranks that exchange nothing: it follows accelerate/data_loader.py of version 1.15 and
ray/train/v2/torch/train_loop_utils.py of version 2.60. tests/clients/ runs the real ones.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils.data as tud

import fastload
from fastload import DataLoader
from tests.kit import datasets
from tests.test_rebuilt_loaders import prepared_as_ray_does

RANKS = 2


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


def prepared(loader: Any, rank: int = 0) -> Any:
    """The loader of a rank."""
    return shard_of(loader, BatchSamplerShard(loader.batch_sampler, rank))


def shard_of(loader: Any, batch_sampler: Any) -> Any:
    arguments = {name: getattr(loader, name) for name in _NAMES}
    return DataLoaderShard(loader.dataset, batch_sampler=batch_sampler, **arguments)


IMAGES = datasets.Made(datasets.image, 24)
OWN: dict[str, Any] = {
    "memory_format": torch.channels_last,
    "max_prefetch_memory": "1GB",
    "seeding": "sample",
    "device": "cpu",
    "device_transform": tuple,
    "on_error": "replace",
    "max_errors": 3,
    "max_worker_restarts": 1,
}
TORCH: dict[str, Any] = {
    "num_workers": 1,
    "prefetch_factor": 3,
    "persistent_workers": True,
    "timeout": 60,
    "collate_fn": list,
    "multiprocessing_context": "fork",
}


@pytest.fixture(autouse=True)
def _patched() -> Any:
    fastload.patch_torch()
    yield
    fastload.unpatch_torch()


def draw(index: int) -> Any:
    return index, torch.rand(1).item()


def shuffled(**options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(datasets.Made(draw, 24), 3, shuffle=True, generator=generator, **options)


def plain(batches: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "num_workers"), [(0, 1), (1, 0)])
def test_accelerate_gives_the_batches_of_torch_s_loader(rank: int, num_workers: int) -> None:
    """Over two epochs, with the order and the draws of the loader that it prepares without patch_torch()."""
    epochs = []
    for make in (DataLoader, tud.DataLoader):
        if make is tud.DataLoader:
            fastload.unpatch_torch()
        torch.manual_seed(2)
        loader = prepared(make(datasets.Made(draw, 24), 3, shuffle=True, num_workers=num_workers), rank)
        assert isinstance(loader.base_dataloader, DataLoader) == (make is DataLoader)
        epochs.append([plain(loader), plain(loader)])
    assert epochs[0] == epochs[1]
    assert [len(epoch) for epoch in epochs[0]] == [4, 4]


def test_accelerate_keeps_all_arguments() -> None:
    """Those of torch's loader and of ours, also where it builds a loader of the later batches."""
    loader = DataLoader(IMAGES, 4, **OWN, **TORCH)
    first = prepared(loader)
    skipping = shard_of(first, list(first.batch_sampler)[1:])
    for kept in (first.base_dataloader, skipping.base_dataloader):
        assert {name: getattr(kept, name) for name in OWN} == OWN
        assert all(getattr(kept, name) == getattr(loader, name) for name in TORCH)
    assert first.base_dataloader.batch_sampler.batch_sampler is loader.batch_sampler
    assert len(skipping.base_dataloader.batch_sampler) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("num_batches", "num_workers"), [(1, 1), (3, 0), (4, 1)])
def test_the_position_is_kept(num_batches: int, num_workers: int) -> None:
    """The rest of the second epoch and the third one are those of a run that went on."""
    options: Any = {"seeding": "sample", "num_workers": num_workers}
    loader = prepared(shuffled(**options), 1)
    epochs = [plain(loader)]
    second = []
    for number, batch in enumerate(loader, 1):
        second.append(batch)
        if number == num_batches:
            state = copy.deepcopy(loader.state_dict())
    epochs += [plain(second), plain(loader)]
    again = prepared(shuffled(**options), 1)
    again.load_state_dict(state)
    if num_batches < 4:
        assert plain(again) == epochs[1][num_batches:]
    assert plain(again) == epochs[2]


def test_ray_gives_the_samples_of_its_sampler() -> None:
    """With all arguments of ours."""
    loader = DataLoader(IMAGES, 4, shuffle=True, **OWN, **TORCH)
    ours = prepared_as_ray_does(loader)
    assert isinstance(ours, DataLoader)
    assert {name: getattr(ours, name) for name in OWN} == OWN
    assert isinstance(ours.sampler, tud.DistributedSampler)
    assert [label for _, label in sum(ours, ())] == list(ours.sampler)  # type: ignore[call-overload]
