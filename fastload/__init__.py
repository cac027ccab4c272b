"""A drop-in DataLoader for PyTorch over a shared cache of decoded images.

`import fastload` alone imports no other module: the first use of a public name imports its module (PEP 562).
Add a new name in two places, the imports that type checkers read and the table that Python reads; a test
compares the two.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fastload.cache.dataset import CachedDataset as CachedDataset, CacheInfo as CacheInfo
    from fastload.cache.lmdb.lmdb_cache import LMDBCache as LMDBCache
    from fastload.cache.ram.shared import SharedMemoryCache as SharedMemoryCache
    from fastload.epochs.node_partition import NodePartitionSampler as NodePartitionSampler
    from fastload.epochs.stats import LoaderStats as LoaderStats
    from fastload.training.backends import tune_backends as tune_backends
    from fastload.training.oom import (
        find_batch_size as find_batch_size,
        retry_on_oom as retry_on_oom,
    )
    from fastload.device.prefetch import DevicePrefetcher as DevicePrefetcher
    from fastload.training.report import (
        DeviceMemory as DeviceMemory,
        MemoryReport as MemoryReport,
        memory_report as memory_report,
    )
    from fastload.errors import (
        BatchLostError as BatchLostError,
        CacheBusyError as CacheBusyError,
        CacheCorruptError as CacheCorruptError,
        CacheError as CacheError,
        CacheMismatchError as CacheMismatchError,
        DeviceUnavailableError as DeviceUnavailableError,
        TooManyFailuresError as TooManyFailuresError,
        FastloadError as FastloadError,
        ImageReadError as ImageReadError,
        LoaderClosedError as LoaderClosedError,
        RandomDatasetError as RandomDatasetError,
        RanksDisagreeError as RanksDisagreeError,
        RemoteFolderError as RemoteFolderError,
        ResumeError as ResumeError,
        SegmentError as SegmentError,
        UnsupportedSampleError as UnsupportedSampleError,
        WorkerDiedError as WorkerDiedError,
        WorkerStartError as WorkerStartError,
    )
    from fastload.batch.failed_sample import FailedSample as FailedSample
    from fastload.images.decode import read_image as read_image
    from fastload.images.encoded import EncodedImage as EncodedImage
    from fastload.images.folder import ImageFolder as ImageFolder
    from fastload.integrations.patch import patch_torch as patch_torch, unpatch_torch as unpatch_torch
    from fastload.loader import DataLoader as DataLoader
    from fastload.memory.shared_list import SharedList as SharedList
    from fastload.profiling.report import (
        LoaderReport as LoaderReport,
        ProfileReport as ProfileReport,
    )
    from fastload.profiling.session import Profile as Profile, profile as profile
    from fastload.rng.sample_rng import sample_rng as sample_rng
    from fastload.rng.seeding import (
        seed_everything as seed_everything,
        seed_worker as seed_worker,
    )
    from fastload.rng.worker_info import (
        WorkerInfo as WorkerInfo,
        get_worker_info as get_worker_info,
    )

_NAMES = {
    "cache.dataset": ("CachedDataset", "CacheInfo"),
    "cache.lmdb.lmdb_cache": ("LMDBCache",),
    "cache.ram.shared": ("SharedMemoryCache",),
    "epochs.node_partition": ("NodePartitionSampler",),
    "epochs.stats": ("LoaderStats",),
    "training.backends": ("tune_backends",),
    "training.oom": ("find_batch_size", "retry_on_oom"),
    "device.prefetch": ("DevicePrefetcher",),
    "training.report": ("DeviceMemory", "MemoryReport", "memory_report"),
    "errors": (
        "BatchLostError",
        "CacheBusyError",
        "CacheCorruptError",
        "CacheError",
        "CacheMismatchError",
        "DeviceUnavailableError",
        "TooManyFailuresError",
        "FastloadError",
        "ImageReadError",
        "LoaderClosedError",
        "RandomDatasetError",
        "RanksDisagreeError",
        "RemoteFolderError",
        "ResumeError",
        "SegmentError",
        "UnsupportedSampleError",
        "WorkerDiedError",
        "WorkerStartError",
    ),
    "batch.failed_sample": ("FailedSample",),
    "images.decode": ("read_image",),
    "images.encoded": ("EncodedImage",),
    "images.folder": ("ImageFolder",),
    "integrations.patch": ("patch_torch", "unpatch_torch"),
    "loader": ("DataLoader",),
    "memory.shared_list": ("SharedList",),
    "profiling.report": ("LoaderReport", "ProfileReport"),
    "profiling.session": ("Profile", "profile"),
    "rng.sample_rng": ("sample_rng",),
    "rng.seeding": ("seed_everything", "seed_worker"),
    "rng.worker_info": ("WorkerInfo", "get_worker_info"),
}

if not TYPE_CHECKING:  # with __getattr__ in sight, type checkers would accept any name
    _MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
    _SUBMODULES = {"transforms", *(module.partition(".")[0] for module in _NAMES)}

    __all__ = sorted(_MODULE_OF)

    def __getattr__(name: str) -> object:
        """Import a public name, or a subpackage, at its first use."""
        if name in _SUBMODULES:
            return _import_module(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(_import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # later uses do not come here
        return value

    def __dir__() -> list[str]:
        """The public names, including those not yet imported."""
        return list(__all__)
