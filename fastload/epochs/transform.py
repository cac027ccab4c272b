"""Transforms of whole batches in the consumer's process, and the random streams of each batch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from fastload.nested.tree import map_device_leaves
from fastload.rng.batch_draws import AFTER_BATCH_TRANSFORM, BatchDraws, drawing_from
from fastload.system.torch_private import has_auto_collation, is_compiled
from fastload.transforms.compose import compose

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.epochs.position import Position
    from fastload.rng.keys import BatchKey


class EpochTransform:
    """A loader's `device_transform` in one epoch.

    Args:
        loader: The loader.
        position: The position of the epoch.
    """

    def __init__(self, loader: Any, position: Position) -> None:
        function = loader.device_transform
        self._function = compose(function)
        self._clones = any(map(is_compiled, function if isinstance(function, (list, tuple)) else [function]))
        self._position = position
        self._auto_collation = has_auto_collation(loader)
        self._first_call = 0 if loader.batch_transform is None else AFTER_BATCH_TRANSFORM

    def of_fetched(self) -> Callable[[Any], Any]:
        """The transform of the last fetched batch."""
        position = self._position
        index, key = position.fetched_key or ((), position.batch_key(position.fetched_number))
        return functools.partial(self._call, key, index if self._auto_collation else (index,))

    def _call(self, key: BatchKey, indices: Any, batch: Any) -> Any:
        # New draws for each call: a batch that found no memory on the device is transformed again.
        with drawing_from(BatchDraws(key, indices, first_call=self._first_call)):
            transformed = self._function(batch)
        # With CUDA graphs, a compiled function overwrites its last outputs, and batches wait for the caller.
        return map_device_leaves(transformed, _cloned) if self._clones else transformed


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.is_cuda else leaf
