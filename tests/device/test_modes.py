"""What is made ahead of the caller is the same in whatever mode the caller asks for it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fastload import DataLoader
from fastload.epochs import on_device
from tests.device.fake import FakeBackend
from tests.device.loaders import Loader, on
from tests.kit import datasets

if TYPE_CHECKING:
    from collections.abc import Callable

IMAGES = datasets.Made(datasets.image, 24)
MODES: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [
    contextlib.nullcontext,
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
]


@pytest.fixture(params=["ahead", "when asked"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One to which batches are copied ahead, and one where they are transformed when the caller asks."""
    if request.param == "ahead":
        backend = FakeBackend()
        monkeypatch.setattr(on_device, "choose_backend", lambda device, asker: backend)
        return "cuda"
    return "cpu"


@pytest.mark.parametrize("mode", MODES, ids=["none", "inference_mode", "autocast"])
def test_a_transform_runs_in_no_mode_of_the_caller(device: str, mode: Any) -> None:
    """It has neither gradients nor inference mode nor autocast, whoever asks for the batch, and when."""
    seen: list[tuple[bool, bool, torch.dtype]] = []

    def transform(batch: Any) -> Any:
        pixels = batch[0].float().reshape(4, -1)
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (pixels @ pixels.T).dtype
        seen.append(modes)
        return pixels

    iterator = iter(DataLoader(IMAGES, 4, device=device, device_transform=transform))
    with mode():
        first = next(iterator)
    later = list(iterator)

    assert seen == [(False, False, torch.float32)] * 6
    assert not any(batch.is_inference() for batch in [first, *later])


def test_batches_ahead_can_be_trained_on_after_a_look_in_inference_mode() -> None:
    """What was pulled by a next() in inference mode and comes later is no inference tensor."""
    fake = FakeBackend()
    iterator = iter(on(fake, Loader(4)))
    with torch.inference_mode():
        next(iterator)

    assert [batch.is_inference() for batch in iterator] == [False] * 3


def test_an_error_of_a_transform_says_what_it_was_given(device: str) -> None:
    """The note names the device, and what the loader does not do for a module."""

    def transform(batch: Any) -> Any:
        raise ValueError("as the user wrote it")

    with pytest.raises(ValueError, match="as the user wrote it") as caught:
        next(iter(DataLoader(IMAGES, 4, device=device, device_transform=transform)))

    (note,) = caught.value.__notes__
    assert note.startswith("raised by device_transform, which gets whole batches on cpu")
