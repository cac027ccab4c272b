"""One pipe between the parent and one worker: whole messages of at most 4 KB, with descriptors.

A pair of connected SOCK_SEQPACKET sockets: each message arrives whole or not at all, and may bring
descriptors along (unix(7), SCM_RIGHTS). Rules:

1. A message above MESSAGE_BYTES travels in a segment of its own; the pipe carries the segment's descriptor.
2. The parent never blocks in send: what the socket does not take waits in its outbox. So a worker that
   blocks in send is always heard, and two ends can never wait for each other.
3. close() shuts the connection down, so that the other end sees it even if a forked process kept a copy.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import select
import socket
from collections import deque
from multiprocessing import reduction
from typing import Any

from fastload.transport.segment import Segment

MESSAGE_BYTES = 4096
_WHOLE, _IN_SEGMENT = b"w", b"s"
_MAX_DESCRIPTORS = 2


class Channel:
    """One end of the pipe.

    Args:
        end: The connected socket; owned from here on.
        blocking: Whether send() waits (workers) or keeps an outbox (the parent).
    """

    def __init__(self, end: socket.socket, *, blocking: bool) -> None:
        end.setblocking(blocking)
        self._socket = end
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._blocking = blocking

    def fileno(self) -> int:
        """The socket's descriptor, for poll."""
        return self._socket.fileno()

    def send(self, message: Any, fd: int | None = None) -> None:
        """Send a picklable message, and a descriptor with it, which stays the caller's.

        Raises:
            BrokenPipeError, ConnectionResetError: The other end is gone.
        """
        data = _WHOLE + pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        fds = [] if fd is None else [os.dup(fd)]
        if len(data) > MESSAGE_BYTES:
            segment = Segment.create(len(data), name="fastload-message")
            _write_all(segment.fd, data)
            fds.insert(0, segment.fd)
            data = _IN_SEGMENT + len(data).to_bytes(8, "little")
        self._outbox.append((data, fds))
        self.flush()

    def flush(self) -> bool:
        """Send what waits in the outbox; False if some of it must wait on."""
        while self._outbox:
            data, fds = self._outbox[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self._socket.sendmsg([data], ancillary)
            except BlockingIOError:
                return False
            self._outbox.popleft()
            for fd in fds:
                os.close(fd)
        return True

    def receive(self) -> tuple[Any, int | None] | None:
        """The next message and the descriptor that came with it, which is the caller's now.

        Returns None when there is none yet (parent) or when the other end has gone (both).
        """
        try:
            space = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
            data, ancillary, _, _ = self._socket.recvmsg(MESSAGE_BYTES, space)
        except (BlockingIOError, ConnectionResetError):
            return None
        if not data:
            return None
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        received = list(fds)
        if data[:1] == _IN_SEGMENT:
            data = _read_all(received.pop(0), int.from_bytes(data[1:9], "little"))
        return pickle.loads(memoryview(data)[1:]), (received[0] if received else None)

    @property
    def is_flushed(self) -> bool:
        """Whether nothing waits in the outbox."""
        return not self._outbox

    def has_message(self) -> bool:
        """Whether a message is waiting to be received."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        try:
            return bool(poller.poll(0)) and bool(self._socket.recv(1, socket.MSG_PEEK))
        except (BlockingIOError, ConnectionResetError):
            return False

    def is_hung_up(self) -> bool:
        """Whether the other end has closed; messages sent before that may still wait here."""
        poller = select.poll()
        poller.register(self._socket, select.POLLHUP | select.POLLRDHUP | select.POLLERR)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Hang up; idempotent."""
        while self._outbox:
            for fd in self._outbox.popleft()[1]:
                os.close(fd)
        with contextlib.suppress(OSError):  # ENOTCONN: the other end hung up first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def abandon(self) -> None:
        """Close this process's copy and leave the connection to the process that owns it (after a fork)."""
        self._socket.close()


class ChannelEnd:
    """A worker's end on its way to the worker: pickles as a descriptor while a process is being started."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def open(self) -> Channel:
        """The channel, in the worker."""
        return Channel(self.socket, blocking=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_end, (reduction.DupFd(self.socket.fileno()),)


def _attach_end(duplicate: Any) -> ChannelEnd:
    return ChannelEnd(socket.socket(fileno=duplicate.detach()))


def make_channel() -> tuple[Channel, ChannelEnd]:
    """A connected pair: the parent's channel and the end that a worker will open."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours, blocking=False), ChannelEnd(theirs)


def _write_all(fd: int, data: bytes) -> None:
    offset = 0
    view = memoryview(data)
    while offset < len(data):
        offset += os.pwrite(fd, view[offset:], offset)


def _read_all(fd: int, nbytes: int) -> bytes:
    try:
        parts = []
        offset = 0
        while offset < nbytes:
            part = os.pread(fd, nbytes - offset, offset)
            parts.append(part)
            offset += len(part)
        return b"".join(parts)
    finally:
        os.close(fd)
