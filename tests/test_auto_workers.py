"""`num_workers="auto"`: what is chosen from what was measured, and that the trial leaves no trace here."""

from __future__ import annotations

import copy
import importlib
import itertools
import logging
import math
import multiprocessing
import os
import pickle
import random
import re
import select
import signal
import time
from multiprocessing import process
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastload
from fastload import loader as loader_module
from fastload.system import linux
from fastload.system.logs import say_once
from fastload.workers import auto_workers
from fastload.workers import process as worker_process
from fastload.workers.auto_workers import AutoWorkers, Cost, Model, costs
from tests.kit import datasets, leaks
from tests.resume.zoo import Counting

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = st.floats(1e-5, 10.0)
MODELS = st.builds(
    Model,
    st.builds(Cost, SECONDS, SECONDS),
    num_batches=st.integers(2, 1000),
    num_cpus=st.integers(1, 64),
    start_s=SECONDS,
)
LEAST = st.integers(0, 1)
# 10 ms of computing, or of waiting, for each of 100 batches, on four CPUs.
COMPUTES = Model(Cost(0.01, 0.01), num_batches=100, num_cpus=4)
WAITS = Model(Cost(0.01, 0.0001), num_batches=100, num_cpus=4)
IMAGES = datasets.Made(datasets.image, 64)


OF_WORKERS: Any = {"persistent_workers": True, "prefetch_factor": 3, "timeout": 20, "worker_init_fn": print}


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured decides nothing here, so that little is measured, and slow machines have time."""
    monkeypatch.setattr(auto_workers, "_ENOUGH_S", 0.001)
    monkeypatch.setattr(auto_workers, "_MIN_LIMIT_S", 60.0)


def raises(index: int) -> Any:
    raise KeyError("no such photo")


def hangs(index: int) -> Any:
    select.select([], [], [])


def ends(index: int) -> Any:
    os._exit(3)


class InWorker(datasets.Made):
    """Can be read only in its one worker, prepared by worker_init_fn; it blocks what the test blocks."""

    def __getitem__(self, index: int) -> Any:
        info: Any = torch.utils.data.get_worker_info()
        assert (info.id, info.num_workers, info.seed) == (0, 1, torch.initial_seed())
        assert info.dataset is self
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {signal.SIGUSR2}
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        return index + self.file  # type: ignore[attr-defined]


def opened(worker_id: int) -> None:
    torch.utils.data.get_worker_info().dataset.file = 7  # type: ignore[union-attr]


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
    """The numbers and rules in the log, in their order."""
    caplog.set_level(logging.INFO, "fastload")

    def read() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        return [line.removeprefix('num_workers="auto": ') for line in lines if line.startswith("num_workers")]

    return read


# --- the choice -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "least", "step_s", "number"),
    [
        (COMPUTES, 0, None, 4),
        (COMPUTES._replace(num_cpus=1), 0, None, 1),
        (COMPUTES._replace(num_batches=3), 0, None, 3),
        (COMPUTES._replace(start_s=2.0), 0, None, 0),
        (COMPUTES._replace(start_s=2.0, num_batches=2), 1, None, 1),
        (COMPUTES, 0, 0.005, 2),
        (COMPUTES._replace(cost=Cost(0.01, 0.02)), 0, None, 2),
        (COMPUTES._replace(cost=Cost(0.013, 0.01)), 0, None, 4),
        (WAITS, 0, None, 25),
        (WAITS, 0, 0.001, 8),
        (WAITS._replace(num_batches=5), 0, None, 5),
    ],
)
def test_the_choice(model: Model, least: int, step_s: float | None, number: int) -> None:
    """CPU time, waiting, the length and start of an epoch, and the consumer's step each decide somewhere."""
    found = model.safest(least) if step_s is None else model.fastest(least, step_s, current=least)
    assert found == number


@given(MODELS, LEAST)
def test_only_batches_that_wait_get_more_workers_than_cpus(model: Model, least: int) -> None:
    """More than twice as many only if more than half of their time is not CPU time."""
    numbers = model.numbers(least)
    make_s, busy_s = model.cost
    assert numbers[-1] <= max(1, min(model.num_batches, 64))
    if make_s <= 2 * busy_s:
        assert numbers[-1] <= 2 * model.num_cpus
    if make_s <= 1.5 * busy_s:
        assert numbers[-1] <= model.num_cpus


@given(MODELS, LEAST, st.floats(0.0, 10.0), st.sampled_from([0, 1, 2, 4, 8, 64]))
def test_the_choice_for_a_known_step_is_at_most_3_percent_slower_than_the_best(
    model: Model, least: int, step_s: float, current: int
) -> None:
    """Whatever was measured."""
    chosen = model.fastest(least, step_s, current)
    min_s = min(model.epoch_s(number, step_s) for number in model.numbers(least))
    assert model.epoch_s(chosen, step_s) <= 1.03 * min_s * (1 + 1e-9)


@given(MODELS, st.integers(0, 64), st.floats(0.0, 10.0))
def test_an_epoch_as_predicted_corrects_nothing(model: Model, number: int, step_s: float) -> None:
    """The waits that the model predicts for a number leave it as it is."""
    between_s = model.batch_s(number)
    wait_s = between_s if number == 0 else max(0.0, between_s - step_s)
    after = model.corrected(number, step_s, wait_s)
    assert after.cost == pytest.approx(model.cost)


@pytest.mark.parametrize(
    ("number", "step_s", "wait_s", "make_s"),
    [
        (0, 0.0, 0.03, 0.03),  # each batch is waited for
        (2, 0.001, 0.014, 0.03),  # two workers made a batch every 15 ms
        (2, 0.002, 0.0001, 0.0042),  # they made one every 2.1 ms, or faster
        (2, 0.5, 0.0001, 0.01),  # batches were ready: how early is unknown
    ],
)
def test_an_epoch_corrects_what_was_measured_badly(
    number: int, step_s: float, wait_s: float, make_s: float
) -> None:
    """By the factor between the predicted and the measured batches; CPU time by the same factor."""
    found = COMPUTES._replace(num_batches=101, num_cpus=2).corrected(number, step_s, wait_s)
    assert found.cost == pytest.approx(Cost(make_s, make_s), rel=0.01)


@pytest.mark.parametrize(
    ("epochs_s", "numbers", "said"),
    [
        ((3.0, 3.0), [0, 1, 1], "1, a batch takes 10 ms, CPU time 10 ms, a step of the consumer 20 ms"),
        ((3.0, 5.0, 3.0, 3.0), [0, 1, 0, 0, 0], "0, because epochs took 5 s with 1"),
    ],
    ids=["a consumer that computes gets workers", "a number that makes epochs longer is left for good"],
)
def test_a_later_epoch_is_chosen_by_what_the_consumer_does(
    epochs_s: Any, numbers: list[int], said: str, chosen: Any
) -> None:
    """After a trial that found that workers, which take 0.3 s to start, would not pay."""
    loader, auto = fastload.DataLoader(IMAGES), AutoWorkers(0)
    auto._is_due, auto._model, auto.number = False, COMPUTES._replace(start_s=0.3), 0
    found = [auto.choose(loader)]
    for epoch_s in epochs_s:
        auto.note_epoch(auto.number, 0.02, 0.01 if auto.number == 0 else 0.0, epoch_s)
        found.append(auto.choose(loader))
    assert found == numbers
    assert chosen()[-1].partition(";")[0] == said


def test_the_consumer_s_steps_and_waits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a batch and the next call, and within that call, on average; and the whole epoch."""
    loader = fastload.DataLoader(IMAGES, 16, num_workers="auto")
    noted: list[Any] = []
    assert loader._auto_workers is not None
    monkeypatch.setattr(loader._auto_workers, "choose", lambda _: 1)
    monkeypatch.setattr(loader._auto_workers, "note_epoch", lambda *epoch: noted.append(epoch))
    # Looked at when a call begins, and when it ends.
    clock = itertools.accumulate(itertools.cycle([500_000_000, 250_000_000]))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
    assert len(list(loader)) == 4
    assert noted == [(1, 0.5, 0.25, 0.25 + 5 * 0.75)]


# --- what a batch costs -----------------------------------------------------------------------------------


def pairs(samples: list[int]) -> list[int]:
    assert len(samples) == 8
    return samples


@pytest.mark.parametrize(
    ("options", "parts_s", "enough_s", "read", "batch_s"),
    [
        ({"batch_size": 8}, 100.0, 20.0, 8 + 3 * 8, 8.0),  # parts of 1, 2, 4 and 1 samples, three batches
        ({"batch_size": 8}, 2.5, 20.0, 1 + 2, 8.0),  # no whole batch
        ({"batch_size": 8, "collate_fn": pairs}, 100.0, 20.0, 8 + 3 * 8, 8.0),  # parts cannot be collated
        ({"batch_size": None}, 0.0, 20.0, 20, 1.0),
        ({"batch_size": 8}, 100.0, 1000.0, 64, 8.0),  # a short epoch
        ({"batch_sampler": [[0, 1], [], [2, 3]], "collate_fn": list}, 100.0, 1000.0, 4, 1.0),
    ],
    ids=["batches", "slow samples", "whole batches only", "samples", "whole epoch", "empty batch"],
)
def test_the_cost_of_a_batch(
    options: Any, parts_s: float, enough_s: float, read: int, batch_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of whole batches, or, of slow samples, that of a part times the samples of the batch."""
    samples: list[int] = []  # each takes one second, 0.5 s of them on a CPU
    monkeypatch.setattr(auto_workers, "_clocks", lambda: (len(samples), 0.0, 0.5 * len(samples)))
    monkeypatch.setattr(time, "perf_counter", lambda: len(samples))
    monkeypatch.setattr(auto_workers, "_PIECES_S", parts_s)
    monkeypatch.setattr(auto_workers, "_ENOUGH_S", enough_s)
    timed = datasets.Made(lambda index: samples.append(index) or index, 64)
    assert list(costs(fastload.DataLoader(timed, **options)))[-1] == pytest.approx((batch_s, 0.5 * batch_s))
    assert len(samples) == read


def test_time_in_which_others_have_the_cpu_is_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc tells it; the CPU time of this thread is the least that a batch takes."""
    schedstat = iter(["0 0 0", "9 4000000000 9", "9 4000000000 9", "9 4000000000 9"])
    monkeypatch.setattr(linux, "read_text", lambda path: next(schedstat))
    for name, seconds in (("perf_counter", 5.0), ("thread_time", 0.5), ("process_time", 3.0)):
        ticks = itertools.count(0.0, seconds)
        monkeypatch.setattr(time, name, ticks.__next__)
    assert auto_workers._next_cost(iter("ab")) == pytest.approx(Cost(1.0, 3.0), abs=0.1)


class Receiver:
    """A pipe from a trial: each message takes some seconds to come."""

    def __init__(self, *messages: tuple[float, Any]) -> None:
        self.messages = list(messages)
        self.now_s = 0.0

    def poll(self, timeout_s: float) -> bool:
        wait_s = self.messages[0][0] if self.messages else math.inf
        self.now_s += min(timeout_s, wait_s)
        return wait_s <= timeout_s

    def recv(self) -> Any:
        return self.messages.pop(0)[1]


@pytest.mark.parametrize(
    ("messages", "num_batches", "took_s", "found"),
    [
        ([(1.5, Cost(1, 1)), (1.0, Cost(2, 2))], 10, 2.0, 1),  # an epoch of 2.5 s: 2 s are allowed
        # An epoch of 50 s, then of 101.5 s.
        ([(1.5, Cost(1, 1)), (1.0, Cost(2, 2)), (9.0, "")], 200, 10.15, 2),
        ([(1.5, Cost(1, 1)), (1.0, Cost(2, 2)), (1.0, "")], 200, 3.5, 2),
        ([(2.5, Cost(1, 1))], 200, 2.0, "the first sample took more than 2 s"),
        ([(1.0, "KeyError: 3")], 200, 1.0, "KeyError: 3"),
    ],
    ids=["short epoch", "long epoch", "done", "nothing", "error"],
)
def test_the_trial_takes_2_s_or_a_tenth_of_the_epoch(
    messages: Any, num_batches: int, took_s: float, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the epoch as it is known so far; the last cost that came in time counts."""
    monkeypatch.setattr(auto_workers, "_MIN_LIMIT_S", 2.0)
    receiver = Receiver(*messages)
    monkeypatch.setattr(time, "perf_counter", lambda: receiver.now_s)
    model = Model(Cost(0, 0), num_batches, 4)
    answer = AutoWorkers(0)._follow(receiver, model)  # type: ignore[arg-type]
    assert (answer if isinstance(answer, str) else answer.cost.make_s) == found
    assert receiver.now_s == pytest.approx(took_s)


# --- the trial --------------------------------------------------------------------------------------------


def test_a_new_loader_has_an_int_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank's share of the CPUs, at most 16, until the first iter(); streams and words are refused."""
    for num_cpus, expected in ((3, 3), (99, 16)):
        monkeypatch.setattr(auto_workers, "rank_cpus", lambda found=num_cpus: found)
        loader = fastload.DataLoader(datasets.Made(raises, 64), 16, num_workers="auto")
        assert type(loader.num_workers) is int
        assert (loader.num_workers, loader.prefetch_factor) == (expected, 2)
    assert multiprocessing.active_children() == []
    with pytest.raises(ValueError, match='"auto" needs a map-style dataset, whose samples are read'):
        fastload.DataLoader(datasets.Stream(), num_workers="auto")
    with pytest.raises(ValueError, match="num_workers should be an int or \"auto\", but got 'many'"):
        fastload.DataLoader(IMAGES, num_workers="many")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dataset", "options", "said"),
    [
        (range(3), {"drop_last": True}, "0, an epoch has 0 batches"),
        (range(4), {}, "0, an epoch has 1 batches"),
        # Arguments of workers want at least one.
        (range(4), {"multiprocessing_context": "fork"}, "1, an epoch has 1 batches"),
        *((range(4), {name: value}, "1, an epoch has 1 batches") for name, value in OF_WORKERS.items()),
        (range(5), {}, "measured in"),
        (range(3), {"batch_size": None}, "measured in"),
    ],
)
def test_short_epochs(dataset: Any, options: dict[str, Any], said: str, chosen: Any) -> None:
    """They have the batches of a fixed number; fewer than two are not measured; a line has the rule."""
    batched = {"batch_size": 4} | options
    with fastload.DataLoader(dataset, num_workers="auto", **batched) as loader:
        epochs = [[torch.as_tensor(batch).tolist() for batch in loader] for _ in range(2)]
    fixed = fastload.DataLoader(dataset, batched["batch_size"], drop_last="drop_last" in options)
    assert epochs == [[torch.as_tensor(batch).tolist() for batch in fixed]] * 2
    assert loader.prefetch_factor == (options.get("prefetch_factor", 2) if loader.num_workers else None)
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.num_workers == loader.num_workers
    line = chosen()[0]
    assert said in line
    if said.startswith("measured"):
        assert re.match(rf"{loader.num_workers}, .*a batch takes .*, CPU time ", line)
    else:
        assert len(chosen()) == 1
        assert loader.num_workers == int(said[0])


def choose(loader: Any) -> None:
    """Make the trial of a loader, and no batch."""
    loader._auto_workers.choose(loader)


def streams(generator: torch.Generator) -> list[Any]:
    """The states of the generators of this process."""
    known = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    return [*known, torch.get_rng_state().tolist(), generator.get_state().tolist()]


def test_the_trial_reads_and_draws_nothing_here(chosen: Any) -> None:
    """Samples, samplers, generators and torch's, NumPy's and Python's random streams are untouched."""
    read: list[int] = []
    dataset, generator = datasets.Made(lambda index: read.append(index) or index, 64), torch.Generator()
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before = streams(generator)
    loader = fastload.DataLoader(dataset, 16, sampler=dataset, num_workers="auto", generator=generator)
    choose(loader)
    assert "measured in" in chosen()[0]
    assert multiprocessing.active_children() == []
    assert read == []
    assert streams(generator) == before


@pytest.mark.slow
@pytest.mark.parametrize(("persistent_workers", "rng"), [(False, "worker"), (True, "sample")])
def test_batches_and_random_streams_are_those_of_the_number(persistent_workers: bool, rng: Any) -> None:
    """As if it had been given, in the order of a shuffled sampler, with the draws of the dataset."""

    def run(num_workers: Any) -> Any:
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        generator, dataset = torch.Generator().manual_seed(4), datasets.Made(datasets.draws, 64)
        options: Any = {"generator": generator, "persistent_workers": persistent_workers, "rng": rng}
        with fastload.DataLoader(dataset, 16, shuffle=True, num_workers=num_workers, **options) as loader:
            batches = [[part.tolist() for part in batch.values()] for batch in loader]
            return batches, streams(generator), loader.num_workers

    auto = run("auto")
    assert auto == run(auto[-1])


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_the_trial_prepares_the_dataset_as_a_worker_does(worker_type: Any, chosen: Any) -> None:
    """As its one worker, with worker_init_fn and torch's worker info; for threads too, in a process."""
    options: Any = {"num_workers": "auto", "worker_type": worker_type, "worker_init_fn": opened}
    loader = fastload.DataLoader(InWorker(datasets.image, 64), 16, **options)
    handler_before = signal.signal(signal.SIGUSR1, lambda *_: None)
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        choose(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)
        signal.signal(signal.SIGUSR1, handler_before)
    assert "measured in" in chosen()[0]


@pytest.mark.parametrize(
    ("method", "is_heard_at_once"), [("fork", False), ("fork", True), ("forkserver", False)]
)
def test_a_handler_that_raises_while_the_trial_is_started_is_heard(
    method: str, is_heard_at_once: bool, monkeypatch: pytest.MonkeyPatch, chosen: Any
) -> None:
    """Its exception reaches the caller, no process stays, and the next epoch makes the trial."""
    launcher = importlib.import_module(f"multiprocessing.popen_{method}").Popen
    launch = launcher._launch

    def handler(*_: object) -> None:
        raise (ValueError if is_heard_at_once else TimeoutError)("of the handler")

    def launch_and_ring(self: Any, child: Any) -> None:
        launch(self, child)
        handler() if is_heard_at_once else signal.raise_signal(signal.SIGALRM)

    loader = fastload.DataLoader(IMAGES, 16, num_workers="auto", multiprocessing_context=method)
    worker_process.start_helpers(method)
    before = leaks.held()
    handler_before = signal.signal(signal.SIGALRM, handler)
    try:
        monkeypatch.setattr(launcher, "_launch", launch_and_ring)
        with pytest.raises((ValueError, TimeoutError), match="of the handler"):
            iter(loader)
    finally:
        signal.signal(signal.SIGALRM, handler_before)
    monkeypatch.setattr(launcher, "_launch", launch)
    assert leaks.held_soon(before) == before
    assert chosen() == []
    assert len(list(loader)) == 4
    assert "measured in" in chosen()[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "method", "reason", "error"),
    [
        (raises, "fork", "KeyError: 'no such photo'", KeyError),
        (ends, "fork", "its process ended with exit code 3", fastload.errors.WorkerDiedError),
        (hangs, "fork", "the first sample took more than", None),
        (
            lambda index: index,
            "spawn",
            "its process could not be started",
            (AttributeError, pickle.PicklingError),
        ),
    ],
    ids=["raises", "ends", "hangs", "cannot be pickled"],
)
def test_a_trial_that_fails_is_a_warning(
    make: Any, method: str, reason: str, error: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are as many workers as CPUs then, and the first epoch raises the error; no process stays."""
    if make is hangs:
        monkeypatch.setattr(auto_workers, "_MIN_LIMIT_S", 0.1)
    dataset = datasets.Made(make, 64)
    loader = fastload.DataLoader(dataset, 16, num_workers="auto", multiprocessing_context=method)
    number = loader.num_workers
    choose(loader)
    if error is not None:
        with pytest.raises(error):
            list(loader)
    choose(loader)  # for the next epoch: it is not said again
    assert loader.num_workers == number == min(auto_workers.rank_cpus(), 16)
    (line,) = [record.getMessage() for record in caplog.records if "trial" in record.getMessage()]
    assert line.startswith(f'num_workers="auto": {number}, one per CPU of this rank: the trial failed: ')
    assert reason in line


def test_a_process_that_may_start_none_has_no_workers(monkeypatch: pytest.MonkeyPatch, chosen: Any) -> None:
    """Such as a worker of another loader, which is a daemon."""
    monkeypatch.setitem(process.current_process()._config, "daemon", True)
    loader = fastload.DataLoader(IMAGES, 16, num_workers="auto")
    assert len(list(loader)) == 4
    assert loader.num_workers == 0
    assert "daemon" in chosen()[0]


@pytest.mark.slow
def test_a_cache_that_is_full_is_measured_anew(chosen: Any) -> None:
    """Once: what is read from the cache needs other workers than what fills it."""
    dataset = fastload.CachedDataset(IMAGES, cache="ram")
    loader = fastload.DataLoader(dataset, 16, num_workers="auto")
    for _ in loader:
        break
    assert sum("measured in" in line for line in chosen()) == 1
    dataset.fill(num_workers=0, progress=False)
    for _ in range(2):
        for _ in loader:
            break
    for _ in range(3):
        assert len(list(loader)) == 4
    assert sum("measured in" in line for line in chosen()) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "num_taken"), [(0, 4), (2, 2)])
def test_a_state_of_the_dataset_decides_the_number(num_workers: int, num_taken: int, chosen: Any) -> None:
    """A resumed dataset needs as many copies as when its state was saved."""
    with fastload.DataLoader(Counting(64), 16, num_workers=num_workers) as first:
        batches = iter(first)
        for _ in range(num_taken):
            next(batches)
        state = first.state_dict()
        rest = [batch.tolist() for batch in batches]
    resumed = fastload.DataLoader(Counting(64), 16, num_workers="auto")
    resumed.load_state_dict(state)
    if num_taken < 4:
        assert [batch.tolist() for batch in resumed] == rest
    assert resumed.num_workers == num_workers
    assert chosen() == [f"{num_workers}, as many as the state has copies of the dataset"]


@pytest.mark.slow
def test_persistent_workers_give_way_when_another_number_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next epoch has the new number of workers, and the same batches."""
    numbers = iter([1, 1, 2])
    monkeypatch.setattr(AutoWorkers, "choose", lambda *_: next(numbers))
    with fastload.DataLoader(range(8), 2, num_workers="auto", persistent_workers=True) as loader:
        found = [([batch.tolist() for batch in loader], loader.num_workers) for _ in range(3)]
    batches = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found == [(batches, 1), (batches, 1), (batches, 2)]


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
