"""Reads the positions of a file's values from LMDB's tree, and checks every number in the tree.

The tree's checksum detects accidents. A file from an untrusted source can hold a tree with the right checksum
that refers to places outside the file; LMDB would access them, which kills the process. So fastload does not
read finished files through LMDB: it walks the tree once, level by level, and keeps the position and size of
each value. Rules:

1. A position is followed only after it was compared with the size of the file.
2. The keys must be exactly the stored indices, ascending: so no page can occur twice, and every walk ends.
3. Overflow pages are not read: the values in them have checksums of their own.

The layout is that of LMDB 0.9 (mdb.c: MDB_page, MDB_node, MDB_meta), in the byte order of the machine.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import mmap

    import numpy.typing as npt

    from fastload.cache.lmdb.description import TreePlace
    from fastload.cache.lmdb.indices import StoredIndices

    Numbers = npt.NDArray[np.int64]

PAGE_HEADER = struct.Struct("=QHHI")  # page number, padding, flags, pages of an overflow run
OVERFLOW = 0x04
_BRANCH, _LEAF, _META = 0x01, 0x02, 0x08
_PAGE_KINDS = 0x6F  # the flags that give the kind of a page; other flags are used only in memory
_BIG = 0x01  # flag of a node: its value is in overflow pages
_NODES_AT = PAGE_HEADER.size  # offset of the positions of a page's nodes, two bytes each
_MIN_BRANCH_NODE_BYTES = 8
_MIN_LEAF_NODE_BYTES = 24  # header, key, and the number of an overflow page or the header of a value
_LEAF_HEADER_BYTES = 16  # header and key
_KEY_BYTES = 8
_MAX_LEVELS = 32  # as in LMDB
_LEAVES_AT_ONCE = 4096  # bounds the temporary memory of a walk

# Magic, version, address, map size; for the free list and for the main tree: padding, flags, levels, branch
# pages, leaf pages, overflow pages, entries, root; then the last page, and the number of the transaction.
_META_PAGE = struct.Struct("=IIQQ IHHQQQQQ IHHQQQQQ QQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_NO_PAGE = (1 << 64) - 1
# In a branch: low part and high part of a page's number. In a leaf: bytes of the value, flags, bytes of the
# key, the key, and if the flags say so, the number of the first overflow page.
_NODE = np.dtype([("low", "=u4"), ("flags", "=u2"), ("key_bytes", "=u2"), ("key", ">u8"), ("page", "=u8")])


@dataclass(frozen=True)
class Table:
    """Places of values: `(n,)` offsets in the file and `(n,)` sizes in bytes, by position of the sample."""

    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.uint32]


def read_table(memory: mmap.mmap, place: TreePlace, stored: StoredIndices) -> Table:
    """Find the position of each stored value.

    Args:
        memory: The whole file; after the environment it has more bytes than a node.
        place: The place of the tree in it.
        stored: The keys that the tree should hold.

    Raises:
        ValueError: LMDB would not make such a tree of these keys; the error gives the reason.
    """
    return _Walk(memory, place).table(stored)


class _Walk:
    """One walk over the tree of a file."""

    def __init__(self, memory: mmap.mmap, place: TreePlace) -> None:
        self._memory = memory
        self._page_bytes = place.page_bytes
        self._num_pages = place.num_pages
        runs = np.array(place.runs, np.int64).reshape(-1, 2)
        self._run_firsts = runs[:, 0]
        self._run_ends = runs.sum(1)
        self._num_tree_pages = int(runs[:, 1].sum())
        fields: Any = {"names": ["flags", "lower", "upper"], "formats": ["=u2"] * 3, "offsets": [10, 12, 14]}
        fields["itemsize"] = self._page_bytes
        header: np.dtype[Any] = np.dtype(fields)
        self._headers = np.ndarray((self._num_pages,), header, memory)
        self._words = np.ndarray((len(memory) // 2,), np.uint16, memory)
        # A node can begin at any even byte, so this array has an element for each byte.
        self._nodes = np.ndarray((len(memory) - _NODE.itemsize + 1,), _NODE, memory, 0, (1,))

    def table(self, stored: StoredIndices) -> Table:
        root = self._root()
        if root is None:
            if len(stored):
                raise ValueError(f"it is empty, but should hold {len(stored):,} samples")
            return Table(np.empty(0, np.int64), np.empty(0, np.uint32))
        return self._read_leaves(self._leaves(root), stored)

    def _root(self) -> int | None:
        """The root page of the newer of the two states in the file."""
        found = []
        for page in range(2):
            at = page * self._page_bytes
            magic, version, *_, root, _, transaction = _META_PAGE.unpack_from(self._memory, at + _NODES_AT)
            is_meta = int(self._headers["flags"][page]) & _PAGE_KINDS == _META
            if not is_meta or (magic, version) != (_MAGIC, _VERSION):
                raise ValueError("it does not begin like files of LMDB 0.9 on this kind of machine")
            found.append((transaction, -page, root))
        root = max(found)[2]
        if root == _NO_PAGE:
            return None
        if root >= self._num_pages:
            raise ValueError(f"its root is page {root:,} of {self._num_pages:,}")
        return int(root)

    def _leaves(self, root: int) -> Numbers:
        """The numbers of all leaf pages, in the order of their keys."""
        pages = np.array([root], np.int64)
        for _ in range(_MAX_LEVELS):
            self._check_inside(pages)
            kinds = self._headers["flags"][pages] & _PAGE_KINDS
            if (kinds == _LEAF).all():
                return pages
            if not (kinds == _BRANCH).all():
                raise ValueError("a page of it is neither a branch nor a leaf, or at the wrong level")
            counts = self._counts(pages, _MIN_BRANCH_NODE_BYTES)
            if counts.sum() > self._num_tree_pages:
                raise ValueError(f"it refers to more pages than it has, which are {self._num_tree_pages:,}")
            starts, _ = self._node_starts(pages, counts, _MIN_BRANCH_NODE_BYTES)
            low, high = (self._nodes[name][starts].astype(np.int64) for name in ("low", "flags"))
            pages = low + (high << 32)
        raise ValueError(f"it has more than {_MAX_LEVELS} levels")

    def _check_inside(self, pages: Numbers) -> None:
        run = np.searchsorted(self._run_firsts, pages, "right") - 1
        if (run < 0).any() or (pages >= self._run_ends[run]).any():
            raise ValueError("it refers to a page outside of it")

    def _counts(self, pages: Numbers, min_node_bytes: int) -> Numbers:
        """The number of nodes on each page."""
        lower, upper = (self._headers[name][pages].astype(np.int64) for name in ("lower", "upper"))
        counts = (lower - _NODES_AT) // 2
        room = self._page_bytes - upper
        if ((counts < 1) | (lower > upper) | (counts * min_node_bytes > room)).any():
            raise ValueError("one of its pages has an impossible number of entries")
        return counts

    def _node_starts(self, pages: Numbers, counts: Numbers, min_node_bytes: int) -> tuple[Numbers, Numbers]:
        """Start of each node on these pages, and end of its page, in bytes from the start of the file."""
        total = int(counts.sum())
        page_starts = np.repeat(pages * self._page_bytes, counts)
        in_page = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        ends = page_starts + self._page_bytes
        starts = page_starts + self._words[(page_starts + _NODES_AT) // 2 + in_page]
        if (starts + min_node_bytes > ends).any():
            raise ValueError("an entry of it lies outside its page")
        return starts, ends

    def _read_leaves(self, pages: Numbers, stored: StoredIndices) -> Table:
        counts = self._counts(pages, _MIN_LEAF_NODE_BYTES)
        if int(counts.sum()) != len(stored):
            raise ValueError(f"it holds {int(counts.sum()):,} samples, but should hold {len(stored):,}")
        table = Table(np.empty(len(stored), np.int64), np.empty(len(stored), np.uint32))
        position = 0
        for first in range(0, len(pages), _LEAVES_AT_ONCE):
            some = slice(first, first + _LEAVES_AT_ONCE)
            starts, ends = self._node_starts(pages[some], counts[some], _MIN_LEAF_NODE_BYTES)
            here = slice(position, position + len(starts))
            nodes = self._nodes[starts]
            keys = stored.between(here.start, here.stop)
            if (nodes["key_bytes"] != _KEY_BYTES).any() or (nodes["key"] != keys.astype(np.uint64)).any():
                raise ValueError(f"one of the samples {int(keys[0])} to {int(keys[-1])} is not in it")
            table.starts[here] = self._value_starts(nodes, starts, ends)
            table.sizes[here] = nodes["low"]
            position = here.stop
        if int(table.sizes.sum(dtype=np.int64)) > self._num_pages * self._page_bytes:
            raise ValueError("its values are longer together than the file, so they overlap")
        return table

    def _value_starts(self, nodes: Any, starts: Numbers, ends: Numbers) -> Numbers:
        """The places of these nodes' values; large values are in overflow pages."""
        sizes = nodes["low"].astype(np.int64)
        is_big = nodes["flags"] == _BIG
        if not (is_big | (nodes["flags"] == 0)).all() or (nodes["page"][is_big] >= self._num_pages).any():
            raise ValueError("an entry of it is of no known kind, or refers to a page outside the file")
        found = starts + _LEAF_HEADER_BYTES
        found[is_big] = nodes["page"][is_big].astype(np.int64) * self._page_bytes + _NODES_AT
        ends[is_big] = self._num_pages * self._page_bytes
        if (found + sizes > ends).any():
            raise ValueError("the value of an entry reaches beyond its page, or beyond the file")
        return found
