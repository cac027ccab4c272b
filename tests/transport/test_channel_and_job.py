"""Messages, descriptors and jobs cross the process border whole."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch

import fastload
from fastload.memory.segment import Segment
from fastload.workers import channel
from fastload.workers.channel import Channel, make_channel
from tests.kit import datasets


def _pair() -> tuple[Channel, Channel]:
    """The parent's end, which never blocks, and that of a worker."""
    ours, end = make_channel()
    return ours, Channel(end, blocking=True)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _receive(channel: Any) -> Any:
    received = channel.receive()
    assert received is not None
    message = received.load()
    received.close()
    return message


def test_a_megabyte_each_way_at_once_blocks_nobody() -> None:
    """Both ends send first and read afterwards."""
    before = _descriptors()
    ours, theirs = _pair()
    got = []

    def other_end() -> None:
        theirs.send(b"t" * 1_000_000)
        got.append(_receive(theirs))

    thread = threading.Thread(target=other_end)
    thread.start()
    ours.send(b"o" * 1_000_000)
    thread.join(30)
    received = _receive(ours)
    ours.close()
    theirs.close()

    assert got == [b"o" * 1_000_000]
    assert received == b"t" * 1_000_000
    assert _descriptors() == before


def test_what_a_full_socket_does_not_take_waits_in_the_outbox() -> None:
    """The parent's send never blocks, and nothing is lost or out of order."""
    ours, theirs = _pair()
    for number in range(500):
        ours.send((number, b"x" * 3000))
    waited = not ours.is_flushed
    got = []
    flushed = []
    while len(got) < 500:
        flushed.append((ours.flush(), ours.is_flushed))
        got.append(_receive(theirs)[0])
    ours.close()
    theirs.close()

    assert waited
    assert (flushed[0], flushed[-1]) == ((False, False), (True, True))
    assert got == list(range(500))


def test_the_outbox_is_sent_although_the_next_task_waits_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool sends the message that the pipe refused before, and not only when it has a new one."""
    flush, parent, refusals = Channel.flush, os.getpid(), [False, False]

    def refuse_twice(self: Channel) -> bool:
        if os.getpid() == parent and refusals:
            return refusals.pop()
        return flush(self)

    monkeypatch.setattr(Channel, "flush", refuse_twice)
    iterator: Any = iter(fastload.DataLoader(datasets.Made(datasets.image, 8), 2, num_workers=1))
    (worker,) = iterator._pool._workers  # one slot until the size of a batch is known, and two tasks

    assert refusals == []
    assert len(worker.waiting) == 1
    assert worker.channel.is_flushed
    assert len(list(iterator)) == 4


def test_an_end_that_has_finished_still_receives() -> None:
    """The other end reads what was sent, then sees the end instead of waiting, and may answer."""
    ours, theirs = _pair()
    ours.send("last")
    ours.finish()
    ours.finish()
    received = theirs.receive()
    assert received is not None
    message = received.load()
    received.close()
    end = theirs.receive()
    theirs.send("answer")
    received = ours.receive()
    assert received is not None
    answer = received.load()
    received.close()
    ours.close()
    theirs.close()

    assert (message, end, answer) == ("last", None, "answer")


def test_a_descriptor_arrives_with_its_message() -> None:
    """The receiver maps the sender's memory; the sender keeps its own descriptor."""
    ours, theirs = _pair()
    segment = Segment.create(100)
    os.pwrite(segment.fd, b"hello", 0)
    theirs.send("slot", segment.fd)
    segment.close()
    received = ours.receive()
    assert received is not None
    assert received.fd is not None
    content = Segment(received.fd, 4096).map(writable=False)[:5]
    message = received.load()
    received.close()
    ours.close()
    theirs.close()

    assert (message, content) == ("slot", b"hello")


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


@pytest.mark.parametrize("how", ["close", "abandon"])
def test_descriptors_of_messages_that_were_not_received_are_closed(how: str) -> None:
    """Those that wait in the socket, and those of long messages in the outbox."""
    before = _descriptors()
    ours, theirs = _pair()
    segment = Segment.create(100)
    for _ in range(3):
        theirs.send("slot", segment.fd)
    segment.close()
    for number in range(500):
        ours.send((number, b"x" * 5000))
    assert not ours.is_flushed
    getattr(ours, how)()
    theirs.close()

    assert _descriptors() == before


def test_a_message_comes_with_its_number() -> None:
    """One after the other, until the other end has gone."""
    ours, theirs = _pair()
    is_empty_before = ours.receive() is None
    for number in (7, 1 << 40):
        theirs.send(f"message {number}", number=number)
    seen = []
    while (received := ours.receive()) is not None:
        seen.append((received.number, received.is_cut, received.fd, received.load()))
    theirs.close()
    ended = [ours.is_hung_up(), ours.receive() is None]
    ours.close()

    assert is_empty_before
    assert seen == [(7, False, None, "message 7"), (1 << 40, False, None, f"message {1 << 40}")]
    assert ended == [True, True]


@pytest.mark.parametrize("spare_bytes", [-1, 0, 1, 10_000])
def test_messages_around_the_size_of_the_pipe_arrive_whole_with_a_descriptor(spare_bytes: int) -> None:
    """The last byte that fits, the first one that does not, and far beyond: with the sender's descriptor."""
    ours, theirs = _pair()
    segment = Segment.create(100)
    overhead = len(pickle.dumps(b"x" * 3000, pickle.HIGHEST_PROTOCOL)) - 3000 + channel._HEADER.size
    message = os.urandom(channel.MESSAGE_BYTES - overhead + spare_bytes)
    theirs.send(message, segment.fd)
    received = ours.receive()
    assert received is not None
    same_file = os.path.samestat(os.fstat(received.fd or -1), os.fstat(segment.fd))
    num_fds = len(received._fds)
    got = received.load()
    received.close()
    segment.close()
    ours.close()
    theirs.close()

    assert (got == message, same_file) == (True, True)
    assert num_fds == (2 if spare_bytes > 0 else 1)


def test_an_exception_in_the_middle_of_receiving_leaves_no_descriptor_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message had left the socket when a signal handler raised."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = _descriptors()
    ours, theirs = _pair()
    segment = Segment.create(100)
    theirs.send(1, segment.fd)
    segment.close()
    monkeypatch.setattr(channel, "_HEADER", types.SimpleNamespace(unpack_from=interrupt))
    with pytest.raises(KeyboardInterrupt):
        ours.receive()
    is_readable, _, _ = select.select([ours], [], [], 0)
    ours.close()
    theirs.close()

    assert not is_readable
    assert _descriptors() == before


def test_a_long_message_that_the_system_writes_and_reads_in_pieces_arrives_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each call may do less than it was asked for."""
    read, write = os.pread, os.pwrite
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, offset: read(fd, min(nbytes, 1000), offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:700], offset))
    ours, theirs = _pair()
    message = os.urandom(10_500)
    theirs.send(message)
    got = _receive(ours)
    ours.close()
    theirs.close()

    assert got == message


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


@pytest.mark.slow
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


class _Holder:
    def __init__(self, transform: Any) -> None:
        self.steps = [{"resize": transform}]

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


def test_what_cannot_be_pickled_is_named_by_its_path() -> None:
    """The error keeps pickle's type; a note names the attribute and the ways out."""
    loader = fastload.DataLoader(_Holder(lambda x: x), num_workers=1, multiprocessing_context="spawn")

    with pytest.raises(Exception, match="lambda") as caught:
        iter(loader)

    assert any("dataset.steps cannot be sent" in note and "'fork'" in note for note in caught.value.__notes__)


def test_what_a_process_sent_before_it_ended_arrives_although_it_left_messages_unread() -> None:
    """Linux reports the unread messages as a reset connection first, and once."""
    ours, theirs = _pair()
    ours.send("unread")
    theirs.send("answer", number=5)
    theirs.close()

    received = ours.receive()

    assert received is not None
    assert (received.number, received.load()) == (5, "answer")
    assert ours.receive() is None
    ours.close()
