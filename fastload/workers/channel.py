"""The pipe between the parent and one worker, for messages of at most 4 KB and file descriptors.

It is a pair of connected SOCK_SEQPACKET sockets: each message arrives complete or not at all, and can carry
descriptors (unix(7), SCM_RIGHTS). Rules:

1. A message above MESSAGE_BYTES is sent in its own segment; the pipe carries the segment's descriptor.
2. The parent never blocks in send: messages that the socket does not accept wait in the outbox. So the parent
   can always receive from a worker that blocks in send, and the two ends can never deadlock.
3. close() shuts the connection down, so the other end notices even if a forked process has a copy.
4. Sending and receiving order memory accesses (see `memory.memory_model`): who receives a message sees all
   that was written before it was sent, in slots and in segments.
5. A message whose descriptors did not arrive (this process has reached its limit) is marked as cut, and keeps
   its number. The receiver never mistakes it for a message without descriptors.
6. If a signal handler raises while a message is received, the message is lost, and its descriptors can stay
   open. The owner then closes the connection.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import pickle
import select
import socket
import struct
from collections import deque
from typing import Any

from fastload.memory.segment import Segment

MESSAGE_BYTES = 4096
_HEADER = struct.Struct("<?BQQ")  # is in a segment, number of descriptors, number, bytes of the message
_INT_BYTES = array.array("i").itemsize
# As integers, because each operation on socket's flags takes a microsecond. They are not on all platforms.
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


class Received:
    """A message that has arrived; it owns its descriptors until `close`.

    Args:
        data: The bytes that came through the socket.
        fds: The descriptors that came with them.

    Attributes:
        number: The number that the sender gave it.
        is_cut: Whether descriptors are missing, because this process has reached its limit.
    """

    def __init__(self, data: bytes, fds: list[int]) -> None:
        self._data = data
        self._fds = fds
        self._is_in_segment, num_fds, self.number, self._nbytes = _HEADER.unpack_from(data)
        self.is_cut = len(fds) < num_fds

    def load(self) -> Any:
        """Unpickle the message, which must not be cut.

        Raises:
            Exception: An error of unpickling.
        """
        if self._is_in_segment:
            with mmap.mmap(self._fds[0], self._nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as pages:
                return pickle.loads(pages)
        return pickle.loads(memoryview(self._data)[_HEADER.size :])

    @property
    def fd(self) -> int | None:
        """The descriptor sent with the message; this object keeps owning it."""
        position = int(self._is_in_segment)  # the segment's descriptor comes first
        return self._fds[position] if len(self._fds) > position else None

    def close(self) -> None:
        """Close the descriptors; idempotent."""
        while self._fds:
            os.close(self._fds.pop())


class Channel:
    """One end of the pipe.

    Args:
        end: The connected socket; owned from here on.
        blocking: Whether send() waits (workers) or keeps an outbox (the parent).
    """

    def __init__(self, end: socket.socket, *, blocking: bool) -> None:
        end.setblocking(blocking)
        self._socket = end
        # Messages, their descriptors, and the segment of a long one.
        self._outbox: deque[tuple[bytes, list[int], Segment | None]] = deque()
        self._last: Received | None = None  # closed with this end, if an error came before its `close`

    def fileno(self) -> int:
        """The socket's descriptor, for poll."""
        return self._socket.fileno()

    def send(self, message: Any, fd: int | None = None, *, number: int = 0) -> None:
        """Send a picklable message and a descriptor, which the caller keeps owning.

        Args:
            message: Any picklable object.
            fd: A descriptor of which the receiver gets a duplicate; it stays open while the message is in the
                outbox.
            number: Of the message; the receiver gets it even if the descriptors do not arrive.

        Raises:
            BrokenPipeError, ConnectionResetError: The other end is gone.
            SharedMemoryError, OSError: No memory or descriptor is left for a long message; nothing was sent.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        nbytes = len(data)
        fds = [] if fd is None else [fd]
        segment = None
        if _HEADER.size + nbytes > MESSAGE_BYTES:
            segment = Segment.create(nbytes, name="fastload-message")
            fds.insert(0, segment.fd)
            try:
                segment.write(data)
            except BaseException:
                segment.close()
                raise
            data = b""
        self._outbox.append(
            (_HEADER.pack(segment is not None, len(fds), number, nbytes) + data, fds, segment)
        )
        self.flush()

    def flush(self) -> bool:
        """Send the messages in the outbox; return False if some of them must wait longer."""
        while self._outbox:
            data, fds, segment = self._outbox[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self._socket.sendmsg([data], ancillary)
            except BlockingIOError:
                return False
            if segment is not None:
                segment.close()
            self._outbox.popleft()
        return True

    def receive(self) -> Received | None:
        """The next message; the caller closes it before requesting the next one.

        Returns None if no message has arrived and this end does not block, or if the other end has gone.
        """
        # A message has at most two descriptors: of its segment, and the caller's.
        ancillary_bytes = socket.CMSG_SPACE(2 * _INT_BYTES)
        for _ in range(2):
            try:
                data, ancillary, _, _ = self._socket.recvmsg(MESSAGE_BYTES, ancillary_bytes, _CLOSE_ON_EXEC)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # The other end closed with messages unread. Linux reports that once, before what it had sent.
                continue
            if not data:
                return None
            self._last = Received(data, _descriptors(ancillary))
            return self._last
        return None

    @property
    def is_flushed(self) -> bool:
        """Whether the outbox is empty."""
        return not self._outbox

    def has_message(self, wait_s: float = 0.0) -> bool:
        """Whether `receive` would not wait, now or after a while."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(wait_s * 1000))

    def is_hung_up(self) -> bool:
        """Whether the other end has closed; earlier messages can still be waiting here."""
        poller = select.poll()
        poller.register(self._socket, 0)  # POLLHUP and POLLERR are always reported
        return bool(poller.poll(0))

    def finish(self) -> None:
        """Tell the other end that no more messages follow; idempotent."""
        with contextlib.suppress(OSError):  # ENOTCONN: the other end hung up first
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Hang up; idempotent."""
        with contextlib.suppress(OSError):  # ENOTCONN: the other end hung up first
            self._socket.shutdown(socket.SHUT_RDWR)
        self.abandon()

    def abandon(self) -> None:
        """After a fork: close this process's copy; the connection stays open for its owner."""
        for _, _, segment in self._outbox:
            if segment is not None:
                segment.close()
        self._outbox.clear()
        if self._last is not None:
            self._last.close()
        self._socket.close()


def _descriptors(ancillary: list[Any]) -> list[int]:
    """The descriptors in the ancillary data of a message."""
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % _INT_BYTES])
    return fds.tolist()


def why_no_channel() -> str | None:
    """Why there are no channels here, as a readable clause; None if they work.

    Raises:
        OSError: The system denies their sockets.
    """
    if not all(hasattr(socket, name) for name in ("SOCK_SEQPACKET", "SCM_RIGHTS", "CMSG_SPACE")):
        return "this platform has no sockets that keep messages apart and carry descriptors"
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
        end.close()
    return None


def make_channel() -> tuple[Channel, socket.socket]:
    """The parent's channel, and the socket of which a worker makes the other end."""
    parent_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(parent_end, blocking=False), worker_end
