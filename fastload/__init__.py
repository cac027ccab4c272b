"""A drop-in DataLoader for PyTorch over a shared cache of decoded images.

`import fastload` imports nothing else; each public name imports its module on first use. The public modules
are `fastload.cache`, `fastload.errors`, `fastload.profiling`, `fastload.training` and `fastload.transforms`.

Add a new name in two places, the imports that type checkers read and the table that Python reads; a test
compares the two.
"""

from typing import TYPE_CHECKING

from fastload.version import __version__ as __version__

if TYPE_CHECKING:
    from fastload.batch.failures import FailedSample as FailedSample
    from fastload.cache.dataset import CachedDataset as CachedDataset
    from fastload.device.device_prefetcher import DevicePrefetcher as DevicePrefetcher
    from fastload.epochs.node_partition import NodePartitionSampler as NodePartitionSampler
    from fastload.epochs.stats import LoaderStats as LoaderStats
    from fastload.errors import FastloadError as FastloadError
    from fastload.images.decode import decode_image as decode_image
    from fastload.images.decode import read_image as read_image
    from fastload.images.folder import ImageFolder as ImageFolder
    from fastload.integrations.patch import patch_torch as patch_torch, unpatch_torch as unpatch_torch
    from fastload.loader import DataLoader as DataLoader
    from fastload.memory.shared_list import SharedList as SharedList
    from fastload.profiling.recorder import profile as profile
    from fastload.readers.remember import remember as remember
    from fastload.rng.sample_rng import sample_rng as sample_rng
    from fastload.rng.seeding import WorkerInfo as WorkerInfo, get_worker_info as get_worker_info
    from fastload.rng.seeding import seed_everything as seed_everything, seed_worker as seed_worker
    from fastload.training.report import memory_report as memory_report
    from fastload.workers.ray_pool import RayWorkers as RayWorkers
else:  # with __getattr__ in sight, type checkers would accept any name
    from fastload.system.lazy_exports import public_names as _public_names

    __getattr__, __dir__, __all__ = _public_names(
        "fastload",
        {
            "batch.failures": ("FailedSample",),
            "cache.dataset": ("CachedDataset",),
            "device.device_prefetcher": ("DevicePrefetcher",),
            "epochs.node_partition": ("NodePartitionSampler",),
            "epochs.stats": ("LoaderStats",),
            "errors": ("FastloadError",),
            "images.decode": ("decode_image", "read_image"),
            "images.folder": ("ImageFolder",),
            "integrations.patch": ("patch_torch", "unpatch_torch"),
            "loader": ("DataLoader",),
            "memory.shared_list": ("SharedList",),
            "profiling.recorder": ("profile",),
            "readers.remember": ("remember",),
            "rng.sample_rng": ("sample_rng",),
            "rng.seeding": ("WorkerInfo", "get_worker_info", "seed_everything", "seed_worker"),
            "training.report": ("memory_report",),
            "workers.ray_pool": ("RayWorkers",),
        },
        modules=("cache", "errors", "profiling", "training", "transforms"),
    )
