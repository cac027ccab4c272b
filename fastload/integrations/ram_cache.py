"""The datasets that `fastload run --cache ram` puts behind a cache, and why it leaves out all others.

A dataset is cached only if its samples provably stay the same, in values, types and random draws:

1. `fastload.ImageFolder`, and no subclass: it draws nothing, and `CachedDataset` returns its samples.
2. torchvision's DatasetFolder, such as ImageFolder, and its subclasses, with torchvision's own loader. Only
   this loader goes behind the cache, in place: it returns a new image that equals the decoded one in class,
   mode, size, pixels, `info` (it holds the EXIF data) and every other attribute. Any other image is decoded
   on every access, as without a cache.
3. torch's Subset of one of these, as random_split() makes them: it only looks up an index.

All assume that no file changes while the program runs; earlier changes are noticed.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import pickle
import sys
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset, Subset

from fastload.integrations.state import state

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.cache.dataset import CachedDataset

_DIGEST_BYTES = 16

# The cache of each of fastload's folders, which their loaders share. It holds no reference to the folder.
_caches: weakref.WeakKeyDictionary[Any, CachedDataset] = weakref.WeakKeyDictionary()


def cached(dataset: Any) -> Any:
    """The dataset behind a cache in memory, or the dataset itself, with a log line that says why."""
    from fastload.cache.dataset import CachedDataset
    from fastload.images.folder import ImageFolder

    if isinstance(dataset, CachedDataset) or isinstance(getattr(dataset, "loader", None), CachedLoader):
        return dataset
    if type(dataset) is Subset:
        inner = cached(dataset.dataset)  # says why, if it is not cached
        if inner is not dataset.dataset:
            dataset = copy.copy(dataset)
            dataset.dataset = inner
        return dataset
    is_own = type(dataset) is ImageFolder and dataset.transform is None
    if is_own and dataset in _caches:
        return _caches[dataset]
    reason = None if is_own else _why_not(dataset)
    if reason is None:
        try:
            if is_own:
                images = _caches[dataset] = CachedDataset(copy.copy(dataset), cache="ram")
            else:
                dataset.loader = CachedLoader(dataset)
                images = dataset.loader.images
        except Exception as error:  # noqa: BLE001 - an unreadable image is the epoch's error, in its turn
            reason = f"the cache cannot be created: {type(error).__name__}: {error}"
    if reason is not None:
        _say_once(f"--cache ram: {_named(type(dataset))} is not cached: {reason}")
        return dataset
    _say_once(f"--cache ram: {_named(type(dataset))} is cached: {images.cache.explain().splitlines()[0]}")
    return images if is_own else dataset


def _why_not(dataset: Any) -> str | None:
    """Why a dataset cannot be cached; None if it is one of torchvision's folders, and can."""
    folders = sys.modules.get("torchvision.datasets.folder")
    kind: Any = getattr(folders, "DatasetFolder", None)
    if kind is None or not isinstance(dataset, kind):
        return (
            "only ImageFolder, torchvision's or fastload's without a transform, is known to return the same "
            "samples each time. "
            "If this one does, wrap it yourself: fastload.CachedDataset(dataset, transform)"
        )
    if dataset.loader is not folders.default_loader:  # type: ignore[union-attr]
        return f"its loader is {_named(dataset.loader)} instead of torchvision's default_loader"
    backend = sys.modules["torchvision"].get_image_backend()
    if backend != "PIL":
        return f"torchvision's image backend is {backend!r} instead of 'PIL'"
    return None


class CachedLoader:
    """torchvision's loader behind a cache: a new image for each call.

    Args:
        folder: The folder that it reads for.

    Attributes:
        images: The cached images.
    """

    def __init__(self, folder: Any) -> None:
        from fastload.cache.dataset import CachedDataset

        paths = [path for path, _ in folder.samples]
        self._load = folder.loader
        self._numbers = {path: number for number, path in enumerate(paths)}
        self.images = CachedDataset(DecodedImages(paths, folder.loader), cache="ram")

    def __call__(self, path: str) -> Any:
        """The image at a path, in its own memory."""
        number = self._numbers.get(path)
        if number is not None:  # else the program has added the file since
            pixels, info = self.images[number]
            if info:
                return rebuilt(pixels, info)
        return self._load(path)


class DecodedImages(Dataset[tuple[Any, bytes]]):
    """The images that torchvision's loader decodes, as values that a cache can store.

    A sample is the pixels as `(H, W, 3) uint8`, and the pickled `info`, which is empty for an image that
    cannot be made again from these.

    Args:
        paths: The files.
        load: Decodes one.
    """

    def __init__(self, paths: list[str], load: Callable[[str], Any]) -> None:
        self._paths = paths
        self._load = load

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, bytes]:
        image = self._load(self._paths[index])
        if image.mode == "RGB":
            try:
                info = pickle.dumps(image.info)
            except (pickle.PicklingError, TypeError, AttributeError):  # it holds an object of some library
                info = b""
            pixels = np.array(image)
            if info and _is_equal(image, rebuilt(pixels, info)):
                return pixels, info
        return np.empty((0, 0, 3), np.uint8), b""

    def fingerprint(self) -> dict[str, str]:
        """The files, with sizes and times, and the decoder; see `fastload.ImageFolder.fingerprint`."""
        import PIL

        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for path in self._paths:
            stat = os.stat(path)
            digest.update(b"\0%s\0%d %d" % (os.fsencode(path), stat.st_size, stat.st_mtime_ns))
        return {
            "files": f"{len(self)} files, digest {digest.hexdigest()}",
            "decoder": f"Pillow {PIL.__version__} through torchvision",
        }


def rebuilt(pixels: Any, info: bytes) -> Any:
    """The Pillow image with these pixels and this pickled `info`, in its own memory."""
    from PIL import Image

    image = Image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), np.ascontiguousarray(pixels))
    image.info = pickle.loads(info)
    return image


def _is_equal(image: Any, other: Any) -> bool:
    """Whether two images are equal in class, mode, pixels and every attribute except the core object."""
    attributes, of_other = dict(vars(image)), dict(vars(other))
    for name in ("im", "_im"):
        attributes.pop(name, None)
        of_other.pop(name, None)
    is_same = type(image) is type(other) and attributes == of_other and image.mode == other.mode == "RGB"
    return bool(is_same and image.tobytes() == other.tobytes())


def _named(thing: Any) -> str:
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    return f"{getattr(thing, '__module__', type(thing).__module__)}.{name}"


@functools.lru_cache(maxsize=256)
def _say_once(text: str) -> None:
    state.say(text)
