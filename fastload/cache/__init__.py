"""Datasets behind caches, which decode each sample once.

Read from the bottom up: `records` (values as bytes), `store` (what keeps records), `lmdb_file` and
`lmdb_store` (which keep them in one file), `decoded_files` (what readers store), `fingerprint`, `columns`,
`sample_cache` (the interface of caches), `samples` (in a store, by index), `ram`
(stores in shared memory), `inventory` (the files of caches), `finished` (a whole one); `sources` and
`random_check` (what samples are read from), `fill` (workers that read and store), `file_cache` (what is
cached by file instead of by sample), `build` (fills a file and finishes it); then `dataset` (the user's
object), `open_cache` (chooses and opens a cache) and `transform`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastload.cache.dataset import CachedDataset as CachedDataset
    from fastload.cache.dataset import CacheInfo as CacheInfo
    from fastload.cache.finished import LMDBCache as LMDBCache
    from fastload.cache.ram.shared import SharedMemoryCache as SharedMemoryCache
else:
    from fastload.system.lazy_exports import public_names as _public_names

    __getattr__, __dir__, __all__ = _public_names(
        "fastload.cache",
        {
            "dataset": ("CachedDataset", "CacheInfo"),
            "finished": ("LMDBCache",),
            "ram.shared": ("SharedMemoryCache",),
        },
    )
