"""How a library is met: its functions and methods, replaced by wrappers while datasets are read.

Rules:

1. A wrapper does what the original does while no cache is active in its thread.
2. A program finds one object for a function, wherever and whenever it looks, so comparisons and tables stay
   right: a module's function is replaced in all modules and dicts at once, for the life of the process, and
   only if nothing else refers to it: an attribute, a key or a default would go on being the original.
3. Methods are replaced until the last cache is closed; as attributes of their classes they are the originals.
4. Only originals are replaced. A function that other code has wrapped or replaced is left alone, before and
   after; an attribute is restored only if it is still the wrapper.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import pkgutil
import sys
import threading
import weakref
from types import BuiltinFunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from fastload.system.cached_property import cached_property
from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# By the library whose import makes a reader useful: the function that returns what to replace.
READERS = {
    "cv2": "fastload.readers.opencv:patches",
    "numpy": "fastload.readers.npz:patches",
    "tifffile": "fastload.readers.tifffile:patches",
    "torchvision.io": "fastload.readers.torchvision_io:patches",
    "PIL.Image": "fastload.readers.pillow:patches",
}


# --- one function or method -------------------------------------------------------------------------------


class Patch:
    """An attribute to replace.

    Args:
        owner: The module, class or other object that has it.
        name: Its name.
        wrap: Makes the wrapper from the original.
        is_for: Of a method: the objects that it is for; None: all.

    Attributes:
        original: The attribute when the library was first met.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        wrap: Callable[[Any], Any],
        is_for: Callable[[Any], bool] | None = None,
    ) -> None:
        self.owner, self.name = owner, name
        self.original = self.current
        self._wrap, self._is_for = wrap, is_for
        self._is_module, self._is_own = isinstance(owner, ModuleType), _is_own(owner, self.original)
        self._num_held = sys.maxsize  # references to the original when an object was last found to have it

    @property
    def current(self) -> Any:
        """The attribute now."""
        return vars(self.owner).get(self.name)

    @cached_property
    def wrapper(self) -> Any:
        """What takes its place."""
        wrapper = self._wrap(self.original)
        if isinstance(self.owner, type):
            return _Method(functools.wraps(self.original)(wrapper), self.original, self._is_for)
        return _Function(wrapper, self.original)

    @property
    def is_left_alone(self) -> bool:
        """Whether other code has replaced it, or an object that is no table refers to the function."""
        if self.current is self.original:
            return self._is_module or not self._is_own
        return self.current is not self.wrapper

    def put(self) -> None:
        """Replace the attribute, if it is the original: a function in all modules and tables that have it."""
        if self.current is not self.original or not self._is_own:
            return
        if not self._is_module:
            setattr(self.owner, self.name, self.wrapper)
            return
        num_references = sys.getrefcount(self.original)
        if num_references >= self._num_held:
            return
        tables = self._tables()
        values = (value for table in (*tables, vars(self)) for value in [*table.values()])
        if num_references > sum(value is self.original for value in values) + 1:
            self._num_held = num_references
            return
        for table in tables:
            for key in [key for key, value in table.items() if value is self.original]:
                table[key] = self.wrapper

    def take_away(self) -> None:
        """Restore an attribute that is not a module's, if it is the wrapper."""
        if not self._is_module and self.current is self.wrapper:
            setattr(self.owner, self.name, self.original)

    def _tables(self) -> list[dict[Any, Any]]:
        """The dicts of others that have the original, also what `gc.freeze` has put out of sight."""
        is_frozen = gc.get_freeze_count() > 0
        if is_frozen:
            gc.unfreeze()
        try:
            found = gc.get_referrers(self.original)
        finally:
            if is_frozen:
                gc.freeze()
        return [each for each in found if type(each) is dict and each is not vars(self)]


def package_of(function: Any) -> str:
    """The package that a function in Python is of: a decorator's own, which can copy the name of another."""
    return str(getattr(function, "__globals__", {}).get("__name__", "")).partition(".")[0]


def _is_own(owner: Any, function: Any) -> bool:
    """Whether an attribute is the library's own."""
    home = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    library = home.partition(".")[0]
    if not isinstance(function, BuiltinFunctionType):
        return package_of(function) == library
    if function.__module__ is None:  # as OpenCV's, and methods of any object
        return function.__self__ is None
    return function.__module__.partition(".")[0] == library


class _Method:
    """A method of some objects of a class; of others, and as an attribute of it, it is the original."""

    def __init__(
        self, method: Callable[..., Any], original: Any, is_for: Callable[[Any], bool] | None
    ) -> None:
        self._method, self._original, self._is_for = method, original, is_for

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self._original
        is_met = self._is_for is None or self._is_for(instance)
        return MethodType(self._method if is_met else self._original, instance)


class _Function:
    """A wrapper of a function in C, which all but `type()` takes for the function."""

    __slots__ = ("__weakref__", "call", "original")

    def __init__(self, call: Callable[..., Any], original: Any) -> None:
        self.call, self.original = call, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return object.__getattribute__(self, "call")(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        original = object.__getattribute__(self, "original")
        if name == "__reduce_ex__":  # that of a function in Python is in pickle
            return lambda _: original.__qualname__
        return getattr(original, name)

    def __repr__(self) -> str:
        return repr(object.__getattribute__(self, "original"))


# --- all of this process ----------------------------------------------------------------------------------

_lock = threading.RLock()  # a handler of a signal can close a loader at any time
_by_library: dict[str, list[Patch]] = {}
_caches: weakref.WeakSet[object] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.RLock()))


def meet(readers: Mapping[str, str] | None = None) -> None:
    """Meet the libraries of a table, by default `READERS`, that were imported since; again and again."""
    readers = READERS if readers is None else readers
    with _lock:
        for library in readers:
            if library not in _by_library and _is_imported(library):
                try:
                    _by_library[library] = pkgutil.resolve_name(readers[library])()
                except Exception as error:  # noqa: BLE001  # a release that the reader does not know
                    _by_library[library] = []
                    log.info("%s is not met: %s", library, repr(error))
            for patch in _by_library.get(library, ()):
                patch.put()


def _is_imported(library: str) -> bool:
    """Whether the import of a library is complete."""
    module = sys.modules.get(library)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def unmet() -> list[str]:
    """The functions and methods that are left alone, because other code has replaced them or holds them."""
    patches = [patch for library in READERS for patch in _by_library.get(library, ())]
    return [f"{patch.owner.__name__}.{patch.name}" for patch in patches if patch.is_left_alone]


def retain(cache: object) -> None:
    """Meet the libraries, and let classes stay replaced until `release` is called for the last cache."""
    _caches.add(cache)
    meet()  # so that processes forked from this one find the same objects


def release(cache: object) -> None:
    """A cache is closed; with the last one, classes are as they were."""
    with _lock:
        _caches.discard(cache)
        if not _caches:
            for patch in itertools.chain(*_by_library.values()):
                patch.take_away()
