"""Samplers and datasets that fail when an epoch begins, or when they are asked where they stand."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import traceback
from typing import Any

import pytest
import torch

from fastload import DataLoader
from fastload.epochs import on_device
from fastload.errors import BatchLostError, DeviceUnavailableError, ResumeError, SharedMemoryError
from fastload.workers import process_pool
from tests.kit import torchs_own
from tests.resume.loaders import labels, order_states, seeded, state_after, through_json, uninterrupted
from tests.resume.loaders import make as make_kind
from tests.resume.zoo import Faulty, Numbers, Stateful, Stream, stream
from tests.rng.draws_zoo import Dice

# --- an iter(loader) that fails changes nothing ----------------------------------------------------------


def make(**options: Any) -> DataLoader:
    """A loader whose order follows from a generator of its own and whose sampler can be told to fail."""
    sampler = Faulty(24, seeded(3))
    return DataLoader(Numbers(24), 4, sampler=sampler, generator=seeded(4), **options)


def stand(loader: DataLoader) -> Any:
    return loader.state_dict(), *order_states(loader)


def _fail(*args: Any) -> Any:
    raise ArithmeticError("no idea")


# The error of iter(loader), and the attributes of the loader, or of what it uses, that cause it.
ITER = ArithmeticError, {"fault": ArithmeticError}
INTERRUPT = KeyboardInterrupt, {"fault": KeyboardInterrupt}
OTHER = ResumeError, {"fault": "other"}
NEXT = ArithmeticError, {"fault": "next"}  # in workers, which are ahead
UNSTARTED = Exception, {"hook": threading.Lock(), "multiprocessing_context": "spawn"}  # cannot be pickled
WORKER: dict[str, Any] = {"num_workers": 1}
THREADS: dict[str, Any] = {"num_workers": 2, "worker_type": "thread"}
PERSISTENT: dict[str, Any] = {"persistent_workers": True}
CUDA: dict[str, Any] = {"device": "cuda"}
TORCHS: dict[str, Any] = {"num_workers": 1, **torchs_own.FORK}
FAULTS: list[tuple[dict[str, Any], tuple[Any, dict[str, Any]]]] = [
    *(({}, fault) for fault in (ITER, OTHER)),
    ({}, (AssertionError, {"timeout": 5})),
    ({}, (DeviceUnavailableError, {"device": "cuda:99"})),
    *((WORKER, fault) for fault in (NEXT, UNSTARTED, (AssertionError, {"prefetch_factor": 0}))),
    (THREADS, OTHER),
    *((WORKER | PERSISTENT, fault) for fault in (ITER, INTERRUPT, OTHER, NEXT)),
    (THREADS | PERSISTENT, NEXT),
    *((TORCHS | PERSISTENT, fault) for fault in (ITER, NEXT)),
    (TORCHS, (Exception, {**UNSTARTED[1], **torchs_own.SPAWN})),
    (WORKER | PERSISTENT | CUDA, (ArithmeticError, {"StreamPrefetcher": _fail})),
]


@pytest.mark.filterwarnings("ignore:'pin_memory'")
@pytest.mark.parametrize(("options", "fault"), FAULTS)
def test_a_loaded_state_stays_loaded(options: Any, fault: Any, request: pytest.FixtureRequest) -> None:
    """After the failure generators, samplers, state and persistent workers are as before, and serve the rest.

    Torch's iterators are resumed between epochs, and others within one.
    """
    fake: Any = request.getfixturevalue("fake") if "device" in options else None
    is_torchs = isinstance(options.get("multiprocessing_context"), (torchs_own.OwnFork, torchs_own.OwnSpawn))
    with make(**TORCHS if is_torchs else {}) as loader:
        list(loader)
        iterator = loader if is_torchs else iter(loader)
        if not is_torchs:
            list(itertools.islice(iterator, 3))
        state = loader.state_dict()
        rest = labels(iterator)
    error, causes = fault
    with make(**options) as loader:
        if loader.persistent_workers:
            list(loader)
        workers = loader._iterator
        loader.load_state_dict(state)
        before = stand(loader)
        owners = {"fault": loader.sampler, "hook": loader.dataset, "StreamPrefetcher": on_device}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in causes.items():
                patch.setattr(owners.get(name, loader), name, value, raising=False)
            for _ in range(2):
                with pytest.raises(error):
                    iter(loader)
                assert stand(loader) == before
        batches = list(loader)
        if fake is not None:
            fake.drain()

        assert labels(batches) == rest
        assert loader.state_dict()["epoch"] == 1
        assert loader._iterator is workers or not loader.persistent_workers


def test_an_epoch_that_is_under_way_outlives_a_state_that_does_not_fit() -> None:
    """With workers that persist, an older loop goes on after an iter() that ended in a ResumeError."""
    whole = labels(make())
    with make(num_workers=1, persistent_workers=True) as loader:
        iterator = iter(loader)
        seen = labels(itertools.islice(iterator, 2))
        loader.load_state_dict(state_after(make(), 3))
        loader.sampler.fault = "other"  # type: ignore[attr-defined]
        with pytest.raises(ResumeError):
            iter(loader)

        assert seen + labels(iterator) == whole


@pytest.mark.parametrize("num_workers", [0, 1])
def test_without_a_state_the_epoch_is_not_counted(num_workers: int) -> None:
    """The epoch's number, from which seeding="sample" draws, is that of the epochs that did begin."""
    options: dict[str, Any] = {"batch_size": None, "num_workers": num_workers, "seeding": "sample"}
    plain, loader = (
        DataLoader(Dice(8), sampler=Faulty(8, seeded()), generator=seeded(4), **options) for _ in range(2)
    )
    loader.sampler.fault = ArithmeticError  # type: ignore[attr-defined]
    with pytest.raises(ArithmeticError):
        iter(loader)
    loader.sampler.fault = None  # type: ignore[attr-defined]

    assert loader.state_dict()["epoch"] == 0
    assert labels(loader) == labels(plain)


def test_a_stream_that_refuses_its_state() -> None:
    """Without workers its error comes from iter(), and the next iter() goes on where the state stands."""
    refusing = stream(load_state_dict=_fail)
    resumed = DataLoader(refusing, 3)
    resumed.load_state_dict(state_after(DataLoader(Stream(), 3), 1))
    with pytest.raises(ArithmeticError):
        iter(resumed)
    del refusing.load_state_dict

    assert labels(resumed) == labels(DataLoader(Stream(), 3))[1:]


# --- datasets and samplers that cannot say where they stand ----------------------------------------------


def assert_no_state(loader: Any, error: Any = ArithmeticError, match: str = "no idea") -> Any:
    with pytest.raises(error, match=match) as caught:
        loader.state_dict()
    return caught


@pytest.mark.parametrize(("options", "num_workers"), [({}, 0), ({}, 2), (CUDA, 0), (CUDA, 1)])
def test_a_stream_that_cannot_say_where_it_stands(options: Any, num_workers: int, fake: Any) -> None:
    """It brings all batches; its error comes when the loader's state is asked for after a received batch."""
    with DataLoader(stream(state_dict=_fail), 3, num_workers=num_workers, **options) as loader:
        iterator = iter(loader)
        loader.state_dict()  # nothing was received yet
        next(iterator)
        assert_no_state(loader)
        caught = assert_no_state(loader)
        assert len(list(iterator)) == 13
        assert options or loader.state_dict()["_iterator_finished"]

    # The error's traceback holds frames: one that held the error would be kept alive by it.
    _this, *others = [frame for frame, _ in traceback.walk_tb(caught.tb)]
    assert others
    assert not any(value is caught.value for frame in others for value in frame.f_locals.values())


@pytest.mark.parametrize(("num_workers", "num_batches"), [(0, 4), (1, 1)])
def test_the_state_of_a_stream_is_not_ahead(num_workers: int, num_batches: int, fake: Any) -> None:
    """With device=, the state is that after the batch handed out, not after those fetched ahead."""
    state = state_after(make_kind("Stream", num_workers, device="cuda"), num_batches)
    with make_kind("Stream", num_workers, device="cuda") as loader:
        loader.load_state_dict(state)
        rest = list(loader)
    fake.drain()

    assert labels(rest) == uninterrupted("Stream", 1)[0][num_batches:]


class FailsTwice(Stream):
    """Cannot say where it stands, and fails in its second batch."""

    state_dict = _fail

    def __iter__(self) -> Any:
        return (number if number != 4 else 1 // 0 for number in super().__iter__())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_that_cannot_be_pickled_and_an_error_beside_a_batch_s_own(num_workers: int) -> None:
    """The first costs no batch, and comes when it is asked for; the batch's own error is the batch's."""
    with DataLoader(stream(state_dict=lambda: {"position": lambda: 0}), 3, num_workers=num_workers) as loader:
        iterator = iter(loader)
        next(iterator)
        assert_no_state(loader, (AttributeError, pickle.PicklingError), "lambda")
        assert len(list(iterator)) == 13
    with DataLoader(FailsTwice(), 3, num_workers=num_workers) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ZeroDivisionError):
            next(iterator)
        assert_no_state(loader)


@pytest.mark.parametrize("methods", [{"state_dict": lambda num: {}}, {"load_state_dict": lambda a, b: None}])
@pytest.mark.parametrize("options", [{}, WORKER, TORCHS], ids=str)
def test_a_stream_whose_methods_need_arguments(methods: Any, options: dict[str, Any]) -> None:
    """It is iterated like any stream; a state says why the epoch cannot be resumed in its middle."""
    with DataLoader(stream(**methods), 3, **options) as loader:
        assert labels(loader) == labels(DataLoader(Stream(), 3))
        next(iter(loader))
        loader.load_state_dict(through_json(loader.state_dict()))
        with pytest.raises(ResumeError, match=r"at batch 1: .*(without arguments|OwnFork)"):
            iter(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samplers_are_asked_the_same_way(num_workers: int) -> None:
    """A sampler whose state_dict() raises costs no batch, and one that needs arguments is not asked."""
    sampler: Any = Stateful(12)
    loader = DataLoader(Numbers(12), 4, sampler=sampler, num_workers=num_workers)
    sampler.state_dict = _fail
    iterator = iter(loader)
    next(iterator)
    for num_left in (2, 0):
        assert_no_state(loader)
        assert len(list(iterator)) == num_left
    sampler.state_dict = lambda epoch: {}
    assert len(list(loader)) == 3
    assert loader.state_dict()["samplers"] == {}


def test_a_batch_that_is_lost_on_its_way_is_read_again_after_a_resume(monkeypatch: Any) -> None:
    """It brings no state of its worker's stream, which stands where it stood before."""
    parent, original = os.getpid(), process_pool.Segment.map
    refusals = iter([False, True])

    def map_or_refuse(self: Any, *, writable: bool) -> Any:
        if os.getpid() == parent and next(refusals, False):
            raise SharedMemoryError("out of address space")
        return original(self, writable=writable)

    monkeypatch.setattr(process_pool.Segment, "map", map_or_refuse)
    with DataLoader(Stream(), 3, num_workers=1) as loader:
        iterator = iter(loader)
        first = next(iterator)
        with pytest.raises(BatchLostError, match="out of address space"):
            next(iterator)
        loader.load_state_dict(through_json(loader.state_dict()))

        assert torch.cat([first, *loader]).tolist() == list(range(41))
