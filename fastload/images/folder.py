"""ImageFolder: a dataset of images in one folder per class, by torchvision's convention.

It runs in the process that indexes the dataset, which is mostly a worker.

Rules:
1. Classes, their numbers and the order of samples are the same as in torchvision's ImageFolder: a checkpoint
   or a list of indices made with it has the same meaning here.
2. The list of files is three flat objects (the paths' bytes, their offsets, and where each class starts).
   Every forked worker would copy a Python list of 1.2 million tuples page by page, because reading an element
   writes its reference count.
3. The constructor lists folders and opens no file.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
from torch.utils.data import Dataset

from fastload.errors import ImageReadError
from fastload.images.decode import DECODE_VERSION, check_size, read_image
from fastload.images.encoded import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy.typing as npt

T = TypeVar("T")

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_DIGEST_BYTES = 16


class ImageFolder(Dataset[tuple["npt.NDArray[np.uint8]", int]]):
    """Images in one folder per class: ``root/cat/1.jpg`` is a sample of class "cat".

    ``folder[i]`` is ``(image, label)``: a new C-contiguous ``(H, W, 3) uint8`` RGB array and an int. This
    class applies no transform; `fastload.CachedDataset` takes one.

    Args:
        root: The folder that holds a folder for each class. Files are found at any depth below the class
            folders, also through symbolic links.
        size: As for `fastload.read_image`: None, the shorter side, or (height, width).
        extensions: File name extensions of images, with the dot, in lower or upper case.
        allow_empty: Accept classes without images; they keep their numbers.

    Attributes:
        root: As given.
        size: As given.
        extensions: In lower case.
        classes: The names of the class folders, sorted.
        class_to_idx: The label of each class, by the class's name.

    Raises:
        FileNotFoundError: if ``root`` has no class folder, or a class has no image.
        TypeError: if ``size`` or ``extensions`` is of another type.
        ValueError: if ``size`` is not positive.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        size: int | tuple[int, int] | None = None,
        *,
        extensions: Iterable[str] = IMAGE_EXTENSIONS,
        allow_empty: bool = False,
    ) -> None:
        if isinstance(extensions, str):
            msg = f"extensions must be a collection such as ('.jpg',), got the string {extensions!r}"
            raise TypeError(msg)
        self.root = os.fspath(root)
        self.size = check_size(size)
        self.extensions = tuple(extension.lower() for extension in extensions)
        self.classes = _find_classes(self.root)
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        paths: list[bytes] = []
        class_starts = [0]
        for name in self.classes:
            paths += _find_files(self.root, name, self.extensions)
            class_starts.append(len(paths))
        empty = [
            name for label, name in enumerate(self.classes) if class_starts[label] == class_starts[label + 1]
        ]
        if empty and not allow_empty:
            msg = (
                f"Found no valid file for the classes {', '.join(empty)} in {self.root}. "
                f"Supported extensions are: {', '.join(self.extensions)}. "
                "Pass allow_empty=True to keep classes without images."
            )
            raise FileNotFoundError(msg)
        self._paths = b"".join(paths)  # relative to root
        self._path_ends = np.cumsum([len(path) for path in paths], dtype=np.int64)
        self._class_starts = np.array(class_starts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._path_ends)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        """The image and its label.

        Raises:
            ImageReadError: if the file cannot be read.
            IndexError: if there is no such sample.
        """
        path, label = self._sample(index)
        return read_image(path, self.size), label

    def encoded(self, index: int) -> tuple[EncodedImage, int]:
        """The image before it is decoded, and its label; no file is opened.

        Raises:
            IndexError: if there is no such sample.
            ValueError: if `size` is set, because images are then resized while they are decoded.
        """
        if self.size is not None:
            msg = (
                f"this ImageFolder resizes its images to size={self.size} while it decodes them, so it has "
                "no undecoded ones: omit size=, and let the transform begin with a crop or a resize"
            )
            raise ValueError(msg)
        path, label = self._sample(index)
        return EncodedImage(path), label

    @property
    def samples(self) -> Sequence[tuple[str, int]]:
        """Every (path, label), as a view that makes each pair on demand."""
        return SequenceView(self._sample, len(self))

    imgs = samples  # torchvision's second name

    @property
    def targets(self) -> Sequence[int]:
        """Every label, as a view; ``np.asarray(folder.targets)`` is fast."""
        return TargetsView(self._label, self._class_starts)

    def fingerprint(self) -> dict[str, str]:
        """What the samples are made of, in named parts, which change with any file, ``size`` and the classes.

        Covers the class names, and for each file its path below ``root``, its length and its modification
        time, but not its content. The method calls stat for every file, which takes seconds for a million.

        Raises:
            ImageReadError: if a file does not exist any more.
        """
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for number in range(len(self)):
            name = self._relative_path(number)
            path = os.path.join(self.root, os.fsdecode(name))
            try:
                stat = os.stat(path)
            except OSError as error:
                raise ImageReadError(path, error.strerror or str(error)) from error
            digest.update(b"\0%s\0%d %d" % (name, stat.st_size, stat.st_mtime_ns))
        classes = hashlib.blake2b(ascii(self.classes).encode("ascii"), digest_size=_DIGEST_BYTES)
        return {
            "files": f"{len(self)} files, digest {digest.hexdigest()}",
            "classes": f"{len(self.classes)} classes, digest {classes.hexdigest()}",
            "size": str(self.size),
            "decoder": f"version {DECODE_VERSION}",
        }

    def __repr__(self) -> str:
        lines = [
            f"Dataset {type(self).__name__}",
            f"    Number of datapoints: {len(self)}",
            f"    Root location: {self.root}",
        ]
        if self.size is not None:
            lines.append(f"    Size: {self.size}")
        return "\n".join(lines)

    def _sample(self, index: int) -> tuple[str, int]:
        number = _resolve(index, len(self))
        return os.path.join(self.root, os.fsdecode(self._relative_path(number))), self._label(number)

    def _label(self, index: int) -> int:
        number = _resolve(index, len(self))
        # side="right": a class without images starts at the same place as the next class.
        return int(np.searchsorted(self._class_starts, number, side="right")) - 1

    def _relative_path(self, number: int) -> bytes:
        start = self._path_ends[number - 1] if number else 0
        return self._paths[start : self._path_ends[number]]


class SequenceView(Sequence[T]):
    """A read-only list that makes its elements on demand."""

    def __init__(self, get: Callable[[int], T], length: int) -> None:
        self._get = get
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._get(number) for number in range(*index.indices(self._length))]
        return self._get(index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __repr__(self) -> str:
        shown = ", ".join(repr(self._get(number)) for number in range(min(3, self._length)))
        return f"[{shown}{', ...' if self._length > 3 else ''}] ({self._length} in all)"


class TargetsView(SequenceView[int]):
    """All labels; numpy converts them to an array without a Python step per sample."""

    def __init__(self, get: Callable[[int], int], class_starts: npt.NDArray[np.int64]) -> None:
        super().__init__(get, int(class_starts[-1]))
        self._class_starts = class_starts

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        counts = np.diff(self._class_starts)
        return np.repeat(np.arange(len(counts)), counts).astype(dtype or np.int64, copy=False)


def _resolve(index: int, length: int) -> int:
    """``index`` as a number from 0; negative indices count from the end, as in a list."""
    number = operator.index(index)
    if not -length <= number < length:
        msg = f"sample {number} is out of range: the dataset has {length} samples"
        raise IndexError(msg)
    return number % length


def _find_classes(root: str) -> list[str]:
    with os.scandir(root) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir())
    if not classes:
        msg = f"Couldn't find any class folder in {root}."
        raise FileNotFoundError(msg)
    return classes


def _find_files(root: str, name: str, extensions: tuple[str, ...]) -> list[bytes]:
    """A class's image files as paths below ``root``: folder by folder, sorted, in torchvision's order."""
    found = []
    for folder, files in sorted(_walk(os.path.join(root, name))):
        below_root = os.path.relpath(folder, root)
        found += [
            os.fsencode(os.path.join(below_root, file))
            for file in sorted(files)
            if file.lower().endswith(extensions)
        ]
    return found


def _walk(top: str) -> Iterator[tuple[str, list[str]]]:
    """Every folder below ``top`` with its files; follows links, except those that lead back to a parent."""
    for folder, subfolders, files in os.walk(top, onerror=_raise, followlinks=True):
        here = os.path.realpath(folder) + os.sep
        subfolders[:] = [
            name
            for name in subfolders
            if not here.startswith(os.path.join(os.path.realpath(os.path.join(folder, name)), ""))
        ]
        yield folder, files


def _raise(error: OSError) -> None:
    raise error  # a folder that cannot be listed must not look like an empty one
