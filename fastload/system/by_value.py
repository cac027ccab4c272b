"""Pickles functions and classes by value, with cloudpickle, where a process would not find them by name.

Pickle writes the name of a function or class. A lambda and a local class have none, and a notebook's
`__main__` is in no other process. A class that came by value, through Ray too, goes back as the token that
cloudpickle gave it, so what a worker returns is of the sender's own class.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import sys
from collections import ChainMap
from multiprocessing import reduction, spawn
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

ADVICE = 'install cloudpickle, which sends them as they are (pip install "fastload-torch[cloudpickle]")'

_CLOUDPICKLES = ("cloudpickle.cloudpickle", "ray.cloudpickle.cloudpickle")


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
    _pickler_type()(file, 5, take_buffer).dump(value)


@functools.cache
def _pickler_type() -> Any:
    from cloudpickle import Pickler

    class WithShared(Pickler):  # type: ignore[misc]
        """Sends locks, queues and tensors as multiprocessing does, and no copies of open files."""

        dispatch_table: ClassVar[Any] = ChainMap(
            {io.TextIOWrapper: io.TextIOWrapper.__reduce__},
            reduction.ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
            Pickler.dispatch_table,
            copyreg.dispatch_table,
        )

    return WithShared


def reduce_class(value: Any) -> Any:
    """How pickle writes a class that came by value; NotImplemented for all else."""
    for name in _CLOUDPICKLES if isinstance(value, type) else ():
        module: Any = sys.modules.get(name)
        token = None if module is None else module._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(value)
        if token is not None:
            return _class_of, (name, token)
    return NotImplemented


def _class_of(name: str, token: str) -> type:
    """A class that comes back, in the process that sent it.

    Raises:
        pickle.UnpicklingError: It is gone.
    """
    cls: type | None = sys.modules[name]._DYNAMIC_CLASS_TRACKER_BY_ID.get(token)
    if cls is None:
        raise pickle.UnpicklingError("the class of a value that a worker returned is gone from this process")
    return cls


class _Returning(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return reduce_class(value)


def dumps(value: Any) -> bytes:
    """The pickle of a value that goes back to the process whose classes came by value."""
    file = io.BytesIO()
    _Returning(file).dump(value)
    return file.getvalue()
