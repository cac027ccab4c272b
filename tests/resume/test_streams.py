"""Iterable datasets with a state_dict(): each worker's copy goes on where the caller left it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload import DataLoader, delivery
from fastload.errors import ResumeError
from tests.device.fake import FakeBackend
from tests.resume.loaders import through_json
from tests.resume.zoo import BrokenStream, Stream


def loader_of(num_workers: int, **options: Any) -> DataLoader:
    return DataLoader(Stream(), **{"batch_size": 3, "num_workers": num_workers, **options})


def cut(loader: DataLoader, num_batches: int) -> tuple[list[Any], Any]:
    """The first batches of an epoch, and the state after them, through a checkpoint."""
    iterator = iter(loader)
    batches = [next(iterator).tolist() for _ in range(num_batches)]
    state = through_json(loader.state_dict())
    loader.close()
    return batches, state


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


def test_a_stream_that_cannot_say_where_it_stands() -> None:
    """Its error comes at the batch, with and without workers."""
    for num_workers in (0, 1):
        with pytest.raises(ArithmeticError, match="no idea"):
            next(iter(DataLoader(BrokenStream(), 3, num_workers=num_workers)))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_batches", [0, 1, 4])
def test_a_loader_that_copies_ahead_resumes_where_the_caller_stood(
    num_workers: int, num_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With device= the stream's state is that after the batch handed out, not after those fetched ahead."""
    fake = FakeBackend()
    monkeypatch.setattr(delivery, "choose_backend", lambda device, asker: fake)
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
