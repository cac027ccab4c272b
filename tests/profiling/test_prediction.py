"""Predictions: the order of events gives the times that can be worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.profiling.prediction import Model, simulate

times = st.floats(1e-4, 1.0)


@given(compute_s=times, make_s=times)
def test_without_workers_times_add_up(compute_s: float, make_s: float) -> None:
    """The consumer makes each batch itself."""
    assert simulate([compute_s], [[make_s]], 0, 2) == pytest.approx(compute_s + make_s)


@given(compute_s=times, make_s=times, num_workers=st.integers(1, 8), prefetch_factor=st.integers(1, 4))
def test_equal_batches_take_the_slower_of_both_sides(
    compute_s: float, make_s: float, num_workers: int, prefetch_factor: int
) -> None:
    """The consumer's time, or the workers' divided by their number."""
    step_s = simulate([compute_s], [[make_s]], num_workers, prefetch_factor)
    slower_s = max(compute_s, make_s / num_workers)

    assert slower_s * 0.97 <= step_s
    if prefetch_factor > 1:
        assert step_s <= slower_s * 1.03


@given(make_s=st.floats(0.01, 1.0))
def test_one_slow_worker_stops_the_others(make_s: float) -> None:
    """Batches come in turn: two workers are as fast as twice the slower one."""
    step_s = simulate([1e-6], [[make_s], [5 * make_s]], 2, 2)

    assert step_s == pytest.approx(2.5 * make_s, rel=0.05)


def model(**changed: object) -> Model:
    """A loader bound by its two workers: 40 ms for a batch, 1 ms of computing."""
    known = Model([0.001], [[0.04], [0.04]], 2, 2, 0.04, 0.001, 8.0)
    return dataclasses.replace(known, **changed)  # type: ignore[arg-type]


def test_more_workers_help_until_the_cpus_are_used_up() -> None:
    """On 8 CPUs twice the workers are twice as fast; on 2 they are not faster."""
    assert model().gain_to(model().with_workers(4)) == pytest.approx(2.0, rel=0.05)
    few = model(num_cpus=2.0)
    assert few.gain_to(few.with_workers(4)) == pytest.approx(1.0, rel=0.05)


def test_workers_that_wait_need_no_cpus() -> None:
    """A batch of which 10% is computing."""
    waiting = model(num_cpus=2.0, make_cpu_s=0.004)

    assert waiting.gain_to(waiting.with_workers(8)) == pytest.approx(4.0, rel=0.05)


def test_half_the_work_is_twice_as_fast() -> None:
    """As long as the consumer is not the limit."""
    assert model().gain_to(model().scaled(0.5, 0.5)) == pytest.approx(2.0, rel=0.05)


def test_the_consumer_limits_every_gain() -> None:
    """Steps of 15 ms of computing beside 20 ms of loading."""
    bound = model(computes=[0.015])

    assert bound.gain_to(bound.scaled(0.01, 0.01)) == pytest.approx(20 / 15, rel=0.05)


def test_on_saturated_cpus_sparing_cpu_time_speeds_the_consumer_up() -> None:
    """All processes wait for CPUs: the step's time follows the CPU time of all."""
    busy = model(computes=[0.03], make_cpu_s=0.04, consumer_cpu_s=0.02, num_cpus=2.0, is_saturated=True)

    assert busy.gain_to(busy.scaled(0.25, 0.25)) == pytest.approx(2.0, rel=0.05)
