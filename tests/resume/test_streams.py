"""Every kind of stream, and map-style datasets with a state, are resumed; torchdata's argument is valid."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload import DataLoader
from fastload.epochs import on_device
from fastload.errors import BatchLostError, ResumeError, SegmentError
from fastload.workers import pool
from tests.device.fake import FakeBackend
from tests.resume.loaders import through_json
from tests.resume.stream_zoo import (
    BrokenStream,
    BrokenTwice,
    ContinuesOnce,
    Counting,
    LoadNeedsArguments,
    MakesBoth,
    MakesPosition,
    Mute,
    MuteAtTimes,
    NeedsArguments,
    OddState,
    Shuffled,
    StartsOver,
    Stream,
    draw,
    identity,
)
from tests.resume.zoo import MuteSampler, Numbers, SamplerOfArguments

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAMS = [Mute, MakesPosition, MakesBoth, StartsOver, ContinuesOnce, Stream]


def loader_of(kind: Any, num_workers: int = 0, batch_size: int | None = 3, **options: Any) -> DataLoader:
    return DataLoader(kind(), batch_size, num_workers=num_workers, collate_fn=identity, **options)


def cut(loader: DataLoader, num_batches: int) -> tuple[list[Any], dict[str, Any]]:
    """The first batches of an epoch, and the state after them, through a checkpoint."""
    with loader:
        first = list(itertools.islice(iter(loader), num_batches))
        return first, through_json(loader.state_dict())


def resumed_batches(loader: DataLoader, state: dict[str, Any]) -> list[Any]:
    with loader:
        loader.load_state_dict(state)
        return list(loader)


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(STREAMS),
    batch_size=st.sampled_from([None, 1, 3, 7]),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_any_cut_without_workers(kind: Any, batch_size: int | None, drop_last: bool, data: Any) -> None:
    """The batches before and after any number of cuts are those of an epoch without one."""
    options = {"batch_size": batch_size, "drop_last": drop_last and batch_size is not None}
    whole = list(loader_of(kind, **options))
    first: list[Any] = []
    state: dict[str, Any] | None = None
    for num_batches in data.draw(st.lists(st.integers(0, len(whole)), max_size=3)):
        loader = loader_of(kind, **options)
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        first += itertools.islice(iterator, min(num_batches, len(whole) - len(first)))
        state = through_json(loader.state_dict())
        assert loader.state_dict() == state  # taken twice
    loader = loader_of(kind, **options)
    if state is not None:
        loader.load_state_dict(state)

    assert first + list(loader) == whole


@functools.cache
def whole_epoch(kind: Any, num_workers: int) -> list[Any]:
    with loader_of(kind, num_workers) as loader:
        return list(loader)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize(("num_workers", "num_batches"), [(1, 4), (2, 1), (3, 9)])
def test_cuts_with_workers(kind: Any, num_workers: int, num_batches: int) -> None:
    """Also if a worker ends early, or has not begun."""
    whole = whole_epoch(kind, num_workers)
    first, state = cut(loader_of(kind, num_workers), num_batches)
    with loader_of(kind, num_workers) as loader:
        loader.load_state_dict(state)
        assert first + list(loader) == whole
        assert kind is MakesBoth or list(loader) == whole  # the next epoch is a whole one


def test_a_resumed_epoch_of_workers_is_resumed_again() -> None:
    """The second state counts the batches of both parts, also where each part is long."""
    with loader_of(Stream, 2, 1) as loader:
        whole = list(loader)
    first, state = cut(loader_of(Stream, 2, 1), 7)
    with loader_of(Stream, 2, 1) as loader:
        loader.load_state_dict(state)
        first += itertools.islice(iter(loader), 6)
        state = through_json(loader.state_dict())

    assert state["_num_yielded"] == len(first) == 13
    assert first + resumed_batches(loader_of(Stream, 2, 1), state) == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_is_read_again_is_warned_of(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """The warning says how many batches are read; streams with a state, and beginnings, have none."""
    with caplog.at_level("WARNING", "fastload"):
        for kind in (MakesPosition, Stream):
            resumed_batches(loader_of(kind, num_workers), cut(loader_of(kind, num_workers), 5)[1])
        resumed_batches(loader_of(Mute, num_workers), cut(loader_of(Mute, num_workers), 0)[1])
        assert not caplog.records
        resumed_batches(loader_of(Mute, num_workers), cut(loader_of(Mute, num_workers), 5)[1])

    assert "epoch 0 is resumed by reading 5 batches again" in caplog.text


@pytest.mark.parametrize("collate_fn", [identity, draw])
def test_an_order_that_workers_draw_is_drawn_again(collate_fn: Any) -> None:
    """Workers get the seeds of the epoch, and a collate_fn that draws from the same generator is called."""

    def make() -> DataLoader:
        return DataLoader(Shuffled(), 3, num_workers=2, collate_fn=collate_fn)

    with make() as loader:
        iterator = iter(loader)
        list(itertools.islice(iterator, 5))
        state = through_json(loader.state_dict())
        rest = list(iterator)

    assert resumed_batches(make(), state) == rest


def test_a_stream_that_is_shorter_now() -> None:
    """A stream that ends while it is read again is an error."""
    _, state = cut(DataLoader(Mute(41), 3), 9)
    loader = DataLoader(Mute(11), 3)
    loader.load_state_dict(state)

    with pytest.raises(ResumeError, match="reading 9 batches again, but it ended after 4"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("after", "text"),
    [
        ((Mute, 2), "for each of 3 workers, but this loader has 2"),
        ((Mute, 3, 4), "batch_size 3, after 4 batches, but this loader has 4"),
        ((Stream, 2), "for each of 3 workers.* has 2"),
    ],
    ids=["workers", "batch size", "states"],
)
def test_batches_that_are_read_again_must_be_the_same(after: Any, text: str) -> None:
    """The batches of other workers, or of another size, have other samples; states are of so many copies."""
    loader = loader_of(*after)
    loader.load_state_dict(cut(loader_of(after[0], 3), 4)[1])

    with pytest.raises(ResumeError, match=text):
        iter(loader)


def test_batches_that_a_framework_takes_off_are_not_read_again() -> None:
    """Accelerate changes the number of batches; with several workers nobody knows whose batches these are."""
    whole = list(loader_of(Mute))
    state = cut(loader_of(Mute), 5)[1] | {"_num_yielded": 3}
    assert resumed_batches(loader_of(Mute), state) == whole[3:]

    loader = loader_of(Mute, 2)
    loader.load_state_dict(cut(loader_of(Mute, 2), 5)[1] | {"_num_yielded": 3})
    with pytest.raises(ResumeError, match="3 batches, but workers have read 5"):
        iter(loader)


def test_a_dataset_that_lost_its_state() -> None:
    """The state of a dataset, or of its iterator, needs one that can load it."""
    loader = loader_of(Mute)
    loader.load_state_dict(cut(loader_of(Stream), 2)[1])
    with pytest.raises(ResumeError, match="a Mute, has no state_dict"):
        iter(loader)
    loader.load_state_dict(cut(loader_of(MakesPosition), 2)[1])
    with pytest.raises(ResumeError, match=r"iter\(dataset\) now returns a generator without one"):
        iter(loader)


def test_a_later_epoch_of_persistent_workers_has_states() -> None:
    """Its streams are read from the beginning, and its state is that of this epoch."""
    for kind in (Mute, MakesPosition, Stream):
        with loader_of(kind, 2, persistent_workers=True) as loader:
            whole = list(loader)
            first = list(itertools.islice(loader, 5))
            state = through_json(loader.state_dict())

        assert first + resumed_batches(loader_of(kind, 2), state) == whole


# --- map-style datasets with a state ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "num_batches"), [(0, 0), (0, 7), (1, 1), (1, 13), (3, 0), (3, 2), (3, 7)]
)
def test_a_map_style_dataset_with_a_state(num_workers: int, num_batches: int) -> None:
    """Each worker's copy goes on with its own state."""
    with loader_of(Counting, num_workers, 4) as loader:
        whole = list(loader)
    first, state = cut(loader_of(Counting, num_workers, 4), num_batches)

    assert first + resumed_batches(loader_of(Counting, num_workers, 4), state) == whole


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("num_batches", [13, 20])
def test_its_state_goes_on_from_one_epoch_to_the_next(
    num_workers: int, num_batches: int, persistent: bool
) -> None:
    """Where its copies do: without workers, and in persistent workers."""
    options: dict[str, Any] = {"num_workers": num_workers, "batch_size": 4, "persistent_workers": persistent}
    with loader_of(Counting, **options) as loader:
        whole = [*loader, *loader]
    with loader_of(Counting, **options) as loader:
        first = list(itertools.islice(itertools.chain(loader, loader), num_batches))
        state = through_json(loader.state_dict())
    with loader_of(Counting, **options) as resumed:
        resumed.load_state_dict(state)
        rest = list(resumed)
        if len(first) + len(rest) < len(whole):
            rest += list(resumed)

    assert first + rest == whole


def test_its_state_needs_the_same_number_of_workers() -> None:
    """In the middle of an epoch; at its beginning, the copies start from the dataset as it is."""
    loader = loader_of(Counting, 3, 4)
    loader.load_state_dict(cut(loader_of(Counting, 2, 4), 5)[1])
    with pytest.raises(ResumeError, match="for each of 2 workers, but this loader has 3"):
        iter(loader)

    for kind in (Counting, Stream):
        state = cut(loader_of(kind, 2, 4), 0)[1]
        with loader_of(kind, 3, 4) as plain:
            assert resumed_batches(loader_of(kind, 3, 4), state) == list(plain)


def test_worker_threads_share_the_dataset() -> None:
    """A state has none of the dataset's then, and any number of threads resumes."""
    _, state = cut(loader_of(Counting, 2, 4, worker_type="thread"), 5)

    assert state["dataset_states"] is None
    assert len(resumed_batches(loader_of(Counting, 3, 4, worker_type="thread"), state)) == 8


# --- torchdata's argument ---------------------------------------------------------------------------------


def test_snapshots_every_n_steps() -> None:
    """The argument is accepted and checked, and the state is exact after every batch."""
    assert loader_of(Stream, snapshot_every_n_steps=None).snapshot_every_n_steps is None
    with loader_of(Stream, 2, snapshot_every_n_steps=10) as loader:
        counts = [loader.state_dict()["_num_yielded"] for _ in loader]

    assert loader.snapshot_every_n_steps == 10
    assert counts == list(range(1, 15))
    for steps in (0, 1.5, True):
        with pytest.raises(
            ValueError, match="snapshot_every_n_steps should be an int of at least 1, or None"
        ):
            loader_of(Stream, snapshot_every_n_steps=steps)


@pytest.mark.parametrize("batch_size", [None, 3])
def test_iter_is_called_once(batch_size: int | None) -> None:
    """As in torch: a stream that starts over with each iter() gives each sample once."""
    found = list(DataLoader(StartsOver(), batch_size, collate_fn=identity))

    assert [sample for batch in found for sample in (batch if batch_size else [batch])] == list(range(41))


# --- faults of streams -----------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
def test_persistent_workers_resume_twice(drop_last: bool) -> None:
    """A state that is loaded between epochs of persistent workers reaches them; so does a second one."""
    options: dict[str, Any] = {"persistent_workers": True, "drop_last": drop_last}
    with loader_of(Stream, 2, **options) as loader:
        whole = list(loader)
        for num_batches in (3, 5):
            first, state = cut(loader_of(Stream, 2, **options), num_batches)
            loader.load_state_dict(state)
            assert first + list(loader) == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_cannot_say_where_it_stands(num_workers: int) -> None:
    """It brings all batches; its error comes when the loader's state is asked for, each time, with a note."""
    with loader_of(Stream, num_workers) as plain:
        whole = list(plain)
    with loader_of(BrokenStream, num_workers) as loader:
        iterator = iter(loader)
        loader.state_dict()  # nothing was read yet
        found = [next(iterator), next(iterator)]
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="no idea") as caught:
                loader.state_dict()
        assert [*found, *iterator] == whole
        assert loader.state_dict()["_iterator_finished"]

    # The error's traceback holds frames: one that held the error would be kept alive by it.
    _this, *others = [frame for frame, _ in traceback.walk_tb(caught.tb)]
    assert others
    assert not any(value is caught.value for frame in others for value in frame.f_locals.values())


def test_a_batch_that_is_lost_on_its_way_is_read_again_after_a_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It brings no state of its worker's stream, which stands where it stood before."""
    whole = [torch.tensor(batch) for batch in loader_of(Stream)]
    parent, original = os.getpid(), pool.Segment.map
    refusals = iter([False, True])

    def map_or_refuse(self: Any, *, writable: bool) -> Any:
        if os.getpid() == parent and next(refusals, False):
            raise SegmentError("out of address space")
        return original(self, writable=writable)

    monkeypatch.setattr(pool.Segment, "map", map_or_refuse)
    with DataLoader(Stream(), 3, num_workers=1) as loader:
        iterator = iter(loader)
        first = next(iterator)
        with pytest.raises(BatchLostError, match="out of address space"):
            next(iterator)
        state = through_json(loader.state_dict())

    rest = resumed_batches(DataLoader(Stream(), 3, num_workers=1), state)
    assert all(torch.equal(one, other) for one, other in zip([first, *rest], whole, strict=True))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_is_forgotten_when_the_stream_can_say_it_again(num_workers: int) -> None:
    """A stream that cannot say it after one batch can be resumed after the next one of the same worker."""
    with loader_of(Stream, num_workers) as plain:
        whole = list(plain)
    with loader_of(MuteAtTimes, num_workers) as loader:
        iterator = iter(loader)
        asked = []
        for number in range(6):
            next(iterator)
            with contextlib.suppress(ArithmeticError):
                asked.append((number, loader.state_dict()))
    assert 0 < len(asked) < 6
    for number, state in asked:
        assert resumed_batches(loader_of(MuteAtTimes, num_workers), state) == whole[number + 1 :]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_that_cannot_be_pickled(num_workers: int) -> None:
    """It costs no batch; the error comes when the loader's state is asked for."""
    with loader_of(OddState, num_workers) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
            loader.state_dict()
        assert len(list(iterator)) == 13


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_s_own_error_is_the_error(num_workers: int) -> None:
    """A stream that fails, and whose state_dict() fails then, too, gives the batch's error."""
    with loader_of(BrokenTwice, num_workers) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ZeroDivisionError):
            next(iterator)
        with pytest.raises(ArithmeticError, match="no idea"):
            loader.state_dict()


@pytest.mark.parametrize("kind", [NeedsArguments, LoadNeedsArguments])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "in_order": False}], ids=str)
def test_a_stream_whose_methods_need_arguments(kind: Any, options: dict[str, Any]) -> None:
    """It is iterated like any stream; a state says why the epoch cannot be resumed in its middle."""
    with loader_of(kind, **options) as loader:
        assert list(loader) == list(loader_of(Stream))
        next(iter(loader))
        state = through_json(loader.state_dict())
        assert state["dataset_states"] is None or "in_order" in options
        loader.load_state_dict(state)
        with pytest.raises(ResumeError, match=r"after 1 batches: .*(without arguments|in_order=False)"):
            iter(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samplers_are_asked_the_same_way(num_workers: int) -> None:
    """A sampler whose state_dict() raises costs no batch, and one that needs arguments is not asked."""
    with DataLoader(Numbers(12), 4, sampler=MuteSampler(12), num_workers=num_workers) as loader:
        iterator = iter(loader)
        next(iterator)
        for num_left in (2, 0):
            with pytest.raises(ArithmeticError, match="no idea"):
                loader.state_dict()
            assert len(list(iterator)) == num_left
    with DataLoader(Numbers(12), 4, sampler=SamplerOfArguments(12), num_workers=num_workers) as loader:
        assert len(list(loader)) == 3
        assert loader.state_dict()["samplers"] == {}


# --- copies ahead ----------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBackend]:
    """A device to which loaders with device= copy ahead."""
    fake = FakeBackend()
    monkeypatch.setattr(on_device, "choose_backend", lambda device, asker: fake)
    yield fake
    fake.drain()
    fake.check()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_that_copies_ahead_keeps_the_error_of_what_was_received(
    num_workers: int, fake: FakeBackend
) -> None:
    """An error after a batch that was fetched ahead is raised once the caller has the batch."""
    with DataLoader(BrokenStream(), 3, num_workers=num_workers, device="cuda") as loader:
        iterator = iter(loader)
        loader.state_dict()
        next(iterator)
        with pytest.raises(ArithmeticError, match="no idea"):
            loader.state_dict()
        assert len(list(iterator)) == 13


@pytest.mark.parametrize(("num_workers", "num_batches"), [(0, 0), (0, 4), (2, 1), (2, 4)])
def test_a_loader_that_copies_ahead_resumes_where_the_caller_stood(
    num_workers: int, num_batches: int, fake: FakeBackend
) -> None:
    """The stream's state is that after the batch handed out, not after those fetched ahead."""
    with loader_of(Stream, num_workers) as plain:
        whole = list(plain)
    with DataLoader(Stream(), 3, num_workers=num_workers, device="cuda") as loader:
        list(itertools.islice(iter(loader), num_batches))
        state = loader.state_dict()
    rest = resumed_batches(DataLoader(Stream(), 3, num_workers=num_workers, device="cuda"), state)
    fake.drain()

    assert [batch.tolist() for batch in rest] == whole[num_batches:]
