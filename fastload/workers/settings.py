"""The settings of a loader that workers and epochs read, and the types of workers by name.

The loader class itself is in `loader`. A new type of workers is a `WorkerPool` in a file of its own, a line
in `WORKER_TYPES`, and a word in the docstring of the loader.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data
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
from fastload.batch.failures import check_max_errors
from fastload.batch.source import expects
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
from fastload.workers.worker_spec import WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastload.cache.file_cache import FileCache
    from fastload.workers.pool import WorkerPool

WORKER_TYPES: dict[str, type[WorkerPool]] = {"process": ProcessPool, "thread": ThreadPool, "ray": RayPool}

_CHECKS = {
    "memory_format": one_of(None, torch.channels_last),
    "seeding": one_of("worker", "sample", "torch"),
    "worker_type": Check(
        ", ".join(f'"{name}"' for name in WORKER_TYPES) + " or fastload.RayWorkers(...)",
        lambda value: value in tuple(WORKER_TYPES) or isinstance(value, RayWorkers),
    ),
    "on_error": one_of("raise", "replace", or_callable=True),
    "max_worker_restarts": integer(0),
}


def pool_type_of(worker_type: str | RayWorkers) -> type[WorkerPool]:
    """The pool that a loader's `worker_type` asks for."""
    return RayPool if isinstance(worker_type, RayWorkers) else WORKER_TYPES[worker_type]


def shown_worker_type(worker_type: str | RayWorkers) -> str:
    """A loader's `worker_type` as it is written in Python, for messages."""
    return f"{worker_type=}".replace("'", '"')


@dataclass(kw_only=True)
class Options:
    """The arguments of `fastload.DataLoader` that torch's loader does not have; it documents them.

    Raises:
        ValueError, TypeError: A value that is never valid. `check_with` compares it with the loader.
    """

    memory_format: torch.memory_format | None = None
    max_prefetch_memory: int | float | str = "auto"
    seeding: str = "worker"
    worker_type: str | RayWorkers = "process"
    device: str | int | torch.device | None = None
    batch_transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None
    device_transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None
    on_error: str | Callable[..., Any] = "raise"
    max_errors: int | float = 0.01
    max_worker_restarts: int = 0
    cache: str | None = None

    def __post_init__(self) -> None:
        if self.on_error == "skip":  # the word of `fastload cache build`
            raise ValueError(
                'on_error="skip" would change the sizes of batches: write on_error="replace", which reads a '
                "different sample instead, or pass a function"
            )
        for name, check in _CHECKS.items():
            try:
                check(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name} {error}") from None
        check_max_errors(self.max_errors, self.on_error, '"replace" or a function')
        check_cache(self.cache)
        if self.max_prefetch_memory != "auto":
            budget.check_memory(self.max_prefetch_memory, name="max_prefetch_memory")
        if self.device is not None:
            check_device(self.device)
        for name in ("batch_transform", "device_transform"):
            given: Any = getattr(self, name)
            parts = given if isinstance(given, (list, tuple)) else [given]
            if given is not None and not all(callable(part) for part in parts):
                raise ValueError(f"{name} should be a callable, or a list of callables, but got {given!r}")
            for part in parts:
                check_takes_batches(name, part)
        if self.device_transform is not None and self.device is None:
            raise ValueError(
                "device_transform needs device=, the device that it runs on; to transform batches in "
                "workers, use batch_transform"
            )

    def check_with(self, loader: torch.utils.data.DataLoader[Any]) -> None:
        """Check that torch's arguments of the loader allow these.

        Raises:
            ValueError: The dataset is not map-style, or has its own `__getitems__`; or the loader has a
                `multiprocessing_context` and no worker processes.
        """
        dataset = loader.dataset
        is_stream = isinstance(dataset, (IterableDataset, MapDataPipe))
        if self.seeding == "sample":
            # Of a dataset that is told what comes, samples are read one by one.
            check_dataset(dataset, auto_collation=has_auto_collation(loader) and not expects(dataset))
        pool_type, shown = pool_type_of(self.worker_type), shown_worker_type(self.worker_type)
        if not pool_type.uses_multiprocessing and loader.multiprocessing_context is not None:
            raise ValueError(f"multiprocessing_context is for worker processes, but {shown}: omit one")
        needs_map = {
            shown: pool_type.uses_threads,
            "on_error": self.on_error != "raise",
            "max_worker_restarts": self.max_worker_restarts > 0,
        }
        for name, is_given in needs_map.items():
            if is_given and is_stream:
                raise ValueError(
                    f"{name} needs a map-style dataset, whose samples are read by their indices, but the "
                    f"dataset is a {type(dataset).__name__}"
                )


OPTION_NAMES = tuple(field.name for field in dataclasses.fields(Options))


@functools.cache
def default_options() -> dict[str, Any]:
    """The default options of a loader."""
    return dict(vars(Options()))


if TYPE_CHECKING:

    class LoaderSettings(torch.utils.data.DataLoader, Options):  # type: ignore[type-arg]  # as in `loader`
        """torch's settings and fastload's own; `fastload.DataLoader` documents them."""

else:
    LoaderSettings = torch.utils.data.DataLoader


def worker_spec(loader: LoaderSettings, base_seed: int, file_cache: FileCache | None) -> WorkerSpec:
    """What workers run for this loader, and what runs without workers.

    Args:
        loader: Its settings are read; it is not kept.
        base_seed: The seed drawn when the iterator was made.
        file_cache: What its `cache` is.
    """
    return WorkerSpec(
        dataset=loader.dataset,
        is_iterable=is_iterable(loader),
        auto_collation=has_auto_collation(loader),
        collate_fn=vars(loader)["collate_fn"],
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
        base_seed=base_seed,
        num_workers=loader.num_workers,
        seeds_pipelines=loader.seeding != "torch",
        channels_last=loader.memory_format is torch.channels_last,
        seeds_samples=loader.seeding == "sample",
        on_error=loader.on_error,
        replacements=_replacements(loader),
        file_cache=file_cache,
        batch_transform=None if loader.batch_transform is None else compose(loader.batch_transform),
    )


def needs_keys(loader: LoaderSettings) -> bool:
    """Whether what makes a batch draws by its key."""
    return loader.seeding == "sample" or loader.on_error != "raise" or loader.batch_transform is not None


def _replacements(loader: LoaderSettings) -> Sequence[Any]:
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
        source = getattr(sampler, "data_source", getattr(sampler, "dataset", None))
        return range(len(loader.dataset)) if source is loader.dataset else ()
    return ()
