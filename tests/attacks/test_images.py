"""Hostile image files, read with a cache of decoded files: each library's own answer, at each access.

A cache must neither hide an error of a library, nor answer where the library would not, nor take more memory.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest
from PIL import Image

from fastload.cache.decoded_files import DecodedFiles, open_files
from fastload.readers import identity, patches
from fastload.readers.decode_cache import DecodeCache
from tests.kit.decoding import DictStore
from tests.kit.faults import leave_address_space

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.kit.jobs import Job

SPARE_BYTES = 1 << 30


def saved(format_name: str, mode: str = "RGB", **options: Any) -> bytes:
    """A picture of noise of 48 x 40 pixels."""
    pixels = np.random.RandomState(0).randint(0, 256, (40, 48, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, format_name, **options)
    return file.getvalue()


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG that says that it has these sides."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    all_chunks = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in all_chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def bomb() -> bytes:
    return b"x\0\0" + zlib.compress(bytes(1 << 28))


def changed(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def tiff_with_a_loop() -> bytes:
    """The next directory is the first one."""
    content = saved("TIFF")
    (at,) = struct.unpack_from("<I", content, 4)
    (count,) = struct.unpack_from("<H", content, at)
    return changed(content, at + 2 + 12 * count, struct.pack("<I", at))


def jpeg_of(height: int, width: int) -> bytes:
    """A JPEG whose header says that it has these sides."""
    content = saved("JPEG")
    at = content.index(b"\xff\xc0")
    return changed(content, at + 5, struct.pack(">HH", height, width))


FILES: dict[str, Callable[[], bytes]] = {
    "png of 2.5 gigabytes": lambda: png(50_000, 50_000),
    "png of 100 megabytes without data": lambda: png(10_000, 10_000),
    "png with text that unpacks to 256 megabytes": lambda: png(4, 4, (b"zTXt", bomb())),
    "png with a profile that does": lambda: png(4, 4, (b"iCCP", bomb())),
    "png without sides": lambda: png(0, 0),
    "png with a wrong checksum": lambda: saved("PNG").replace(b"IDAT", b"IDAU"),
    "png with more after its end": lambda: saved("PNG") + saved("JPEG"),
    "jpeg of 4 gigabytes": lambda: jpeg_of(65_500, 65_500),
    "jpeg of more rows than there are": lambda: jpeg_of(4_000, 48),
    "jpeg of fewer rows": lambda: jpeg_of(8, 48),
    "jpeg without rows": lambda: jpeg_of(0, 48),
    "jpeg cut in the middle": lambda: saved("JPEG")[:1500],
    "jpeg and a second one": lambda: saved("JPEG") * 2,
    "jpeg in a png's place": lambda: b"\x89PNG\r\n\x1a\n" + saved("JPEG"),
    "jpeg with EXIF that points anywhere": lambda: saved("JPEG", exif=b"Exif\0\0II*\0" + b"\x7f" * 60),
    "tiff with a loop of directories": tiff_with_a_loop,
    "tiff whose directory is outside": lambda: changed(saved("TIFF"), 4, b"\xff\xff\xff\x7f"),
    "tiff of many strips": lambda: saved("TIFF", compression="raw", strip_size=48),
    "bmp of 2.7 gigabytes": lambda: changed(saved("BMP"), 18, struct.pack("<ii", 30_000, 30_000)),
    "bmp with negative rows": lambda: changed(saved("BMP"), 18, struct.pack("<ii", 48, -(1 << 31))),
    "webp that is longer than the file": lambda: changed(saved("WEBP"), 4, b"\xff\xff\xff\x7f"),
    "gif of 4 gigabytes": lambda: changed(saved("GIF"), 6, b"\xff\xff\xff\xff"),
    "zeros": lambda: bytes(5000),
    "nothing": lambda: b"",
}  # fmt: skip


def answer(read: Callable[[str], Any], path: str) -> Any:
    """What comes of a file: an array, or the type and the text of an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bombs that are small enough, and of metadata
        try:
            found = read(path)
        except Exception as error:  # noqa: BLE001 - errors are compared too
            return type(error).__name__, str(error).partition(" at 0x")[0]
    return None if found is None else (found.shape, str(found.dtype), found.tobytes()[: 1 << 20])


def with_pillow(path: str) -> Any:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def cropped(path: str) -> Any:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").crop((1, 2, 9, 10)).resize((5, 5)))


def from_bytes(path: str) -> Any:
    with open(path, "rb") as file:
        return np.asarray(Image.open(io.BytesIO(file.read())).convert("L"))


def with_opencv(path: str) -> Any:
    return cv2.imread(path)  # by its name: a function that a list refers to is left alone


READERS = [with_pillow, cropped, from_bytes, with_opencv]


def answers(state: Any, path: str) -> list[Any]:
    """How many answers each reader gave, with caches in memory and on disk; all answers if one differs."""
    found = []
    for read in READERS:
        own = [answer(read, path)]
        on_disk = DecodedFiles(open_files(f"{path}.files"))
        for store in (DictStore(), on_disk, on_disk):
            patches.meet()
            with DecodeCache(store, verify_share=1).active():
                own += [answer(read, path) for _ in range(3)]
        found.append(len(own) if all(each == own[0] for each in own) else own)
    return found


def limited() -> tuple[None, None]:
    """Starts the child of `reader`."""
    identity.SETTLED_S = identity.SETTLED_REMOTE_S = 0
    identity._file_systems.clear()
    for format_name in ("PNG", "JPEG", "TIFF", "WEBP"):  # what is imported at the first use
        Image.open(io.BytesIO(saved(format_name))).load()
    leave_address_space(SPARE_BYTES)
    return None, None


@pytest.mark.parametrize("name", FILES)
def test_the_answer_is_the_library_s_own(name: str, tmp_path: Path, reader: Job) -> None:
    """The same pixels or the same error, at each access, from memory and from disk; the process goes on."""
    (tmp_path / "image").write_bytes(FILES[name]())
    assert reader.ask(answers, str(tmp_path / "image")) == [10] * len(READERS)


def small(content: bytes, resized: bool) -> Any:
    """What can be seen of an image that is loaded, and shrunk if that is asked for."""
    image = Image.open(io.BytesIO(content))
    pixels = np.asarray(image.resize((9, 9)) if resized else image).tobytes()
    return pixels, image.mode, image.size, image.filename, image.tile, image.fp is None, image.info


def with_attributes(**attributes: Any) -> Callable[[Any, Any], Any]:
    return lambda array, note: (array, (*note[:2], {**note[2], **attributes}, *note[3:]))


FORGED: dict[str, Callable[[Any, Any], Any]] = {
    "no note": lambda array, note: (array, None),
    "an empty note": lambda array, note: (array, ()),
    "a number": lambda array, note: (array, 5),
    "a part": lambda array, note: (array, note[:3]),
    "another mode": lambda array, note: (array, ("CMYK", *note[1:])),
    "a mode that is a list": lambda array, note: (array, ([], *note[1:])),
    "a large size": lambda array, note: (array, (note[0], (1 << 17, 1 << 17), *note[2:])),
    "attributes in a list": lambda array, note: (array, (*note[:2], [1], *note[3:])),
    "no entries": lambda array, note: (array, (*note[:3], None, *note[4:])),
    "a position before the file": lambda array, note: (array, (*note[:5], -1)),
    "a position that is a text": lambda array, note: (array, (*note[:5], "1")),
    "the name of a file": with_attributes(filename="/etc/hostname"),
    "tiles": with_attributes(tile=[("raw", (0, 0, 1, 1), 0, ("L", 0, 1))]),
    "another file": with_attributes(fp=None),
    "no pixels": with_attributes(_im=None),
    "sides": with_attributes(_size=(5, 5)),
    "a palette": with_attributes(palette=1),
    "fewer pixels": lambda array, note: (array[1:], note),
    "more pixels": lambda array, note: (np.append(array, array), note),
    "pixels in rows": lambda array, note: (array[None], note),
    "pixels of another type": lambda array, note: (array.view(np.int8), note),
}


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("mode", ["RGB", "P"])
@pytest.mark.parametrize("resized", [False, True])
def test_a_forged_image_is_not_believed(name: str, mode: str, resized: bool) -> None:
    """Its file is decoded again: nothing is raised, opened or allocated."""
    cache = DecodeCache(store := DictStore(), verify_share=0)
    content = saved("PNG", mode)
    expected = small(content, resized)
    patches.meet()
    with cache.active():
        for number in range(4):
            assert small(content, resized) == expected
            if number == 2:  # its size repeats, so from now on the result is stored
                cache.lessons.conclude()
        for key, (array, note) in store.values.items():
            if mode == "P" or not resized:
                store.put(key, *FORGED[name](array, note))
            else:
                array, own = FORGED[name](array, note[1])
                store.put(key, array, (note[0], own))
        assert len(store.values) == 1
        assert small(content, resized) == expected
