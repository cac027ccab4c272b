"""Where one worker's copy of an iterable dataset stands, on its way between processes.

Made where samples are fetched (`fetch`, `worker`, the iterator without workers), and kept by `resume` in the
consumer's process. The pickles in here are made and read by the processes of one loader alone. A state that
comes from a checkpoint is never unpickled: the consumer's process pickles the plain objects in it.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch._utils import ExceptionWrapper


class StreamState(NamedTuple):
    """Where one copy of an iterable dataset stands.

    Attributes:
        progress: Whether the copy was read at all in this epoch, and whether it has ended. A copy that has
            ended is not asked for its state, which may already mean the beginning of the next epoch.
            "unknown": its `state_dict()` raised, or gave something that cannot be pickled.
        data: With progress "begun": what the dataset's `state_dict()` gave, pickled.
        error: With progress "unknown": what was raised, as torch sends errors; from a worker it is pickled.
    """

    progress: Literal["not begun", "begun", "ended", "unknown"]
    data: bytes = b""
    error: bytes | ExceptionWrapper | None = None

    @classmethod
    def of(cls, state: Any) -> StreamState:
        """That of a copy whose `state_dict()` gave ``state``; later changes of ``state`` do not reach it."""
        return cls("begun", pickle.dumps(state))

    def load(self) -> Any:
        """A fresh object that is equal to what `state_dict()` gave, with progress "begun"."""
        return pickle.loads(self.data)

    def raise_error(self) -> None:
        """Raise anew what `state_dict()` raised, with progress "unknown"; else do nothing."""
        wrapper = pickle.loads(self.error) if isinstance(self.error, bytes) else self.error
        if wrapper is not None:
            wrapper.reraise()


NOT_BEGUN = StreamState("not begun")
ENDED = StreamState("ended")
