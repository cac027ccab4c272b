"""NumPy: arrays of compressed archives (`numpy.load(path)[name]`).

An archive that is not compressed is read as fast as it could be remembered. An open archive keeps the
positions that it read when it was opened; they are in the key, with the checksum of the member.
"""

from __future__ import annotations

import zipfile
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile

from fastload.readers.decode_cache import remembering
from fastload.readers.identity import identify_stream
from fastload.readers.patches import Patch
from fastload.readers.reasons import UNCOMPRESSED


def patches() -> list[Patch]:
    """What is replaced in NumPy."""
    return [Patch(NpzFile, "__getitem__", remembering(f"numpy.load {np.__version__}", _getitem))]


def _getitem(archive: Any, name: Any) -> Any:
    try:  # as NumPy looks for it, whose own table is a list or a dict
        names = archive.zip.NameToInfo
        member: zipfile.ZipInfo = names[name] if name in names else names[name + ".npy"]
    except (AttributeError, KeyError, TypeError):  # it is closed, or there is no such member
        return None
    if member.flag_bits & 1:  # it is encrypted
        return None
    if member.compress_type == zipfile.ZIP_STORED:
        return UNCOMPRESSED
    arguments = (
        *(member.filename, member.header_offset, member.compress_type, member.compress_size),
        *(member.CRC, member.file_size, archive.max_header_size),
    )
    return partial(identify_stream, archive.zip.fp), arguments, archive.zip.fp
