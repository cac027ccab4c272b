"""The prefetcher: batches that are already on the device when the training loop asks for them.

Runs in the consumer's process and threads; nothing here is called in a worker. NOTE [ Copies ahead ]:

1. Each prefetcher has one side stream for life, made at its first iteration. Copies run on it in order.
2. A copy reads pinned memory only. The host keeps that memory until the copy's event is done, even when
   the iteration is abandoned. At most ``depth + 1`` batches of it wait for their copies.
3. A batch's device tensors come from torch's allocator under the side stream. Before the caller gets them,
   the caller's current stream waits for the copy's event, and `record_stream` tells the allocator that this
   stream uses them. So a batch that the caller keeps, or an alias of it, stays valid.
4. What is no plain CPU tensor (subclasses, sparse ones, tensors that need gradients, objects with a ``to``)
   moves on the caller's current stream when it is handed over: it may allocate what we cannot record.

All device work goes through `Backend`; `_CUDABackend` is the only code here that names torch.cuda.
"""

from __future__ import annotations

import collections
import functools
import logging
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from fastload.device.nest import map_leaves
from fastload.errors import DeviceUnavailableError

_log = logging.getLogger("fastload")

T = TypeVar("T")


class Backend(Protocol):
    """What the prefetcher asks of a device. Streams and events are the backend's own objects."""

    device: torch.device

    def make_stream(self) -> Any:
        """A new stream on this device; called once per prefetcher."""

    def current_stream(self) -> Any:
        """The stream on which the caller's next work for this device will run."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` itself if a copy can read it as it is, else a pinned copy of it, finished on return."""

    def copy(self, pinned: torch.Tensor, stream: Any) -> torch.Tensor:
        """Allocate a device tensor under ``stream`` and start the copy into it; the host does not wait."""

    def move(self, value: Any) -> Any:
        """``value.to(device)`` on the caller's current stream."""

    def record_event(self, stream: Any) -> Any:
        """An event that is done when all work given to ``stream`` until now is."""

    def wait_event(self, stream: Any, event: Any) -> None:
        """Work given to ``stream`` from now on waits for ``event``; the host does not."""

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """``stream`` uses ``tensor``: its memory is not reused before what runs there by then is done."""

    def is_done(self, event: Any) -> bool:
        """Whether the device has reached ``event``; the host does not wait."""

    def synchronize(self, event: Any) -> None:
        """Let the host wait until the device has reached ``event``."""


class CUDAPrefetcher(Generic[T]):
    """Iterates over the batches of ``loader``, copied to a CUDA device ahead of their use.

    Batches are nests of dicts, lists, tuples, namedtuples, dataclasses, Mappings, Sequences and objects with
    ``to(device, non_blocking=...)``; what is no tensor passes through, container types are kept, and the
    loader's own batches are not changed. Memory that is pinned already is read where it is; other memory is
    first copied into torch's pinned memory. The caller owns the batches and may keep them.

    Each ``iter()`` starts a new epoch. An error of the loader comes out after the batches before it.
    Attributes that are not listed here are the loader's: ``dataset``, ``sampler``, ``set_epoch``, ...

    Args:
        loader: Any iterable of batches.
        device: "cuda" (the current device at the first iteration), "cuda:1", "cpu", or "auto": CUDA if there
            is any, else the CPU, which is said once in the log. On the CPU batches pass through untouched.
        depth: How many batches are copied ahead of the one handed out. Each takes device memory.

    Attributes:
        loader: The iterable itself.
        depth: As given.

    Raises:
        DeviceUnavailableError: If CUDA is asked for by name and is not there.
        TypeError: If ``depth`` is not an int.
        ValueError: If ``depth`` is below 1, or ``device`` is of another kind.
    """

    def __init__(
        self, loader: Iterable[T], device: str | int | torch.device = "cuda", depth: int = 2
    ) -> None:
        if not isinstance(depth, int) or isinstance(depth, bool):
            raise TypeError(f"depth should be an int, the number of batches to copy ahead, but got {depth!r}")
        if depth < 1:
            raise ValueError(f"depth should be at least 1 batch, but got depth={depth}")
        self.loader = loader
        self.depth = depth
        self._backend = _choose_backend(device)
        self._stream: Any = None

    @property
    def device(self) -> torch.device:
        """Where the batches go; "cuda" has its index from the first iteration on."""
        return torch.device("cpu") if self._backend is None else self._backend.device

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without len() says so itself

    def __iter__(self) -> Iterator[T]:
        if self._backend is None:
            return iter(self.loader)
        if self._stream is None:
            self._stream = self._backend.make_stream()
        return _CopiesAhead(iter(self.loader), self._backend, self._stream, self.depth)

    def __getattr__(self, name: str) -> Any:
        # Private names are looked up by copy and pickle before there is a loader to ask.
        if name.startswith("_") or name == "loader":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)


# --- one epoch -------------------------------------------------------------------------------------------


@dataclass
class _Ahead:
    """A batch on its way: everything that can be copied on the side stream is under way."""

    batch: Any
    event: Any = None  # None: nothing is under way
    copied: list[torch.Tensor] = field(default_factory=list)
    late: dict[int, Any] = field(default_factory=dict)  # leaves to move at hand-over, by id


@dataclass
class _Failed:
    """The loader's error, in the place of the batch that it could not give."""

    error: Exception


class _CopiesAhead(Iterator[T]):
    """One pass over the loader. See NOTE [ Copies ahead ]."""

    def __init__(self, source: Iterator[T], backend: Backend, stream: Any, depth: int) -> None:
        self._source: Iterator[T] | None = source
        self._backend = backend
        self._stream = stream
        self._depth = depth
        self._ahead: collections.deque[_Ahead | _Failed] = collections.deque()
        self._reading = _HostMemory(backend)
        # Not at exit: there the memory goes with the process.
        weakref.finalize(self, self._reading.release_all).atexit = False

    def __next__(self) -> T:
        self._fill()
        if not self._ahead:
            self._reading.release_all()
            raise StopIteration
        first = self._ahead.popleft()
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
            self._pull(self._source)

    def _pull(self, source: Iterator[T]) -> None:
        # A function of its own, so that no name is left here for the batch, or the error, of last time.
        try:
            batch = next(source)
        except StopIteration:
            self._source = None
        except Exception as error:  # noqa: BLE001  # of any kind, raised when its turn comes
            self._ahead.append(_Failed(error))  # raised in its turn
        else:
            self._ahead.append(self._start(batch))

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
        except Exception as error:  # noqa: BLE001  # as above
            return _Failed(error)
        finally:
            if reading:  # also after an error: the copies of the first leaves are under way
                ahead.event = self._backend.record_event(self._stream)
                self._reading.keep(ahead.event, reading)
        ahead.copied = [copied for _, copied in started.values()]
        return ahead

    def _hand_over(self, ahead: _Ahead) -> T:
        backend = self._backend
        consumer = backend.current_stream()
        if ahead.event is not None:
            backend.wait_event(consumer, ahead.event)
            for tensor in ahead.copied:
                backend.record_stream(tensor, consumer)
        batch: T = ahead.batch
        if ahead.late:
            try:
                moved = {key: backend.move(leaf) for key, leaf in ahead.late.items()}
            finally:
                self._reading.keep(backend.record_event(consumer), list(ahead.late.values()))
            batch = map_leaves(batch, lambda leaf: moved.get(id(leaf), leaf))
        return batch


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
        self._kept.append((event, sources))

    def release_done(self, max_left: int) -> None:
        """Let go of what the device has read; wait for the oldest while more than ``max_left`` remain."""
        while self._kept and (len(self._kept) > max_left or self._backend.is_done(self._kept[0][0])):
            self._backend.synchronize(self._kept[0][0])
            self._kept.popleft()

    def release_all(self) -> None:
        """Wait for all copies; not in a forked child, which has no device."""
        if os.getpid() == self._pid:
            self.release_done(max_left=0)


# --- devices ---------------------------------------------------------------------------------------------


def _choose_backend(device: str | int | torch.device) -> Backend | None:
    """The backend for ``device``; None for the CPU."""
    if device == "auto":
        reason = _CUDABackend.why_unavailable(None)
        if reason is None:
            return _CUDABackend(None)
        _say_once(f"CUDAPrefetcher(device='auto') leaves the batches on the CPU: {reason}")
        return None
    asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if asked.type == "cpu":
        return None
    if asked.type != "cuda":
        raise ValueError(f"device should be 'cuda', 'cuda:N', 'cpu' or 'auto', but got {device!r}")
    reason = _CUDABackend.why_unavailable(asked.index)
    if reason is not None:
        raise DeviceUnavailableError(
            f"CUDAPrefetcher cannot use device={str(device)!r}: {reason}. "
            "device='auto' uses the CPU where there is no CUDA."
        )
    return _CUDABackend(asked.index)


@functools.cache
def _say_once(message: str) -> None:
    _log.warning(message)


class _CUDABackend:
    """torch.cuda, on one device.

    The device is made current around each call that allocates or selects a stream, and the caller's own is
    put back. This also keeps torch from making a CUDA context on the caller's current device when it
    restores that device's stream.
    """

    def __init__(self, index: int | None) -> None:
        self.device = torch.device("cuda") if index is None else torch.device("cuda", index)

    @staticmethod
    def why_unavailable(index: int | None) -> str | None:
        """Why there is no such device; None if there is. Makes no CUDA context."""
        if not torch.backends.cuda.is_built():
            return f"torch {torch.__version__} was built without CUDA; install a build with CUDA"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        setting = (
            "CUDA_VISIBLE_DEVICES is not set" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r}"
        )
        if not torch.cuda.is_available():
            return f"torch finds no CUDA device or no driver that works with it; {setting}"
        num_devices = torch.cuda.device_count()
        if index is not None and index >= num_devices:
            return f"torch sees {num_devices} CUDA device(s), numbered from 0; {setting}"
        return None

    def make_stream(self) -> torch.cuda.Stream:
        torch.cuda.init()
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.device(self.device):
            if _is_dense(tensor) and tensor.is_pinned():
                return tensor
            # Not pin_memory(): it keeps gaps between rows, and a copy across gaps is not asynchronous.
            return torch.empty_like(tensor, pin_memory=True).copy_(tensor)

    def copy(self, pinned: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            return pinned.to(self.device, non_blocking=True)

    def move(self, value: Any) -> Any:
        return value.to(self.device, non_blocking=True)

    def record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait_event(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        tensor.record_stream(stream)

    def is_done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one block of memory, in any order of dimensions: no gaps, no overlap."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
