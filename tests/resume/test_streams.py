"""Iterable datasets with a state_dict(): each worker's copy goes on where the caller left it."""

from __future__ import annotations

import os
import pickle
import traceback
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload import DataLoader
from fastload.epochs import on_device
from fastload.errors import BatchLostError, ResumeError, SegmentError
from fastload.workers import pool
from tests.device.fake import FakeBackend
from tests.resume.loaders import through_json
from tests.resume.zoo import (
    BrokenStream,
    BrokenTwice,
    HasDefaults,
    LoadNeedsArguments,
    MuteAtTimes,
    MuteSampler,
    NeedsArguments,
    Numbers,
    OddState,
    SamplerOfArguments,
    Stream,
)


def loader_of(num_workers: int, **options: Any) -> DataLoader:
    return DataLoader(Stream(), **{"batch_size": 3, "num_workers": num_workers, **options})


def cut(loader: DataLoader, num_batches: int) -> tuple[list[Any], Any]:
    """The first batches of an epoch, and the state after them, through a checkpoint."""
    iterator = iter(loader)
    batches = [next(iterator).tolist() for _ in range(num_batches)]
    state = through_json(loader.state_dict())
    loader.close()
    return batches, state


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_any_cut(num_workers: int, data: Any) -> None:
    """The batches before and after a cut are those of an epoch without one, also if a worker ends early."""
    whole = [batch.tolist() for batch in loader_of(num_workers)]
    num_batches = data.draw(st.integers(0, len(whole) - 1))

    first, state = cut(loader_of(num_workers), num_batches)
    loader = loader_of(num_workers)
    loader.load_state_dict(state)

    assert first + [batch.tolist() for batch in loader] == whole
    assert [batch.tolist() for batch in loader] == whole  # the next epoch is a whole one


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_epoch_is_resumed_again(num_workers: int) -> None:
    """The second state counts the batches of both parts, also where each part is long."""
    with loader_of(num_workers, batch_size=1) as loader:
        whole = [batch.tolist() for batch in loader]
    found: list[Any] = []
    state = None
    for num_batches in (7, 6):
        loader = loader_of(num_workers, batch_size=1)
        if state is not None:
            loader.load_state_dict(state)
        part, state = cut(loader, num_batches)
        found += part
        assert state["_num_yielded"] == len(found)
    with loader_of(num_workers, batch_size=1) as loader:
        loader.load_state_dict(state)
        found += [batch.tolist() for batch in loader]

    assert len(whole) > 14
    assert found == whole


@pytest.mark.parametrize("drop_last", [False, True])
def test_persistent_workers_resume_twice(drop_last: bool) -> None:
    """A state that is loaded between epochs of persistent workers reaches them; so does a second one."""
    options = {"persistent_workers": True, "drop_last": drop_last}
    whole = [batch.tolist() for batch in loader_of(2, **options)]
    loader = loader_of(2, **options)
    list(loader)
    for num_batches in (3, 5):
        first, state = cut(loader_of(2, **options), num_batches)
        loader.load_state_dict(state)
        assert first + [batch.tolist() for batch in loader] == whole
    loader.close()


def test_another_number_of_workers_is_refused() -> None:
    """The states are those of so many copies: the error names both numbers."""
    _, state = cut(loader_of(2), 3)
    loader = loader_of(3)
    loader.load_state_dict(state)

    with pytest.raises(ResumeError, match=r"in 2 workers.* has 3"):
        iter(loader)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_stream_that_cannot_say_where_it_stands(num_workers: int) -> None:
    """It brings all batches; its error comes when the loader's state is asked for, each time, with a note."""
    whole = [batch.tolist() for batch in loader_of(num_workers)]
    with DataLoader(BrokenStream(), 3, num_workers=num_workers) as loader:
        iterator = iter(loader)
        loader.state_dict()  # nothing was read yet
        found = [next(iterator).tolist() for _ in range(2)]
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="no idea"):
                loader.state_dict()
        found += [batch.tolist() for batch in iterator]

        assert found == whole
        assert loader.state_dict()["_iterator_finished"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_no_frame_of_fastload_holds_the_error_of_a_state_dict(num_workers: int) -> None:
    """Its traceback holds the frames: they would keep each other alive."""
    with DataLoader(BrokenStream(), 3, num_workers=num_workers) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ArithmeticError) as caught:
            loader.state_dict()

    _this, *others = [frame for frame, _ in traceback.walk_tb(caught.tb)]
    assert others
    assert not any(value is caught.value for frame in others for value in frame.f_locals.values())


def test_a_batch_that_is_lost_on_its_way_is_read_again_after_a_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It brings no state of its worker's stream, which stands where it stood before."""
    whole = [batch.tolist() for batch in loader_of(1)]
    parent, original = os.getpid(), pool.Segment.map
    refusals = iter([False, True])

    def map_or_refuse(self: Any, *, writable: bool) -> Any:
        if os.getpid() == parent and next(refusals, False):
            raise SegmentError("out of address space")
        return original(self, writable=writable)

    monkeypatch.setattr(pool.Segment, "map", map_or_refuse)
    with loader_of(1) as loader:
        iterator = iter(loader)
        first = next(iterator)
        with pytest.raises(BatchLostError, match="out of address space"):
            next(iterator)
        state = through_json(loader.state_dict())
    with loader_of(1) as resumed:
        resumed.load_state_dict(state)
        rest = [batch.tolist() for batch in resumed]

    assert [first.tolist(), *rest] == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_is_forgotten_when_the_stream_can_say_it_again(num_workers: int) -> None:
    """A stream that cannot say it after one batch can be resumed after the next one of the same worker."""
    whole = [batch.tolist() for batch in loader_of(num_workers)]
    with DataLoader(MuteAtTimes(), 3, num_workers=num_workers) as loader:
        iterator = iter(loader)
        asked = []
        for number in range(6):
            next(iterator)
            try:
                asked.append((number, loader.state_dict()))
            except ArithmeticError:
                continue
    assert 0 < len(asked) < 6
    for number, state in asked:
        with DataLoader(MuteAtTimes(), 3, num_workers=num_workers) as resumed:
            resumed.load_state_dict(state)
            assert [batch.tolist() for batch in resumed] == whole[number + 1 :]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_that_cannot_be_pickled(num_workers: int) -> None:
    """It costs no batch; the error comes when the loader's state is asked for."""
    with DataLoader(OddState(), 3, num_workers=num_workers) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
            loader.state_dict()
        assert len(list(iterator)) == 13


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_s_own_error_is_the_error(num_workers: int) -> None:
    """A stream that fails, and whose state_dict() fails then, too, gives the batch's error."""
    with DataLoader(BrokenTwice(), 3, num_workers=num_workers) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ZeroDivisionError):
            next(iterator)
        with pytest.raises(ArithmeticError, match="no idea"):
            loader.state_dict()


@pytest.mark.parametrize("kind", [NeedsArguments, LoadNeedsArguments])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "in_order": False}], ids=str)
def test_a_stream_whose_methods_need_arguments(kind: Any, options: dict[str, Any]) -> None:
    """It is iterated like any stream; a state says why the epoch cannot be resumed in its middle."""
    whole = [batch.tolist() for batch in loader_of(**{"num_workers": 0} | options)]
    with DataLoader(kind(), 3, **options) as loader:
        assert [batch.tolist() for batch in loader] == whole
        next(iter(loader))
        state = through_json(loader.state_dict())
        assert state["dataset_states"] is None or "in_order" in options
        loader.load_state_dict(state)
        with pytest.raises(ResumeError, match=r"after 1 batches: .*(without arguments|in_order=False)"):
            iter(loader)


def test_arguments_with_defaults_are_none_that_fastload_must_give() -> None:
    """A stream whose methods take more, but need no more, is resumed."""
    loader = DataLoader(HasDefaults(), 3)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    loader.load_state_dict(state)

    assert [batch.tolist() for batch in loader] == rest


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samplers_are_asked_the_same_way(num_workers: int) -> None:
    """A sampler whose state_dict() raises costs no batch, and one that needs arguments is not asked."""
    with DataLoader(Numbers(12), 4, sampler=MuteSampler(12), num_workers=num_workers) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ArithmeticError, match="no idea"):
            loader.state_dict()
        assert len(list(iterator)) == 2
        with pytest.raises(ArithmeticError, match="no idea"):
            loader.state_dict()
    with DataLoader(Numbers(12), 4, sampler=SamplerOfArguments(12), num_workers=num_workers) as loader:
        assert len(list(loader)) == 3
        assert loader.state_dict()["samplers"] == {}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_that_copies_ahead_keeps_the_error_of_what_was_received(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With device= an error after a batch that was fetched ahead is raised once the caller has the batch."""
    fake = FakeBackend()
    monkeypatch.setattr(on_device, "choose_backend", lambda device, asker: fake)
    with DataLoader(BrokenStream(), 3, num_workers=num_workers, device="cuda") as loader:
        iterator = iter(loader)
        loader.state_dict()
        next(iterator)
        with pytest.raises(ArithmeticError, match="no idea"):
            loader.state_dict()
        assert len(list(iterator)) == 13
        fake.drain()
    fake.check()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_batches", [0, 1, 4])
def test_a_loader_that_copies_ahead_resumes_where_the_caller_stood(
    num_workers: int, num_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With device= the stream's state is that after the batch handed out, not after those fetched ahead."""
    fake = FakeBackend()
    monkeypatch.setattr(on_device, "choose_backend", lambda device, asker: fake)
    whole = [batch.tolist() for batch in loader_of(num_workers)]
    loader = loader_of(num_workers, device="cuda")
    iterator = iter(loader)
    for _ in range(num_batches):
        next(iterator)
    again = loader_of(num_workers, device="cuda")
    again.load_state_dict(loader.state_dict())
    loader.close()
    rest = list(again)
    fake.drain()

    assert [batch.tolist() for batch in rest] == whole[num_batches:]
    fake.check()
