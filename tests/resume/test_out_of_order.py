"""Epochs with in_order=False: which batches come, and from which states a loader goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fastload import DataLoader
from fastload.errors import ResumeError
from fastload.system.logs import say_once
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


@pytest.mark.parametrize("dataset", [datasets.Made(int, 24), Stream(22, uneven=True)], ids=["map", "stream"])
def test_an_epoch_is_not_resumed_in_the_middle(dataset: Any, caplog: Any) -> None:
    """The state says so in the log when it is saved, and in the error when the epoch should continue."""
    say_once.cache_clear()
    with DataLoader(dataset, 2, **AS_THEY_COME) as loader, DataLoader(dataset, 2, num_workers=2) as other:
        iterator = iter(loader)
        before = loader.state_dict()
        next(iterator), next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        assert "within an epoch that cannot be resumed: with in_order=False" in caplog.text
        other.load_state_dict(state)
        with pytest.raises(ResumeError, match="at batch 2: with in_order=False"):
            iter(other)
        other.load_state_dict(before)
        assert len(list(other)) == len(list(iterator)) + 2


def test_an_epoch_that_began_in_order_goes_on_out_of_order() -> None:
    """And between two epochs a state serves any loader."""

    def make(**options: Any) -> Any:
        generator = torch.Generator().manual_seed(1)
        return DataLoader(range(24), 2, shuffle=True, generator=generator, **options)

    with make(num_workers=1) as loader, make(**AS_THEY_COME) as other:
        iterator = iter(loader)
        next(iterator)
        other.load_state_dict(loader.state_dict())
        assert sorted(map(tuple, map(torch.Tensor.tolist, other))) == sorted(
            tuple(batch.tolist()) for batch in iterator
        )
        loader.load_state_dict(other.state_dict())
        assert sorted(map(tuple, map(torch.Tensor.tolist, other))) == sorted(
            tuple(batch.tolist()) for batch in loader
        )


def numbers(batches: Any) -> list[int]:
    """Which samples of a stream came, sorted."""
    return sorted(number for batch in batches for number in batch[1].tolist())


@pytest.mark.parametrize("persistent", [False, True])
def test_streams_give_each_sample_once(persistent: bool) -> None:
    """In each epoch, also one after a state that was saved between two."""
    options = AS_THEY_COME | {"persistent_workers": persistent}
    with DataLoader(Stream(22, uneven=True), 3, **options) as loader:
        expected = numbers(loader)
        assert expected == sorted([*range(22), *range(11)])
        assert numbers(loader) == expected
        state = loader.state_dict()
    with DataLoader(Stream(22, uneven=True), 3, **options) as resumed:
        resumed.load_state_dict(state)
        assert numbers(resumed) == expected
