"""nibabel: voxels of compressed files (`.nii.gz`, `.mgz`), where `get_fdata`, `dataobj[...]` and NumPy end.

Remembered are the voxels as they are in the file. Scaling them to floats, which depends on the header, is
real; an uncompressed file is mapped, not decoded. An image that was loaded knows its header, and opens its
file again for the voxels.

A selection is remembered by itself, until a dataset selects different parts of one file, such as slices:
each of them would be decompressed once. From then on, whole volumes are remembered, and nibabel selects.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import nibabel
import numpy as np
from nibabel.arrayproxy import ArrayProxy
from nibabel.fileslice import canonical_slicers, fileslice
from nibabel.openers import ImageOpener

from fastload.errors import DecodeMismatchError
from fastload.readers import nest
from fastload.readers.code_digest import environment
from fastload.readers.decode_cache import NEW, current
from fastload.readers.identity import identify_path
from fastload.readers.patch import Patch
from fastload.readers.selection import plain_selection
from fastload.system.cache_counts import cache_counts

if TYPE_CHECKING:
    from collections.abc import Callable

_PAUSE = 100  # selections, after a volume could not be stored, perhaps because the store was just growing


def patches() -> list[Patch]:
    """What is replaced in nibabel."""
    return [Patch(ArrayProxy, "_get_unscaled", _get_unscaled)]


def _get_unscaled(original: Callable[..., Any]) -> Callable[..., Any]:
    kind = f"nibabel {nibabel.__version__} {environment()!r}"

    def _get_unscaled(self: Any, slicer: Any) -> Any:
        cache = current()
        if cache is None or not _is_compressed(self.file_like):
            return original(self, slicer)
        selection, whole = (tuple(canonical_slicers(one, self._shape, False)) for one in (slicer, ()))  # type: ignore[no-untyped-call,unused-ignore]

        def remembered(selection: Any, unpack: Callable[..., Any]) -> Any:
            shape, suffix = tuple(map(int, self._shape)), os.path.splitext(self.file_like)[1]
            return cache.array(
                kind,
                partial(identify_path, self.file_like),
                (suffix, shape, self._dtype.str, int(self._offset), self.order, plain_selection(selection)),
                partial(original, self, selection),
                where=self.file_like,
                source=self.file_like,
                pack=nest.pack,
                unpack=unpack,
            )

        # The first selection of each file; at "", how many are read by themselves before a volume is read.
        habits = cache.habits.setdefault("nibabel", {})
        if habits.setdefault(self.file_like, selection) != selection:
            habits.setdefault("", 0)
        if selection == whole or habits.get("") != 0:
            if "" in habits:
                habits[""] = max(0, habits[""] - 1)
            return remembered(selection, nest.unpack)

        def select(voxels: Any) -> Any:
            return fileslice(_File(voxels), slicer, self._shape, self._dtype, 0, self.order)  # type: ignore[no-untyped-call,unused-ignore]

        num_new = cache_counts.reasons[NEW]
        try:
            found = remembered(whole, lambda voxels, _: [select(voxels)])
        except DecodeMismatchError:
            raise
        except Exception:  # noqa: BLE001  # the selection is wrong or, behind it, the file is damaged
            result = original(self, slicer)
            habits[""] = _PAUSE
            return result
        if type(found) is list:
            return found[0]
        if cache_counts.reasons[NEW] == num_new:  # it would be read in full each time
            habits[""] = _PAUSE
        return select(found.ravel("K").view(np.uint8))

    return _get_unscaled


class _File:
    """What `fileslice` needs of a file, over memory."""

    def __init__(self, memory: Any) -> None:
        self._memory, self._position = memoryview(memory), 0

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, size: int) -> bytes:
        return bytes(self._memory[self._position : self._position + size])


def _is_compressed(file: Any) -> bool:
    """Whether it is the path of a file that nibabel decompresses."""
    if not isinstance(file, str):
        return False
    return os.path.splitext(file)[1].lower() in {
        suffix.lower() for suffix in ImageOpener.compress_ext_map if suffix
    }
