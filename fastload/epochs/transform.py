"""Transforms of whole batches in the consumer's process, and the random streams of each batch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from fastload.nested.device_tree import map_device_leaves
from fastload.rng.batch_draws import AFTER_BATCH_TRANSFORM, BatchDraws, drawing_from
from fastload.transforms.compose import compose

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.epochs.resume import Epoch
    from fastload.rng.keys import BatchKey
    from fastload.workers.settings import LoaderSettings


class EpochTransform:
    """A loader's `device_transform` in one epoch, or its `batch_transform` if torch's workers make batches.

    Args:
        loader: The loader.
        epoch: The epoch.
        name: Which of the two.
    """

    def __init__(self, loader: LoaderSettings, epoch: Epoch, name: str) -> None:
        function = getattr(loader, name)
        self._function = compose(function)
        self._clones = any(map(_is_compiled, function if isinstance(function, (list, tuple)) else [function]))
        self._epoch = epoch
        self._auto_collation = loader._auto_collation
        # With in_order=False, the batches of torch's workers do not come in the order of their indices.
        is_in_order = loader.in_order or loader.num_workers == 0
        self._is_of_samples = loader.seeding == "sample" and is_in_order
        is_second = name == "device_transform" and loader.batch_transform is not None
        self._first_call = AFTER_BATCH_TRANSFORM if is_second else 0

    def of_fetched(self) -> Callable[[Any], Any]:
        """The transform of the last fetched batch."""
        epoch = self._epoch
        index, key = (), epoch.batch_key(epoch.num_fetched - 1)
        if self._is_of_samples and epoch.fetched_key is not None:
            index, key = epoch.fetched_key
        return functools.partial(self._call, key, index if self._auto_collation else (index,))

    def _call(self, key: BatchKey, indices: Any, batch: Any) -> Any:
        # New draws for each call: a batch that found no memory on the device is transformed again.
        with drawing_from(BatchDraws(key, indices, first_call=self._first_call)):
            result = self._function(batch)
        # With CUDA graphs, a compiled function overwrites its last outputs, and batches wait for the caller.
        return map_device_leaves(result, _cloned) if self._clones else result


def _is_compiled(function: Any) -> bool:
    """Whether torch.compile made it, or a part of it: of a function, or of a module."""
    parts = function.modules() if isinstance(function, torch.nn.Module) else [function]
    return any(
        hasattr(part, "_torchdynamo_orig_callable")
        or hasattr(part, "_orig_mod")
        or getattr(part, "_compiled_call_impl", None) is not None
        for part in parts
    )


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.is_cuda else leaf
