"""The position of one worker's copy of a dataset, in a picklable form.

It is made where samples are fetched (`fetch`, `worker`, the iterator without workers); `resume` keeps it in
the consumer's process. Only the processes of one loader make and read the pickles in it. A state from a
checkpoint is never unpickled: the consumer's process pickles the plain objects in it.
"""

from __future__ import annotations

import inspect
import pickle
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastload.errors import BatchLostError

if TYPE_CHECKING:
    from fastload.system.remote_error import RemoteError


class DatasetState(NamedTuple):
    """The position of one copy of an iterable dataset, or the state of one copy of a map-style dataset.

    Attributes:
        progress: Whether this epoch has read from the copy, and whether the copy has ended. The state of an
            ended copy is not requested, because it can already mean the beginning of the next epoch.
            "unknown": its `state_dict()` raised, or returned something that cannot be pickled, or the state
            was lost in transit.
        data: With progress "begun": the pickled result of the dataset's `state_dict()`; empty if the dataset
            keeps no state.
        error: With progress "unknown": the error; None if the state was lost.
        iterator: With progress "begun": the pickled result of the `state_dict()` of the iterator that
            `iter(dataset)` returned; empty if it keeps no state, or is the dataset itself.
        num_batches: With progress "begun": how many batches were read from the copy in this epoch.
    """

    progress: Literal["not begun", "begun", "ended", "unknown"]
    data: bytes = b""
    error: RemoteError | None = None
    iterator: bytes = b""
    num_batches: int = 0

    @property
    def num_to_read_again(self) -> int:
        """How many batches must be read again to get to this position; 0 if there is a state to load."""
        return self.num_batches if self.progress == "begun" and not (self.data or self.iterator) else 0

    @property
    def has_state(self) -> bool:
        """Whether there is a state to load."""
        return bool(self.data or self.iterator)

    @classmethod
    def of(cls, state: Any) -> DatasetState:
        """The position of a copy whose `state_dict()` returned ``state``; ``state`` is copied."""
        return cls("begun", pickle.dumps(state))

    def load(self) -> Any:
        """With `data`: a new object that is equal to the result of the dataset's `state_dict()`."""
        return pickle.loads(self.data)

    def load_iterator(self) -> Any:
        """With `iterator`: a new object that is equal to the result of the iterator's `state_dict()`."""
        return pickle.loads(self.iterator)

    def raise_error(self) -> None:
        """With progress "unknown": raise the error of `state_dict()` again; else do nothing.

        Raises:
            BatchLostError: The state was lost together with its batch.
        """
        if self.error is not None:
            self.error.reraise()
        if self.progress == "unknown":
            raise BatchLostError(
                "the state of the dataset is unknown: it was lost with a batch, whose error said why; the "
                "next batch of the same worker brings a new state"
            )


NOT_BEGUN = DatasetState("not begun")
ENDED = DatasetState("ended")
LOST = DatasetState("unknown")


def keeps_state(owner: Any) -> bool:
    """Whether it has a state_dict() and a load_state_dict() that fastload can call.

    Args:
        owner: A sampler, a dataset or an iterator.

    Some have methods of these names that need more arguments: litdata's `state_dict()` needs three. This
    function calls no user code.
    """
    return _accepts(getattr(owner, "state_dict", None)) and _accepts(
        getattr(owner, "load_state_dict", None), "a state"
    )


def _accepts(method: Any, *arguments: Any) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:  # it needs different arguments
        return False
    except ValueError:  # written in C, without a signature: calling it will show
        return True
    return True
