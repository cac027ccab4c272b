"""Patch: an attribute of a library that a wrapper takes the place of; see `patches` for when."""

from __future__ import annotations

import functools
import pkgutil
import threading
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


OPENED = "_fastload"  # the attribute of an image of Pillow's that is opened, and can be loaded from a cache


class _Thread(threading.local):
    """What the current thread does.

    Attributes:
        num_fetches: How many fetches it is in, one within another.
    """

    num_fetches = 0


thread = _Thread()


def innermost(function: Any) -> Any:
    """The function that others wrap, by `functools.wraps`."""
    for _ in range(16):  # rather than follow a circle
        if type(function) is not FunctionType or not hasattr(function, "__wrapped__"):
            break
        function = function.__wrapped__
    return function


@dataclass(eq=False)
class Patch:
    """An attribute to replace.

    Attributes:
        owner: The module or class that has it.
        name: Its name.
        wrap: Makes the wrapper from the original.
        observe: What `wrap` gets of an original that observers have wrapped; None: that is left alone.
    """

    owner: ModuleType | type
    name: str
    wrap: Callable[[Any], Any]
    observe: Callable[[Any], Any] | None = None

    @functools.cached_property
    def original(self) -> Any:
        """The attribute when the library was first met."""
        return self.current

    @property
    def current(self) -> Any:
        """The attribute now; a class can inherit it, such as from a compiled one, which cannot be changed."""
        is_inherited = isinstance(self.owner, type) and self.name not in vars(self.owner)
        return getattr(self.owner, self.name, None) if is_inherited else vars(self.owner).get(self.name)

    @functools.cached_property
    def wrapper(self) -> Any:
        """What takes its place."""
        wrapper = self.wrap(self._observed)
        if not isinstance(self.owner, ModuleType):
            return functools.wraps(self.original)(wrapper)
        function = functools.update_wrapper(_Function(wrapper), self.original)
        vars(function)["patch"] = self
        return function

    @functools.cached_property
    def _observed(self) -> Any:
        """What the wrapper calls; None if it cannot be described."""
        if self.observe is None or innermost(self.original) is self.original:
            return self.original
        try:
            return self.observe(self.original)
        except TypeError:
            return None

    @functools.cached_property
    def is_genuine(self) -> bool:
        """Whether the original is the library's own, or wraps that as an observer may."""
        if self._observed is None:
            return False
        original = self.original if self.observe is None else innermost(self.original)
        if isinstance(original, BuiltinFunctionType):
            return True
        home = self.owner.__name__ if isinstance(self.owner, ModuleType) else self.owner.__module__
        library = home.partition(".")[0]
        if isinstance(original, FunctionType):
            origin = str(original.__globals__.get("__name__", ""))
        else:
            # Functions that Cython compiled, and slots of compiled classes, have types of no library.
            is_compiled = type(original).__name__ == "cython_function_or_method"
            named = original if is_compiled else type(original)
            origin = getattr(original, "__objclass__", named).__module__
        return origin.partition(".")[0] == library

    def put(self) -> bool:
        """Replace the attribute, if it is the original; returns whether it was."""
        if self.current is not self.original or not self.is_genuine:
            return False
        setattr(self.owner, self.name, self.wrapper)
        return True

    def take_away(self) -> None:
        """Restore the attribute, if it is the wrapper."""
        if vars(self.owner).get(self.name) is self.wrapper:
            setattr(self.owner, self.name, self.original)

    def reduce(self) -> tuple[Any, ...]:
        """What pickles the function of a module, whether it is replaced or not."""
        return pkgutil.resolve_name, (f"{self.owner.__name__}:{self.name}",)


class _Function(functools.partial):  # type: ignore[type-arg]  # calls at the speed of C
    """A wrapper of a module's function, which pickles as the original."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self  # as an attribute of a class, a built-in function is no method

    def __reduce__(self) -> Any:
        return vars(self)["patch"].reduce()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["patch"].original, name)
