"""The table in a finished file: where each record is, and its checksum.

LMDB crashes if its tree is damaged. So the builder asks LMDB once for the places of all records and writes
them down, and readers never use the tree. Rules:

1. The table has a row for each index of the file; a left-out sample has a record of 0 bytes.
2. Every number is compared with the size of the file before it is used: a file can come from an untrusted
   source, and then a right checksum proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_COLUMNS = ("<i8", "<u4", "<u4")
ROW_BYTES = sum(np.dtype(column).itemsize for column in _COLUMNS)


@dataclass(frozen=True, eq=False)
class Table:
    """Where the records of a file are; row p is the p-th index of the file.

    Attributes:
        starts: Offsets of the records in the file, `(n,)`.
        sizes: Their lengths in bytes, `(n,)`; 0 for a left-out sample.
        crcs: Their checksums (crc32), `(n,)`.
    """

    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.uint32]
    crcs: npt.NDArray[np.uint32]

    @classmethod
    def empty(cls, num_rows: int) -> Table:
        """A table of left-out samples."""
        return cls(*(np.zeros(num_rows, column) for column in _COLUMNS))

    def to_bytes(self) -> bytes:
        """The columns one after another, little-endian."""
        return self.starts.tobytes() + self.sizes.tobytes() + self.crcs.tobytes()

    @classmethod
    def parse(cls, data: bytes, environment_bytes: int) -> Table:
        """Read a table.

        Args:
            data: The result of `to_bytes`, or any other whole number of rows.
            environment_bytes: Number of bytes of the file before the table, which hold the records.

        Raises:
            ValueError: A record is outside of these bytes, or records overlap.
        """
        num_rows, at, columns = len(data) // ROW_BYTES, 0, []
        for column in _COLUMNS:
            columns.append(np.frombuffer(data, column, num_rows, at))
            at += columns[-1].nbytes
        table = cls(*columns)
        if ((table.starts < 0) | (table.starts > environment_bytes - table.sizes.astype(np.int64))).any():
            raise ValueError("a record is outside the file")
        if int(table.sizes.sum(dtype=np.int64)) > environment_bytes:
            raise ValueError("the records are longer together than the file, so they overlap")
        return table
