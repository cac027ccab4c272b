"""nibabel: voxels of compressed files (`.nii.gz`, `.mgz`), where `get_fdata`, `dataobj[...]` and NumPy end.

Remembered are the voxels as they are in the file, by selection. Scaling them to floats, which depends on the
header, is real; an uncompressed file is mapped, not decoded. An image that was loaded knows its header, and
opens its file again for the voxels.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import nibabel
from nibabel.arrayproxy import ArrayProxy
from nibabel.fileslice import canonical_slicers
from nibabel.openers import ImageOpener

from fastload.readers import nest
from fastload.readers.code_digest import environment
from fastload.readers.decode_cache import current
from fastload.readers.identity import identify_path
from fastload.readers.patch import Patch
from fastload.readers.selection import plain_selection

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
        selection: Any = canonical_slicers(slicer, self._shape, False)  # type: ignore[no-untyped-call,unused-ignore]
        arguments = (
            os.path.splitext(self.file_like)[1],
            *(tuple(map(int, self._shape)), self._dtype.str, int(self._offset), self.order),
            plain_selection(tuple(selection)),
        )
        return cache.array(
            kind,
            partial(identify_path, self.file_like),
            arguments,
            partial(original, self, slicer),
            where=self.file_like,
            pack=nest.pack,
            unpack=nest.unpack,
        )

    return _get_unscaled


def _is_compressed(file: Any) -> bool:
    """Whether it is the path of a file that nibabel decompresses."""
    if not isinstance(file, str):
        return False
    return os.path.splitext(file)[1].lower() in {
        suffix.lower() for suffix in ImageOpener.compress_ext_map if suffix
    }
