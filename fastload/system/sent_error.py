"""Errors that are raised elsewhere than they occur: in the consumer instead of a worker, or later.

Rules:

1. fastload's own errors arrive as themselves, with their attributes.
2. From a process, any other error arrives as torch's loader sends it: an error of the same class with the
   text of its traceback, or a RuntimeError if its class does not take that text. From a thread it arrives as
   itself.
3. Tracebacks show the user's frames. With FASTLOAD_DEBUG=1 they also show those of fastload and torch.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import NamedTuple, NoReturn

import torch
from torch._utils import ExceptionWrapper

from fastload.errors import FastloadError, add_note
from fastload.system.logs import is_debugging

_HEADER = "Traceback (most recent call last):\n"
_LIBRARIES = tuple(
    os.path.dirname(path) + os.sep for path in (os.path.dirname(os.path.abspath(__file__)), torch.__file__)
)
_SHORT_TEXT = 400  # characters; each takes four bytes at most


class SentError(NamedTuple):
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
    def current(cls, where: str, place: str = "") -> SentError:
        """The exception that is being handled, ready to be sent to another process or kept.

        Args:
            where: As torch says it: "in DataLoader worker process 0".
            place: As the attribute.
        """
        kind, error, _ = sys.exc_info()
        if kind is None or error is None:
            raise AssertionError("no exception is being handled")
        notes = _take_own_notes(error)
        text = text_of(error)
        if isinstance(error, FastloadError):
            payload = _pickled(error)
            if isinstance(payload, bytes):
                told = (f"fastload: raised {where}:\n{text.rstrip()}",) if '\n  File "' in text else ()
                return cls(payload, place, notes + told)
        wrapper = ExceptionWrapper((kind, error, None), where)
        wrapper.exc_msg = text
        payload = _pickled(wrapper)
        if isinstance(payload, bytes):
            return cls(payload, place, notes)
        text = f"{text}\n(the exception itself could not be pickled: {payload!r})"
        return cls.of_text(text, where, place, notes)

    @classmethod
    def of_text(cls, text: str, where: str, place: str = "", notes: tuple[str, ...] = ()) -> SentError:
        """A RuntimeError that has only a text."""
        wrapper = ExceptionWrapper((RuntimeError, RuntimeError(text), None), where)
        wrapper.exc_msg = text
        return cls(pickle.dumps(wrapper), place, notes)

    @classmethod
    def itself(cls, error: BaseException, place: str = "") -> SentError:
        """An error that occurred in another thread of this process."""
        hide_frames(error)
        return cls(error, place)

    def shortened(self, num_bytes: int, where: str) -> SentError:
        """The error in at most ``num_bytes`` when pickled, without notes; long texts lose their middle."""
        error = pickle.loads(self.payload) if isinstance(self.payload, bytes) else self.payload
        text = error.exc_msg if isinstance(error, ExceptionWrapper) else f"{type(error).__name__}: {error}"
        if len(text) > 2 * _SHORT_TEXT:
            text = f"{text[:_SHORT_TEXT]}\n[...]\n{text[-_SHORT_TEXT:]}"
        if isinstance(error, ExceptionWrapper):
            error.exc_msg = text
        short = SentError(pickle.dumps(error), self.place)
        return short if len(pickle.dumps(short)) < num_bytes else SentError.of_text(text, where)

    def reraise(self) -> NoReturn:
        """Raise the error, with its notes."""
        error = self.payload
        if isinstance(error, BaseException):
            try:
                raise error
            finally:
                del error, self  # its traceback holds this frame
        try:
            found = pickle.loads(error)
            if isinstance(found, ExceptionWrapper):
                found.reraise()
            raise found
        except BaseException as raised:
            found = None
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
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        link = left.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        frames = []
        step = link.__traceback__
        while step is not None:
            frames.append(step)
            step = step.tb_next
        kept = None
        for step in reversed(frames):
            if step.tb_frame.f_code.co_filename.startswith(folders):
                has_hidden = True
            else:
                step.tb_next, kept = kept, step
        BaseException.with_traceback(link, kept)
        left += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            left += link.exceptions
    return has_hidden


def text_of(error: BaseException) -> str:
    """The text of an error with the user's frames, which it keeps, and the header that scripts look for."""
    has_hidden = hide_frames(error)
    parts = traceback.format_exception(error)
    if _HEADER not in parts:
        parts.insert(0, _HEADER)
    if has_hidden:
        place = len(parts) - parts[::-1].index(_HEADER)  # below the last header
        parts.insert(place, "  (frames of fastload and torch are hidden; FASTLOAD_DEBUG=1 shows them)\n")
    return "".join(parts)


def _pickled(value: BaseException | ExceptionWrapper) -> bytes | Exception:
    """The pickle of an error, or why it cannot be sent."""
    try:
        data = pickle.dumps(value)
        pickle.loads(data)
    except Exception as error:  # noqa: BLE001  # user-defined pickling may raise anything
        return error
    return data


def _take_own_notes(error: BaseException) -> tuple[str, ...]:
    notes = getattr(error, "__notes__", [])
    own = tuple(note for note in notes if note.startswith("fastload"))
    for note in own:
        notes.remove(note)
    return own
