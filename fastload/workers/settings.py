"""The arguments of a loader that torch's lacks: their checks, and the `Plan` that an iterator makes of all.

The loader class itself is in `loader`. A new type of workers is a `WorkerPool` in a file of its own, a line
in `WORKER_TYPES`, and a word in the docstring of the loader.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from fastload.augmentation.libraries import check_takes_batches
from fastload.batch.access import expects
from fastload.batch.failures import check_max_errors
from fastload.batch.plan import Plan
from fastload.device.devices import check_device
from fastload.readers.request import check_cache
from fastload.rng.sample_rng import check_dataset
from fastload.system import budget
from fastload.system.checks import Check, integer, one_of
from fastload.system.torch_private import has_auto_collation, is_iterable
from fastload.transforms.compose import compose
from fastload.workers.process_pool import ProcessPool
from fastload.workers.ray_pool import RayPool, RayWorkers
from fastload.workers.thread_pool import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fastload.cache.file_cache import FileCache
    from fastload.workers.pool import WorkerPool

WORKER_TYPES: dict[str, type[WorkerPool]] = {"process": ProcessPool, "thread": ThreadPool, "ray": RayPool}


def pool_type_of(worker_type: str | RayWorkers) -> type[WorkerPool]:
    """The pool that a loader's `worker_type` asks for."""
    return RayPool if isinstance(worker_type, RayWorkers) else WORKER_TYPES[worker_type]


def shown_worker_type(worker_type: str | RayWorkers) -> str:
    """A loader's `worker_type` as it is written in Python, for messages."""
    return f"{worker_type=}".replace("'", '"')


def _check_prefetch_memory(given: Any) -> None:
    if given != "auto":
        budget.check_memory(given, name="max_prefetch_memory")


def _check_transform(name: str, given: Any) -> None:
    parts = given if isinstance(given, (list, tuple)) else [given]
    if given is not None and not all(callable(part) for part in parts):
        raise ValueError(f"{name} should be a callable, or a list of callables, but got {given!r}")
    for part in parts:
        check_takes_batches(name, part)


# The arguments of `fastload.DataLoader` that torch's loader does not have, and what raises ValueError or
# TypeError for a value that is never valid. The error of a `Check` gets the name of the argument.
CHECKS: dict[str, Callable[[Any], object]] = {
    "memory_format": one_of(None, torch.channels_last),
    "max_prefetch_memory": _check_prefetch_memory,
    "seeding": one_of("worker", "sample", "torch"),
    "worker_type": Check(
        ", ".join(f'"{name}"' for name in WORKER_TYPES) + " or fastload.RayWorkers(...)",
        lambda value: value in tuple(WORKER_TYPES) or isinstance(value, RayWorkers),
    ),
    "device": lambda given: given is None or check_device(given),
    "batch_transform": functools.partial(_check_transform, "batch_transform"),
    "device_transform": functools.partial(_check_transform, "device_transform"),
    "on_error": one_of("raise", "replace", or_callable=True),
    "max_errors": lambda given: check_max_errors(given, "replace", '"replace" or a function'),
    "max_worker_restarts": integer(0),
    "cache": check_cache,
}


def check_values(options: Mapping[str, Any]) -> None:
    """Check the arguments of `CHECKS`, by name.

    Raises:
        ValueError, TypeError: A value is never valid, or not with the others.
    """
    for name, check in CHECKS.items():
        try:
            check(options[name])
        except ValueError as error:
            if isinstance(check, Check):
                raise ValueError(f"{name} {error}") from None
            raise
    check_max_errors(options["max_errors"], options["on_error"], '"replace" or a function')
    if options["device_transform"] is not None and options["device"] is None:
        raise ValueError(
            "device_transform needs device=, the device that it runs on; to transform batches in "
            "workers, use batch_transform"
        )


def check_with(options: Mapping[str, Any], loader: Any) -> None:
    """Check that torch's arguments of the loader allow the arguments of `CHECKS`.

    Raises:
        ValueError: The dataset is not map-style, or has its own `__getitems__`; or the loader has a
            `multiprocessing_context` and no worker processes.
    """
    dataset, worker_type = loader.dataset, options["worker_type"]
    is_stream = isinstance(dataset, (IterableDataset, MapDataPipe))
    if options["seeding"] == "sample":
        # Of a dataset that is told what comes, samples are read one by one.
        check_dataset(dataset, auto_collation=has_auto_collation(loader) and not expects(dataset))
    pool_type, shown = pool_type_of(worker_type), shown_worker_type(worker_type)
    if not pool_type.uses_multiprocessing and loader.multiprocessing_context is not None:
        raise ValueError(f"multiprocessing_context is for worker processes, but {shown}: omit one")
    needs_map = {
        shown: pool_type.uses_threads,
        "on_error": options["on_error"] != "raise",
        "max_worker_restarts": options["max_worker_restarts"] > 0,
    }
    for name, is_given in needs_map.items():
        if is_given and is_stream:
            raise ValueError(
                f"{name} needs a map-style dataset, whose samples are read by their indices, but the "
                f"dataset is a {type(dataset).__name__}"
            )


def plan_of(loader: Any, base_seed: int, file_cache: FileCache | None) -> Plan:
    """The settings of a loader as they are now.

    Args:
        loader: Its attributes are read; it is not kept.
        base_seed: The seed drawn when the iterator was made.
        file_cache: What its `cache` is.
    """
    return Plan(
        dataset=loader.dataset,
        is_iterable=is_iterable(loader),
        auto_collation=has_auto_collation(loader),
        collate_fn=vars(loader)["collate_fn"],
        drop_last=loader.drop_last,
        channels_last=loader.memory_format is torch.channels_last,
        on_error=loader.on_error,
        replacements=_replacements(loader),
        batch_transform=None if loader.batch_transform is None else compose(loader.batch_transform),
        seeds_pipelines=loader.seeding != "torch",
        seeds_samples=loader.seeding == "sample",
        file_cache=file_cache,
        needs_keys=(
            loader.seeding == "sample" or loader.on_error != "raise" or loader.batch_transform is not None
        ),
        worker_init_fn=loader.worker_init_fn,
        base_seed=base_seed,
        num_workers=loader.num_workers,
        worker_type=loader.worker_type,
        context=loader.multiprocessing_context,
        prefetch_factor=2 if loader.prefetch_factor is None else loader.prefetch_factor,
        max_prefetch_memory=loader.max_prefetch_memory,
        num_restarts=loader.max_worker_restarts,
        is_persistent=loader.persistent_workers,
        in_order=loader.in_order,
    )


def _replacements(loader: Any) -> Sequence[Any]:
    """The indices that the sampler can return, if `on_error` needs them and the sampler is one of torch's.

    A custom batch sampler chooses its own indices and does not use the sampler that torch makes.
    """
    if loader.on_error == "raise":
        return ()
    sampler: Any = loader.sampler
    if loader.batch_sampler is not None:
        sampler = loader.batch_sampler.sampler if type(loader.batch_sampler) is BatchSampler else None
    if type(sampler) is SubsetRandomSampler:
        return sampler.indices
    if type(sampler) in (SequentialSampler, RandomSampler, DistributedSampler):
        source: Any = getattr(sampler, "data_source", getattr(sampler, "dataset", None))
        return range(len(loader.dataset)) if source is loader.dataset else ()
    return ()
