"""The datasets that `fastload run --cache ram` wraps, and the reason for every other one.

A dataset is wrapped only if its samples provably stay the same, in values, types and random draws:

1. `fastload.ImageFolder`, and no subclass: it draws nothing, and `CachedDataset` returns its samples.
2. torchvision's ImageFolder, and no subclass, with torchvision's own loader. Its transforms may be random and
   get an image of Pillow, so the decoded image is cached, and each transform gets a new image that equals the
   one that the loader returned: same class, mode, size, pixels, `info` (it holds the EXIF data) and every
   other attribute. An image for which this does not hold is decoded at each access, as without a cache.
3. torch's Subset of one of these, as random_split() makes them: it only looks up an index.

Both assume that no file changes while the program runs; files that changed before are noticed.
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
    from fastload.cache.dataset import CachedDataset

# All that DatasetFolder.__getitem__ uses: a release of torchvision that uses more is not wrapped.
_TORCHVISION_USES = ("samples", "loader", "transform", "target_transform")
_DIGEST_BYTES = 16

# Caches by the dataset given, so that loaders of one dataset share one, also one after another. A cache holds
# no reference to the dataset given.
_caches: weakref.WeakKeyDictionary[Any, CachedDataset] = weakref.WeakKeyDictionary()


def cached(dataset: Any) -> Any:
    """The dataset behind a cache in memory, or the dataset itself, with a line that says why."""
    from fastload.cache.dataset import CachedDataset
    from fastload.images.folder import ImageFolder

    if isinstance(dataset, CachedDataset) or hasattr(type(dataset), "_fastload_is_cached"):
        return dataset
    if type(dataset) is Subset:
        inner = cached(dataset.dataset)  # says why, if it is not cached
        return dataset if inner is dataset.dataset else _CachedSubset.around(dataset, inner)
    reason = _why_not(dataset) if type(dataset) is not ImageFolder else None
    if reason is None:
        try:
            if type(dataset) is ImageFolder:
                return _cache_of(dataset, copy.copy)
            return _twin(dataset, _cache_of(dataset, DecodedImages))
        except Exception as error:  # noqa: BLE001 - an image that cannot be read is the epoch's error, at its turn
            reason = f"the cache cannot be made: {type(error).__name__}: {error}"
    _say_once(f"--cache ram: {_named(type(dataset))} is not cached: {reason}")
    return dataset


def _cache_of(dataset: Any, make_source: Any) -> CachedDataset:
    from fastload.cache.dataset import CachedDataset

    found = _caches.get(dataset)
    if found is None:
        found = _caches[dataset] = CachedDataset(make_source(dataset), cache="ram")
        _say_once(
            f"--cache ram: {_named(type(dataset))} is cached: {found.cache.explain().partition(chr(10))[0]}"
        )
    return found


def _why_not(dataset: Any) -> str | None:
    """Why a dataset cannot be wrapped; None if it is torchvision's ImageFolder, and can."""
    folders = sys.modules.get("torchvision.datasets.folder")
    kind: Any = getattr(folders, "ImageFolder", None)
    if kind is None or not isinstance(dataset, kind):
        return (
            "only ImageFolder, of torchvision or of fastload, is known to return the same samples each time. "
            "Wrap this one yourself, if it does: fastload.CachedDataset(dataset, transform)"
        )
    if type(dataset) is not kind:
        return f"a subclass of {_named(kind)} may do something else"
    if dataset.loader is not folders.default_loader:  # type: ignore[union-attr]
        return f"its loader is {_named(dataset.loader)} in the place of torchvision's default_loader"
    backend = sys.modules["torchvision"].get_image_backend()
    if backend != "PIL":
        return f"torchvision's image backend is {backend!r} in the place of 'PIL'"
    changed = [name for name in ("__getitem__", "__getitems__", "__len__") if name in vars(dataset)]
    code = getattr(kind.__getitem__, "__code__", None)
    if changed or code is None or tuple(code.co_names) != _TORCHVISION_USES or hasattr(kind, "__getitems__"):
        return "its __getitem__ is not the one of the releases of torchvision that fastload knows"
    return None


class DecodedImages(Dataset[tuple[Any, bytes, str]]):
    """The images of torchvision's ImageFolder without its transforms, as values that a cache can store.

    A sample is the pixels as `(H, W, 3) uint8`, the pickled `info`, and the path. The path is empty for an
    image that cannot be made again from these.

    Args:
        folder: The ImageFolder; only its list of samples and its loader are kept.
    """

    def __init__(self, folder: Any) -> None:
        self._samples = folder.samples
        self._loader = folder.loader

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Any, bytes, str]:
        path = self._samples[index][0]
        image = self._loader(path)
        if image.mode == "RGB":
            try:
                info = pickle.dumps(image.info)
            except (pickle.PicklingError, TypeError, AttributeError):  # it holds an object of some library
                info = b""
            pixels = np.array(image)
            if info and _is_equal(image, rebuilt(pixels, info)):
                return pixels, info, path
        return np.empty((0, 0, 3), np.uint8), b"", ""

    def fingerprint(self) -> dict[str, str]:
        """The files, with sizes and times, and the decoder; see `fastload.ImageFolder.fingerprint`."""
        import PIL

        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for path, _ in self._samples:
            stat = os.stat(path)
            digest.update(b"\0%s\0%d %d" % (os.fsencode(path), stat.st_size, stat.st_mtime_ns))
        return {
            "files": f"{len(self)} files, digest {digest.hexdigest()}",
            "decoder": f"Pillow {PIL.__version__} through torchvision",
        }


def rebuilt(pixels: Any, info: bytes) -> Any:
    """The image of Pillow that has these pixels and this pickled `info`, in memory of its own."""
    from PIL import Image

    image = Image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), np.ascontiguousarray(pixels))
    image.info = pickle.loads(info)
    return image


def _is_equal(image: Any, other: Any) -> bool:
    """Whether two images are equal in class, mode, pixels and every attribute but the core object."""
    ours, theirs = dict(vars(image)), dict(vars(other))
    for name in ("im", "_im"):
        ours.pop(name, None)
        theirs.pop(name, None)
    is_same = type(image) is type(other) and ours == theirs and image.mode == other.mode == "RGB"
    return bool(is_same and image.tobytes() == other.tobytes())


def _twin(folder: Any, images: CachedDataset) -> Any:
    """The same folder, with all attributes shared in both directions, that reads its images from a cache."""
    kind: Any = type(folder)
    twin: Any = object.__new__(_cached_kind(kind))
    object.__setattr__(twin, "__dict__", vars(folder))
    twin._fastload_folder, twin._fastload_images = folder, images
    return twin


@functools.cache
def _cached_kind(kind: Any) -> type:
    methods = {
        "__slots__": ("_fastload_folder", "_fastload_images"),
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__getitem__": _get_item,
        "__reduce__": _reduce,
        "_fastload_is_cached": True,
    }
    return type(kind.__name__, (kind,), methods)


def _get_item(self: Any, index: int) -> Any:
    """DatasetFolder.__getitem__ of torchvision, with the loader behind the cache."""
    path, target = self.samples[index]
    images = self._fastload_images
    pixels, info, cached_path = images[index] if -len(images) <= index < len(images) else (None, b"", "")
    # The path differs if the program has changed the list of samples in the meantime.
    sample = rebuilt(pixels, info) if cached_path == path else self.loader(path)
    if self.transform is not None:
        sample = self.transform(sample)
    if self.target_transform is not None:
        target = self.target_transform(target)
    return sample, target


def _reduce(self: Any) -> Any:
    return _twin, (self._fastload_folder, self._fastload_images)


class _CachedSubset(Subset[Any]):
    """A Subset that reads its dataset behind a cache, and shares all attributes with the program's Subset."""

    __slots__ = ("_fastload_datasets", "_fastload_subset")
    _fastload_datasets: tuple[Any, Any]  # the dataset that was given, and the same one behind its cache
    _fastload_subset: Any
    _fastload_is_cached = True

    @classmethod
    def around(cls, subset: Any, cached_dataset: Any) -> Any:
        """The twin of a subset; ``cached_dataset`` is its dataset behind a cache."""
        twin = object.__new__(cls)
        object.__setattr__(twin, "__dict__", vars(subset))
        twin._fastload_subset = subset
        twin._fastload_datasets = vars(subset)["dataset"], cached_dataset
        return twin

    @property
    def dataset(self) -> Any:
        known, cached_dataset = self._fastload_datasets
        now = vars(self)["dataset"]
        return cached_dataset if now is known else now  # the program may have set another one

    @dataset.setter
    def dataset(self, dataset: Any) -> None:
        vars(self)["dataset"] = dataset

    def __reduce__(self) -> Any:
        return _CachedSubset.around, (self._fastload_subset, self._fastload_datasets[1])


def _named(thing: Any) -> str:
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    return f"{getattr(thing, '__module__', type(thing).__module__)}.{name}"


@functools.cache
def _say_once(text: str) -> None:
    state.say(text)
