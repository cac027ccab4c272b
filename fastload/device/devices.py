"""The devices that batches go to, and the choice of one.

`Backend` is a CUDA device as the prefetcher sees it; tests replace it with a fake one. Runs in the consumer's
process and threads.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fastload.errors import DeviceUnavailableError
from fastload.nested.tree import move_leaf
from fastload.system.logs import say_once
from fastload.system.worker_memory import freeze_inherited

if TYPE_CHECKING:
    from collections.abc import Iterator


# For each device, the streams of loaders and prefetchers that no longer exist. torch's allocator keeps memory
# per stream: if each new loader made a new stream, memory would grow.
_idle_streams: dict[int, list[torch.cuda.Stream]] = {}

_PORTABLE = 1  # a flag of cudaHostRegister: pinned for every device of this process


def uses_cuda() -> bool:
    """Whether this process has used CUDA; does not call a driver."""
    return bool(torch.cuda.is_initialized())


def check_device(device: str | int | torch.device) -> torch.device | None:
    """``device`` as a torch.device; None for "auto". Does not call a driver.

    Args:
        device: "cuda" (the current CUDA device), "cuda:N" or the int N from 0 (that device), "cpu" or "auto";
            or a torch.device of these types.

    Raises:
        ValueError: The device is of a different kind.
    """
    if isinstance(device, str) and device == "auto":
        return None
    message = (
        f"device should be 'cuda', 'cuda:N' or the int N (from 0), 'cpu' or 'auto', but got {device!r}; for "
        "another kind of device, leave out device=, and move each batch yourself"
    )
    # torch accepts bytes as text; its releases treat bools and negative numbers differently.
    is_of_a_kind = isinstance(device, (int, str, torch.device)) and not isinstance(device, bool)
    if not is_of_a_kind or (isinstance(device, int) and device < 0):
        raise ValueError(message)
    try:
        requested = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(message) from error
    if requested.type not in ("cpu", "cuda"):
        raise ValueError(message)
    return requested


def choose_backend(device: str | int | torch.device, asker: str) -> Backend | None:
    """The backend that copies to ``device``; None for the CPU. Messages name ``asker`` as their subject.

    Raises:
        DeviceUnavailableError: The requested device is not available.
        ValueError: As `check_device`.
    """
    requested = check_device(device)
    if requested is None:
        reason = why_unavailable(None)
        if reason is None:
            return Backend(None)
        # No warning: torch gives one where there is a GPU that does not work.
        say_once(f"{asker}(device='auto') leaves the batches on the CPU: {reason}", logging.INFO)
        return None
    if requested.type == "cpu":
        return None
    reason = why_unavailable(requested.index)
    if reason is not None:
        raise DeviceUnavailableError(
            f"{asker} cannot use device={str(requested)!r}: {reason}. "
            "device='auto' uses the CPU where there is no CUDA"
        )
    return Backend(requested.index)


def why_unavailable(index: int | None) -> str | None:
    """Why there is no such device; None if there is one. Makes no CUDA context."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without CUDA; install a build with CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    setting = "CUDA_VISIBLE_DEVICES is not set" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r}"
    if not torch.cuda.is_available():
        return f"torch finds no CUDA device or no driver that works with it; {setting}"
    num_devices = torch.cuda.device_count()
    if index is not None and index >= num_devices:
        return f"torch sees CUDA devices up to cuda:{num_devices - 1}; {setting}"
    return None


def copy_parameters(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a small host tensor on ``device``, on the current stream; the host does not wait for CUDA."""
    if device.type != "cuda":
        return host.to(device)
    with torch.cuda.device(device):  # else torch would pin memory for the current device
        # torch's pinned allocator keeps the memory until the copy is done.
        return torch.empty_like(host, pin_memory=True).copy_(host).to(device, non_blocking=True)


def as_current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A block in which a CUDA device is the current one: kernels that name none are launched there."""
    return torch.cuda.device(device)


@functools.cache
def _freeze_in_children() -> None:
    """Let no collection of garbage in a forked child destroy tensors of this process's device.

    The allocator asks the device about tensors that several streams used when they die. A forked child has no
    device, and the error ends it: "terminate called ... CUDA error: initialization error".
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=freeze_inherited)


class Backend:
    """A CUDA device, for the prefetcher. Makes no CUDA context before `make_stream`.

    The device is made current around each call that allocates or selects a stream; then the caller's device
    is restored. This also prevents torch from making a CUDA context on the caller's current device when it
    restores that device's stream.
    """

    def __init__(self, index: int | None) -> None:
        self.device = torch.device("cuda") if index is None else torch.device("cuda", index)

    def expect_no_capture(self) -> None:
        """Raise a RuntimeError if the caller's current stream is capturing a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "next() of a loader that copies to a CUDA device was called while a CUDA graph was captured: "
                "a graph can hold neither the wait for a batch nor its copy. Capture the step alone, with an "
                "input of its own that each batch is copied into"
            )

    def make_stream(self) -> torch.cuda.Stream:
        """An exclusive stream on this device; called once per prefetcher."""
        _freeze_in_children()
        torch.cuda.init()
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        self.device = torch.device("cuda", index)
        idle = _idle_streams.setdefault(index, [])
        try:
            stream = idle.pop()
        except IndexError:
            stream = torch.cuda.Stream(self.device)
        # Each user of the stream holds this object.
        weakref.finalize(self, idle.append, stream).atexit = False
        return stream

    def current_stream(self) -> torch.cuda.Stream:
        """The stream on which the caller's next work for this device will run."""
        return torch.cuda.current_stream(self.device)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` itself if a copy can read it directly, else a finished, pinned copy of it."""
        with torch.cuda.device(self.device):
            if _is_dense(tensor) and tensor.is_pinned():
                return tensor
            # Not pin_memory(): it keeps gaps between rows, and a copy across gaps is not asynchronous.
            return torch.empty_like(tensor, pin_memory=True).copy_(tensor)

    def allocate(self, likes: list[torch.Tensor], stream: torch.cuda.Stream) -> list[torch.Tensor]:
        """New device tensors with the shapes, strides and dtypes of ``likes``, allocated under ``stream``."""
        with self.on(stream):
            return [torch.empty_like(like, device=self.device) for like in likes]

    def copy(
        self, pinned: list[torch.Tensor], targets: list[torch.Tensor], stream: torch.cuda.Stream
    ) -> None:
        """Start the copies on ``stream``, in order; the host does not wait."""
        with self.on(stream):
            for source, target in zip(pinned, targets, strict=True):
                target.copy_(source, non_blocking=True)

    def move(self, value: Any) -> Any:
        """``value.to(device)`` on the caller's current stream; see `move_leaf`."""
        return move_leaf(value, self.device)

    def record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event that is done when all work given to ``stream`` so far is done."""
        event = torch.cuda.Event(blocking=True)  # else a host that waits for the event would spin
        event.record(stream)
        return event

    def wait_event(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Make later work of ``stream`` wait for ``event``; the host does not wait."""
        stream.wait_event(event)

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Note that ``stream`` uses ``tensor``, whose memory is then not reused before its work is done."""
        tensor.record_stream(stream)

    def is_done(self, event: torch.cuda.Event) -> bool:
        """Whether the device has reached ``event``; the host does not wait."""
        return bool(event.query())

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Let the host wait until the device has reached ``event``."""
        event.synchronize()

    @contextlib.contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """A block in which this thread's work for the device goes to ``stream``; the host does not wait."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def register(self, address: int, nbytes: int) -> str:
        """Page-lock mapped memory, so copies read it in place; return "", or why that failed."""
        return self._call("cudaHostRegister", address, nbytes, _PORTABLE)

    def unregister(self, address: int) -> str:
        """Undo `register`, when no copy from that memory is in flight; return "", or why that failed."""
        return self._call("cudaHostUnregister", address)

    def _call(self, name: str, *args: int) -> str:
        """Call a function of CUDA's runtime; returns "", or why that failed."""
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            code = getattr(runtime, name)(*args)
            if int(code) == 0:
                return ""
            # The next kernel would report the error. torch clears it when it raises it: when any kernel is
            # launched, and when the device has no memory left for the kernel's tensor. If the second kernel
            # fails too, the device itself has an error.
            for errors in (RuntimeError, torch.OutOfMemoryError):
                with contextlib.suppress(errors):
                    self._launch()
        return f"{name} gave error {int(code)}, {runtime.cudaGetErrorString(code)}"

    def _launch(self) -> None:
        torch.zeros(1, device=self.device).add_(1)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one block of memory without gaps or overlap, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
