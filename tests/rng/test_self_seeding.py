"""Pipelines that seed themselves in worker processes, as those of AlbumentationsX do; a stand-in for them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import fastload
from fastload.rng.seeding import pipeline_streams, seed_pipelines


class BaseCompose:
    """As in AlbumentationsX: `random_generator` is a property over other attributes."""

    def __init__(self) -> None:
        self._configured_random_generator = np.random.default_rng(0)
        self._configured_py_random = random.Random(0)
        self._manual_random_state = False

    @property
    def random_generator(self) -> np.random.Generator:
        return self._configured_random_generator

    @property
    def py_random(self) -> random.Random:
        return self._configured_py_random

    def set_random_state(self, random_generator: np.random.Generator, py_random: random.Random) -> None:
        self._configured_random_generator = random_generator
        self._configured_py_random = py_random
        self._manual_random_state = True

    def _get_effective_seed(self, base_seed: int | None) -> int | None:
        return base_seed


BaseCompose.__module__ = "albumentations.core.composition"


class Samples:
    """Whether the pipeline has been seeded by somebody else, and a draw."""

    def __init__(self) -> None:
        self.pipeline = BaseCompose()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        is_seeded = self.pipeline._manual_random_state
        return torch.tensor([is_seeded, self.pipeline.random_generator.integers(1 << 30)])


def load(dataset: Samples, num_workers: int, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    options = {"multiprocessing_context": "fork", **options} if num_workers else options
    with fastload.DataLoader(
        dataset, batch_size=2, num_workers=num_workers, generator=generator, **options
    ) as loader:
        return torch.cat(list(loader))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_they_keep_their_seeding(num_workers: int) -> None:
    """With rng="worker" fastload does not seed them, without workers and in worker processes."""
    assert not load(Samples(), num_workers)[:, 0].any()


def test_they_have_no_stream_without_workers() -> None:
    """Nothing of them is borrowed for a batch."""
    assert pipeline_streams([BaseCompose()], 1) == []


def test_they_are_seeded_outside_of_worker_processes() -> None:
    """A worker thread is no worker to them, so that fastload seeds them there."""
    pipeline = BaseCompose()

    assert seed_pipelines(pipeline, 1) == 1
    assert pipeline._manual_random_state


def test_samples_have_streams_of_their_own() -> None:
    """With rng="sample" they draw the same for any number of workers."""
    first, second = load(Samples(), 0, rng="sample"), load(Samples(), 2, rng="sample")

    assert torch.equal(first, second)
    assert first[:, 0].all()


def test_they_are_restored_after_each_batch() -> None:
    """With rng="sample" and no workers the pipeline has its own generators again afterwards."""
    dataset = Samples()
    before = dict(vars(dataset.pipeline))
    load(dataset, 0, rng="sample")

    assert vars(dataset.pipeline) == before
