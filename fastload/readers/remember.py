"""remember: any pure function of a file, or of bytes, registered by its user.

The function is the user's own, or of a library that no reader meets. It decodes a file only once, while a
dataset is read by a loader with a cache; everywhere else it is called as ever. Rules:

1. The key has the function (see `code_digest`), the file or the bytes, and all arguments. The text of the
   path is an argument, too: the result can depend on it.
2. What the function reads beside the file is not known here: the user promises that there is nothing.
   `check_remembered` looks for it.
3. Inside the function nothing else is remembered, so pixels are not stored twice.
"""

from __future__ import annotations

import functools
import os
import pkgutil
from functools import partial
from pathlib import PosixPath, PurePath, WindowsPath
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, overload

import numpy as np

from fastload.readers import nest
from fastload.readers.code_digest import CodeDigest, environment
from fastload.readers.decode_cache import UNUSUAL, current, inactive
from fastload.readers.identity import identify_content, identify_path
from fastload.system.logs import say_once

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")
Source = Literal["path", "bytes"]

_PATHS = (str, bytes, PurePath, PosixPath, WindowsPath, np.str_)
_BUFFERS = (bytes, bytearray, memoryview, np.ndarray)


@overload
def remember(
    function: Callable[P, R], *, of: Source = ..., version: str | None = ...
) -> Remembered[P, R]: ...


@overload
def remember(
    *, of: Source = ..., version: str | None = ...
) -> Callable[[Callable[P, R]], Remembered[P, R]]: ...


def remember(function: Any = None, *, of: Source = "path", version: str | None = None) -> Any:
    """The same function, whose results for equal files are remembered: `read = fastload.remember(read)`.

    Works where a loader with ``cache="ram"``, or a `CachedDataset` by file, reads a dataset; anywhere else
    the function is called as ever. It must depend on nothing but the content of the file and its arguments,
    and draw no random numbers; `check_remembered` looks for mistakes. Its results can be NumPy arrays,
    tensors on the CPU, numbers, texts, and tuples, lists and dicts of these. Each caller gets memory of its
    own. Other results, and arguments other than numbers, texts and containers of these, are computed each
    time.

    The code of the function is part of the key, with all of your code and all constants that it names, so an
    edit starts anew. For objects with a state, such as a decoder that is made once, this is not possible:
    give the function a ``version``, and change it with what these objects do.

    Args:
        function: A function of a path, or of bytes, which are its first argument. Left out: the result is a
            decorator.
        of: ``"path"``: the first argument is a `str`, `bytes` or `pathlib.Path` that names a file.
            ``"bytes"``: it is the content, as bytes, a bytearray, a memoryview or an array. It is hashed on
            every access (0.5 to 2 GB/s), which must be cheaper than the function.
        version: Stands for the objects that the function uses.

    Raises:
        TypeError: `function` cannot be called, or `version` is not a str.
        ValueError: `of` is something else.
    """
    if of not in ("path", "bytes"):
        raise ValueError(f'of should be "path" or "bytes", but got {of!r}')
    if version is not None and not isinstance(version, str):
        raise TypeError(f"version should be a str or None, but got {version!r}")
    if function is None:
        return partial(remember, of=of, version=version)
    if not callable(function):
        raise TypeError(f"function should be a function of a path or of bytes, but got {function!r}")
    environment()  # before another one is installed
    return Remembered(function, of, version)


class Remembered(Generic[P, R]):
    """What `remember` returns; called, pickled and bound as the function is.

    Args:
        function: As in `remember`.
        of: As in `remember`.
        version: As in `remember`.
    """

    _is_wrapper = True  # see `code_digest`

    def __init__(self, function: Callable[P, R], of: Source, version: str | None) -> None:
        self.__qualname__ = type(function).__qualname__  # of a partial, which has no name
        functools.update_wrapper(self, function)
        self.of: Source = of
        self._function, self._version = function, version
        self._code = CodeDigest(function, with_objects=version is not None)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """What the function returns."""
        cache = current()
        if cache is None:
            return self._function(*args, **kwargs)
        source = args[0] if args else None
        facts, key = facts_of(source, self.of), None
        try:
            key = self.key()
        except TypeError as error:
            say_once(f"cache: {error}")
        if key is None or facts is None:
            cache.missed(UNUSUAL)
            return self._compute(*args, **kwargs)
        result: R = cache.array(
            key,
            partial(identify_path if self.of == "path" else identify_content, source),
            (facts, args[1:], sorted(kwargs.items())),
            partial(self._compute, *args, **kwargs),
            where=source if self.of == "path" else f"bytes for {self!r}",
            source=source,
            pack=nest.pack,
            unpack=nest.unpack,
        )
        return result

    def key(self) -> str:
        """What stands for the function in keys.

        Raises:
            TypeError: It uses an object with a state, and has no version.
        """
        try:
            code = self._code.now()
        except Exception as error:  # objects that a function names can do anything
            raise TypeError(
                f"the results of {self!r} are not remembered ({error}): give it a version, as in "
                'fastload.remember(function, version="1"), and change the version with what it uses'
            ) from error
        return f"remember {self.of} {self._version} {environment()!r} {code!r}"

    def _compute(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with inactive():
            return self._function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> Any:
        name = f"{self.__module__}:{self.__qualname__}"
        try:
            is_named = pkgutil.resolve_name(name) is self
        except (AttributeError, ImportError, ValueError):
            is_named = False
        return self.__qualname__ if is_named else (Remembered, (self._function, self.of, self._version))

    def __repr__(self) -> str:
        return f"{self.__module__}.{self.__qualname__}"


def facts_of(source: Any, of: Source) -> Any:
    """What a function can see of its first argument, beside the content; None if it is of another kind."""
    kind = f"{type(source).__module__}.{type(source).__qualname__}"
    if of == "path":
        if type(source) not in _PATHS:
            return None
        text = os.fspath(source)
        return kind, bytes(text) if isinstance(text, bytes) else str(text), _folder_of(text)
    if type(source) not in _BUFFERS:
        return None
    try:
        view = memoryview(source)
        return kind, view.format, view.shape, view.strides, view.readonly
    except (ValueError, BufferError):  # it was released, or is of dates
        return None


def _folder_of(path: str | bytes) -> str:
    return "" if os.path.isabs(path) else os.getcwd()
