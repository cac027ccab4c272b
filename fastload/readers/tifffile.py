"""tifffile: `tifffile.imread` of a path, and `TiffFile.asarray`, where imageio and scikit-image end.

Compressed pixels are remembered. Where a `TiffFile` is opened, its pages are parsed each time, and the file
has the identity that it had then. OME-TIFF and Micro-Manager can refer to further files, so they are read
each time.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import tifffile
from tifffile import TiffFile

from fastload.readers.decode_cache import UNCOMPRESSED, current, do_not_keep, inactive
from fastload.readers.identity import Identity, Unknown, identify_path, identify_stream, is_fresh, is_shared
from fastload.readers.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Callable

_IDENTITY = "_fastload_identity"  # of a TiffFile, when it was opened
_PATTERN = frozenset("*?")  # what tifffile takes for a pattern


def patches() -> list[Patch]:
    """What is replaced in tifffile."""
    return [
        Patch(TiffFile, "__init__", _init),
        Patch(TiffFile, "asarray", _asarray),
        Patch(tifffile, "imread", _imread),
    ]


class _Thread(threading.local):
    """What an `imread` in this thread has read: None outside of one, else whether each may be remembered."""

    read: list[bool] | None = None


_thread = _Thread()


def _kind() -> str:
    codecs = getattr(tifffile.tifffile, "imagecodecs", None)
    return f"tifffile {tifffile.__version__} imagecodecs {getattr(codecs, '__version__', None)}"


def _imread(original: Callable[..., Any]) -> Callable[..., Any]:
    kind = f"imread {_kind()}"

    def imread(*args: Any, **kwargs: Any) -> Any:
        cache = current()
        if cache is None or len(args) != 1 or not isinstance(args[0], (str, PurePath)):
            return original(*args, **kwargs)
        (path,) = args
        if isinstance(path, str) and not _PATTERN.isdisjoint(path):  # its files are met one by one
            return original(path, **kwargs)
        identify, decode = partial(identify_path, path), partial(_read, original, path, kwargs)
        arguments = type(path).__name__, tuple(sorted(kwargs.items()))
        return cache.array(kind, identify, arguments, decode, where=path, source=path)

    return imread


def _read(original: Callable[..., Any], path: Any, kwargs: dict[str, Any]) -> Any:
    """Read a file; its pixels are kept if it is compressed and refers to no other one."""
    before, _thread.read = _thread.read, []
    try:
        with inactive():
            result = original(path, **kwargs)
        if _thread.read != [True]:
            do_not_keep()
        return result
    finally:
        _thread.read = before


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
        may_keep = (cache is not None or _thread.read is not None) and _is_compressed_in_one_file(self)
        if _thread.read is not None:
            _thread.read.append(may_keep)
        if cache is not None and not may_keep:
            cache.missed(UNCOMPRESSED)
        if cache is None or not may_keep:
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
    if stream._offset:
        return Unknown.NOT_A_FILE
    identity = identify_stream(stream._fh)
    is_known = isinstance(identity, Identity)
    return Unknown.HELD if is_known and is_shared(stream._fh.fileno()) else identity


def _identity(tiff: Any) -> Identity | Unknown:
    """The identity of the file, if it is still the one whose pages were parsed."""
    identity = _identify(tiff)
    if isinstance(identity, Unknown):
        return identity
    return identity if identity == vars(tiff).get(_IDENTITY) else Unknown.HELD
