"""Stages of a thread: exclusive times, and what a probed function does."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fastload.profiling import spans
from fastload.profiling.recording import Recording, read_recordings
from fastload.profiling.spans import BatchWatch, Spans, probe, stride_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def here() -> Iterator[Spans]:
    """A batch that is measured in this thread."""
    found = spans.here.spans = Spans()
    yield found
    spans.here.spans = None


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


def test_a_probe_returns_and_raises_what_the_function_does(here: Spans) -> None:
    """And leaves its stage after an error."""

    def divide(a: int, b: int = 2) -> float:
        return a / b

    probed = probe(divide, ("read", "divide"))

    assert probed(4, b=4) == 1.0
    with pytest.raises(ZeroDivisionError):
        probed(1, b=0)
    assert here.sums[("read", "divide")][0] == 2
    assert probed.__name__ == "divide"


@pytest.mark.parametrize(
    ("result", "size"),
    [
        (np.zeros((4, 5, 3), np.uint8), (60, 20)),
        (np.zeros((3, 40, 50), np.float32), (24_000, 2_000)),
        (np.zeros((4, 5), np.uint8), (20, 20)),
        (Image.new("RGB", (5, 4)), (60, 20)),
        (b"bytes", (0, 0)),
    ],
)
def test_sizes_of_images_are_recorded(result: Any, size: tuple[int, int], here: Spans) -> None:
    """Arrays of both layouts, and Pillow's images; other results have no size."""
    probe(lambda: result, ("decode", "it"), has_size=True)()

    assert tuple(here.sums[("decode", "it")][3:]) == size


def test_outside_of_a_measured_batch_a_probe_does_nothing() -> None:
    """It calls the function alone."""
    assert spans.here.spans is None
    assert probe(lambda: 7, ("read", "it"))() == 7


@given(num_events=st.integers(1, 10_000), wall_ns=st.integers(1, 10**9))
def test_measuring_costs_little(num_events: int, wall_ns: int) -> None:
    """At most about MAX_SHARE of the time, as long as the largest stride allows it."""
    stride = stride_of(num_events, wall_ns)

    cost = (spans.BATCH_NS + num_events * spans.EVENT_NS) / (stride * wall_ns)
    assert cost <= 1.5 * spans.MAX_SHARE or stride == spans.MAX_STRIDE


def test_the_third_batch_is_the_first_in_detail_and_an_error_undoes_the_switch(tmp_path: Path) -> None:
    """A batch that fails leaves no probe in place, and is not recorded."""
    switched: list[bool] = []
    recording = Recording(str(tmp_path))
    watch = BatchWatch(recording, 3, 1, switched.append)

    def fail() -> None:
        raise OSError("unreadable")

    assert [watch.measure(lambda: "a batch", 1) for _ in range(2)] == ["a batch"] * 2
    assert switched == []
    with pytest.raises(OSError, match="unreadable"):
        watch.measure(fail, 1)
    assert watch.measure(lambda: "a batch", 2) == "a batch"
    recording.close()
    batches, moments = read_recordings(str(tmp_path))

    assert switched == [True, False] * 2
    assert moments == []
    assert [(made.loader, made.worker, made.num_samples) for made in batches] == [
        (3, 1, 1),
        (3, 1, 1),
        (3, 1, 2),
    ]
    assert [len(made.stages) for made in batches] == [0, 0, 1]
