"""Every kind of stream, and map-style datasets with a state, are resumed; torchdata's argument is valid."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload import DataLoader
from fastload.errors import ResumeError
from tests.resume.loaders import through_json
from tests.resume.stream_zoo import (
    ContinuesOnce,
    Counting,
    MakesBoth,
    MakesPosition,
    Mute,
    Shuffled,
    StartsOver,
    draw,
    identity,
)
from tests.resume.zoo import Stream

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


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize(("num_workers", "num_batches"), [(1, 4), (2, 1), (3, 5), (3, 9)])
def test_cuts_with_workers(kind: Any, num_workers: int, num_batches: int) -> None:
    """Also if a worker ends early, or has not begun."""
    with loader_of(kind, num_workers) as loader:
        whole = list(loader)
    first, state = cut(loader_of(kind, num_workers), num_batches)

    assert first + resumed_batches(loader_of(kind, num_workers), state) == whole


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
        (lambda: loader_of(Mute, 2), "in 3 workers, but this loader has 2"),
        (lambda: loader_of(Mute, 3, 4), "batch_size 3, after 4 batches, but this loader has 4"),
    ],
    ids=["workers", "batch size"],
)
def test_batches_that_are_read_again_must_be_the_same(after: Any, text: str) -> None:
    """The batches of other workers, or of another size, have other samples."""
    loader = after()
    loader.load_state_dict(cut(loader_of(Mute, 3), 4)[1])

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


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("num_batches", [0, 1, 2, 7, 13])
def test_a_map_style_dataset_with_a_state(num_workers: int, num_batches: int) -> None:
    """Each worker's copy goes on with its own state."""
    with loader_of(Counting, num_workers, 4) as loader:
        whole = list(loader)
    first, state = cut(loader_of(Counting, num_workers, 4), num_batches)

    assert first + resumed_batches(loader_of(Counting, num_workers, 4), state) == whole


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("num_batches", [13, 14, 20])
def test_its_state_goes_on_from_one_epoch_to_the_next(
    num_workers: int, num_batches: int, *, persistent: bool
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
    with pytest.raises(ResumeError, match="in 2 workers, but this loader has 3"):
        iter(loader)

    state = cut(loader_of(Counting, 2, 4), 0)[1]
    assert len(resumed_batches(loader_of(Counting, 3, 4), state)) == 13


def test_worker_threads_share_the_dataset() -> None:
    """A state has none of the dataset's then, and any number of threads resumes."""
    _, state = cut(loader_of(Counting, 2, 4, worker_method="thread"), 5)

    assert state["dataset_states"] is None
    assert len(resumed_batches(loader_of(Counting, 3, 4, worker_method="thread"), state)) == 8


# --- torchdata's argument ---------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 10, None])
def test_snapshots_every_n_steps(steps: int | None) -> None:
    """The argument is accepted, and the state is exact after every batch."""
    with loader_of(Stream, 2, snapshot_every_n_steps=steps) as loader:
        counts = [loader.state_dict()["_num_yielded"] for _ in loader]

    assert loader.snapshot_every_n_steps == steps
    assert counts == list(range(1, 15))


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_numbers_of_steps_that_are_not_valid(steps: Any) -> None:
    """The error says what was expected, and what came."""
    with pytest.raises(ValueError, match="snapshot_every_n_steps should be an int of at least 1, or None"):
        loader_of(Stream, snapshot_every_n_steps=steps)


@pytest.mark.parametrize("batch_size", [None, 3])
def test_iter_is_called_once(batch_size: int | None) -> None:
    """As in torch: a stream that starts over with each iter() gives each sample once."""
    found = list(DataLoader(StartsOver(), batch_size, collate_fn=identity))

    assert [sample for batch in found for sample in (batch if batch_size else [batch])] == list(range(41))
