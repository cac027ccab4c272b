"""Caches in RAM that grow at the same time: together they leave free what each of them promised to leave.

On a machine that is pretended, whose free memory is what the caches of this process have not taken;
tests/test_containers.py has a real limit.
"""

from __future__ import annotations

import logging
import os
import pickle
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fastload.cache.dataset import CachedDataset
from fastload.cache.ram import arena
from fastload.system import budget
from tests.cache.zoo import Images, Made
from tests.kit.faults import limited, mapped_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

MB = 1 << 20
pytestmark = pytest.mark.usefixtures("registry_folder")


class Machine:
    """A machine with 64 MB of memory, for caches and for others.

    Attributes:
        others_bytes: What others take.
    """

    nbytes = 64 * MB

    def __init__(self) -> None:
        self.others_bytes = 0

    def free_bytes(self) -> int:
        blocks = {}
        for fd in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{fd}"
            if os.path.lexists(path) and "memfd:fastload-cache" in os.readlink(path):
                status = os.stat(path)
                blocks[status.st_ino] = status.st_blocks
        return self.nbytes - self.others_bytes - 512 * sum(blocks.values())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """All that fastload sees of the free memory; it is read before each sample."""
    machine = Machine()
    for name in ("available_bytes", "unused_bytes"):
        monkeypatch.setattr(arena, name, machine.free_bytes)
    monkeypatch.setattr(budget, "_CHECK_EVERY_S", 0.0)
    return machine


def uniform(index: int) -> Any:
    """An array of 256 KB."""
    return np.full(256 << 10, index % 251, np.uint8), index


def ragged(index: int) -> Any:
    """An array of about 256 KB."""
    return np.full((256 << 10) - index % 7, index % 251, np.uint8), index


def assert_right(ds: CachedDataset, make: Callable[[int], Any]) -> None:
    """Stored and read samples are the same as the dataset's."""
    for index in range(0, len(ds), 17):
        assert np.array_equal(ds[index][0], make(index)[0])


@pytest.mark.parametrize(
    ("make", "share", "known"),
    [(uniform, 0.65, False), (ragged, 0.65, True), (uniform, 2.0, True), (ragged, 2.0, False)],
)
def test_caches_that_are_made_before_they_fill_leave_30_percent_free(
    make: Any, share: float, known: bool, machine: Machine, caplog: Any
) -> None:
    """However many there are, shared with other jobs or not; each that stops early says so once."""
    num_samples = int(share * machine.nbytes) // (256 << 10)
    keys = [f"key-{number}" if known else None for number in range(3)]
    sets = [CachedDataset(Made(make, num_samples), cache_key=key) for key in keys]
    infos = [ds.cache_info() for ds in sets]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fastload"):
        for ds in sets:
            ds.fill(num_workers=0, progress=False)
    stored_bytes = sum(ds.cache_info().nbytes for ds in sets)
    stopped = [message for message in caplog.messages if "when memory becomes free" in message]

    assert sum(info.max_bytes or 0 for info in infos) > 2 * machine.nbytes
    assert 0.64 * machine.nbytes < stored_bytes < 0.72 * machine.nbytes
    assert sets[0].cache_info().num_cached > 0.95 * min(share, 0.7) / share * num_samples
    assert len(stopped) in ((2,) if share < 1 else (2, 3))
    for ds in sets:
        assert_right(ds, make)


def test_caches_that_fill_in_turns_share_alike(machine: Machine) -> None:
    """As ranks do: the one that was made first, before there were others, does not take it all."""
    sets = [CachedDataset(Made(uniform, 512)) for _ in range(4)]
    for index in range(512):
        for ds in sets:
            ds[index]
    counts = [ds.cache_info().num_cached for ds in sets]

    assert sum(counts) * (256 << 10) > 0.7 * machine.nbytes
    assert max(counts) - min(counts) <= 4


def test_a_limit_that_the_user_set_is_followed_nearly_to_the_end(machine: Machine) -> None:
    """The user said how much; but never more than there is."""
    sets = [CachedDataset(Made(uniform, 300), max_memory=48 * MB) for _ in range(2)]
    for ds in sets:
        ds.fill(num_workers=0, progress=False)

    assert sets[0].cache_info().nbytes > 46 * MB
    assert 0.02 * machine.nbytes < machine.free_bytes() < 0.08 * machine.nbytes


def test_memory_that_others_take_stops_a_cache_until_they_free_it(machine: Machine, caplog: Any) -> None:
    """What was read meanwhile is stored when it is read again."""
    ds = CachedDataset(Made(uniform, 100))
    machine.others_bytes = 60 * MB
    with caplog.at_level(logging.WARNING, "fastload"):
        ds.fill(num_workers=0, progress=False)
        before = ds.cache_info().num_cached
        machine.others_bytes = 0
        ds.fill(num_workers=0, progress=False)
    (line,) = caplog.messages

    assert (before, ds.cache_info().num_cached) == (3, 100)
    assert "it holds 3 of 100 samples" in line


def test_all_processes_that_hold_a_cache_say_once_that_it_stopped(machine: Machine, caplog: Any) -> None:
    """The cache knows that it was said."""
    ds = CachedDataset(Made(uniform, 400), max_memory="1GB")
    other = pickle.loads(pickle.dumps(ds))
    with caplog.at_level(logging.WARNING, "fastload"):
        for one in (ds, other):
            one.fill(num_workers=0, progress=False)

    assert sum("when memory becomes free" in message for message in caplog.messages) == 1


def test_a_cache_that_has_taken_the_address_space_can_still_fill_it() -> None:
    """RLIMIT_AS counts the mapping, whether it is filled or not; only memory decides."""
    with limited(resource.RLIMIT_AS, mapped_bytes() + 300 * MB):
        ds = CachedDataset(Made(ragged, 400))
        ds.fill(num_workers=0, progress=False)

    assert (ds.cache_info().max_bytes or 0) > 200 * MB
    assert ds.cache_info().num_cached == 400
    assert_right(ds, ragged)


def test_a_cache_that_is_not_pressed_stores_without_reading_the_free_memory_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once for each 64 MB."""
    readings = []
    monkeypatch.setattr(arena, "unused_bytes", lambda: readings.append(1) or 1 << 40)
    monkeypatch.setattr(budget, "_CHECK_EVERY_S", 1e9)
    ds = CachedDataset(Images(300), max_memory="1GB")
    ds.fill(num_workers=0, progress=False)

    assert ds.cache_info().num_cached == 300
    assert len(readings) == 1
