"""What a loader's `cache=`, or the environment variable FASTLOAD_CACHE, asks for.

FASTLOAD_CACHE decides for the loaders of a script that name no cache ("ram", "ram:32G"), or turns all of them
off ("off").
"""

from __future__ import annotations

import os
from typing import Any

from fastload.system.budget import check_memory

CACHE_VARIABLE = "FASTLOAD_CACHE"
_OFF = "off"


def check_cache(cache: Any) -> str | None:
    """The limit that `cache=` of a loader names: "auto" or an amount of memory; None for no cache.

    Raises:
        ValueError: It is not None, "ram" or "ram:" and an amount of memory.
    """
    if cache is None:
        return None
    kind, colon, max_memory = cache.partition(":") if isinstance(cache, str) else ("", "", "")
    if kind != "ram" or bool(colon) != bool(max_memory):
        raise ValueError(
            f'cache should be "ram", "ram:32G" or None, but got {cache!r}: a loader remembers files in '
            'memory. For samples on disk, read fastload.CachedDataset(dataset, cache="lmdb:PATH") with it'
        )
    if max_memory:
        check_memory(max_memory, name="cache")
    return max_memory or "auto"


def requested_cache(cache: str | None) -> str | None:
    """What a loader does with this `cache=`: the argument, or what FASTLOAD_CACHE says.

    Raises:
        ValueError: FASTLOAD_CACHE is neither "off" nor a cache.
    """
    text = os.environ.get(CACHE_VARIABLE) or None
    if text == _OFF:
        return None
    try:
        check_cache(text)
    except ValueError as error:
        raise ValueError(f"{CACHE_VARIABLE}: {error}; or set it to {_OFF!r}") from None
    return cache or text
