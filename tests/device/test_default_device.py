"""What is made for the host is made there, whatever torch.set_default_device() says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import fastload
from fastload import DataLoader
from fastload.transforms import (
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
)
from tests.device.fake import FakeBackend
from tests.device.loaders import on
from tests.kit import datasets

CONSTRUCTORS = _device_constructors()
PACKAGE = str(Path(fastload.__file__).parent)
TRANSFORMS = [
    *(RandomResizedCrop(8), RandomHorizontalFlip(1.0), RandomCrop(8, 2), RandomCrop(8, 2, fill=(1, 2, 3))),
    Normalize([0.5] * 3, [0.25] * 3),
]


class NamesNoDevice(TorchFunctionMode):
    """Notes the lines of the package that make a tensor on the default device: they mean the host."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in CONSTRUCTORS and (kwargs or {}).get("device") is None:
            caller = sys._getframe(1)
            while caller.f_back is not None and "overrides" in caller.f_code.co_filename:
                caller = caller.f_back
            if caller.f_code.co_filename.startswith(PACKAGE):
                self.lines.add(f"{caller.f_code.co_filename}:{caller.f_lineno}")
        return function(*args, **(kwargs or {}))


def test_the_mode_notes_what_it_should() -> None:
    """A line of the package that names no device is found: the check below can fail."""
    code = compile(
        "import torch\ntorch.empty(3)\ntorch.empty(3, device='cpu')", f"{PACKAGE}/made_up.py", "exec"
    )
    with NamesNoDevice() as found:
        exec(code, {})
    assert found.lines == {f"{PACKAGE}/made_up.py:2"}


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_transforms_name_the_device(transform: Any, dtype: torch.dtype) -> None:
    """On the host and by hand; bfloat16 images take the way of accelerators."""
    images = torch.ones(4, 16, 16, 3, dtype=dtype)
    if isinstance(transform, Normalize) and dtype != torch.uint8:
        return
    with NamesNoDevice() as found:
        transform(images)
        type(transform).__call__(transform, images[:0])
    assert found.lines == set()


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "worker_type": "thread"}, {"seeding": "sample"}], ids=str
)
def test_loaders_name_the_device(options: dict[str, Any]) -> None:
    """Torch's own parts (samplers, default_collate) do as they do in torch's loader."""
    dataset = datasets.Made(datasets.image, 8)
    generator = torch.Generator().manual_seed(0)
    with NamesNoDevice() as found:
        list(DataLoader(dataset, 4, shuffle=True, generator=generator, **options))
        list(DataLoader(dataset, 4, device="cpu", device_transform=RandomCrop(8, 2), **options))
    assert found.lines == set()


def test_the_prefetcher_names_the_device() -> None:
    """Of every leaf that it copies."""
    batches = [[torch.ones(n + 1) for n in range(40)] + [np.ones(3)]]
    with NamesNoDevice() as found:
        list(on(FakeBackend(), batches))
    assert found.lines == set()
