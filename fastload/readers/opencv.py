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
from typing import Any

import cv2
import numpy as np

from fastload.readers.decode_cache import remembering
from fastload.readers.identity import identify_content, identify_path
from fastload.readers.patches import Patch
from fastload.readers.reasons import UNCOMPRESSED

_THREADS = "OPENCV_FOR_THREADS_NUM"


def patches() -> list[Patch]:
    """What is replaced in cv2."""
    build = cv2.getBuildInformation()
    reads_one_file = re.search(r"(GDAL|GDCM):\s+(?!NO)\S", build) is None
    imread = Patch(cv2, "imread", remembering(_kind("imread"), _imread))
    return [imread] * reads_one_file + [Patch(cv2, "imdecode", remembering(_kind("imdecode"), _imdecode))]


def _kind(name: str) -> str:
    # Workers have a number of threads of their own, which changes no pixel.
    names = sorted(name for name in os.environ if name.startswith("OPENCV_") and name != _THREADS)
    settings = [(name, os.environ[name]) for name in names]
    setup = hashlib.sha256(f"{cv2.getBuildInformation()}{settings}".encode(errors="surrogatepass"))
    return f"cv2.{name} {cv2.__version__} {setup.hexdigest()}"


def _settings() -> tuple[bool, bool]:
    """What chooses among implementations, whose floats differ in the last bit."""
    return cv2.useOptimized(), cv2.ipp.useIPP()


def _imread(filename: Any, flags: Any = cv2.IMREAD_COLOR) -> Any:
    if not isinstance(filename, (str, PurePath)) or type(flags) is not int:
        raise TypeError  # `imread(path, True)` is a `dst` with the value 1
    os.fspath(filename).encode()  # raises UnicodeError where OpenCV crashes
    # Some releases accept fewer types of paths.
    arguments = type(filename).__name__, flags, *_settings()
    return partial(identify_path, filename), arguments, filename


def _imdecode(buf: Any, flags: Any) -> Any:
    if type(buf) is not np.ndarray or buf.dtype != np.uint8 or type(flags) is not int:
        raise TypeError
    if buf.flat[:2].tobytes() == b"BM":  # hashing a BMP takes longer
        return UNCOMPRESSED
    return partial(identify_content, buf), (buf.shape, flags, *_settings()), None
