"""A CachedDataset in plain values, for pickles that outlive this process.

Such a pickle names `fastload.cache.load_dataset` and nothing else of the datasets and caches here, so another
release can load it, wherever its classes are then. The values hold no samples: they say where a cache in RAM
is while this process lives, how an empty one is made, and where a file is.
"""

from __future__ import annotations

from typing import Any

from fastload.cache.file_cache import RememberedFiles
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.lmdb.lmdb_dataset import LMDBDataset
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.cache.tiered_cache import NoCache, TieredCache

VERSION = 1
_KINDS: dict[str, Any] = {
    "ram": SharedMemoryCache,
    "lmdb": LMDBCache,
    "file": LMDBDataset,
    "files": RememberedFiles,
}


def plain_values(cache: Any) -> dict[str, Any]:
    """A cache, or the dataset of a finished one, as plain values; a cache of the user's class as it is."""
    if type(cache) is TieredCache:
        return {"kind": "tiers", "ram": plain_values(cache.ram), "backing": plain_values(cache.backing)}
    if type(cache) is NoCache:
        return {"kind": "none", **vars(cache)}
    kind = next((kind for kind, cls in _KINDS.items() if type(cache) is cls), None)
    return {"kind": "object", "cache": cache} if kind is None else {"kind": kind, **cache.plain_values()}


def cache_of(values: dict[str, Any]) -> Any:
    """What `plain_values` described: the cache, or an empty one like it if this process cannot reach it."""
    values = dict(values)
    kind = values.pop("kind")
    if kind == "tiers":
        return TieredCache(cache_of(values["ram"]), cache_of(values["backing"]))
    if kind == "none":
        return NoCache(**values)
    return values["cache"] if kind == "object" else _KINDS[kind].of_plain_values(values)
