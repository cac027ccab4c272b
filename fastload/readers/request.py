"""What a loader's `cache=`, or the environment variable FASTLOAD_CACHE, asks for.

FASTLOAD_CACHE decides for the loaders of a script that name no cache ("ram", "ram:32G", "lmdb:PATH"), or
turns all of them off ("off").
"""

from __future__ import annotations

import json
import os
from typing import Any

from fastload.system.budget import check_memory
from fastload.system.paths import cache_path

CACHE_VARIABLE = "FASTLOAD_CACHE"
DISK = "lmdb:"
_OFF = "off"


def check_cache(cache: Any) -> str | None:
    """Where `cache=` of a loader, or of CachedDataset, keeps what was decoded; None for no cache.

    Returns:
        "auto", an amount of memory, or "lmdb:" and an absolute path.

    Raises:
        ValueError: It is not None, "ram", "ram:" and an amount of memory, or "lmdb:" and a path.
    """
    if cache is None:
        return None
    kind, colon, place = cache.partition(":") if isinstance(cache, str) else ("", "", "")
    if kind == DISK[:-1] and place:
        return DISK + cache_path(place, "cache")
    if kind != "ram" or bool(colon) != bool(place):
        hint = ""
        if isinstance(cache, str) and (cache.endswith(".lmdb") or os.path.exists(cache_path(cache, "cache"))):
            literal = json.dumps(f"lmdb:{cache}", ensure_ascii=False)  # the same text in Python
            hint = f": pass cache={literal} for the cache at this path"
        raise ValueError(f'cache should be "ram", "ram:32G", "lmdb:PATH" or None, but got {cache!r}{hint}')
    if place:
        try:
            check_memory(place, name="cache")
        except ValueError:
            raise ValueError(
                f'cache={cache!r} should have an amount of memory after "ram:", such as cache="ram:32G"'
            ) from None
    return place or "auto"


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
