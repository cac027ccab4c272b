"""How a library is met: its functions and methods, replaced by wrappers while datasets are read.

Rules:

1. A wrapper does what the original does while no cache is active in its thread.
2. Functions of modules are replaced during a fetch only, so a dataset that holds one can be pickled at any
   other time. Methods of classes stay replaced until the last cache is closed: changing a class slows down
   all code that uses it for a moment.
3. Only originals are replaced. A function that other code has wrapped or replaced is left alone, before and
   after; an attribute is restored only if it is still the wrapper.
"""

from __future__ import annotations

import contextlib
import copyreg
import importlib
import os
import sys
import threading
import weakref
from types import BuiltinFunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastload.readers.patch import Patch

# By the library whose import makes a reader useful. A reader has a function `patches()`.
READERS = {
    "cv2": "fastload.readers.opencv",
    "h5py": "fastload.readers.h5py",
    "nibabel.arrayproxy": "fastload.readers.nibabel",
    "numpy": "fastload.readers.npz",
    "pydicom.pixels.decoders.base": "fastload.readers.pydicom",
    "tifffile": "fastload.readers.tifffile",
    "torchvision.io": "fastload.readers.torchvision_io",
    "PIL.Image": "fastload.readers.pillow",
}


def _reduce_builtin(function: Any) -> Any:
    """What pickles a built-in function, also one that is replaced: pickle would not find it by its name."""
    for patch in list(_patches.each(ModuleType)):
        if function is patch.original:
            return patch.reduce()
    return function.__reduce__()


class _Patches:
    """Those of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_reader: dict[str, list[Patch]] = {}
        self.num_fetches = 0
        self.fetching = threading.local()  # num: those of a thread
        self.caches: weakref.WeakSet[object] = weakref.WeakSet()

    def meet(self) -> None:
        """Meet the libraries that were imported since the last time."""
        copyreg.dispatch_table.setdefault(BuiltinFunctionType, _reduce_builtin)
        for library, reader in READERS.items():
            if library in sys.modules and reader not in self.by_reader:
                try:
                    self.by_reader[reader] = importlib.import_module(reader).patches()
                except Exception as error:  # noqa: BLE001  # a release that the reader does not know
                    self.by_reader[reader] = []
                    log.info("files read by %s are not remembered: %r", library, error)

    def each(self, kind: type) -> Iterator[Patch]:
        for patches in list(self.by_reader.values()):
            yield from (patch for patch in patches if isinstance(patch.owner, kind))

    def count_fetch(self, change: int) -> None:
        self.num_fetches += change
        self.fetching.num = getattr(self.fetching, "num", 0) + change

    def take_away(self, kind: type) -> None:
        for patch in self.each(kind):
            patch.take_away()

    def after_fork(self) -> None:
        """In a child, only the thread that forked can be fetching."""
        self.lock = threading.Lock()
        self.num_fetches = getattr(self.fetching, "num", 0)
        if not self.num_fetches:
            self.take_away(ModuleType)


_patches = _Patches()
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_patches.after_fork)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Meet the libraries during a fetch."""
    with _patches.lock:
        _patches.meet()
        _patches.count_fetch(1)
        for patch in _patches.each(object):
            patch.put()
    try:
        yield
    finally:
        with _patches.lock:
            _patches.count_fetch(-1)
            if not _patches.num_fetches:
                _patches.take_away(ModuleType)


def unmet() -> list[str]:
    """Functions and methods of imported libraries that are left alone, because other code replaced them."""
    with _patches.lock:
        _patches.meet()
        patches = list(_patches.each(object))
    current = [(patch, vars(patch.owner).get(patch.name)) for patch in patches]
    return [
        f"{patch.owner.__name__}.{patch.name}"
        for patch, value in current
        if value not in (patch.original, patch.wrapper) or not patch.is_genuine
    ]


def retain(cache: object) -> None:
    """Let classes stay replaced until `release` is called for the last cache."""
    with _patches.lock:
        _patches.caches.add(cache)


def release(cache: object) -> None:
    """A cache is closed; with the last one, classes are as they were."""
    with _patches.lock:
        _patches.caches.discard(cache)
        if not _patches.caches and not _patches.num_fetches:
            _patches.take_away(object)
            if copyreg.dispatch_table.get(BuiltinFunctionType) is _reduce_builtin:
                del copyreg.dispatch_table[BuiltinFunctionType]
