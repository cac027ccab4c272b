"""Functions of a library that other code has wrapped: counters, timers, tracers.

A function that names the library's own by `__wrapped__`, as `functools.wraps` does, is taken for it: it runs
when a file is decoded, and not when its pixels are found. Rules:

1. What it makes is stored under a key of its own, which describes its code and what that names. So a wrapper
   that changes the result shares nothing with programs without it.
2. Objects with a state, such as the counter, are no part of the description. A wrapper that drew random
   numbers has no result that can be stored.
3. A wrapper that cannot be described is left alone, as every other replacement is.
"""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.readers.code_digest import CodeDigest
from fastload.readers.decode_cache import do_not_keep

if TYPE_CHECKING:
    from collections.abc import Callable


class Observed:
    """A wrapped function of a library, as a reader calls it.

    Args:
        function: The outermost wrapper.

    Raises:
        TypeError: It cannot be described.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._code = CodeDigest(function, is_stateless=True)
        self._code.now()
        functools.update_wrapper(self, function)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns; it is not to be stored if random numbers were drawn for it."""
        before = _states()
        result = self._function(*args, **kwargs)
        if _states() != before or not self.kind():
            do_not_keep()
        return result

    def kind(self) -> str:
        """What belongs into the key beside the versions of the library; empty if that cannot be said now."""
        try:
            return self._code.now().hex()
        except TypeError:
            return ""


def kind_of(original: Any) -> str:
    """What belongs into a key for the code that wraps a library's function; empty for the function itself."""
    return f"by {original.kind()}" if type(original) is Observed else ""


def _states() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    _, keys, *rest = state
    return random.getstate(), keys.tobytes(), rest, torch.default_generator.get_state().numpy().tobytes()
