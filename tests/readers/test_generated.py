"""Random datasets have the same samples, bit for bit, while their files are remembered."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fastload.augmentation import ends, torchvision_end
from fastload.cache.decoded_files import DecodedFiles, open_files
from fastload.readers import patches
from fastload.readers.decode_cache import DecodeCache
from tests.kit.decoding import DictStore
from tests.readers.generated import NUM_FILES, Generated, draw_recipe, write_files, write_image

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings of the libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        gc.collect()  # tifffile leaves a damaged file open, in a cycle


def seed_all(number: int) -> None:
    """Seed all generators."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def change(folder: Path, rng: random.Random) -> None:
    """Change a file: write it in place with its old times, replace it, link it, or touch its status."""
    path = folder / f"{rng.randrange(NUM_FILES):02}"
    before, probe = path.stat(), folder / "probe"
    probe.write_bytes(b"")
    while probe.stat().st_ctime_ns <= before.st_ctime_ns:  # the clock of the file system ticks slowly
        probe.unlink()
        probe.write_bytes(b"")
    how = rng.choice(["in place", "replaced", "linked", "chmod", "deleted"])
    if how == "chmod":
        path.chmod(0o600)
        return
    target = path.with_name("new")
    write_image(target, rng)
    if how == "in place":
        path.write_bytes(target.read_bytes())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif how == "replaced":
        target.replace(path)
    elif how == "linked":
        path.unlink()
        path.symlink_to(shutil.move(target, path.with_name(f"linked{rng.random()}")))
    else:
        path.unlink()
        path.write_bytes(b"")


def compare(seed: int, folder: Path, *, is_on_disk: bool = False) -> None:
    """Compare a random dataset with itself under a cache, over three epochs.

    A cache on disk is opened again by each epoch, as by another process.
    """
    rng = random.Random(seed)
    write_files(folder, rng)
    recipe = draw_recipe(rng)
    plain, remembered = Generated(recipe, folder), Generated(recipe, folder)
    store: Any = DictStore()
    verify_share = rng.choice([0, 1])
    cache = DecodeCache(store, verify_share)
    checksums: dict[int, int] = {}
    for epoch in range(3):
        if is_on_disk:
            store = DecodedFiles(open_files(f"{folder}.cache"))
            cache = DecodeCache(store, verify_share)
        for index in range(NUM_FILES):
            if rng.random() < 0.05:
                change(folder, rng)
            seed_all(index + 100 * epoch)
            expected = plain[index]
            seed_all(index + 100 * epoch)
            patches.meet()
            with cache.active(), ends.met() or contextlib.nullcontext():
                sample = remembered[index]
            if sample != expected:
                raise AssertionError(f"seed {seed}, sample {index}, epoch {epoch}: {recipe}")
        if is_on_disk:
            store.store.close()
            assert all(is_intact for _, _, is_intact in store.store.checked())
            continue
        checksums[len(store.values)] = checksums.get(len(store.values), store.checksum())
        if checksums[len(store.values)] != store.checksum():
            raise AssertionError(f"seed {seed}: the store was written to: {recipe}")


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of torchvision's pipelines are done at once for images of any size."""
    monkeypatch.setattr(torchvision_end, "_MIN_PIXELS", 0)


def compare_in(folder: Path, seed: int, *, is_on_disk: bool = False) -> None:
    """Compare in a new folder, which is removed."""
    folder.mkdir(exist_ok=True)
    with quietly():
        compare(seed, folder, is_on_disk=is_on_disk)
    shutil.rmtree(folder)


@pytest.mark.usefixtures("settled")
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
def test_samples_are_equal_bit_for_bit(seed: int, tmp_path: Path) -> None:
    """Over three epochs, while files change, samples under a cache are those without."""
    compare_in(tmp_path / str(seed), seed)


@pytest.mark.usefixtures("settled")
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
@example(seed=5363875)  # reads a damaged file by tifffile
def test_samples_from_disk_are_equal_bit_for_bit(seed: int, tmp_path: Path) -> None:
    """Over three processes that remember files on disk, while files change, too."""
    folder = tmp_path / str(seed)
    compare_in(folder, seed, is_on_disk=True)
    for file in folder.parent.glob(f"{seed}.cache*"):
        file.unlink()
