"""The position of one worker's copy of a dataset, in a picklable form, and how a copy gets there.

It is made where samples are fetched; `Position` keeps it in the consumer's process. Only the processes of one
loader make and read the pickles in it. A state from a checkpoint is never unpickled: the consumer's process
pickles the plain objects in it.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import pickle
import weakref
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastload.errors import BatchLostError, ResumeError
from fastload.system.checks import integer
from fastload.system.notes import short_repr

if TYPE_CHECKING:
    from collections.abc import Iterator

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

    def to_dict(self) -> dict[str, Any]:
        """The position as a dict of plain types, in which the user's states are new objects."""
        plain: dict[str, Any] = {"progress": self.progress}
        if self.data:
            plain["state"] = self.load()
        if self.iterator:
            plain["iterator"] = self.load_iterator()
        if self.progress == "begun" and not self.has_state:
            plain["num_batches"] = self.num_batches
        return plain

    @classmethod
    def from_dict(cls, plain: Any) -> DatasetState:
        """The position of a dict of `to_dict`; runs no code from it.

        Raises:
            Exception: It is not such a dict.
        """
        for mark in (NOT_BEGUN, ENDED):
            if plain["progress"] == mark.progress:
                return mark
        if plain["progress"] != "begun" or plain.keys().isdisjoint(("state", "iterator", "num_batches")):
            raise ValueError(f"{short_repr(plain)} should say how far the dataset was read")
        data, iterator = (pickle.dumps(plain[key]) if key in plain else b"" for key in ("state", "iterator"))
        num_batches = integer(0, 1 << 63)(plain.get("num_batches", 0))
        return cls("begun", data, iterator=iterator, num_batches=num_batches)

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


class DatasetReader:
    """One copy of a dataset: it begins at a state, and tells its state.

    Args:
        dataset: The dataset; this calls ``iter`` on an iterable one.
        is_iterable: Whether it is iterable-style.
        state: The state from which it resumes; None: from its beginning, and its state is not requested.

    Attributes:
        samples: The iterator of an iterable dataset; None for a map-style one.
        has_ended: Whether the iterator has ended.
        num_batches: How many batches were read from the copy in this epoch.
        num_to_read_again: How many of them must be read again before the next one.
    """

    def __init__(self, dataset: Any, *, is_iterable: bool, state: DatasetState | None) -> None:
        self.samples: Any = None
        loads = state is not None and bool(state.data)
        if is_iterable:
            before = _attributes(dataset) if loads else None
            self.samples = _iterator_at(dataset, state)
        elif state is not None and loads:
            dataset.load_state_dict(state.load())
        self._is_own_iterator = self.samples is None or self.samples is dataset
        # The dataset and its iterator, if their state is requested.
        owners = (dataset, None if self.samples is dataset else self.samples)
        self._owners = [owner if state is not None and keeps_state(owner) else None for owner in owners]
        if is_iterable and self._owners[0] is not None and self._owners[1] is None:
            self.samples = _watched(dataset, self.samples, before)
        self.has_ended = state == ENDED
        self.num_batches = 0 if state is None else state.num_batches
        self.num_to_read_again = state.num_to_read_again if is_iterable and state is not None else 0

    def state(self) -> DatasetState:
        """The current state of an iterable dataset, or of a map-style dataset that has a state_dict()."""
        if self.has_ended:
            return ENDED
        data, iterator = (
            b"" if owner is None else pickle.dumps(owner.state_dict()) for owner in self._owners
        )
        return DatasetState("begun", data, None, iterator, self.num_batches)

    @property
    def has_first_state(self) -> bool:
        """Whether the state before the first batch says more than that nothing was read.

        The state of a stream that makes an iterator without a state is not requested: it might not be valid
        before the first sample was read, and a new iterator starts at the same place.
        """
        dataset, iterator = self._owners
        return not self.has_ended and (
            iterator is not None or (self._is_own_iterator and dataset is not None)
        )

    def read_again(self, size: int, *, drop_last: bool) -> Iterator[list[Any]]:
        """Read the batches of a stream without a state that the caller has received before the resume.

        Args:
            size: Of a batch.
            drop_last: Whether the last batch is left out if it is short.

        Raises:
            ResumeError: The stream has fewer batches now.
        """
        count, self.num_to_read_again = self.num_to_read_again, 0
        for number in range(count):
            try:
                # islice would call iter() first: a stream that is its own iterator can go back to its start.
                samples = list(map(next, itertools.repeat(self.samples, size)))
            except Exception:  # noqa: BLE001  # the caller got this error instead of the batch
                continue
            if not samples or (drop_last and len(samples) < size):
                raise ResumeError(
                    f"a stream without a state is resumed by reading {count} batches again, but it ended "
                    f"after {number}: it must return the same samples in the same order as before"
                )
            self.has_ended = len(samples) < size
            yield samples


def _iterator_at(dataset: Any, state: DatasetState | None) -> Iterator[Any]:
    """Call ``iter`` on an iterable dataset, and make the iterator continue at the state.

    The state of the dataset is loaded before ``iter``. If the dataset is its own iterator, and `__iter__`
    went back to the beginning or needs to come first, the state is loaded again after it.
    """
    if state is None or not state.has_state:
        return iter(dataset)
    early_error: Exception | None = None
    if state.data:
        try:
            dataset.load_state_dict(state.load())
        except Exception as error:  # noqa: BLE001  # raised below, unless `__iter__` has to come first
            early_error = error
    samples: Any = iter(dataset)
    if state.data and samples is dataset and (early_error is not None or not _is_at(dataset, state)):
        dataset.load_state_dict(state.load())
    elif early_error is not None:
        raise early_error
    if state.iterator:
        if not keeps_state(samples):
            raise ResumeError(
                "the state has the position of an iterator with a state_dict(), but iter(dataset) now "
                f"returns a {type(samples).__name__} without one: give the loader the same dataset as before"
            )
        samples.load_state_dict(state.load_iterator())
    iterator: Iterator[Any] = samples
    return iterator


def _is_at(dataset: Any, state: DatasetState) -> bool:
    """Whether the dataset says that it is at this state; False if the two cannot be compared."""
    try:
        return bool(dataset.state_dict() == state.load())
    except Exception:  # noqa: BLE001  # tensors and arrays, or a state_dict() that fails at this moment
        return False


# --- streams that begin each epoch at the state that they loaded last ------------------------------------
#
# Hugging Face's do, and streams that wrap one: their later epochs would lack what came before the state. If
# an epoch is found to begin where the resumed one did, the attributes that `load_state_dict` had set get
# their values back, and the epoch begins anew. Streams whose state goes on with the epochs are left alone.

_Attributes = dict[
    tuple[int, str], tuple[dict[str, Any], Any]
]  # a `__dict__` and a value in it, by its place
_ABSENT: Any = object()
_MAX_PARTS = 100  # of a list or dict that are looked at


class _Resumed(NamedTuple):
    """What a stream was before it loaded a state, and where it stood after a sample since; LOST: unknown."""

    changed: _Attributes
    first: DatasetState


_resumed: weakref.WeakKeyDictionary[Any, _Resumed] = weakref.WeakKeyDictionary()


def _attributes(owner: Any, found: _Attributes | None = None) -> _Attributes:
    """The attributes of a stream, and of the parts in them that have states of their own."""
    found = {} if found is None else found
    attributes = getattr(owner, "__dict__", {})
    for name, value in list(attributes.items()):
        place = id(attributes), name
        if place in found:
            continue
        found[place] = attributes, value
        parts = value.values() if isinstance(value, dict) else value
        for part in (
            itertools.islice(parts, _MAX_PARTS) if isinstance(value, (dict, list, tuple)) else [value]
        ):
            if keeps_state(part):
                _attributes(part, found)
    return found


def _watched(dataset: Any, samples: Iterator[Any], before: _Attributes | None) -> Iterator[Any]:
    """The samples of an epoch, watched if a state was loaded for this one, or for the last one.

    Args:
        dataset: A stream with a state.
        samples: Its iterator.
        before: What it was before it loaded a state for this epoch; None: it has not.
    """
    try:
        resumed = _resumed.get(dataset)
    except TypeError:  # without a hash or weak references nothing can be noted
        return samples
    if before is not None:
        changed = {
            place: (attributes, before.get(place, (None, _ABSENT))[1])
            for place, (attributes, value) in _attributes(dataset).items()
            if place not in before or before[place][1] is not value
        }
        changed |= {} if resumed is None else resumed.changed
        resumed = _resumed[dataset] = _Resumed(changed, LOST)
    return samples if resumed is None else _WatchedSamples(dataset, samples)


class _WatchedSamples:
    """Looks where a stream stands after its first sample, in a resumed epoch and in the next one."""

    def __init__(self, dataset: Any, samples: Iterator[Any]) -> None:
        self._dataset = dataset
        self._samples = samples
        self._is_first = True

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._is_first:
            return next(self._samples)
        sample, error = _ABSENT, None
        try:
            sample = next(self._samples, _ABSENT)
        except Exception as raised:  # noqa: BLE001  # a stream can go on after it, so it counts as a sample
            error = raised
        self._is_first = False
        has_ended = sample is _ABSENT and error is None
        resumed = _resumed.pop(self._dataset, None)
        if resumed is not None and resumed.first is LOST:
            with contextlib.suppress(Exception):  # of a state_dict() that fails at this moment
                first = ENDED if has_ended else DatasetState.of(self._dataset.state_dict())
                _resumed[self._dataset] = resumed._replace(first=first)
        elif resumed is not None and (
            resumed.first is ENDED if has_ended else _is_at(self._dataset, resumed.first)
        ):
            for (_, name), (attributes, value) in resumed.changed.items():
                attributes.pop(name, None) if value is _ABSENT else attributes.update({name: value})
            self._samples = iter(self._dataset)
            return next(self._samples)
        if error is not None:
            raise error
        if has_ended:
            raise StopIteration
        return sample
