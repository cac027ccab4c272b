"""Errors raised elsewhere than they occur: in the consumer instead of a worker, or later.

Rules:

1. fastload's own errors arrive as themselves, with their attributes.
2. From a process, any other error arrives as torch's loader sends it: an error of the same class with the
   text of its traceback, or a RuntimeError if its class does not take that text. From a thread it arrives as
   itself.
3. Tracebacks show the user's frames. With FASTLOAD_DEBUG=1 they also show those of fastload and torch.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch

from fastload.errors import FastloadError
from fastload.system import by_value
from fastload.system.logs import is_debugging
from fastload.system.notes import add_note
from fastload.system.torch_private import ExceptionWrapper

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_HEADER = "Traceback (most recent call last):\n"
_LIBRARIES = tuple(
    os.path.dirname(path) + os.sep for path in (os.path.dirname(os.path.abspath(__file__)), torch.__file__)
)


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
        text = text_of(error)
        wrapper = ExceptionWrapper((type(error), error, None), where)
        wrapper.exc_msg = text
        try:
            if isinstance(error, FastloadError):
                with contextlib.suppress(Exception):  # else it is sent like a user's error
                    raised = (f"fastload: raised {where}:\n{text.rstrip()}",) if '\n  File "' in text else ()
                    return cls(_pickled(error), place, notes + raised)
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

    @classmethod
    def itself(cls, error: BaseException, place: str = "") -> RemoteError:
        """An error that occurred in another thread of this process."""
        hide_frames(error)
        return cls(error, place)

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


def hide_frames(error: BaseException, folders: tuple[str, ...] = _LIBRARIES) -> bool:
    """Remove frames from the tracebacks of an error and of those in its chain, in place.

    Args:
        error: The error.
        folders: The folders whose code is hidden; by default those of fastload and torch.

    Returns:
        Whether there were any; False with FASTLOAD_DEBUG=1, which keeps them.
    """
    if is_debugging():
        return False
    has_hidden = False
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        link = chain.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        shown = None  # the frames that are shown, from here inwards
        for step in reversed(list(_steps(link))):
            if step.tb_frame.f_code.co_filename.startswith(folders):
                has_hidden = True
            else:
                step.tb_next, shown = shown, step
        BaseException.with_traceback(link, shown)
        chain += [link.__cause__, link.__context__]
        chain += link.exceptions if isinstance(link, BaseExceptionGroup) else ()
    return has_hidden


def _steps(error: BaseException) -> Iterator[TracebackType]:
    step = error.__traceback__
    while step is not None:
        yield step
        step = step.tb_next


def text_of(error: BaseException) -> str:
    """The text of an error with the user's frames, which it keeps, and the header that scripts look for."""
    has_hidden = hide_frames(error)
    text = "".join(traceback.format_exception(error))
    if _HEADER not in text:
        text = _HEADER + text
    if has_hidden:  # the note comes below the last header
        note = "  (frames of fastload and torch are hidden; FASTLOAD_DEBUG=1 shows them)\n"
        text = (_HEADER + note).join(text.rsplit(_HEADER, 1))
    return text


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
