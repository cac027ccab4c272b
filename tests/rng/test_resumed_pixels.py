"""rng="sample" and state_dict(): a resumed run brings the pixels of an uninterrupted one, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

from fastload import DataLoader
from tests.resume.loaders import through_json
from tests.rng.draws_zoo import Dice

LENGTH = 24
EPOCHS = 3


pytestmark = pytest.mark.slow  # each case reads several epochs in several loaders


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


# Each makes the arguments of a loader anew, as a new process would.
SAMPLERS: dict[str, Any] = {
    "in order": dict,
    "shuffle": lambda: {"shuffle": True, "generator": seeded()},
    "with replacement": lambda: {"sampler": RandomSampler(range(LENGTH), True, 40, generator=seeded())},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * LENGTH, 40, generator=seeded())},
    "distributed": lambda: {"sampler": DistributedSampler(Dice(LENGTH), 3, 1, seed=3)},
}


def make(kind: str, num_workers: int = 0, **options: Any) -> DataLoader:
    torch.manual_seed(11)  # as a training script does when it starts
    options = {"batch_size": 4, "num_workers": num_workers, **SAMPLERS[kind](), **options}
    return DataLoader(Dice(LENGTH), rng="sample", **options)


def run(loader: DataLoader, epochs: range) -> list[list[Any]]:
    found = []
    for epoch in epochs:
        loader.set_epoch(epoch)
        found.append([batch.tolist() for batch in loader])
    loader.close()
    return found


def interrupted(loader: DataLoader, epoch: int, num_batches: int) -> dict[str, Any]:
    """The state after so many batches of an epoch, through a checkpoint."""
    for earlier in range(epoch):
        loader.set_epoch(earlier)
        list(loader)
    loader.set_epoch(epoch)
    iterator = iter(loader)
    for _ in range(num_batches):
        next(iterator)
    state = through_json(loader.state_dict())
    loader.close()
    return state


def resumed(loader: DataLoader, state: dict[str, Any], epoch: int) -> list[list[Any]]:
    loader.load_state_dict(state)
    first = [batch.tolist() for batch in loader]
    return [first, *run(loader, range(epoch + 1, EPOCHS))]


@pytest.mark.parametrize("kind", SAMPLERS)
@given(cut=st.tuples(st.integers(0, EPOCHS - 1), st.integers(0, 5)))
@settings(max_examples=8, deadline=None)
def test_random_cut_points(kind: str, cut: tuple[int, int]) -> None:
    """The rest of the epoch and all later ones are those of an uninterrupted run."""
    epoch, num_batches = cut
    whole = run(make(kind), range(EPOCHS))
    state = interrupted(make(kind), epoch, min(num_batches, len(whole[0])))

    rest = resumed(make(kind), state, epoch)

    assert rest == [whole[epoch][num_batches:] or rest[0], *whole[epoch + 1 :]]


@pytest.mark.parametrize(
    ("kind", "before", "after"), list(zip(SAMPLERS, (0, 2, 2, 0, 2), (2, 0, 3, 2, 3), strict=True))
)
def test_with_another_number_of_workers(kind: str, before: int, after: int) -> None:
    """Workers that ran ahead when the state was taken, and another number afterwards, change nothing."""
    whole = run(make(kind), range(EPOCHS))
    state = interrupted(make(kind, before), 1, 2)

    assert resumed(make(kind, after), state, 1) == [whole[1][2:], whole[2]]


def test_in_a_process_that_is_seeded_otherwise() -> None:
    """The seed of the samples is part of the state."""
    whole = run(make("in order"), range(EPOCHS))
    state = interrupted(make("in order"), 1, 2)
    assert interrupted(make("shuffle"), 0, 1)["sample_seed"] == 5
    loader = make("in order")
    torch.manual_seed(99)

    assert resumed(loader, state, 1) == [whole[1][2:], whole[2]]
