"""check_remembered: looks for what would make remembering a function wrong, on the user's own files."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.readers import nest
from fastload.readers.decode_cache import inactive
from fastload.readers.remember import Remembered, facts_of, remember
from fastload.system.checks import check_iterable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_IGNORED_FOLDERS = ("/proc/", "/sys/", "/dev/")
_IGNORED_SUFFIXES = frozenset({".py", ".pyc", ".so"})  # modules that are imported at the first call


def check_remembered(function: Callable[..., Any], sources: Iterable[Any], *args: Any, **kwargs: Any) -> None:
    """Check on some files that a function can be remembered: the results for equal files are always equal.

    It calls the function three times for each file: the results must be equal, bit for bit, also for a copy
    of the file alone in another folder, and each must have memory of its own. It watches which other files
    Python opens, and that no numbers are drawn from the generators of `random`, NumPy and torch.

    Args:
        function: What `remember` returned, or a function of a path.
        sources: Paths, or the contents of files for ``of="bytes"``.
        args: Further arguments of the function.
        kwargs: Further arguments of the function.

    Raises:
        AssertionError: A check failed; the message says for which file, and what was expected.
        TypeError: The function has no key, because it uses an object with a state: it needs a `version`.
    """
    remembered = function if isinstance(function, Remembered) else remember(function)
    remembered.key()
    check_iterable("sources", sources, "paths or contents of files")
    checks = [_Check(remembered, source, args, kwargs) for source in sources]
    for check in checks:
        with inactive():
            check.run()
    if not checks:
        raise AssertionError("check_remembered was given no files: nothing was checked")


class _Check:
    """The check of one file."""

    def __init__(
        self, function: Remembered[..., Any], source: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self._function, self._source, self._args, self._kwargs = function, source, args, kwargs

    def run(self) -> None:
        """All checks."""
        source = self._source
        kind = self._function.of
        if facts_of(source, kind) is None:
            raise self._error(f"{type(source).__qualname__} is no argument of a function of {kind}")
        before = None if self._is_path else bytes(source)
        first = self._call(source)
        if before is not None and bytes(source) != before:
            raise self._error("changed its argument, which it would not do when its result is remembered")
        state = _generators()
        with _opened() as paths:
            second = self._call(source)
        if any(map(_differ, state, _generators())):
            raise self._error("drew random numbers: its results would be the same for ever")
        others = [path for path in paths if not self._is_source(path)]
        if others:
            raise self._error(f"opened {others[0]!r} as well: a change of that file would not be seen")
        self._compare(first, second, "two calls gave different results")
        if self._is_path:
            with tempfile.TemporaryDirectory() as folder:
                text = os.fsdecode(source)
                copy = shutil.copyfile(text, os.path.join(folder, os.path.basename(text)))
                third = self._call(type(source)(os.fsencode(copy) if isinstance(source, bytes) else copy))
            text = "gave another result for a copy of the file: it reads more than the file, or uses its path"
            self._compare(first, third, text)

    def _call(self, source: Any) -> tuple[Any, Any, Any]:
        """A result, and how it is stored."""
        result = self._function(source, *self._args, **self._kwargs)
        packed = nest.pack(result)
        if packed is None:
            raise self._error(
                f"returned {type(result).__qualname__}, which is not stored: it should be arrays, tensors "
                "and plain values in tuples, lists and dicts, each with memory of its own and without gaps"
            )
        return result, *packed

    def _compare(self, one: tuple[Any, Any, Any], other: tuple[Any, Any, Any], text: str) -> None:
        if repr(one[2]) != repr(other[2]) or one[1].tobytes() != other[1].tobytes():
            raise self._error(text)
        if nest.is_shared([*nest.blocks_of(one[0]), *nest.blocks_of(other[0])]):
            raise self._error(
                "returned the same memory twice: it has a cache of its own, which is not needed"
            )

    @property
    def _is_path(self) -> bool:
        return self._function.of == "path"

    def _is_source(self, path: str) -> bool:
        try:
            return self._is_path and os.path.samefile(path, self._source)
        except OSError:  # it was a temporary file
            return False

    def _error(self, text: str) -> AssertionError:
        source = repr(self._source) if self._is_path else f"{len(self._source):,} bytes"
        return AssertionError(f"{self._function!r} of {source}: {text}")


def _generators() -> list[Any]:
    """The states of the generators that everybody draws from."""
    torch = sys.modules.get("torch")
    state: Any = np.random.get_state(legacy=True)
    return [random.getstate(), state[1], state[2:], None if torch is None else torch.get_rng_state().numpy()]


def _differ(one: Any, other: Any) -> bool:
    return not np.array_equal(one, other) if isinstance(one, np.ndarray) else one != other


class _Opened(threading.local):
    paths: list[str] | None = None


_opened_now = _Opened()


@contextlib.contextmanager
def _opened() -> Iterator[list[str]]:
    """The files that Python opens in this thread meanwhile; libraries in C open others unseen."""
    _watch()
    paths: list[str] = []
    _opened_now.paths = paths
    try:
        yield paths
    finally:
        _opened_now.paths = None


@functools.cache
def _watch() -> None:
    sys.addaudithook(_note)  # which stays for ever


def _note(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" or _opened_now.paths is None or not isinstance(args[0], (str, bytes)):
        return
    path = os.fsdecode(args[0])
    if not path.startswith(_IGNORED_FOLDERS) and Path(path).suffix not in _IGNORED_SUFFIXES:
        _opened_now.paths.append(path)
