"""Recordings, the stages of a thread, and predictions: what can be worked out by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastload.profiling import recording, spans
from fastload.profiling.prediction import LoaderModel, simulate
from fastload.profiling.recording import Batch, Event, Recording, read_recordings
from fastload.profiling.spans import Spans, probe, stride_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def made(number: int) -> Batch:
    """A batch that can be told from others."""
    return Batch(3, 1, number, number + 1, 1, 2, 0, 4, [["decode", "imread", [2, 11, 6, 600, 200]]])


@settings(max_examples=50)
@given(name=st.text(max_size=400))
def test_what_is_written_is_read(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of several processes, also while they go on; batches by their time."""
    directory = str(tmp_path_factory.mktemp("recording"))
    writers = [Recording(directory), Recording(directory)]
    for number, writer in enumerate(writers):
        writer.add(made(10 - number))
    writers[0].add(Event(-1, -1, "pin", 5, name))
    found = read_recordings(directory)
    for writer in writers:
        writer.close()
    assert found == ([made(9), made(10)], [Event(-1, -1, "pin", 5, name)])


def test_recordings_that_end_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit, in the middle of a line, or by an error of the file system: nothing fails."""
    monkeypatch.setattr(recording, "MAX_LINES", 4)
    writer = Recording(str(tmp_path))
    for number in range(6):
        writer.add(made(number))
    writer.close()
    writer.add(made(0))  # here the file is closed
    assert read_recordings(str(tmp_path)) == ([made(number) for number in range(4)], [])
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    assert read_recordings(str(tmp_path)) == ([made(number) for number in range(3)], [])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50).map(lambda n: 2 * n)), max_size=40))
def test_each_stage_has_the_time_without_the_stages_that_it_calls(moves: list[tuple[bool, int]]) -> None:
    """However stages nest, every nanosecond between the first and the last belongs to one of them."""
    now = [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans.time, "perf_counter_ns", lambda: now[0])
        patch.setattr(spans.time, "thread_time_ns", lambda: now[0] // 2)
        measured = Spans()
        stages = [("dataset", "")]
        measured.enter(stages[0])
        expected: Counter[Any] = Counter()
        for number, (is_entering, passed) in enumerate(moves):
            now[0] += passed
            expected[stages[-1]] += passed
            if is_entering:
                stages.append(("read", str(number % 3)))
                measured.enter(stages[-1])
            elif len(stages) > 1:
                measured.leave()
                stages.pop()
        for _ in stages:
            measured.leave()
    assert all(sums[1:3] == [expected[name], expected[name] // 2] for name, sums in measured.sums.items())
    assert sum(sums[1] for sums in measured.sums.values()) == now[0]


@pytest.mark.parametrize(
    ("result", "size"),
    [
        (np.zeros((4, 5, 3), np.uint8), (60, 20)),
        (np.zeros((3, 40, 50), np.float32), (24_000, 2_000)),
        (np.zeros((4, 5), np.uint8), (20, 20)),
        (Image.new("RGB", (5, 4)), (60, 20)),
        (Image.new("I;16", (5, 4)), (40, 20)),
        (Image.new("1", (8, 4)), (4, 32)),
        (b"bytes", (0, 0)),
    ],
)
def test_sizes_of_images_are_recorded(result: Any, size: tuple[int, int], monkeypatch: Any) -> None:
    """Arrays of both layouts, and Pillow's images; other results have no size."""
    monkeypatch.setattr(spans.this_thread, "spans", found := Spans())
    probe(lambda: result, ("decode", "it"), size_of=spans.size_of)()
    assert tuple(found.sums[("decode", "it")][3:]) == size


@given(num_events=st.integers(1, 10_000), wall_ns=st.integers(1, 10**9))
def test_measuring_costs_little(num_events: int, wall_ns: int) -> None:
    """At most about MAX_SHARE of the time, as long as the largest stride allows it."""
    stride = stride_of(num_events, wall_ns)
    cost = (spans.BATCH_NS + num_events * spans.EVENT_NS) / (stride * wall_ns)
    assert cost <= 1.5 * spans.MAX_SHARE or stride == spans.MAX_STRIDE


times = st.floats(1e-4, 1.0)


@given(compute_s=times, make_s=times, num_workers=st.integers(0, 8), prefetch_factor=st.integers(1, 4))
def test_equal_batches(compute_s: float, make_s: float, num_workers: int, prefetch_factor: int) -> None:
    """The consumer's time, or the workers' divided by their number; without workers, both times add up."""
    step_s = simulate([compute_s], [[make_s]], num_workers, prefetch_factor)
    slower_s = max(compute_s, make_s / num_workers) if num_workers else compute_s + make_s
    assert slower_s * 0.97 <= step_s
    if prefetch_factor > 1 or num_workers == 0:
        assert step_s <= slower_s * 1.03


@given(make_s=st.floats(0.01, 1.0))
def test_one_slow_worker_stops_the_others(make_s: float) -> None:
    """Batches come in turn: two workers are as fast as twice the slower one."""
    step_s = simulate([1e-6], [[make_s], [5 * make_s]], 2, 2)
    assert step_s == pytest.approx(2.5 * make_s, rel=0.05)


# What is known, what changes, and by how many times that is faster.
WAITING, SATURATED = {"num_cpus": 2.0, "make_cpu_s": 0.004}, {"num_cpus": 2.0, "is_saturated": True}
GAINS: list[tuple[dict[str, Any], Callable[[LoaderModel], LoaderModel], float]] = [
    ({}, lambda one: one.with_workers(4), 2.0),  # on 8 CPUs, twice the workers
    ({"num_cpus": 2.0}, lambda one: one.with_workers(4), 1.0),  # the CPUs are used up
    (WAITING, lambda one: one.with_workers(8), 4.0),  # workers that wait need none
    ({}, lambda one: one.scaled(0.5, 0.5), 2.0),  # half the work
    ({"computes": [0.015]}, lambda one: one.scaled(0.01, 0.01), 20 / 15),  # the consumer limits every gain
    # All processes wait for CPUs: sparing their time speeds the consumer up.
    (SATURATED | {"computes": [0.03], "consumer_cpu_s": 0.02}, lambda one: one.scaled(0.25, 0.25), 2.0),
]


@pytest.mark.parametrize(("known", "change", "gain"), GAINS)
def test_gains_by_hand(
    known: dict[str, Any], change: Callable[[LoaderModel], LoaderModel], gain: float
) -> None:
    """Of a loader bound by its two workers: 40 ms for a batch, 1 ms of computing."""
    model = dataclasses.replace(LoaderModel([0.001], [[0.04], [0.04]], 2, 2, 0.04, 0.001, 8.0), **known)
    assert model.gain_to(change(model)) == pytest.approx(gain, rel=0.05)
