"""Resuming: the rest of an interrupted epoch, and all later ones, are those of an uninterrupted run."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from fastload import DataLoader
from fastload.errors import ResumeError
from tests.kit import datasets
from tests.resume.loaders import LENGTH, SAMPLERS, labels, make, seeded, through_json, through_torch_save
from tests.resume.stream_zoo import Mute
from tests.resume.zoo import Foreign, Numbers


def start_epoch(loader: DataLoader, epoch: int) -> Any:
    loader.set_epoch(epoch)
    return iter(loader)


def uninterrupted(kind: str, epochs: int, **options: Any) -> list[list[list[int]]]:
    """What each epoch brings in a run from seed 11 on that draws from torch's generator, as training does."""
    torch.manual_seed(11)
    loader = make(kind, **options)
    runs = []
    for epoch in range(epochs):
        runs.append(labels(start_epoch(loader, epoch)))
        torch.rand(3)
    loader.close()
    return runs


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("cut", [(0, 0), (0, 3), (1, 1), (1, 5), (1, 99)])
def test_the_rest_is_that_of_an_uninterrupted_run(kind: str, cut: tuple[int, int]) -> None:
    """In a new process the rest of the epoch and the next epochs are the same, for each kind of sampler."""
    epoch, batches = cut
    expected = uninterrupted(kind, 4)
    torch.manual_seed(11)
    loader = make(kind)
    for earlier in range(epoch):
        labels(start_epoch(loader, earlier))
        torch.rand(3)
    seen = labels(itertools.islice(start_epoch(loader, epoch), batches))
    state, default_state = through_json(loader.state_dict()), torch.get_rng_state()
    assert pickle.loads(pickle.dumps(loader)).state_dict()["_num_yielded"] == 0  # a copy shares no progress

    resumed = make(kind)
    assert resumed.state_dict()["epoch"] == 0  # and asking for it draws nothing
    resumed.load_state_dict(state)
    torch.set_rng_state(default_state)
    if batches == 99:  # the caller has seen the end
        assert state["_iterator_finished"]
    else:
        rest = labels(resumed)
        assert seen + rest == expected[epoch]
        assert resumed.dataset.reads == sum(map(len, rest)) // 2  # what is passed over is not read
        assert resumed.state_dict()["epoch"] == epoch
    torch.rand(3)
    for later in range(epoch + 1, 4):
        assert labels(start_epoch(resumed, later)) == expected[later]
        torch.rand(3)


@pytest.mark.parametrize(
    ("kind", "before", "after", "persistent"),
    [
        ("shuffle, generator", 0, 3, False),
        ("shuffle, generator", 2, 1, True),
        ("no batches", 2, 0, False),
        ("no batches", 0, 1, True),
        ("stateful", 2, 3, True),
        ("stateful", 2, 0, False),
    ],
)
def test_another_number_of_workers(kind: str, before: int, after: int, persistent: bool) -> None:
    """An epoch that was begun with some workers is finished with others, none or more.

    Torch begins with a sampler twice where there are workers, and its order is that of the second time.
    """
    expected = uninterrupted(kind, 2, num_workers=before, persistent=persistent)
    torch.manual_seed(11)
    with make(kind, before, persistent=persistent) as loader:
        labels(start_epoch(loader, 0))
        torch.rand(3)
        seen = labels(itertools.islice(start_epoch(loader, 1), 5))
        state = through_torch_save(loader.state_dict())
    with make(kind, after, persistent=persistent) as resumed:
        resumed.load_state_dict(state)

        assert seen + labels(resumed) == expected[1]


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 12), max_size=6),
    kind=st.sampled_from(["shuffle, generator", "with replacement", "batch sampler", "stateful"]),
)
def test_any_number_of_interruptions(cuts: list[int], kind: str) -> None:
    """However often a run is interrupted, and wherever, it brings what one that goes through brings."""
    expected = [batch for epoch in uninterrupted(kind, 3) for batch in epoch]
    loader = make(kind)
    seen: list[list[int]] = []
    for cut in cuts:
        seen += labels(itertools.islice(loader, cut))
        state = loader.state_dict()
        loader = make(kind)
        loader.load_state_dict(state)
    while len(seen) < len(expected):
        seen += labels(loader)

    assert seen[: len(expected)] == expected


def test_the_last_batch_is_not_the_end() -> None:
    """After the last batch, before the end was seen, a resumed epoch brings nothing more."""
    loader = make("in order")
    iterator = iter(loader)
    for _ in range(13):
        next(iterator)
    state = loader.state_dict()
    resumed = make("in order")
    resumed.load_state_dict(state)

    assert not state["_iterator_finished"]
    assert list(resumed) == []
    assert len(list(resumed)) == 13


def test_a_foreign_sampler_is_found_out() -> None:
    """A sampler that gives other indices the second time is an error that says what to do."""
    loader = DataLoader(Numbers(LENGTH), 4, sampler=Foreign(LENGTH))
    list(itertools.islice(loader, 3))
    resumed = DataLoader(Numbers(LENGTH), 4, sampler=Foreign(LENGTH))
    resumed.load_state_dict(loader.state_dict())

    with pytest.raises(ResumeError, match=r"indices for the first 3 batches.*attribute `generator`"):
        iter(resumed)


@pytest.mark.parametrize("num_yielded", [0, 2])
def test_a_number_of_batches_that_a_framework_has_lowered_counts(num_yielded: int) -> None:
    """Accelerate takes off the batches that it has prefetched: the checksum does not fit any more."""
    expected = uninterrupted("shuffle, generator", 1)[0]
    loader = make("shuffle, generator")
    labels(itertools.islice(start_epoch(loader, 0), 4))
    resumed = make("shuffle, generator")
    resumed.load_state_dict({**loader.state_dict(), "_num_yielded": num_yielded})

    assert labels(resumed) == expected[num_yielded:]


def test_another_dataset_is_found_out() -> None:
    """A sampler with fewer batches than were received is an error."""
    loader = make("in order")
    list(itertools.islice(loader, 10))
    resumed = DataLoader(Numbers(8), 4)
    resumed.load_state_dict(loader.state_dict())

    with pytest.raises(ResumeError, match="had at least 10 batches, but the sampler now has 2"):
        iter(resumed)


def test_the_beginning_of_a_stream_s_epoch_is_passed_on() -> None:
    """A state at the beginning of a stream's epoch, loaded and taken again, names the same generators."""
    found = []
    for seed in (9, 1):
        loader = DataLoader(Mute(20), 4, generator=seeded(seed))
        if found:
            loader.load_state_dict(found[0])
        iter(loader)
        found.append(loader.state_dict())

    assert [state["_num_yielded"] for state in found] == [0, 0]
    names = found[0]["generators"].keys() - {"default"}
    assert names
    assert all(found[0]["generators"][name] == found[1]["generators"][name] for name in names)


@pytest.mark.parametrize("rng", ["worker", "sample"])
def test_torch_s_own_iterators_say_that_they_cannot(rng: Any) -> None:
    """What goes through torch's iterator is counted; it can be resumed at its end, and not in its middle."""
    options: dict[str, Any] = {"num_workers": 1, "in_order": False, "persistent_workers": True, "rng": rng}
    with DataLoader(Numbers(12), 4, **options) as loader, DataLoader(Numbers(12), 4, **options) as resumed:
        for number in range(2):
            iterator = iter(loader)
            next(iterator), next(iterator)
            resumed.load_state_dict(loader.state_dict())
            with pytest.raises(ResumeError, match="after 2 batches: in_order=False"):
                iter(resumed)
            assert len(list(iterator)) == 1
            assert loader.state_dict()["epoch"] == number

        resumed.load_state_dict(loader.state_dict())
        assert len(list(resumed)) == 3
        assert resumed.state_dict()["epoch"] == 2


def test_an_older_iterator_of_torch_s_counts_in_its_own_epoch() -> None:
    """What goes on with an earlier iterator over in_order=False is no batch of the later one's epoch."""
    with DataLoader(Numbers(12), 4, num_workers=1, in_order=False) as loader:
        older = iter(loader)
        later = iter(loader)
        list(older)
        next(later)
        state = loader.state_dict()

    assert (state["epoch"], state["_num_yielded"], state["_iterator_finished"]) == (1, 1, False)


class Told(Numbers):
    """Gives the epoch that it was told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return self.epoch


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_set_epoch_reaches_everyone(options: dict[str, Any]) -> None:
    """Samplers, the dataset, and its copies in persistent workers are told the epoch."""
    dataset = Told(8)
    sampler = DistributedSampler(dataset, 2, 0)
    with DataLoader(dataset, 2, sampler=sampler, **options) as loader:
        for epoch in (3, 1, 4):
            loader.set_epoch(epoch)
            seen = {value for batch in loader for value in batch.tolist()}

            assert seen == {epoch}
            assert sampler.epoch == epoch


@pytest.mark.parametrize(("num_workers", "num_received"), [(0, 1), (2, 0)])
def test_a_state_brings_back_an_order_of_torchs_default_generator(
    num_workers: int, num_received: int
) -> None:
    """Also one from before the first batch: torch's sampler draws its order when that is asked for."""

    def make() -> DataLoader:
        return DataLoader(Numbers(12), 4, shuffle=True, num_workers=num_workers)

    torch.manual_seed(0)
    loader = make()
    iterator = iter(loader)
    first = [next(iterator).tolist() for _ in range(num_received)]
    state = loader.state_dict()
    expected = first + [batch.tolist() for batch in iterator]
    torch.manual_seed(1)  # as in another process
    before = torch.get_rng_state()

    resumed = make()
    resumed.load_state_dict(state)
    got = first + [batch.tolist() for batch in resumed]

    assert got == expected
    assert torch.equal(torch.get_rng_state(), before)


def _constant(key: Any) -> int:
    return 1


def _loader_of_keys(keys: list[Any]) -> DataLoader:
    return DataLoader(datasets.Made(_constant, len(keys)), 2, sampler=keys)


@pytest.mark.parametrize(
    ("before", "after", "is_refused"),
    [
        (["a", "b", "c", "d"], ["a", "b", "c", "d"], False),
        (["a", "b", "c", "d"], ["a", "x", "c", "d"], True),
        ([object() for _ in range(4)], [object() for _ in range(4)], False),
        ([object() for _ in range(4)], [Ellipsis for _ in range(4)], True),
    ],
    ids=["same texts", "other texts", "addresses", "other kinds"],
)
def test_keys_are_told_apart_by_their_text(before: list[Any], after: list[Any], is_refused: bool) -> None:
    """Less the addresses in it, which the next process does not have."""
    loader = _loader_of_keys(before)
    next(iter(loader))
    resumed = _loader_of_keys(after)
    resumed.load_state_dict(through_json(loader.state_dict()))

    with pytest.raises(ResumeError, match="different indices") if is_refused else contextlib.nullcontext():
        assert len(list(resumed)) == 1


@pytest.mark.parametrize("kind", ["shuffle", "weighted", "no batches", "stateful"])
def test_persistent_workers_resume_between_epochs(kind: str) -> None:
    """The next epoch has the batches that it has without an interruption, though the workers are new."""
    with make(kind, 2, persistent=True) as loader:
        torch.manual_seed(11)
        list(loader)
        state, default = through_json(loader.state_dict()), torch.get_rng_state()
        expected = labels(loader)
        after = torch.get_rng_state()
        last = labels(loader)

    with make(kind, 2, persistent=True) as fresh:
        fresh.load_state_dict(state)
        torch.set_rng_state(default)
        found = labels(fresh)
        assert torch.equal(torch.get_rng_state(), after)

        assert (found, labels(fresh)) == (expected, last)
