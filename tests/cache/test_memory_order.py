"""A model of processors that reorder memory accesses, over what shared caches really do.

A process is a list of steps: a store, a load, or a fence. The model runs every order that the processor
allows: each step happens at once for all processes, but the steps of a process change places unless the
processor, a fence, their location or an address dependency keeps them in order. For such programs, this is
ARMv8's model, which is "other-multi-copy atomic". The writers' steps are recorded from the code.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastload.cache.ram import arena
from fastload.cache.ram.arena import CURSOR_AT, TABLE_AT
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.cache.ram.table import Table
from fastload.memory.segment import Segment
from tests.cache.zoo import Images, RaggedImages

FENCE, STORE, LOAD = "fence", "store", "load"
INDEX = 3


class Step(NamedTuple):
    """One access of a process, or a fence."""

    kind: str
    place: str = ""
    after: str = ""  # the place of the earlier load from which this load's address is computed


store, load = functools.partial(Step, STORE), functools.partial(Step, LOAD)


def on_arm(first: Step, second: Step) -> bool:
    """Whether the second of two steps of one process waits for the first one, on ARMv8."""
    is_fenced = FENCE in (first.kind, second.kind)
    return is_fenced or first.place == second.place or (first.kind == LOAD and second.after == first.place)


def on_x86(first: Step, second: Step) -> bool:
    """The same on x86, where only a load can overtake a store."""
    return (first.kind, second.kind) != (STORE, LOAD) or on_arm(first, second)


def loads_seen(processes: list[list[Step]], waits: Any) -> set[frozenset[str]]:
    """For every possible run: the places whose load, in any process, saw the store."""

    @functools.cache
    def run(left: tuple[tuple[int, ...], ...], stored: frozenset[str]) -> frozenset[frozenset[str]]:
        found = set() if any(left) else {frozenset[str]()}
        for number, steps in enumerate(left):
            process = processes[number]
            for step in steps:
                if any(other < step and waits(process[other], process[step]) for other in steps):
                    continue
                kind, place, _ = process[step]
                rest = *left[:number], tuple(s for s in steps if s != step), *left[number + 1 :]
                saw = frozenset({place} if kind == LOAD and place in stored else ())
                later = run(rest, stored | {place} if kind == STORE else stored)
                found |= {saw | seen for seen in later}
        return frozenset(found)

    return set(run(tuple(tuple(range(len(process))) for process in processes), frozenset()))


def is_safe(processes: list[list[Step]], flag: str, waits: Any) -> bool:
    """Whether a run that loads the flag as stored loads all other places as stored, too."""
    places = {step.place for process in processes for step in process if step.kind == LOAD}
    return all(seen == places for seen in loads_seen(processes, waits) if flag in seen)


@pytest.fixture
def steps(monkeypatch: Any) -> list[Step]:
    """What this process does to segments from here on; a write of several words is a step for each half."""
    recorded: list[Step] = []

    def name(offset: int, nbytes: int) -> list[str]:
        if TABLE_AT <= offset < TABLE_AT + 4096:
            return ["entry"]
        halves = [f"sample at {offset}", f"sample at {offset + nbytes // 2}"]
        return ["cursor"] if offset == CURSOR_AT else halves

    write, pread, publish = Segment.write, os.pread, arena.Arena.publish

    def recorded_write(segment: Segment, data: Any, offset: int = 0) -> None:
        places = name(offset, len(data))
        recorded.extend(map(store, ["torn entry"] if places == ["entry"] else places))
        write(segment, data, offset)

    def recorded_pread(fd: int, nbytes: int, offset: int) -> bytes:
        recorded.extend(map(load, name(offset, nbytes)))
        return pread(fd, nbytes, offset)

    def recorded_publish(self: arena.Arena, index: int, entry: int) -> None:
        fences_after: list[Step] = []

        def recorded_fence() -> None:
            is_stored = self.entries[index] == entry
            (fences_after if is_stored else recorded).append(Step(FENCE))

        with monkeypatch.context() as patch:
            patch.setattr(arena, "fence", recorded_fence)
            publish(self, index, entry)
        recorded.extend([store("entry"), *fences_after])

    monkeypatch.setattr(Segment, "write", recorded_write)
    monkeypatch.setattr(os, "pread", recorded_pread)
    monkeypatch.setattr(arena.Arena, "publish", recorded_publish)
    monkeypatch.setattr(arena, "fence", lambda: recorded.append(Step(FENCE)))
    return recorded


def of(recorded: list[Step], *places: str) -> list[Step]:
    """The fences, and the steps at these places; of the stores of a sample the first and the last two."""
    steps = [step for step in recorded if step.kind == FENCE or step.place.startswith(places)]
    sample = [step for step in steps if step.place.startswith("sample")]
    return [step for step in steps if step not in sample[2:-2]]


@pytest.mark.parametrize("kind", [Images, RaggedImages])
def test_a_sample_is_complete_wherever_its_entry_is_seen(kind: Any, steps: list[Step]) -> None:
    """On ARM, by the fence of `put` and by addresses that depend on the entry; also with two writers."""
    samples = [kind(8).sample(i) for i in range(8)]
    cache = SharedMemoryCache(8, samples, max_memory=1 << 20)
    steps.clear()
    assert cache.put(INDEX, samples[INDEX])

    writer = of(steps, "sample", "entry")
    places = [step.place for step in writer if step.kind == STORE and step.place != "entry"]
    reader = [load("entry"), *(load(place, after="entry") for place in places)]
    careless = [load("entry"), *map(load, places)]  # a gather by index that only looks whether entries are 0
    without = [step for step in writer if step.kind != FENCE]
    assert len(places) == 4
    assert is_safe([writer, reader], "entry", on_arm)
    assert kind is RaggedImages or is_safe([writer, writer, reader], "entry", on_arm)  # which write the same
    assert not is_safe([writer, careless], "entry", on_arm)
    assert not is_safe([without, reader], "entry", on_arm)
    assert is_safe([without, reader], "entry", on_x86)


def test_a_file_is_complete_wherever_its_entry_leads_to_it(steps: list[Step]) -> None:
    """On ARM, by the fence before the entry and by addresses that are computed from it."""
    table = Table.create(1 << 20, "a name", 0)
    steps.clear()
    assert table.put(bytes(16), [np.arange(999)], 999 * 8)

    taken = next(place for place, step in enumerate(steps) if step == store("entry"))
    written = [step for step in steps[:taken] if step.place.startswith("sample")]
    writer = of(steps[taken + 1 :], "sample", "entry")
    places = [step.place for step in writer if step.kind == STORE and step.place != "entry"]
    reader = [load("entry"), *(load(place, after="entry") for place in places)]
    without = [step for step in writer if step.kind != FENCE]
    assert written == []
    assert len(places) == 4
    assert is_safe([writer, reader], "entry", on_arm)
    assert not is_safe([writer, [load("entry"), *map(load, places)]], "entry", on_arm)
    assert not is_safe([without, reader], "entry", on_arm)
    assert is_safe([without, reader], "entry", on_x86)


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
