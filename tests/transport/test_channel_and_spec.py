"""Messages, descriptors and worker specs cross the process border whole."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

import fastload
from fastload.memory.segment import Segment
from fastload.workers import channel
from fastload.workers.channel import Channel, make_channel
from tests.kit import datasets
from tests.kit.batches import assert_same_batches, assert_same_samples


def _pair() -> tuple[Channel, Channel]:
    """The parent's end, which never blocks, and that of a worker."""
    ours, end = make_channel()
    return ours, Channel(end, blocking=True)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Of bytes in a message that goes through the pipe itself.
MOST_BYTES = channel.MESSAGE_BYTES - len(pickle.dumps((0, b"x" * 3000), 5)) + 3000


class Pipe(RuleBasedStateMachine):
    """Messages of every size from both ends arrive whole and in order, with their descriptors."""

    def __init__(self) -> None:
        super().__init__()
        self.before = num_descriptors()
        self.ends = _pair()
        self.sent: list[list[tuple[bytes, int | None]]] = [[], []]  # what each end is to receive
        self.num_waiting_bytes = 0  # of the worker's end, which blocks

    @rule(
        side=st.integers(0, 1),
        spare_bytes=st.sampled_from([-30_000, -1, 0, 1, 10_000, 1_000_000]),  # around the size of a message
        has_fd=st.booleans(),
    )
    def send(self, side: int, spare_bytes: int, has_fd: bool) -> None:
        if side == 1 and self.num_waiting_bytes > 50_000:
            return
        message = os.urandom(MOST_BYTES + spare_bytes)
        segment = Segment.create(100) if has_fd and side == 1 else None  # the parent sends none
        inode = None if segment is None else os.fstat(segment.fd).st_ino
        is_sent = self.ends[side].send(message, None if segment is None else segment.fd)
        if segment is not None:
            segment.close()  # the receiver has its own descriptor
        if is_sent:
            self.sent[1 - side].append((message, inode))
            self.num_waiting_bytes += side * channel.MESSAGE_BYTES
        else:  # the parent's end, which never blocks
            assert side == 0
            assert len(self.sent[1]) > 2

    @rule(side=st.integers(0, 1))
    def receive(self, side: int) -> None:
        if not self.sent[side]:
            if side == 0:  # the other end waits
                assert self.ends[0].receive() is None
            return
        received = self.ends[side].receive()
        assert received is not None
        message, inode = self.sent[side].pop(0)
        got, fd = received
        assert got == message
        assert inode == (None if fd is None else os.fstat(fd).st_ino)
        self.num_waiting_bytes -= (1 - side) * channel.MESSAGE_BYTES

    @rule()
    def fill(self) -> None:
        """Send as much as a socket holds; what it refuses never comes."""
        while self.ends[0].send(message := os.urandom(MOST_BYTES - 1000)):
            self.sent[1].append((message, None))

    @rule(how=st.sampled_from(["drain", "close", "abandon", "finish"]))
    def end(self, how: str) -> None:
        """Nothing is left open, whatever was not received; what was sent before the end arrives."""
        ours, theirs = self.ends
        if how in ("drain", "finish"):
            while self.sent[1]:
                self.receive(1)
        if how == "finish":
            ours.finish()
            ours.finish()
            assert theirs.receive() is None
            theirs.send("answer")  # an end that has finished still receives
            theirs.close()
            while self.sent[0]:
                self.receive(0)
            assert ours.receive() == ("answer", None)
            assert [ours.is_hung_up(), ours.receive()] == [True, None]
        elif how == "abandon":
            ours.abandon()
        for one in self.ends:
            one.close()
        assert num_descriptors() == self.before
        self.__init__()  # type: ignore[misc]

    def teardown(self) -> None:
        for one in self.ends:
            one.close()


TestPipe = pytest.mark.slow(Pipe.TestCase)
TestPipe.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)


def test_what_a_process_sent_before_it_ended_arrives_although_it_left_a_message_unread() -> None:
    """Linux reports a reset connection first, and once."""
    ours, theirs = _pair()
    ours.send("unread")
    theirs.send("answer")
    theirs.close()

    assert ours.receive() == ("answer", None)
    assert ours.receive() is None
    ours.close()


def test_a_view_of_a_tensor_is_sent_without_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would pickle all of the storage; samplers give the elements or the rows of a permutation."""
    monkeypatch.setattr(Segment, "create", None)  # what fits into the pipe needs none
    ours, theirs = _pair()
    indices = torch.arange(1_000_000)
    ours.send([*indices[5:7], indices[::400_000], indices[3].bfloat16()])
    received = theirs.receive()
    ours.close()
    theirs.close()

    assert received is not None
    assert_same_samples(received[0], [*torch.tensor([5, 6]), indices[::400_000], indices[3].bfloat16()])


def test_what_the_pipe_refuses_is_sent_later_and_its_slot_is_free_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new epoch and requests, at any time: they come in order, and none is lost or repeated."""
    send, parent, refusals = Channel.send, os.getpid(), itertools.cycle([True, True, False])

    def refuse(self: Channel, *args: Any) -> bool:
        return not (os.getpid() == parent and next(refusals)) and send(self, *args)

    monkeypatch.setattr(Channel, "send", refuse)
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}
    with fastload.DataLoader(datasets.Made(datasets.image, 40), 2, **options) as loader:
        expected = list(fastload.DataLoader(datasets.Made(datasets.image, 40), 2))
        for _ in range(2):
            next(iter(loader))
            assert_same_batches(expected, list(loader))


def test_hanging_up_is_seen_though_a_forked_process_keeps_a_copy() -> None:
    """close() shuts the connection down, not only this process's descriptor."""
    ours, theirs = _pair()
    wake, waker = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(wake, 1)
        os._exit(0)
    ours.close()
    seen = theirs.is_hung_up()
    message = theirs.receive()
    os.write(waker, b".")
    os.waitpid(child, 0)
    theirs.close()
    os.close(wake)
    os.close(waker)

    assert (seen, message) == (True, None)


def test_a_long_message_in_pieces_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call may do less than it was asked for."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:700], offset))
    ours, theirs = _pair()
    message = os.urandom(40_500)
    theirs.send(message)

    assert ours.receive() == (message, None)
    ours.close()
    theirs.close()


class Sharing:
    """A dataset that refers to what only multiprocessing knows how to hand over."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.count = context.Value("i", 0)
        self.lock = context.Lock()
        self.flags = torch.zeros(8, dtype=torch.int64).share_memory_()
        self.table = np.arange(100_000)
        self.segment = Segment.create(4096)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            self.count.value += 1
        self.flags[index] = index + 1
        self.table[0] += 1  # a private page of this worker
        os.pwrite(self.segment.fd, bytes([index + 1]), index)
        return int(self.table[index + 1])


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_locks_values_shared_tensors_and_segments_reach_all_workers(method: str) -> None:
    """The dataset is pickled once, and both workers share what it shares; arrays stay private."""
    dataset = Sharing()

    got = [int(x) for x in fastload.DataLoader(dataset, num_workers=2, multiprocessing_context=method)]
    written = os.pread(dataset.segment.fd, 8, 0)
    dataset.segment.close()

    assert got == list(range(1, 9))
    assert dataset.count.value == 8
    assert dataset.flags.tolist() == list(range(1, 9))
    assert written == bytes(range(1, 9))
    assert dataset.table[0] == 0
