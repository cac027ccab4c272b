"""fastload's loader instead of the torch loader that a framework built from one.

A framework's `prepare` reads the attributes of a loader, changes its samplers for the ranks, and builds a
torch.utils.data.DataLoader. `loader_in_place_of` takes the samplers from the framework's loader, and all
other arguments from the loader passed to the framework.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterableDataset

import fastload.loader
from fastload.epochs.loader_state import state_of
from fastload.workers.settings import OPTION_NAMES

# These arguments of torch's loader do not depend on the rank.
_KEPT_NAMES = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


def check_loader(loader: Any, caller: str) -> None:
    """Check that a loader can be prepared.

    Args:
        loader: The argument of `prepare`.
        caller: The function named in errors.

    Raises:
        TypeError: It is not a fastload.DataLoader.
        ValueError: A state was loaded into it.
    """
    if not isinstance(loader, fastload.loader.DataLoader):
        raise TypeError(f"{caller} takes a fastload.DataLoader, but got a {type(loader).__name__}")
    if state_of(loader).loaded is not None:
        raise ValueError(
            f"{caller} got a loader into which a state was loaded, and the ranks' samplers would not resume "
            "from it: prepare the loader first, and call load_state_dict() of the prepared loader"
        )


def loader_in_place_of(
    built: Any, source: fastload.loader.DataLoader, device: torch.device | None
) -> fastload.loader.DataLoader:
    """A new fastload loader for the samples of one rank.

    Args:
        built: The loader that the framework built; its dataset, samplers, batch size, generator and
            `worker_init_fn` are used. It was not iterated over.
        source: The loader passed to the framework; all other arguments come from it.
        device: The device to which the framework moves batches; None if it moves none.

    Raises:
        ValueError: ``source`` has another device.
    """
    arguments = {name: getattr(source, name) for name in (*_KEPT_NAMES, *OPTION_NAMES)}
    arguments |= {"worker_init_fn": built.worker_init_fn, "generator": built.generator}
    arguments["device"] = device_of(source.device, device)
    if isinstance(built.dataset, IterableDataset):
        arguments |= {"batch_size": built.batch_size, "drop_last": built.drop_last}
    elif built.batch_sampler is not None and built.batch_size is None:
        arguments["batch_sampler"] = built.batch_sampler
    else:
        arguments |= {"batch_size": built.batch_size, "sampler": built.sampler, "drop_last": built.drop_last}
    loader = fastload.loader.DataLoader(built.dataset, **arguments)
    loader._auto_workers = source._auto_workers  # it continues to choose
    return loader


def device_of(
    device: str | int | torch.device | None, framework: torch.device | None
) -> str | int | torch.device | None:
    """The ``device`` of a prepared loader.

    Args:
        device: The loader's ``device``.
        framework: The device to which the framework moves batches; None if it moves none.

    Raises:
        ValueError: The two are different devices, so each batch would be copied twice.
    """
    if device is None or framework is None:
        return device
    if device != "auto":
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        is_other_index = None not in (wanted.index, framework.index) and wanted.index != framework.index
        if wanted.type != framework.type or is_other_index:
            raise ValueError(
                f"the loader has device={device!r}, but the framework moves batches to {framework}: give the "
                'loader device="auto"'
            )
    return framework
