"""The devices of these tests: a fake one everywhere, and a real one for the tests marked gpu."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.device.loaders import Place

if TYPE_CHECKING:
    from collections.abc import Iterator

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.fixture(scope="session", autouse=True)
def cuda_is_awake(request: pytest.FixtureRequest) -> None:
    """What CUDA opens at its first use, and keeps, is there before the leak guard first looks."""
    if torch.cuda.is_available() and any(item.get_closest_marker("gpu") for item in request.session.items):
        torch.ones(8, device="cuda").add_(1)
        torch.ones(8).pin_memory()
        torch.cuda.Stream()
        torch.cuda.synchronize()


@pytest.fixture(params=["fake", CUDA])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Where batches are copied to: the fake device, or a real one, which is idle at the end."""
    if request.param == "fake":
        yield Place(request.getfixturevalue("fake"))
    else:
        yield Place(None)
        torch.cuda.synchronize()
