"""mps and xpu: batches are moved when they are asked for. A fake stands in for the device."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from fastload import CUDAPrefetcher, DataLoader
from fastload.device import cuda, streamless
from fastload.errors import DeviceUnavailableError
from fastload.system import logs
from tests.kit import datasets


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An xpu that is there; what moves to it is noted, and stays a clone on the CPU."""
    moved: list[Any] = []

    def to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        moved.append((device.type, tuple(tensor.shape)))
        return tensor.clone()

    def move(self: streamless.StreamlessDevice, batch: Any) -> Any:
        return streamless.map_movable(batch, lambda leaf: to(leaf, self.device))

    monkeypatch.setattr(cuda, "why_no_streamless_device", lambda device: None)
    monkeypatch.setattr(streamless.StreamlessDevice, "move", move)
    logs.say_once.cache_clear()
    return moved


def plain_batches() -> list[Any]:
    return list(DataLoader(datasets.Made(datasets.image, 12), 4))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_batch_is_moved_when_it_is_asked_for(num_workers: int, moves: list[Any], caplog: Any) -> None:
    """The caller gets moved and transformed batches, nothing is moved before, and the log says so."""
    with caplog.at_level(logging.WARNING, "fastload"):
        loader = DataLoader(
            datasets.Made(datasets.image, 12),
            4,
            num_workers=num_workers,
            device="xpu",
            device_transform=lambda batch: (batch[0] + 1, batch[1]),
        )
        iterator = iter(loader)
        assert moves == []
        found = [next(iterator)]
        assert [kind for kind, _ in moves] == ["xpu", "xpu"]
        found += list(iterator)

    for (images, labels), (expected, expected_labels) in zip(found, plain_batches(), strict=True):
        assert torch.equal(images, expected + 1)
        assert torch.equal(labels, expected_labels)
    assert ["experimental" in record.getMessage() for record in caplog.records] == [True]


def test_what_counts_is_what_was_handed_out(moves: list[Any]) -> None:
    """A state taken in the middle resumes with the next batch."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "device": "xpu"}
    loader = DataLoader(datasets.Made(datasets.image, 12), **options)
    next(iter(loader))
    again = DataLoader(datasets.Made(datasets.image, 12), **options)
    again.load_state_dict(loader.state_dict())
    loader.close()

    assert [labels.tolist() for _, labels in again] == [labels.tolist() for _, labels in plain_batches()[1:]]


def test_the_prefetcher_moves_the_batches_of_any_iterable(moves: list[Any]) -> None:
    """CUDAPrefetcher takes the device, too, and begins anew at each iter()."""
    batches = [{"image": torch.ones(2, 3), "name": "a"}]
    prefetcher = CUDAPrefetcher(batches, device="xpu")

    for _ in range(2):
        (batch,) = prefetcher
        assert torch.equal(batch["image"], batches[0]["image"])
        assert batch["name"] == "a"
    assert moves == [("xpu", (2, 3))] * 2
    assert prefetcher.device == torch.device("xpu")


@pytest.mark.parametrize("device", ["mps", "xpu:0"])
def test_one_that_is_not_there_is_an_error(device: str) -> None:
    """As with CUDA: it says what torch found, and that "auto" would do."""
    with pytest.raises(DeviceUnavailableError, match=rf"{device}.*no accelerator here.*auto"):
        iter(DataLoader(datasets.Made(datasets.image, 12), device=device))


def test_move_keeps_what_is_no_tensor() -> None:
    """Tensors move, also in nests; other values are the same objects."""
    value = object()
    moved = streamless.StreamlessDevice(torch.device("meta")).move({"a": [torch.ones(2), value], "b": "text"})

    assert moved["a"][0].device.type == "meta"
    assert moved["a"][1] is value
