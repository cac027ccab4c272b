"""DecodedFiles: what readers store of files, as records in any store: the array, and the note as a literal.

Rules for stores that outlive this system:

1. A file is known by the SHA-256 of its content, and by nothing of this machine: no device, no inode. Bytes
   in memory are known so anyway.
2. So that a file is not read each time to be known, its hash is stored once, as a record, for its path,
   inode, size, mtime and ctime together: under b"c" and the digest of these. The path is relative to the
   folder of the store if the file is below it. A file of which one of these is another one, such as a copy,
   is read and hashed, and its pixels are found again.
3. A hash is stored only if the file was the same, and unchanged for a while, before and after reading it (see
   `readers.identity`).
4. A damaged record is decoded again, and replaced.
"""

from __future__ import annotations

import ast
import marshal
import os
import platform
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.lmdb_store import LmdbStore, open_store
from fastload.cache.records import decode, is_intact, record_parts
from fastload.cache.store import FILE_KEY_BYTES
from fastload.errors import CacheError, CacheMismatchError, UnsupportedSampleError
from fastload.nested.spec import flatten
from fastload.readers.decode_cache import Stored
from fastload.readers.identity import (
    AS_FILE,
    MAX_FILE_BYTES,
    Identity,
    digest,
    hash_of,
    identify_descriptor,
    is_plain,
)
from fastload.readers.reasons import NOT_A_FILE, TOO_LARGE, TOO_NEW

if TYPE_CHECKING:
    import numpy.typing as npt

    from fastload.cache.store import Store

KIND = "files"
_CONTENT = b"c"
_MACHINE = platform.machine()  # floats differ between processors of different kinds
_MAX_HASHED = 1 << 17  # contents that a process keeps in mind
_SHORT_BYTES = 256  # the notes of most files are short, and equal


def open_files(path: str) -> LmdbStore:
    """The store of decoded files on disk, which is made if there is none; its folder must exist.

    Raises:
        CacheMismatchError: Something else is at the path.
        CacheCorruptError: It is damaged.
        CacheError: It cannot be made or read.
    """
    store = open_store(path, {"kind": KIND})
    if store.meta.get("kind", KIND) != KIND:
        raise CacheMismatchError(
            f"{path} is a cache of samples, read it with fastload.CachedDataset(dataset, "
            f"cache={'lmdb:' + path!r}), or use a different path for decoded files"
        )
    return store


def count_files(store: LmdbStore) -> tuple[int, int]:
    """How many results of decoding are stored on disk, and how many files are known: one can have several."""
    keys = store.all_keys()
    num_cached = sum(len(key) == FILE_KEY_BYTES for key in keys)
    return num_cached, len(keys) - num_cached


class DecodedFiles:
    """A `DecodeStore` over a `Store`.

    Args:
        store: Where the records are.

    Attributes:
        store: As given.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.full_reason = store.full_reason
        self.has_room = store.has_room
        # As the kernel names files.
        self._root = os.path.join(os.path.dirname(os.path.realpath(getattr(store, "path", ""))), "")
        self._hashed: dict[bytes, bytes] = {}  # contents, by identities of files on this system

    def get(self, key: bytes) -> Stored | None:
        """What is stored under a key, if anything; what is damaged is not."""
        value = self._value(key)
        if value is None:
            return None
        try:
            array, text = value
            note = marshal.loads(_note(text)) if len(text) <= _SHORT_BYTES else _parsed(text)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # something else wrote it
            return None
        return Stored(array, note) if isinstance(array, np.ndarray) else None

    def _value(self, key: bytes) -> Any:
        record = self.store.get(key)
        if record is None:
            return None
        if not self.store.lasts or is_intact(record, key):
            try:  # faster than contextlib.suppress
                return decode(record)
            except CacheError:
                pass
        if isinstance(self.store, LmdbStore):
            self.store.discard(key)
        return None

    def put(self, key: bytes, array: npt.NDArray[Any], note: Any) -> bool:
        """Store an array and a note of plain values; False if they are not kept, or would not come back."""
        if type(array) is not np.ndarray or not is_plain(note):
            return False
        try:
            return self._put(key, (array, ascii(note).encode("ascii")))
        except ValueError:  # an int of thousands of digits
            return False

    def _put(self, key: bytes, value: Any) -> bool:
        try:
            parts, _ = record_parts(*flatten(value), key if self.store.lasts else None)
        except UnsupportedSampleError:
            return False
        return self.store.put(key, parts)

    def known_as(self, identity: Identity, source: Any) -> Identity | str:
        """The identity by which a file is known in the store: by content if the store outlives this system.

        Args:
            identity: Of `source` now.
            source: A path, or a file object that reads a file; not used if the identity is one of content.
        """
        if not self.store.lasts:
            return identity
        if identity.is_of_content:
            return Identity((*identity.parts, _MACHINE))
        try:
            if hasattr(source, "fileno"):
                return self._known_as(identity, source.fileno())
            fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                same = identify_descriptor(fd) == identity
                return self._known_as(identity, fd) if same else TOO_NEW
            finally:
                os.close(fd)
        except (OSError, ValueError, TypeError):  # it was deleted or closed just now
            return NOT_A_FILE

    def _known_as(self, identity: Identity, fd: int) -> Identity | str:
        size = identity.parts[2]
        if int(size) > MAX_FILE_BYTES:
            return TOO_LARGE
        memo = digest(*identity.parts) or b""  # of plain values, so there is one
        content = self._hashed.get(memo)
        if content is None:
            path = os.readlink(f"/proc/self/fd/{fd}").removeprefix(self._root)  # as the kernel names it
            key = _CONTENT + (digest("file", path, *identity.parts[1:5]) or b"")
            content = self._value(key)
            if not isinstance(content, bytes):
                content = hash_of(fd)
                if identify_descriptor(fd) != identity:
                    return TOO_NEW
                self._put(key, content)
            if len(self._hashed) >= _MAX_HASHED:
                self._hashed.clear()
            self._hashed[memo] = content
        return Identity((content, size, AS_FILE, _MACHINE))


class _Floats(ast.NodeTransformer):
    """Lets a literal have the floats that Python writes as names: inf and nan."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(float(node.id))


def _parsed(text: bytes) -> Any:
    return ast.literal_eval(_Floats().visit(ast.parse(text, mode="eval")))


@lru_cache(maxsize=4096)
def _note(text: bytes) -> bytes:
    """A note as `marshal` reads it, much faster than a literal, and anew for each caller."""
    return marshal.dumps(_parsed(text))
