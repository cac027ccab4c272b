"""How far one worker's copy of an iterable dataset was read, in a picklable form, and how a copy gets there.

It is made where samples are fetched; `Position` keeps it in the consumer's process. Only the processes of one
loader make and read the pickles in it. A state from a checkpoint is never unpickled: the consumer's process
pickles the plain objects in it.
"""

from __future__ import annotations

import inspect
import itertools
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

from fastload.errors import ResumeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.system.remote_error import RemoteError


class DatasetState(NamedTuple):
    """How far one copy of an iterable dataset was read in an epoch.

    Attributes:
        num_batches: How many batches were read.
        has_ended: Whether the copy has ended. Its state is not requested then, because it can already mean
            the beginning of the next epoch.
        data: The pickled result of the dataset's `state_dict()`; empty if the dataset keeps no state.
        iterator: The pickled result of the `state_dict()` of the iterator that `iter(dataset)` returned;
            empty if it keeps no state, or is the dataset itself.
        error: The error of one of these, which the loader's `state_dict()` raises.
    """

    num_batches: int = 0
    has_ended: bool = False
    data: bytes = b""
    iterator: bytes = b""
    error: RemoteError | None = None

    @property
    def num_to_read_again(self) -> int:
        """How many batches must be read again to get there; 0 if there is a state to load."""
        return 0 if self.has_ended or self.data or self.iterator else self.num_batches

    def to_dict(self) -> dict[str, Any]:
        """The state as a dict of plain types, in which the user's states are new objects."""
        plain: dict[str, Any] = {"num_batches": self.num_batches, "has_ended": self.has_ended}
        for name, data in (("state", self.data), ("iterator", self.iterator)):
            if data:
                plain[name] = pickle.loads(data)
        return plain

    @classmethod
    def from_dict(cls, plain: Any) -> DatasetState:
        """The state of a dict of `to_dict`; runs no code from it."""
        data, iterator = (pickle.dumps(plain[key]) if key in plain else b"" for key in ("state", "iterator"))
        return cls(plain["num_batches"], plain["has_ended"], data, iterator)


NOT_BEGUN = DatasetState()
ENDED = DatasetState(has_ended=True)


def keeps_state(owner: Any) -> bool:
    """Whether it has a state_dict() and a load_state_dict() that fastload can call.

    Args:
        owner: A sampler, a dataset or an iterator.

    Some have methods of these names that need more arguments: litdata's `state_dict()` needs three. This
    function calls no user code.
    """
    for name, arguments in (("state_dict", ()), ("load_state_dict", ("a state",))):
        method = getattr(owner, name, None)
        if not callable(method):
            return False
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError:
            return False
        except ValueError:  # written in C, without a signature: calling it will show
            continue
    return True


class Stream:
    """One copy of an iterable dataset, as it is read in an epoch.

    Args:
        dataset: The dataset; this calls ``iter`` on it.
        state: Where it goes on; None: it begins, and its state is not requested.
        drop_last: Whether the last batch is left out if it is short.

    Attributes:
        samples: The iterator.
        num_batches: How many batches were read in this epoch.
        num_to_read_again: How many of them must be read again before the next one.
    """

    def __init__(self, dataset: Any, state: DatasetState | None, *, drop_last: bool) -> None:
        begin = NOT_BEGUN if state is None else state
        self.samples = _iterator_at(dataset, begin)
        # The dataset and its iterator, if their state is requested.
        owners: tuple[Any, Any] = (dataset, None if self.samples is dataset else self.samples)
        self._owners = [owner if state is not None and keeps_state(owner) else None for owner in owners]
        self._drop_last = drop_last
        self._has_ended = begin.has_ended
        self.num_batches = begin.num_batches
        self.num_to_read_again = begin.num_to_read_again

    def expect_more(self) -> None:
        """Raise StopIteration if the iterator has ended: some begin anew if they are asked again."""
        if self._has_ended:
            raise StopIteration

    def take(self, size: int, read: Callable[[Iterator[Any]], list[Any]] = list) -> list[Any]:
        """The samples of the next batch.

        Args:
            size: How many it has, if the iterator does not end before.
            read: Makes a list of the samples.

        Raises:
            StopIteration: There are no more.
        """
        # islice would call iter() first: a stream that is its own iterator can go back to its start.
        samples = read(map(next, itertools.repeat(self.samples, size)))
        self._has_ended = len(samples) < size
        if not samples or (self._drop_last and self._has_ended):
            raise StopIteration
        return samples

    def state(self) -> DatasetState:
        """How far it was read."""
        if self._has_ended:
            return ENDED
        data, iterator = (
            b"" if owner is None else pickle.dumps(owner.state_dict()) for owner in self._owners
        )
        return DatasetState(self.num_batches, data=data, iterator=iterator)


def _iterator_at(dataset: Any, state: DatasetState) -> Iterator[Any]:
    """Call ``iter`` on an iterable dataset, and make the iterator continue at the state.

    The state of the dataset is loaded before ``iter``, and again after it if the dataset is its own iterator
    and `__iter__` went back to the beginning.
    """
    if state.data:
        _load(dataset, state.data)
    samples: Any = iter(dataset)
    if state.data and samples is dataset and not _is_at(dataset, state):
        _load(dataset, state.data)
    if state.iterator:
        _load(samples, state.iterator)
    if state.data and hasattr(dataset, "_starting_state_dict"):
        return _begun_once(dataset, samples)
    iterator: Iterator[Any] = samples
    return iterator


def _load(owner: Any, data: bytes) -> None:
    if not keeps_state(owner):
        raise ResumeError(
            "the state has that of a dataset or of its iterator, but this one, a "
            f"{type(owner).__name__}, has no state_dict() and load_state_dict(): give the loader the same "
            "dataset as before"
        )
    owner.load_state_dict(pickle.loads(data))


def _is_at(dataset: Any, state: DatasetState) -> bool:
    """Whether the dataset says that it is at this state; False if the two cannot be compared."""
    try:
        return bool(dataset.state_dict() == pickle.loads(state.data))
    except Exception:  # noqa: BLE001  # tensors and arrays, or a state_dict() that fails at this moment
        return False


def _begun_once(dataset: Any, samples: Iterator[Any]) -> Iterator[Any]:
    """The samples of a stream of Hugging Face's, which would begin its later epochs at the state, too."""
    for sample in samples:
        dataset._starting_state_dict = None
        yield sample
    dataset._starting_state_dict = None
