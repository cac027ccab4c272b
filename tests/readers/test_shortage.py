"""Files that have no room in `cache="ram"`: what the loader says of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest

import fastload
from fastload.cache import file_cache
from fastload.cache.ram import store as ram
from fastload.cache.ram.arena import SEGMENT_NAME
from tests.kit.datasets import Made

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def images(tmp_path: Path, settled: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """24 images of 270 kB, decoded on each access."""
    monkeypatch.setenv("FASTLOAD_RUNTIME_DIR", str(tmp_path / "runtime"))
    paths = [str(tmp_path / f"{number}.png") for number in range(24)]
    for number, path in enumerate(paths):
        cv2.imwrite(path, np.full((300, 300, 3), number, np.uint8))
    return Made(lambda index: cv2.imread(paths[index]), 24)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("part", [24, 8])
def test_one_line_says_what_did_not_fit_and_which_limit_would_hold_it(
    part: int, num_workers: int, images: Any, caplog: Any
) -> None:
    """After the first epoch, also of a part of the samples, as ranks read; later epochs say nothing."""
    sampler = range(24 - part, 24)
    with fastload.DataLoader(images, 4, cache="ram:2MB", sampler=sampler, num_workers=num_workers) as loader:
        for _ in range(3):
            list(loader)
    (line,) = caplog.messages
    num_refused, num_held = (int(word) for word in line.split() if word.isdigit())
    assert num_held + (num_refused * part // 24) == part
    assert 'cache="ram:1G" would hold all' in line
    needed_kb = 1000 * float(line.split("take about ")[1].split()[0])
    assert needed_kb == pytest.approx((num_held + num_refused) * 270, rel=0.1)


def test_what_the_machine_cannot_hold_is_kept_on_disk(images: Any, caplog: Any, monkeypatch: Any) -> None:
    """The line promises no memory that is not free."""
    monkeypatch.setattr(file_cache, "available_bytes", lambda: 100_000)
    with fastload.DataLoader(images, 4, cache="ram:2MB") as loader:
        list(loader)
    (line,) = caplog.messages
    assert 'cache="lmdb:PATH" keeps them on disk' in line


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_cache_that_holds_less_than_a_tenth_is_given_up(
    num_workers: int, tmp_path: Path, settled: None, caplog: Any, monkeypatch: Any
) -> None:
    """Its memory is for the encoded files; one line says so. A limit of the user's is filled all the same."""
    monkeypatch.setenv("FASTLOAD_RUNTIME_DIR", str(tmp_path / "runtime"))
    paths = [str(tmp_path / f"{number}.png") for number in range(60)]
    for number, path in enumerate(paths):
        cv2.imwrite(path, np.full((300, 300, 3), number, np.uint8))
    monkeypatch.setattr(ram, "limit_bytes", lambda *_: 1_200_000)  # for four of them
    images = Made(lambda index: cv2.imread(paths[index]), 60)
    with fastload.DataLoader(
        images, 4, cache="ram", num_workers=num_workers, persistent_workers=num_workers > 0
    ) as loader:
        for _ in range(3):
            assert [int(batch[0, 0, 0, 0]) for batch in loader] == list(range(0, 60, 4))
        assert "nothing is remembered any more" in loader.explain()
        hits, misses = loader.stats().cache_hits, loader.stats().cache_misses
    (line,) = caplog.messages
    assert (hits, misses) == (0, 60)
    assert "too few to be of use: nothing is remembered any more" in line
    assert file_cache.store_of_process("auto").nbytes == 0
    caplog.clear()
    with fastload.DataLoader(images, 4, cache="ram:1.2MB") as loader:
        for _ in range(2):
            list(loader)
        assert loader.stats().cache_hits > 0
    assert 'cache="ram:1G" would hold all' in caplog.text


def test_workers_let_go_of_a_cache_that_is_given_up(tmp_path: Path, settled: None, monkeypatch: Any) -> None:
    """Else they would keep its memory; a loader whose files fit has the room at once."""
    monkeypatch.setenv("FASTLOAD_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(ram, "limit_bytes", lambda *_: 1_200_000)  # for four images
    monkeypatch.setattr(ram, "_LOOK_EVERY_S", 0)
    paths = [str(tmp_path / f"{number}.png") for number in range(60)]
    for path in paths:
        cv2.imwrite(path, np.zeros((300, 300, 3), np.uint8))

    def num_segments() -> int:
        with os.scandir("/proc/self/fd") as found:
            return sum(SEGMENT_NAME in os.path.realpath(entry) for entry in found)

    def held(index: int) -> int:
        assert cv2.imread(paths[index]) is not None
        return num_segments()

    num_of_other_tests = num_segments()
    with (
        fastload.DataLoader(Made(held, 60), 4, cache="ram", num_workers=1, persistent_workers=True) as train,
        fastload.DataLoader(Made(held, 3), 3, cache="ram") as validation,
    ):
        nums_held = [[int(num) for batch in train for num in batch] for _ in range(2)]
        list(validation)
        list(validation)
        assert validation.stats().cache_hits == 3
    assert [nums[-1] > num_of_other_tests for nums in nums_held] == [True, False]


def test_a_cache_is_not_given_up_once_there_is_memory_again(
    tmp_path: Path, settled: None, monkeypatch: Any
) -> None:
    """Another job had taken it until the end of the first epoch."""
    monkeypatch.setenv("FASTLOAD_RUNTIME_DIR", str(tmp_path / "runtime"))
    paths = [str(tmp_path / f"{number}.png") for number in range(20)]
    for path in paths:
        cv2.imwrite(path, np.zeros((30, 30, 3), np.uint8))
    has_room, is_free = ram._has_room, list[int]()
    monkeypatch.setattr(ram, "_has_room", lambda *args: 19 in is_free and has_room(*args))

    def read(index: int) -> Any:
        is_free.append(index)
        return cv2.imread(paths[index])

    with fastload.DataLoader(Made(read, 20), 4, cache="ram") as loader:
        for _ in range(3):
            list(loader)
        assert loader.stats().cache_hits == 20 + 1


def test_where_all_fits_nothing_is_said(images: Any, caplog: Any) -> None:
    """Neither of a store that is large enough."""
    with fastload.DataLoader(images, 4, cache="ram:20MB") as loader:
        for _ in range(2):
            list(loader)
    assert caplog.messages == []
