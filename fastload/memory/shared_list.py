"""SharedList: picklable records in one segment of shared memory, instead of a list of Python objects.

Reading an object of a list changes its reference count, and so its page. So a forked worker ends up with a
copy of every page of the list that it reads; a spawned worker gets a copy of the whole list at once. Bytes in
shared memory have no reference counts, and all processes map the same pages.

The memory holds the pickled items one after another, then the offsets where they begin and end, then the
number of items, both int64. It is never written again, and freed with the last list, in any process, that
holds the segment.
"""

from __future__ import annotations

import os
import pickle
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import reduction
from typing import Any, TypeVar, overload

from fastload.errors import SharedMemoryError
from fastload.memory.segment import Segment, why_unsupported, with_limit
from fastload.system.checks import check_iterable
from fastload.system.humanize import readable_size
from fastload.system.notes import short_repr

T = TypeVar("T")

_CHUNK_BYTES = 1 << 20  # what is written at once
_OFFSET_BYTES = 8
_PROTOCOL = 5


class SharedList(Sequence[T]):
    """A read-only list of picklable records that all processes share: paths, labels, annotations, captions.

    Forked and spawned workers read it without a copy. Each access unpickles one item, in a microsecond or
    two for a small dict, and returns a new object: changing that object does not change the list. A slice is
    a `SharedList` that shares the memory; `SharedList(records[:10])` copies ten items into new memory.

    The list holds anonymous shared memory, which is freed with the last list or slice in any process.
    multiprocessing (workers at their start, queues, pipes, pools) sends a handle of that memory. Any other
    pickle, as in a checkpoint, holds all records of the memory, so it can be loaded at any time and on any
    host, into new shared memory.

    Args:
        items: The records, read once and one at a time.

    Raises:
        TypeError: `items` is no iterable, or an item cannot be pickled; the message has its index.
        SharedMemoryError: The memory could not be allocated, or this system has no anonymous shared memory.
    """

    __slots__ = ("__weakref__", "_numbers", "_records")

    def __init__(self, items: Iterable[T]) -> None:
        check_iterable("items", items, "records")
        self._records = _Records(_stored(_chunks(items)))
        self._numbers = range(self._records.num_items)  # of the records that are the items of this list

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, which a list and its slices share."""
        return self._records.nbytes

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> SharedList[T]: ...
    def __getitem__(self, index: int | slice) -> T | SharedList[T]:
        if isinstance(index, slice):
            return _view(self._records, self._numbers[index])
        try:
            number = self._numbers[index]
        except IndexError:
            raise IndexError(f"index {index} is out of range for {len(self):,} items") from None
        item: T = self._records.read(number)
        return item

    def __iter__(self) -> Iterator[T]:
        return map(self._records.read, self._numbers)

    def __repr__(self) -> str:
        return f"<SharedList of {len(self):,} items in {readable_size(self.nbytes)} of memory>"

    def __deepcopy__(self, memo: Any) -> SharedList[T]:
        return self  # it never changes

    def __reduce__(self) -> tuple[Any, ...]:
        return _view, (self._records, self._numbers)


def _view(records: _Records, numbers: range) -> SharedList[Any]:
    view: SharedList[Any] = SharedList.__new__(SharedList)
    view._records, view._numbers = records, numbers
    return view


class _Records:
    """The memory of a list and of its slices, mapped in this process.

    Args:
        memory: The segment, which this object owns from here on.
    """

    def __init__(self, memory: Segment) -> None:
        self._memory = memory
        weakref.finalize(self, memory.close).atexit = False
        self._bytes = memoryview(memory.map(writable=False))
        self.nbytes = len(self._bytes)
        self.num_items: int = self._bytes[-_OFFSET_BYTES:].cast("q")[0]
        self._offsets = self._bytes[-_OFFSET_BYTES * (self.num_items + 2) : -_OFFSET_BYTES].cast("q")

    def read(self, number: int) -> Any:
        """A new copy of a record."""
        return pickle.loads(self._bytes[self._offsets[number] : self._offsets[number + 1]])

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (bytes(self._bytes),)

    def reduce_to_handle(self) -> tuple[Any, ...]:
        """As `__reduce__`, for a process of this run, which maps the same memory."""
        return _Records, (self._memory,)


# As torch does for tensors: what multiprocessing pickles is shared, what other code pickles is stored.
reduction.ForkingPickler.register(_Records, _Records.reduce_to_handle)


def _loaded(data: bytes) -> _Records:
    """The memory of a list that was pickled with its records; new, but shared from here on."""
    return _Records(_stored([data]))


def _stored(chunks: Iterable[bytes]) -> Segment:
    """New memory with these bytes."""
    reason = why_unsupported()
    if reason is not None:
        raise SharedMemoryError(f"a SharedList needs shared memory, but {reason}: use a list instead")
    segment = Segment.create(0, name="fastload-list")
    nbytes = 0
    try:
        for chunk in chunks:
            try:
                segment.write(chunk, nbytes)
            except OSError as error:
                raise SharedMemoryError(
                    f"cannot grow a SharedList beyond {nbytes:,} bytes: {with_limit(error)}"
                ) from error
            nbytes += len(chunk)
        os.ftruncate(segment.fd, nbytes)  # the number of items comes last
    except BaseException:
        segment.close()
        raise
    segment.nbytes = nbytes
    return segment


def _chunks(items: Iterable[Any]) -> Iterator[bytes]:
    """The bytes of a list's memory, in pieces."""
    offsets, chunk = array("q", [0]), bytearray()
    for index, item in enumerate(items):
        try:
            record = pickle.dumps(item, _PROTOCOL)
        except Exception as error:
            raise TypeError(
                f"a SharedList holds picklable items, but item {index:,} cannot be pickled "
                f"({type(error).__name__}: {error}): {short_repr(item)}"
            ) from error
        offsets.append(offsets[-1] + len(record))
        chunk += record
        if len(chunk) >= _CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    offsets.append(len(offsets) - 1)
    yield from (bytes(chunk), offsets.tobytes())
