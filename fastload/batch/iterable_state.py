"""The position of one worker's copy of an iterable dataset, in a form that processes can send each other.

It is made where samples are fetched (`fetch`, `worker`, the iterator without workers); `resume` keeps it in
the consumer's process. Only the processes of one loader make and read the pickles in it. A state from a
checkpoint is never unpickled: the consumer's process pickles the plain objects in it.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch._utils import ExceptionWrapper


class IterableState(NamedTuple):
    """The position of one copy of an iterable dataset.

    Attributes:
        progress: Whether this epoch has read from the copy, and whether the copy has ended. The state of an
            ended copy is not requested, because it may already mean the beginning of the next epoch.
            "unknown": its `state_dict()` raised, or returned something that cannot be pickled.
        data: With progress "begun": the pickled result of the dataset's `state_dict()`.
        error: With progress "unknown": the error, as torch sends errors; from a worker it is pickled.
    """

    progress: Literal["not begun", "begun", "ended", "unknown"]
    data: bytes = b""
    error: bytes | ExceptionWrapper | None = None

    @classmethod
    def of(cls, state: Any) -> IterableState:
        """The position of a copy whose `state_dict()` returned ``state``; ``state`` is copied."""
        return cls("begun", pickle.dumps(state))

    def load(self) -> Any:
        """With progress "begun": a new object that is equal to the result of `state_dict()`."""
        return pickle.loads(self.data)

    def raise_error(self) -> None:
        """With progress "unknown": raise the error of `state_dict()` again; else do nothing."""
        wrapper = pickle.loads(self.error) if isinstance(self.error, bytes) else self.error
        if wrapper is not None:
            wrapper.reraise()


NOT_BEGUN = IterableState("not begun")
ENDED = IterableState("ended")
