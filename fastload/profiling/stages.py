"""What a stack says about the work of its thread: the stage, by the innermost frame that a table knows.

A frame's file says the stage. A function in C has no frame: the frame that calls it shows, and the source of
this call says what is called, so `cv2.imread(path)` in a dataset is decoding, and `file.read()` is reading.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from types import CodeType, FrameType

OPEN, READ, DECODE, RESIZE, TRANSFORM, COLLATE = "open", "read", "decode", "resize", "transform", "collate"
CACHE, LOCK, CODE, COPY, IDLE = "cache", "lock", "code", "copy", "idle"

# Parts of paths, the first that fits decides.
_FILES = {
    "/torch/utils/data/_utils/collate.py": COLLATE,
    "/fastload/batch/collate": COLLATE,
    "/fastload/augmentation/": TRANSFORM,
    "/fastload/images/": DECODE,
    "/fastload/readers/original.py": DECODE,
    "/fastload/readers/": CACHE,
    "/fastload/cache/": CACHE,
    "/fastload/profiling/": CACHE,
    "/PIL/ImageFile.py": DECODE,
    "Plugin.py": DECODE,
    "/torchvision/io/": DECODE,
    **dict.fromkeys(("/tifffile", "/imageio", "/pydicom/", "/nibabel/", "/rasterio/", "/h5py/"), DECODE),
    **dict.fromkeys(("/pillow_heif/", "/torchcodec/", "/decord/", "/av/", "/torchaudio/"), DECODE),
    **dict.fromkeys(("/PIL/", "/transforms", "/albumentations/", "/albucore/"), TRANSFORM),
    **dict.fromkeys(("/kornia/", "/imgaug/", "/skimage/"), TRANSFORM),
    **dict.fromkeys(("/pathlib", "/fsspec/", "/numpy/lib/", "/zipfile", "/tarfile.py", "/ssl.py"), READ),
    **dict.fromkeys(("/multiprocessing/synchronize.py", "/threading.py", "/filelock/"), LOCK),
}
_CALLS = {
    "open": OPEN,
    **dict.fromkeys(("read", "readinto", "read_bytes", "pread", "recv", "fromfile"), READ),
    **dict.fromkeys(
        ("imread", "imdecode", "read_image", "decode_image", "decode_jpeg", "decode_png"), DECODE
    ),
    **dict.fromkeys(("acquire", "flock"), LOCK),
    **dict.fromkeys(("to", "cuda"), COPY),
}
_RESIZES = frozenset(("Image.resize", "Image.reduce", "Image.thumbnail", "Original.resized"))
_NOT_OWN = (
    os.path.dirname(os.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    "<frozen",
    "<string>",  # what dataclasses and the like compile
    "<__array",
)


class Work(NamedTuple):
    """What a thread does.

    Attributes:
        stage: One of the constants above; `IDLE` if it makes no batch.
        name: The function, or what it calls.
        line: The innermost line of the user's code, "file:line in function"; empty if there is none.
    """

    stage: str
    name: str
    line: str


@functools.lru_cache(4096)
def is_own_code(path: str) -> bool:
    """Whether a source file is the user's: not Python's, an installed package's, or ours."""
    return bool(path) and not path.startswith(_NOT_OWN) and "-packages" not in path


@functools.lru_cache(4096)
def _stage_of_file(path: str) -> str | None:
    if is_own_code(path):
        return CODE
    path = path.replace(os.sep, "/")
    return next((stage for part, stage in _FILES.items() if part in path), None)


@functools.lru_cache(4096)
def _called(code: CodeType, offset: int) -> str:
    """The source of what is called at an instruction, such as "cv2.imread"; empty if unknown."""
    positions = next(itertools.islice(code.co_positions(), offset // 2, None), (None,) * 4)
    number, _, start, end = positions
    if number is None or start is None or end is None:
        return ""
    text = linecache.getline(code.co_filename, number).encode()[start:].decode(errors="replace")
    return text.partition("(")[0].strip()


def _name_of(code: CodeType) -> str:
    return code.co_qualname.replace("<locals>.", "")


def _known(frame: FrameType) -> tuple[str, str] | None:
    """The stage and the name of a frame that a table knows; those of the call first, then of the file."""
    stage, called = _stage_of_file(frame.f_code.co_filename), _called(frame.f_code, frame.f_lasti)
    word = called.rpartition(".")[2]
    by_call = _CALLS.get(word, LOCK if word.lower().endswith("lock") else None)
    if by_call in (OPEN, READ) or (by_call is not None and stage in (CODE, None)):
        return by_call, called
    if stage == CODE and called.startswith("cv2."):
        return TRANSFORM, called
    if stage == CACHE and called in ("original", "decode"):  # a reader calls the library's own function
        return DECODE, ""
    name = _name_of(frame.f_code)
    if name in _RESIZES:
        stage = RESIZE
    return None if stage is None else (stage, name)


def _is_pillows_open(code: CodeType) -> bool:
    return code.co_name == "open" and code.co_filename.replace(os.sep, "/").endswith("/PIL/Image.py")


def work_of(frame: FrameType | None) -> Work:
    """What a thread with this innermost frame does; a frame of a fetcher tells that it makes a batch."""
    stage = name = line = ""
    has_class = False
    while frame is not None:
        code = frame.f_code
        if code.co_name == "fetch" and code.co_filename.endswith("fetch.py"):
            return Work(CODE if stage in ("", COPY) else stage, name, line)
        is_method = "." in code.co_qualname and "<locals>" not in code.co_qualname
        if not stage:
            (stage, name), has_class = _known(frame) or ("", ""), is_method
        elif stage == TRANSFORM == _stage_of_file(code.co_filename) and is_method and not has_class:
            name, has_class = _name_of(code), True  # instead of a function that it calls
        if stage in (READ, DECODE, TRANSFORM) and name and _is_pillows_open(code):
            stage, name = OPEN, "Image.open"  # which reads the header
        if not line and is_own_code(code.co_filename):
            line = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {_name_of(code)}"
            name = name or _called(code, frame.f_lasti)
        frame = frame.f_back
    return Work(COPY, name, line) if stage == COPY else Work(IDLE, "", "")
