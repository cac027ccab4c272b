"""DecodeCache: what decoders made of files, found again while a dataset is read.

A dataset's code runs in full on every access; a reader asks the cache of its thread before it decodes. Rules:

1. No memory of the store reaches user code: whatever a reader returns is a private copy, writable or
   read-only as the library's own result.
2. A value is stored, and compared, only if its identity was equal before and after decoding.
3. A key that cannot be built is no cache, never an error. Whatever is not understood is decoded.
4. A share of the hits is decoded again and compared (`FASTLOAD_VERIFY`, 0.01 by default, 1 in the tests). A
   file whose decoder does not repeat itself is decoded each time from then on, in all processes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from fastload.errors import DecodeMismatchError
from fastload.readers.identity import Identity, Unknown, digest
from fastload.readers.resizes import Resizes
from fastload.system.cache_counts import cache_counts
from fastload.system.logs import say_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import numpy.typing as npt

VERIFY_VARIABLE = "FASTLOAD_VERIFY"
_VERIFY_SHARE = 0.01
NEW = "new"
FULL = "no memory left for it"
NO_SPACE = "no space for it on the disk, or no right to write there"
UNUSUAL = "with a result or arguments that the cache does not know"
SEVERAL_FRAMES = "a later frame of several"
OTHER_FORMAT = "in a format that is not remembered"
UNSTEADY = "decoded to other pixels each time"
LEARNING = "resized first, which may not repeat"
UNCOMPRESSED = "uncompressed, or spread over several files"
_SOME_UNSTEADY = digest(UNSTEADY) or b""


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
    """Keeps arrays under keys of 16 bytes; processes and threads share it.

    A store that outlives this machine has a method ``known_as(identity, source)``, too, and its own
    `full_reason`; see `DecodedFiles`.
    """

    def get(self, key: bytes) -> Stored | None:
        """What is stored under a key, if anything."""
        ...

    def put(self, key: bytes, array: npt.NDArray[Any], note: Any) -> bool:
        """Store an array and a note of plain values; False, as often as it likes, if it does not."""
        ...

    def has_room(self, nbytes: int) -> bool:
        """Whether it is worth preparing an array of this size for `put`."""
        ...


class DecodeCache:
    """The decoded files of datasets that are being read; `cache_counts` counts the accesses.

    Args:
        store: Where they are.
        verify_share: Which share of the hits is decoded again and compared; None: as FASTLOAD_VERIFY says.
        resizes: What is known of the first resizes of images; None: nothing.

    Attributes:
        store: As given.
        resizes: As given.
        full_reason: Why the store does not keep what it has no room for.
    """

    def __init__(
        self, store: DecodeStore, verify_share: float | None = None, resizes: Resizes | None = None
    ) -> None:
        self.store = store
        self.resizes = resizes or Resizes()
        self.full_reason: str = getattr(store, "full_reason", FULL)
        self._known_as: Callable[[Identity, Any], Identity | Unknown] | None = getattr(
            store, "known_as", None
        )
        self._verify_share = verify_share_of_environment() if verify_share is None else verify_share
        self._unverified = 0.0
        self._some_unsteady = mmap.mmap(-1, 1)  # one byte: whether to ask for them; shared with forks
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
        self.missed(NEW if self.store.put(key, array, note) else self.full_reason)

    def keep_made(self, key: bytes, nbytes: int, make: Callable[[], Any], note: Any = None) -> None:
        """Store ``nbytes`` that ``make`` returns, which is called only if there is room for them."""
        if self.store.has_room(nbytes):
            self.keep(key, make(), note)
        else:
            self.missed(self.full_reason)

    def missed(self, reason: Unknown | str) -> None:
        """Count that something was decoded and not stored."""
        cache_counts.misses += 1
        cache_counts.reasons[reason.value if isinstance(reason, Unknown) else reason] += 1

    def known_as(self, identity: Identity | Unknown, source: Any) -> Identity | Unknown:
        """What belongs into the key of some bytes: their identity, in a form that lasts as long as the store.

        Args:
            identity: That of the source now.
            source: The path, or the file object; of no use to an identity of content.
        """
        if self._known_as is None or isinstance(identity, Unknown):
            return identity
        return self._known_as(identity, source)

    def is_unsteady(self, key: bytes) -> bool:
        """Whether the decoder has returned other pixels for this key; counts a miss then."""
        if not self._some_unsteady[0] or self.store.get(digest(UNSTEADY, key) or b"") is None:
            return False
        self.missed(UNSTEADY)
        return True

    def differs(self, key: bytes, error: DecodeMismatchError) -> None:
        """Let a file be decoded each time from now on, and warn.

        Raises:
            DecodeMismatchError: As given, if all hits are compared, as tests do.
        """
        if self._verify_share >= 1:
            raise error
        for marker in (digest(UNSTEADY, key) or b"", _SOME_UNSTEADY):
            self.store.put(marker, np.zeros(1, np.uint8), None)
        self._some_unsteady[0] = 1
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
        identify: Callable[[], Identity | Unknown],
        arguments: tuple[Any, ...],
        decode: Callable[[], Any],
        *,
        where: Any,
        source: Any,
    ) -> Any:
        """What ``decode`` returns, with memory of its own that the caller can write to.

        Args:
            kind: The function, and the versions of the libraries that its result depends on.
            identify: Called before and after decoding.
            arguments: All that decides the result beside the bytes.
            decode: The library's own function.
            where: The path or other source, for errors.
            source: As for `known_as`; a store on disk finds no file without it.
        """
        # Here: it imports torch, which the commands that manage caches do not need.
        from fastload.readers.results import pack, unpack

        identity = identify()
        known = self.known_as(identity, source)
        key = None if isinstance(known, Unknown) else digest("result", kind, known.parts, arguments)
        if key is None:
            self.missed(known if isinstance(known, Unknown) else UNUSUAL)
            return decode()
        if self.is_unsteady(key):
            return decode()
        stored = self.find(key)
        if stored is not None:
            if self.is_verification_due():
                result = decode()
                packed = pack(result)
                try:
                    if packed is None or repr(packed[1]) != repr(stored.note):  # NaN equals itself
                        raise DecodeMismatchError(where)
                    self.verify(stored.array, packed[0], where)
                except DecodeMismatchError as error:
                    if identify() == identity:  # else the file was replaced just now
                        self.differs(key, error)
                    return result
            return unpack(stored.array, stored.note)
        result = decode()
        packed = pack(result)
        if packed is None:
            self.missed(UNUSUAL)
        elif identify() != identity:
            self.missed(Unknown.TOO_NEW)
        else:
            self.keep(key, *packed)
        return result

    def verify(self, stored: npt.NDArray[Any], decoded: Any, where: Any) -> None:
        """Compare what is stored with what was just decoded.

        Raises:
            DecodeMismatchError: They differ.
        """
        if not (
            type(decoded) is np.ndarray
            and decoded.dtype == stored.dtype
            and decoded.shape == stored.shape
            and decoded.tobytes() == stored.tobytes()  # NaN equals itself, and arrays have any layout
        ):
            raise DecodeMismatchError(where)


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
