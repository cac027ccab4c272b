"""`prepare()` for Accelerate and Ray: a rank's share of the batches, with all arguments kept.

Neither framework is a dependency of the tests: `accelerate_like` stands for them.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from typing import Any

import pytest
import torch
import torch.utils.data as tud

import fastload
from fastload import DataLoader
from tests.integrations import accelerate_like
from tests.integrations.accelerate_like import Accelerator
from tests.kit import datasets

IMAGES = datasets.Made(datasets.image, 24)
OWN: dict[str, Any] = {
    "memory_format": torch.channels_last,
    "prefetch_memory": "1GB",
    "seed_albumentations": False,
    "rng": "sample",
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
    return imported("fastload.integrations.accelerate", accelerate_like.accelerate_modules(), monkeypatch)


def for_ray(monkeypatch: pytest.MonkeyPatch, *, num_ranks: int = 2, rank: int = 0) -> Any:
    modules = accelerate_like.ray_modules(num_ranks=num_ranks, rank=rank)
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
    """Those of torch's loader and those that only fastload has; `device="auto"` is the accelerator's.

    `num_workers="auto"` goes on choosing, and does not measure a second time. `use_stateful_dataloader` is
    fulfilled by fastload's state, without torchdata's loader.
    """
    loader = DataLoader(IMAGES, 4, **OWN | {"device": "auto"}, **TORCH)
    loader._auto_workers = auto = type("Auto", (), {})()
    accelerator = Accelerator()
    accelerator.dataloader_config.use_stateful_dataloader = True
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
def test_the_position_is_saved_and_loaded(
    hf: Any, num_batches: int, num_workers: int, seedable: bool
) -> None:
    """The rest of the second epoch and the third one are those of a run that went on."""
    options: Any = {"rng": "sample", "num_workers": num_workers}
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
    """With rng="sample", the draws of an epoch follow from its number, also one that was set before."""
    options: Any = {"rng": "sample"}
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
    prepared = hf.prepare(Accelerator(), shuffled(rng="sample"))
    assert plain(pickle.loads(pickle.dumps(prepared))) == plain(prepared)
    assert hf.prepare(Accelerator(), prepared) is prepared
    prepared = hf.prepare(Accelerator(), DataLoader(range(24), 3, **OWN))
    skipping = hf.skip_first_batches(prepared, 1)
    assert list(skipping.batch_sampler) == list(prepared.batch_sampler)[1:]
    assert skipping.base_dataloader.rng == "sample"
    assert skipping.base_dataloader.device_transform is tuple


def test_loaders_that_cannot_be_prepared(hf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Accelerate keeps them: torch's own, two devices, a state that does not fit, any for a TPU."""
    accelerator, loader = Accelerator(), DataLoader(IMAGES, 4)
    for loader.device in ("meta", 1):  # type: ignore[assignment]
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
    monkeypatch.setattr(Accelerator, "distributed_type", accelerate_like.DistributedType.XLA)
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
    monkeypatch.setattr(module.ray.train.torch, "get_device", lambda: torch.device("cuda:3"))
    loader.set_epoch(4)
    prepared = module.prepare(loader)
    assert prepared.device == torch.device("cuda:3")
    assert prepared.state_dict()["epoch"] == prepared.sampler.epoch == 4
    assert module.prepare(loader, move_to_device=False).device is None
    assert module.prepare(loader, add_dist_sampler=False).sampler is loader.sampler
    loader.device = "cpu"
    with pytest.raises(ValueError, match="framework moves batches to cuda:3"):
        module.prepare(loader)
