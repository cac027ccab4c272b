"""Descriptors run out, or memory cannot be mapped: an error that names the limit, and never another batch."""

from __future__ import annotations

import os
from typing import Any

import pytest

import fastload
from fastload.errors import SharedMemoryError
from fastload.workers import process_pool
from fastload.workers.channel import Channel
from tests.faults import zoo
from tests.kit import datasets


def assert_right(iterator: Any, numbers: range) -> None:
    """Each batch of two holds its own samples."""
    for number in numbers:
        assert [zoo.value_of(sample) for sample in next(iterator)] == [2 * number, 2 * number + 1]


@pytest.mark.parametrize(
    ("make", "collate_fn"),
    [(zoo.array, zoo.KeepsBatches()), (zoo.many_arrays, list)],
    ids=["slot", "message"],
)
def test_a_batch_whose_descriptor_cannot_be_received_names_the_limit(make: Any, collate_fn: Any) -> None:
    """New memory, or a long reply, finds no descriptor in the parent; the state before it is right."""
    loader = fastload.DataLoader(datasets.Made(make, 60), 2, num_workers=1, collate_fn=collate_fn, timeout=60)
    iterator = iter(loader)
    assert_right(iterator, range(10))

    with zoo.no_descriptors(), pytest.raises(fastload.errors.BatchLostError, match="RLIMIT_NOFILE is 256"):
        assert_right(iterator, range(10, 22))

    state = loader.state_dict()
    loader.load_state_dict(state)
    assert_right(iter(loader), range(state["_num_yielded"], 30))


@pytest.mark.parametrize("depth", [0, 60, 350], ids=["short", "long", "too long"])
def test_a_worker_without_descriptors_sends_its_error_all_the_same(depth: int) -> None:
    """Of an error whose text is too long for the pipe, another one comes, which names the sample."""
    make = zoo.EatsDescriptors(4, depth)
    loader = fastload.DataLoader(datasets.Made(make, 12), 2, num_workers=1, timeout=60)
    iterator = iter(loader)
    assert_right(iterator, range(2))

    with pytest.raises(OSError if depth < 350 else RuntimeError, match="Too many open files") as caught:
        next(iterator)

    assert caught.value.__notes__ == ["fastload: batch 2, worker 0, dataset index 4, /dev/null"]


def test_memory_that_was_not_sent_is_not_used_for_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent still has the slot's old memory, so that the worker has to keep it too."""
    send, parent, refusals = Channel.send, os.getpid(), iter([False, True])

    def send_or_refuse(self: Any, message: Any, fd: int | None = None) -> bool:
        if os.getpid() != parent and fd is not None and next(refusals, False):
            raise OSError(24, "Too many open files")
        return send(self, message, fd)

    monkeypatch.setattr(Channel, "send", send_or_refuse)
    loader = fastload.DataLoader(datasets.Made(zoo.grows_at(6), 20), 2, num_workers=1, prefetch_factor=1)
    iterator = iter(loader)
    firsts, errors = [], []
    for _ in range(10):
        try:
            batch = next(iterator)
            assert (batch == batch[:, :1]).all()
            firsts.append(int(batch[0, 0]))
        except RuntimeError as error:
            errors.append(str(error))

    assert (len(errors), len(firsts)) == (1, 9)
    assert "the batch could not be sent: OSError(24, 'Too many open files')" in errors[0]
    assert firsts == sorted(set(firsts))


@pytest.mark.parametrize("what", ["state", "index"])
def test_what_cannot_reach_a_worker_without_descriptors_ends_it(what: str) -> None:
    """A state, or a list of indices, beyond one message: it does not go on without; stderr has the reason."""
    options: dict[str, Any] = {"num_workers": 1, "timeout": 60}
    if what == "state":
        saver = fastload.DataLoader(zoo.Padded(), 2, **options)
        next(iter(saver))
        loader = fastload.DataLoader(
            zoo.Padded(), 2, worker_init_fn=zoo.EatsDescriptorsAndGoesOn(0), **options
        )
        loader.load_state_dict(saver.state_dict())
        iterator = iter(loader)
    else:
        made = datasets.Made(zoo.EatsDescriptorsAndGoesOn(4), 20_000)
        batches = [[4], list(range(20_000)), [7]]
        loader = fastload.DataLoader(made, batch_sampler=batches, prefetch_factor=1, **options)
        iterator = iter(loader)
        assert zoo.value_of(next(iterator)[0]) == 4

    with pytest.raises(fastload.errors.WorkerDiedError, match="exited with code 1"):
        next(iterator)


def test_memory_that_cannot_be_mapped_closes_the_iterator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address space is used up for a moment: an error at its turn, and the rest comes from the state."""
    refused = iter([False] * 2 + [True] + [False] * 100)
    original, parent = process_pool.Segment.map, os.getpid()

    def map_or_refuse(self: Any, *, writable: bool) -> Any:
        if os.getpid() == parent and next(refused):
            raise SharedMemoryError("cannot map a shared segment of 4,096 bytes: out of address space")
        return original(self, writable=writable)

    options: dict[str, Any] = {"num_workers": 2, "collate_fn": zoo.KeepsBatches(), "timeout": 60}
    loader = fastload.DataLoader(datasets.Made(zoo.array, 40), 2, **options)
    monkeypatch.setattr(process_pool.Segment, "map", map_or_refuse)
    iterator = iter(loader)

    with pytest.raises(fastload.errors.BatchLostError, match="out of address space"):
        assert_right(iterator, range(20))
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert_right(iter(loader), range(state["_num_yielded"], 20))
