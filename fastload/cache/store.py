"""Store: keeps records under keys of a few bytes, for all threads and processes that share it.

Readers and samples know nothing of memory or files, and a store knows nothing of samples. Rules:

1. A record is found whole or not at all, and stays as it is: a key that is stored is not stored again.
2. Whatever goes wrong with memory, a disk or a file is a miss or False, and at most one line of log, never an
   error of the training. Damage is reported by whoever reads the record.
3. A store can be used in any thread, across forks, and pickled to other processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

INDEX_BYTES = 8  # a key by sample: its index, big-endian
FILE_KEY_BYTES = 16  # a key by file: a digest


def index_key(index: int) -> bytes:
    """The key of a sample."""
    return index.to_bytes(INDEX_BYTES, "big")


class Store(Protocol):
    """What every store can do.

    Attributes:
        lasts: Whether it outlives this system: its records were on a disk, so whoever reads one checks it.
        salt: What the checksums of samples cover before their keys; None: records are read without a check.
        full_reason: Why it does not keep what it has no room for.
    """

    lasts: bool
    full_reason: str

    @property
    def salt(self) -> bytes | None:
        """As above."""
        ...

    @property
    def max_bytes(self) -> int | None:
        """The most that it takes; None: what the disk has."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes in use now."""
        ...

    def get(self, key: bytes) -> memoryview | None:
        """The record under a key, if there is one.

        It is read-only memory of the store, or memory of the caller's own, and stays valid and unchanged for
        as long as somebody refers to it.
        """
        ...

    def lend(self, keys: Sequence[bytes], use: Callable[[list[memoryview | None]], Any]) -> Any:
        """Call a function with the records under some keys, which are valid until it returns."""
        ...

    def put(self, key: bytes, parts: Sequence[Any]) -> bool:
        """Store a record, given as buffers that follow one another; False if it is not kept.

        Others find it now, or after `flush`. The buffers are not referred to afterwards.
        """
        ...

    def flush(self) -> object:
        """Let others find all that was put."""
        ...

    def holds(self, keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Which keys are stored, `(n,) bool`, of keys `(n, key_bytes) uint8`."""
        ...

    def has_room(self, nbytes: int) -> bool:
        """Whether it is worth preparing a record of this size for `put`."""
        ...

    def close(self) -> None:
        """Flush, and release this process's resources; records that were handed out stay valid."""
        ...
