"""The pipe between the parent and one worker, for messages of at most 4 KB and file descriptors.

It is a pair of connected SOCK_SEQPACKET sockets: each message arrives complete or not at all, and may carry
descriptors (unix(7), SCM_RIGHTS). Rules:

1. A message above MESSAGE_BYTES is sent in its own segment; the pipe carries the segment's descriptor.
2. The parent never blocks in send: messages that the socket does not accept wait in the outbox. So the parent
   can always receive from a worker that blocks in send, and the two ends can never deadlock.
3. close() shuts the connection down, so that the other end notices it even if a forked process has a copy.
4. A message whose descriptors did not arrive (this process may open no more) is marked as cut, and keeps its
   number. The receiver never mistakes it for a message without descriptors.
5. A message stays in the inbox until its receiver takes it out, so that an exception from a signal handler
   cannot lose it.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import select
import socket
import struct
from collections import deque
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

from fastload.memory.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MESSAGE_BYTES = 4096
_HEADER = struct.Struct("<?BQQ")  # is in a segment, number of descriptors, number, bytes of the message
_MAX_DESCRIPTORS = 2


class Received:
    """A message that has arrived; it owns its descriptors until `close`.

    Args:
        data: The bytes that came through the socket.
        fds: The descriptors that came with it.

    Attributes:
        number: The number that the sender gave it.
        is_cut: Whether descriptors are missing, because this process may open no more.
    """

    def __init__(self, data: bytes, fds: list[int]) -> None:
        self._fds = fds
        self._unclosed = iter(fds)
        self._data = data
        self._is_in_segment, num_fds, self.number, self._nbytes = _HEADER.unpack_from(data)
        self.is_cut = len(fds) < num_fds

    def is_of(self, data: bytes) -> bool:
        """Whether this is the message of these bytes: of this object, not of equal ones."""
        return self._data is data

    @property
    def is_readable(self) -> bool:
        """Whether `load` succeeds."""
        try:
            self.load()
        except Exception:  # noqa: BLE001  # the classes in the message may raise anything
            return False
        return True

    def load(self) -> Any:
        """Unpickle the message, which must not be cut.

        Raises:
            Exception: An error of unpickling.
        """
        if self._is_in_segment:
            return pickle.loads(_read_all(self._fds[0], self._nbytes))
        return pickle.loads(memoryview(self._data)[_HEADER.size :])

    @property
    def fd(self) -> int | None:
        """The descriptor that was sent with the message; this object keeps owning it."""
        place = int(self._is_in_segment)
        return self._fds[place] if len(self._fds) > place else None

    def close(self) -> None:
        """Close the descriptors; idempotent."""
        _close_all(self._unclosed)


class Channel:
    """One end of the pipe.

    Args:
        end: The connected socket; owned from here on.
        blocking: Whether send() waits (workers) or keeps an outbox (the parent).
    """

    def __init__(self, end: socket.socket, *, blocking: bool) -> None:
        end.setblocking(blocking)
        self._socket = end
        self._outbox: deque[tuple[bytes, list[int]]] = deque()  # messages, and their descriptors
        self._arrived: deque[Any] = deque()  # results of recvmsg
        self._inbox: deque[Received] = deque()
        # The arguments of recvmsg, each in a tuple for map().
        ancillary_bytes = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
        self._receive_arguments = (MESSAGE_BYTES,), (ancillary_bytes,), (socket.MSG_CMSG_CLOEXEC,)

    def fileno(self) -> int:
        """The socket's descriptor, for poll."""
        return self._socket.fileno()

    def send(self, message: Any, fd: int | None = None, *, number: int = 0) -> None:
        """Send a picklable message and a descriptor, which the caller keeps owning.

        Args:
            message: Any picklable object.
            fd: A descriptor of which the receiver gets a duplicate.
            number: Of the message; the receiver gets it even if the descriptors do not arrive.

        Raises:
            BrokenPipeError, ConnectionResetError: The other end is gone.
            SegmentError, OSError: No memory or descriptor is left for a long message; nothing was sent.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        fds: list[int] = []
        is_in_segment = _HEADER.size + len(data) > MESSAGE_BYTES
        nbytes = len(data)
        try:
            if is_in_segment:
                segment = Segment.create(nbytes, name="fastload-message")
                fds.append(segment.fd)
                segment.write(data)
                data = b""
            if fd is not None:
                fds.append(os.dup(fd))  # the message may wait in the outbox after the caller closes fd
        except BaseException:
            for own in fds:
                os.close(own)
            raise
        self._outbox.append((_HEADER.pack(is_in_segment, len(fds), number, nbytes) + data, fds))
        self.flush()

    def flush(self) -> bool:
        """Send the messages in the outbox; return False if some of them must wait longer."""
        while self._outbox:
            data, fds = self._outbox[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self._socket.sendmsg([data], ancillary)
            except BlockingIOError:
                return False
            _close_all(map(fds.pop, [0] * len(fds)))
            self._outbox.popleft()
        return True

    def peek(self) -> Received | None:
        """The next message, which `take_out` removes.

        Returns None if no message has arrived yet (in the parent), or if the other end has gone (in both).
        """
        if self._arrived:
            self._settle()
        if not self._inbox:
            try:
                self._receive()
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # The other end closed with messages unread. Linux reports that once, before what it had sent.
                with contextlib.suppress(BlockingIOError, ConnectionResetError):
                    self._receive()
            self._settle()
        return self._inbox[0] if self._inbox else None

    def waiting(self) -> Iterable[Received]:
        """The messages that have arrived and were not taken out; receives without waiting."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while True:
                if self._arrived:
                    self._settle()
                self._receive(socket.MSG_DONTWAIT)
                if not self._arrived[0][0]:
                    break  # the other end has gone
        self._settle()
        return tuple(self._inbox)

    def _receive(self, flag: int = 0) -> None:
        # One call moves the message from the socket into the deque: if a signal handler raises, the message
        # is still in one of the two.
        nbytes, ancillary_bytes, (flags,) = self._receive_arguments
        self._arrived.extend(map(self._socket.recvmsg, nbytes, ancillary_bytes, (flags | flag,)))

    def _settle(self) -> None:
        """Move the received message to the inbox; calling this again after a signal changes nothing."""
        for data, ancillary, _, _ in self._arrived:
            if data and not (self._inbox and self._inbox[-1].is_of(data)):
                self._inbox.append(Received(data, _descriptors(ancillary)))
        self._arrived.clear()

    def take_out(self) -> None:
        """Remove the message that `peek` returned, and close its descriptors."""
        self._inbox[0].close()
        self._inbox.popleft()

    @property
    def is_flushed(self) -> bool:
        """Whether the outbox is empty."""
        return not self._outbox

    def is_hung_up(self) -> bool:
        """Whether the other end has closed; earlier messages may still be waiting here."""
        poller = select.poll()
        poller.register(self._socket, select.POLLHUP | select.POLLRDHUP | select.POLLERR)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Hang up; idempotent."""
        with contextlib.suppress(OSError):  # ENOTCONN: the other end hung up first
            self._socket.shutdown(socket.SHUT_RDWR)
        self.abandon()

    def abandon(self) -> None:
        """After a fork: close this process's copy; the connection stays open for its owner."""
        while self._outbox:
            _close_all(iter(self._outbox.popleft()[1]))
        if self._inbox:
            self._arrived.clear()
            self.take_out()
        while self._arrived:
            _close_all(iter(_descriptors(self._arrived.pop()[1])))
        self._socket.close()


class ChannelEnd:
    """A worker's end before the worker opens it; pickles as a descriptor while a process is being started."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def open(self) -> Channel:
        """Make the channel, in the worker."""
        return Channel(self.socket, blocking=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_end, (reduction.DupFd(self.socket.fileno()),)


def _attach_end(duplicate: Any) -> ChannelEnd:
    return ChannelEnd(socket.socket(fileno=duplicate.detach()))


def make_channel() -> tuple[Channel, ChannelEnd]:
    """Make a connected pair: the parent's channel and the end that a worker will open."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours, blocking=False), ChannelEnd(theirs)


def _close_all(fds: Iterator[int]) -> None:
    """Close the descriptors in one call, so that no signal handler runs between taking and closing one."""
    deque(map(os.close, fds), maxlen=0)


def _read_all(fd: int, nbytes: int) -> bytes:
    parts = []
    offset = 0
    while offset < nbytes:
        part = os.pread(fd, nbytes - offset, offset)
        if not part:
            raise EOFError(f"a message of {nbytes:,} bytes ends after {offset:,}")
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a message."""
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return list(fds)
