"""Pickles functions and classes by value, with cloudpickle, where a process would not find them by name.

Pickle writes the name of a function or class. A lambda and a local class have none, and a notebook's
`__main__` is in no other process. Rules:

1. Only such functions and classes travel by value. All else travels as multiprocessing sends it: locks,
   queues, tensors. An open file is an error, as it is for pickle; cloudpickle alone would send a copy.
2. A function of a module has the globals of that module where it arrives, as if it had been imported there.
   Of a notebook's `__main__`, the globals that it uses are copied.
3. A class that came by value goes back as a token, so what a worker returns is of the sender's own class.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import io
import os
import pickle
import sys
import weakref
from collections import ChainMap
from multiprocessing import reduction, spawn
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

ADVICE = 'install cloudpickle, which sends them as they are (pip install "fastload-torch[cloudpickle]")'

_NUM_PARTS = 6  # of what cloudpickle reduces a function or class without a name to


@functools.cache
def is_possible() -> bool:
    """Whether cloudpickle is installed."""
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        return False
    return True


def workers_find_main() -> bool:
    """Whether started processes import the main module: not that of a notebook or a prompt."""
    return any(name.startswith("init_main") for name in spawn.get_preparation_data("worker"))


def dump(value: Any, file: io.BytesIO, take_buffer: Callable[[pickle.PickleBuffer], Any]) -> None:
    """Write what `pickle.loads` reads in any process that has cloudpickle.

    Args:
        value: The value.
        file: Where to.
        take_buffer: As the `buffer_callback` of pickle.

    Raises:
        Exception: The error of pickle, or of an object in the value.
    """
    _pickler_type()(file, take_buffer).dump(value)


@functools.cache
def _pickler_type() -> Any:
    import cloudpickle

    base: Any = cloudpickle.Pickler
    changed = {io.TextIOWrapper, memoryview, *copyreg.dispatch_table}
    parts = {kind: reduce for kind, reduce in base.dispatch_table.items() if kind not in changed}
    of_multiprocessing = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]

    class Pickler(base):  # type: ignore[misc]
        dispatch_table: ClassVar[Any] = ChainMap(of_multiprocessing, parts, copyreg.dispatch_table)

        def __init__(self, file: io.BytesIO, take_buffer: Any) -> None:
            super().__init__(file, 5, take_buffer)
            self._finds_main = workers_find_main()

        def reducer_override(self, value: Any) -> Any:
            is_class = issubclass(type(value), type)
            if not (is_class or type(value) is FunctionType) or self._is_found(value):
                return NotImplemented
            reduced = super().reducer_override(value)
            if type(reduced) is not tuple or len(reduced) != _NUM_PARTS:
                return reduced
            make, args, state, *rest = reduced
            if is_class:
                return _received, (_token_of(value), make, args), state, *rest
            module: Any = sys.modules.get(value.__module__)
            if self._finds_module(value.__module__) and vars(module) is value.__globals__:
                code, _, *others = args
                attributes, slots = state
                slots = {**slots, "__globals__": {}, "_cloudpickle_submodules": []}
                return make, (code, _Globals(value.__module__), *others), (attributes, slots), *rest
            return reduced

        def _is_found(self, value: Any) -> bool:
            name: Any = getattr(value, "__qualname__", None)
            module: Any = getattr(value, "__module__", None)
            if type(name) is not str or not self._finds_module(module):
                return False
            found: Any = sys.modules[module]
            for part in name.split("."):
                found = getattr(found, part, None)
            return found is value

        def _finds_module(self, name: Any) -> bool:
            return type(name) is str and name in sys.modules and (name != "__main__" or self._finds_main)

    return Pickler


class _Globals:
    """Stands for the globals of a module; is pickled as what they are where it arrives."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __reduce__(self) -> Any:
        return _globals_of, (self._module,)


def _globals_of(module: str) -> dict[str, Any]:
    return vars(importlib.import_module(module))


# --- classes that go back ---------------------------------------------------------------------------------

_tokens: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def _token_of(cls: type) -> str:
    """The token of a class that this process sends."""
    token = _tokens.setdefault(cls, os.urandom(8).hex())
    _classes[token] = cls
    return token


def _received(token: str, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    """A class that arrives."""
    cls = make(*args)
    _tokens[cls] = token
    _classes[token] = cls
    return cls


def _class_of(token: str) -> type:
    """A class that comes back, in the process that sent it.

    Raises:
        pickle.UnpicklingError: It is gone.
    """
    cls = _classes.get(token)
    if cls is None:
        raise pickle.UnpicklingError("the class of a value that a worker returned is gone from this process")
    return cls


def reduce_class(value: Any) -> Any:
    """How pickle writes a class that came by value; NotImplemented for all else."""
    if not issubclass(type(value), type):
        return NotImplemented
    token = _tokens.get(value)
    return NotImplemented if token is None else (_class_of, (token,))


class _Returning(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return reduce_class(value)


def dumps(value: Any) -> bytes:
    """The pickle of a value that goes back to the process whose classes came by value."""
    file = io.BytesIO()
    _Returning(file).dump(value)
    return file.getvalue()
