"""Epochs with in_order=False, left in the middle and resumed: no batch is lost, and none comes twice."""

from __future__ import annotations

import itertools
import json
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload import DataLoader
from fastload.errors import BatchLostError, ResumeError
from tests.kit import datasets
from tests.kit.datasets import Stream

AS_THEY_COME: dict[str, Any] = {"num_workers": 2, "in_order": False}


class Gates:
    """Some samples wait until others were read, in any worker."""

    def __init__(self, size: int, waits: dict[int, int]) -> None:
        self.size = size
        self.waits = waits
        context = torch.multiprocessing.get_context("fork")
        self.events = {index: context.Event() for index in waits.values()}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if index in self.waits:
            self.events[self.waits[index]].wait(20)
        if index in self.events:
            self.events[index].set()
        return index


def firsts(batches: Any) -> list[int]:
    """The first sample of each batch."""
    return [int(batch[0]) for batch in batches]


@pytest.mark.parametrize(
    "options",
    [AS_THEY_COME, AS_THEY_COME | {"persistent_workers": True}, AS_THEY_COME | {"worker_type": "thread"}],
    ids=str,
)
def test_a_slow_batch_is_overtaken_by_all_batches_of_other_workers(options: dict[str, Any]) -> None:
    """Batch 0 waits for batch 8, which is requested only after five others were delivered."""
    for _ in range(2):
        with DataLoader(Gates(24, {0: 16}), 2, **options) as loader:
            order = firsts(loader)
        assert sorted(order) == list(range(0, 24, 2))
        assert order.index(0) >= 5


def test_a_state_names_the_batches_that_were_received_before_an_earlier_one() -> None:
    """By number, as plain types; the checksum covers the batches before the first that is missing."""
    with DataLoader(Gates(24, {2: 16}), 2, **AS_THEY_COME) as loader:  # requested after five others
        iterator = iter(loader)
        got = [firsts([next(iterator)])[0] // 2 for _ in range(5)]
        state = json.loads(json.dumps(loader.state_dict()))

    assert 1 not in got
    num_checked = 1 if 0 in got else 0
    assert state["_num_yielded"] == 5
    assert state["checksum"][0] == num_checked
    assert state["received_ahead"] == sorted(number for number in got if number > num_checked)


def test_a_state_of_another_rank_is_refused_within_an_epoch() -> None:
    """The other rank has received other batches; a state between two epochs serves any rank."""

    def make(rank: int) -> Any:
        sampler: Any = torch.utils.data.DistributedSampler(range(24), num_replicas=2, rank=rank)
        return DataLoader(datasets.Made(int, 24), 2, sampler=sampler, **AS_THEY_COME)

    with make(0) as loader, make(1) as other:
        iterator = iter(loader)
        next(iterator)
        other.load_state_dict(loader.state_dict())
        with pytest.raises(ResumeError, match="rank 0 with in_order=False, after 1 batches, and rank 1"):
            iter(other)
        list(iterator)
        other.load_state_dict(loader.state_dict())
        assert len(list(other)) == 6


class Breaks:
    """A sampler that is a generator, and raises before batch 8."""

    def __iter__(self) -> Any:
        yield from range(16)
        raise OSError("no more")

    def __len__(self) -> int:
        return 24


def test_a_resumed_epoch_tells_that_its_sampler_ended_with_an_error() -> None:
    """As an epoch from its beginning does: the batches after the error are missing."""
    sampler: Any = Breaks()
    with DataLoader(Gates(24, {2: 12}), 2, sampler=sampler, **AS_THEY_COME) as loader:
        iterator = iter(loader)
        got = [next(iterator) for _ in range(4)]
        state = loader.state_dict()
    assert state["received_ahead"]
    with DataLoader(range(24), 2, sampler=sampler, num_workers=1) as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        with pytest.raises(OSError, match="no more"):
            got.extend(iterator)
        with pytest.raises(BatchLostError, match="an exception ended the sampler"):
            got.extend(iterator)
    assert len(set(firsts(got))) == len(got)
    assert set(firsts(got)) < set(range(0, 16, 2))  # as with torch, an error takes the place of a batch


def numbers(batches: Any) -> list[int]:
    """Which samples of a stream came, sorted."""
    return sorted(number for batch in batches for number in batch[1].tolist())


@pytest.mark.parametrize("persistent", [False, True])
def test_streams_give_each_sample_once(persistent: bool) -> None:
    """Also where the epoch is left in the middle: each copy of the stream continues where it was."""
    options = AS_THEY_COME | {"persistent_workers": persistent}
    with DataLoader(Stream(22, uneven=True), 3, **options) as loader:
        expected = numbers(loader)
        assert expected == sorted([*range(22), *range(11)])
        assert numbers(loader) == expected
        iterator = iter(loader)
        got = [next(iterator) for _ in range(3)]
        state = loader.state_dict()
    with DataLoader(Stream(22, uneven=True), 3, **options) as resumed:
        resumed.load_state_dict(state)
        got += list(resumed)
    assert numbers(got) == expected


WAYS: list[dict[str, Any]] = [
    AS_THEY_COME,
    AS_THEY_COME | {"worker_type": "thread"},
    {"num_workers": 0},
    {"num_workers": 1},
    {"num_workers": 1, "in_order": False, "device": "cpu", "device_transform": torch.clone},
]


class Slow(datasets.Made):
    """Some samples take a while."""

    def __getitem__(self, index: int) -> int:
        if index % 5 == 1:
            threading.Event().wait(0.005)
        return index


@pytest.mark.slow
@given(
    size=st.integers(1, 40),
    counts=st.lists(st.integers(0, 9), max_size=3),
    ways=st.lists(st.sampled_from(WAYS), min_size=4, max_size=4),
    seeding=st.sampled_from(["worker", "sample"]),
)
@settings(max_examples=30, deadline=None)
def test_every_batch_comes_once_over_any_number_of_resumes(
    size: int, counts: list[int], ways: list[dict[str, Any]], seeding: Any
) -> None:
    """With any kind of workers before and after, also where nothing was received between two states."""

    def make(options: dict[str, Any]) -> Any:
        generator = torch.Generator().manual_seed(size)
        return DataLoader(Slow(int, size), 2, shuffle=True, generator=generator, seeding=seeding, **options)

    with make(WAYS[2]) as loader:
        expected = sorted(tuple(batch.tolist()) for batch in loader)
    got: list[Any] = []
    state: Any = None
    for count, options in zip([*counts, size + 1], ways, strict=False):
        with make(options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            iterator = iter(loader)
            got += [tuple(batch.tolist()) for batch in itertools.islice(iterator, count)]
            state = json.loads(json.dumps(loader.state_dict()))
            if state["_iterator_finished"]:
                break
    assert sorted(got) == expected
