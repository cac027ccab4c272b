"""The claims of docs/guides/reproducibility.md, one test each, under its name."""

from __future__ import annotations

import functools
import itertools
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as tud
from torch.utils.data import ConcatDataset, Subset, WeightedRandomSampler

import fastload
from fastload import CachedDataset, DataLoader
from tests.kit import datasets
from tests.kit.datasets import Made
from tests.resume.loaders import LENGTH, SAMPLERS, seeded, through_json
from tests.rng import draws_zoo as zoo
from tests.rng.draws_zoo import Alone, Chain, Dice, Drawing, Jitter, Noise, Pictures, Unreadable, plain, run
from tests.rng.pipelines_zoo import Corners

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "reproducibility.md"


def test_every_claim_has_a_test_of_its_name() -> None:
    """No claim is without a test here, and no test here is without a claim."""
    section = PAGE.read_text().split("## What is guaranteed")[1].split("\n## ")[0]
    claims = re.findall(r"^- \*\*(.+?)\.\*\*", section, re.MULTILINE)
    names = {"test_" + re.sub(r"\W+", "_", claim.lower()) for claim in claims}

    names.add("test_every_claim_has_a_test_of_its_name")
    assert names == {name for name in globals() if name.startswith("test_")}


@pytest.mark.slow
def test_the_default_is_torch_s() -> None:
    """Bit-identical to torch's loader without workers and with two, with what the dataset draws."""
    for num_workers, epochs in ((0, 2), (2, 1)):
        options: dict[str, Any] = {"num_workers": num_workers, "shuffle": True}
        torchs, ours = (
            run(Made(datasets.draws), epochs, cls, **options) for cls in (tud.DataLoader, DataLoader)
        )
        assert torchs == ours


def test_pipelines_draw_the_same_without_workers_as_with_one() -> None:
    """Two epochs of random crops, shuffled, and the pipeline's own generators before and after them."""
    dataset = Corners()
    before = dataset.stand()
    alone = run(dataset, 2, shuffle=True)

    assert dataset.stand() == before
    assert alone == run(Corners(), 2, num_workers=1, shuffle=True)


# --- seeding="sample" ------------------------------------------------------------------------------------


def looks_and_draws(worker_id: int) -> None:
    """The dataset is within reach."""
    assert torch.utils.data.get_worker_info().dataset.length == 24  # type: ignore[union-attr]
    random.random()


# Each makes a dataset and the options of its loader anew.
SAMPLES: dict[str, Any] = {
    "of two datasets": lambda: (Subset(ConcatDataset([Dice(7), Dice(7)]), range(1, 12)), {}),
    "single": lambda: (Dice(6), {"batch_size": None, "worker_init_fn": None}),
    "by keys": lambda: (Made(zoo.keyed), {"batch_size": None, "sampler": ["a", ("a", 1), 7, "7", "a"]}),
    "of transforms": lambda: (Made(Chain(Chain(Noise(random.Random(1))), Noise(torch.Generator()))), {}),
    "of a partial": lambda: (Made(functools.partial(Noise.__call__, Noise(random.Random(1)))), {}),
    "after worker_init_fn": lambda: (Dice(), {"worker_init_fn": looks_and_draws}),
}
COLLATED: dict[str, Any] = {
    "samples": lambda: (Dice(12), {}),
    "single samples": lambda: (Dice(6), {"batch_size": None}),
    "cached samples": lambda: (CachedDataset(Pictures(), transform=Jitter()), {}),
    "replaced samples": lambda: (Unreadable(12), {"on_error": "replace", "max_errors": 1.0}),
    "made-up samples": lambda: (Unreadable(12), {"on_error": lambda _: Dice(1)[0] * 0, "max_errors": 1.0}),
}


def of_thread() -> tuple[Any, Any]:
    """A generator that both hold."""
    shared = [np.random.default_rng(1)]
    return Alone(own=shared), {"collate_fn": Drawing(shared=False, own=shared)}


IN_THREADS: dict[str, Any] = {
    "samples": lambda: (Alone(), {"collate_fn": Drawing(shared=False)}),
    "a generator of both": of_thread,
    "nested transforms": SAMPLES["of transforms"],
    "cached samples": lambda: (CachedDataset(Pictures(), transform=Jitter(shared=False)), {}),
}


def check_ways(make: Any, *ways: dict[str, Any], **more: Any) -> None:
    """Two epochs are the same without workers and in each of the ways, but for the order of batches."""
    found = []
    for way in ({}, *ways):
        dataset, options = make()
        epochs = run(dataset, 2, seeding="sample", **{**more, **options, **way})
        found.append([sorted(epoch, key=repr) for epoch in epochs])
    assert all(epochs == found[0] for epochs in found)


FORKED = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True}
AS_THEY_COME = {"num_workers": 2, "in_order": False, "persistent_workers": True}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLES)
def test_the_same_pixels_for_any_number_of_workers(kind: str) -> None:
    """Of each kind of generator, wherever it is held; any start method, batch size and order."""
    check_ways(SAMPLES[kind], FORKED, AS_THEY_COME)
    if kind != "after worker_init_fn":
        return
    (expected,) = run(Dice(), seeding="sample")
    batches = [iter(range(start, start + 4)) for start in range(0, 24, 4)]  # can be read only once
    for way in (
        {"num_workers": 1, "multiprocessing_context": "forkserver", "shuffle": True},
        {"num_workers": 8, "prefetch_factor": 1, "batch_size": 5},
        {"batch_size": 1, "batch_sampler": batches},
    ):
        (epoch,) = run(Dice(), seeding="sample", **way)
        assert sorted(itertools.chain(*epoch)) == sorted(itertools.chain(*expected))


@pytest.mark.parametrize("kind", IN_THREADS)
def test_the_same_pixels_in_threads(kind: str) -> None:
    """Four threads draw what no worker draws."""
    check_ways(IN_THREADS[kind], {"num_workers": 4, "worker_type": "thread"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", COLLATED)
def test_a_collate_fn_draws_the_same(kind: str) -> None:
    """With other workers, in any order, with a cache, with replaced samples; each batch has its own draws."""
    ways = [FORKED] if "on_error" in COLLATED[kind]()[1] else [FORKED, AS_THEY_COME]
    check_ways(COLLATED[kind], *ways, collate_fn=Drawing())

    dataset, options = COLLATED[kind]()
    drawn = run(dataset, 2, seeding="sample", collate_fn=Drawing(), **options)
    numbers = [number for epoch in drawn for batch in epoch for number in batch[1]]
    assert len(numbers) == len(set(numbers))
    assert len({tuple(batch[2]) for epoch in drawn for batch in epoch}) == sum(map(len, drawn))


@pytest.mark.slow
def test_crops_and_flips_on_the_device_draw_the_same() -> None:
    """With "sample": workers, threads, orders, batch sizes, ranks, resumes; with "worker": two of these."""
    noise = torch.randint(0, 256, (24, 9, 9, 3), dtype=torch.uint8, generator=seeded(1))
    dataset: Any = list(zip(noise, range(24), strict=True))
    augment = [fastload.transforms.RandomResizedCrop(7), fastload.transforms.RandomHorizontalFlip()]
    options: dict[str, Any] = {"device": "cpu", "device_transform": augment}

    def by_label(**more: Any) -> list[dict[int, Any]]:
        epochs = run(dataset, 2, seeding="sample", **options, **more)
        batches = [[zip(labels, images, strict=True) for images, labels in epoch] for epoch in epochs]
        return [dict(itertools.chain.from_iterable(epoch)) for epoch in batches]

    first, second = (run(dataset, num_workers=num, shuffle=True, **options) for num in (2, 1))
    assert first == second
    expected = by_label()
    assert expected[0] != expected[1]
    assert by_label(num_workers=2, batch_size=5, persistent_workers=True, shuffle=True) == expected
    assert by_label(num_workers=2, worker_type="thread") == by_label(in_order=False) == expected
    ranks: list[dict[int, Any]] = [{}, {}]
    for rank in range(2):
        sampler: Any = torch.utils.data.DistributedSampler(dataset, num_replicas=2, rank=rank)
        for whole, part in zip(ranks, by_label(sampler=sampler), strict=True):
            whole |= part
    assert ranks == expected
    for seeding, before, after, num_batches in (
        ("worker", 2, 1, 2),
        ("worker", 0, 0, 1),
        ("sample", 0, 1, 1),
    ):
        first, second = (
            DataLoader(dataset, 4, generator=seeded(seed), seeding=seeding, num_workers=workers, **options)
            for seed, workers in ((5, before), (6, after))
        )
        iterator = iter(first)
        list(itertools.islice(iterator, num_batches))
        second.load_state_dict(first.state_dict())
        assert [plain(batch) for batch in second] == [plain(batch) for batch in iterator]


def test_duplicates_differ() -> None:
    """60 draws of 6 samples are 60 different ones, the same with workers and in other batches."""
    sampler = list(WeightedRandomSampler([1.0] * 6, 60))
    found = []
    for way in ({}, {"num_workers": 2}, {"batch_size": 1}):
        (epoch,) = run(Dice(6), seeding="sample", sampler=sampler, **way)
        found.append([tuple(row) for batch in epoch for row in batch])

    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 60


def test_epochs_differ() -> None:
    """No two samples, generators, epochs or seeds share a number; set_epoch(1) gives the second epoch."""
    dataset, again = (Dice(own=[*zoo.every_kind(), *zoo.every_kind()]) for _ in range(2))
    epochs = run(dataset, 2, seeding="sample")
    loader = DataLoader(again, 4, seeding="sample", generator=seeded())
    loader.set_epoch(1)
    assert [plain(batch) for batch in loader] == epochs[1]

    epochs += run(dataset, 2, seeding="sample", generator=seeded(6))
    num_wide = len(dataset.wide())
    rows = [row for epoch in epochs for batch in epoch for row in batch]
    numbers = [number for row in rows for number in row[1 : 1 + num_wide]]
    assert len(set(numbers)) == len(numbers) == 4 * 24 * num_wide


def cached(own: Any = None) -> CachedDataset:
    return CachedDataset(Pictures(own=own), pre_transform=zoo.resize(), transform=Jitter(own))


@pytest.mark.parametrize(
    "make",
    [
        lambda: (cached(), None),
        lambda: (cached(np.random.default_rng(1)), None),
        lambda: (one := cached(), Made(functools.partial(zoo.around, one), 24)),
    ],
    ids=["transform", "a generator of source and transform", "draws around the cache"],
)
def test_a_cache_changes_nothing(make: Any) -> None:
    """An epoch that fills the cache and one that reads it are the same but for the epoch's number."""
    dataset, around = make()
    first, second = (
        run(around or dataset, seeding="sample", batch_size=None, shuffle=True) for _ in range(2)
    )

    assert first == second
    assert dataset.cache_info().num_cached == 24
    if around is not None:
        assert len({number for before, _, *after in first[0] for number in (*before, *after)}) == 4 * 24


def test_the_training_loop_changes_nothing() -> None:
    """Draws between batches shift no batch, and loading shifts no draw."""
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seeding": "sample"}
    dataset = Dice()
    loader = DataLoader(dataset, generator=fastload.seed_everything(1), **options)
    disturbed, drawn = [], []
    for batch in loader:
        disturbed.append(plain(batch))
        drawn.append([*zoo.draw_globals(), *map(zoo.draw, dataset.own)])
    dataset = Dice()
    quiet = DataLoader(dataset, generator=fastload.seed_everything(1), **options)

    assert [plain(batch) for batch in quiet] == disturbed
    assert drawn == [[*zoo.draw_globals(), *map(zoo.draw, dataset.own)] for _ in disturbed]


# --- resuming --------------------------------------------------------------------------------------------

EPOCHS = 2
# The sampler, and the numbers of workers before and after.
RESUMED = {"in order": (0, 1), "shuffle, generator": (2, 0), "with replacement": (2, 1)}
RESUMED |= {"weighted": (0, 1), "distributed": (1, 2)}


def make(kind: str, num_workers: int, seeding: Any) -> DataLoader:
    torch.manual_seed(11)  # as a training script does when it starts
    options = {"num_workers": num_workers, "collate_fn": Drawing(own=[]), **SAMPLERS[kind]()}
    return DataLoader(Dice(LENGTH, own=[np.random.default_rng(1)]), 10, seeding=seeding, **options)


def epochs_of(loader: DataLoader, first: int, states: list[Any] | None = None) -> list[list[Any]]:
    """The batches of the epochs from this one on; the state before each batch, and its epoch, is noted."""
    found: list[list[Any]] = []
    for epoch in range(first, EPOCHS):
        if epoch > first or states is not None:
            loader.set_epoch(epoch)
        iterator = iter(loader)
        found.append([])
        while True:
            if states is not None:
                states.append((epoch, len(found[-1]), through_json(loader.state_dict())))
            try:
                found[-1].append(plain(next(iterator)))
            except StopIteration:
                break
    loader.close()
    return found


def check_resumes(kind: str, seeding: str, before: int, after: int, what: Any, every: int = 1) -> None:
    """From a state before each batch, a process that is seeded otherwise brings the rest of all epochs."""
    states: list[Any] = []
    whole = epochs_of(make(kind, before, seeding), 0, states)
    for epoch, num_batches, state in states[every // 2 :: every]:
        loader = make(kind, after, seeding)
        torch.manual_seed(99)
        loader.load_state_dict(state)
        expected = [whole[epoch][num_batches:], *whole[epoch + 1 :]]
        assert what(epochs_of(loader, epoch)) == what(expected)


def indices(epochs: list[list[Any]]) -> Any:
    return [[[row[0] for row in batch[0]] for batch in epoch] for epoch in epochs]


@pytest.mark.slow
def test_order_and_labels_after_a_resume() -> None:
    """At every batch, with other numbers of workers: the indices are those."""
    check_resumes("shuffle, generator", "worker", 2, 0, indices)
    check_resumes("shuffle, generator", "worker", 2, 1, indices, every=3)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers"), RESUMED.items())
def test_pixels_after_a_resume(kind: str, workers: tuple[int, int]) -> None:
    """At every batch, with other numbers of workers that ran ahead: all that was drawn is the same."""
    check_resumes(kind, "sample", 0, 0, list)
    check_resumes(kind, "sample", *workers, list, every=3)
