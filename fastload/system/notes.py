"""Notes on errors: where an error occurred, and a user's object in a message."""

from __future__ import annotations

import contextlib
from typing import Any


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
