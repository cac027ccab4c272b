"""Opens shared caches by fingerprint: attaches to the cache that a live process holds, or makes it.

Rules:

1. There is one cache per name: a process that finds none looks again under the creation lock before making
   one.
2. A found cache is checked before use: it must belong to this user, be sealed, have the right magic and
   version, and be made of the same parts. A cache with the same key but different parts is an error.
3. An unreachable cache is not an error: this process makes its own cache, and one log line says so.
"""

from __future__ import annotations

import logging
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.cache import ranks
from fastload.cache.format.fingerprint import Fingerprint
from fastload.cache.ram import registry
from fastload.cache.ram.layout import Origin
from fastload.cache.ram.private import PrivateCache
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.errors import CacheMismatchError, SharedMemoryError
from fastload.system.budget import parse_memory
from fastload.system.logs import log, say_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastload.cache.format.sample_cache import SampleCache
    from fastload.cache.ram.layout import Layout
    from fastload.cache.ram.registry import Entry


@dataclass(frozen=True)
class LiveCache:
    """A shared cache of this user, and the processes that hold it.

    Attributes:
        name: The name under which it is registered.
        key: The user's key for it, if there is one.
        label: The class and the folder of the dataset.
        parts: The parts of its fingerprint.
        owners: The processes that opened it by its name; their workers hold it too.
        num_samples: Number of samples of the dataset.
        num_cached: Samples stored now.
        nbytes: Memory in use now, by all processes together.
        max_bytes: Its maximum memory.
        created_s: When it was made, in seconds since 1970.
    """

    name: str
    key: str | None
    label: str
    parts: dict[str, str]
    owners: list[int]
    num_samples: int
    num_cached: int
    nbytes: int
    max_bytes: int
    created_s: float


def find(fingerprint: Fingerprint, num_samples: int) -> SharedMemoryCache | None:
    """The cache of this name that a live process holds, or None.

    Raises:
        CacheMismatchError: It was made from other samples.
    """
    name = fingerprint.name
    for entry in registry.entries(name):
        try:
            cache = _attach(entry)
        except (SharedMemoryError, CacheMismatchError) as error:
            text = f"cache: process {entry.pid} holds {name}, but it cannot be shared: {error}"
            say_once(text, logging.WARNING if ranks.of_host() > 1 else logging.INFO)
            continue
        try:
            _check(cache, fingerprint, num_samples, entry.pid)
        except CacheMismatchError:
            cache.close()
            raise
        age_s = max(0.0, time.time() - cache.origin.created_s)
        cache.reason = (
            f"process {cache.origin.pid} made it {age_s:,.0f} s ago from the same parts, found through "
            f"process {entry.pid}"
        )
        _register(cache, name)
        return cache
    return None


def create(
    fingerprint: Fingerprint, num_samples: int, examples: Sequence[Any], max_bytes: int
) -> SharedMemoryCache | None:
    """The cache of this name: a new one, or one that another process has just made; None without a registry.

    Raises:
        CacheMismatchError: Another process has made one from other samples.
        SharedMemoryError: The memory could not be allocated.
    """
    with registry.creating() as is_alone:
        if not is_alone:
            return None
        if (cache := find(fingerprint, num_samples)) is not None:
            return cache
        cache = SharedMemoryCache(num_samples, examples, max_memory=max_bytes, fingerprint=fingerprint)
        _register(cache, fingerprint.name)
        if cache.unregister is None:
            cache.close()
            return None
        cache.reason = (
            "new, as no live process held one with these parts; every process that opens it shares it"
        )
        return cache


def of_this_machine(layout: Layout) -> SampleCache:
    """The cache of this machine for a cache that another one made; all its workers share it.

    Args:
        layout: Of that cache.
    """
    fingerprint = layout.origin.fingerprint or Fingerprint({}, f"for the cache {layout.origin.cache_id}")
    max_bytes = max(1, min(layout.max_bytes, parse_memory("auto")))
    try:
        with registry.creating() as is_alone:
            if is_alone and (cache := find(fingerprint, layout.num_samples)) is not None:
                return cache
            segment, _ = layout.on_machine(max_bytes, Origin.new(fingerprint)).create_segment()
            cache = SharedMemoryCache.attach(segment)
            cache.reason = "new: the cache of this machine"
            _register(cache, fingerprint.name)
            return cache
    except SharedMemoryError as error:
        log.warning("cache: each worker of this machine keeps its own: %s", str(error))
        return PrivateCache(layout.num_samples, max_bytes, str(error))


def live_caches() -> list[LiveCache]:
    """Every shared cache of this user that can be reached from this process, by age."""
    found: dict[tuple[str, str], LiveCache] = {}
    for entry in registry.entries():
        try:
            cache = _attach(entry)
        except (SharedMemoryError, CacheMismatchError):
            continue
        origin = cache.origin
        live = found.setdefault(
            (entry.name, origin.cache_id),
            LiveCache(
                name=entry.name,
                key=origin.fingerprint.key if origin.fingerprint else None,
                label=origin.fingerprint.label if origin.fingerprint else "",
                parts=dict(origin.fingerprint.parts) if origin.fingerprint else {},
                owners=[],
                num_samples=cache.num_samples,
                num_cached=cache.num_cached,
                nbytes=cache.nbytes,
                max_bytes=cache.max_bytes,
                created_s=origin.created_s,
            ),
        )
        live.owners.append(entry.pid)
        cache.close()
    return sorted(found.values(), key=lambda live: live.created_s)


def _attach(entry: Entry) -> SharedMemoryCache:
    """The cache behind an entry.

    Raises:
        SharedMemoryError: It cannot be reached.
        CacheMismatchError: Its descriptor is not a valid cache of this name.
    """
    cache = SharedMemoryCache.attach(entry.attach())
    if cache.origin.fingerprint is None or cache.origin.fingerprint.name != entry.name:
        cache.close()
        raise CacheMismatchError("the descriptor now refers to a different cache")
    return cache


def _check(cache: SharedMemoryCache, fingerprint: Fingerprint, num_samples: int, pid: int) -> None:
    made_of = cache.origin.fingerprint
    differences = [] if made_of is None else fingerprint.differences(made_of)
    if not differences and cache.num_samples != num_samples:
        differences = [f"the number of samples is {num_samples} here and {cache.num_samples} there"]
    if differences:
        raise CacheMismatchError(
            f"the shared cache with key {fingerprint.key!r}, held by process {pid}, was made from other "
            f"samples: {'; '.join(differences)} (here: the dataset, there: the cache)"
        )


def _register(cache: SharedMemoryCache, name: str) -> None:
    entry = registry.register(name, cache._fd)
    if entry is not None:
        cache.unregister = weakref.finalize(cache, registry.unregister, entry)
