"""How a library is met: its functions and methods, replaced by wrappers while datasets are read.

Rules:

1. A wrapper does what the original does while no cache is active in its thread.
2. Functions of modules are replaced during a fetch only, so a dataset that holds one can be pickled at any
   other time. Methods of classes stay replaced until the last cache is closed: changing a class slows down
   all code that uses it for a moment.
3. Only originals are replaced. A function that other code has wrapped or replaced is left alone, before and
   after; an attribute is restored only if it is still the wrapper.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
import weakref
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# By the library whose import makes a reader useful. A reader has a function `patches()`.
READERS = {
    "PIL.ImageFile": "fastload.readers.pillow",
}


@dataclass(eq=False)
class Patch:
    """An attribute to replace.

    Attributes:
        owner: The module or class that has it.
        name: Its name.
        wrap: Makes the wrapper from the original.
    """

    owner: ModuleType | type
    name: str
    wrap: Callable[[Any], Any]

    @functools.cached_property
    def original(self) -> Any:
        """The attribute when the library was first met."""
        return vars(self.owner).get(self.name)

    @functools.cached_property
    def wrapper(self) -> Any:
        """What takes its place."""
        wrapper = self.wrap(self.original)
        if isinstance(self.owner, ModuleType):
            return _Function(wrapper, self)
        return functools.wraps(self.original)(wrapper)

    @property
    def is_genuine(self) -> bool:
        """Whether the original is the library's own."""
        if isinstance(self.original, BuiltinFunctionType):
            return True
        home = self.owner.__name__ if isinstance(self.owner, ModuleType) else self.owner.__module__
        library = home.partition(".")[0]
        return (
            isinstance(self.original, FunctionType)
            and str(self.original.__globals__.get("__name__", "")).partition(".")[0] == library
        )

    def put(self) -> None:
        """Replace the attribute, if it is the original."""
        if vars(self.owner).get(self.name) is self.original and self.is_genuine:
            setattr(self.owner, self.name, self.wrapper)

    def take_away(self) -> None:
        """Restore the attribute, if it is the wrapper."""
        if vars(self.owner).get(self.name) is self.wrapper:
            setattr(self.owner, self.name, self.original)


class _Function:
    """A wrapper of a module's function, which pickles as the original."""

    def __init__(self, wrapper: Callable[..., Any], patch: Patch) -> None:
        functools.update_wrapper(self, patch.original)
        self._wrapper = wrapper
        self._place = patch.owner.__name__, patch.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attribute, self._place


def _attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


class _Patches:
    """Those of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_reader: dict[str, list[Patch]] = {}
        self.num_fetches = 0
        self.caches: weakref.WeakSet[object] = weakref.WeakSet()

    def meet(self) -> None:
        """Meet the libraries that were imported since the last time."""
        for library, reader in READERS.items():
            if library in sys.modules and reader not in self.by_reader:
                self.by_reader[reader] = importlib.import_module(reader).patches()

    def each(self, kind: type) -> Iterator[Patch]:
        for patches in self.by_reader.values():
            yield from (patch for patch in patches if isinstance(patch.owner, kind))


_patches = _Patches()
os.register_at_fork(after_in_child=lambda: setattr(_patches, "lock", threading.Lock()))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Meet the libraries during a fetch."""
    with _patches.lock:
        _patches.meet()
        _patches.num_fetches += 1
        for patch in _patches.each(object):
            patch.put()
    try:
        yield
    finally:
        with _patches.lock:
            _patches.num_fetches -= 1
            if not _patches.num_fetches:
                for patch in _patches.each(ModuleType):
                    patch.take_away()


def retain(cache: object) -> None:
    """Let classes stay replaced until `release` is called for the last cache."""
    with _patches.lock:
        _patches.caches.add(cache)


def release(cache: object) -> None:
    """A cache is closed; with the last one, classes are as they were."""
    with _patches.lock:
        _patches.caches.discard(cache)
        if not _patches.caches and not _patches.num_fetches:
            for patch in _patches.each(object):
                patch.take_away()
