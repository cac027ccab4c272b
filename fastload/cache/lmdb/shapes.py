"""Detects whether the arrays of a cache's samples differ in shape, while the samples are written.

A record begins with the structure of its sample as text, including shapes. So samples of equal shapes are
recognized by comparing bytes, and each new text is parsed once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastload.cache.lmdb.files import open_cache
from fastload.cache.lmdb.open_file import damaged
from fastload.cache.record import spec_text
from fastload.errors import CacheCorruptError
from fastload.nested.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_TEXTS = 1000  # a folder of photographs may have as many shapes as files


class SeenShapes:
    """The shapes of arrays and tensors, leaf by leaf; remembers a limited number of structures.

    Attributes:
        is_complete: Whether every structure was remembered.
    """

    def __init__(self) -> None:
        self.is_complete = True
        self._texts: set[bytes] = set()
        self._shapes: dict[str, dict[tuple[int, ...], None]] = {}  # in the order in which they came

    def add(self, record: bytes | memoryview) -> None:
        """Remember the shapes in a record that this release wrote.

        Raises:
            CacheCorruptError: Its structure cannot be read.
        """
        text = spec_text(record)
        if text in self._texts:
            return
        if len(self._texts) == _MOST_TEXTS:
            self.is_complete = False
            return
        self._texts.add(text)
        spec = Spec.parse(text)
        for path, leaf in zip(spec.paths(), spec.leaves, strict=True):
            if leaf.kind in ("array", "tensor"):
                self._shapes.setdefault(path, {})[leaf.shape] = None

    def add_stored(self, path: str, known: Sequence[range]) -> None:
        """Remember the shapes of the samples in the finished cache at `path`, but for ranges already known.

        Raises:
            CacheCorruptError: A record cannot be read.
        """
        for file in open_cache(path):
            for index in file.stored:
                if any(index in span for span in known):
                    continue
                try:
                    self.add(file.glance(index))
                except CacheCorruptError as error:
                    raise damaged(file.path, index, error) from error

    @property
    def number(self) -> int:
        """The number of shapes of the leaf that has the most; 0 if there are no arrays."""
        return max(map(len, self._shapes.values()), default=0)

    def explain(self) -> str | None:
        """A message that says what differs and how to fix it; None if each leaf has one shape."""
        if self.number < 2:
            return None
        path, shapes = max(self._shapes.items(), key=lambda item: len(item[1]))
        first, second = list(shapes)[:2]
        count = f"{len(shapes):,}" if self.is_complete else f"at least {len(shapes):,}"
        return (
            f"the samples have {count} different shapes at {path}, such as {first} and {second}, but torch's "
            "default_collate makes batches of equal shapes only. Scale every image to one height and width "
            "(--size 256x256 on the command line, ImageFolder(root, size=(256, 256)) in Python), crop in the "
            "transform, or pass a collate_fn"
        )
