"""DecodeCache: what decoders made of files, found again while a dataset is read.

A dataset's code runs in full on every access; a reader asks the cache of its thread before it decodes. Rules:

1. No memory of the store reaches user code: whatever a reader returns is a private copy, writable or
   read-only as the library's own result.
2. A value is stored, and compared, only if its identity was equal before and after decoding.
3. A key that cannot be built is no cache, never an error. Whatever is not understood is decoded.
4. A share of the hits is decoded again and compared (`FASTLOAD_VERIFY`, 0.01 by default, 1 in the tests). A
   file whose decoder does not repeat itself is decoded each time from then on, in all processes; where the
   store has no room to say so, or is finished, in this one and its forks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from fastload.errors import DecodeMismatchError
from fastload.readers import reasons
from fastload.readers.identity import Identity, digest
from fastload.readers.lessons import Lessons
from fastload.system.cache_counts import cache_counts
from fastload.system.logs import say_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import numpy.typing as npt

VERIFY_VARIABLE = "FASTLOAD_VERIFY"
_VERIFY_SHARE = 0.01
_SOME_UNSTEADY = digest(reasons.UNSTEADY) or b""


C = TypeVar("C", "DecodeCache", None)


class Stored(NamedTuple):
    """What was stored of a file.

    Attributes:
        array: The pixels, in the store's memory: read-only, and for readers alone.
        note: Plain values that the reader stored beside them.
    """

    array: npt.NDArray[Any]
    note: Any


class DecodeStore(Protocol):
    """Keeps arrays under keys of 16 bytes; processes and threads share it."""

    @property
    def full_reason(self) -> str:
        """Why it does not keep what it has no room for; one of `reasons`."""
        ...

    def get(self, key: bytes) -> Stored | None:
        """What is stored under a key, if anything."""
        ...

    def put(self, key: bytes, array: npt.NDArray[Any], note: Any) -> bool:
        """Store an array and a note of plain values; False, as often as it likes, if it does not."""
        ...

    def has_room(self, nbytes: int) -> bool:
        """Whether it is worth preparing an array of this size for `put`."""
        ...

    def known_as(self, identity: Identity, source: Any) -> Identity | str:
        """The identity that belongs into the key of some bytes: one that lasts as long as the store.

        Args:
            identity: That of the source now.
            source: The path, or the file object; None for an identity of content.
        """
        ...


class DecodeCache:
    """The decoded files of datasets that are being read; `cache_counts` counts the accesses.

    Args:
        store: Where they are.
        verify_share: Which share of the hits is decoded again and compared; None: as FASTLOAD_VERIFY says.
        lessons: What is known of the images; None: nothing.

    Attributes:
        store: As given.
        lessons: As given.
    """

    def __init__(
        self, store: DecodeStore, verify_share: float | None = None, lessons: Lessons | None = None
    ) -> None:
        # Here: it imports torch, which the commands that manage caches do not need. And not later: a fork
        # hangs that needs what a thread was importing.
        from fastload.readers import results

        self._results = results
        self.store = store
        self.lessons = lessons or Lessons()
        self._verify_share = verify_share_of_environment() if verify_share is None else verify_share
        self._unverified = 0.0
        # Shared with forks: whether to ask the store, and which keys were met, by their first two bytes.
        self._some_unsteady, self._unsteady = mmap.mmap(-1, 1), mmap.mmap(-1, 1 << 16)
        self._some_unsteady[0] = store.get(_SOME_UNSTEADY) is not None

    def active(self) -> AbstractContextManager[DecodeCache]:
        """Let readers in this thread use the cache."""
        return _using(self)

    def find(self, key: bytes) -> Stored | None:
        """What is stored under a key; counts a hit."""
        stored = self.store.get(key)
        cache_counts.hits += stored is not None
        return stored

    def keep(self, key: bytes, array: npt.NDArray[Any], note: Any = None) -> None:
        """Store what was decoded; the array is copied. Counts a miss."""
        self.missed(reasons.NEW if self.store.put(key, array, note) else self.store.full_reason)

    def keep_made(self, key: bytes, nbytes: int, make: Callable[[], Any], note: Any = None) -> None:
        """Store ``nbytes`` that ``make`` returns, which is called only if there is room for them."""
        if self.store.has_room(nbytes):
            self.keep(key, make(), note)
        else:
            self.missed(self.store.full_reason)

    def missed(self, reason: str) -> None:
        """Count that something was decoded and not stored."""
        cache_counts.misses += 1
        cache_counts.reasons[reason] += 1

    def is_unsteady(self, key: bytes) -> bool:
        """Whether the decoder has returned other pixels for this key; counts a miss then."""
        if not self._some_unsteady[0]:
            return False
        is_met = self._unsteady[int.from_bytes(key[:2])]
        if not is_met and self.store.get(digest(reasons.UNSTEADY, key) or b"") is None:
            return False
        self.missed(reasons.UNSTEADY)
        return True

    def differs(self, key: bytes, where: Any) -> None:
        """Let a file be decoded each time from now on, and warn.

        Raises:
            DecodeMismatchError: All hits are compared, as in tests.
        """
        error = DecodeMismatchError(where)
        if self._verify_share >= 1:
            raise error
        for marker in (digest(reasons.UNSTEADY, key) or b"", _SOME_UNSTEADY):
            self.store.put(marker, np.zeros(1, np.uint8), None)
        self._some_unsteady[0] = self._unsteady[int.from_bytes(key[:2])] = 1
        say_once(f"cache: {error}. From now on it is decoded each time")

    def is_verification_due(self) -> bool:
        """Whether to decode this hit again and compare it; draws no random numbers."""
        self._unverified += self._verify_share
        if self._unverified < 1:
            return False
        self._unverified -= 1
        self._some_unsteady[0] |= self.store.get(_SOME_UNSTEADY) is not None  # another job's
        return True

    def array(
        self,
        kind: str,
        identify: Callable[[], Identity | str],
        arguments: tuple[Any, ...],
        source: Any,
        decode: Callable[[], Any],
    ) -> Any:
        """What ``decode`` returns, with memory of its own that the caller can write to.

        Args:
            kind: The function, and the versions of the libraries that its result depends on.
            identify: Called before and after decoding.
            arguments: All that decides the result beside the bytes.
            source: The path, or the file object; None for bytes in memory.
            decode: The library's own function.
        """
        identity = identify()
        known = identity if isinstance(identity, str) else self.store.known_as(identity, source)
        key = None if isinstance(known, str) else digest("result", kind, known.parts, arguments)
        if key is None:
            self.missed(known if isinstance(known, str) else reasons.UNUSUAL)
            return decode()
        if self.is_unsteady(key):
            return decode()
        stored = self.find(key)
        if stored is not None and not self.is_verification_due():
            try:
                return self._results.unpack(stored.array, stored.note)
            except (ValueError, TypeError, LookupError, RuntimeError, AttributeError):
                pass  # it is forged, or of a dtype that this release of torch lacks
        result = decode()
        packed = self._results.pack(result)
        if stored is not None:
            # The representations of notes, because NaN does not equal itself.
            is_same = packed and repr(packed[1]) == repr(stored.note) and is_equal(stored.array, packed[0])
            if not is_same and identify() == identity:  # else the file was replaced just now
                where = getattr(source, "name", source) if hasattr(source, "read") else source
                self.differs(key, kind if source is None else where)
        elif packed is None:
            self.missed(reasons.UNUSUAL)
        elif identify() != identity:
            self.missed(reasons.TOO_NEW)
        else:
            self.keep(key, *packed)
        return result


def is_equal(stored: npt.NDArray[Any], decoded: Any) -> bool:
    """Whether what is stored is what was just decoded."""
    return (
        type(decoded) is np.ndarray
        and decoded.dtype == stored.dtype
        and decoded.shape == stored.shape
        and decoded.tobytes() == stored.tobytes()  # NaN equals itself, and arrays have any layout
    )


def remembering(kind: str, ask: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """What makes the wrapper of a function whose results are remembered.

    Args:
        kind: As for `DecodeCache.array`.
        ask: Called with the arguments of a call; returns what `array` gets: ``identify``, ``arguments`` and
            ``source``; or the reason why the result is not remembered; None if that is not to be counted.
            Arguments that it does not know can raise.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            cache = current()
            if cache is None:
                return original(*args, **kwargs)
            try:
                asked = ask(*args, **kwargs)
            except (TypeError, ValueError, BufferError):
                asked = reasons.UNUSUAL

            def decode() -> Any:
                with inactive():
                    return original(*args, **kwargs)

            if type(asked) is tuple:
                identify, arguments, source = asked
                return cache.array(kind, identify, arguments, source, decode)
            if asked is not None:
                cache.missed(asked)
            return decode()

        return call

    return wrap


class _Thread(threading.local):
    cache: DecodeCache | None = None


_thread = _Thread()


def current() -> DecodeCache | None:
    """The cache that is active in this thread."""
    return _thread.cache


def activate(cache: DecodeCache | None) -> None:
    """Let all that this thread reads from now on use a cache, or none."""
    _thread.cache = cache


def inactive() -> AbstractContextManager[None]:
    """Let nothing be remembered in this thread."""
    return _using(None)


@contextlib.contextmanager
def _using(cache: C) -> Iterator[C]:
    before, _thread.cache = _thread.cache, cache
    try:
        yield cache
    finally:
        _thread.cache = before


def verify_share_of_environment() -> float:
    """The share in FASTLOAD_VERIFY.

    Raises:
        ValueError: It is not a number from 0 to 1.
    """
    text = os.environ.get(VERIFY_VARIABLE) or str(_VERIFY_SHARE)
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{VERIFY_VARIABLE}={text!r} is not a share: set it to a number from 0 to 1")
    return share
