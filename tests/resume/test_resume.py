"""Resuming: the rest of an interrupted epoch, and all later ones, are those of an uninterrupted run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from fastload import DataLoader
from fastload.errors import ResumeError
from tests.kit import torchs_own
from tests.resume.loaders import (
    DATASETS,
    SAMPLERS,
    STREAMS,
    Points,
    labels,
    make,
    run,
    state_after,
    through_json,
    through_torch_save,
    uninterrupted,
)
from tests.resume.zoo import Numbers, Stream

# Without workers its samples are drawn where nobody sees it; a later epoch of MakesBoth has other samples.
LOCAL = sorted((SAMPLERS | DATASETS).keys() - {"Shuffled, draws"})
POINTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), max_size=5).map(sorted).map(tuple)


@settings(max_examples=80, deadline=None)
@given(kind=st.sampled_from(LOCAL), points=POINTS, send=st.sampled_from([through_json, through_torch_save]))
def test_any_interruptions_without_workers(kind: str, points: Points, send: Any) -> None:
    """However often and wherever a run stops, new processes bring what one that goes through brings."""
    epochs = 1 if kind == "MakesBoth" else 3

    assert run(kind, epochs, points, send=send) == uninterrupted(kind, epochs)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(STREAMS),
    batch_size=st.sampled_from([None, 1, 7]),
    drop_last=st.booleans(),
    numbers=st.lists(st.integers(0, 45), max_size=3).map(sorted),
)
@example(kind="Stream", batch_size=1, drop_last=False, numbers=[7, 13])  # the second state counts both parts
def test_any_batches_of_streams_without_workers(
    kind: str, batch_size: Any, drop_last: bool, numbers: list[int]
) -> None:
    """Single samples, batches of one, and a last batch that is short or dropped."""
    options = {"batch_size": batch_size, "drop_last": drop_last and batch_size is not None}
    whole = run(kind, 1, **options)

    assert run(kind, 1, tuple((0, number) for number in numbers), **options) == whole
    if kind != "MakesBoth" and not options["drop_last"]:  # as in torch, iter() is called once
        assert [index for batch in whole[0] for index in batch] == list(range(41))


BETWEEN = ((0, 99),)
WITHIN = ((1, 3),)
WITH_WORKERS: list[Any] = [
    # Workers and none, in turn: an order does not depend on who reads it.
    *((kind, 2, WITHIN, [1, 0] if place % 2 else [0, 1]) for place, kind in enumerate(SAMPLERS)),
    ("stateful", 2, ((1, 5),), [2, 3]),
    *((kind, 3, BETWEEN, [1]) for kind in ("shuffle", "weighted", "no batches", "stateful")),
    # Streams, whose second worker has not begun, or ends early.
    *((kind, 1, ((0, 1), (0, 7)), [2]) for kind in ("Mute", "Stream")),
    *((kind, 1, ((0, 7),), [2]) for kind in STREAMS if kind not in ("Mute", "Stream", "StartsOver")),
    *((kind, 1, ((0, 9),), [3]) for kind in ("Mute", "Stream")),
    *((kind, 2, WITHIN, [1]) for kind in ("MakesSamples", "Stream")),
    ("Shuffled, draws", 1, ((0, 0), (0, 5)), [2]),
]


@pytest.mark.parametrize(("kind", "epochs", "points", "workers"), WITH_WORKERS)
def test_interruptions_with_workers(kind: str, epochs: int, points: Points, workers: list[int]) -> None:
    """The same with any number of workers before and after, whose second epoch is that of persistent ones."""
    found = run(kind, epochs, points, workers, send=through_torch_save, persistent=True)

    assert found == uninterrupted(kind, epochs, workers[0], persistent=True)


@pytest.mark.parametrize("options", [{"drop_last": True}, {"worker_type": "thread"}])
def test_a_loader_is_resumed_twice(options: dict[str, Any]) -> None:
    """A state that is loaded between epochs of persistent workers reaches them; so does a second one."""
    kind = "Stream" if "drop_last" in options else "shuffle, generator"
    with make(kind, 2, persistent=True, **options) as loader:
        whole = labels(loader)
        for num_batches in (3, 5):
            other = make(kind, 2, **options)
            loader.load_state_dict(state_after(other, num_batches))
            assert labels(loader) == whole[num_batches:]


# --- what a framework changes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "number"), [("shuffle, generator", 0), ("shuffle, generator", 2), ("Mute", 3)]
)
def test_a_number_of_batches_that_a_framework_has_lowered_counts(kind: str, number: int) -> None:
    """Accelerate takes off the batches that it has prefetched: the checksum does not fit any more."""
    loader = make(kind)
    loader.load_state_dict({**state_after(make(kind), 4), "_num_yielded": number})

    assert labels(loader) == uninterrupted(kind, 1)[0][number:]


@pytest.mark.parametrize("num_batches", [None, 0, 99])
def test_another_batch_size_between_epochs(num_batches: int | None) -> None:
    """Before the first batch, and after the end, the samples of the next epoch come in other batches."""
    loader = make("shuffle, generator")
    if num_batches is not None:
        list(itertools.islice(loader, num_batches))
    state = through_json(loader.state_dict())
    rest = torch.cat(list(loader if num_batches != 0 else make("shuffle, generator")))
    resumed = make("shuffle, generator", batch_size=5)
    resumed.load_state_dict(state)

    assert torch.equal(torch.cat(list(resumed)), rest)


def test_another_batch_size_of_a_stream_with_a_state() -> None:
    """Its own state counts samples: the rest comes in batches of the new size."""
    resumed = DataLoader(Stream(), 5)
    resumed.load_state_dict(state_after(DataLoader(Stream(), 3), 2))

    assert torch.cat(list(resumed)).tolist() == list(range(6, 41))


def test_another_number_of_workers_at_the_beginning() -> None:
    """The copies of a stream start from the stream as it is."""
    with make("Stream", 2) as plain, make("Stream", 2) as resumed:
        resumed.load_state_dict(state_after(make("Stream"), 0))
        assert labels(resumed) == labels(plain)


# --- torch's own iterators -------------------------------------------------------------------------------


def test_torch_s_own_iterators_say_that_they_cannot() -> None:
    """What goes through torch's iterator is counted; it can be resumed at its end, and not in its middle."""
    options: dict[str, Any] = {"num_workers": 1, **torchs_own.FORK, "persistent_workers": True}
    with DataLoader(Numbers(12), 4, **options) as loader, DataLoader(Numbers(12), 4, **options) as resumed:
        for number in range(2):
            iterator = iter(loader)
            next(iterator), next(iterator)
            resumed.load_state_dict(loader.state_dict())
            with pytest.raises(ResumeError, match="at batch 2: multiprocessing_context is a OwnFork"):
                iter(resumed)
            assert len(list(iterator)) == 1
            assert loader.state_dict()["epoch"] == number

        resumed.load_state_dict(loader.state_dict())
        assert len(list(resumed)) == 3
        assert resumed.state_dict()["epoch"] == 2


def test_an_older_iterator_of_torch_s_counts_in_its_own_epoch() -> None:
    """What goes on with an earlier iterator of torch's is no batch of the later one's epoch."""
    with DataLoader(Numbers(12), 4, num_workers=1, **torchs_own.FORK) as loader:
        older, later = iter(loader), iter(loader)
        list(older)
        next(later)
        state = loader.state_dict()

    assert (state["epoch"], state["_num_yielded"], state["_iterator_finished"]) == (1, 1, False)


# --- what epochs and states tell -------------------------------------------------------------------------


class Told(Numbers):
    """Gives the epoch that it was told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return self.epoch


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_set_epoch_reaches_everyone(options: dict[str, Any]) -> None:
    """Samplers, the dataset, and its copies in persistent workers are told the epoch, until the next call."""
    dataset = Told(8)
    sampler = DistributedSampler(dataset, 2, 0)
    with DataLoader(dataset, 2, sampler=sampler, **options) as loader:
        for epoch in (3, 1):
            loader.set_epoch(epoch)
            for _ in range(2):
                assert {value for batch in loader for value in batch.tolist()} == {epoch}
            assert sampler.epoch == epoch


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_is_read_again_is_warned_of(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """The warning says how many batches are read; streams with a state, and beginnings, have none."""
    told = []
    for kind, num_batches in [("MakesSamples", 5), ("Stream", 5), ("Mute", 0), ("Mute", 5)]:
        with caplog.at_level("WARNING", "fastload"), make(kind, num_workers) as loader:
            loader.load_state_dict(state_after(make(kind, num_workers), num_batches))
            iter(loader)
        told.append("is resumed by reading 5 batches again" in caplog.text)

    assert told == [False, False, False, True]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent": True}], ids=str)
def test_a_rest_without_batches_is_an_epoch_for_all_but_lightning(options: dict[str, Any]) -> None:
    """Lightning's loop has moved on after the last batch; others ask for the rest of the epoch."""
    in_lightning: dict[str, Any] = {"__name__": "lightning.pytorch.utilities.combined_loader"}
    exec("def load(loader, state): loader.load_state_dict(state)", in_lightning)
    with make("shuffle, generator", **options) as loader:
        state = state_after(make("shuffle, generator", **options), len(loader))
        whole = [labels(loader) for _ in range(3)]

    with make("shuffle, generator", **options) as plain, make("shuffle, generator", **options) as other:
        plain.load_state_dict(state)
        in_lightning["load"](other, state)

        assert [labels(plain) for _ in range(3)] == [[], *whole[1:]]
        assert [labels(other) for _ in range(2)] == whole[1:]
