"""The order in which writers of shared caches store, and readers find: right on processors that reorder, too.

On ARMv8, stores of one process to different places can be seen in another order, unless a fence lies between
them; a load waits for an earlier one if its address is computed from that. So a record must be fenced off
from the entry that leads to it, and a reader must compute where it lies from the entry.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from fastload.cache.ram import arena
from fastload.cache.ram.arena import CURSOR_AT, TABLE_AT
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.memory.segment import Segment
from tests.cache.zoo import Images


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this process does to segments from here on: stores to a record, to its entry, and fences."""
    recorded: list[str] = []
    write, publish = Segment.write, arena.Arena.publish

    def recorded_write(segment: Segment, data: Any, offset: int = 0) -> None:
        if offset != CURSOR_AT:  # which is read under a lock
            assert not TABLE_AT <= offset < TABLE_AT + 4096, "an entry can be seen half written"
            recorded.append("record")
        write(segment, data, offset)

    def recorded_publish(self: arena.Arena, index: int, entry: int) -> None:
        def fence() -> None:
            recorded.append("late fence" if self.entries[index] == entry else "fence")

        with monkeypatch.context() as patch:
            patch.setattr(arena, "fence", fence)
            publish(self, index, entry)
        recorded.append("entry")

    monkeypatch.setattr(Segment, "write", recorded_write)
    monkeypatch.setattr(arena.Arena, "publish", recorded_publish)
    return recorded


def test_a_row_is_complete_wherever_its_entry_is_seen(steps: list[str]) -> None:
    """The entry is stored once, behind a fence, which lies behind all of the sample."""
    samples = [Images(8).sample(i) for i in range(8)]
    cache = SharedMemoryCache(8, samples, max_memory=1 << 20)
    steps.clear()
    assert cache.put(3, samples[3])
    assert [name for name, _ in itertools.groupby(steps)] == ["record", "fence", "entry"]


def test_a_record_is_complete_wherever_its_entry_leads_to_it(steps: list[str]) -> None:
    """All of it is stored before the entry leads to it, also where this led to another one before."""
    fields = {"kind": "files", "name": "a name", "levels": [1], "records_at": arena.table_end(1)}
    table = arena.Arena.create(fields | {"room_bytes": 1 << 20, "entry_bytes": 8}, 1 << 20, 0)
    for number in range(2):
        steps.clear()
        assert table.put(bytes([number] * 16), [np.arange(999)])
        assert [name for name, _ in itertools.groupby(steps)] == ["record", "fence", "entry"]


def test_rows_are_read_where_their_entries_lead() -> None:
    """Entries that lead to other rows change what is read, one by one and as a batch."""
    samples = [Images(8).sample(i) for i in range(8)]
    cache = SharedMemoryCache(8, samples, max_memory=1 << 20)
    for index in range(8):
        cache.put(index, samples[index])
    for index in range(8):
        cache._arena.publish(index, 2 * (7 - index) + 1)

    images, _ = cache.gather(np.arange(8), np.empty)
    for index in range(8):
        np.testing.assert_array_equal(cache.get(index)[0], samples[7 - index][0])
        np.testing.assert_array_equal(images[index], samples[7 - index][0])
