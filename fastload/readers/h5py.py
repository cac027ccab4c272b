"""h5py: selections of compressed datasets (`file["name"][3, 2:8]`).

A file is identified by the descriptor that HDF5 reads, and must be the same as when it was opened, because
HDF5 keeps what it knows of it. Datasets with parts in other files (virtual and external ones) are read each
time, as are files that are open for writing, or were opened while no cache was active.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import h5py
from h5py import Dataset, File

from fastload.readers import nest
from fastload.readers.code_digest import environment
from fastload.readers.decode_cache import current
from fastload.readers.identity import Identity, Unknown, identify_descriptor
from fastload.readers.patch import Patch
from fastload.readers.selection import plain_selection

if TYPE_CHECKING:
    from collections.abc import Callable

_opened: dict[int, Identity | Unknown] = {}  # by descriptor, when it was opened


def patches() -> list[Patch]:
    """What is replaced in h5py."""
    return [Patch(File, "__init__", _init), Patch(Dataset, "__getitem__", _getitem)]


def _init(original: Callable[..., Any]) -> Callable[..., None]:
    def __init__(self: Any, name: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, name, *args, **kwargs)
        if current() is None or not isinstance(name, (str, bytes, os.PathLike)):  # `dataset.file`
            return
        if self.mode == "r" and self.driver == "sec2" and not self.swmr_mode:
            descriptor = self.id.get_vfd_handle()
            if h5py.h5f.get_obj_count(self.id, h5py.h5f.OBJ_FILE) == 1:  # HDF5 opens a file once
                _opened[descriptor] = identify_descriptor(descriptor)

    return __init__


def _getitem(original: Callable[..., Any]) -> Callable[..., Any]:
    kind = f"h5py {h5py.__version__} HDF5 {h5py.version.hdf5_version} {environment()!r}"

    def __getitem__(self: Any, args: Any, *more: Any, **kwargs: Any) -> Any:  # noqa: N807
        cache = current()
        if cache is None or more or kwargs or not _is_compressed(self):
            return original(self, args, *more, **kwargs)
        return cache.array(
            kind,
            partial(_identify, self),
            (self.name, plain_selection(args)),
            partial(original, self, args),
            where=(h5py.h5f.get_name(self.id), self.name),
            source=h5py.h5f.get_name(self.id),
            pack=nest.pack,
            unpack=nest.unpack,
        )

    return __getitem__


def _is_compressed(dataset: Any) -> bool:
    try:
        return bool(dataset.id.get_create_plist().get_nfilters())
    except (ValueError, RuntimeError):  # it is closed
        return False


def _identify(dataset: Any) -> Identity | Unknown:
    """The identity of the file, if it is the same as when it was opened."""
    file = h5py.h5i.get_file_id(dataset.id)
    if dataset.name is None or file.get_access_plist().get_driver() != h5py.h5fd.SEC2:
        return Unknown.NOT_A_FILE
    descriptor = file.get_vfd_handle()
    identity = identify_descriptor(descriptor)
    if isinstance(identity, Unknown) or identity == _opened.get(descriptor):
        return identity
    return Unknown.NOT_A_FILE
