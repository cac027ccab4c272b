"""DevicePrefetcher: copies the batches of any iterable to the device ahead of the training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from fastload.device.devices import choose_backend
from fastload.device.stream_prefetcher import StreamPrefetcher
from fastload.system.checks import check_iterable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fastload.device.devices import Backend

T = TypeVar("T")


class DevicePrefetcher(Generic[T]):
    """Iterates over the batches of ``loader``, prefetched to a CUDA device.

    Batches can nest dicts, lists, tuples, namedtuples, dataclasses, Mappings, Sequences and objects with
    ``to(device)``. Values that are not tensors pass through, container types are kept, and the loader's own
    batches are not changed. Pinned memory is read in place, and so are the slots of a `fastload.DataLoader`'s
    workers; other memory is first copied into torch's pinned memory. The caller owns the batches and can keep
    them.

    Each ``iter()`` starts a new epoch. An error of the loader is raised after the batches before it. The
    ``state_dict()`` of the loader also counts prefetched batches; with `device=`, the ``state_dict()`` of a
    `fastload.DataLoader` counts only delivered ones. Attributes that are not listed here are the loader's:
    ``dataset``, ``sampler``, ``set_epoch``, ...

    Args:
        loader: Any iterable of batches.
        device: "cuda" (the current device at the first iteration), "cuda:1" or the int 1, "cpu", or "auto":
            CUDA if available, else the CPU, with one log line. On the CPU batches pass through unchanged.
        depth: How many batches to prefetch beyond the delivered one. Each takes device memory.

    Attributes:
        loader: The iterable itself.
        depth: As given.

    Raises:
        DeviceUnavailableError: The requested device is not available.
        TypeError: ``depth`` is not an int, or ``loader`` is not an iterable.
        ValueError: ``depth`` is below 1, or ``device`` is of a different kind.
    """

    def __init__(
        self, loader: Iterable[T], device: str | int | torch.device = "cuda", depth: int = 2
    ) -> None:
        if not isinstance(depth, int) or isinstance(depth, bool):
            raise TypeError(f"depth should be an int, the number of batches to copy ahead, but got {depth!r}")
        check_iterable("loader", loader, "batches")
        if depth < 1:
            raise ValueError(f"depth should be at least 1 batch, but got depth={depth}")
        self.loader = loader
        self.depth = depth
        self._backend: Backend | None = choose_backend(device, "DevicePrefetcher")
        self._stream: Any = None

    @property
    def device(self) -> torch.device:
        """The device of the batches; "cuda" has its index from the first iteration on."""
        return torch.device("cpu") if self._backend is None else self._backend.device

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without len() raises its own error

    def __iter__(self) -> Iterator[T]:
        if self._backend is None:
            return iter(self.loader)
        if self._stream is None:
            self._stream = self._backend.make_stream()
        return StreamPrefetcher(iter(self.loader), self._backend, self._stream, self.depth)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None}  # the copy, or another process, makes its own stream

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look up private names before there is a loader.
        if name.startswith("_") or name == "loader":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)
