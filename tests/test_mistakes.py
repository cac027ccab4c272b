"""Likely mistakes of a newcomer: each error names the argument, what was expected, and what came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import pytest
import torch

import fastload
from fastload import CachedDataset, DataLoader
from fastload.cache import LMDBCache
from fastload.transforms import RandomResizedCrop
from tests.cache.zoo import Images

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DATA = Images(4)
NOISE = A.Compose([A.RandomBrightnessContrast(p=1)])
MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "generator": (
        lambda _: DataLoader(DATA, generator=1),  # type: ignore[arg-type]
        "generator should be a torch.Generator, such as torch.Generator().manual_seed(1), but got 1",
    ),
    "num_workers": (
        lambda _: DataLoader(DATA, num_workers=2.0),  # type: ignore[arg-type]
        'num_workers should be an int or "auto", but got 2.0',
    ),
    "batch_size": (
        lambda _: DataLoader(DATA, batch_size="32"),  # type: ignore[arg-type]
        "batch_size should be an int, but got '32'",
    ),
    "set num_workers": (
        lambda _: setattr(DataLoader(DATA), "num_workers", 2.0),
        "num_workers should be set to an int, but got 2.0",
    ),
    "num_workers of fill": (
        lambda _: CachedDataset(DATA).fill(num_workers="4"),  # type: ignore[arg-type]
        "num_workers should be an int, but got '4'",
    ),
    "num_workers of build": (
        lambda path: CachedDataset.build(DATA, path / "new", num_workers="4"),  # type: ignore[arg-type]
        "num_workers should be an int, but got '4'",
    ),
    "epoch": (
        lambda _: DataLoader(DATA).set_epoch("1"),  # type: ignore[arg-type]
        "epoch should be an int, but got '1'",
    ),
    "seed": (
        lambda _: fastload.seed_everything("1"),  # type: ignore[arg-type]
        "seed should be an int, but got '1'",
    ),
    "albumentations on the device": (
        lambda _: DataLoader(DATA, device="cpu", device_transform=A.HorizontalFlip()),
        "HorizontalFlip augments single arrays: pass it to fastload.CachedDataset(dataset, transform)",
    ),
    "albumentations on batches": (
        lambda _: DataLoader(DATA, batch_transform=[NOISE]),
        "batch_transform gets whole batches, but albumentations' Compose augments single arrays",
    ),
    "a class on the device": (
        lambda _: DataLoader(DATA, device="cpu", device_transform=RandomResizedCrop),
        "device_transform is the class RandomResizedCrop: pass an instance of it, such as device_transform=",
    ),
    "a class after the cache": (
        lambda _: CachedDataset(DATA, RandomResizedCrop),
        "transform is the class RandomResizedCrop: pass an instance",
    ),
    "profile": (lambda _: fastload.profile(DATA), "profile() takes DataLoaders, but got Images"),
    "of": (
        lambda _: fastload.remember("1", of="byte"),  # type: ignore[arg-type]
        """of should be "path" or "bytes", but got 'byte'""",
    ),
    "attribute": (
        lambda _: CachedDataset(DATA).cached_info(),
        "neither CachedDataset nor its dataset, of type Images, has 'cached_info'",
    ),
    "pre_transform": (
        lambda _: CachedDataset(DATA, pre_transform=NOISE),
        "one draw. Pass random transforms as transform=, which runs on every access; or cache files",
    ),
    "a limit": (
        lambda _: DataLoader(DATA, cache="ram:x"),
        """cache='ram:x' should have an amount of memory after "ram:", such as cache="ram:32G\"""",
    ),
    "a cache of files": (
        lambda _: DataLoader(DATA, cache="ram-encoded"),
        'cache should be "ram", "ram:32G", "lmdb:PATH" or None, but got \'ram-encoded\'',
    ),
    "two caches of samples": (
        lambda _: CachedDataset(DATA, cache=["ram", "lmdb:x"]),  # type: ignore[arg-type]
        'cache should be "ram", "ram:32G", "lmdb:PATH" or None, but got [\'ram\', \'lmdb:x\']',
    ),
    "a folder": (
        lambda path: CachedDataset.build(DATA, path),
        "use a different path, or, if an earlier version made it, remove it, and build the cache again",
    ),
    "a path to build": (
        lambda _: CachedDataset.build(DATA, None),  # type: ignore[arg-type]
        "path should be a path, as a str or a pathlib.Path, but got None",
    ),
    "a path to open": (
        lambda _: LMDBCache(3),  # type: ignore[arg-type]
        "path should be a path, as a str or a pathlib.Path, but got 3",
    ),
    "root": (
        lambda _: fastload.ImageFolder(None),  # type: ignore[arg-type]
        "root should be a path, as a str or a pathlib.Path, but got None",
    ),
    "extensions": (
        lambda path: fastload.ImageFolder(path, extensions=None),  # type: ignore[arg-type]
        "extensions must be a collection such as ('.jpg',), got None",
    ),
    "items": (
        lambda _: fastload.SharedList(None),  # type: ignore[arg-type]
        "items should be an iterable of records, but got None",
    ),
    "version": (
        lambda _: fastload.remember(len),  # type: ignore[arg-type]
        'version should be a str, as in fastload.remember(version="1"), but got <built-in function len>',
    ),
    "a lambda": (
        lambda _: fastload.remember("1")(lambda path: path),
        "function should be one that has a name (by `def`), and no method of an object, but got <function",
    ),
    "path of an image": (
        lambda _: fastload.read_image(3.0),  # type: ignore[arg-type]
        "path should be a path, as a str or a pathlib.Path, but got 3.0",
    ),
    "a dict": (
        lambda _: DataLoader(DATA).load_state_dict({"a": 1}),
        "DataLoader, but a dict without 'version': pass what loader.state_dict() returned",
    ),
    "no dict": (
        lambda _: DataLoader(DATA).load_state_dict("last.ckpt"),  # type: ignore[arg-type]
        "this is not a state of a fastload.DataLoader, but 'last.ckpt': pass what",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained(mistake: str, tmp_path: Path) -> None:
    """The error, with its notes, has the sentence of the table."""
    act, sentence = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError, AttributeError, fastload.errors.FastloadError)) as caught:
        act(tmp_path)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert sentence in text


def test_what_works_in_torch_is_no_mistake() -> None:
    """Numbers of other types, subclasses of generators, and classes and callables that take batches."""

    class Generator(torch.Generator):
        pass

    class OfBatches(A.HorizontalFlip):
        def __call__(self, batch: Any) -> Any:  # type: ignore[override]
            return len(batch[0])

    assert DataLoader(DATA, num_workers=np.int64(0)).num_workers == 0
    assert len(list(DataLoader(DATA, num_workers=0.0))) == 4  # type: ignore[arg-type]
    assert len(list(DataLoader(DATA, shuffle=True, generator=Generator()))) == 4
    assert list(DataLoader(DATA, 2, batch_transform=[OfBatches(), str])) == ["2", "2"]
    cached = CachedDataset(CachedDataset(DATA))
    assert not hasattr(cached, "nothing")
    with pytest.raises(AttributeError) as caught:
        cached.nothing  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("nothing", cached)
