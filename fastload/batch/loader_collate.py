"""Wrap a loader's collate_fn, to warn when a framework loses fastload's own arguments.

Frameworks build a torch.utils.data.DataLoader from the attributes of a loader (Accelerate's `prepare`, Ray's
`prepare_data_loader`). fastload's own arguments are then lost, and training would continue with different
numbers. But frameworks keep the collate_fn, so the wrapper around it stores these arguments. When torch's own
fetcher calls the wrapper, it converts batches to the loader's memory format and warns about the other
arguments.

The wrapper is called in the consumer's process and in torch's workers; fastload's own iterators unwrap it.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from fastload.batch.collate import to_channels_last
from fastload.system.torch_private import torch_fetch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class LoaderCollate:
    """A collate_fn that stores the arguments of its loader.

    Called directly, it behaves like the inner function, and has its attributes, equality and hash.

    Args:
        inner: The user's collate_fn, or torch's default.
        lost: The loader's arguments that have no effect in torch's loader, as source text.
        channels_last: Whether the loader has ``memory_format=torch.channels_last``; this wrapper applies it
            in torch's loader.
        settings: The loader's arguments that torch's loader lacks, for `carried_settings`.
        dataset: The loader's dataset. Neither is pickled: torch's workers do not need them.
    """

    __slots__ = ("__wrapped__", "_fastload_note", "_fastload_settings")

    def __init__(
        self,
        inner: Callable[[Any], Any],
        lost: tuple[str, ...],
        *,
        channels_last: bool,
        settings: Mapping[str, Any] | None = None,
        dataset: Any = None,
    ) -> None:
        object.__setattr__(self, "__wrapped__", inner)
        object.__setattr__(self, "_fastload_note", (lost, channels_last))
        object.__setattr__(self, "_fastload_settings", (dict(settings or {}), dataset))

    def __call__(self, samples: Any) -> Any:
        """Collate; if torch's fetcher calls, warn about the lost arguments."""
        inner = self.__wrapped__
        if sys._getframe(1).f_globals is not vars(torch_fetch):
            return inner(samples)
        lost, channels_last = self._fastload_note
        if lost:
            _warn(lost)
        return to_channels_last(inner(samples)) if channels_last else inner(samples)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__wrapped__, name, value)  # timm switches its mixup off this way

    def __delattr__(self, name: str) -> None:
        delattr(self.__wrapped__, name)

    def __eq__(self, other: object) -> bool:
        return bool(self.__wrapped__ == own_collate(other))

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return f"<collate_fn of a fastload.DataLoader: {self.__wrapped__!r}>"

    def __reduce__(self) -> Any:
        lost, channels_last = self._fastload_note
        return functools.partial(LoaderCollate, channels_last=channels_last), (self.__wrapped__, lost)


def own_collate(collate_fn: Any) -> Any:
    """The user's own collate_fn."""
    return collate_fn.__wrapped__ if type(collate_fn) is LoaderCollate else collate_fn


def carried_settings(collate_fn: Any, dataset: Any) -> dict[str, Any]:
    """The arguments that torch's loader lacks, of a loader that a framework rebuilds.

    Args:
        collate_fn: The framework's.
        dataset: The framework's: the loader's own, or a part of a stream for each rank.

    Returns:
        The arguments by name; empty if the collate_fn is not that of a fastload loader of this dataset.
    """
    if type(collate_fn) is not LoaderCollate:
        return {}
    settings, own = collate_fn._fastload_settings
    inner = getattr(dataset, "dataset", None) if isinstance(dataset, IterableDataset) else dataset
    return dict(settings) if own is dataset or own is inner else {}


@functools.cache
def _warn(lost: tuple[str, ...]) -> None:
    """Warn once per process; of an iterator's workers, only the first warns."""
    info = get_worker_info()
    if info is not None and info.id != 0:
        return
    warnings.warn(
        "a torch.utils.data.DataLoader was built from a fastload.DataLoader, as frameworks do when they "
        f"prepare a loader, and these arguments have no effect on its batches: {', '.join(lost)}. Call "
        "fastload.patch_torch() before the loader is prepared, or iterate over fastload's loader itself.",
        stacklevel=3,
    )
