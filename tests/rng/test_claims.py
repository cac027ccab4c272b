"""The claims of docs/howto/reproducibility.md, one test each, under its name."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as tud
from torch.utils.data import WeightedRandomSampler

import fastload
from fastload import CachedDataset, DataLoader
from tests.kit import datasets
from tests.rng.draws_zoo import Alone, Dice, Drawing, Jitter, Pictures, Unreadable, plain
from tests.rng.pipelines_zoo import Corners

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "reproducibility.md"


def run(dataset: Any, epochs: int = 1, cls: Any = DataLoader, **options: Any) -> list[list[Any]]:
    """All batches, epoch by epoch, as lists."""
    options = {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(5), **options}
    loader = cls(dataset, **options)
    found = [[plain(batch) for batch in loader] for _ in range(epochs)]
    loader._iterator = None
    return found


def rows(batches: list[Any]) -> list[Any]:
    return [row for batch in batches for row in batch]


def test_every_claim_has_a_test_of_its_name() -> None:
    """No claim is without a test here, and no test here is without a claim."""
    section = PAGE.read_text().split("## What is guaranteed")[1].split("\n## ")[0]
    claims = re.findall(r"^- \*\*(.+?)\.\*\*", section, re.MULTILINE)
    names = {"test_" + re.sub(r"\W+", "_", claim.lower()) for claim in claims}

    assert names == {name for name in globals() if name.startswith("test_")} - {
        "test_every_claim_has_a_test_of_its_name"
    }


@pytest.mark.slow
def test_the_default_is_torch_s() -> None:
    """Bit-identical to torch's loader for two epochs with 0 and 2 workers, with what the dataset draws."""
    for num_workers in (0, 2):
        runs = []
        for cls in (tud.DataLoader, DataLoader):
            random.seed(1), np.random.seed(1), torch.manual_seed(1)
            runs.append(run(datasets.Made(datasets.draws), 2, cls, num_workers=num_workers))
        assert runs[0] == runs[1]


def test_pipelines_draw_the_same_without_workers_as_with_one() -> None:
    """Two epochs of random crops, shuffled, and the pipeline's own generators before and after them."""
    dataset = Corners()
    before = dataset.stand()
    alone = run(dataset, 2)

    assert dataset.stand() == before
    assert alone == run(Corners(), 2, num_workers=1)


@pytest.mark.slow
def test_the_same_pixels_for_any_number_of_workers() -> None:
    """0, 1, 2 and 8 workers, another start method, prefetch factors, batch sizes, and either order."""
    expected = run(Dice(), 2, rng="sample")

    from_server = {"num_workers": 2, "multiprocessing_context": "forkserver"}
    assert run(Dice(), 2, rng="sample", **from_server) == expected
    assert run(Dice(), rng="sample", num_workers=8, prefetch_factor=1) == expected[:1]
    any_order = run(Dice(), 2, rng="sample", num_workers=2, in_order=False)
    assert [sorted(rows(epoch)) for epoch in any_order] == [sorted(rows(epoch)) for epoch in expected]
    sixes = run(Dice(), 2, rng="sample", batch_size=6, num_workers=2)
    assert [rows(epoch) for epoch in sixes] == [rows(epoch) for epoch in expected]


def test_the_same_pixels_in_threads() -> None:
    """Four threads draw what no worker draws."""
    assert run(Alone(), 2, rng="sample", num_workers=4, worker_type="thread") == run(Alone(), 2, rng="sample")


@pytest.mark.slow
def test_a_collate_fn_draws_the_same() -> None:
    """With 0, 1 and 2 workers, in threads, with a full cache, with replaced samples, and after a resume."""
    options: dict[str, Any] = {"rng": "sample", "collate_fn": Drawing()}
    expected = run(Dice(), 2, **options)
    for num_workers in (1, 2):
        assert run(Dice(), 2, num_workers=num_workers, **options) == expected
    for num_batches in range(0, 6, 2):
        rest, again = resumed(num_batches, "sample", num_batches % 3, Drawing())
        assert rest == again == expected[0][num_batches:]

    dataset = CachedDataset(Pictures(), transform=Jitter())
    assert run(dataset, **options) == run(dataset, num_workers=2, **options)
    replaced = {**options, "on_error": "replace", "max_errors": 1.0}
    assert run(Unreadable(), **replaced) == run(Unreadable(), num_workers=2, **replaced)
    options["collate_fn"] = Drawing(shared=False)
    assert run(Alone(), num_workers=2, worker_type="thread", **options) == run(Alone(), **options)


@pytest.mark.slow
def test_crops_and_flips_on_the_device_draw_the_same() -> None:
    """With "sample": workers, batch sizes, ranks and resumes; with "worker": workers and resumes."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 256, (24, 9, 9, 3), dtype=torch.uint8, generator=generator)
    dataset: Any = list(zip(noise, range(24), strict=True))
    augment = [fastload.transforms.RandomResizedCrop(7), fastload.transforms.RandomHorizontalFlip()]
    options: dict[str, Any] = {"device": "cpu", "device_transform": augment}

    def by_sample(**more: Any) -> list[dict[int, Any]]:
        epochs = run(dataset, 2, rng="sample", **options, **more)
        batches = [[zip(labels, images, strict=True) for images, labels in epoch] for epoch in epochs]
        return [dict(itertools.chain.from_iterable(epoch)) for epoch in batches]

    assert run(dataset, 2, num_workers=2, **options) == run(dataset, 2, num_workers=1, **options)
    expected = by_sample()
    assert expected[0] != expected[1]
    assert by_sample(num_workers=2, batch_size=5) == expected
    ranks: list[dict[int, Any]] = [{}, {}]
    for rank in range(2):
        sampler: Any = torch.utils.data.DistributedSampler(dataset, num_replicas=2, rank=rank)
        for whole, part in zip(ranks, by_sample(sampler=sampler, shuffle=False), strict=True):
            whole |= part
    assert ranks == expected
    for rng in ("worker", "sample"):
        options["rng"] = rng
        first, second = (
            DataLoader(dataset, 4, generator=torch.Generator().manual_seed(seed), **options)
            for seed in (5, 6)
        )
        iterator = iter(first)
        next(iterator)
        second.load_state_dict(first.state_dict())
        assert [plain(batch) for batch in second] == [plain(batch) for batch in iterator]


def test_duplicates_differ() -> None:
    """60 draws of 6 samples are 60 different ones, the same with workers."""
    sampler = list(WeightedRandomSampler([1.0] * 6, 60))
    alone, in_workers = (
        run(Dice(6), rng="sample", sampler=sampler, shuffle=False, num_workers=num_workers)
        for num_workers in (0, 2)
    )

    assert alone == in_workers
    assert len({tuple(row) for batch in alone[0] for row in batch}) == 60


def test_epochs_differ() -> None:
    """The first two epochs differ; set_epoch(1) gives the second."""
    first, second = run(Dice(), 2, rng="sample", shuffle=False)
    loader = DataLoader(Dice(), 4, rng="sample", generator=torch.Generator().manual_seed(5))
    loader.set_epoch(1)

    assert first != second
    assert [plain(batch) for batch in loader] == second


def test_a_cache_changes_nothing() -> None:
    """An epoch that fills the cache and one that reads it are the same but for the epoch's number."""
    dataset = CachedDataset(Pictures(), transform=Jitter())

    assert run(dataset, rng="sample") == run(dataset, rng="sample")
    assert dataset.cache_info().num_cached == 24


def test_the_training_loop_changes_nothing() -> None:
    """Draws between batches shift no batch, and loading shifts no draw."""
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "rng": "sample"}
    loader = DataLoader(Dice(), generator=fastload.seed_everything(1), **options)
    disturbed, drawn = [], []
    for batch in loader:
        disturbed.append(plain(batch))
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
    quiet = DataLoader(Dice(), generator=fastload.seed_everything(1), **options)

    assert [plain(batch) for batch in quiet] == disturbed
    assert drawn == [(random.random(), np.random.rand(), torch.rand(()).item()) for _ in disturbed]


def resumed(
    num_batches: int, rng: Any, num_workers: int, collate_fn: Any = None
) -> tuple[list[Any], list[Any]]:
    """The rest of an epoch as it would have been, and as a new loader brings it."""

    def make(num_workers: int) -> DataLoader:
        generator = torch.Generator().manual_seed(5)
        options: dict[str, Any] = {"rng": rng, "num_workers": num_workers, "collate_fn": collate_fn}
        return DataLoader(Dice(), 4, shuffle=True, generator=generator, **options)

    loader = make(2)
    iterator = iter(loader)
    for _ in range(num_batches):
        next(iterator)
    state = loader.state_dict()
    rest = [plain(batch) for batch in iterator]
    again = make(num_workers)
    again.load_state_dict(state)
    return rest, [plain(batch) for batch in again]


@pytest.mark.slow
def test_order_and_labels_after_a_resume() -> None:
    """At every batch, in both modes, with other numbers of workers: the indices are those."""
    for rng in ("worker", "sample"):
        for num_batches in range(6):
            rest, again = resumed(num_batches, rng, num_batches % 3)
            assert [[row[0] for row in batch] for batch in rest] == [
                [row[0] for row in batch] for batch in again
            ]


@pytest.mark.slow
def test_pixels_after_a_resume() -> None:
    """At every batch, with other numbers of workers: all that was drawn is the same."""
    for num_batches in range(6):
        rest, again = resumed(num_batches, "sample", num_batches % 3)
        assert rest == again
