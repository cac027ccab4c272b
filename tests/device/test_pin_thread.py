"""pin_memory=True: batches are pinned off the main thread, in order, by torch's rules."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as tud

import fastload
from fastload.epochs import with_workers, without_workers
from tests.kit import datasets


def numbered(index: int) -> Any:
    return np.full((4, 4, 3), index, np.uint8), index


@pytest.fixture
def pinned_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that there is an accelerator: "pinning" copies, and notes the thread that did it."""
    threads: list[str] = []

    def pin(batch: Any, device: str | None = None) -> Any:
        threads.append(threading.current_thread().name)
        images, labels = batch
        if 13 in labels.tolist():
            raise ValueError("cannot pin 13")
        return [images.clone(), labels.clone()]

    def init(self: Any, loader: Any) -> None:
        base_init(self, loader)
        self._pin_memory = True

    base_init = tud.dataloader._BaseDataLoaderIter.__init__
    monkeypatch.setattr(tud.dataloader._BaseDataLoaderIter, "__init__", init)
    for module in (without_workers, with_workers):
        monkeypatch.setattr(module, "pin_batch", pin)
    return threads


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_come_pinned_in_order_from_another_thread(pinned_in: list[str], persistent: bool) -> None:
    """Two epochs, the first of them left early: right batches, all pinned by the one thread."""
    loader = fastload.DataLoader(datasets.Made(numbered, 12), 2, num_workers=2, persistent_workers=persistent)
    for _ in loader:
        break
    labels = [batch[1].tolist() for batch in loader]
    loader.close()
    assert labels == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert set(pinned_in) == {"fastload-pin"}


def test_an_error_while_pinning_is_raised_at_its_batch(pinned_in: list[str]) -> None:
    """As torch has it, and the epoch goes on."""
    iterator = iter(fastload.DataLoader(datasets.Made(numbered, 18), 2, num_workers=1))
    seen = [next(iterator)[1].tolist() for _ in range(6)]
    with pytest.raises(ValueError, match="in pin memory thread for device"):
        next(iterator)
    assert seen[-1] == [10, 11]
    assert next(iterator)[1].tolist() == [14, 15]


@pytest.mark.slow
def test_a_worker_that_dies_under_the_thread_is_reported(pinned_in: list[str]) -> None:
    """The thread hands the error over instead of dying of it."""
    with pytest.raises(fastload.errors.WorkerDiedError, match="worker 1 was killed by SIGKILL"):
        list(fastload.DataLoader(datasets.Made(datasets.killed), 4, num_workers=2))


def test_without_workers_the_batch_is_pinned_where_it_is_made(pinned_in: list[str]) -> None:
    """As in torch: there is no thread then."""
    list(fastload.DataLoader(datasets.Made(numbered, 4), 2))
    assert pinned_in == ["MainThread"] * 2


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="the warning is for machines without an accelerator"
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_without_an_accelerator_torch_says_that_nothing_is_pinned(num_workers: int) -> None:
    """Torch's own warning, which torch 2.6 lacks; the batches come all the same."""
    said = []
    for kind in (tud.DataLoader, fastload.DataLoader):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = list(kind(datasets.Made(numbered, 4), 2, num_workers=num_workers, pin_memory=True))
        said.append([str(warning.message) for warning in caught if warning.category is UserWarning])
        assert len(batches) == 2
    theirs, ours = said
    assert ours == theirs
    assert all("no accelerator is found" in message for message in ours)
