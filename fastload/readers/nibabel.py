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
                pack=nest.pack,
                unpack=unpack,
            )

        # The first selection of each file; at "", whether whole volumes are read.
        habits = cache.habits.setdefault("nibabel", {})
        if habits.setdefault(self.file_like, selection) != selection:
            habits.setdefault("", True)
        if selection == whole or not habits.get(""):
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
            habits[""] = False
            return result
        if type(found) is list:
            return found[0]
        habits[""] = cache_counts.reasons[NEW] > num_new  # else it would be read in full each time
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
