"""Random numbers of whole batches: uniform, independent, and a function of what they should follow from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastload import DataLoader
from fastload.rng.batch_draws import BatchDraws, draw_uniforms, drawing_from
from fastload.rng.keys import BatchKey
from tests.kit.batches import read_epoch
from tests.kit.datasets import Made
from tests.resume.loaders import seeded

NUM_SAMPLES = 24
PIXELS = torch.arange(NUM_SAMPLES, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 4, 4, 3).contiguous()


def of_samples(indices: Any, seed: int = 1, epoch: int = 0, occurrences: Any = ()) -> BatchDraws:
    return BatchDraws(BatchKey(seed, epoch, occurrences=occurrences), indices)


# --- the generator ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "streams", [of_samples(range(20_000)), of_samples([5] * 20_000, occurrences=tuple(range(20_000)))]
)
def test_draws_are_uniform_and_independent(streams: BatchDraws) -> None:
    """Chi-square of each draw, and no correlation between draws or neighbours, in index or in occurrence."""
    draws = streams.uniforms(20_000, 8)
    counts = np.stack([np.histogram(row, bins=100, range=(0, 1))[0] for row in draws])
    chi_squares = ((counts - 200) ** 2 / 200).sum(axis=1)
    neighbours = np.vstack([draws, np.roll(draws, 1, axis=1), np.roll(draws, 2, axis=1)])
    correlations = np.corrcoef(neighbours) - np.eye(24)

    assert ((draws >= 0) & (draws < 1)).all()
    assert (chi_squares < 99 + 5 * np.sqrt(2 * 99)).all()  # mean and deviation with 99 degrees of freedom
    assert (chi_squares > 99 - 5 * np.sqrt(2 * 99)).all()
    assert np.abs(correlations).max() < 5 / np.sqrt(20_000)


def test_single_bits_of_a_key_change_half_of_the_bits() -> None:
    """Seeds, epochs and indices that differ in one bit give draws that differ in every second bit."""

    def bits(streams: BatchDraws) -> Any:
        return (streams.uniforms(1, 64) * 2**53).astype(np.uint64)

    for bit in range(0, 63, 7):
        for other in (of_samples([1 << bit]), of_samples([0], 1 ^ (1 << bit)), of_samples([0], 1, 1 << bit)):
            changed = bits(of_samples([0])) ^ bits(other)
            assert 0.45 < np.unpackbits(changed.view(np.uint8)).sum() / (64 * 53) < 0.55


def test_each_call_for_a_batch_draws_from_another_stream() -> None:
    """Two transforms of one batch are independent; the same calls again give the same numbers."""
    streams, again = of_samples(range(1000)), of_samples(range(1000))
    first, second = streams.uniforms(1000, 2), streams.uniforms(1000, 2)

    assert np.array_equal([again.uniforms(1000, 2) for _ in range(2)], [first, second])
    assert abs(np.corrcoef(first[0], second[0])[0, 1]) < 0.15


def test_a_draw_for_a_batch_depends_on_its_number_epoch_rank_and_base_seed() -> None:
    """On each of these four facts, and not on the seed of the run."""
    batch = BatchKey(1, 0)
    facts = ({}, {"epoch": 1}, {"number": 1}, {"base_seed": 1}, {"rank": 1})
    draws = [BatchDraws(batch._replace(**fact)).uniforms(1, 1)[0, 0] for fact in facts]

    assert len(set(draws)) == 5
    assert draws[0] == BatchDraws(batch._replace(seed=2)).uniforms(1, 1)[0, 0]


@pytest.mark.parametrize("index", [7, -7, 2**70, "photo", (1, "a")])
def test_a_draw_follows_from_its_sample_alone(index: Any) -> None:
    """From each of four facts; neither the rest of the batch nor the number of draws changes it."""
    alone = of_samples([index]).uniforms(1, 3)[:, 0]
    others = [
        of_samples([index], seed=2),
        of_samples([index], epoch=1),
        of_samples([index], occurrences=(1,)),
        *(of_samples([other]) for other in (0, 8, "7", (7, 7), "x")),
    ]

    assert np.array_equal(of_samples([0, "x", index]).uniforms(3, 5)[:3, 2], alone)
    assert len({other.uniforms(1, 1)[0, 0] for other in others} | {alone[0]}) == 9
    if index == 7:  # from torch and numpy, too
        assert of_samples([np.int32(7)]).uniforms(1, 1)[0, 0] == alone[0]
        assert of_samples(torch.tensor([7])).uniforms(1, 1)[0, 0] == alone[0]


@pytest.mark.parametrize("num_images", [0, 1, 5])
def test_a_batch_with_another_number_of_images_draws_for_each(num_images: int) -> None:
    """Then the images' draws differ from each other, and follow from all samples."""
    draws, again, other = (of_samples([1, last]).uniforms(num_images, 1)[0] for last in (2, 2, 3))

    assert len(set(draws) | set(other)) == 2 * num_images
    assert np.array_equal(draws, again)


def test_outside_a_loader_draws_come_from_torchs_generator() -> None:
    """The same state, the same draws; a block with streams leaves the generator alone."""
    torch.manual_seed(3)
    first = draw_uniforms(4, 2)
    second = draw_uniforms(4, 2)
    torch.manual_seed(3)
    with drawing_from(of_samples([1])):
        draw_uniforms(4, 2)

    assert np.array_equal(draw_uniforms(4, 2), first)
    assert not np.array_equal(second, first)


# --- in a loader ------------------------------------------------------------------------------------------


def drawn(epochs: int = 1, dataset: Any = PIXELS, before: Any = lambda: None, **options: Any) -> Any:
    """For each epoch, each image and its draw, in the order of the batches."""
    found: list[list[tuple[int, float]]] = []

    def transform(batch: torch.Tensor) -> torch.Tensor:
        before()
        draws = draw_uniforms(len(batch), 1)[0].tolist()
        found[-1] += zip(batch[:, 0, 0, 0].tolist(), draws, strict=True)
        return batch

    usual = {"batch_size": 4, "device": "cpu", "generator": seeded(), "shuffle": "sampler" not in options}
    with DataLoader(dataset, device_transform=transform, **usual | options) as loader:
        for _ in range(epochs):
            found.append([])
            read_epoch(loader)
    return found


def test_with_rng_sample_the_copies_of_a_sample_differ() -> None:
    """A sampler that gives an index six times gets six draws, the same in one batch and in several."""
    (epoch,), (again,) = (drawn(seeding="sample", sampler=[1, 2] * 6, batch_size=size) for size in (4, 12))

    assert len({draw for _, draw in epoch}) == 12
    assert epoch == again


@pytest.mark.parametrize("seeding", ["worker", "sample"])
def test_batches_that_are_copied_ahead_draw_the_same(seeding: Any, fake: Any) -> None:
    """On a device with copies ahead, each batch has the draws that it has on the CPU."""
    assert drawn(seeding=seeding, device="cuda", before=fake.drain) == drawn(seeding=seeding)


def unreadable(index: int) -> torch.Tensor:
    if index in (5, 9):
        raise OSError(f"cannot read {index}")
    return PIXELS[index]


@pytest.mark.parametrize(("seeding", "num_workers"), [("worker", 0), ("sample", 1)])
def test_a_batch_that_fails_shifts_no_draws(num_workers: int, seeding: Any) -> None:
    """A loop that goes on after an error gets the later batches with their own draws."""
    dataset, options = Made(unreadable, NUM_SAMPLES), {"seeding": seeding, "shuffle": False}
    (expected,) = drawn(**options)

    assert drawn(dataset=dataset, num_workers=num_workers, **options) == [expected[:4] + expected[12:]]


def test_single_batches_of_the_dataset_draw_for_each_image() -> None:
    """With batch_size=None an index is a whole batch: draws follow from it and from the position."""
    batches = [PIXELS[:8], PIXELS[8:16], PIXELS[16:]]
    options: dict[str, Any] = {"batch_size": None, "seeding": "sample"}
    (first,) = drawn(dataset=batches, **options)
    (other_order,) = drawn(dataset=batches, sampler=[2, 0, 1], **options)

    assert len({draw for _, draw in first}) == NUM_SAMPLES
    assert dict(first) == dict(other_order)
