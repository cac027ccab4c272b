"""Copy batches to a device ahead of the caller: fetch, copy and transform them while it uses earlier batches.

Runs in the consumer's process and threads, for `DevicePrefetcher` and for a DataLoader with `device=`; no
worker calls this code. NOTE [ Copies ahead ]:

1. Each prefetcher or loader has one side stream for life. Copies and transforms run on it in order.
2. A copy reads only pinned memory. The host keeps that memory until the copy's event is done, even if the
   iteration is abandoned. At most ``depth + 1`` batches of pinned memory wait for their copies.
3. A batch's device tensors come from torch's allocator under the side stream. Before the caller gets them,
   the caller's current stream waits for the batch's event, and `record_stream` tells the allocator that this
   stream uses them. So a batch that the caller keeps, or an alias of it, stays valid.
4. Leaves other than dense CPU tensors (subclasses, sparse tensors, tensors that need gradients, objects with
   a ``to``) move on the caller's current stream when the batch is handed over, because their move can
   allocate memory that cannot be recorded. Such a batch is transformed on that stream, too.
5. The work for a batch runs on the device after all work that the caller had queued when the batch was
   fetched. So a host that runs ahead of its device does not fill the device with batches. This also protects
   tensors that a transform hides in a custom object, where rule 3 does not find them: their memory is not
   written while the caller still reads it.
6. The caller's inference mode and autocast do not apply to prefetched batches. Transforms run without
   gradients.
7. If a signal handler raises while a batch is fetched, copied or handed over, the iterator closes: it never
   continues with a batch missing. A loader's error is raised after the batches before it.

All device work goes through `Backend`.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fastload.errors import LoaderClosedError, add_note
from fastload.nested.device_tree import map_movable

if TYPE_CHECKING:
    from fastload.device.cuda import Backend

T = TypeVar("T")


@dataclass
class _Ahead:
    """A batch in flight: all its work on the side stream has been started."""

    batch: Any
    event: Any = None  # None: no work was started
    made: list[torch.Tensor] = field(default_factory=list)  # the batch's tensors made on the side stream
    late: dict[int, Any] = field(default_factory=dict)  # leaves to move at hand-over, by id
    transform: Callable[[Any], Any] | None = None  # for this batch


class CopiesAhead(Iterator[T]):
    """One pass over a loader. See NOTE [ Copies ahead ].

    Args:
        source: Returns the batches. If it has `register_slots`, the device can read its slots in place.
        backend: The device.
        stream: The side stream.
        depth: How many batches are in flight after the one handed out.
        next_transform: Called when a batch was fetched; returns the function to call with this batch once it
            is on the device. None leaves batches unchanged.
        taken: Called when the caller takes the next batch, or the error instead of it.
    """

    def __init__(
        self,
        source: Iterator[T],
        backend: Backend,
        stream: Any,
        depth: int,
        next_transform: Callable[[], Callable[[Any], Any]] | None = None,
        taken: Callable[[], None] | None = None,
    ) -> None:
        self._source: Iterator[T] | None = source
        self._backend = backend
        self._stream = stream
        self._depth = depth
        self._next_transform = next_transform
        self._taken = taken
        self._was_interrupted = False
        register_slots = getattr(source, "register_slots", None)
        if register_slots is not None:
            register_slots(backend, stream)
        self._ahead: collections.deque[_Ahead | Exception] = collections.deque()
        self._reading = _HostMemory(backend)
        # Not at exit: the memory is freed with the process.
        weakref.finalize(self, self._reading.release_all).atexit = False

    def __next__(self) -> T:
        if self._was_interrupted:
            raise LoaderClosedError(
                "an exception interrupted this iterator while it copied batches ahead, and closed it; "
                "start a new one with iter(loader)"
            )
        self._was_interrupted = True  # until the state is consistent again
        self._fill()
        first = self._ahead.popleft() if self._ahead else None
        if first is not None and self._taken is not None:
            self._taken()
        try:
            if first is None:
                self._reading.release_all()
                raise StopIteration
            if isinstance(first, Exception):
                raise first
            batch = self._hand_over(first)
        except Exception:  # also of a late leaf or the transform; the next call returns the batch after it
            self._was_interrupted = False
            raise
        finally:
            del first  # else an error's traceback and this frame would hold each other
        self._was_interrupted = False
        return batch

    def _fill(self) -> None:
        """Fetch batches until ``depth`` are in flight after the next one to hand over."""
        while self._source is not None and len(self._ahead) <= self._depth:
            if self._ahead and isinstance(self._ahead[-1], Exception):
                return  # the caller decides whether to continue after an error
            self._reading.release_done(max_left=self._depth)
            with outside_modes(self._backend.device):
                self._pull(self._source)

    def _pull(self, source: Iterator[T]) -> None:
        # A separate function, so no local variable keeps the last batch or error alive.
        try:
            batch = next(source)
        except StopIteration:
            self._source = None
            return
        except Exception as error:  # noqa: BLE001  # raised in order
            self._ahead.append(error)
            return
        launched = self._backend.record_event(self._backend.current_stream())
        self._backend.wait_event(self._stream, launched)
        self._ahead.append(self._start(batch))

    def _start(self, batch: T) -> _Ahead | Exception:
        ahead = _Ahead(batch)
        if self._next_transform is not None:
            ahead.transform = self._next_transform()
        reading: list[Any] = []
        started: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # leaf and copy, by the leaf's id

        def start(leaf: Any) -> Any:
            if not _is_plain(leaf):
                ahead.late[id(leaf)] = leaf
                return leaf
            if id(leaf) not in started:  # a tensor that occurs twice is copied once
                pinned = self._backend.pin(leaf)
                # Keep it before the copy starts. Already pinned memory can be freed with the batch, not with
                # the tensor: then the whole batch is kept.
                reading.append((pinned, batch if pinned is leaf else None))
                started[id(leaf)] = leaf, self._backend.copy(pinned, self._stream)
            return started[id(leaf)][1]

        try:
            ahead.batch = map_movable(batch, start)
        except torch.OutOfMemoryError as error:
            add_note(
                error,
                f"raised while a batch was copied ahead; the device holds {self._depth + 1} batches in "
                "addition to yours",
            )
            return error
        except Exception as error:  # noqa: BLE001  # as above
            return error
        finally:
            if reading:  # also after an error: copies of the first leaves have been started
                ahead.event = self._backend.record_event(self._stream)
                self._reading.keep(ahead.event, reading)
        ahead.made = [copied for _, copied in started.values()]
        if ahead.transform is not None and not ahead.late:
            del started
            return self._transform_ahead(ahead, ahead.transform)
        return ahead

    def _transform_ahead(self, ahead: _Ahead, transform: Callable[[Any], Any]) -> _Ahead | Exception:
        try:
            with self._backend.on(self._stream):
                ahead.batch = apply_transform(transform, ahead.batch, self._backend.device)
        except Exception as error:  # noqa: BLE001  # as above
            return error
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

        map_movable(ahead.batch, note)
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
                # Slots are unregistered once the side stream is done: let it wait for these reads, too.
                backend.wait_event(self._stream, moves)
            batch = map_movable(batch, lambda leaf: moved.get(id(leaf), leaf))
            if ahead.transform is not None:
                batch = apply_transform(ahead.transform, batch, backend.device)
        return batch


def apply_transform(
    transform: Callable[[Any], Any], batch: Any, device: torch.device, name: str = "device_transform"
) -> Any:
    """The result of ``transform`` for ``batch``, which is on ``device``; see rule 6. Errors have ``name``."""
    try:
        with outside_modes(device), torch.no_grad():
            return transform(batch)
    except Exception as error:
        add_note(
            error,
            f"raised by {name}, which gets whole batches on {device}; the loader does not move a module's "
            f"own tensors there",
        )
        raise


@contextlib.contextmanager
def outside_modes(device: torch.device) -> Iterator[None]:
    """A block without the caller's inference mode, and without autocast on the CPU and ``device``."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())  # the line above switches gradients on
        for kind in {"cpu", device.type}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _is_plain(leaf: Any) -> bool:
    """Whether the leaf can be copied by its bytes: no subclass, no gradient, no sparse layout."""
    return (
        type(leaf) is torch.Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not leaf.requires_grad
        and not leaf.is_quantized
        and not leaf.is_nested
    )


class _HostMemory:
    """Host memory that the device might still read, in the order of its recorded events."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pid = os.getpid()
        self._kept: collections.deque[tuple[Any, list[Any]]] = collections.deque()

    def keep(self, event: Any, sources: list[Any]) -> None:
        """Keep the memory that the device reads until the device has reached this event."""
        self._kept.append((event, sources))

    def release_done(self, max_left: int) -> None:
        """Release memory that the device has read; wait for the oldest if more than ``max_left`` remain."""
        while self._kept and (len(self._kept) > max_left or self._backend.is_done(self._kept[0][0])):
            self._backend.synchronize(self._kept[0][0])
            self._kept.popleft()

    def release_all(self) -> None:
        """Wait for all copies; a forked child, which has no device, keeps memory that it cannot free."""
        if os.getpid() == self._pid:
            self.release_done(max_left=0)
        else:  # torch's pinned allocator would call the device, and end the process when that fails
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._kept))
