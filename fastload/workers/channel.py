"""The pipe between the parent and one worker, for short messages and file descriptors.

It is a pair of connected SOCK_SEQPACKET sockets: each message arrives complete or not at all, and can carry
descriptors (unix(7), SCM_RIGHTS). Rules:

1. A message above MESSAGE_BYTES is sent in its own segment; the pipe carries the segment's descriptor.
2. The parent never blocks in send: a message that the socket does not accept is sent later. So the parent can
   always receive from a worker that blocks in send, and the two ends can never deadlock.
3. close() shuts the connection down, so the other end notices even if a forked process has a copy.
4. Sending and receiving order memory accesses (see `memory.memory_model`): who receives a message sees all
   that was written before it was sent, in slots and in segments.
5. A message whose descriptors did not arrive, because this process has reached its limit, is an error.
6. If a signal handler raises while a message is received, the message is lost, and its descriptors can stay
   open. The owner then closes the connection.
"""

from __future__ import annotations

import array
import contextlib
import io
import os
import pickle
import select
import socket
from typing import Any

import torch

from fastload.batch.packing import is_plain
from fastload.errors import BatchLostError
from fastload.memory.segment import Segment
from fastload.nested.tensors import tensor_array, tensor_over
from fastload.system.limits import too_many_files

MESSAGE_BYTES = 32768
_INT_BYTES = array.array("i").itemsize
# As integers, because each operation on socket's flags takes a microsecond. They are not on all platforms.
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


class _Pickler(pickle.Pickler):
    """Pickles the elements of a tensor: torch would pickle all of its storage, for each view of it.

    So an index from ``iter(torch.randperm(n))`` takes a few bytes.
    """

    def reducer_override(self, value: Any) -> Any:
        """How pickle writes a value; NotImplemented: as always."""
        if isinstance(value, torch.Tensor) and is_plain(value):
            return tensor_over, (tensor_array(value).copy(), value.dtype)
        return NotImplemented


class Channel:
    """One end of the pipe.

    Args:
        end: The connected socket; owned from here on.
        blocking: Whether send() waits for room (workers) or returns False (the parent).
    """

    def __init__(self, end: socket.socket, *, blocking: bool) -> None:
        end.setblocking(blocking)
        self._socket = end
        self._received = array.array("i")  # the descriptors that came with the last message

    def fileno(self) -> int:
        """The socket's descriptor, for poll."""
        return self._socket.fileno()

    def send(self, message: Any, fd: int | None = None) -> bool:
        """Send a message, and a descriptor, which the caller keeps owning; return False if there is no room.

        Args:
            message: Any picklable object but an int.
            fd: A descriptor of which the receiver gets a duplicate.

        Raises:
            BrokenPipeError, ConnectionResetError: The other end is gone.
            SharedMemoryError, OSError: No memory or descriptor is left for a long message; nothing was sent.
        """
        fds = [] if fd is None else [fd]
        _Pickler(file := io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump((len(fds), message))
        data, segment = file.getvalue(), None
        try:
            if len(data) > MESSAGE_BYTES:
                segment = Segment.create(len(data), name="fastload-message")
                segment.write(data)
                data = pickle.dumps((len(fds) + 1, len(data)), pickle.HIGHEST_PROTOCOL)
                fds.append(segment.fd)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            self._socket.sendmsg([data], ancillary)
        except BlockingIOError:
            return False
        finally:
            if segment is not None:
                segment.close()
        return True

    def receive(self) -> tuple[Any, int | None] | None:
        """The next message, and the descriptor that came with it, which stays open until the next call.

        Returns None if no message has arrived and this end does not block, or if the other end has gone.

        Raises:
            BatchLostError: A descriptor did not arrive, because this process has reached its limit.
            Exception: An error of unpickling.
        """
        self._close_received()
        for _ in range(2):
            try:  # a message has at most two descriptors: the sender's, and that of its segment
                data, ancillary, _, _ = self._socket.recvmsg(
                    MESSAGE_BYTES, socket.CMSG_SPACE(2 * _INT_BYTES), _CLOSE_ON_EXEC
                )
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # The other end closed with messages unread. Linux reports that once, before what it had sent.
                continue
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self._received.frombytes(payload[: len(payload) - len(payload) % _INT_BYTES])
            return self._loaded(data) if data else None
        return None

    def _loaded(self, data: bytes) -> tuple[Any, int | None]:
        num_fds, message = pickle.loads(data)
        fds = self._received
        if len(fds) < num_fds:
            raise BatchLostError(f"the memory of a batch could not be received, {too_many_files()}")
        if type(message) is int:
            with io.FileIO(fds.pop()) as file:  # a mapping would need another descriptor
                num_fds, message = pickle.loads(file.readall())
        return message, fds[0] if num_fds else None

    def _close_received(self) -> None:
        while self._received:
            os.close(self._received.pop())

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
        self._close_received()
        self._socket.close()


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
