"""tifffile: `TiffFile.asarray`, where `tifffile.imread`, imageio and scikit-image end.

Compressed pixels are remembered. Pages are parsed each time, and the file has the identity of that time.
OME-TIFF and Micro-Manager can refer to further files, so they are read each time.
"""

from __future__ import annotations

from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import tifffile
from tifffile import TiffFile

from fastload.readers.decode_cache import UNCOMPRESSED, current
from fastload.readers.identity import Identity, Unknown, identify_stream, is_fresh
from fastload.readers.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Callable

_IDENTITY = "_fastload_identity"  # of a TiffFile, when it was opened


def patches() -> list[Patch]:
    """What is replaced in tifffile."""
    return [Patch(TiffFile, "__init__", _init), Patch(TiffFile, "asarray", _asarray)]


def _kind() -> str:
    codecs = getattr(tifffile.tifffile, "imagecodecs", None)
    return f"tifffile {tifffile.__version__} imagecodecs {getattr(codecs, '__version__', None)}"


def _init(original: Callable[..., Any]) -> Callable[..., None]:
    def __init__(self: Any, file: Any, /, **kwargs: Any) -> None:  # noqa: N807
        is_whole = current() is not None and (isinstance(file, (str, PurePath)) or is_fresh(file))
        original(self, file, **kwargs)
        if is_whole and not any(value is not None for value in kwargs.values()):
            vars(self)[_IDENTITY] = _identify(self)

    return __init__


def _asarray(original: Callable[..., Any]) -> Callable[..., Any]:
    kind = _kind()

    def asarray(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = current()
        if cache is None:
            return original(self, *args, **kwargs)
        if not _is_compressed_in_one_file(self):
            cache.missed(UNCOMPRESSED)
            return original(self, *args, **kwargs)
        state = self.filehandle.extension, self.pages.useframes, self.pages.keyframe.index
        arguments = (*state, args, tuple(sorted(kwargs.items())))
        if kwargs.get("series") is not None or (kwargs.get("key") is None and not args):
            _ = self.series  # as the original leaves its pages
        decode = partial(original, self, *args, **kwargs)
        name = getattr(self.filehandle, "path", self.filename)
        stream = self.filehandle._fh
        return cache.array(kind, partial(_identity, self), arguments, decode, where=name, source=stream)

    return asarray


def _is_compressed_in_one_file(tiff: Any) -> bool:
    is_alone = bool(tiff.pages) and not (tiff.is_ome or tiff.is_micromanager)
    return is_alone and tiff.pages.first.compression != tifffile.COMPRESSION.NONE


def _identify(tiff: Any) -> Identity | Unknown:
    stream = tiff.filehandle
    return Unknown.NOT_A_FILE if stream._offset else identify_stream(stream._fh)


def _identity(tiff: Any) -> Identity | Unknown:
    """The identity of the file, if it is still the one whose pages were parsed."""
    identity = _identify(tiff)
    is_same = isinstance(identity, Unknown) or identity == vars(tiff).get(_IDENTITY)
    return identity if is_same else Unknown.HELD
