"""What identifies a user's function: its code, and all of the user's code and constants that it names.

A store outlives an edit of a script, and the edit of a helper changes a result as the edit of the function
does. So the description follows the names of the code to functions, classes, modules and constants, on every
call: a notebook's cell can redefine one at any time. Installed packages count as they are in the environment
at the start of the process. What has no description is an object with a state, and raises TypeError.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import sys
import sysconfig
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.readers.identity import digest, is_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_BUILTIN = (BuiltinFunctionType, MethodDescriptorType, GetSetDescriptorType, np.ufunc)
_REPEATABLE = (np.dtype, PurePath, re.Pattern, complex, slice, range)  # all of them is in their repr
_SKIPPED = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__annotations__"}
)
_CONTAINERS = frozenset({list, dict, set, np.ndarray, bytearray})
_MUTABLE = _CONTAINERS | {functools.partial}
_FIXED = frozenset({int, float, str, bytes, bool, type(None)})
_MISSING = object()
_IS_WRAPPER = "_is_wrapper"  # of classes whose objects are their function, and no more
_INSTALLED = ("site-packages", "dist-packages")
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


@functools.cache
def environment() -> bytes | None:
    """What identifies the installed packages: folders, whose times change with every installation."""
    folders = sorted({path for path in sys.path if path.endswith(_INSTALLED)})
    times = [(path, os.stat(path).st_mtime_ns) for path in folders if Path(path).is_dir()]
    return digest(sys.version, sys.prefix, times)


class CodeDigest:
    """A digest of a callable and of what it names, made again when one of these has changed.

    Args:
        function: The callable.
        with_objects: Whether an object without a description counts as any other one of its class.
        is_stateless: Whether lists, dicts and other containers that can change do so, too.
    """

    def __init__(self, function: Any, *, with_objects: bool = False, is_stateless: bool = False) -> None:
        self._function, self._with_objects = function, with_objects or is_stateless
        self._is_stateless = is_stateless
        self._last: tuple[_Describing, bytes] | None = None  # one attribute, so that threads see both

    def now(self) -> bytes:
        """The digest.

        Raises:
            TypeError: Something that the function uses has no description.
        """
        last = self._last
        if last is not None and last[0].is_valid():
            return last[1]
        describing = _Describing(self._with_objects, self._is_stateless)
        known = digest(describing.value(self._function))
        if known is None:
            raise TypeError("it uses a value that cannot be described")
        self._last = describing, known
        return known


class _Describing:
    """One description; what was described already is a number, so recursion ends."""

    def __init__(self, with_objects: bool, is_stateless: bool) -> None:
        self._with_objects, self._is_stateless = with_objects, is_stateless
        self._seen: dict[int, Any] = {}  # kept alive, so that no other object gets their id
        self._is_fixed = True  # nothing in it can change in place
        self._names: list[tuple[Any, str, Any]] = []  # a namespace, a name, what it was
        self._attributes: list[tuple[Any, str, Any]] = []

    def is_valid(self) -> bool:
        """Whether everything is still what was described."""
        return (
            self._is_fixed
            and all(space.get(name, _MISSING) is value for space, name, value in self._names)
            and all(getattr(owner, name) is value for owner, name, value in self._attributes)
        )

    def _named_in(self, space: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """What these names are in a namespace; others can appear there later."""
        for name in names:
            value = space.get(name, _MISSING)
            self._names.append((space, name, value))
            if value is not _MISSING:
                yield name, value

    def value(self, value: Any, names: frozenset[str] = frozenset()) -> Any:
        """What describes a value, as plain values; of a module, what these names of it describe."""
        if self._is_stateless and type(value) in _CONTAINERS:
            return ("object", type(value).__name__)
        if type(value) in _MUTABLE or (type(value) is tuple and not _FIXED.issuperset(map(type, value))):
            self._is_fixed = False
        if is_plain(value):
            return ("plain", value)
        if isinstance(value, logging.Logger):
            return ("logger",)
        if isinstance(value, _REPEATABLE):
            return (type(value).__name__, repr(value))
        if type(value) in (tuple, list, set, frozenset):
            parts = [self.value(part) for part in value]
            return (
                type(value).__name__,
                parts if isinstance(value, (tuple, list)) else sorted(map(repr, parts)),
            )
        if id(value) in self._seen:
            return ("seen", list(self._seen).index(id(value)))
        self._seen[id(value)] = value
        if isinstance(value, ModuleType):
            return self._module(value, names)
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return ("array", value.dtype.descr, value.shape, hashlib.sha256(value.tobytes()).digest())
        if isinstance(value, (staticmethod, classmethod, MethodType)):
            owner = value.__self__ if isinstance(value, MethodType) else None
            return (type(value).__name__, self.value(value.__func__), self.value(owner))
        if isinstance(value, property):
            return ("property", *map(self.value, (value.fget, value.fset, value.fdel)))
        if isinstance(value, functools.partial):
            return ("partial", *map(self.value, (value.func, value.args, [*value.keywords.items()])))
        return self._named(value)

    def _named(self, value: Any) -> Any:
        """Functions and classes: of installed packages by name."""
        module = str(getattr(value, "__module__", "")).replace(
            "__mp_main__", "__main__"
        )  # in spawned workers
        name = (module, getattr(value, "__qualname__", type(value).__qualname__))
        is_function = isinstance(value, (FunctionType, type, *_BUILTIN))
        home = name[0] if is_function else type(value).__module__
        if isinstance(value, _BUILTIN) or (not _is_own(home) and (is_function or _is_constant(value))):
            return ("installed", *name)
        if isinstance(value, FunctionType):
            return (*name, self._function(value))
        if isinstance(value, type):
            attributes = self._named_in(vars(value), [key for key in vars(value) if key not in _SKIPPED])
            bases = [self.value(base) for base in value.__bases__]
            return (*name, bases, [(key, self.value(part)) for key, part in attributes])
        inner = getattr(value, "__wrapped__", None)
        if inner is not None and (
            type(value).__module__ == "functools" or getattr(type(value), _IS_WRAPPER, False)
        ):
            return ("wrapped", self.value(inner))
        if self._with_objects:
            return ("object", *name)
        raise TypeError(f"an object of the class {type(value).__qualname__} is used, whose state is unknown")

    def _module(self, module: ModuleType, names: frozenset[str]) -> Any:
        name = module.__name__
        if not _is_own(name):
            return ("installed", name)
        used = self._named_in(vars(module), sorted(names))
        return ("module", name, [(key, self.value(part, names)) for key, part in used])

    def _function(self, function: FunctionType) -> Any:
        parts = []
        for attribute in ("__defaults__", "__kwdefaults__"):
            value = getattr(function, attribute)
            self._attributes.append((function, attribute, value))
            parts.append(self.value(value))
        for cell in function.__closure__ or ():
            self._attributes.append((cell, "cell_contents", cell.cell_contents))
            parts.append(self.value(cell.cell_contents))
        code = function.__code__
        self._attributes.append((function, "__code__", code))
        names = _names(code)
        used = self._named_in(function.__globals__, sorted(names))
        return (_code(code), parts, [(key, self.value(part, names)) for key, part in used])


@functools.cache
def _is_own(name: str) -> bool:
    """Whether a module is the user's: of no installed package, and not of Python."""
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(file, str):
        return name not in sys.modules  # made by exec, or removed: nobody knows
    return not any(f"{os.sep}{folder}{os.sep}" in file for folder in _INSTALLED) and not file.startswith(
        _STANDARD
    )


def _is_constant(value: Any) -> bool:
    """Whether an object of an installed package is one of its constants, such as `torch.float32`."""
    return type(value).__module__ == "torch" and type(value).__name__ in {"dtype", "device", "memory_format"}


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


@functools.cache
def _code(code: CodeType) -> Any:
    constants = [
        _code(part)
        if isinstance(part, CodeType)
        else (type(part).__name__, sorted(map(repr, part)) if isinstance(part, frozenset) else repr(part))
        for part in code.co_consts
    ]
    parts = code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_exceptiontable
    return digest(*parts, code.co_flags, constants)
