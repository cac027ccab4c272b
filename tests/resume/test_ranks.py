"""The state of one rank on every rank; what does not fit is in test_saved_state.py."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload import DataLoader, NodePartitionSampler
from fastload.epochs import position
from fastload.errors import ResumeError
from tests.resume.loaders import distributed, labels, seeded, sharded, state_after, through_json
from tests.resume.zoo import Numbers, Stream


def partitioned(length: int, batch_size: int, num_ranks: int, rank: int) -> DataLoader:
    """The samples of one of two nodes, or of as many nodes as ranks."""
    num_nodes = 2 if num_ranks == 4 else num_ranks
    sampler = NodePartitionSampler(range(length), num_ranks, rank, num_nodes=num_nodes, seed=5)
    return DataLoader(Numbers(length), batch_size, sampler=sampler)


MAKERS: dict[str, Any] = {"distributed": distributed, "sharded batches": sharded, "partitioned": partitioned}


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Make torch.distributed say that this process is of this rank."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(MAKERS)),
    length=st.integers(12, 60),
    batch_size=st.integers(1, 5),
    num_ranks=st.integers(1, 4),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_every_rank_resumes_from_the_state_of_one(
    kind: str, length: int, batch_size: int, num_ranks: int, epoch: int, data: Any
) -> None:
    """The rest of its own epoch, and of the next epoch, are those of a run without an interruption."""
    make = MAKERS[kind]

    def epochs(loader: DataLoader, first: int) -> list[Any]:
        found = []
        for number in (first, first + 1):
            loader.set_epoch(number)
            found.append(labels(loader))
        return found

    saver = make(length, batch_size, num_ranks, data.draw(st.integers(0, num_ranks - 1)))
    saver.set_epoch(epoch)
    num_batches = data.draw(st.integers(0, len(saver)))
    state = state_after(saver, num_batches)
    for rank in range(num_ranks):
        whole = epochs(make(length, batch_size, num_ranks, rank), epoch)
        resumed = make(length, batch_size, num_ranks, rank)
        resumed.load_state_dict(state)
        rest = [] if state["_iterator_finished"] else labels(resumed)
        resumed.set_epoch(epoch + 1)

        assert rest == whole[0][num_batches:]
        assert labels(resumed) == whole[1]


def test_a_resumed_rank_saves_its_own_state() -> None:
    """After a resume from another rank, the state of this rank is checked by its indices again."""
    resumed = distributed(40, 4, 2, 1)
    resumed.load_state_dict(state_after(distributed(40, 4, 2, 0), 2))
    state = state_after(resumed, 1)
    again = distributed(40, 4, 2, 1)
    changed = state | {"checksum": [3, state["checksum"][1] ^ 1]}
    again.load_state_dict(changed | {"crc": position._crc_of(changed)})

    assert (state["rank"], state["_num_yielded"]) == (1, 3)
    with pytest.raises(ResumeError, match="before batch 3, the sampler gave other indices"):
        iter(again)


# --- a rank that only torch.distributed knows ------------------------------------------------------------


def shuffling(seed: int) -> DataLoader:
    return DataLoader(Numbers(20), 4, shuffle=True, generator=seeded(seed))


@pytest.mark.parametrize("num_batches", [0, 2, 99])
def test_ranks_share_a_state_if_they_have_the_same_seed(num_batches: int, monkeypatch: Any) -> None:
    """Each resumes the same order; for a rank with another seed it is an error that gives both seeds."""
    as_rank(monkeypatch, 0)
    loader = shuffling(5)
    iterator = iter(loader)
    list(itertools.islice(iterator, num_batches))
    state = through_json(loader.state_dict())
    rest = labels(iterator) or labels(loader)
    as_rank(monkeypatch, 1)
    resumed, other = shuffling(5), shuffling(6)
    resumed.load_state_dict(state)

    assert state["rank"] == 0
    assert labels(resumed) == rest
    with pytest.raises(
        ResumeError, match=r"seed 5 of its sampler, .* has 6: .* or load a state for each rank"
    ):
        other.load_state_dict(state), iter(other)


@pytest.mark.parametrize("is_distributed", [True, False])
def test_samplers_of_the_user_s_are_split_where_nobody_sees_it(
    is_distributed: bool, monkeypatch: Any
) -> None:
    """Each rank's own list of indices is skipped by the number of batches; without ranks, it is checked."""
    loaders = [DataLoader(Numbers(20), 2, sampler=list(range(rank, 20, 2))) for rank in range(2)]
    state = None
    for rank, loader in enumerate(loaders):
        if is_distributed:
            as_rank(monkeypatch, rank)
        state = state or state_after(loader, 2)
    loader.load_state_dict(state)

    assert state["rank"] == (0 if is_distributed else None)
    if is_distributed:
        assert next(iter(loader))[:, 0].tolist() == [9, 11]
    else:
        with pytest.raises(ResumeError, match="before batch 2, the sampler gave other indices"):
            iter(loader)


def test_a_stream_s_state_of_another_rank_is_warned_of(monkeypatch: Any, caplog: Any) -> None:
    """The positions are those of the rank that saved them."""
    as_rank(monkeypatch, 0)
    state = state_after(DataLoader(Stream(), 3), 2)
    as_rank(monkeypatch, 1)
    resumed = DataLoader(Stream(), 3)
    resumed.load_state_dict(state)
    with caplog.at_level("WARNING", "fastload"):
        assert next(iter(resumed)).tolist() == [6, 7, 8]

    assert "this rank loads the states of a dataset that rank 0 saved" in caplog.text
