"""NumPy: arrays of compressed archives (`numpy.load(path)[name]`).

An archive that is not compressed is read as fast as it could be remembered. An open archive keeps the
positions that it read when it was opened; they are in the key, with the checksum of the member.
"""

from __future__ import annotations

import zipfile
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.npyio import NpzFile

from fastload.readers.decode_cache import UNCOMPRESSED, current
from fastload.readers.identity import identify_stream
from fastload.readers.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Callable


def patches() -> list[Patch]:
    """What is replaced in NumPy."""
    return [Patch(NpzFile, "__getitem__", _getitem)]


def _getitem(original: Callable[..., Any]) -> Callable[..., Any]:
    kind = f"numpy.load {np.__version__}"

    def __getitem__(self: Any, key: Any) -> Any:  # noqa: N807
        cache = current()
        member = None if cache is None else _member(self, key)
        if cache is None or member is None:
            return original(self, key)
        if member.compress_type == zipfile.ZIP_STORED:
            cache.missed(UNCOMPRESSED)
            return original(self, key)
        arguments = (
            *(member.filename, member.header_offset, member.compress_type, member.compress_size),
            *(member.CRC, member.file_size, self.max_header_size),
        )
        stream = self.zip.fp
        return cache.array(
            kind,
            partial(identify_stream, stream),
            arguments,
            partial(original, self, key),
            where=(getattr(stream, "name", stream), key),
            source=stream,
        )

    return __getitem__


def _member(archive: Any, name: Any) -> zipfile.ZipInfo | None:
    """The member of an archive; None if it is missing or encrypted."""
    try:
        member: zipfile.ZipInfo = archive.zip.getinfo(archive._files[name])
    except (AttributeError, KeyError, TypeError):  # it is closed, or there is no such member
        return None
    return None if member.flag_bits & 1 else member
