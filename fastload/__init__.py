"""A drop-in DataLoader for PyTorch over a shared cache of decoded images."""

from fastload.cache.dataset import CachedDataset, CacheInfo
from fastload.cache.disk.lmdb_cache import LMDBCache
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.device.backends import tune_backends
from fastload.device.normalize import Normalize
from fastload.device.oom import find_batch_size, retry_on_oom
from fastload.device.prefetch import CUDAPrefetcher
from fastload.device.report import DeviceMemory, MemoryReport, memory_report
from fastload.errors import (
    BatchLostError,
    CacheBusyError,
    CacheCorruptError,
    CacheError,
    CacheMismatchError,
    DeviceUnavailableError,
    ErrorBudgetError,
    FastloadError,
    ImageReadError,
    LoaderClosedError,
    RandomDatasetError,
    ResumeError,
    SegmentError,
    UnsupportedSampleError,
    WorkerDiedError,
    WorkerStartError,
)
from fastload.failed_sample import FailedSample
from fastload.images.decode import read_image
from fastload.images.folder import ImageFolder
from fastload.loader import DataLoader
from fastload.rng.sample_rng import sample_generator
from fastload.rng.seeding import seed_everything, seed_worker
from fastload.transport.worker_info import WorkerInfo, get_worker_info

__version__ = "0.1.0"

__all__ = [
    "BatchLostError",
    "CUDAPrefetcher",
    "CacheBusyError",
    "CacheCorruptError",
    "CacheError",
    "CacheInfo",
    "CacheMismatchError",
    "CachedDataset",
    "DataLoader",
    "DeviceMemory",
    "DeviceUnavailableError",
    "ErrorBudgetError",
    "FailedSample",
    "FastloadError",
    "ImageFolder",
    "ImageReadError",
    "LMDBCache",
    "LoaderClosedError",
    "MemoryReport",
    "Normalize",
    "RandomDatasetError",
    "ResumeError",
    "SegmentError",
    "SharedMemoryCache",
    "UnsupportedSampleError",
    "WorkerDiedError",
    "WorkerInfo",
    "WorkerStartError",
    "find_batch_size",
    "get_worker_info",
    "memory_report",
    "read_image",
    "retry_on_oom",
    "sample_generator",
    "seed_everything",
    "seed_worker",
    "tune_backends",
]
