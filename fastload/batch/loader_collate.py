"""Wrap a loader's collate_fn, so that fastload's own arguments survive where a framework rebuilds the loader.

Frameworks build a torch.utils.data.DataLoader from the attributes of a loader (Accelerate's `prepare`, Ray's
`prepare_data_loader`). fastload's own arguments are then lost, but frameworks keep the collate_fn, and the
wrapper around it has them: after `patch_torch()`, the new loader takes them from there. In a loader of torch,
those that would change its batches are an error, and one line of the log names the others.

The wrapper is called in the consumer's process and in torch's workers; fastload's own iterators unwrap it.
"""

from __future__ import annotations

import mmap
import sys
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from fastload.system.logs import log
from fastload.system.torch_private import torch_fetch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Arguments that change batches, if they are not None.
_CHANGING = ("memory_format", "batch_transform", "device_transform")


class LoaderCollate:
    """A collate_fn that has the arguments of its loader.

    Called directly, it behaves like the inner function, and has its attributes, equality and hash.

    Args:
        inner: The user's collate_fn, or torch's default.
        lost: The arguments without which batches would be others, in words.
        unused: The others that were given, in words.
        settings: The loader's arguments that torch's loader lacks, for `carried_settings`.
        dataset: The loader's dataset. Neither is pickled: torch's workers do not need them.
    """

    __slots__ = ("__wrapped__", "_fastload_lost", "_fastload_settings", "_fastload_told", "_fastload_unused")

    def __init__(
        self,
        inner: Callable[[Any], Any],
        lost: str,
        unused: str,
        settings: Mapping[str, Any] | None = None,
        dataset: Any = None,
    ) -> None:
        object.__setattr__(self, "__wrapped__", inner)
        object.__setattr__(self, "_fastload_lost", lost)
        object.__setattr__(self, "_fastload_unused", unused)
        object.__setattr__(self, "_fastload_told", mmap.mmap(-1, 1) if unused else b"")  # shared with forks
        object.__setattr__(self, "_fastload_settings", (dict(settings or {}), dataset))

    def __call__(self, samples: Any) -> Any:
        """Collate.

        Raises:
            RuntimeError: torch's fetcher calls, and arguments would be lost.
        """
        is_of_torch = sys._getframe(1).f_globals is vars(torch_fetch)
        if is_of_torch and self._fastload_unused and not self._fastload_told[0]:
            self._fastload_told[0] = 1
            log.warning(
                "torch's own loader makes these batches, so these arguments of fastload.DataLoader have no "
                "effect: %s. Call fastload.patch_torch() before a framework prepares the loader",
                self._fastload_unused,
            )
        if is_of_torch and self._fastload_lost:
            raise RuntimeError(
                "a torch.utils.data.DataLoader was built from a fastload.DataLoader, as frameworks do when "
                f"they prepare a loader, and cannot do what these arguments say: {self._fastload_lost}. Call "
                "fastload.patch_torch() before the loader is prepared, or iterate over fastload's loader "
                "itself"
            )
        return self.__wrapped__(samples)

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
        return LoaderCollate, (self.__wrapped__, self._fastload_lost, self._fastload_unused)


def lost_in_torch(settings: Mapping[str, Any]) -> str:
    """The arguments that a loader of torch's cannot have and that change batches, in words."""
    names = ['seeding="sample"'] if settings["seeding"] == "sample" else []
    return ", ".join(names + [name for name in _CHANGING if settings[name] is not None])


def unused_in_torch(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The other arguments that were given, in words."""
    others = settings.keys() - {*_CHANGING, "seeding"}
    given = sorted(name for name in others if settings[name] != defaults[name])
    return ", ".join(f"{name}={settings[name]!r:.50}" for name in given)


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
