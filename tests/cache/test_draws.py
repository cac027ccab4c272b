"""A dataset that draws random numbers is not cached, whatever it draws, and however it keeps its samples."""

from __future__ import annotations

import collections
import logging
import os
import random
import secrets
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import fastload
from fastload.cache.dataset import CachedDataset
from fastload.cache.random_check import probe
from fastload.errors import NondeterministicDatasetError
from tests.cache.zoo import Made

pytestmark = pytest.mark.usefixtures("registry_folder")

PIXELS = np.arange(12 * 12 * 3, dtype=np.uint8).reshape(12, 12, 3)
BLANK = np.zeros((8, 8, 3), np.uint8)  # no draw changes it: results say nothing
FEW = range(2, 16)


class Drawing(Dataset[Any]):
    """Each sample calls a function, which may draw random numbers."""

    def __init__(self, draw: Any, num_samples: int = 12) -> None:
        self.draw, self.num_samples = draw, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return PIXELS[int(self.draw()) :][:1].copy(), index


class Holding(Drawing):
    """Draws from a generator that it holds."""

    def __init__(self, generator: Any, name: str) -> None:
        super().__init__(None)
        self.held = {"generators": [generator]}
        self.name = name

    def __getitem__(self, index: int) -> Any:
        getattr(self.held["generators"][0], self.name)(0, 2)
        return BLANK, index


class Rolling(Drawing):
    """Draws from torch's generator."""

    def __getitem__(self, index: int) -> Any:
        torch.randint(2, (), generator=self.draw)
        return BLANK, index


@pytest.mark.parametrize(
    "draw",
    [
        lambda n: random.randrange(n),
        lambda n: random.randint(0, n - 1),
        lambda n: random.choice(range(n)),
        lambda n: np.random.randint(n),
        lambda n: np.random.choice(n),
        lambda n: torch.randint(n, ()),
        lambda n: torch.randperm(n)[0],
    ],
)
def test_a_draw_among_few_values_is_refused(draw: Any) -> None:
    """Also if both reads of each sample gave the same value; the error says where it was drawn from."""
    for number in FEW:
        with pytest.raises(NondeterministicDatasetError, match=r"drawn from (random|numpy.random|torch's)"):
            CachedDataset(Drawing(lambda number=number: draw(number)))


def test_a_sample_that_depends_on_the_seed_of_the_job_is_refused() -> None:
    """Without a draw: it is the same in this job, and another one in the next."""
    with pytest.raises(NondeterministicDatasetError, match="returns a different sample"):
        probe(Drawing(lambda: torch.initial_seed() % 12))


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Holding(np.random.default_rng(0), "integers"), r"dataset\.held\['generators'\]\[0\]"),
        (Holding(np.random.Generator(np.random.Philox(0)), "integers"), "held"),
        (Holding(np.random.Generator(np.random.MT19937(0)), "integers"), "held"),
        (Holding(np.random.RandomState(0), "randint"), "held"),
        (Holding(random.Random(0), "randint"), "held"),
        (Rolling(torch.Generator()), r"dataset\.draw"),
        (Subset(Drawing(lambda: random.randrange(1) + np.random.randint(2)), [3, 4, 5]), "numpy.random"),
        (ConcatDataset([Drawing(lambda: 0), Rolling(torch.Generator())]), "draw"),
    ],
)
def test_a_draw_from_a_held_generator_is_refused(dataset: Any, said: str) -> None:
    """Of every kind, also inside other datasets; the error names it, and its state stays."""
    with pytest.raises(NondeterministicDatasetError, match=said):
        CachedDataset(dataset)


@pytest.mark.parametrize(
    ("transform", "is_random"),
    [
        (A.Compose([A.RandomCrop(11, 11)]), True),
        (A.Compose([A.OneOf([A.Resize(8, 8), A.Resize(8, 8)])]), True),
        (A.Compose([A.Resize(8, 8)], p=0.9999), True),
        (A.CLAHE((1, 4), p=1), True),
        (A.Compose([A.Resize(8, 8), A.HorizontalFlip(p=1)]), False),
        (A.Compose([A.Compose([A.CenterCrop(4, 4)]), A.CLAHE((4, 4), p=1)], seed=3), False),
    ],
)
def test_a_transform_draws_unless_it_always_does_the_same(transform: Any, is_random: bool) -> None:
    """A pipeline of albumentations that always runs throws a coin, which decides nothing."""
    dataset = Made(lambda index: (PIXELS, index))
    if is_random:
        with pytest.raises(NondeterministicDatasetError, match=r"drawn from the transform|differs"):
            CachedDataset(dataset, pre_transform=transform)
    else:
        assert len(CachedDataset(dataset, pre_transform=transform)) == 20


class Seeding(Dataset[Any]):
    """Seeds the generators for each sample, so its draws are functions of the index."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        random.seed(index)
        np.random.seed(index)
        torch.manual_seed(index)
        return random.random(), np.random.rand(), torch.rand(2)


class Opening(Dataset[Any]):
    """Makes its parts on first use, with random numbers that decide nothing."""

    def __init__(self) -> None:
        self.model: Any = None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if self.model is None:
            self.model = torch.nn.Linear(3, 3)
            torch.nn.init.ones_(self.model.weight)
        return self.model.weight.detach().sum() + index


@pytest.mark.parametrize("make", [Seeding, Opening])
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_draws_that_decide_nothing_are_accepted(make: Any, num_workers: int, caplog: Any) -> None:
    """A dataset that seeds for each sample, and one that draws while it opens its files: all is cached."""
    dataset = CachedDataset(make())
    list(fastload.DataLoader(dataset, 4, num_workers=num_workers))
    assert dataset.cache_info().num_cached == 12
    assert "random" not in caplog.text


class Remembering(Dataset[Any]):
    """Keeps its finished samples."""

    def __init__(self, make: Any) -> None:
        self.make, self.reads = make, 0
        self.samples: dict[int, Any] = {}
        self.ordered: Any = collections.OrderedDict()
        self.listed = [None] * 12

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index not in self.samples:
            self.reads += 1
            sample = self.make()
            self.samples[index] = self.ordered[index] = self.listed[index] = sample
        return self.samples[index]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.randrange(2),
        lambda: int(torch.randint(2, ())),
        lambda: np.random.default_rng().integers(1 << 40),
        lambda: secrets.randbits(40),
        lambda: os.urandom(5),
    ],
)
@pytest.mark.parametrize("wrap", [lambda dataset: dataset, lambda dataset: Subset(dataset, range(6))])
def test_finished_samples_that_a_dataset_keeps_hide_nothing(draw: Any, wrap: Any) -> None:
    """The first draw is not taken for the only one; other sources give other samples to another object."""
    dataset = Remembering(draw)
    with pytest.raises(NondeterministicDatasetError):
        CachedDataset(wrap(dataset))
    assert (dataset.samples, dataset.ordered, dataset.listed, dataset.reads) == ({}, {}, [None] * 12, 0)


def test_a_dataset_that_keeps_its_samples_is_not_changed() -> None:
    """It opens nothing and keeps nothing before its first real access."""
    dataset = Remembering(lambda: 1)
    cached = CachedDataset(ConcatDataset([dataset, Subset(dataset, [0])]))
    probe(dataset)
    assert (dataset.samples, dataset.reads) == ({}, 0)
    assert (cached[5], dataset.samples) == (1, {5: 1})


class RareDraws(Dataset[Any]):
    """Draws for a few samples, which are not those that are checked."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        value = self.draw() if index % 5 == 3 else 0  # 3 and 8
        return np.full((2, 2), value), index


CROP = A.RandomCrop(1, 1)
RARE: Any = {
    "random": lambda: random.getrandbits(30),
    "numpy": lambda: np.random.randint(1 << 30),
    "numpy, normal": lambda: int(np.random.normal() * (1 << 30)),  # numpy keeps every second one
    "torch": lambda: int(torch.randint(1 << 30, ())),
    "albumentations": lambda: int(CROP(image=PIXELS)["image"][0, 0, 0]),
}


@pytest.mark.parametrize("source", RARE)
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_sample_that_draws_later_is_not_cached(source: str, num_workers: int, caplog: Any) -> None:
    """It is another one in each epoch; all others are cached, and one warning says which it is and why."""
    dataset = CachedDataset(RareDraws(RARE[source]))
    with caplog.at_level(logging.WARNING, "fastload"):
        loader = fastload.DataLoader(dataset, 12, num_workers=num_workers)
        epochs = [next(iter(loader))[0][:, 0, 0].tolist() for _ in range(4)]
        dataset.fill(num_workers=num_workers, progress=False)
    assert dataset.cache_info().num_cached == 10
    for index in range(12):
        assert (len({epoch[index] for epoch in epochs}) == 1) is (index % 5 != 3)
    assert num_workers or "sample 3 of the dataset is random (drawn from" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("source", ["random", "albumentations"])
def test_samples_that_draw_do_so_as_without_a_cache(source: str) -> None:
    """With a seed for each sample they are what the dataset itself returns, in every epoch."""
    epochs = []
    for dataset in (RareDraws(RARE[source]), CachedDataset(RareDraws(RARE[source]), tuple)):
        generator = torch.Generator().manual_seed(5)
        loader = fastload.DataLoader(dataset, 6, generator=generator, seeding="sample")
        epochs.append([[images[:, 0, 0].tolist() for images, _ in loader] for _ in range(2)])
    assert epochs[0] == epochs[1]
