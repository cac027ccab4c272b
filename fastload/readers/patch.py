"""Patch: an attribute of a library that a wrapper takes the place of; see `patches` for when."""

from __future__ import annotations

import functools
import gc
import sys
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


OPENED = "_fastload"  # the attribute of an image of Pillow's that is opened, and can be loaded from a cache


@dataclass(eq=False)
class Patch:
    """An attribute to replace.

    Attributes:
        owner: The module, class or other object that has it.
        name: Its name.
        wrap: Makes the wrapper from the original.
        is_for: Of a method: the objects that it is for; None: all.
    """

    owner: Any
    name: str
    wrap: Callable[[Any], Any]
    is_for: Callable[[Any], bool] | None = None
    _num_held: int = sys.maxsize  # references to the original when an object was last found to have it

    @functools.cached_property
    def original(self) -> Any:
        """The attribute when the library was first met."""
        return self.current

    @property
    def current(self) -> Any:
        """The attribute now."""
        return vars(self.owner).get(self.name)

    @functools.cached_property
    def wrapper(self) -> Any:
        """What takes its place."""
        wrapper = self.wrap(self.original)
        if isinstance(self.owner, type):
            return Method(functools.wraps(self.original)(wrapper), self.original, self.is_for)
        return _Function(wrapper, self.original)

    @functools.cached_property
    def is_genuine(self) -> bool:
        """Whether the original is the library's own."""
        original = self.original
        home = self.owner.__name__ if isinstance(self.owner, ModuleType) else self.owner.__module__
        library = home.partition(".")[0]
        if isinstance(original, BuiltinFunctionType):  # OpenCV's name no module, like methods of any object
            origin = original.__module__ or (home if original.__self__ is None else "")
        elif isinstance(original, FunctionType):
            origin = str(original.__globals__.get("__name__", ""))
        else:
            origin = type(original).__module__
        return origin.partition(".")[0] == library

    def put(self) -> None:
        """Replace the attribute, if it is the original."""
        if self.current is not self.original or not self.is_genuine:
            return
        if isinstance(self.owner, ModuleType):
            self._put_for_good()
        else:
            setattr(self.owner, self.name, self.wrapper)

    def take_away(self) -> None:
        """Restore an attribute that is not a module's, if it is the wrapper."""
        if not isinstance(self.owner, ModuleType) and self.current is self.wrapper:
            setattr(self.owner, self.name, self.original)

    def _put_for_good(self) -> None:
        """Replace a function in all modules and tables that have it, unless something else refers to it."""
        num_references = sys.getrefcount(self.original)
        if num_references >= self._num_held:
            return
        own = vars(self)
        tables = [each for each in _referrers(self.original) if type(each) is dict and each is not own]
        values = (value for table in (*tables, own) for value in [*table.values()])
        if num_references > sum(value is self.original for value in values) + 1:
            self._num_held = num_references
            return
        for table in tables:
            for key in [key for key, value in table.items() if value is self.original]:
                table[key] = self.wrapper

    @property
    def is_held(self) -> bool:
        """Whether the function is left alone because an object that is no table refers to it."""
        return isinstance(self.owner, ModuleType) and self.is_genuine and self.current is self.original


def _referrers(value: Any) -> list[Any]:
    """What refers to a value, also what `gc.freeze` has put out of the collector's sight."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()
    try:
        return gc.get_referrers(value)
    finally:
        if is_frozen:
            gc.freeze()


class Method:
    """A method of some objects of a class; of others, and as an attribute of it, it is the original."""

    def __init__(
        self, method: Callable[..., Any], original: Any, is_for: Callable[[Any], bool] | None = None
    ) -> None:
        self._method, self._original, self._is_for = method, original, is_for

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self._original
        is_met = self._is_for is None or self._is_for(instance)
        return MethodType(self._method if is_met else self._original, instance)


class _Function:
    """A wrapper of a function, which all but `type()` takes for the function."""

    __slots__ = ("__weakref__", "call", "original")

    def __init__(self, call: Callable[..., Any], original: Any) -> None:
        object.__setattr__(self, "call", call)
        object.__setattr__(self, "original", original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return object.__getattribute__(self, "call")(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        original = object.__getattribute__(self, "original")
        if name == "__reduce_ex__":  # that of a function in Python is in pickle
            return lambda _: original.__qualname__
        return getattr(original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "original"), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "original"), name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        is_bound = instance is not None and hasattr(object.__getattribute__(self, "original"), "__get__")
        return MethodType(self, instance) if is_bound else self

    def __eq__(self, other: object) -> bool:
        return self is other or object.__getattribute__(self, "original") is other

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "original"))

    def __repr__(self) -> str:
        return repr(object.__getattribute__(self, "original"))
