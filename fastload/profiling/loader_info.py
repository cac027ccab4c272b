"""What is known of a loader and its batches, as plain values: settings, sizes, and the loader's name."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from fastload.nested.tree import leaves
from fastload.profiling.line_sampler import is_own_code

if TYPE_CHECKING:
    from types import FrameType

_GENERAL_NAMES = frozenset(("self", "loader", "dataloader", "data_loader", "base_dataloader", "iterable"))


def loader_info(loader: Any, frame: FrameType | None) -> dict[str, Any]:
    """The name, the dataset and the settings of a loader before its first batch.

    Args:
        loader: torch's or fastload's.
        frame: The innermost frame of the code that iterates over it, to find its name.
    """
    dataset = loader.dataset
    is_iterable = isinstance(dataset, IterableDataset)
    num_samples = None
    if not is_iterable:
        with contextlib.suppress(Exception):  # whatever it raises, the loop might never ask for it
            num_samples = len(dataset)
    worker_type = getattr(loader, "worker_type", "process")
    module = sys.modules.get("fastload.loader")
    return {
        "name": _name_of(loader, frame),
        "dataset": type(dataset).__name__,
        "is_cached": type(dataset).__name__ == "CachedDataset",
        "remembers_files": getattr(loader, "cache", None) is not None,
        "is_iterable": is_iterable,
        "num_samples": num_samples,
        "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "pin_memory": loader.pin_memory,
        "is_fastload": module is not None and isinstance(loader, module.DataLoader),
        "worker_type": worker_type if isinstance(worker_type, str) else "ray",
        "device": None if getattr(loader, "device", None) is None else str(loader.device),
        "nbytes": 0,
        "image_dtype": None,
    }


def batch_info(batch: Any) -> dict[str, Any]:
    """The bytes of a batch's tensors, and the dtype of the largest of them with 4 dimensions."""
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    info: dict[str, Any] = {"nbytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors)}
    images = [tensor for tensor in tensors if tensor.dim() == 4]
    if images:
        largest = max(images, key=torch.numel)
        info["image_dtype"] = str(largest.dtype).removeprefix("torch.")
    return info


def _attributes(value: Any) -> dict[str, Any]:
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


def _name_of(loader: Any, frame: FrameType | None) -> str:
    """The variable or attribute that holds the loader in the calling user code; else its class.

    Names in frameworks' functions, and generic names, are the last choice.
    """
    general = ""
    while frame is not None:
        if is_own_code(frame.f_code.co_filename):
            attributes = _attributes(frame.f_locals.get("self"))
            variables: dict[str, Any] = {**frame.f_globals, **attributes, **frame.f_locals}
            for name, value in variables.items():
                # A framework's loader, such as Accelerate's, iterates over this one.
                is_loader = value is loader or _attributes(value).get("base_dataloader") is loader
                if is_loader and not name.startswith("_"):
                    if name not in _GENERAL_NAMES:
                        return name
                    general = general or name
        frame = frame.f_back
    return general if general not in ("", "self") else type(loader).__name__
