"""Batches on their way to a device: pulled, copied and transformed while the caller works on earlier ones.

Runs in the consumer's process and threads, for `CUDAPrefetcher` and for a DataLoader with `device=`; nothing
here is called in a worker. NOTE [ Copies ahead ]:

1. Whoever iterates has one side stream for life. Copies and transforms run on it in order.
2. A copy reads pinned memory only. The host keeps that memory until the copy's event is done, even when
   the iteration is abandoned. At most ``depth + 1`` batches of it wait for their copies.
3. A batch's device tensors come from torch's allocator under the side stream. Before the caller gets them,
   the caller's current stream waits for the batch's event, and `record_stream` tells the allocator that this
   stream uses them. So a batch that the caller keeps, or an alias of it, stays valid.
4. What is no plain CPU tensor (subclasses, sparse ones, tensors that need gradients, objects with a ``to``)
   moves on the caller's current stream when it is handed over: it may allocate what we cannot record. Such
   a batch is transformed there, too.
5. What is started for a batch waits on the device for all that the caller had launched when it was pulled.
   So a host that runs ahead of its device does not fill the device with batches; and memory that a transform
   hid in an object of its own, where rule 3 does not see it, is not written while the caller still reads it.
6. What is made ahead does not depend on the mode in which the caller asks for another batch: neither
   inference mode nor autocast reaches it. Transforms run without gradients.
7. An exception from a signal handler closes the iterator if it comes while copies are started: the iterator
   never goes on with a batch missing.

All device work goes through `Backend`.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import GeneratorType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fastload.errors import LoaderClosedError
from fastload.nested.device_tree import map_leaves

if TYPE_CHECKING:
    from fastload.device.cuda import Backend

T = TypeVar("T")


@dataclass
class _Ahead:
    """A batch on its way: all that the side stream can do for it is under way."""

    batch: Any
    event: Any = None  # None: nothing is under way
    made: list[torch.Tensor] = field(default_factory=list)  # on the side stream, and in the batch
    late: dict[int, Any] = field(default_factory=dict)  # leaves to move at hand-over, by id


@dataclass
class _Failed:
    """The loader's error, in the place of the batch that it could not give."""

    error: Exception


class CopiesAhead(Iterator[T]):
    """One pass over a loader. See NOTE [ Copies ahead ].

    Args:
        source: Gives the batches. If it has `register_slots`, the device may read its slots in place.
        backend: The device.
        stream: The side stream.
        depth: How many batches are under way behind the one handed out.
        transform: What becomes of each batch once it is on the device; None leaves it as it is.
        taken: Called when the caller takes the next batch, or the error in its place.
    """

    def __init__(
        self,
        source: Iterator[T],
        backend: Backend,
        stream: Any,
        depth: int,
        transform: Callable[[Any], Any] | None = None,
        taken: Callable[[], None] | None = None,
    ) -> None:
        self._source: Iterator[T] | None = source
        self._backend = backend
        self._stream = stream
        self._depth = depth
        self._transform = transform
        self._taken = taken
        self._was_interrupted = False
        self._pulled: collections.deque[T] = collections.deque()  # the batch whose copies are being started
        register_slots = getattr(source, "register_slots", None)
        if register_slots is not None:
            register_slots(backend, stream)
        self._ahead: collections.deque[_Ahead | _Failed] = collections.deque()
        self._reading = _HostMemory(backend)
        # Not at exit: there the memory goes with the process.
        weakref.finalize(self, self._reading.release_all).atexit = False

    def __next__(self) -> T:
        if self._was_interrupted:
            raise LoaderClosedError(
                "an exception interrupted this iterator while it copied batches ahead, and closed it; "
                "start a new one with iter(loader)"
            )
        self._was_interrupted = True  # until the books are right again
        self._fill()
        first = self._ahead.popleft() if self._ahead else None
        if first is not None and self._taken is not None:
            self._taken()
        self._was_interrupted = False
        if first is None:
            self._reading.release_all()
            raise StopIteration
        if isinstance(first, _Ahead):
            return self._hand_over(first)
        try:
            raise first.error
        finally:
            del first  # else the error's traceback and this frame would hold each other

    def _fill(self) -> None:
        """Pull batches until ``depth`` are under way behind the next one to hand over."""
        while self._source is not None and len(self._ahead) <= self._depth:
            if self._ahead and isinstance(self._ahead[-1], _Failed):
                return  # whether to go on after an error is the caller's choice
            self._reading.release_done(max_left=self._depth)
            with outside_modes(self._backend.device):
                self._pull(self._source)

    def _pull(self, source: Iterator[T]) -> None:
        # A function of its own, so that no name is left here for the batch, or the error, of last time.
        try:
            # One call, so that a signal finds the batch either in the source or here.
            self._pulled.extend(itertools.islice(source, 1))
        except Exception as error:  # noqa: BLE001  # of any kind, raised when its turn comes
            self._ahead.append(_Failed(error))
            return
        except BaseException:
            # The source gives the batch at the next call, unless it is a generator, which ends with this.
            self._was_interrupted = isinstance(source, GeneratorType)
            raise
        if not self._pulled:
            self._source = None
            return
        launched = self._backend.record_event(self._backend.current_stream())
        self._backend.wait_event(self._stream, launched)
        self._ahead.append(self._start(self._pulled[0]))
        self._pulled.clear()

    def _start(self, batch: T) -> _Ahead | _Failed:
        ahead = _Ahead(batch)
        reading: list[Any] = []
        started: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # leaf and copy, by the leaf's id

        def start(leaf: Any) -> Any:
            if not _is_plain(leaf):
                ahead.late[id(leaf)] = leaf
                return leaf
            if id(leaf) not in started:  # a tensor that is there twice is copied once
                pinned = self._backend.pin(leaf)
                # Before the copy starts. Memory that was pinned already may come back to its owner with the
                # batch, not with the tensor: then the batch is kept as a whole.
                reading.append((pinned, batch if pinned is leaf else None))
                started[id(leaf)] = leaf, self._backend.copy(pinned, self._stream)
            return started[id(leaf)][1]

        try:
            ahead.batch = map_leaves(batch, start)
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"while a batch was copied ahead; {self._depth + 1} batches are there beside your own"
            )
            return _Failed(error)
        except Exception as error:  # noqa: BLE001  # as above
            return _Failed(error)
        finally:
            if reading:  # also after an error: the copies of the first leaves are under way
                ahead.event = self._backend.record_event(self._stream)
                self._reading.keep(ahead.event, reading)
        ahead.made = [copied for _, copied in started.values()]
        if self._transform is not None and not ahead.late:
            del started
            return self._transform_ahead(ahead, self._transform)
        return ahead

    def _transform_ahead(self, ahead: _Ahead, transform: Callable[[Any], Any]) -> _Ahead | _Failed:
        try:
            with self._backend.on(self._stream):
                ahead.batch = apply_transform(transform, ahead.batch, self._backend.device)
        except Exception as error:  # noqa: BLE001  # as above
            return _Failed(error)
        ahead.event = self._backend.record_event(self._stream)
        ahead.made.clear()

        def note(leaf: Any) -> Any:
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.layout is torch.strided
                and leaf.device.type == self._backend.device.type
            ):
                ahead.made.append(leaf)
            return leaf

        map_leaves(ahead.batch, note)
        return ahead

    def _hand_over(self, ahead: _Ahead) -> T:
        backend = self._backend
        consumer = backend.current_stream()
        if ahead.event is not None:
            backend.wait_event(consumer, ahead.event)
            for tensor in ahead.made:
                backend.record_stream(tensor, consumer)
        batch: T = ahead.batch
        if ahead.late:
            try:
                moved = {key: backend.move(leaf) for key, leaf in ahead.late.items()}
            finally:
                moves = backend.record_event(consumer)
                self._reading.keep(moves, list(ahead.late.values()))
                # What waits for the side stream before it unregisters a slot waits for these reads, too.
                backend.wait_event(self._stream, moves)
            batch = map_leaves(batch, lambda leaf: moved.get(id(leaf), leaf))
            if self._transform is not None:
                batch = apply_transform(self._transform, batch, backend.device)
        return batch


def apply_transform(transform: Callable[[Any], Any], batch: Any, device: torch.device) -> Any:
    """The batch that ``transform`` makes of ``batch``, which is on ``device``; see rule 6."""
    try:
        with outside_modes(device), torch.no_grad():
            return transform(batch)
    except Exception as error:
        error.add_note(
            f"raised by device_transform, which is given whole batches on {device}; "
            "a module's own tensors are not moved there by the loader"
        )
        raise


@contextlib.contextmanager
def outside_modes(device: torch.device) -> Iterator[None]:
    """Without the caller's inference mode, and without autocast on the CPU and ``device``."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())  # the line above switches gradients on
        for kind in {"cpu", device.type}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _is_plain(leaf: Any) -> bool:
    """Whether a copy of the leaf's bytes is the leaf: no subclass, no gradient, no sparse layout."""
    return (
        type(leaf) is torch.Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not leaf.requires_grad
        and not leaf.is_quantized
        and not leaf.is_nested
    )


class _HostMemory:
    """Host memory that the device may still read, in the order in which its events were recorded."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pid = os.getpid()
        self._kept: collections.deque[tuple[Any, list[Any]]] = collections.deque()

    def keep(self, event: Any, sources: list[Any]) -> None:
        """Hold what the device reads until it has reached this event."""
        self._kept.append((event, sources))

    def release_done(self, max_left: int) -> None:
        """Let go of what the device has read; wait for the oldest while more than ``max_left`` remain."""
        while self._kept and (len(self._kept) > max_left or self._backend.is_done(self._kept[0][0])):
            self._backend.synchronize(self._kept[0][0])
            self._kept.popleft()

    def release_all(self) -> None:
        """Wait for all copies; a forked child, which has no device, keeps what it cannot give back."""
        if os.getpid() == self._pid:
            self.release_done(max_left=0)
        else:  # torch's pinned allocator would ask the device, and end the process when that fails
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._kept))
