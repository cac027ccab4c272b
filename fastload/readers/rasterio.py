"""rasterio: compressed pixels of one local file (`dataset.read(1, window=window)`).

A dataset is identified by its path, and the file must be the same as when it was opened, because GDAL keeps
what it knows of it. Rasters with further files (VRT, masks and overviews beside a TIFF), archives and remote
rasters, and datasets that were opened while no cache was active, are read each time.
"""

from __future__ import annotations

import os
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import rasterio
from rasterio.env import getenv, hasenv
from rasterio.io import DatasetReader
from rasterio.windows import Window

from fastload.readers.code_digest import environment
from fastload.readers.decode_cache import current
from fastload.readers.identity import Identity, Unknown, identify_path
from fastload.readers.patch import Patch
from fastload.readers.selection import plain_selection

if TYPE_CHECKING:
    from collections.abc import Callable

_IDENTITY = "_fastload_identity"  # of a dataset's file, when it was opened
_DRIVERS = frozenset({"GTiff", "JP2OpenJPEG", "JPEG", "PNG"})
_SETTINGS = ("GDAL_", "GTIFF_", "CPL_", "JPEG", "OPJ")  # environment variables that GDAL reads


def patches() -> list[Patch]:
    """What is replaced in rasterio: methods that its class inherits from compiled ones."""
    return [Patch(DatasetReader, "__init__", _init), Patch(DatasetReader, "read", _read)]


def _init(original: Callable[..., Any]) -> Callable[..., None]:
    def __init__(self: Any, path: Any = None, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        # An open driver or option can change the pixels, and a shared dataset was opened by somebody else.
        is_plain = current() is not None and all(
            value is None or value is False for value in (*args, *kwargs.values())
        )
        before = identify_path(getattr(path, "name", path)) if is_plain else Unknown.NOT_A_FILE
        original(self, path, *args, **kwargs)
        if isinstance(before, Identity) and self.driver in _DRIVERS and self.files == [self.name]:
            is_compressed = self.driver != "GTiff" or self.compression is not None
            if is_compressed and identify_path(self.name) == before:
                vars(self)[_IDENTITY] = before

    return __init__


def _read(original: Callable[..., Any]) -> Callable[..., Any]:
    kind = f"rasterio {rasterio.__version__} GDAL {rasterio.__gdal_version__} {environment()!r}"

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = current()
        if cache is None or _IDENTITY not in vars(self):
            return original(self, *args, **kwargs)
        options = getenv() if hasenv() else {}
        settings = [one for one in os.environ.items() if one[0].startswith(_SETTINGS)]
        arguments = [*map(_plain, args)], [(name, _plain(value)) for name, value in sorted(kwargs.items())]
        return cache.array(
            kind,
            partial(_identity, self),
            (*arguments, sorted(options.items()), sorted(settings)),
            partial(original, self, *args, **kwargs),
            where=self.name,
            source=self.name,
        )

    return read


def _identity(dataset: Any) -> Identity | Unknown:
    """The identity of the file, if it is the same as when the dataset was opened."""
    identity = Unknown.NOT_A_FILE if dataset.closed else identify_path(dataset.name)
    return identity if identity == vars(dataset)[_IDENTITY] else Unknown.NOT_A_FILE


def _plain(argument: Any) -> Any:
    """An argument as plain values; object() stands for one that is unusual, and is no part of a key."""
    if isinstance(argument, Window):
        return ("window", *map(float, argument.flatten()))
    if isinstance(argument, IntEnum):
        return int(argument)
    if isinstance(argument, (np.dtype, type)):
        return np.dtype(argument).str
    return argument if isinstance(argument, (bool, float)) else plain_selection(argument)
