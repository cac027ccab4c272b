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
   own), frame, settings of the decoder, LOAD_TRUNCATED_IMAGES. What a decoder makes that is not Pillow's
   own is not remembered.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL
from PIL import Image, ImageFile, features

from fastload.readers import lazy_image
from fastload.readers.decode_cache import DecodeCache, current, inactive, is_equal
from fastload.readers.identity import (
    Identity,
    digest,
    facts_of,
    facts_of_stream,
    identify_content,
    identify_facts,
    identify_path,
    is_fresh,
    is_plain,
)
from fastload.readers.lazy_image import OPENED, LazyCore, is_possible
from fastload.readers.original import PIXEL_BYTES, Original, Pixels, core_of, is_image, key_of_result
from fastload.readers.patches import Patch, package_of
from fastload.readers.reasons import NOT_A_FILE, OTHER_FORMAT, TOO_NEW, UNCOMPRESSED, UNUSUAL
from fastload.system.cached_property import cached_property

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.readers.decode_cache import Stored
    from fastload.readers.identity import Facts

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
# Attributes that decide what an image is, and what Pillow reads for it: no note changes them.
_DECIDED = frozenset({"_im", "fp", "_fp", "tile", "info", "filename", "palette", "_mode", "_size"})


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
        if opened is None or opened.load(self):
            return real(self, *args, **kwargs)
        return self.load(*args, **kwargs)  # without a cache now

    return load


class _File:
    """A file object; it is opened once, and Pillow reads its descriptor."""

    def __init__(self, file: Any) -> None:
        self.file = file
        facts = facts_of_stream(file)
        self._facts = facts if isinstance(facts, str) or is_fresh(file) else NOT_A_FILE

    def identity(self) -> Identity | str:
        """That of the file, if it is the same as when it was opened."""
        if isinstance(self._facts, str):
            return self._facts
        facts = facts_of_stream(self.file)
        if isinstance(facts, str) or facts != self._facts:
            return TOO_NEW
        return identify_facts(facts, self.file.fileno())

    def content(self) -> Callable[[], Content] | None:
        """What reads the file later, even if it is closed or deleted; None if that is not possible."""
        if isinstance(self._facts, str) or len(_descriptors) >= _MAX_DESCRIPTORS:
            return None
        with contextlib.suppress(OSError):  # no descriptor is left
            return _Descriptor(os.dup(self.file.fileno()), self._facts).content
        return None


class _Descriptor:
    """A file that was opened, and may be closed, renamed or deleted since."""

    def __init__(self, descriptor: int, facts: Facts) -> None:
        self._descriptor = descriptor
        self._facts = facts
        _descriptors.add(self)
        weakref.finalize(self, os.close, descriptor).atexit = False

    def content(self) -> tuple[bytes | bytearray, bool]:
        """All of the file, and whether its facts are those of when it was opened.

        Raises:
            OSError: It was written to.
        """
        num_bytes, content = self._facts[2], bytearray()
        while part := os.pread(self._descriptor, num_bytes + 1 - len(content), len(content)):
            content += part
        facts = facts_of(self._descriptor)
        if facts[:4] != self._facts[:4]:
            raise OSError("the file was written to after it was opened, and before its pixels were used")
        return content, facts == self._facts


_descriptors: weakref.WeakSet[_Descriptor] = weakref.WeakSet()
# A quarter of what a process may usually have open; further images are decoded at once.
_MAX_DESCRIPTORS = 256


class _Bytes:
    """A BytesIO; the object of its content is another one after any change."""

    def __init__(self, file: io.BytesIO) -> None:
        self.file = file
        self._content = b"" if file.tell() else file.getvalue()  # decoders read from there on

    def identity(self) -> Identity | str:
        """That of the content, if it is the same as when it was opened."""
        if self.file.closed or self.file.getvalue() is not self._content:
            return TOO_NEW
        return self._identity

    @cached_property
    def _identity(self) -> Identity | str:
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
        self._is_begun = False

    def load(self, image: Any) -> bool:
        """Load an image from the cache, or by Pillow; other threads wait until it is loaded.

        Returns:
            Whether this thread is loading it already.
        """
        with self._lock:
            if self._is_begun:
                return OPENED in vars(image)
            self._is_begun = True
            try:
                self._load(image)
            finally:
                vars(image).pop(OPENED, None)
        return False

    def _load(self, image: Any) -> None:
        cache = self._cache
        if current() is not cache or image._im is not None or image.fp is None:
            return
        is_uncompressed = image.format in ("BMP", "TIFF") and all(tile[0] == "raw" for tile in image.tile)
        if is_uncompressed and type(self._source) is _Bytes:
            cache.missed(UNCOMPRESSED)  # hashing it takes longer
            return
        reason: str | None = UNUSUAL if image.fp is not self._file else _why_not(image)
        identity = self._source.identity()
        known = identity
        if reason is None and isinstance(identity, Identity):
            known = cache.store.known_as(identity, self._source.file)
        key = None if reason or isinstance(known, str) else _key(image, known)
        if key is None:
            cache.missed(reason or (known if isinstance(known, str) else UNUSUAL))
            return
        if cache.is_unsteady(key):
            return
        stored, mode, size = cache.find(key), image.mode, image.size
        if stored is not None and not (is_image(stored, mode, size) and _is_note(stored.note, image)):
            stored = None  # it is forged
        if stored is not None and not cache.is_verification_due():
            if mode in PIXEL_BYTES and image.palette is None:
                pixels = Pixels.of(mode, size, stored.array)
                _restore(image, stored.note, LazyCore(mode, size, Original(cache, key, pixels=pixels)))
            else:
                _restore(image, stored.note, core_of(mode, size, stored.array))
        elif (
            stored is None
            and (result := cache.find(key_of_result(key))) is not None
            and type(result.note) is tuple
            and _is_note(note := (None, *result.note)[-1], image)
            and (content := self._source.content()) is not None
        ):
            original = Original(cache, key, note, decode=_decoder(image, content), result=result)
            _restore(image, note, LazyCore(mode, size, original))
        else:
            self._decode(image, key, identity, stored)

    def _decode(self, image: Any, key: bytes, identity: Identity | str, stored: Stored | None) -> None:
        """Load the image by Pillow; keep its pixels, or compare them with what is stored."""
        before, info = _snapshot(vars(image)), _snapshot(image.info)
        file, cache = image.fp, self._cache
        with inactive():
            image.load()
        # Pillow may have closed a file of its own. A path identifies nothing by itself, but finds the file.
        after = identify_path(image.filename) if image._exclusive_fp else self._source.identity()
        learned = _learned(image, before, info, file)
        if after != identity or learned is None:
            if stored is None:
                cache.missed(UNUSUAL if after == identity else TOO_NEW)
            return
        if stored is not None:
            if not is_equal(stored.array, np.frombuffer(image.tobytes(), np.uint8)):
                cache.differs(key, image.filename or "an image in memory")
            return
        original = Original(cache, key, learned, core=image.im)
        image.im = LazyCore(image.mode, image.size, original) if _is_lazy(image) else original.core()


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


def _why_not(image: Any) -> str | None:
    """Why an image cannot come from the cache; None if it can."""
    name = type(image).__name__
    if image.mode not in _MODES:
        return UNUSUAL
    if image.tell() if name in _FIRST_FRAME else getattr(image, "is_animated", False):
        return OTHER_FORMAT
    if not all(_is_genuine(Image.DECODERS.get(tile[0])) for tile in image.tile):
        return UNUSUAL
    if name == "TiffImageFile" and image.tag_v2.get(_ORIENTATION, 1) != 1:
        return UNUSUAL  # loading turns it, and changes its tags
    return None


def _is_genuine(decoder: Any) -> bool:
    # A class, or a function, whose own `__module__` a decorator can have copied.
    home = package_of(decoder) or getattr(decoder, "__module__", "").partition(".")[0]
    return decoder is None or home in ("PIL", "pillow_heif")


def _is_lazy(image: Any) -> bool:
    """Whether it can have a lazy core, and be decoded again later; `load_end` of a TIFF needs the pixels."""
    is_decoded_alike = not ImageFile.LOAD_TRUNCATED_IMAGES and not _is_tiff(image)
    return is_decoded_alike and image.mode in PIXEL_BYTES and image.palette is None


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
    if digest_of_how is None:
        return None
    return hashlib.blake2b(
        digest_of_how + repr(identity.parts).encode(errors="surrogatepass"), digest_size=16
    ).digest()


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
    return digest("Pillow 3", PIL.__version__, *((name, features.version(name)) for name in sorted(codecs)))


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
    for name in ("_im", "fp", "tile", "info", "_size", *(["_exif"] if _is_tiff(image) else [])):
        attributes.pop(name, None)
    attributes["_readonly"] = vars(image)["_readonly"]
    position = None if file.closed else file.tell()
    note = image.mode, image.size, attributes, entries, image.fp is not None, position
    is_usual = (
        vars(image).get("map") is None
        and (image.fp is None or image.fp is file)
        and not image.tile
        and before.keys() - {OPENED} <= vars(image).keys()
        and info.keys() <= image.info.keys()
        and image.size == before["_size"]
        and is_plain(note)
        and _is_note(note, image)
    )
    return note if is_usual else None


def _is_note(note: Any, image: Any) -> bool:
    """Whether a note can be one of `_learned`, of this image: in a file from elsewhere it can be forged."""
    match note:
        case (image.mode, image.size, dict() as attributes, dict(), bool(), None | int() as position):
            return _DECIDED.isdisjoint(attributes) and (position or 0) >= 0
    return False


def _is_tiff(image: Any) -> bool:
    return bool(image.format == "TIFF")


def _restore(image: Any, note: Any, core: Any) -> None:
    """Leave an image as loading did."""
    *_, attributes, entries, keeps_file, position = note
    file, image.im = image.fp, core
    image.tile = []
    if _is_tiff(image):
        image.load_end()  # reads the EXIF data while the file is open
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
