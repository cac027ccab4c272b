"""Samples that cannot be read: replaced at their place, counted against a budget, and reported."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as tud

import fastload
from fastload.batch import failures
from tests.faults import zoo
from tests.faults.zoo import rows
from tests.kit import datasets, torchs_own

MODES: dict[str, dict[str, Any]] = {
    "no workers": {"num_workers": 0},
    "processes": {"num_workers": 2},
    "spawned": {"num_workers": 1, "multiprocessing_context": "forkserver"},
    "threads": {"num_workers": 2, "worker_type": "thread"},
}
DRAWS = datasets.Made(zoo.draws, 20)
KINDS = [datasets.Made, datasets.Bulk]
BAD = datasets.Made(zoo.some_bad, 20)
TWO_MODES = pytest.mark.parametrize("mode", ["no workers", "processes"])


def make_loader(dataset: Any, **options: Any) -> fastload.DataLoader:
    generator = torch.Generator().manual_seed(5)
    usual = {"batch_size": 4, "on_error": "replace", "max_errors": 8, "generator": generator}
    return fastload.DataLoader(dataset, **usual | options)


def flat_of(loader: Any) -> list[int]:
    return [number for batch in rows(loader) for number in batch]


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        *((kind, mode, {}) for kind, mode in zip(KINDS * 2, MODES, strict=True)),
        *((kind, mode, {}) for kind, mode in zip(KINDS[::-1], MODES, strict=False)),
        (datasets.Made, "processes", {"collate_fn": list}),
        (datasets.Made, "processes", torchs_own.FORK),
    ],
)
def test_replacements_are_the_same_everywhere_and_reported(
    kind: Any, mode: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Good samples are at their places; the report has the others in order, also of datasets read in bulk."""
    plain = make_loader(BAD, num_workers=0)
    expected = [flat_of(plain) for _ in range(2)]
    loader = make_loader(kind(zoo.some_bad, 20), **MODES[mode] | options)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fastload"):
        flat = flat_of(loader)
    failed, bad = loader.failed_samples, sorted(zoo.BAD)
    good = [index for index in range(20) if index not in zoo.BAD]

    assert flat == expected[0] != expected[1]
    assert [flat[index] for index in good] == good
    assert not zoo.BAD.intersection(flat)
    assert [(sample.index, sample.path, sample.type) for sample in failed] == [
        (index, f"/photos/{index}.jpg", "OSError") for index in bad
    ]
    assert all("Input/output error" in sample.reason for sample in failed)
    assert [sample.replaced_by for sample in failed] == [flat[index] for index in bad]
    num_workers = MODES[mode]["num_workers"]
    workers = [index // 4 % num_workers if num_workers else None for index in bad]
    assert [sample.worker for sample in failed] == workers
    assert caplog.text.count("could not be read, and sample") == 4


def test_replacements_are_the_same_after_a_resume() -> None:
    """The place counts from the beginning of the epoch; another seed has other replacements."""
    loader, resumed, other = (
        make_loader(BAD, num_workers=num_workers, **options)
        for num_workers, options in [(0, {}), (2, {}), (0, {"generator": torch.Generator().manual_seed(6)})]
    )
    iterator = iter(loader)
    first = [next(iterator), next(iterator)]
    resumed.load_state_dict(loader.state_dict())
    rest = rows(iterator)

    assert rows(resumed) == rest
    assert rows(other) != rows(first) + rest


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_streams_of_all_other_samples_stay(num_workers: int) -> None:
    """With seeding="sample" a replacement draws from a stream of its own."""
    kept = [index for index in range(20) if index not in zoo.BAD]
    options: dict[str, Any] = {"seeding": "sample", "num_workers": num_workers, "batch_size": None}
    whole, alone = (list(make_loader(DRAWS, **options, **more)) for more in ({}, {"sampler": kept}))

    assert [whole[index] for index in kept] == alone


@TWO_MODES
def test_a_function_makes_the_sample_to_use_instead_or_refuses_it(mode: str) -> None:
    """It is called where the sample was read, with the report's entry; its error is that of the batch."""
    loader = make_loader(BAD, on_error=zoo.black, **MODES[mode])

    assert flat_of(loader) == [-index if index in zoo.BAD else index for index in range(20)]
    assert [sample.replaced_by for sample in loader.failed_samples] == [None] * 4

    iterator = iter(make_loader(BAD, on_error=zoo.refuses, **MODES[mode]))
    with pytest.raises(LookupError, match="not without sample 3"):
        next(iterator)
    assert next(iterator)[:, 0].tolist() == [4, 5, 6, 7]


@TWO_MODES
def test_one_more_than_the_budget_is_an_error_in_the_place_of_its_batch(mode: str) -> None:
    """It says how many failed, how many may, and which were the last."""
    iterator = iter(make_loader(BAD, max_errors=2, **MODES[mode]))
    next(iterator), next(iterator)

    with pytest.raises(fastload.errors.TooManyFailuresError, match=r"3 of .* allows 2\. .* 9 .*9\.jpg"):
        next(iterator)
    with pytest.raises(fastload.errors.TooManyFailuresError, match="4 of"):
        next(iterator)

    assert zoo.value_of(next(iterator)) == 16


@pytest.mark.parametrize(("share", "may_fail"), [(0.2, True), (0.15, False)])
def test_a_budget_may_be_a_share_of_the_epoch(share: float, may_fail: bool) -> None:
    """Four of twenty samples fail: that is a fifth. Where a batch sampler does not say, of the dataset."""
    unknown = fastload.DataLoader(range(400), batch_sampler=[[0, 1], [2, 3]], on_error="replace")
    assert failures.num_samples_of(unknown) == 400
    loader = make_loader(BAD, max_errors=share)

    if may_fail:
        assert len(list(loader)) == 5
    else:
        with pytest.raises(fastload.errors.TooManyFailuresError, match=r"of 20 .* allows 3\."):
            list(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_without_any_good_sample_raises_its_own_error(num_workers: int) -> None:
    """With notes on what was tried in its place."""
    loader = make_loader(datasets.Made(zoo.all_bad, 8), num_workers=num_workers)

    with pytest.raises(ValueError, match="no sample 0") as caught:
        next(iter(loader))
    assert "found no readable sample" in str(caught.value) + str(caught.value.__notes__)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_cache_is_filled_with_what_can_be_read(num_workers: int) -> None:
    """The samples of a cache that cannot be read are tried again in each epoch."""
    cached = fastload.CachedDataset(BAD)
    loader = make_loader(cached, num_workers=num_workers)

    for _ in range(2):
        flat = flat_of(loader)
        assert not zoo.BAD.intersection(flat)
        assert flat[4:8] == [4, 5, 6, 7]
    assert cached.cache_info().num_cached == 16
    assert [sample.epoch for sample in loader.failed_samples] == [0] * 4 + [1] * 4


def test_single_samples_are_replaced_too() -> None:
    """batch_size=None, where the batch has no other sample."""
    numbers = [zoo.value_of(sample) for sample in make_loader(BAD, batch_size=None)]

    assert len(numbers) == 20
    assert not zoo.BAD.intersection(numbers)


@pytest.mark.parametrize(
    ("mode", "make"),
    [("no workers", list), ("processes", list), ("no workers", np.array), ("processes", torch.tensor)],
)
def test_a_replacement_is_one_of_the_subset_that_the_sampler_draws_from(mode: str, make: Any) -> None:
    """Never from outside, such as the validation set; the subset may be an array or a tensor, as in torch."""
    indices = [index for index in range(20) if index % 2 == 0 or index in zoo.BAD]
    sampler = tud.SubsetRandomSampler(make(indices), generator=torch.Generator().manual_seed(3))
    loader = make_loader(BAD, sampler=sampler, **MODES[mode])

    assert set(flat_of(loader)) <= set(indices) - zoo.BAD
    assert len(loader.failed_samples) == len(zoo.BAD.intersection(indices))


def test_an_index_beyond_a_subset_is_replaced_too() -> None:
    """Also where the dataset inside it makes whole batches."""
    subset = tud.Subset(tud.TensorDataset(torch.arange(10)), [1, 2])
    (batch,) = make_loader(subset, sampler=[0, 5, 1])

    assert batch[0].tolist() in ([1, 1, 2], [1, 2, 2])


@TWO_MODES
def test_a_replacement_under_a_batch_sampler_of_the_users_is_one_of_the_same_batch(mode: str) -> None:
    """No other index is known to be one that the batch sampler may give: it may hold back a test set."""
    batches = [[2, 3, 4], [8, 9, 10]]
    loader = make_loader(datasets.Made(zoo.some_bad, 100), batch_size=1, batch_sampler=batches, **MODES[mode])

    for batch, indices in zip(rows(loader), batches, strict=True):
        assert set(batch) <= set(indices) - zoo.BAD


STREAM, TORCHS = datasets.Stream(), {"num_workers": 1, **torchs_own.FORK}
RESTARTS: dict[str, Any] = {"on_error": "raise", "max_errors": 0.01, "max_worker_restarts": 1}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        *(({"on_error": value}, "on_error should be") for value in ("skip", 5)),
        *(({"max_errors": value}, "max_errors should be") for value in (-1, 1.5, True, "many")),
        ({"on_error": "raise"}, r'max_errors=8 needs on_error="replace" or a function'),
        *(({"max_worker_restarts": value}, "max_worker_restarts should be") for value in (-1, 1.5)),
        ({"dataset": STREAM}, "needs a map-style dataset"),
        ({"dataset": STREAM} | RESTARTS, "needs a map-style dataset"),
        (TORCHS | RESTARTS, r"does not work with torch's own iterator, .*OwnFork"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], error: str) -> None:
    """Other values, streams, which have ended where they raised, and torch's iterator, which would raise."""
    with pytest.raises(ValueError, match=error):
        iter(make_loader(**{"dataset": datasets.Made(zoo.array, 4)} | options))
