"""`num_workers="auto"`: what is chosen from what was measured, and that the trial leaves no trace here."""

from __future__ import annotations

import copy
import errno
import itertools
import logging
import os
import pickle
import random
import select
import time
from multiprocessing import process
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

import fastload
from fastload.system.logs import say_once
from fastload.workers import auto_workers, starting
from fastload.workers.auto_workers import AutoWorkers, Timing, fastest, safest
from tests.kit import datasets

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = st.floats(1e-5, 10.0)


@st.composite
def some_timings(draw: Any) -> dict[int, Timing]:
    """Of several numbers of workers."""
    num_batches = draw(st.integers(1, 1000))
    numbers = draw(st.sets(st.sampled_from([0, 1, 2, 4, 8, 64]), min_size=1))
    return {
        number: Timing(draw(SECONDS), draw(SECONDS), draw(SECONDS), num_batches, number > 0)
        for number in numbers
    }


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured decides nothing here, so that little is measured."""
    monkeypatch.setattr(auto_workers, "_EFFORT", auto_workers.Effort(0.001, 0.0, 0.0, 0.0))


class Counted:
    """Counts what this process reads."""

    def __init__(self) -> None:
        self.num_read = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        return datasets.image(index)


class Order:
    """A sampler that counts how often it is iterated."""

    def __init__(self) -> None:
        self.num_begun = 0

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Any:
        self.num_begun += 1
        return iter(range(64))


class Raises(Counted):
    def __getitem__(self, index: int) -> Any:
        raise KeyError("no such photo")


class Ends(Counted):
    def __getitem__(self, index: int) -> Any:
        os._exit(3)


class Hangs(Counted):
    def __getitem__(self, index: int) -> Any:
        select.select([], [], [])


@pytest.fixture
def forget() -> Iterator[None]:
    """What the system answered, and what was logged once, is forgotten before the test and after it."""
    for known in (starting.why_no_processes, say_once):
        known.cache_clear()
    yield
    for known in (starting.why_no_processes, say_once):
        known.cache_clear()


def _refuse(pid: int) -> int:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


def after_a_trial() -> auto_workers.AutoWorkers:
    """Batches take 10 ms without workers, and 20 ms with two."""
    auto = auto_workers.AutoWorkers(lambda _: None, None, 0)
    auto._has_tried = True
    auto._timings = {
        0: Timing(0.01, 0.01, 0.0, 100, has_workers=False),
        2: Timing(0.02, 0.02, 0.001, 100, has_workers=True),
    }
    return auto


# --- the choice -------------------------------------------------------------------------------------------


@given(timings=some_timings(), step_s=st.floats(0.0, 10.0), current=st.sampled_from([0, 1, 2, 4, 8, 64]))
def test_the_choice_for_a_known_step_is_at_most_3_percent_slower_than_the_best(
    timings: dict[int, Timing], step_s: float, current: int
) -> None:
    """Whatever was measured."""
    chosen = fastest(timings, step_s, current)
    least_s = min(timing.epoch_s(step_s) for timing in timings.values())
    assert timings[chosen].epoch_s(step_s) <= 1.03 * least_s * (1 + 1e-9)


@given(timings=some_timings())
def test_the_first_choice_has_the_best_worst_case(timings: dict[int, Timing]) -> None:
    """Over steps from none to the longest batch it is never so much slower as the others are somewhere."""
    steps_s = [0.0, *(timing.batch_s for timing in timings.values())]

    def worst(number: int) -> float:
        return max(
            timings[number].epoch_s(step_s) / min(other.epoch_s(step_s) for other in timings.values())
            for step_s in steps_s
        )

    assert worst(safest(timings)) <= 1.03 * min(map(worst, timings)) * (1 + 1e-9)


def test_a_number_that_is_as_good_stays() -> None:
    """Epochs do not flicker between two numbers."""
    timings = {number: Timing(0.1, 0.1, 0.001, 100, has_workers=True) for number in (1, 2, 4)}
    assert [fastest(timings, 0.0, current) for current in (1, 2, 4, 8)] == [1, 2, 4, 1]


def test_batches_that_workers_make_in_the_meantime_count_for_nothing() -> None:
    """Without workers a step waits for its batch; with them it waits for what the consumer does not hide."""
    alone = Timing(0.01, 0.01, 0.0, 101, has_workers=False)
    helped = Timing(0.02, 0.02, 0.001, 101, has_workers=True)
    assert alone.epoch_s(0.0) == pytest.approx(1.01)
    assert helped.epoch_s(0.0) == pytest.approx(2.02)
    assert alone.epoch_s(0.03) == pytest.approx(4.04)
    assert helped.epoch_s(0.03) == pytest.approx(0.02 + 0.03 + 100 * 0.031)


def test_a_later_epoch_is_chosen_by_what_the_consumer_does() -> None:
    """A consumer that computes gets workers, for one that does not the trial's fastest number is right."""
    auto = after_a_trial()
    chosen = []
    for step_s in (0.0, 0.03, 0.0):
        auto._step_s = step_s
        chosen.append(auto.choose(None))
    assert chosen == [0, 2, 0]


def test_the_consumer_s_steps_and_waits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a batch and the next call, and within that call, on average over the epoch."""
    loader = fastload.DataLoader(Counted(), 16, num_workers="auto")
    noted: list[Any] = []
    assert loader._auto_workers is not None
    monkeypatch.setattr(loader._auto_workers, "note_epoch", lambda *epoch: noted.append(epoch))
    clock = itertools.accumulate(
        itertools.cycle([500_000_000, 250_000_000])
    )  # looked at when a call begins, and when it ends
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
    assert len(list(loader)) == 4
    assert noted == [(loader.num_workers, 0.5, 0.25)]


def test_an_epoch_corrects_what_was_measured_badly() -> None:
    """A number that was left or chosen by a disturbed measurement is judged by its own epochs later."""
    auto = after_a_trial()
    auto.note_epoch(2, 0.0, 0.005)
    assert auto.choose(None) == 2
    auto.note_epoch(2, 0.0, 0.05)
    assert auto.choose(None) == 0
    auto.note_epoch(0, 0.0, 0.08)
    assert auto.choose(None) == 2
    auto.note_epoch(2, 0.03, 0.001)  # nothing was waited for, which says no more than that
    assert auto._timings[2].batch_s == pytest.approx(0.031)


# --- the trial --------------------------------------------------------------------------------------------


def test_the_number_is_an_int_and_the_log_explains_it(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the choice and an epoch's time for each number that was tried."""
    caplog.set_level(logging.INFO, "fastload")
    loader = fastload.DataLoader(Counted(), 16, num_workers="auto")
    assert type(loader.num_workers) is int
    assert loader.prefetch_factor == (2 if loader.num_workers else None)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f'num_workers="auto": {loader.num_workers}, measured in ')
    assert "0: " in line
    assert f"{loader.num_workers}: " in line
    fixed = fastload.DataLoader(Counted(), 16, num_workers=loader.num_workers)
    for ours, theirs in zip(loader, fixed, strict=True):
        assert torch.equal(ours[0], theirs[0])


def test_the_trial_reads_and_draws_nothing_here() -> None:
    """Samples, samplers, generators and torch's, NumPy's and Python's random streams are untouched."""
    dataset, order, generator = Counted(), Order(), torch.Generator()
    random.seed(1), np.random.seed(2), torch.manual_seed(3)

    def states() -> list[Any]:
        streams = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        return [*streams, torch.get_rng_state().tolist(), generator.get_state().tolist()]

    before = states()
    loader = fastload.DataLoader(dataset, 16, sampler=order, num_workers="auto", generator=generator)
    assert loader.sampler is order
    assert loader.generator is generator
    assert (dataset.num_read, order.num_begun) == (0, 0)
    assert states() == before


@pytest.mark.parametrize(
    "option",
    [
        {"persistent_workers": True},
        {"prefetch_factor": 3},
        {"timeout": 20},
        {"multiprocessing_context": "fork"},
    ],
    ids=str,
)
def test_arguments_of_workers_want_workers(option: dict[str, Any]) -> None:
    """At least one, whatever is faster."""
    with fastload.DataLoader(Counted(), 16, num_workers="auto", **option) as loader:
        assert loader.num_workers >= 1
        assert len(list(loader)) == 4


@pytest.mark.slow
def test_the_trial_starts_its_process_and_workers_as_the_loader_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By spawning them, so that all arguments of the loader are pickled."""
    caplog.set_level(logging.INFO, "fastload")
    with fastload.DataLoader(
        Counted(), 16, num_workers="auto", multiprocessing_context="spawn", persistent_workers=True
    ) as loader:
        assert "measured in" in caplog.text
        assert len(list(loader)) == 4


def test_threads() -> None:
    """Threads are tried in the process of the trial, and used here."""
    with fastload.DataLoader(
        Counted(), 16, num_workers="auto", worker_method="thread", prefetch_factor=2
    ) as loader:
        assert len(list(loader)) == 4


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Raises(), "KeyError: KeyError: 'no such photo'"),
        (Ends(), "WorkerDiedError"),
    ],
    ids=["raises", "ends"],
)
def test_a_trial_that_fails_is_a_warning(dataset: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """There are then as many workers as CPUs, and the first epoch raises what is wrong."""
    loader = fastload.DataLoader(dataset, 16, num_workers="auto")
    assert loader.num_workers == min(auto_workers.worthwhile_cpus(), 16)
    assert f'num_workers="auto": {loader.num_workers}, because the trial failed: {reason}' in caplog.text
    for _ in range(2):
        with pytest.raises((KeyError, fastload.WorkerDiedError)):
            list(loader)
    assert caplog.text.count("the trial failed") == 1


def test_a_trial_that_hangs_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process and its workers are gone then: see the leak guard."""
    monkeypatch.setattr(auto_workers, "_LIMIT_S", 0.1)
    loader = fastload.DataLoader(Hangs(), 16, num_workers="auto")
    assert loader.num_workers >= 1
    assert "because the trial failed: it took more than" in caplog.text


@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "refused"])
def test_a_system_without_pidfd_open_is_measured_with_torchs_workers(
    is_missing: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, forget: None
) -> None:
    """One log line has the number and its times; the first epoch's warning has the reason."""
    if is_missing:
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", _refuse)
    caplog.set_level(logging.INFO, "fastload")
    loader = fastload.DataLoader(Counted(), 16, num_workers="auto", prefetch_factor=2)
    (chosen,) = [record.getMessage() for record in caplog.records]
    caplog.clear()
    batches = [len(list(loader)) for _ in range(2)]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    assert 1 <= loader.num_workers <= 2 * min(auto_workers.worthwhile_cpus(), 16)
    assert chosen.startswith(f'num_workers="auto": {loader.num_workers}, measured in ')
    assert batches == [4, 4]
    reason = "this platform has no pidfd_open" if is_missing else "this system refuses pidfd_open: [Errno 1]"
    assert [line.partition(reason)[:2] for line in warnings] == [
        ("workers use torch's own transport: ", reason)
    ]


def test_a_process_that_may_start_none_has_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a worker of another loader, which is a daemon."""

    class Daemon:
        daemon = True

    monkeypatch.setattr(process, "current_process", Daemon)
    assert fastload.DataLoader(Counted(), 16, num_workers="auto").num_workers == 0


def test_a_cache_that_is_full_is_measured_anew(caplog: pytest.LogCaptureFixture) -> None:
    """Once: what is read from the cache needs other workers than what fills it."""
    caplog.set_level(logging.INFO, "fastload.auto")
    dataset = fastload.CachedDataset(Counted(), cache="ram")
    loader = fastload.DataLoader(dataset, 16, num_workers="auto")
    dataset.fill(num_workers=0, progress=False)
    caplog.set_level(logging.INFO, "fastload")
    caplog.clear()
    for _ in range(3):
        assert len(list(loader)) == 4
    assert caplog.text.count("measured in") <= 1
    assert loader._auto_workers is not None
    assert not loader._auto_workers._was_filling


# --- bad input, copies ------------------------------------------------------------------------------------


def test_a_stream_needs_a_number() -> None:
    """What each worker reads of it depends on the number."""
    with pytest.raises(ValueError, match='"auto" needs a map-style dataset, but the dataset is a Stream'):
        fastload.DataLoader(Stream(), num_workers="auto")


def test_other_words_are_refused() -> None:
    """With what is allowed."""
    with pytest.raises(ValueError, match="num_workers should be an int or \"auto\", but got 'many'"):
        fastload.DataLoader(Counted(), num_workers="many")  # type: ignore[arg-type]


def test_loaders_can_be_copied_and_pickled() -> None:
    """With the number that was chosen."""
    loader = fastload.DataLoader(Counted(), 16, num_workers="auto")
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.num_workers == loader.num_workers
        assert len(list(other)) == 4


def test_persistent_workers_give_way_when_another_number_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next epoch has the new number of workers, and the same batches."""
    numbers = iter([1, 1, 2, 2, 2, 2])
    monkeypatch.setattr(AutoWorkers, "choose", lambda *_: next(numbers))
    loader = fastload.DataLoader(range(8), 2, num_workers="auto", persistent_workers=True)
    found = [([batch.tolist() for batch in loader], loader.num_workers) for _ in range(3)]
    loader.close()

    assert [batches for batches, _ in found] == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3
    assert found[0][1] == 1
    assert found[-1][1] == 2
