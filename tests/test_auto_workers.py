"""`num_workers="auto"`: the formula, its figures from the counters, and what a loader does with both."""

from __future__ import annotations

import copy
import itertools
import logging
import multiprocessing
import pickle
import random
from multiprocessing import process
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastload
from fastload import loader as loader_module
from fastload.epochs.loader_state import recorder_of
from fastload.epochs.stats import Recorder
from fastload.system.logs import say_once
from fastload.workers import auto_workers
from fastload.workers.auto_workers import ENOUGH_BATCHES, AutoWorkers, Pace, best_number
from fastload.workers.messages import WorkerCounters
from tests.kit import datasets, torchs_own
from tests.resume.zoo import Counting

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = st.floats(0.0, 10.0)
PACES = st.builds(Pace, SECONDS, SECONDS, SECONDS, SECONDS)
CPUS, MINIMUM, CURRENT = st.integers(1, 64), st.integers(0, 1), st.integers(0, 64)
IMAGES = datasets.Made(datasets.image, 64)
NEED_WORKERS: Any = {
    "persistent_workers": True,
    "prefetch_factor": 3,
    "timeout": 20,
    "worker_init_fn": print,
    "multiprocessing_context": "fork",
}


@pytest.fixture
def forget() -> Iterator[None]:
    """What was logged once is forgotten before the test and after it."""

    def clear() -> None:
        say_once.cache_clear(), loader_module._warn_of_workers.cache_clear()

    clear()
    yield
    clear()


@pytest.fixture
def chosen(caplog: pytest.LogCaptureFixture) -> Any:
    """The choices in the log, in their order."""
    caplog.set_level(logging.INFO, "fastload")

    def read() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        return [line.removeprefix('num_workers="auto": ') for line in lines if line.startswith("num_workers")]

    return read


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the CPUs of this rank; 4 until then."""

    def set_to(number: int) -> None:
        monkeypatch.setattr(auto_workers, "rank_cpus", lambda: number)

    set_to(4)
    return set_to


@pytest.fixture
def paces(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the counters of every loader give before each of the next epochs."""

    def set_to(*given: Pace | None) -> None:
        left = iter(given)
        monkeypatch.setattr(Recorder, "new_pace", lambda *_: next(left))

    return set_to


# --- the formula ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pace", "num_cpus", "minimum", "current", "number"),
    [
        (Pace(0.08, 0.02, 0.0), 16, 0, 16, 5),  # 4 workers on average, 1.25 times as many: batches vary
        (Pace(0.08, 0.02, 0.0), 16, 0, 8, 8),  # between 1.1 and 2 times: it stays
        (Pace(0.08, 0.02, 0.0), 16, 0, 4, 5),
        (Pace(0.08, 0.02, 0.08), 16, 0, 0, 5),
        (Pace(0.08, 0.02, 0.01), 3, 0, 3, 3),  # there are no more CPUs
        (Pace(0.08, 0.0, 0.04), 16, 0, 2, 16),  # the consumer only takes batches
        (Pace(0.04, 0.02, 0.01), 16, 0, 3, 6),  # 4.5: it waits, though workers are idle at times
        (Pace(0.04, 0.02, 0.001), 16, 0, 3, 3),
        (Pace(0.001, 0.1, 0.0), 16, 0, 16, 1),  # a cheap batch is ready while the consumer computes
        (Pace(0.0005, 0.1, 0.0), 16, 0, 16, 0),  # receiving it takes as long
        (Pace(0.0005, 0.1, 0.0), 16, 1, 16, 1),
        (Pace(0.001, 0.1, 0.001), 16, 0, 0, 0),  # to begin again, workers must save more
        (Pace(0.01, 0.0, 0.0095), 2, 0, 2, 0),  # workers are no faster than the consumer would be
        (Pace(0.08, 0.0, 0.08), 2, 0, 1, 2),  # but two would be
        (Pace(0.01, 0.01, 0.0, start_s=0.02), 16, 0, 2, 0),  # starting them takes longer
        (Pace(0.01, 0.01, 0.01), 1, 0, 0, 1),  # on one CPU, the consumer can wait for a GPU meanwhile
        (Pace(0.01, 0.0, 0.01), 1, 0, 0, 0),  # this one does not
    ],
)
def test_the_formula(pace: Pace, num_cpus: int, minimum: int, current: int, number: int) -> None:
    """Each of its parts decides somewhere."""
    assert best_number(pace, num_cpus, minimum, current) == number


@given(PACES, CPUS, MINIMUM, CURRENT)
def test_the_number_is_between_the_minimum_and_the_cpus(
    pace: Pace, num_cpus: int, minimum: int, current: int
) -> None:
    """Whatever was measured."""
    assert minimum <= best_number(pace, num_cpus, minimum, current) <= num_cpus


@given(PACES, SECONDS, CPUS, MINIMUM, CURRENT)
def test_slower_workers_are_never_fewer(
    pace: Pace, more_s: float, num_cpus: int, minimum: int, current: int
) -> None:
    """The number grows with the time in which a worker is busy with a batch."""
    slower = pace._replace(busy_s=pace.busy_s + more_s)
    before, after = (best_number(one, num_cpus, minimum, current) for one in (pace, slower))
    assert before <= after


@given(SECONDS, SECONDS, SECONDS, CPUS, MINIMUM, CURRENT)
def test_a_number_that_suffices_stays(
    busy_s: float, step_s: float, start_s: float, num_cpus: int, minimum: int, current: int
) -> None:
    """The formula settles at once if the consumer does not wait for workers."""

    def following(number: int) -> int:
        wait_s = 0.0 if number else busy_s
        return best_number(Pace(busy_s, step_s, wait_s, start_s), num_cpus, minimum, number)

    number = following(current)
    assert following(number) == number


@given(st.floats(0.0, 0.1), st.floats(0.001, 1.0), CPUS, st.integers(1, 64))
def test_a_consumer_that_keeps_waiting_gets_all_cpus(
    busy_s: float, step_s: float, num_cpus: int, current: int
) -> None:
    """Each choice is larger than the one before, until there are no more CPUs."""
    numbers = [min(current, num_cpus)]
    while len(numbers) < 2 or numbers[-1] != numbers[-2]:
        numbers.append(best_number(Pace(busy_s, step_s, wait_s=step_s), num_cpus, 1, numbers[-1]))
    assert numbers[-1] == num_cpus
    assert numbers == sorted(numbers)


@given(SECONDS, st.floats(1e-6, 10.0), CPUS)
def test_the_number_suffices(busy_s: float, step_s: float, num_cpus: int) -> None:
    """With workers that are always as fast, the consumer never waits, or every CPU has a worker."""
    number = best_number(Pace(busy_s, step_s, 0.0), num_cpus, 1, num_cpus)
    assert busy_s / number <= step_s or number == num_cpus


# --- its figures ------------------------------------------------------------------------------------------


def counted(num_batches: int, num_epochs: int = 1) -> Recorder:
    """Batches that took a worker 30 ms, the consumer 20 ms and 10 ms of waiting; the first ones, 90 ms."""
    recorder = Recorder()
    add(recorder, num_batches, num_epochs)
    return recorder


def add(recorder: Recorder, num_batches: int, num_epochs: int = 1) -> None:
    counts = recorder.counts
    counts.num_batches += num_batches
    counts.num_epochs += num_epochs
    counts.step_ns += num_batches * 20_000_000
    counts.wait_ns += (num_batches - num_epochs) * 10_000_000
    counts.first_wait_ns += num_epochs * 90_000_000
    recorder.add(WorkerCounters(num_batches * 30_000))


@pytest.mark.parametrize(
    ("num_workers", "pace"), [(0, Pace(0.01, 0.02, 0.01)), (2, Pace(0.03, 0.02, 0.01, 0.06 / 20))]
)
def test_a_pace_is_made_of_means(num_workers: int, pace: Pace) -> None:
    """Without workers, the waits are the time that batches take to make."""
    assert counted(20).new_pace(num_workers) == pytest.approx(pace)


def test_few_batches_are_no_pace_and_add_up() -> None:
    """Epochs left early count together; a pace counts only what came after the last one."""
    recorder = counted(4, 2)
    assert recorder.new_pace(2) is None
    add(recorder, ENOUGH_BATCHES, 2)
    assert recorder.new_pace(2) == pytest.approx(Pace(0.03, 0.02, 0.01, 4 * 0.06 / 20))
    assert recorder.new_pace(2) is None
    assert recorder.stats().num_batches == 4 + ENOUGH_BATCHES


def test_workers_that_do_not_tell_their_work_have_no_pace() -> None:
    """Those of torch's own transport."""
    recorder = counted(100)
    recorder.counts.busy_us = 0
    assert recorder.new_pace(2) is None


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_a_loader_counts_the_work_of_its_workers(worker_type: Any) -> None:
    """So after an epoch there is a pace."""
    with fastload.DataLoader(IMAGES, 2, num_workers=1, worker_type=worker_type) as loader:
        list(loader)
        pace = recorder_of(loader).new_pace(1)
    assert pace is not None
    assert pace.busy_s > 0


# --- the choices of a loader ------------------------------------------------------------------------------


def numbers_of(loader: Any, num_epochs: int) -> list[int]:
    """The number of workers in each epoch, of which one batch is taken."""
    numbers = []
    for _ in range(num_epochs):
        next(iter(loader))
        numbers.append(loader.num_workers)
    return numbers


@pytest.mark.parametrize(("num_cpus", "number"), [(1, 0), (2, 2), (3, 3), (99, 16)])
def test_a_new_loader_has_one_worker_per_cpu(num_cpus: int, number: int, cpus: Any) -> None:
    """At most 16, and none on one CPU; nothing is read or started."""
    cpus(num_cpus)
    loader = fastload.DataLoader(datasets.Made(None, 64), 16, num_workers="auto")
    assert type(loader.num_workers) is int
    assert (loader.num_workers, loader.prefetch_factor) == (number, 2 if number else None)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("name", NEED_WORKERS)
def test_arguments_for_workers_ask_for_one(name: str, cpus: Any) -> None:
    """Also on one CPU and in short epochs."""
    cpus(1)
    with fastload.DataLoader(range(4), 4, num_workers="auto", **{name: NEED_WORKERS[name]}) as loader:
        assert loader.num_workers == 1
        assert numbers_of(loader, 1) == [1]


def test_streams_and_words_are_rejected() -> None:
    """With the reason."""
    with pytest.raises(ValueError, match='"auto" needs a map-style dataset, whose samples are read'):
        fastload.DataLoader(datasets.Stream(), num_workers="auto")
    with pytest.raises(ValueError, match="num_workers should be an int or \"auto\", but got 'many'"):
        fastload.DataLoader(IMAGES, num_workers="many")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_samples", "number", "said"),
    [
        (3, 0, "0 (an epoch has fewer than 2 batches)"),
        (12, 3, "3 (batches of an epoch: 3)"),
        (16, 4, "4 (CPUs of this rank: 4)"),
    ],
)
def test_an_epoch_has_no_more_workers_than_batches(
    num_samples: int, number: int, said: str, cpus: Any, chosen: Any
) -> None:
    """And none for a single batch; the log gives the reason once."""
    with fastload.DataLoader(range(num_samples), 4, num_workers="auto") as loader:
        assert numbers_of(loader, 2) == [number, number]
    assert chosen() == [said]


def test_a_sampler_without_a_length_limits_nothing(cpus: Any) -> None:
    """Its epochs have as many batches as they have."""
    batches: Any = type("Batches", (), {"__iter__": lambda self: iter([[0], [1]])})()
    with fastload.DataLoader(IMAGES, batch_sampler=batches, num_workers="auto") as loader:
        assert numbers_of(loader, 1) == [4]


def test_every_epoch_is_chosen_by_the_pace_of_those_before(paces: Any, cpus: Any, chosen: Any) -> None:
    """A cache that is full needs fewer workers than one that fills; a change is logged with its figures."""
    filling, full = Pace(0.08, 0.02, 0.01), Pace(0.01, 0.02, 0.0)
    paces(None, filling, full, None, full)
    with fastload.DataLoader(IMAGES, 2, num_workers="auto") as loader:
        assert numbers_of(loader, 5) == [4, 4, 1, 1, 1]
    assert chosen() == [
        "4 (CPUs of this rank: 4)",
        "1 (making a batch takes 10 ms, using it 20 ms, waiting for it 0 us; CPUs of this rank: 4)",
    ]


def test_the_start_of_workers_counts_from_the_second_time(paces: Any, cpus: Any) -> None:
    """The first one contains the start of everything else; it is remembered while there are no workers."""
    slow, without = Pace(0.002, 0.01, 0.0, start_s=0.01), Pace(0.002, 0.01, 0.002)
    paces(None, slow, slow, without, without)
    with fastload.DataLoader(IMAGES, 2, num_workers="auto") as loader:
        assert numbers_of(loader, 5) == [4, 1, 0, 0, 0]


def test_nothing_is_read_beside_the_batches(cpus: Any) -> None:
    """In any epoch."""
    cpus(1)
    read: list[int] = []
    dataset = datasets.Made(lambda index: read.append(index) or index, 64)
    loader = fastload.DataLoader(dataset, 2, num_workers="auto")
    for _ in range(2):
        list(loader)
    assert read == [*range(64), *range(64)]


def test_a_copy_of_a_loader_continues_with_its_number(cpus: Any) -> None:
    """Its own batches decide the next one."""
    loader = fastload.DataLoader(IMAGES, 2, num_workers="auto")
    for _ in range(2):
        list(loader)
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.num_workers == loader.num_workers
        assert recorder_of(other).new_pace(other.num_workers) is None
        assert len(list(other)) == 32
        other.close()


def test_torch_s_own_workers_keep_the_first_number(cpus: Any) -> None:
    """Their work is unknown."""
    cpus(2)
    with fastload.DataLoader(IMAGES, 2, num_workers="auto", **torchs_own.FORK) as loader:
        assert [(len(list(loader)), loader.num_workers) for _ in range(2)] == [(32, 2), (32, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("persistent_workers", "seeding"), [(False, "worker"), (True, "sample")])
def test_batches_and_random_streams_are_those_of_the_number(persistent_workers: bool, seeding: Any) -> None:
    """As if it had been given, in the order of a shuffled sampler, with the draws of the dataset."""

    def run(num_workers: Any) -> Any:
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        generator, dataset = torch.Generator().manual_seed(4), datasets.Made(datasets.draws, 64)
        options: Any = {"generator": generator, "persistent_workers": persistent_workers, "seeding": seeding}
        with fastload.DataLoader(dataset, 16, shuffle=True, num_workers=num_workers, **options) as loader:
            batches = [[part.tolist() for part in batch.values()] for batch in loader]
            known = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
            states = [*known, torch.get_rng_state().tolist(), generator.get_state().tolist()]
            return batches, states, loader.num_workers

    auto = run("auto")
    assert auto == run(auto[-1])


def test_a_process_that_may_start_none_has_no_workers(
    monkeypatch: pytest.MonkeyPatch, cpus: Any, chosen: Any
) -> None:
    """Such as a worker of another loader, which is a daemon."""
    loader = fastload.DataLoader(IMAGES, 16, num_workers="auto")
    monkeypatch.setitem(process.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert len(list(loader)) == 4
    assert chosen() == ["0 (this process is a daemon, which cannot start processes)"]


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "num_taken"), [(0, 4), (2, 2)])
def test_a_state_of_the_dataset_decides_the_number(
    num_workers: int, num_taken: int, cpus: Any, chosen: Any
) -> None:
    """A resumed dataset needs as many copies as when its state was saved, in all epochs."""
    with fastload.DataLoader(Counting(64), 16, num_workers=num_workers) as first:
        batches = iter(first)
        for _ in range(num_taken):
            next(batches)
        state = first.state_dict()
        rest = [batch.tolist() for batch in batches]
    resumed = fastload.DataLoader(Counting(64), 16, num_workers="auto")
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == rest
    assert numbers_of(resumed, 2) == [num_workers] * 2
    assert chosen() == [f"{num_workers} (each copy of the dataset has a state)"]
    resumed.close()


def test_a_resumed_loader_chooses_by_its_own_batches(paces: Any, cpus: Any) -> None:
    """A dataset without a state gives the rest of the epoch with any number."""
    with fastload.DataLoader(range(64), 2) as first:
        batches = iter(first)
        taken = [next(batches) for _ in range(20)]
        state = first.state_dict()
        rest = [batch.tolist() for batch in batches]
    paces(None, Pace(0.01, 0.01, 0.0))
    with fastload.DataLoader(range(64), 2, num_workers="auto") as resumed:
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == rest
        assert resumed.num_workers == 4
        assert numbers_of(resumed, 1) == [2]
    assert len(taken) + len(rest) == 32


@pytest.mark.slow
def test_persistent_workers_are_replaced_only_by_a_different_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch has the same batches."""
    numbers = itertools.chain([1, 1, 2])
    monkeypatch.setattr(AutoWorkers, "choose", lambda *_: next(numbers))
    found = []
    with fastload.DataLoader(range(8), 2, num_workers="auto", persistent_workers=True) as loader:
        for _ in range(3):
            batches = [batch.tolist() for batch in loader]
            assert batches == [[0, 1], [2, 3], [4, 5], [6, 7]]
            found.append([worker.pid for worker in loader._iterator._workers])  # type: ignore[union-attr]
    first, second, third = found
    assert first == second
    assert len(third) == 2
    assert not set(third) & set(first)


# --- more workers than CPUs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "warns"), [(2, False), (3, True), ("auto", False), (9, False), (0, False)]
)
def test_more_workers_than_cpus_of_the_rank_are_warned_of_once(
    num_workers: Any, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any, forget: None
) -> None:
    """Unless torch warns, which knows the host's CPUs alone."""
    monkeypatch.setattr(loader_module.cpus, "usable_cpus", lambda: 8)
    monkeypatch.setattr(loader_module.cpus, "rank_cpus", lambda: 2)
    monkeypatch.setattr(torch.utils.data.DataLoader, "check_worker_number_rationality", lambda _: None)
    for _ in range(2):
        fastload.DataLoader(IMAGES, 16, num_workers=num_workers)
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in texts] == ["a DataLoader has more workers than CPUs"] * warns
