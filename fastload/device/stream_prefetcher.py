"""Copy batches to a device ahead of the caller: fetch, copy and transform them while it uses earlier batches.

Runs in the consumer's process and threads, for `DevicePrefetcher` and for a DataLoader with `device=`; no
worker calls this code. NOTE [ Copies ahead ]:

1. Each prefetcher or loader has one side stream for life. Copies and transforms run on it in order.
2. A copy reads only pinned memory. The host keeps that memory until the copy's event is done, even if the
   iteration is abandoned. At most ``depth + 1`` batches of pinned memory wait for their copies.
3. Before the caller gets a batch, the caller's current stream waits for the batch's event. Without a
   transform, the batch's tensors come from torch's allocator under the stream that was current when the batch
   was fetched, so no other stream is recorded for them, and a forked child can drop them. With a transform,
   they come from the allocator under the side stream, and `record_stream` tells it that the caller's stream
   uses them. So a batch that the caller keeps, or an alias of it, stays valid.
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
8. The caller gets a batch that is there without waiting for the next one, if the loader can say which are.
9. A batch for which the device had no memory is tried again when its turn comes, and again at each later
   call: it is never lost.
10. The host waits for the device in one place, `_HostMemory`, which adds up the time: this is the device's
    pace, not a wait for data.

All device work goes through `Backend`.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import math
import operator
import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fastload.errors import LoaderClosedError
from fastload.nested.device_tree import map_device_leaves
from fastload.system.notes import add_note

if TYPE_CHECKING:
    from fastload.device.cuda import Backend

T = TypeVar("T")

# From so many leaves of at most so many bytes on, those of each dtype are copied as one. Whoever keeps one of
# them keeps them all, so they must be small.
_MANY_LEAVES, _SMALL_BYTES = 16, 16 << 10


@dataclass
class _InFlight:
    """A batch in flight: all its work on the side stream has been started."""

    batch: Any
    host: Any = None  # the batch on the host, if some leaves move at hand-over
    event: Any = None  # None: no work was started
    stream: Any = None  # under which the tensors in `made` were allocated
    made: list[torch.Tensor] = field(default_factory=list)  # the batch's tensors on the device
    late: dict[int, Any] = field(default_factory=dict)  # leaves to move at hand-over, by id
    transform: Callable[[Any], Any] | None = None  # for this batch


@dataclass
class _LacksMemory:
    """A batch on the host for which the device had no memory."""

    batch: Any
    transform: Callable[[Any], Any] | None
    # Not the error itself: its traceback holds the frames, and with them the memory, of what failed.
    message: str
    notes: list[str]

    @classmethod
    def of(cls, batch: Any, transform: Callable[[Any], Any] | None, error: BaseException) -> _LacksMemory:
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
    """One pass over a loader. See NOTE [ Copies ahead ].

    Args:
        source: Returns the batches. If it has `register_slots`, the device can read its slots in place.
        backend: The device.
        stream: The side stream.
        depth: How many batches are in flight after the one handed out.
        next_transform: Called when a batch was fetched; returns the function to call with this batch once it
            is on the device. None leaves batches unchanged.
        taken: Called when the caller takes the next batch, or the error instead of it.
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
        taken: Callable[[], None] | None = None,
        poll: Callable[[], tuple[T] | None] | None = None,
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
        self._poll = poll
        self._ahead: collections.deque[_InFlight | _LacksMemory | Exception] = collections.deque()
        self._reading = _HostMemory(backend)
        # Not at exit: the memory is freed with the process.
        weakref.finalize(self, self._reading.release_all).atexit = False

    @property
    def device_wait_ns(self) -> int:
        """How long the host has waited for the device so far."""
        return self._reading.waited_ns

    def __next__(self) -> T:
        if self._was_interrupted:
            raise LoaderClosedError(
                "an exception interrupted this iterator while it copied batches ahead, and closed it; "
                "start a new one with iter(loader)"
            )
        self._backend.expect_no_capture()
        self._was_interrupted = True  # until the state is consistent again
        self._fill()
        first = self._ahead.popleft() if self._ahead else None
        try:
            if first is None:
                self._reading.release_all()
                raise StopIteration
            if isinstance(first, _LacksMemory):
                first = self._start_again(first.batch, first.transform)
            if isinstance(first, _InFlight):
                batch = self._taken_over(first)
            else:
                self._note_taken()
                raise first
        except Exception:  # also of a late leaf or the transform; the next call returns the batch after it
            self._was_interrupted = False
            raise
        finally:
            del first  # else an error's traceback and this frame would hold each other
        self._was_interrupted = False
        return batch

    def _fill(self) -> None:
        """Fetch batches until ``depth`` are in flight after the next one to hand over; see rule 8."""
        self._reading.release_done(max_left=math.inf)
        while self._source is not None and len(self._ahead) <= self._depth:
            if self._ahead and not isinstance(self._ahead[-1], _InFlight):
                return  # the caller decides whether to continue after an error
            self._reading.release_done(max_left=self._depth)
            with outside_modes(self._backend.device):
                if not self._pull(self._source, must_wait=not self._ahead):
                    return

    def _pull(self, source: Iterator[T], *, must_wait: bool) -> bool:
        """Fetch a batch and start its copies; whether there was one, an error, or the end."""
        # A separate function, so no local variable keeps the last batch or error alive.
        try:
            if must_wait or self._poll is None:
                batch = next(source)
            elif (found := self._poll()) is not None:
                (batch,) = found
            else:
                return False
        except StopIteration:
            self._source = None
            return True
        except Exception as error:  # noqa: BLE001  # raised in order
            self._ahead.append(error)
            return True
        self._ahead.append(
            self._start(batch, None if self._next_transform is None else self._next_transform())
        )
        return True

    def _start_again(self, batch: T, transform: Callable[[Any], Any] | None) -> _InFlight | Exception:
        """Copy a batch when its turn has come: no other batch is in flight then."""
        self._reading.release_all()
        with outside_modes(self._backend.device):
            started = self._start(batch, transform)
        if isinstance(started, _LacksMemory):
            self._ahead.appendleft(started)
            raise started.error()
        return started

    def _taken_over(self, ahead: _InFlight) -> T:
        """Hand a batch over; it stays the next one if there is no memory for its late leaves."""
        lacking = None
        try:
            batch = self._hand_over(ahead)
        except torch.OutOfMemoryError as error:  # of a late leaf, or of the transform behind it
            lacking = _LacksMemory.of(ahead.host, ahead.transform, error)
        except BaseException:
            self._note_taken()
            raise
        if lacking is not None:
            self._ahead.appendleft(lacking)
            raise lacking.error()
        self._note_taken()
        return batch

    def _note_taken(self) -> None:
        if self._taken is not None:
            self._taken()

    def _start(
        self, batch: T, transform: Callable[[Any], Any] | None
    ) -> _InFlight | _LacksMemory | Exception:
        ahead = _InFlight(batch, transform=transform)
        ahead.stream = self._backend.current_stream() if transform is None else self._stream
        leaves: list[Any] = []

        def note(leaf: Any) -> Any:
            leaves.append(leaf)
            return leaf

        try:
            map_device_leaves(batch, note)
            # By id: a tensor that occurs twice is copied once.
            plain = {id(leaf): leaf for leaf in leaves if _is_plain(leaf)}
            ahead.late = {id(leaf): leaf for leaf in leaves if id(leaf) not in plain}
            copied = self._copied(batch, plain, ahead)
            if copied:  # by position: a container can make its leaves anew for each walk
                found = iter([copied.get(id(leaf), leaf) for leaf in leaves])
                ahead.batch = map_device_leaves(batch, lambda _: next(found))
            if ahead.late:
                ahead.host = batch
            elif ahead.transform is not None:
                self._transform_ahead(ahead, ahead.transform)
        except torch.OutOfMemoryError as error:
            return _LacksMemory.of(batch, transform, error)
        except Exception as error:  # noqa: BLE001  # as above
            return error
        return ahead

    def _copied(self, batch: T, plain: dict[int, torch.Tensor], ahead: _InFlight) -> dict[int, torch.Tensor]:
        """Start the copies of a batch's plain leaves; returns the device's tensors by the leaves' ids."""
        backend = self._backend
        joined = _joined(plain)
        leaves = list(plain.values()) if joined is None else joined.leaves
        pinned = list(map(backend.pin, leaves))
        targets = backend.allocate(pinned, ahead.stream)
        # Behind the allocations, because their memory may be what work that the caller has queued still uses.
        backend.wait_event(self._stream, backend.record_event(backend.current_stream()))
        reading: list[Any] = list(pinned)
        if any(map(operator.is_, pinned, leaves)):
            reading.append(batch)  # pinned memory can be freed with the batch, not with the tensor
        if ahead.stream is not self._stream:
            reading += targets  # the copies write them even if nobody takes the batch
        try:
            backend.copy(pinned, targets, self._stream)
        finally:  # also after an error: copies of the first leaves have been started
            if leaves:
                ahead.event = backend.record_event(self._stream)
                self._reading.keep(ahead.event, reading)
        ahead.made = targets
        if joined is not None:
            return joined.split(targets)
        return dict(zip(plain, targets, strict=True))

    def _transform_ahead(self, ahead: _InFlight, transform: Callable[[Any], Any]) -> None:
        with self._backend.on(self._stream):
            ahead.batch = apply_transform(transform, ahead.batch, self._backend.device)
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

        map_device_leaves(ahead.batch, note)

    def _hand_over(self, ahead: _InFlight) -> T:
        backend = self._backend
        consumer = backend.current_stream()
        if ahead.event is not None:
            backend.wait_event(consumer, ahead.event)
            if ahead.stream != consumer:
                for tensor in ahead.made:
                    backend.record_stream(tensor, consumer)
        batch: T = ahead.batch
        if ahead.late:
            try:
                moved = {key: backend.move(leaf) for key, leaf in ahead.late.items()}
            finally:
                moves = backend.record_event(consumer)
                self._reading.keep(moves, list(ahead.late.values()), is_batch=ahead.event is None)
                # Slots are unregistered once the side stream is done: let it wait for these reads, too.
                backend.wait_event(self._stream, moves)
            batch = map_device_leaves(batch, lambda leaf: moved.get(id(leaf), leaf))
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


def pin_plain(backend: Backend, batch: Any) -> Any:
    """``batch`` with the leaves that can be copied by their bytes in pinned memory; for any thread."""
    pinned: dict[int, tuple[Any, Any]] = {}  # a tensor that occurs twice stays one; the first keeps its id

    def pin(leaf: Any) -> Any:
        if not _is_plain(leaf):
            return leaf
        if id(leaf) not in pinned:
            pinned[id(leaf)] = leaf, backend.pin(leaf)
        return pinned[id(leaf)][1]

    return map_device_leaves(batch, pin)


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


class _Joined:
    """The leaves of a batch with the small ones of each dtype as one: each copy would cost the host 40 us.

    Args:
        large: The leaves that stay as they are.
        small: The others by dtype, contiguous.

    Attributes:
        leaves: Those to copy.
    """

    def __init__(self, large: list[torch.Tensor], small: dict[torch.dtype, list[torch.Tensor]]) -> None:
        self._large = large
        self._small = list(small.values())
        flat = [torch.cat([leaf.reshape(-1) for leaf in group]) for group in self._small]
        self.leaves = [*large, *flat]

    def split(self, targets: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """From copies of `leaves`: the copies of all leaves of the batch, by their ids."""
        found = dict(zip(map(id, self._large), targets, strict=False))
        for group, target in zip(self._small, targets[len(self._large) :], strict=True):
            parts = target.split_with_sizes([leaf.numel() for leaf in group])
            for leaf, part in zip(group, parts, strict=True):
                # Views of one tensor share its version, so a change of one would fail the backward pass of
                # another; with .data each has its own.
                found[id(leaf)] = (part if leaf.ndim == 1 else part.view(leaf.shape)).data
        return found


def _joined(plain: dict[int, torch.Tensor]) -> _Joined | None:
    """The leaves with the small ones joined; None if there are few."""
    if len(plain) < _MANY_LEAVES:
        return None
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    large = []
    for leaf in plain.values():
        is_small = leaf.nbytes <= _SMALL_BYTES and leaf.is_contiguous()
        if is_small and not leaf.is_conj() and not leaf.is_neg():
            small.setdefault(leaf.dtype, []).append(leaf)
        else:
            large.append(leaf)
    return _Joined(large, small) if sum(map(len, small.values())) >= _MANY_LEAVES else None


class _HostMemory:
    """Host memory that the device might still read, in the order of its recorded events.

    Attributes:
        waited_ns: How long the host has waited here for the device.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pid = os.getpid()
        self.waited_ns = 0
        self._kept: collections.deque[tuple[Any, list[Any], bool]] = collections.deque()
        self._num_batches = 0

    def keep(self, event: Any, sources: list[Any], *, is_batch: bool = True) -> None:
        """Keep the memory that the device reads until the device has reached this event.

        Args:
            event: Recorded behind the reads.
            sources: Whatever holds the memory.
            is_batch: Whether this counts as a batch; False for the second event of one.
        """
        self._kept.append((event, sources, is_batch))
        self._num_batches += is_batch

    def release_done(self, max_left: float) -> None:
        """Release memory that the device has read; wait while more than ``max_left`` batches remain."""
        while self._kept:
            event, _, is_batch = self._kept[0]
            if not self._backend.is_done(event):
                if self._num_batches <= max_left:
                    return
                start_ns = time.perf_counter_ns()
                self._backend.synchronize(event)
                self.waited_ns += time.perf_counter_ns() - start_ns
            self._kept.popleft()
            self._num_batches -= is_batch

    def release_all(self) -> None:
        """Wait for all copies; a forked child, which has no device, keeps memory that it cannot free."""
        if os.getpid() == self._pid:
            self.release_done(max_left=-1)
        else:  # torch's pinned allocator would call the device, and end the process when that fails
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._kept))
