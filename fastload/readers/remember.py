"""remember: any pure function of a file, or of bytes, registered by its user.

The function decodes each file only once, while a dataset is read by a loader with a cache; everywhere else it
is called as usual. Rules:

1. The key has the name and the version of the function, the file or the bytes, and all arguments. The text
   of the path is an argument, too: the result can depend on it.
2. What the function reads beside the file is not known here: the user promises that there is nothing.
3. Inside the function nothing else is remembered, so pixels are not stored twice.
"""

from __future__ import annotations

import functools
import inspect
import os
from functools import partial
from pathlib import PosixPath, PurePath, WindowsPath
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import numpy as np

from fastload.readers.decode_cache import remembering
from fastload.readers.identity import identify_content, identify_path

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

_PATHS = (str, bytes, PurePath, PosixPath, WindowsPath, np.str_)
_BUFFERS = (bytes, bytearray, memoryview, np.ndarray)


def remember(
    version: str, *, of: Literal["path", "bytes"] = "path"
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let ``@fastload.remember(version="1")`` remember what a function makes of a file.

    Works where a loader with ``cache="ram"`` or ``"lmdb:PATH"`` reads a dataset; anywhere else the function
    is called as usual. It must depend on nothing but the content of the file and its arguments, and draw no
    random numbers. Its results can be NumPy arrays, tensors on the CPU, numbers, strings, and tuples,
    lists and dicts of these, with at least one array or tensor. Each caller gets memory of its own. Other
    results, and arguments other than numbers, strings and containers of these, are computed each time;
    ``loader.explain()`` counts them.

    Args:
        version: Stands for the code of the function, of which the key has only its file and name. Change it
            whenever the result for a file changes: after an edit of the function, of what it calls, or of a
            constant that it uses, and after an upgrade of a library that decodes otherwise. A share of
            the hits is computed again and compared, which finds a version that was forgotten.
        of: ``"path"``: the first argument is a `str`, `bytes` or `pathlib.Path` that names a file.
            ``"bytes"``: it is the content, as bytes, a bytearray, a memoryview or an array. It is hashed on
            every access (0.5 to 2 GB/s), which must be cheaper than the function.

    Raises:
        TypeError: `version` is not a str, or what is decorated is no function with a name, or a method of an
            object.
        ValueError: `of` is something else.
    """
    if not isinstance(version, str):
        raise TypeError(f'version should be a str, as in fastload.remember(version="1"), but got {version!r}')
    if of not in ("path", "bytes"):
        raise ValueError(f'of should be "path" or "bytes", but got {of!r}')
    identify, see = (identify_path, _seen_of_path) if of == "path" else (identify_content, _seen_of_bytes)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        def ask(source: Any, /, *args: Any, **kwargs: Any) -> Any:
            kind = type(source)
            seen = kind.__module__, kind.__qualname__, *see(source)
            arguments = seen, args, sorted(kwargs.items())
            return partial(identify, source), arguments, source if of == "path" else None

        name = f"remember {of} {_name_of(function)} {version!r}"
        return functools.wraps(function)(remembering(name, ask)(function))

    return decorate


def _name_of(function: Any) -> str:
    """What stands for a function in keys, in every process: its file, because modules share their names.

    Raises:
        TypeError: It has no name of its own, or depends on an object.
    """
    name = getattr(function, "__qualname__", None)
    if not callable(function) or name is None or "<lambda>" in name or isinstance(function, MethodType):
        raise TypeError(
            f"function should be one that has a name (by `def`), and no method of an object, but got "
            f"{function!r}"
        )
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{function.__module__ if code is None else os.path.abspath(code.co_filename)}:{name}"


def _seen_of_path(source: Any) -> Any:
    """What a function can see of a path, beside the content."""
    if type(source) not in _PATHS:
        raise TypeError
    text = os.fspath(source)
    folder = "" if os.path.isabs(text) else os.getcwd()
    return bytes(text) if isinstance(text, bytes) else str(text), folder


def _seen_of_bytes(source: Any) -> Any:
    """The same of bytes. Raises ValueError or BufferError for what was released, or is of dates."""
    if type(source) not in _BUFFERS:
        raise TypeError
    view = memoryview(source)
    return view.format, view.shape, view.strides, view.readonly
