"""Where one worker's copy of an iterable dataset stands, on its way between processes.

Made where samples are fetched (`fetch`, `worker`, the iterator without workers), and kept by `resume` in the
consumer's process. The pickles in here are made and read by the processes of one loader alone. A state that
comes from a checkpoint is never unpickled: the consumer's process pickles the plain objects in it.
"""

from __future__ import annotations

import pickle
from typing import Any, Literal, NamedTuple


class StreamState(NamedTuple):
    """Where one copy of an iterable dataset stands.

    Attributes:
        progress: Whether the copy was read at all in this epoch, and whether it has ended. A copy that has
            ended is not asked for its state, which may already mean the beginning of the next epoch.
        data: With progress "begun": what the dataset's `state_dict()` gave, pickled.
    """

    progress: Literal["not begun", "begun", "ended"]
    data: bytes = b""

    @classmethod
    def of(cls, state: Any) -> StreamState:
        """That of a copy whose `state_dict()` gave ``state``; later changes of ``state`` do not reach it."""
        return cls("begun", pickle.dumps(state))

    def load(self) -> Any:
        """A fresh object that is equal to what `state_dict()` gave, with progress "begun"."""
        return pickle.loads(self.data)


NOT_BEGUN = StreamState("not begun")
ENDED = StreamState("ended")
