"""Finished cache files with false content and right checksums, and a child process that opens them."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheCorruptError, CacheMismatchError
from tests.cache.zoo import Images
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

PAGE_BYTES = 4096
BRANCH, LEAF, BIG = 0x01, 0x02, 0x01  # LMDB's flags of pages, and of a node whose value lies elsewhere
ROOT_AT = 128  # in a meta page
_TRAILER = struct.Struct("<IQ8s")
_SPARE_BYTES = 1 << 30  # that a child may take beyond what it has when it starts
_PATIENCE_S = 60


class SmallSamples(Images):
    """Samples that lie in LMDB's tree itself: `(7 uint8, int)`."""

    def sample(self, index: int) -> Any:
        return np.full(7, index % 251, np.uint8), index


class Forgery:
    """A finished file, taken apart: `body` is LMDB's environment, `fields` the description; change them."""

    def __init__(self, content: bytes) -> None:
        _, length, self._magic = _TRAILER.unpack(content[-_TRAILER.size :])
        end = len(content) - _TRAILER.size - length
        self.body = bytearray(content[:end])
        self.fields: dict[str, Any] = json.loads(content[end : -_TRAILER.size])

    def sealed(self, text: bytes | None = None) -> bytes:
        """The file with right checksums; `text` is the description, in place of the fields."""
        if text is None:
            text = json.dumps(self.fields).encode()
        return bytes(self.body) + text + _TRAILER.pack(zlib.crc32(text), len(text), self._magic)

    def seal_tree(self) -> None:
        """Let the description state the right checksum of the tree."""
        crc = 0
        for first, count in self.fields["tree_runs"]:
            crc = zlib.crc32(self.body[first * PAGE_BYTES : (first + count) * PAGE_BYTES], crc)
        self.fields["tree_crc32"] = crc

    def pages(self, flags: int) -> list[int]:
        """Offsets of the live pages of one kind that the newest state refers to."""
        level = [self.root * PAGE_BYTES]
        for at in level:
            if self.u16(at + 10) == BRANCH:
                level += [self.u32(node) * PAGE_BYTES for node in self.nodes(at)]
        return [at for at in level if self.u16(at + 10) == flags]

    @property
    def meta(self) -> int:
        """Offset of the meta page of the newest state."""
        return max((struct.unpack_from("=Q", self.body, at + 144)[0], at) for at in (0, PAGE_BYTES))[1]

    @property
    def root(self) -> int:
        """Number of the root page."""
        return int(struct.unpack_from("=Q", self.body, self.meta + ROOT_AT)[0])

    @property
    def first_overflow(self) -> int:
        """Number of the page at which the first record lies that is not in the tree."""
        return self.u32(self.nodes(self.pages(LEAF)[0])[0] + 16)

    def nodes(self, page_at: int) -> list[int]:
        """Offsets of the nodes on a page."""
        count = (self.u16(page_at + 12) - 16) // 2
        return [page_at + self.u16(page_at + 16 + 2 * number) for number in range(count)]

    def u16(self, at: int) -> int:
        return int(struct.unpack_from("=H", self.body, at)[0])

    def u32(self, at: int) -> int:
        return int(struct.unpack_from("=I", self.body, at)[0])

    def put(self, form: str, at: int, *values: int) -> None:
        """Write numbers as struct does, in native order."""
        struct.pack_into(f"={form}", self.body, at, *values)


def forge(path: Path, change: Callable[[Forgery], Any], *, tree: bool = False) -> None:
    """Replace a file by a changed one with right checksums, of the `tree` too; a new file, as a copy is."""
    forgery = Forgery(path.read_bytes())
    text = change(forgery)
    if tree:
        forgery.seal_tree()
    path.unlink()
    path.write_bytes(forgery.sealed(text if isinstance(text, bytes) else None))


class Reader:
    """A child process that opens caches and compares all samples: what ends it ends no test run."""

    def __init__(self, expected: list[Any]) -> None:
        self._expected = expected
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, other = context.Pipe()
        self._child = context.Process(target=_serve, args=(other, self._connection, self._expected))
        self._child.start()
        other.close()

    def read(self, path: Path) -> str:
        """`"right"`, `"refused"`, or `"damaged"` if samples raised; AssertionError for anything else."""
        self._connection.send(str(path))
        try:
            assert self._connection.poll(_PATIENCE_S), "the child hangs"
            answer: str = self._connection.recv()
        except EOFError:
            self._child.join()
            answer = f"the child ended with {self._child.exitcode}"
            self.close()
            self._start()  # hypothesis goes on, to find a simpler case
        assert answer in ("right", "refused", "damaged"), answer
        return answer

    def close(self) -> None:
        """End the child."""
        self._connection.close()
        self._child.join()
        self._child.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(connection: Connection, others: Connection, expected: list[Any]) -> None:
    others.close()  # else the end of the parent would go unnoticed
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _SPARE_BYTES,) * 2)
    while True:
        try:
            path = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = _read_all(path, expected)
        except BaseException as error:  # noqa: BLE001 - any error is what the test looks for
            answer = f"{type(error).__name__}: {error}"
        connection.send(answer)


def _read_all(path: str, expected: list[Any]) -> str:
    try:
        cache = LMDBCache(path)
    except (CacheCorruptError, CacheMismatchError) as error:
        return _if_named(path, error, "refused")
    answers = {"right"}
    for start in range(0, len(expected), 5):
        indices = np.arange(start, min(start + 5, len(expected)))
        try:
            batch = cache.gather(indices, np.empty)
        except CacheCorruptError as error:
            answers.add(_if_named(path, error, "damaged"))
            continue
        if batch is not None:
            assert_same_samples(batch[0].numpy(), np.stack([expected[index][0] for index in indices]))
            assert batch[1].tolist() == indices.tolist()
    for index, sample in enumerate(expected):
        try:
            assert_same_samples(cache.get(index), sample)
        except CacheCorruptError as error:
            answers.add(_if_named(path, error, "damaged"))
    assert cache.num_samples == len(expected)
    cache.close()
    return max(answers, key=("right", "damaged", "an error that does not name the file").index)


def _if_named(path: str, error: Exception, answer: str) -> str:
    return answer if path in str(error) else "an error that does not name the file"
