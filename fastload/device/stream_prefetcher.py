"""Copy batches to a device ahead of the caller: fetch, copy and transform them while it uses earlier batches.

Runs in the consumer's process and threads, for `DevicePrefetcher` and for a DataLoader with `device=`; no
worker calls this code. All device work goes through `Backend`.

A prefetcher has one side stream, on which copies and transforms run in order. A copy reads pinned memory,
which the host keeps until the copy's event is done, even if the iteration is abandoned. Before the caller
gets a batch, its current stream waits for the batch's event. `StreamPrefetcher._start_copies` and
`_hand_over` have the order of streams and events, and the reasons for it.

An error of the loader is raised after the batches before it. A batch for which the device had no memory is
tried again when its turn comes, and again at each later call: it is never lost.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import math
import operator
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fastload.errors import LoaderClosedError
from fastload.nested.tree import map_device_leaves
from fastload.system.notes import add_note

if TYPE_CHECKING:
    from fastload.device.devices import Backend

T = TypeVar("T")

# In the errors of torch and Triton about tensors on different devices.
_OF_DEVICES = re.compile(r"same device|device type|expected device|torch\.\w+\.\w+Tensor|cpu tensor")


@dataclass
class _InFlight:
    """A batch in flight: all its work on the side stream has been started."""

    batch: Any
    host_batch: Any = None  # the batch on the host, if it has deferred leaves
    event: Any = None  # after the batch's work on the side stream; None: no work was started
    allocation_stream: Any = None  # under which `device_tensors` were allocated
    device_tensors: list[torch.Tensor] = field(default_factory=list)
    deferred: dict[int, Any] = field(default_factory=dict)  # leaves to move at hand-over, by id
    transform: Callable[[Any], Any] | None = None  # for this batch


@dataclass
class _OutOfMemory:
    """A batch on the host for which the device had no memory."""

    batch: Any
    transform: Callable[[Any], Any] | None
    # Not the error itself: its traceback holds the frames, and with them the memory, of what failed.
    message: str
    notes: list[str]

    @classmethod
    def of(cls, batch: Any, transform: Callable[[Any], Any] | None, error: BaseException) -> _OutOfMemory:
        """The batch for which there was this error."""
        return cls(batch, transform, str(error), list(getattr(error, "__notes__", ())))

    def error(self) -> torch.OutOfMemoryError:
        """What the attempt raised."""
        error = torch.OutOfMemoryError(self.message)
        for note in self.notes:
            add_note(error, note)
        add_note(
            error,
            "fastload: raised while a batch was copied to the device, or transformed there; the next call of "
            "next() tries the same batch again",
        )
        return error


class StreamPrefetcher(Iterator[T]):
    """One pass over a loader, copied ahead on a side stream.

    Args:
        source: Returns the batches. If it has `register_slots`, the device can read its slots in place.
        backend: The device.
        stream: The side stream.
        depth: How many batches are in flight after the one handed out.
        next_transform: Called when a batch was fetched; returns the function to call with this batch once it
            is on the device. None leaves batches unchanged.
        on_delivery: Called when the caller takes the next batch, or the error instead of it.
        poll: Returns the source's next batch in a tuple, or None if it would have to wait for one; None: the
            source cannot tell.
    """

    def __init__(
        self,
        source: Iterator[T],
        backend: Backend,
        stream: Any,
        depth: int,
        next_transform: Callable[[], Callable[[Any], Any]] | None = None,
        on_delivery: Callable[[], None] | None = None,
        poll: Callable[[], tuple[T] | None] | None = None,
    ) -> None:
        self._source: Iterator[T] | None = source
        self._backend = backend
        self._stream = stream
        self._depth = depth
        self._next_transform = next_transform
        self._on_delivery = on_delivery
        self._was_interrupted = False
        register_slots = getattr(source, "register_slots", None)
        if register_slots is not None:
            register_slots(backend, stream)
        self._poll = poll
        self._queue: collections.deque[_InFlight | _OutOfMemory | Exception] = collections.deque()
        self._pending_reads = _PendingReads(backend)
        # Also when the iteration is abandoned: memory that a copy reads must not be freed. Not at exit: it is
        # freed with the process.
        weakref.finalize(self, self._pending_reads.release_all).atexit = False

    @property
    def device_wait_ns(self) -> int:
        """How long the host has waited for the device so far: for the device's pace, not for data."""
        return self._pending_reads.waited_ns

    def __next__(self) -> T:
        if self._was_interrupted:
            raise LoaderClosedError(
                "an exception interrupted this iterator while it copied batches ahead, and closed it; "
                "start a new one with iter(loader)"
            )
        self._backend.expect_no_capture()
        # Until the state is consistent again. If a signal handler raises on the way, the iterator stays
        # closed: it never continues with a batch missing.
        self._was_interrupted = True
        self._fill()
        first = self._queue.popleft() if self._queue else None
        try:
            if first is None:
                self._pending_reads.release_all()
                raise StopIteration
            if isinstance(first, _OutOfMemory):
                first = self._retry(first.batch, first.transform)
            if isinstance(first, _InFlight):
                batch = self._deliver(first)
            else:
                self._note_delivery()
                raise first
        except (
            Exception
        ):  # also of a deferred leaf or the transform; the next call returns the batch after it
            self._was_interrupted = False
            raise
        finally:
            del first  # else an error's traceback and this frame would hold each other
        self._was_interrupted = False
        return batch

    def _fill(self) -> None:
        """Fetch batches until ``depth`` are in flight after the next one to hand over.

        A batch that is there is not kept from the caller by a wait for the one after it, if the source can
        tell which are there.
        """
        self._pending_reads.release_done(max_left=math.inf)
        while self._source is not None and len(self._queue) <= self._depth:
            if self._queue and not isinstance(self._queue[-1], _InFlight):
                return  # the caller decides whether to continue after an error
            # At most `depth` + 1 batches of pinned memory wait for their copies.
            self._pending_reads.release_done(max_left=self._depth)
            with outside_modes(self._backend.device):
                if not self._fetch(self._source, must_wait=not self._queue):
                    return

    def _fetch(self, source: Iterator[T], *, must_wait: bool) -> bool:
        """Fetch a batch and start its copies; whether there was one, an error, or the end."""
        # A separate function, so no local variable keeps the last batch or error alive.
        try:
            if must_wait or self._poll is None:
                batch = next(source)
            elif (polled := self._poll()) is not None:
                (batch,) = polled
            else:
                return False
        except StopIteration:
            self._source = None
            return True
        except Exception as error:  # noqa: BLE001  # raised in order
            self._queue.append(error)
            return True
        self._queue.append(
            self._start(batch, None if self._next_transform is None else self._next_transform())
        )
        return True

    def _retry(self, batch: T, transform: Callable[[Any], Any] | None) -> _InFlight | Exception:
        """Copy a batch when its turn has come: no other batch is in flight then."""
        self._pending_reads.release_all()
        with outside_modes(self._backend.device):
            started = self._start(batch, transform)
        if isinstance(started, _OutOfMemory):
            self._queue.appendleft(started)
            raise started.error()
        return started

    def _deliver(self, entry: _InFlight) -> T:
        """Hand a batch over; it stays the next one if there is no memory for its deferred leaves."""
        failed = None
        try:
            batch = self._hand_over(entry)
        except torch.OutOfMemoryError as error:  # of a deferred leaf, or of the transform after it
            failed = _OutOfMemory.of(entry.host_batch, entry.transform, error)
        except BaseException:
            self._note_delivery()
            raise
        if failed is not None:
            self._queue.appendleft(failed)
            raise failed.error()
        self._note_delivery()
        return batch

    def _note_delivery(self) -> None:
        if self._on_delivery is not None:
            self._on_delivery()

    def _start(
        self, batch: T, transform: Callable[[Any], Any] | None
    ) -> _InFlight | _OutOfMemory | Exception:
        entry = _InFlight(batch, transform=transform)
        leaves: list[Any] = []

        def note(leaf: Any) -> Any:
            leaves.append(leaf)
            return leaf

        try:
            map_device_leaves(batch, note)
            # By id: a tensor that occurs twice is copied once.
            dense = {id(leaf): leaf for leaf in leaves if _is_dense_host_tensor(leaf)}
            # Subclasses, sparse tensors, tensors that need gradients and objects with a ``to`` move at
            # hand-over, on the caller's stream: their move can allocate memory that nobody could record for
            # it.
            entry.deferred = {id(leaf): leaf for leaf in leaves if id(leaf) not in dense}
            copies = self._start_copies(batch, dense, entry)
            if copies:  # by position: a container can make its leaves anew for each walk
                replacements = iter([copies.get(id(leaf), leaf) for leaf in leaves])
                entry.batch = map_device_leaves(batch, lambda _: next(replacements))
            if entry.deferred:
                entry.host_batch = batch
            elif entry.transform is not None:
                self._start_transform(entry, entry.transform)
        except torch.OutOfMemoryError as error:
            return _OutOfMemory.of(batch, transform, error)
        except Exception as error:  # noqa: BLE001  # as above
            return error
        return entry

    def _start_copies(
        self, batch: T, dense: dict[int, torch.Tensor], entry: _InFlight
    ) -> dict[int, torch.Tensor]:
        """Start the copies of a batch's dense leaves; returns the device's tensors by the leaves' ids."""
        backend = self._backend
        leaves = list(dense.values())
        pinned = list(map(backend.pin, leaves))
        # Without a transform, under the stream that the caller will most likely use them on: then no other
        # stream has to be recorded for them, and a forked child, which has no device, can drop them.
        caller_stream = backend.current_stream()
        entry.allocation_stream = caller_stream if entry.transform is None else self._stream
        entry.device_tensors = targets = backend.allocate(pinned, entry.allocation_stream)
        # Behind the allocations: the allocator gives out memory that work which the caller has queued may
        # still use, because on the caller's stream that work would come first. The side stream has to wait
        # for it. So the work for a batch also runs after all work that was queued when the batch was fetched:
        # a host that runs ahead of its device does not fill the device with batches, and tensors that a
        # transform hides in an object, where no `record_stream` reaches them, are not overwritten while the
        # caller reads them.
        backend.wait_event(self._stream, backend.record_event(caller_stream))
        memory: list[Any] = list(pinned)
        if any(map(operator.is_, pinned, leaves)):
            memory.append(batch)  # pinned memory can be freed with the batch, not with the tensor
        if entry.allocation_stream is not self._stream:
            memory += targets  # the copies write them even if nobody takes the batch
        try:
            backend.copy(pinned, targets, self._stream)
        finally:  # also after an error: copies of the first leaves have been started
            if leaves:
                entry.event = backend.record_event(self._stream)
                self._pending_reads.add(entry.event, memory)
        return dict(zip(dense, targets, strict=True))

    def _start_transform(self, entry: _InFlight, transform: Callable[[Any], Any]) -> None:
        # On the side stream, after the copies, and so are its allocations: what it frees, such as the
        # copies, is only reused there, in order.
        with self._backend.on(self._stream):
            entry.batch = apply_transform(transform, entry.batch, self._backend.device)
        entry.event = self._backend.record_event(self._stream)
        entry.device_tensors = []

        def note(leaf: Any) -> Any:
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.layout is torch.strided
                and leaf.device.type == self._backend.device.type
            ):
                entry.device_tensors.append(leaf)
            return leaf

        map_device_leaves(entry.batch, note)

    def _hand_over(self, entry: _InFlight) -> T:
        backend = self._backend
        consumer = backend.current_stream()
        if entry.event is not None:
            # Before the caller can queue any work that reads the batch.
            backend.wait_event(consumer, entry.event)
            if entry.allocation_stream != consumer:
                # When the caller drops these tensors, or the last alias of them, the allocator would give
                # their memory to the next work of the stream that it allocated them under, although work on
                # the caller's stream may still read it. Recorded, it waits for the caller's stream first.
                for tensor in entry.device_tensors:
                    backend.record_stream(tensor, consumer)
        batch: T = entry.batch
        if entry.deferred:
            try:
                moved = {key: backend.move(leaf) for key, leaf in entry.deferred.items()}
            finally:
                moves = backend.record_event(consumer)
                self._pending_reads.add(moves, list(entry.deferred.values()), is_batch=entry.event is None)
                # Slots are unregistered once the side stream is done: let it wait for these reads, too.
                backend.wait_event(self._stream, moves)
            batch = map_device_leaves(batch, lambda leaf: moved.get(id(leaf), leaf))
            if entry.transform is not None:  # on the caller's stream, where the moves are
                batch = apply_transform(entry.transform, batch, backend.device)
        return batch


def apply_transform(
    transform: Callable[[Any], Any], batch: Any, device: torch.device, name: str = "device_transform"
) -> Any:
    """The result of ``transform`` for ``batch``, which is on ``device``, without gradients.

    Raises:
        Exception: The error of the transform, with a note that has ``name``.
    """
    try:
        with outside_modes(device), torch.no_grad():
            return transform(batch)
    except Exception as error:
        cause = "; the loader does not move a module's own tensors there"
        place = f"raised by {name}, which gets whole batches on {device}"
        add_note(error, place + cause if _OF_DEVICES.search(str(error)) else place)
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


def pin_dense(backend: Backend, batch: Any) -> Any:
    """``batch`` with its dense tensors in pinned memory; for any thread."""
    pinned: dict[int, tuple[Any, Any]] = {}  # a tensor that occurs twice stays one; the first keeps its id

    def pin(leaf: Any) -> Any:
        if not _is_dense_host_tensor(leaf):
            return leaf
        if id(leaf) not in pinned:
            pinned[id(leaf)] = leaf, backend.pin(leaf)
        return pinned[id(leaf)][1]

    return map_device_leaves(batch, pin)


def _is_dense_host_tensor(leaf: Any) -> bool:
    """Whether the leaf is a tensor of values in CPU memory: no subclass, no gradient, no sparse layout.

    Unlike `batch.packing.is_plain`, it can be conjugated or negated: `Tensor.copy_` computes that, while a
    slot holds bytes as they are.
    """
    return (
        type(leaf) is torch.Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not leaf.requires_grad
        and not leaf.is_quantized
        and not leaf.is_nested
    )


class _PendingReads:
    """The host memory that the device may still read, in the order of the events after the reads.

    Here, and nowhere else, the host waits for the device.

    Attributes:
        waited_ns: How long the host has waited here.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pid = os.getpid()
        self.waited_ns = 0
        self._reads: collections.deque[tuple[Any, list[Any], bool]] = collections.deque()
        self._num_batches = 0

    def add(self, event: Any, memory: list[Any], *, is_batch: bool = True) -> None:
        """Keep memory alive until the device has reached an event.

        Args:
            event: Recorded after the reads.
            memory: Whatever holds the memory.
            is_batch: Whether this counts as a batch; False for the second event of one.
        """
        self._reads.append((event, memory, is_batch))
        self._num_batches += is_batch

    def release_done(self, max_left: float) -> None:
        """Release memory that the device has read; wait while more than ``max_left`` batches remain."""
        while self._reads:
            event, _, is_batch = self._reads[0]
            if not self._backend.is_done(event):
                if self._num_batches <= max_left:
                    return
                start_ns = time.perf_counter_ns()
                self._backend.synchronize(event)
                self.waited_ns += time.perf_counter_ns() - start_ns
            self._reads.popleft()
            self._num_batches -= is_batch

    def release_all(self) -> None:
        """Wait for all reads; a forked child, which has no device, keeps memory that it cannot free."""
        if os.getpid() == self._pid:
            self.release_done(max_left=-1)
        else:  # torch's pinned allocator would call the device, and end the process when that fails
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._reads))
