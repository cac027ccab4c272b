"""Pillow: opened images whose file was decoded before take their pixels from the cache.

`PIL.Image.open` stays real, so types, sizes, `info`, EXIF data, drafts and errors are Pillow's. While a cache
is active, an opened image takes its pixels from the cache when it is loaded (see `lazy_image`), or from
Pillow, and then they are kept. Rules:

1. The file is identified before Pillow reads its header, and again before pixels are taken, and after pixels
   were decoded: by the descriptor that Pillow reads, or by the content of an `io.BytesIO`. A file object must
   give its file, and what it reads must be the image's file still.
2. A hit leaves the object as loading did: the attributes that changed then are stored beside the pixels. If
   one of them was not a plain value, nothing is stored.
3. Everything that decides the pixels is in the key: versions, class, mode, size, tiles (so a draft has its
   own), frame, settings of the decoder, LOAD_TRUNCATED_IMAGES. What a decoder or a method makes that is not
   Pillow's own, or what was filled up, is not remembered.
"""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL
from PIL import Image, ImageFile, features
from PIL.PngImagePlugin import iTXt

from fastload.errors import DecodeMismatchError
from fastload.readers import lazy_image
from fastload.readers.decode_cache import (
    CUT,
    OTHER_FORMAT,
    SEVERAL_FRAMES,
    UNCOMPRESSED,
    UNUSUAL,
    DecodeCache,
    current,
    inactive,
)
from fastload.readers.identity import (
    Identity,
    Unknown,
    digest,
    facts_of_stream,
    identify_content,
    identify_facts,
    identify_path,
    is_fresh,
    is_plain,
    is_shared,
)
from fastload.readers.lazy_image import LazyCore, is_possible
from fastload.readers.original import Original, key_of_result
from fastload.readers.patch import OPENED, Patch
from fastload.readers.sources import PIXEL_BYTES, Descriptor, Pixels, core_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.readers.decode_cache import Stored

Content = tuple["bytes | bytearray", bool]  # of a file, and whether it is as it was when it was opened
_MODES = frozenset({*PIXEL_BYTES, "1", "P", "PA"})
_CLASSES = frozenset(
    {
        ("PIL.AvifImagePlugin", "AvifImageFile"),
        ("PIL.BmpImagePlugin", "BmpImageFile"),
        ("PIL.JpegImagePlugin", "JpegImageFile"),
        ("PIL.MpoImagePlugin", "MpoImageFile"),
        ("PIL.PngImagePlugin", "PngImageFile"),
        ("PIL.TiffImagePlugin", "TiffImageFile"),
        ("PIL.WebPImagePlugin", "WebPImageFile"),
        _HEIF := ("pillow_heif.as_plugin", "HeifImageFile"),
    }
)
# Its frames are stored one after another, and the first one is loaded by itself.
_FIRST_FRAME = frozenset({"MpoImageFile", "TiffImageFile"})
_ORIENTATION = 0x0112
_TEXT = "\0iTXt"
_OPAQUE = frozenset({"JPEG", "MPO"})  # all their pixels are written, with this fourth byte
_PADDING = 255


_patches: list[Patch] = []  # those of classes that decode by themselves are added when they are met


def patches() -> list[Patch]:
    """Those of opened files, and of all images."""
    if not is_possible():
        return []
    _patches[:] = [
        Patch(ImageFile.ImageFile, "__init__", _remembering),
        Patch(ImageFile.ImageFile, "load", _loading, lazy_image.is_lazy),
        *lazy_image.patches(),
    ]
    return _patches


def _remembering(real: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, fp: Any, *args: Any, **kwargs: Any) -> None:
        cache, cls = current(), type(self)
        if cache is None or (cls.__module__, cls.__name__) not in _CLASSES:
            real(self, fp, *args, **kwargs)
            if cache is not None:
                cache.missed(OTHER_FORMAT)
            return
        owner = next(base for base in cls.__mro__ if "load" in vars(base))
        if all(patch.owner is not owner for patch in _patches):
            _patches.append(Patch(owner, "load", _loading, lazy_image.is_lazy))
            _patches[-1].put()
        source = _Bytes(fp) if type(fp) is io.BytesIO else _File(fp)  # before the header is read
        real(self, fp, *args, **kwargs)
        if self._im is None:
            vars(self)[OPENED] = _Opened(cache, source, self.fp)

    return init


def _loading(real: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        opened = vars(self).get(OPENED)
        if opened is None or opened.is_loading:
            return real(self, *args, **kwargs)
        opened.load(self)
        return self.load(*args, **kwargs)  # without a cache now

    return load


class _File:
    """A file object; it is opened once, and Pillow reads its descriptor."""

    def __init__(self, file: Any) -> None:
        self.file = file
        facts = facts_of_stream(file)
        self._facts = facts if isinstance(facts, Unknown) or is_fresh(file) else Unknown.HELD

    def identity(self) -> Identity | Unknown:
        """That of the file, if it is the same as when it was opened."""
        if isinstance(self._facts, Unknown):
            return self._facts
        facts = facts_of_stream(self.file)
        if isinstance(facts, Unknown) or facts != self._facts:
            return Unknown.TOO_NEW
        descriptor = self.file.fileno()
        return Unknown.HELD if is_shared(descriptor) else identify_facts(facts, descriptor)

    def content(self) -> Callable[[], Content] | None:
        """What reads the file later, even if it is closed or deleted; None if that is not possible."""
        try:
            return (
                None
                if isinstance(self._facts, Unknown)
                else Descriptor.of(self.file.fileno(), self._facts).content
            )
        except OSError:  # no descriptor is left, or someone would lose a lock
            return None


class _Bytes:
    """A BytesIO; the object of its content is another one after any change."""

    def __init__(self, file: io.BytesIO) -> None:
        self.file = file
        self._content = file.getvalue()

    def identity(self) -> Identity | Unknown:
        """That of the content, if it is the same as when it was opened."""
        if self.file.closed or self.file.getvalue() is not self._content:
            return Unknown.TOO_NEW
        return self._identity

    @functools.cached_property
    def _identity(self) -> Identity | Unknown:
        return identify_content(self._content)

    def content(self) -> Callable[[], Content]:
        """What reads the content later."""
        content = self._content
        return lambda: (content, True)


class _Opened:
    """An opened file that is not loaded.

    Args:
        cache: The cache that was active.
        source: What it reads.
        file: The image's attribute `fp` after opening.
    """

    def __init__(self, cache: DecodeCache, source: _File | _Bytes, file: Any) -> None:
        self._file = file
        self._cache = cache
        self._source = source
        self._lock = threading.RLock()
        self.is_loading = False

    def load(self, image: Any) -> None:
        """Load an image from the cache, or by Pillow; other threads wait until it is loaded."""
        with self._lock:
            if self.is_loading:  # in this thread, or it is done
                return
            self.is_loading = True
            try:
                self._load(image)
            finally:
                vars(image).pop(OPENED, None)

    def _load(self, image: Any) -> None:
        cache = self._cache
        if current() is not cache or image._im is not None or image.fp is None:
            return
        is_uncompressed = image.format in ("BMP", "TIFF") and all(tile[0] == "raw" for tile in image.tile)
        if is_uncompressed and type(self._source) is _Bytes:
            cache.missed(UNCOMPRESSED)  # hashing it takes longer
            return
        reason: Unknown | str | None = UNUSUAL if image.fp is not self._file else _why_not(image)
        identity = self._source.identity()
        known = identity if reason else cache.known_as(identity, self._source.file)
        key = None
        if reason is None and isinstance(known, Identity):
            key = _key(image, known)
        if key is None:
            cache.missed(reason or (known if isinstance(known, Unknown) else UNUSUAL))
            return
        if cache.is_unsteady(key):
            return
        stored = cache.find(key)
        if stored is not None and not cache.is_verification_due():
            raw, mode, size, *_ = stored.note
            if raw in PIXEL_BYTES and image.palette is None:
                pixels = Pixels.of(mode, raw, size, stored.array)
                _restore(image, stored.note, LazyCore(mode, size, Original(cache, key, pixels=pixels)))
            else:
                _restore(image, stored.note, core_of(mode, raw, size, stored.array))
        elif (
            stored is None
            and (result := cache.find(key_of_result(key))) is not None
            and (content := self._source.content()) is not None
        ):
            note = result.note[1]
            original = Original(cache, key, note, decode=_decoder(image, content), result=result)
            _restore(image, note, LazyCore(note[1], note[2], original))
        else:
            self._decode(image, key, identity, stored)

    def _decode(self, image: Any, key: bytes, identity: Identity | Unknown, stored: Stored | None) -> None:
        """Load the image by Pillow; keep its pixels, or compare them with what is stored."""
        before, info = _snapshot(vars(image)), _snapshot(image.info)
        file, cache = image.fp, self._cache
        with inactive(), _reads(image) as is_cut:
            image.load()
        # Pillow may have closed a file of its own. A path identifies nothing by itself, but finds the file.
        after = identify_path(image.filename) if image._exclusive_fp else self._source.identity()
        learned = _learned(image, before, info, file)
        if after != identity or is_cut or learned is None:
            if stored is None:
                cache.missed(CUT if is_cut else UNUSUAL if after == identity else Unknown.TOO_NEW)
            return
        raw = _raw_of(image)
        if stored is not None:
            try:
                pixels = np.frombuffer(image.tobytes("raw", raw), np.uint8)
                cache.verify(stored.array, pixels, image.filename or "an image in memory")
            except DecodeMismatchError as error:
                cache.differs(key, error)
            return
        original = Original(cache, key, (raw, *learned), core=image.im)
        image.im = LazyCore(image.mode, image.size, original) if _is_lazy(image, raw) else original.core()


def _decoder(image: Any, content: Callable[[], Content]) -> Callable[[], tuple[Any, bool]]:
    """What decodes an opened image later, as it is now."""
    cls, tiles = type(image), [*image.tile]
    state = {name: vars(image)[name] for name in ("_size", "_mode", "decoderconfig")}

    def decode() -> tuple[Any, bool]:
        encoded, is_unchanged = content()
        with inactive():
            image = cls(io.BytesIO(encoded))
            vars(image).update(state, tile=[*tiles])
            image.load()
        return image.im, is_unchanged

    return decode


def _is_mapped(image: Any) -> bool:
    """Whether loading maps the file, which a method that reads would prevent."""
    if not image.filename or [tile[0] for tile in image.tile] != ["raw"]:
        return False
    arguments = image.tile[0][3]
    return bool((arguments if type(arguments) is str else arguments[0]) == image.mode)


@contextlib.contextmanager
def _reads(image: Any) -> Iterator[list[bool]]:
    """Yields a list that is not empty once LOAD_TRUNCATED_IMAGES has made up for a read that gave nothing."""
    is_cut: list[bool] = []
    if not ImageFile.LOAD_TRUNCATED_IMAGES or _is_mapped(image):
        yield is_cut
        return
    read = getattr(image, "load_read", None)

    def load_read(num_bytes: int) -> bytes:
        try:
            content: bytes = (read or image.fp.read)(num_bytes)
        except Exception:
            is_cut.append(True)
            raise
        if not content or "_ended" in vars(image):  # of a JPEG that ends early
            is_cut.append(True)
        return content

    image.load_read = load_read
    try:
        yield is_cut
    finally:
        vars(image).pop("load_read", None)


def _why_not(image: Any) -> str | None:
    """Why an image cannot come from the cache; None if it can."""
    name = type(image).__name__
    if image.mode not in _MODES:
        return UNUSUAL
    if image.tell() if name in _FIRST_FRAME else getattr(image, "is_animated", False):
        return SEVERAL_FRAMES
    if not _is_pillows(image):
        return UNUSUAL
    if name == "TiffImageFile" and image.tag_v2.get(_ORIENTATION, 1) != 1:
        return UNUSUAL  # loading turns it, and changes its tags
    return None


def _is_pillows(image: Any) -> bool:
    """Whether the decoders and methods that load it are Pillow's own, or its plugin's."""
    cls: Any = type(image)
    get, names, methods = _loaders(cls)
    return (
        get(cls) == methods
        and names.isdisjoint(vars(image))
        and all(_is_genuine(Image.DECODERS.get(tile[0])) for tile in image.tile)
    )


@functools.cache
def _loaders(cls: Any) -> tuple[Callable[[type], Any], frozenset[str], tuple[Any, ...] | None]:
    """What gets the methods that load images of a class, their names, and they; None: not all are genuine."""
    names = [name for name in dir(cls) if name.startswith(("load", "_load")) and callable(getattr(cls, name))]
    get = operator.attrgetter(*names)
    methods = get(cls)
    return get, frozenset(names), methods if all(map(_is_genuine, methods)) else None


def _is_genuine(function: Any) -> bool:
    # Not the function's own `__module__`, which functools.wraps copies.
    home = getattr(function, "__globals__", {}).get("__name__") or str(getattr(function, "__module__", ""))
    return function is None or home.partition(".")[0] in ("PIL", "pillow_heif")


def _is_lazy(image: Any, raw: str) -> bool:
    """Whether it can have a lazy core, and be decoded again later; `load_end` of a TIFF needs the pixels."""
    is_decoded_alike = not ImageFile.LOAD_TRUNCATED_IMAGES and not _is_tiff(image)
    return is_decoded_alike and raw in PIXEL_BYTES and image.palette is None


def _key(image: Any, identity: Identity) -> bytes | None:
    cls = type(image)
    how = (
        *(cls.__module__, cls.__name__, image.mode, tuple(image.size)),
        tuple(map(tuple, image.tile)),
        tuple(image.decoderconfig),
        bool(ImageFile.LOAD_TRUNCATED_IMAGES),
        bool(image._exclusive_fp),  # Pillow closes such a file
        getattr(image, "tile_prefix", b""),
        _heif() if (cls.__module__, cls.__name__) == _HEIF else None,
    )
    try:
        digest_of_how = _digest(_versions(), how)
    except TypeError:  # not hashable, so not plain
        return None
    return digest_of_how and digest(digest_of_how, identity.parts)


@functools.lru_cache(1024)
def _digest(*parts: Any) -> bytes | None:
    return digest(*parts)


def _heif() -> str:
    """What decides the pixels of pillow-heif: its release, codecs and options."""
    library = sys.modules["pillow_heif"]
    options = {name: value for name, value in vars(library.options).items() if name.isupper()}
    return repr((library.__version__, library.libheif_info(), options))


@functools.cache
def _versions() -> bytes | None:
    names = {*features.codecs, *features.modules, *features.features}  # asking for another one warns
    codecs = names & {"jpg", "jpg_2000", "zlib", "libtiff", "webp", "avif", "libjpeg_turbo", "zlib_ng"}
    return digest("Pillow 2", PIL.__version__, *((name, features.version(name)) for name in sorted(codecs)))


def _snapshot(attributes: dict[Any, Any]) -> dict[Any, Any]:
    """The attributes before loading, which changes some lists and dicts in place."""
    return {
        name: value.copy() if type(value) in (list, dict) else value for name, value in attributes.items()
    }


def _changed(before: dict[Any, Any], after: dict[Any, Any]) -> dict[Any, Any]:
    """The entries that loading has changed."""
    return {
        name: value
        for name, value in after.items()
        if name not in before
        or (before[name] != value if type(value) in (list, dict) else before[name] is not value)
    }


def _learned(image: Any, before: dict[str, Any], info: dict[Any, Any], file: Any) -> Any:
    """What loading has done, as a note to `_restore`; None if it did something unusual."""
    attributes, entries = _changed(before, vars(image)), _changed(info, image.info)
    for name in ("_im", "fp", "tile", "info", *(["_exif"] if _is_tiff(image) else [])):
        attributes.pop(name, None)
    readonly = "_readonly" if "_readonly" in vars(image) else "readonly"  # before Pillow 11.1
    attributes[readonly] = vars(image)[readonly]
    packed = _packed(attributes), _packed(entries)
    note = (
        image.mode,
        image.size,
        *packed,
        packed != (attributes, entries),  # some of it is text
        image.fp is not None,
        None if file.closed else file.tell(),
    )
    is_usual = (
        vars(image).get("map") is None
        and (image.fp is None or image.fp is file)
        and not image.tile
        and before.keys() - {OPENED} <= vars(image).keys()
        and info.keys() <= image.info.keys()
        and is_plain(note)
    )
    return note if is_usual else None


def _packed(value: Any) -> Any:
    """A value, with the international texts of PNG as tuples, which nothing else begins like."""
    if type(value) is dict:
        return {name: _packed(part) for name, part in value.items()}
    return (_TEXT, str(value), value.lang, value.tkey) if type(value) is iTXt else value


def _unpacked(value: Any) -> Any:
    if type(value) is dict:
        return {name: _unpacked(part) for name, part in value.items()}
    return iTXt(*value[1:]) if type(value) is tuple and value[:1] == (_TEXT,) else value


def _raw_of(image: Any) -> str:
    """The raw mode that holds all of a loaded image."""
    if image.mode == "RGB" and image.format not in _OPAQUE:
        # Its fourth byte shows in Arrow and in the raw mode RGBX.
        content = np.frombuffer(image.tobytes("raw", "RGBX"), np.uint32)
        if content.min() >> 24 != _PADDING:
            return "RGBX"
    return str(image.mode)


def _is_tiff(image: Any) -> bool:
    return bool(image.format == "TIFF")


def _restore(image: Any, note: Any, core: Any) -> None:
    """Leave an image as loading did."""
    *_, attributes, entries, has_text, keeps_file, position = note
    file, image.im = image.fp, core
    image.tile = []
    if _is_tiff(image):
        image.load_end()  # reads the EXIF data while the file is open
    if has_text:
        attributes, entries = _unpacked(attributes), _unpacked(entries)
    vars(image).update(attributes)
    image.info.update(entries)
    if position is None:
        file.close()
    else:
        file.seek(position)
    if not keeps_file:
        image.fp = None
    if image.palette is not None:
        Image.Image.load(image)
