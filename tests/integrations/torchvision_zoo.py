"""A stand-in for torchvision's datasets.folder, with its attributes and the code that reads samples."""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING, Any

import torch.utils.data
from PIL import Image

if TYPE_CHECKING:
    import pytest


def pil_loader(path: str) -> Image.Image:
    with open(path, "rb") as f:
        img = Image.open(f)
        return img.convert("RGB")


def default_loader(path: str) -> Any:
    return pil_loader(path)


class DatasetFolder(torch.utils.data.Dataset[Any]):
    """As torchvision's ImageFolder, but for its checks."""

    def __init__(
        self, root: str, transform: Any = None, target_transform: Any = None, loader: Any = None
    ) -> None:
        self.root = root
        self.transform = transform
        self.target_transform = target_transform
        self.classes = sorted(os.listdir(root))
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.loader = loader or default_loader
        self.samples = [
            (os.path.join(root, name, file), number)
            for name, number in self.class_to_idx.items()
            for file in sorted(os.listdir(os.path.join(root, name)))
        ]
        self.targets = [target for _, target in self.samples]
        self.imgs = self.samples

    def __getitem__(self, index: int) -> Any:
        path, target = self.samples[index]
        sample = self.loader(path)
        if self.transform is not None:
            sample = self.transform(sample)
        if self.target_transform is not None:
            target = self.target_transform(target)

        return sample, target

    def __len__(self) -> int:
        return len(self.samples)


class ImageFolder(DatasetFolder):
    """The same."""


def plant(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Put the stand-in where torchvision would be imported."""
    package, datasets = types.ModuleType("torchvision"), types.ModuleType("torchvision.datasets")
    package.get_image_backend = lambda: "PIL"  # type: ignore[attr-defined]
    modules = {"torchvision": package, "torchvision.datasets": datasets}
    for name, module in (modules | {"torchvision.datasets.folder": sys.modules[__name__]}).items():
        monkeypatch.setitem(sys.modules, name, module)
    return package
