"""ImageFolder: a dataset of images in one folder per class, by torchvision's convention.

It runs in the process that indexes the dataset, usually a worker. The folder can be remote.

Rules:
1. Classes, their numbers and the order of samples are the same as in torchvision's ImageFolder: a checkpoint
   or a list of indices made with it has the same meaning here.
2. The list of files is three flat objects (the paths' bytes, their offsets, and where each class starts).
   Every forked worker would copy a Python list of 1.2 million tuples page by page, because reading an element
   writes its reference count.
3. The constructor lists folders and opens no image.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

import numpy as np
from torch.utils.data import Dataset

from fastload.errors import ImageReadError
from fastload.images.decode import DECODE_VERSION, decode, read_file
from fastload.images.listing import DIGEST_BYTES, list_folder
from fastload.images.remote import RemoteFiles
from fastload.system.checks import as_path, check_size, position_of
from fastload.system.paths import is_url, local_path
from fastload.system.torchvision_arrays import reject_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy.typing as npt

T = TypeVar("T")

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_MAX_LISTED = 9  # classes, in an error


class ImageFolder(Dataset[tuple[Any, int]]):
    """Images in one folder per class: ``root/cat/1.jpg`` is a sample of class "cat".

    ``folder[i]`` is ``(image, label)``: a new C-contiguous ``(H, W, 3) uint8`` RGB array, or what `transform`
    makes of it, and an int. To cache decoded images, pass the transform to `fastload.CachedDataset` instead.

    A remote folder is read through fsspec (needs the extra `remote`, and the package of the protocol, such as
    s3fs). Loaders fetch the files of a batch in one call, at most 256 MiB at once.

    Args:
        root: The folder with one folder per class: a path, or an fsspec URL such as ``s3://bucket/train``.
            Files are found at any depth below the class folders, also through symbolic links.
        transform: Called with each image on every access: an albumentations pipeline, or any callable that
            takes an array.
        size: As for `fastload.read_image`: None, the shorter side, or (height, width).
        decode: False returns, instead of the image, the bytes of its file as a new array
            ``(num_bytes,) uint8``, which `fastload.decode_image` decodes.
        extensions: File name extensions of images, with the dot, in lower or upper case.
        allow_empty: Accept classes without images; they keep their numbers.
        storage_options: For a URL: arguments of fsspec's file system, such as credentials.

    Attributes:
        root: As given.
        transform: As given; can be set.
        size: As given.
        decode: As given.
        extensions: In lower case.
        classes: The names of the class folders, sorted.
        class_to_idx: The label of each class, by the class's name.

    Raises:
        FileNotFoundError: if ``root`` has no class folder, or a class has no image.
        ImportError: if a package for the URL's protocol is missing.
        RemoteFolderError: if a remote folder cannot be listed.
        TypeError: if ``transform``, ``size`` or ``extensions`` is of a different type.
        ValueError: if ``size`` is not positive, ``storage_options`` comes with a path, or fsspec has no such
            protocol.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[..., Any] | None = None,
        *,
        size: int | tuple[int, int] | None = None,
        decode: bool = True,
        extensions: Iterable[str] = IMAGE_EXTENSIONS,
        allow_empty: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if transform is not None and not callable(transform):
            raise TypeError(
                f"transform should be a function of an image, but got {transform!r}; size= is a keyword"
            )
        if isinstance(extensions, str) or not hasattr(extensions, "__iter__"):
            raise TypeError(f"extensions must be a collection such as ('.jpg',), got {extensions!r}")
        self.root = os.path.expanduser(as_path("root", root))
        self.transform = transform
        self.size = None if size is None else check_size(size)
        if size is not None and not decode:
            raise ValueError(f"size={size!r} resizes decoded images: omit it, or decode=False")
        self.decode = decode
        self.extensions = tuple(extension.lower() for extension in extensions)
        self._remote = RemoteFiles(self.root, storage_options) if is_url(self.root) else None
        if self._remote is None:
            if storage_options is not None:
                raise ValueError(f"storage_options= is for URLs, but root is the path {self.root!r}")
            self._root = local_path(self.root)
            files = list_folder(self._root, self.extensions)
        else:
            files = self._remote.listing(self.extensions)
        self.classes = files.classes
        if not self.classes:
            raise FileNotFoundError(
                f"Couldn't find any class folder in {self.root}: images of a class belong in "
                f"{self.root}/cat. If this is the folder of one class, pass the folder around it"
            )
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        empty = [name for name, paths in zip(self.classes, files.names, strict=True) if not paths]
        if empty and not allow_empty:
            named = ", ".join(empty[:_MAX_LISTED]) + (", ..." if len(empty) > _MAX_LISTED else "")
            raise FileNotFoundError(
                f"Found no valid file for the classes {named} in {self.root}. "
                f"Supported extensions are: {', '.join(self.extensions)}. Remove folders that are not "
                "classes, or pass allow_empty=True to keep classes without images."
            )
        paths = [path for paths_of_class in files.names for path in paths_of_class]
        self._paths = b"".join(paths)  # relative to root
        self._path_ends = np.cumsum([len(path) for path in paths], dtype=np.int64)
        self._class_starts = np.cumsum([0, *map(len, files.names)], dtype=np.int64)
        self._labels: npt.NDArray[np.int64] | None = None  # of samples that were assigned, in any order
        self._targets: Any = None  # those that were assigned
        self._nbytes = files.nbytes
        self._digest = files.digest

    def __len__(self) -> int:
        return len(self._path_ends)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """The image and its label.

        Raises:
            Exception: an error of the transform.
            ImageReadError: if the file cannot be read.
            IndexError: if there is no such sample.
        """
        path, content, label = self._file(index)
        if self.decode:
            image = decode(path if content is None else content, path, self.size)
        else:
            image = np.frombuffer(bytearray(read_file(path) if content is None else content), np.uint8)
        return image if self.transform is None else _transformed(self.transform, image), label

    @property
    def __getitems__(self) -> Callable[[list[int]], list[Any]] | None:
        """Returns the samples of a batch, for torch's loader; None unless the folder is remote."""
        return None if self._remote is None else self._read_batch

    def _read_batch(self, indices: list[int]) -> list[Any]:
        self._expect_remote(indices)
        return [self[index] for index in indices]  # through the `__getitem__` of a subclass

    @property
    def _expect(self) -> Callable[[Sequence[Any]], None] | None:
        """See `batch.access`; None unless the folder is remote."""
        return None if self._remote is None else self._expect_remote

    def _expect_remote(self, indices: Sequence[Any]) -> None:
        remote, nbytes, length = self._remote, self._nbytes, len(self)
        if remote is None or nbytes is None:
            raise AssertionError("only files at URLs are announced")
        # Reading any other index raises its error.
        valid = (index for index in indices if hasattr(index, "__index__") and -length <= index < length)
        numbers = (position_of(index, length) for index in valid)
        remote.expect({self._name(number): int(nbytes[number]) for number in numbers})

    @property
    def _has_encoded(self) -> bool:
        """Whether the samples are decoded images, as they are in their files."""
        return self.decode and self.size is None and self.transform is None

    def _file(self, index: int) -> tuple[str, bytes | None, int]:
        """The path, the content if the file is remote, and the label of a sample."""
        number = position_of(index, len(self))
        path, label = self._sample(number)
        return path, self._content(number), label

    @property
    def samples(self) -> SequenceView[tuple[str, int]]:
        """Every (path, label), as a view that makes each pair on demand.

        Can be set, before a CachedDataset is made of this folder: to a selection, or to other files and
        labels. Of a remote folder, `torch.utils.data.Subset` selects samples.

        Raises:
            TypeError: if a sample is not a pair of a path and an int.
            ValueError: if the folder is remote, or a label is negative.
        """
        return SequenceView(self._sample, len(self))

    @samples.setter
    def samples(self, samples: Iterable[tuple[str | os.PathLike[str], SupportsIndex]]) -> None:
        if self._remote is not None:
            raise ValueError(
                f"the samples of the remote folder {self.root} are its files: select some with "
                "torch.utils.data.Subset(folder, indices)"
            )
        pairs = [(os.fspath(path), operator.index(label)) for path, label in samples]
        if any(label < 0 for _, label in pairs):
            raise ValueError("a label is the number of a class, but samples has a negative one")
        prefix = os.path.join(self._root, "")
        below = ((path, path.removeprefix(prefix)) for path, _ in pairs)
        paths = [os.fsencode(os.path.abspath(path) if name == path else name) for path, name in below]
        self._paths = b"".join(paths)
        self._path_ends = np.cumsum([len(path) for path in paths], dtype=np.int64)
        self._labels = np.array([label for _, label in pairs], np.int64)

    imgs = samples  # torchvision's second name

    @property
    def targets(self) -> Sequence[int]:
        """Every label, as a view; ``np.asarray(folder.targets)`` is fast.

        Can be set, as torchvision's, which changes no sample: the labels are those of `samples`.
        """
        return (
            TargetsView(self._label, len(self), self._all_labels) if self._targets is None else self._targets
        )

    @targets.setter
    def targets(self, targets: Sequence[int]) -> None:
        self._targets = targets

    def fingerprint(self) -> dict[str, str] | None:
        """The identity of the samples, in named parts that change with any file, ``size`` and the classes.

        Covers the class names, and for each file its path below ``root``, its length and its modification
        time, but not its content. It calls stat for every file, which takes seconds for a million. Files of a
        remote folder count with the lengths and versions (such as ETags) they had when the folder was listed.
        If the store has no versions, the result is None: pass `CachedDataset` a ``cache_key``. It is also
        None with a transform, which can be any function.

        Raises:
            ImageReadError: if a file no longer exists.
        """
        if self.transform is not None:
            return None
        files = self._digest if self._remote is not None else self._local_digest()
        if files is None:
            return None
        classes = hashlib.blake2b(ascii(self.classes).encode("ascii"), digest_size=DIGEST_BYTES)
        if self._labels is not None:
            classes.update(self._labels.tobytes())
        return {
            "files": f"{len(self)} files, digest {files}",
            "classes": f"{len(self.classes)} classes, digest {classes.hexdigest()}",
            "size": str(self.size),
            "decoder": f"version {DECODE_VERSION}" if self.decode else "none",
        }

    def _local_digest(self) -> str:
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for number in range(len(self)):
            name = self._relative_path(number)
            path = os.path.join(self._root, os.fsdecode(name))
            try:
                stat = os.stat(path)
            except OSError as error:
                raise ImageReadError(path, error.strerror or str(error)) from error
            digest.update(b"\0%s\0%d %d" % (name, stat.st_size, stat.st_mtime_ns))
        return digest.hexdigest()

    def __repr__(self) -> str:
        size = "" if self.size is None else f", size={self.size}"
        counts = f"{len(self):,} images in {len(self.classes):,} classes"
        return f"{type(self).__name__}({self.root!r}{size}, {counts})"

    def _sample(self, index: int) -> tuple[str, int]:
        number = position_of(index, len(self))
        name, remote = self._name(number), self._remote
        return os.path.join(self._root, name) if remote is None else remote.path(name), self._label(number)

    def _label(self, index: int) -> int:
        number = position_of(index, len(self))
        if self._labels is not None:
            return int(self._labels[number])
        # side="right": a class without images starts at the same place as the next class.
        return int(np.searchsorted(self._class_starts, number, side="right")) - 1

    def _all_labels(self) -> npt.NDArray[np.int64]:
        counts = np.diff(self._class_starts)
        return np.repeat(np.arange(len(counts)), counts) if self._labels is None else self._labels.copy()

    def _relative_path(self, number: int) -> bytes:
        start = self._path_ends[number - 1] if number else 0
        return self._paths[start : self._path_ends[number]]

    def _content(self, number: int) -> bytes | None:
        """The content of a file at a URL; None of one on this machine."""
        return None if self._remote is None else self._remote.read(self._name(number))

    def _name(self, number: int) -> str:
        return os.fsdecode(self._relative_path(number))


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

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self, *other]

    def __radd__(self, other: Iterable[T]) -> list[T]:
        return [*other, *self]

    def __repr__(self) -> str:
        shown = ", ".join(repr(self._get(number)) for number in range(min(3, self._length)))
        return f"[{shown}{', ...' if self._length > 3 else ''}] ({self._length} in all)"


class TargetsView(SequenceView[int]):
    """All labels; numpy converts them to an array without a Python step per sample."""

    def __init__(
        self, get: Callable[[int], int], length: int, labels: Callable[[], npt.NDArray[np.int64]]
    ) -> None:
        super().__init__(get, length)
        self._labels = labels

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self._labels().astype(dtype or np.int64, copy=False)


def _transformed(transform: Callable[..., Any], image: Any) -> Any:
    """The transformed image: albumentations takes and returns it by name, all others by position."""
    reject_arrays(transform, image)
    is_named = any(base.__module__.partition(".")[0] == "albumentations" for base in type(transform).__mro__)
    return transform(image=image)["image"] if is_named else transform(image)
