"""Claims about contenders: which combinations take part, and the code that makes their loaders."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

import fastload
from fastload.bench.contenders import CACHES, Contender, contenders_of

if TYPE_CHECKING:
    from pathlib import Path

DATASET = [(np.full((4, 4, 3), number, np.uint8), number) for number in range(6)]
SWEEPS = st.fixed_dictionaries(
    {
        "workers": st.lists(st.integers(0, 4), min_size=1, unique=True),
        "batch_sizes": st.lists(st.integers(1, 512), min_size=1, max_size=3, unique=True),
        "start_methods": st.lists(st.sampled_from(["fork", "spawn"]), min_size=1, unique=True),
        "caches": st.lists(st.sampled_from(CACHES), min_size=1, unique=True),
        "sizes": st.lists(st.sampled_from([None, "32x32", "64x64"]), min_size=1, unique=True),
    }
)


def transform(sample: Any) -> Any:
    return sample


class TestSweep:
    @given(SWEEPS)
    def test_no_two_contenders_do_the_same_work(self, sweep: dict[str, list[Any]]) -> None:
        """A loader without workers has no start method, and torch's has no cache: one contender for each."""
        found = contenders_of(**sweep)

        assert len(set(found)) == len(found)
        assert all((one.start_method is None) == (one.num_workers == 0) for one in found)
        assert {one.cache for one in found if one.is_torch} == {"none"}

    @given(SWEEPS)
    def test_every_setting_takes_part_with_both_loaders(self, sweep: dict[str, list[Any]]) -> None:
        """Torch's loader runs with each size, batch size and number of workers, for comparison."""
        found = contenders_of(**sweep)

        for loader in ("torch", "fastload"):
            some = [one for one in found if one.loader == loader]
            assert {one.num_workers for one in some} == set(sweep["workers"])
            assert {one.batch_size for one in some} == set(sweep["batch_sizes"])
            assert {one.size for one in some} == set(sweep["sizes"])
        assert {one.cache for one in found if not one.is_torch} == set(sweep["caches"])


class TestCode:
    @pytest.mark.parametrize(
        ("loader", "cache", "num_workers", "has_transform"),
        [
            *(("torch", "none", 2, False), ("torch", "none", 0, True), ("fastload", "none", 2, True)),
            *(("fastload", "none", 0, False), ("fastload", "ram", 2, True), ("fastload", "ram", 0, False)),
            *(("fastload", "lmdb", 2, False), ("fastload", "lmdb", 0, True)),
        ],
    )
    def test_the_lines_make_the_loader_that_was_measured(
        self, loader: str, cache: str, num_workers: int, has_transform: bool, tmp_path: Path
    ) -> None:
        """They run, and give a loader of that class with these settings."""
        contender = Contender(loader, cache, num_workers, 3, "fork" if num_workers else None)
        lines = contender.code("fork", has_transform=has_transform, lmdb_path=str(tmp_path / "cache"))
        names: dict[str, Any] = {"dataset": DATASET, "transform": transform}

        exec("\n".join(lines), names)

        made = names["loader"]
        assert isinstance(made, fastload.DataLoader) == (loader == "fastload")
        assert isinstance(made, torch.utils.data.DataLoader)
        assert (made.num_workers, made.batch_size) == (num_workers, 3)
        assert made.persistent_workers == (num_workers > 0)
        assert isinstance(made.dataset, fastload.CachedDataset) == (cache != "none" or has_transform)
        if isinstance(made.dataset, fastload.CachedDataset):
            assert made.dataset.transform is (transform if has_transform else None)
            assert made.dataset.cache.layout == {"none": "none", "ram": "uniform", "lmdb": "lmdb"}[cache]

    def test_a_start_method_that_is_not_the_default_is_an_argument(self) -> None:
        """The default needs none."""
        contender = Contender("fastload", "none", 2, 64, "spawn")
        names: dict[str, Any] = {"dataset": DATASET}

        exec("\n".join(contender.code("fork", has_transform=False, lmdb_path="")), names)

        spawn = multiprocessing.get_context("spawn")
        assert names["loader"].multiprocessing_context.get_start_method() == spawn.get_start_method()
        default = contender.code("spawn", has_transform=False, lmdb_path="")
        assert "multiprocessing_context" not in default[-1]
