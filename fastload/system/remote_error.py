"""Errors raised elsewhere than they occur: in the consumer instead of a worker, or later.

Rules:

1. fastload's own errors arrive as themselves, with their attributes.
2. From a process, any other error arrives as torch's loader sends it: an error of the same class with the
   text of its traceback, or a RuntimeError if its class does not take that text. From a thread it arrives as
   itself.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from typing import NamedTuple, NoReturn

from fastload.errors import FastloadError
from fastload.system import by_value
from fastload.system.notes import add_note
from fastload.system.torch_private import ExceptionWrapper


class RemoteError(NamedTuple):
    """An error to be raised in the consumer.

    Attributes:
        payload: An error of fastload's own or torch's ExceptionWrapper, pickled; or the error itself.
        place: Where it occurred, such as "dataset index 7"; empty if unknown.
        notes: fastload's notes, which the text of an ExceptionWrapper does not contain.
    """

    payload: bytes | BaseException
    place: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def current(cls, where: str, place: str = "") -> RemoteError:
        """The exception that is being handled, ready to be sent to another process or kept.

        Args:
            where: As torch says it: "in DataLoader worker process 0".
            place: As the attribute.
        """
        error = sys.exception()
        if error is None:
            raise AssertionError("no exception is being handled")
        notes = _take_own_notes(error)
        wrapper = ExceptionWrapper((type(error), error, error.__traceback__), where)
        text = wrapper.exc_msg
        try:
            if isinstance(error, FastloadError):
                with contextlib.suppress(Exception):  # else it is sent like a user's error
                    return cls(
                        _pickled(error), place, (*notes, f"fastload: raised {where}:\n{text.rstrip()}")
                    )
            return cls(_pickled(wrapper), place, notes)
        except Exception as unpicklable:  # noqa: BLE001  # user-defined pickling can raise anything
            text = f"{text}\n(the exception itself could not be pickled: {unpicklable!r})"
            return cls.of_text(text, where, place, notes)

    @classmethod
    def of_text(cls, text: str, where: str, place: str = "", notes: tuple[str, ...] = ()) -> RemoteError:
        """A RuntimeError that has only a text."""
        wrapper = ExceptionWrapper((RuntimeError, RuntimeError(text), None), where)
        wrapper.exc_msg = text
        return cls(pickle.dumps(wrapper), place, notes)

    def reraise(self) -> NoReturn:
        """Raise the error, with its notes."""
        error = self.payload
        if isinstance(error, BaseException):
            try:
                raise error
            finally:
                del error, self  # its traceback holds this frame
        try:
            received = pickle.loads(error)
            if isinstance(received, ExceptionWrapper):
                received.reraise()
            raise received
        except BaseException as raised:
            received = None
            raised.with_traceback(None)  # breaks a cycle: a variable of torch's frame holds the error
            for note in self.notes:
                add_note(raised, note)
            raise


def _pickled(value: BaseException | ExceptionWrapper) -> bytes:
    """The pickle of an error, which can be read.

    Raises:
        Exception: The error cannot be sent.
    """
    data = by_value.dumps(value)
    pickle.loads(data)
    return data


def _take_own_notes(error: BaseException) -> tuple[str, ...]:
    notes = getattr(error, "__notes__", [])
    own = tuple(note for note in notes if note.startswith("fastload"))
    for note in own:
        notes.remove(note)
    return own
