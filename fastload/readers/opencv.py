"""OpenCV: `cv2.imread` by file, `cv2.imdecode` by the content of its buffer.

OpenCV opens paths itself, so a file is identified before and after it was read. What a build decodes depends
on its codecs and on environment variables; both are in the key. A build with GDAL reads files beside the
image, too: its `imread` is left alone.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from fastload.readers.decode_cache import UNCOMPRESSED, UNUSUAL, current
from fastload.readers.identity import identify_content, identify_path
from fastload.readers.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Callable

_THREADS = "OPENCV_FOR_THREADS_NUM"


def patches() -> list[Patch]:
    """What is replaced in cv2."""
    build = cv2.getBuildInformation()
    reads_one_file = re.search(r"(GDAL|GDCM):\s+(?!NO)\S", build) is None
    return [Patch(cv2, "imread", _imread)] * reads_one_file + [Patch(cv2, "imdecode", _imdecode)]


def _kind(name: str) -> str:
    # Workers have a number of threads of their own, which changes no pixel.
    names = sorted(name for name in os.environ if name.startswith("OPENCV_") and name != _THREADS)
    settings = [(name, os.environ[name]) for name in names]
    setup = hashlib.sha256(f"{cv2.getBuildInformation()}{settings}".encode(errors="surrogatepass"))
    return f"cv2.{name} {cv2.__version__} {setup.hexdigest()}"


def _settings() -> tuple[bool, bool]:
    """What chooses among implementations, whose floats differ in the last bit."""
    return cv2.useOptimized(), cv2.ipp.useIPP()


def _imread(original: Callable[..., Any]) -> Callable[..., Any]:
    kind = _kind("imread")

    def imread(*args: Any, **kwargs: Any) -> Any:
        cache = current()
        if cache is None:
            return original(*args, **kwargs)
        decode = partial(original, *args, **kwargs)
        try:
            path, flags = _path_and_flags(*args, **kwargs)
        except (TypeError, UnicodeError):  # `dst`, or something wrong
            cache.missed(UNUSUAL)
            return decode()
        key = type(path).__name__, flags, *_settings()  # some releases accept fewer types of paths
        return cache.array(kind, partial(identify_path, path), key, decode, where=path, source=path)

    return imread


def _path_and_flags(filename: Any, flags: Any = cv2.IMREAD_COLOR) -> tuple[Any, Any]:
    """The arguments of `imread`.

    Raises:
        TypeError: They are unusual.
        UnicodeError: The path is none for OpenCV, which crashes.
    """
    if not isinstance(filename, (str, PurePath)) or type(flags) is not int:
        raise TypeError  # `imread(path, True)` is a `dst` with the value 1
    os.fspath(filename).encode()
    return filename, flags


def _imdecode(original: Callable[..., Any]) -> Callable[..., Any]:
    kind = _kind("imdecode")

    def imdecode(*args: Any, **kwargs: Any) -> Any:
        cache = current()
        if cache is None:
            return original(*args, **kwargs)
        decode = partial(original, *args, **kwargs)
        try:
            buffer, flags = _buffer_and_flags(*args, **kwargs)
        except TypeError:
            cache.missed(UNUSUAL)
            return decode()
        if buffer.flat[:2].tobytes() == b"BM":  # hashing a BMP takes longer
            cache.missed(UNCOMPRESSED)
            return decode()
        identify = partial(identify_content, buffer)
        key = buffer.shape, flags, *_settings()
        return cache.array(kind, identify, key, decode, where="a buffer", source=None)

    return imdecode


def _buffer_and_flags(buf: Any, flags: Any) -> tuple[Any, Any]:
    if type(buf) is not np.ndarray or buf.dtype != np.uint8 or type(flags) is not int:
        raise TypeError
    return buf, flags
