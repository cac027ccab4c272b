"""functools.cached_property, without the lock that it has before Python 3.12.

All instances of a class share that lock: threads that read files of their own would wait for each other, and
a fork that happens meanwhile never gets it. So two threads can compute the same value, and one of both stays.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property:  # noqa: N801  # as the one in whose place it is
        """As functools.cached_property."""

        def __init__(self, make: Any) -> None:
            self._make = make
            self.__doc__ = make.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = vars(instance)[self._name] = self._make(instance)
            return value


__all__ = ["cached_property"]
