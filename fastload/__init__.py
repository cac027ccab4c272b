"""A drop-in DataLoader for PyTorch over a shared cache of decoded images."""

from fastload.cache.dataset import CachedDataset, CacheInfo
from fastload.cache.lmdb import LMDBCache
from fastload.cache.shared import SharedMemoryCache
from fastload.device.prefetch import CUDAPrefetcher
from fastload.errors import (
    CacheBusyError,
    CacheCorruptError,
    CacheError,
    CacheMismatchError,
    DeviceUnavailableError,
    FastloadError,
    ImageReadError,
    LoaderClosedError,
    RandomDatasetError,
    SegmentError,
    UnsupportedSampleError,
    WorkerDiedError,
    WorkerStartError,
)
from fastload.images.decode import read_image
from fastload.images.folder import ImageFolder
from fastload.loader import DataLoader
from fastload.transport.seeding import seed_worker

__version__ = "0.1.0"

__all__ = [
    "CUDAPrefetcher",
    "CacheBusyError",
    "CacheCorruptError",
    "CacheError",
    "CacheInfo",
    "CacheMismatchError",
    "CachedDataset",
    "DataLoader",
    "DeviceUnavailableError",
    "FastloadError",
    "ImageFolder",
    "ImageReadError",
    "LMDBCache",
    "LoaderClosedError",
    "RandomDatasetError",
    "SegmentError",
    "SharedMemoryCache",
    "UnsupportedSampleError",
    "WorkerDiedError",
    "WorkerStartError",
    "read_image",
    "seed_worker",
]
