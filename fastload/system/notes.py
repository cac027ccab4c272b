"""Notes on errors: where an error occurred, and a user's object in a message."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any, ParamSpec

from fastload.system.humanize import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, unless its class does not accept notes (a frozen dataclass, for example)."""
    with contextlib.suppress(Exception):
        error.add_note(note)


_PLACES = ("fastload: batch ", "fastload: worker ")


def add_place(error: BaseException, place: str) -> None:
    """Add a note that says where an error occurred, such as ``"batch 3, worker 0, dataset index 7"``.

    It replaces the note of an earlier batch: a dataset can raise the same exception object several times.
    """
    with contextlib.suppress(Exception):
        notes = getattr(error, "__notes__", [])
        notes[:] = [note for note in notes if not note.startswith(_PLACES)]
        error.add_note(f"fastload: {place}")


def suggest_arguments(constructor: Callable[P, None]) -> Callable[P, None]:
    """The constructor, whose error about an unknown argument has a note that names a similar one.

    `inspect.signature` shows the constructor's own. From 3.13 on, Python's error names a similar argument.
    """
    if sys.version_info >= (3, 13):
        return constructor

    @functools.wraps(constructor)
    def suggesting(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            constructor(*args, **kwargs)
        except TypeError as error:
            known = inspect.signature(constructor).parameters
            for name in kwargs.keys() - known:
                add_note(error, f"there is no argument {name}{did_you_mean(name, known)}")
            raise

    return suggesting


def short_repr(value: Any) -> str:
    """The repr of a user's object (an index, an error) for a message, cut to 200 characters.

    Of a list of more than ten, such as the indices of a batch: the first ones, the last one, and how many.
    If repr() raises, the text names the type instead, so the error being reported is not lost.
    """
    try:
        if type(value) is list and len(value) > 10:
            first = ", ".join(map(repr, value[:3]))
            text = f"[{first}, ..., {value[-1]!r}] ({len(value):,} in all)"
        else:
            text = repr(value)
    except Exception as error:  # noqa: BLE001  # the user's class can raise anything
        text = f"<{type(value).__name__}, whose repr() raised {type(error).__name__}>"
    return text if len(text) <= 200 else text[:200] + "..."
