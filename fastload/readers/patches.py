"""How a library is met: its functions and methods, replaced by wrappers while datasets are read.

Rules:

1. A wrapper does what the original does while no cache is active in its thread.
2. A program finds one object for a function, wherever and whenever it looks, so comparisons and tables stay
   right: a module's function is replaced in all modules and dicts at once, for the life of the process, and
   only if nothing else refers to it: an attribute, a key or a default would go on being the original.
3. Methods are replaced until the last cache is closed; as attributes of their classes they are the originals.
4. Only originals are replaced. A function that other code has wrapped or replaced is left alone, before and
   after; an attribute is restored only if it is still the wrapper.
"""

from __future__ import annotations

import itertools
import os
import pkgutil
import sys
import threading
import weakref
from typing import TYPE_CHECKING

from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastload.readers.patch import Patch

# By the library whose import makes a reader useful: a function, by default `patches` of the reader.
READERS = {
    "cv2": "fastload.readers.opencv",
    "numpy": "fastload.readers.npz",
    "tifffile": "fastload.readers.tifffile",
    "torchvision.io": "fastload.readers.torchvision_io",
    "PIL.Image": "fastload.readers.pillow",
}


def _is_imported(library: str) -> bool:
    """Whether the import of a library is complete."""
    module = sys.modules.get(library)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


class _Patches:
    """Those of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a handler of a signal can close a loader at any time
        self.by_library: dict[str, list[Patch]] = {}
        self.caches: weakref.WeakSet[object] = weakref.WeakSet()

    def found(self, readers: Mapping[str, str]) -> list[Patch]:
        """What to replace in those of the libraries that were imported until now."""
        for library in readers:
            if library in self.by_library or not _is_imported(library):
                continue
            reader, _, function = readers[library].partition(":")
            try:
                self.by_library[library] = pkgutil.resolve_name(f"{reader}:{function or 'patches'}")()
            except Exception as error:  # noqa: BLE001  # a release that the reader does not know
                self.by_library[library] = []
                log.info("%s is not met: %r", library, error)
        return [patch for library in readers for patch in self.by_library.get(library, ())]

    def put(self, readers: Mapping[str, str]) -> None:
        for patch in self.found(readers):
            patch.put()

    def before_fork(self) -> None:
        """Meet what was imported since, before a worker freezes objects, so that `gc` finds none of them."""
        if self.caches:
            with self.lock:
                self.put(READERS)


_patches = _Patches()
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(
        before=_patches.before_fork, after_in_child=lambda: setattr(_patches, "lock", threading.RLock())
    )


def meet(readers: Mapping[str, str] | None = None) -> None:
    """Meet the libraries of a table, by default `READERS`, that were imported since; again and again."""
    with _patches.lock:
        _patches.put(READERS if readers is None else readers)


def unmet() -> list[str]:
    """Functions and methods of imported libraries that are left alone, each with the reason."""
    with _patches.lock:
        patches = _patches.found(READERS)
    return [
        f"{patch.owner.__name__}.{patch.name} ({'an object holds it' if patch.is_held else 'replaced'})"
        for patch in patches
        if patch.is_held or patch.current not in (patch.original, patch.wrapper) or not patch.is_genuine
    ]


def retain(cache: object) -> None:
    """Meet the libraries, and let classes stay replaced until `release` is called for the last cache."""
    with _patches.lock:
        _patches.caches.add(cache)
        _patches.put(READERS)  # so that processes forked from this one find the same objects


def release(cache: object) -> None:
    """A cache is closed; with the last one, classes are as they were."""
    with _patches.lock:
        _patches.caches.discard(cache)
        if not _patches.caches:
            for patch in itertools.chain(*_patches.by_library.values()):
                patch.take_away()
