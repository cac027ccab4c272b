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

from fastload.readers.decode_cache import current, remembering
from fastload.readers.identity import Identity, identify_stream, is_fresh
from fastload.readers.patches import Patch
from fastload.readers.reasons import NOT_A_FILE, UNCOMPRESSED

if TYPE_CHECKING:
    from collections.abc import Callable

_IDENTITY = "_fastload_identity"  # of a TiffFile, when it was opened


def patches() -> list[Patch]:
    """What is replaced in tifffile."""
    codecs = getattr(tifffile.tifffile, "imagecodecs", None)
    kind = f"tifffile {tifffile.__version__} imagecodecs {getattr(codecs, '__version__', None)}"
    return [Patch(TiffFile, "__init__", _init), Patch(TiffFile, "asarray", remembering(kind, _asarray))]


def _init(original: Callable[..., Any]) -> Callable[..., None]:
    def __init__(self: Any, file: Any, /, **kwargs: Any) -> None:  # noqa: N807
        is_whole = current() is not None and (isinstance(file, (str, PurePath)) or is_fresh(file))
        original(self, file, **kwargs)
        if is_whole and not any(value is not None for value in kwargs.values()):
            vars(self)[_IDENTITY] = _identify(self)

    return __init__


def _asarray(tiff: Any, *args: Any, **kwargs: Any) -> Any:
    is_alone = bool(tiff.pages) and not (tiff.is_ome or tiff.is_micromanager)
    if not is_alone or tiff.pages.first.compression == tifffile.COMPRESSION.NONE:
        return UNCOMPRESSED
    state = tiff.filehandle.extension, tiff.pages.useframes, tiff.pages.keyframe.index
    if kwargs.get("series") is not None or (kwargs.get("key") is None and not args):
        _ = tiff.series  # as the original leaves its pages
    return partial(_identity, tiff), (*state, args, tuple(sorted(kwargs.items()))), tiff.filehandle._fh


def _identify(tiff: Any) -> Identity | str:
    stream = tiff.filehandle
    return NOT_A_FILE if stream._offset else identify_stream(stream._fh)


def _identity(tiff: Any) -> Identity | str:
    """The identity of the file, if it is still the one whose pages were parsed."""
    identity = _identify(tiff)
    is_same = isinstance(identity, str) or identity == vars(tiff).get(_IDENTITY)
    return identity if is_same else NOT_A_FILE
