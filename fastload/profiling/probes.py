"""Which functions belong to which stage. They are replaced with timed ones while a batch is measured.

A probed function returns what the original returns, and raises what it raises.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from fastload.profiling.line_sampler import is_own_code
from fastload.profiling.spans import probe, size_of, this_thread
from fastload.readers import identity
from fastload.readers.patch import OPENED, Method

if TYPE_CHECKING:
    from collections.abc import Iterator

READ, DECODE, TRANSFORM, COLLATE = "read", "decode", "transform", "collate"
CACHE, LOCK, DATASET = "cache", "lock", "dataset"
SEND, RECEIVE, PIN, COPY = "send", "receive", "pin", "copy"

# Functions of modules: module, name, stage. The sizes of decoded images are recorded. Modules that the script
# has not imported are left out: profiling imports no library by itself.
FUNCTIONS = (
    ("cv2", "imread", DECODE),
    ("cv2", "imdecode", DECODE),
    ("numpy", "load", READ),
    ("numpy", "fromfile", READ),
    ("torch", "load", READ),
    ("torchvision.io", "read_image", DECODE),
    ("torchvision.io", "read_file", READ),
    ("torchvision.io", "decode_image", DECODE),
    ("torchvision.io", "decode_jpeg", DECODE),
    ("torchvision.io", "decode_png", DECODE),
    ("skimage.io", "imread", DECODE),
    ("imageio.v2", "imread", DECODE),
    ("imageio.v3", "imread", DECODE),
    ("simplejpeg", "decode_jpeg", DECODE),
    ("tifffile", "imread", DECODE),
    ("fastload.augmentation.regions", "decode_region", DECODE),
    ("os", "open", READ),
    ("os", "read", READ),
    ("os", "pread", READ),
    ("os", "preadv", READ),
    ("fcntl", "flock", LOCK),
    ("fcntl", "lockf", LOCK),
)
# Methods of classes: module, class, method, stage.
METHODS = (
    ("PIL.ImageFile", "ImageFile", "load", DECODE),
    ("PIL.Image", "Image", "convert", DECODE),
    ("turbojpeg", "TurboJPEG", "decode", DECODE),
    ("multiprocessing.synchronize", "SemLock", "__enter__", LOCK),
    ("numpy", "memmap", "__new__", READ),
    ("h5py._hl.dataset", "Dataset", "__getitem__", READ),
    ("zarr.core.array", "Array", "__getitem__", READ),
    ("fastload.cache.dataset", "CachedDataset", "gather", CACHE),
    ("fastload.cache.ram.shared", "SharedMemoryCache", "get", CACHE),
    ("fastload.cache.finished", "LMDBCache", "get", CACHE),
    ("fastload.batch.fetch", "Fetcher", "_stacked", COLLATE),
    ("fastload.batch.collate", "_Rows", "write", COLLATE),
)
LOAD = "ImageFile.load"  # with the format of the file
OWN_COLLATE = "fastload"  # the name of fastload's own collating in reports: no user can make it cheaper
# Functions that read files and decode them in one call: blocked time in them counts as reading.
READING_DECODERS = frozenset(("imread", "read_image", "load", "read"))
# Attributes of datasets that hold the user's transforms.
_TRANSFORM_ATTRIBUTES = ("transform", "transforms", "target_transform", "joint_transform", "augment")
_TRANSFORM_MODULES = (
    "albumentations.",
    "torchvision.transforms.",
    "kornia.augmentation.",
    "monai.transforms.",
)

_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: attributes of such a class cannot be set

Patch = tuple[Any, str, Any, Any]  # owner, attribute, original, probed


class Probes:
    """The probes of one process.

    They are in place only while some thread measures a batch in detail. In between, every function and
    attribute is the original again, so other batches cost nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_measuring = 0
        self._patches: list[Patch] = []
        self._datasets: list[Any] = []
        self._num_modules = 0  # that were imported when the functions were looked up

    def add_dataset(self, dataset: Any) -> None:
        """Probe the transforms of a dataset, also inside other datasets."""
        with self._lock:
            if dataset is not None and not any(dataset is other for other in self._datasets):
                self._datasets.append(dataset)
            is_on = self._num_measuring > 0  # another thread measures a batch
            if is_on:
                self._put(is_on=False)
            self._find()  # now, not in a measured batch
            if is_on:
                self._put(is_on=True)

    def switch(self, on: bool) -> None:
        """Put the probes in place before a measured batch, and the originals back after the last one."""
        with self._lock:
            self._num_measuring += 1 if on else -1
            if self._num_measuring == int(on):
                # Libraries import parts when first used; and readers, or the user, replace functions.
                if on and (self._num_modules != len(sys.modules) or not self._is_current()):
                    self._find()
                self._put(is_on=on)

    def _put(self, *, is_on: bool) -> None:
        for owner, name, original, probed in self._patches:
            value = probed if is_on else original
            if isinstance(owner, (dict, list)):
                owner[name] = value  # type: ignore[call-overload]  # a list has numbers for names
            else:
                setattr(owner, name, value)

    def _is_current(self) -> bool:
        """Whether the originals that were found are still in place."""
        return all(_value(owner, name) is original for owner, name, original, _ in self._patches)

    def _find(self) -> None:
        """Find all functions to probe, in the modules that are imported now."""
        replaced: dict[int, tuple[Any, Any]] = {}  # by the id of the original
        patches: list[Patch] = []
        for module, name, stage in FUNCTIONS:
            function = getattr(sys.modules.get(module), name, None)
            if callable(function):
                size = size_of if stage == DECODE else None
                probed = probe(function, (stage, f"{module}.{name}"), size_of=size)
                replaced[id(function)] = function, probed
                patches.append((vars(sys.modules[module]), name, function, probed))
        replaced[id(builtins.open)] = builtins.open, _open
        patches += [(vars(module), "open", builtins.open, _open) for module in (builtins, io)]
        patches += _references(replaced)
        for module, kind, name, stage in METHODS:
            owner = getattr(sys.modules.get(module), kind, None)
            function = None if owner is None else vars(owner).get(name)
            if function is not None:
                shown = OWN_COLLATE if stage == COLLATE else f"{kind}.{name}"
                key: Any = (stage, shown)
                sizes: Any = size_of if stage == DECODE else None
                if shown == LOAD:
                    key, sizes = _load_key, _size_of_loaded
                probed = probe(_as_function(function), key, size_of=sizes)
                if not callable(function):  # as of a reader, which compares what the class has
                    probed = Method(probed, function.__get__(None, owner))
                patches.append((owner, name, function, probed))
        patches += _transform_modules()
        for dataset in self._datasets:
            patches += _of_dataset(dataset)
        # The first patch of each attribute counts.
        self._patches = list({(id(patch[0]), patch[1]): patch for patch in reversed(patches)}.values())
        self._num_modules = len(sys.modules)


def _value(owner: Any, name: Any) -> Any:
    if isinstance(owner, list):
        return owner[name] if name < len(owner) else None
    return (owner if isinstance(owner, dict) else vars(owner)).get(name)


def _as_function(method: Any) -> Any:
    """A method as a function; that of a reader, which is no function, is asked for the one of each object."""
    if callable(method):
        return method
    return lambda owner, *args, **kwargs: method.__get__(owner, type(owner))(*args, **kwargs)


def _load_key(image: Any) -> tuple[str, str]:
    """Pillow calls `load` for each use of an image, and decodes it the first time; a reader may call it."""
    opened = getattr(image, OPENED, None)
    is_decoded = getattr(image, "tile", None) and (opened is None or opened.is_loading)
    return DECODE, f"{LOAD} {image.format}" if is_decoded else f"{LOAD} again"


def _size_of_loaded(_result: Any, image: Any) -> tuple[int, int]:
    if this_thread.spans is not None:
        this_thread.spans.sizes.add(image.size)
    return size_of(image)


def _size_of_resized(result: Any, transform: Any, *inputs: Any) -> tuple[int, int]:
    """Bytes of what `Resize` returns, and pixels of what it was given, if these sizes were decoded."""
    spans, before = this_thread.spans, _images(inputs) if type(transform).__name__ == "Resize" else []
    if spans is None or not before or not all(image.size in spans.sizes for image in before):
        return 0, 0
    after = _images(result)
    resized = [image for image in after if all(image is not other for other in before)]
    given = [image for image in before if all(image is not other for other in after)]
    # Readers store all four bytes of a resized pixel.
    nbytes = sum(size_of(image)[0] * (4 if image.mode == "RGB" else 3) // 3 for image in resized)
    return nbytes, sum(size_of(image)[1] for image in given)


def _images(value: Any) -> list[Any]:
    """Pillow's images in a nest of a transform's input or output."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [image for part in value for image in _images(part)]
    return [value] if hasattr(value, "getbands") else []


def _references(replaced: dict[int, tuple[Any, Any]]) -> Iterator[Patch]:
    """The names in the user's modules that refer to these functions, as after `from cv2 import imread`."""
    main = sys.modules.get("__main__")  # of a notebook, without a file
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if module is main or is_own_code(names.get("__file__") or ""):
            for name, value in list(names.items()):
                original, probed = replaced.get(id(value), (None, None))
                if probed is not None and original is value:
                    yield names, name, value, probed


def _transform_modules() -> Iterator[Patch]:
    """The transforms of libraries: all their classes with their own `forward` or `__call__`."""
    for module_name, module in list(sys.modules.items()):
        if module is not None and module_name.startswith(_TRANSFORM_MODULES):
            for kind in list(vars(module).values()):
                if isinstance(kind, type) and kind.__module__ == module_name:
                    for method in ("forward", "__call__"):
                        function = vars(kind).get(method)
                        if callable(function):
                            probed = probe(function, _transform_key, size_of=_size_of_resized)
                            yield kind, method, function, probed


def _transform_key(transform: Any, *_args: Any, **_kwargs: Any) -> tuple[str, str]:
    return TRANSFORM, type(transform).__name__


def _of_dataset(dataset: Any) -> Iterator[Patch]:
    """The transforms of a dataset and of the datasets inside it."""
    for part in _datasets_within(dataset):
        for name in _TRANSFORM_ATTRIBUTES:
            transform = _attributes(part).get(name)
            if callable(transform):
                yield from _of_transform(part, name, transform)


def _of_transform(owner: Any, attribute: str, transform: Any) -> Iterator[Patch]:
    """A transform, and those that it is composed of."""
    kind = type(transform)
    if isinstance(transform, type) or _is_function(transform):
        yield _attributes(owner), attribute, transform, _probed_function(transform)
        return
    method = "forward" if "forward" in dir(kind) and hasattr(transform, "named_parameters") else "__call__"
    defined_in = next((base for base in kind.__mro__ if method in vars(base)), None)
    if (
        defined_in is not None
        and not defined_in.__flags__ & _IMMUTABLE  # such as numpy.ufunc
        and not defined_in.__module__.startswith("torch.nn")
    ):
        original = vars(defined_in)[method]
        yield defined_in, method, original, probe(original, _transform_key, size_of=_size_of_resized)
    inner = _attributes(transform).get("transforms")
    for number, part in enumerate(inner if isinstance(inner, list) else ()):
        if isinstance(part, type) or _is_function(part):
            yield inner, number, part, _probed_function(part)  # type: ignore[misc]
        elif callable(part):
            yield from _of_transform(transform, "transforms", part)


def _probed_function(function: Any) -> Any:
    """A function, class or partial that is probed; a partial keeps its attributes."""
    if isinstance(function, functools.partial):
        inner = probe(function.func, (TRANSFORM, _name_of(function)))
        return functools.partial(inner, *function.args, **function.keywords)
    return probe(function, (TRANSFORM, _name_of(function)))


def _name_of(function: Any) -> str:
    function = getattr(function, "func", function)  # of a partial
    if type(function).__name__ == "builtin_function_or_method":
        return str(function.__name__)
    return str(getattr(function, "__qualname__", type(function).__qualname__)).replace("<locals>.", "")


def _is_function(value: Any) -> bool:
    return type(value).__name__ in ("function", "builtin_function_or_method", "method", "partial")


def _attributes(value: Any) -> dict[str, Any]:
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


def _datasets_within(dataset: Any, depth: int = 4) -> Iterator[Any]:
    """The dataset and the datasets that it holds as attributes, such as in Subset or ConcatDataset."""
    yield dataset
    if depth == 0:
        return
    for value in list(_attributes(dataset).values()):
        parts = value if isinstance(value, (list, tuple)) and len(value) <= 64 else (value,)
        for part in parts:
            kind = type(part)
            if hasattr(kind, "__getitem__") and "Dataset" in "".join(base.__name__ for base in kind.__mro__):
                yield from _datasets_within(part, depth - 1)


class _TimedFile(io.FileIO):
    """A file whose reads count as the stage `read`."""

    readinto = probe(io.FileIO.readinto, (READ, "file"))
    readall = probe(io.FileIO.readall, (READ, "file"))
    read = probe(io.FileIO.read, (READ, "file"))


identity.FILES.add(_TimedFile)


def _open_timed(file: Any) -> io.BufferedReader:
    raw = _TimedFile(os.fspath(file), "rb")
    return io.BufferedReader(raw, getattr(raw, "_blksize", io.DEFAULT_BUFFER_SIZE))


_original_open = builtins.open
_probed_open = probe(_open_timed, (READ, "file"))
_PLAIN = (-1, None, None, None)  # buffering, encoding, errors and newline, as pathlib passes them


@functools.wraps(_original_open, updated=())
def _open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """`open`, whose files time their reads if opened by path for reading in binary mode."""
    is_plain = mode in ("rb", "br") and not kwargs and args == _PLAIN[: len(args)]
    if this_thread.spans is not None and is_plain and isinstance(file, (str, bytes, os.PathLike)):
        return _probed_open(file)
    return _original_open(file, mode, *args, **kwargs)
