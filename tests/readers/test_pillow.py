"""Remembered images are like Pillow's, in every method, argument and error: compared with Pillow's own."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import importlib.util
import io
import itertools
import os
import pickle
import signal
import threading
import warnings
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageFilter, ImageOps, features
from PIL.PngImagePlugin import PngInfo
from PIL.WebPImagePlugin import WebPImageFile

from fastload.errors import DecodeMismatchError
from fastload.readers import patches, pillow
from fastload.readers.decode_cache import DecodeCache, inactive
from fastload.readers.lazy_image import lazy_core
from fastload.readers.lessons import Lessons
from fastload.system.cache_counts import cache_counts
from tests.kit.decoding import DictStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Images that are dropped before they are loaded leave their file to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("settled"),
]
WIDTH, HEIGHT = 13, 9


def pixels(mode: str) -> Image.Image:
    """An image of a mode, in which no two pixels are equal by chance."""
    rng = np.random.default_rng(zlib.crc32(mode.encode()))
    if mode == "P":
        image = Image.fromarray(rng.integers(0, 7, (HEIGHT, WIDTH), np.uint8)).convert("P")
        image.putpalette(rng.integers(0, 256, 21, np.uint8).tobytes())
        return image
    if mode == "1":
        return Image.fromarray(rng.integers(0, 2, (HEIGHT, WIDTH), np.uint8) * 255).convert("1")
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 1 << 16, (HEIGHT, WIDTH), np.uint16))
    channels = len(Image.new(mode, (1, 1)).getbands())
    content = rng.integers(0, 256, (HEIGHT, WIDTH, channels), np.uint8)
    return Image.frombytes(mode, (WIDTH, HEIGHT), content.tobytes())


def png(text: bool = False, **options: Any) -> dict[str, Any]:
    """How a PNG is saved; with text, also behind its pixels."""
    if text:
        options["pnginfo"] = PngInfo()
        options["pnginfo"].add_text("Title", "a photograph")
        options["pnginfo"].add_itxt("Author", "nobody")
    return {"format": "PNG", **options}


EXIF = Image.Exif()
EXIF[0x0112] = 6
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "jpeg": ("RGB", {"format": "JPEG"}),
    "jpeg gray": ("L", {"format": "JPEG"}),
    "jpeg cmyk": ("CMYK", {"format": "JPEG"}),
    "jpeg progressive": ("RGB", {"format": "JPEG", "progressive": True, "exif": EXIF.tobytes()}),
    "png": ("RGB", png()),
    "png gray": ("L", png()),
    "png alpha": ("RGBA", png()),
    "png gray alpha": ("LA", png()),
    "png palette": ("P", png()),
    "png transparent palette": ("P", png(transparency=2)),
    "png transparent color": ("RGB", png(transparency=(1, 2, 3))),
    "png bits": ("1", png()),
    "png 16": ("I;16", png()),
    "png text": ("RGB", png(text=True)),
    "bmp": ("RGB", {"format": "BMP"}),
    "bmp mapped": ("L", {"format": "BMP"}),
    "tiff": ("RGB", {"format": "TIFF"}),
    "tiff lzw": ("RGB", {"format": "TIFF", "compression": "tiff_lzw"}),
    "tiff turned": ("L", {"format": "TIFF", "compression": "tiff_lzw", "exif": EXIF.tobytes()}),
    "gif": ("P", {"format": "GIF"}),
    **({"webp": ("RGB", {"format": "WEBP"})} if features.check("webp") else {}),
    **({"webp alpha": ("RGBA", {"format": "WEBP", "lossless": True})} if features.check("webp") else {}),
    **({"avif": ("RGB", {"format": "AVIF"})} if "avif" in features.get_supported() else {}),
    "mpo": ("RGB", {"format": "MPO", "save_all": True, "append_images": [pixels("RGB").rotate(180)]}),
}
if importlib.util.find_spec("pillow_heif"):
    importlib.import_module("pillow_heif").register_heif_opener()
    FILES["heif"] = ("RGB", {"format": "HEIF", "exif": EXIF.tobytes()})
    FILES["heif alpha"] = ("RGBA", {"format": "HEIF"})
    FILES["heif 16"] = ("I;16", {"format": "HEIF"})
    FILES["heif frames"] = ("RGB", {"format": "HEIF", "save_all": True, "append_images": [pixels("RGB")]})
# What is decoded anew each time: turned while it is loaded, a format of frames.
NEVER = {"png text", "tiff turned", "gif", "heif frames"}
UNCOMPRESSED = {"bmp", "bmp mapped", "tiff"}


def content(name: str) -> bytes:
    """A file."""
    mode, options = FILES[name]
    file = io.BytesIO()
    pixels(mode).save(file, **options)
    return file.getvalue()


def plain(value: Any) -> Any:
    """A value that can be compared; an image with all that Pillow's users can ask of it."""
    if isinstance(value, Image.Image):
        attributes = {
            name: plain(part)
            for name, part in vars(value).items()
            if name not in ("_im", "fp", "_fp", "png", "_decoder", "_exif", "tag_v2", "filename", "_fastload")
        }
        image = {
            "class": type(value),
            "repr": repr(value).partition(" at ")[0],
            "palette": value.getpalette() if value._im is not None else None,
            "bytes": value.tobytes(),
            "readonly": value.readonly,
            "format": value.format,
        }
        file = getattr(value, "fp", None)
        return {**attributes, **image, "fp": file is not None and not file.closed}
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes(), value.flags.writeable
    if isinstance(value, (list, tuple)):
        return type(value), [plain(part) for part in value]
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (int, float, str, bytes, bool, type(None))):
        return value
    return type(value)


def outcome(operation: Callable[[Any], Any], image: Any) -> Any:
    """The result of an operation, or its error, with the image afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = plain(operation(image))
        except Exception as error:  # noqa: BLE001 - compared with the other one's
            result = type(error), str(error)
        try:
            return result, plain(image), dict(image.getexif())
        except Exception as error:  # noqa: BLE001 - it is closed
            return result, type(error), str(error)


def set_pixel(image: Any) -> Any:
    """Write through the pixel access of a loaded image."""
    access = image.load()
    access[3, 2] = access[1, 1]
    return image.getpixel((3, 2))


def paste(image: Any) -> Any:
    image.paste(image.crop((0, 0, 2, 2)), (4, 4))
    return image


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda image: (image.size, image.mode, image.info),
    "load": lambda image: image.load() is not None,
    "load twice": lambda image: [image.load() and None, image.load() and None],
    "array": np.asarray,
    "array twice": lambda image: [np.asarray(image), np.array(image)],
    "array of float": lambda image: np.asarray(image, np.float32),
    "tobytes": lambda image: image.tobytes(),
    "copy": lambda image: image.copy(),
    "copy of copy": lambda image: image.copy().copy(),
    "array of copy": lambda image: np.asarray(image.copy()),
    **{
        f"convert {mode}": lambda image, mode=mode: image.convert(mode)  # type: ignore[misc]
        for mode in ("RGB", "L", "RGBA", "CMYK", "P", "1", "LA", "I", "F", "HSV", None, "", "odd", 5)
    },
    "convert by keyword": lambda image: image.convert(mode=image.mode),
    "convert with matrix": lambda image: image.convert("RGB", (1, 0, 0, 0) * 3),
    "convert to itself with matrix": lambda image: image.convert(image.mode, (1, 0, 0, 0) * 3),
    "convert with dither": lambda image: image.convert(image.mode, dither=None),
    "convert to palette": lambda image: image.convert("P", palette=Image.Palette.ADAPTIVE, colors=4),
    **{
        f"crop {box!r}": lambda image, box=box: image.crop(box)  # type: ignore[misc]
        for box in (
            *((1, 2, 5, 7), [1, 2, 5, 7], (1.4, 2.5, 5.5, 7), (0, 0, WIDTH, HEIGHT), (-3, -2, 4, 4)),
            *(
                (5, 5, 99, 99),
                (5, 5, 5, 8),
                (5, 2, 1, 7),
                (1, 7, 5, 2),
                (1, 2, 3),
                None,
                "box",
                (1, 2, "3", 4),
            ),
            *(tuple(np.array((1, 2, 5, 7))), (True, 1, 3, 4), (float("nan"), 1, 3, 4), (0, 0, 10**9, 10**9)),
        )
    },
    "crop of crop": lambda image: image.crop((1, 1, 9, 8)).crop((2, 1, 5, 4)),
    "array of crop": lambda image: np.asarray(image.crop((1, 1, 9, 8))),
    "array of crop of crop": lambda image: np.asarray(image.crop((1, 1, 9, 8)).crop((2, 1, 5, 4))),
    "crop then convert": lambda image: image.crop((1, 1, 9, 8)).convert("L"),
    "convert then crop": lambda image: image.convert("RGB").crop((1, 1, 9, 8)),
    "converted, then the image": lambda image: [image.convert("RGB"), np.asarray(image)],
    "image, then converted": lambda image: [image.load() and None, image.convert("RGB")],
    "resize": lambda image: image.resize((4, 5)),
    "resize by array": lambda image: image.resize(np.array((4, 5))),
    "resize by numpy": lambda image: image.resize((np.int64(4), np.int32(5)), Image.Resampling.BICUBIC),
    "resize box": lambda image: image.resize((4, 5), Image.Resampling.BILINEAR, (1, 1, 6.5, 7), 2.0),
    "resize wrongly": lambda image: image.resize((4, 5), 77),
    "resize to nothing": lambda image: image.resize((0, 5)),
    "thumbnail": lambda image: image.thumbnail((5, 5)),
    "reduce": lambda image: image.reduce(2),
    "draft": lambda image: [image.draft("L", (4, 4)), image.convert("L")],
    "transpose": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "rotate": lambda image: image.rotate(30, expand=True),
    "filter": lambda image: image.filter(ImageFilter.BoxBlur(1)),
    "split": lambda image: image.split(),
    "getchannel": lambda image: image.getchannel(0),
    "getbbox": lambda image: image.getbbox(),
    "getextrema": lambda image: image.getextrema(),
    "histogram": lambda image: image.histogram(),
    "getcolors": lambda image: image.getcolors(),
    "getpixel": lambda image: image.getpixel((1, 2)),
    "putpixel": lambda image: image.putpixel((1, 2), image.getpixel((0, 0))),
    "putalpha": lambda image: image.putalpha(7),
    "putdata": lambda image: image.putdata([image.getpixel((0, 0))] * 5),
    "point": lambda image: image.point(lambda value: value // 2),
    "quantize": lambda image: image.quantize(4),
    "paste": paste,
    "set pixel": set_pixel,
    "getexif": lambda image: dict(image.getexif()),
    "exif_transpose": ImageOps.exif_transpose,
    "exif_transpose of convert": lambda image: ImageOps.exif_transpose(image.convert("RGB")),
    "seek": lambda image: [image.seek(0), image.tell(), image.load() and None],
    "seek 1": lambda image: [image.load() and None, image.seek(1), np.asarray(image)],
    "seek 1 first": lambda image: [image.seek(1), np.asarray(image)],
    "verify": lambda image: image.verify(),
    "verify, then load": lambda image: [image.verify(), image.load()],
    "close": lambda image: image.close(),
    "close, then convert": lambda image: [image.close(), image.convert("RGB")],
    "load, close, then crop": lambda image: [image.load() and None, image.close(), image.crop((0, 0, 2, 2))],
    "convert, close, then crop": lambda image: [
        image.convert(image.mode),
        image.close(),
        image.crop((0, 0, 2, 2)),
    ],
    "copy, close the copy": lambda image: [(one := image.copy()).close(), one.tobytes()],
    "with": lambda image: [image.__enter__() is image, image.__exit__(None, None, None), image.mode],
    "load in with": lambda image: [image.__enter__().load() and None, image.__exit__(), np.asarray(image)],
    "pickle": lambda image: pickle.loads(pickle.dumps(image)),
    "pickle of copy": lambda image: pickle.loads(pickle.dumps(image.copy(), 2)),
    "copy.copy": lambda image: copy.copy(image),
    "deepcopy": lambda image: copy.deepcopy(image.copy()),
    "equal": lambda image: [image == image.copy(), image.copy() == image.copy(), image.copy() == 3],
    "save": lambda image: image.save(file := io.BytesIO(), "PNG") or file.getvalue(),
    "getdata": lambda image: list(image.getdata()) if hasattr(image, "getdata") else None,
    "has_transparency_data": lambda image: image.has_transparency_data,
    "isinstance": lambda image: [
        isinstance(image, ImageFile.ImageFile),
        isinstance(image.copy(), Image.Image),
    ],
    "format_description": lambda image: [image.format, image.get_format_mimetype(), image.copy().format],
    "text": lambda image: image.text,
    "custom attribute": lambda image: [setattr(image, "note", 3), image.copy(), image.note],
    "info is private": lambda image: [image.copy().info.update(a=1), image.info],
    "im": lambda image: [image.im.size, image.im.mode],
    "im of copy": lambda image: [image.copy().im.size, type(image.copy().im)],
    "no such attribute": lambda image: image.nothing,
    "arrow": lambda image: type(image.__arrow_c_array__()),
}


def ways_to_open(name: str, path: Path) -> list[Callable[[], Any]]:
    """By a path, by a file and from bytes."""
    path.write_bytes(content(name))
    return [
        lambda: Image.open(path),
        lambda: Image.open(path.open("rb")),
        lambda: Image.open(io.BytesIO(path.read_bytes())),
    ]


@pytest.mark.parametrize("name", FILES)
def test_every_operation_is_as_in_pillow(name: str, active: DictStore, tmp_path: Path) -> None:
    """The same results, errors and attributes afterwards, decoded and found, for a path, a file and bytes."""
    ways = ways_to_open(name, tmp_path / "image")
    for way, (title, operation) in itertools.product(ways, OPERATIONS.items()):
        if title == "arrow" and name == "bmp mapped":
            continue  # Pillow 11 and 12 crash
        with inactive():
            expected = outcome(operation, way())
        for number in range(2):
            found = outcome(operation, way())
            assert found == expected, f"{title}, round {number}, of {name}"


def resizes_in(state: int) -> Lessons:
    """What is known of first resizes: 0 for nothing; 1: they repeat; 2: they do not."""
    resizes = Lessons()
    resizes._counts[:, -1] = state
    return resizes


@pytest.mark.parametrize("name", FILES)
def test_every_operation_after_a_stored_resize_is_as_in_pillow(name: str, tmp_path: Path) -> None:
    """Of an image that is not decoded, because the result of a resize is stored and the image is not."""
    ways = ways_to_open(name, tmp_path / "image")
    for way, (title, operation) in itertools.product(ways, OPERATIONS.items()):
        if title == "arrow" and name == "bmp mapped":
            continue  # Pillow 11 and 12 crash
        with inactive():
            expected = outcome(operation, way())
        patches.meet()
        with DecodeCache(DictStore(), 0.0, resizes_in(1)).active():
            way().resize((9, 9), Image.Resampling.BOX)
            for number in range(2):
                assert outcome(operation, way()) == expected, f"{title}, round {number}, of {name}"


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_decoded_once(name: str, active: DictStore, tmp_path: Path) -> None:
    """Where it is opened by its path, as a file, or from bytes; a few kinds are decoded each time."""
    path = tmp_path / "image"
    path.write_bytes(content(name))
    ways: list[Callable[[], Any]] = [
        lambda: path,
        lambda: path.open("rb"),
        lambda: io.BytesIO(path.read_bytes()),
    ]
    for way in ways:
        for number in range(3):
            hits = cache_counts.hits
            with Image.open(way()) as image:
                np.asarray(image)
            is_mapped = name == "bmp mapped" and way is ways[0]  # by Pillow, which copies nothing
            is_hashed_in_vain = name in UNCOMPRESSED and way is ways[2]
            is_found = number > 0 and name not in NEVER and not is_mapped and not is_hashed_in_vain
            assert cache_counts.hits - hits == is_found


def test_heif_is_decoded_again_with_other_options(active: DictStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of pillow-heif can choose another decoder, so they belong to the key."""
    heif = pytest.importorskip("pillow_heif")
    for num_stored, decoder in ((1, ""), (2, "libde265"), (2, "")):
        monkeypatch.setitem(heif.options.PREFERRED_DECODER, "HEIF", decoder)
        Image.open(io.BytesIO(content("heif"))).load()
        assert len(active.values) == num_stored


def are_stored(image: Any) -> bool:
    """Whether the pixels of an image are in the store alone."""
    core = lazy_core(image)
    return core is not None and core.pixels is not None


@pytest.mark.parametrize("name", ["jpeg", "jpeg gray", "png alpha"])
def test_what_is_not_needed_is_not_copied(name: str, active: DictStore, tmp_path: Path) -> None:
    """Opened, converted to its own mode, cropped and copied, an image is lazy until it is needed."""
    path = tmp_path / "image"
    path.write_bytes(content(name))
    for number in range(2):
        image = Image.open(path)
        parts = [image.convert(image.mode), image.crop((1, 1, 3, 3)), image.copy()]
        assert [are_stored(part) for part in (image, *parts)] == [number > 0] * 4
    parts[1].load()
    assert [are_stored(part) for part in parts] == [True, False, True]


@pytest.mark.parametrize("name", sorted(FILES.keys() - NEVER))
def test_the_type_is_pillows(name: str, active: DictStore, tmp_path: Path) -> None:
    """Exactly: datasets ask `type(image) is Image.Image`, and look types up in tables."""
    path = tmp_path / "image"
    path.write_bytes(content(name))
    with inactive():
        expected = type(Image.open(path))
    for _ in range(3):
        image = Image.open(path)
        assert type(image) is expected
        assert [type(image.convert(image.mode)), type(image.copy())] == [Image.Image] * 2
        assert [type(image.crop((0, 0, 2, 2))), type(image.resize((3, 3)))] == [Image.Image] * 2
        assert type(image) is expected


def test_pillows_functions_are_found_and_pickled(active: DictStore) -> None:
    """As attributes of classes they are Pillow's own while they are met, so what holds one can be pickled."""
    for function in (Image.Image.convert, Image.Image.copy, Image.Image.tobytes, ImageFile.ImageFile.load):
        assert function.__module__.startswith("PIL.")
        assert pickle.loads(pickle.dumps(function)) is function


def test_a_class_that_derives_keeps_its_methods(active: DictStore) -> None:
    """An image that became one of the user's class runs the methods of that class."""

    class Mine(Image.Image):
        def _new(self, im: Any) -> Any:
            return "mine"

    for _ in range(3):
        image: Any = Image.open(io.BytesIO(content("png"))).copy()
        image.__class__ = Mine
        assert [image.copy(), image.crop((1, 1, 3, 3)), image.convert("RGB")] == ["mine"] * 3


def test_lazy_images_outlive_the_cache(active: DictStore) -> None:
    """When the patches are gone, they are as they were, and their methods are Pillow's."""
    file = content("png")
    with inactive():
        expected = Image.open(io.BytesIO(file)).convert("RGB")
    for _ in range(2):
        images: list[Any] = [Image.open(io.BytesIO(file)), Image.open(io.BytesIO(file)).copy()]
        images += [images[1].copy(), images[1].crop((0, 0, WIDTH, HEIGHT)), images[1].convert("RGB")]
    assert all(lazy_core(image) is not None for image in images)
    met = [patch for library in patches._by_library.values() for patch in library]
    for patch in met:
        patch.take_away()
    try:
        assert not any(
            "Lazy" in type(vars(Image.Image)[name]).__name__ for name in ("copy", "crop", "convert")
        )
        for image in images:
            assert image.copy().tobytes() == expected.tobytes()
            assert image.transpose(0) == expected.transpose(0)
    finally:
        for patch in met:
            patch.put()


@pytest.mark.parametrize("name", ["png", "jpeg"])
def test_the_store_never_reaches_the_user(name: str, active: DictStore, tmp_path: Path) -> None:
    """Whatever is written through arrays, tensors, pixel access and pointers, the store stays as it was."""
    path = tmp_path / "image"
    path.write_bytes(content(name))
    for number in range(4):
        image = Image.open(path)
        if number:
            before = active.checksum()
            converted = image.convert("RGB")
            for one in (image, converted, image.crop((1, 1, 9, 9)), image.copy()):
                array = np.array(one)
                array[:] = 7
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the array is read-only, as Pillow's own
                    view = torch.from_numpy(np.asarray(one))
                view[view == 7] = 0
                view += 1
                ctypes.memset(np.asarray(one).ctypes.data, 3, 9)
                with np.errstate(all="ignore"), pytest.raises(ValueError, match="read-only"):
                    np.asarray(one)[0] = 3
                one.load()[1, 1] = (1, 2, 3)
                one.paste((9, 9, 9), (0, 0, 4, 4))
            assert active.checksum() == before
        else:
            image.load()


def test_of_threads_that_meet_an_opened_image_one_loads_it(settled: None, tmp_path: Path) -> None:
    """The others wait until it is done; Pillow itself lets them read the file at once."""
    patches.meet()
    Image.effect_noise((150, 150), 90).save(tmp_path / "image.png")
    expected, cache = Image.open(tmp_path / "image.png").tobytes(), DecodeCache(DictStore(), verify_share=1)

    def use(image: Image.Image, barrier: threading.Barrier, found: list[Any]) -> None:
        barrier.wait()
        with cache.active(), contextlib.suppress(Exception):
            found.append(image.load() and image.tobytes())

    for _ in range(50):
        with cache.active():
            image = Image.open(tmp_path / "image.png")
        barrier, found = threading.Barrier(4), list[Any]()
        threads = [threading.Thread(target=use, args=(image, barrier, found)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [expected] * 4


def test_a_fork_reads_bytes_while_a_thread_identifies_others(
    cache: DecodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for no lock of that thread."""
    real, pids = pillow.identify_content, list[int]()

    def forked(buffer: Any) -> Any:
        if not pids:
            pids.append(0)
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
        return real(buffer)

    def fork() -> None:
        pids[0] = os.fork()
        if not pids[0]:
            signal.alarm(10)
            with cache.active():
                os._exit(Image.open(io.BytesIO(content("png"))).getbbox() is None)

    monkeypatch.setattr(pillow, "identify_content", forked)
    Image.open(io.BytesIO(content("png"))).load()
    assert os.waitpid(pids[0], 0)[1] == 0


def test_four_threads_make_one_image_plain(active: DictStore, tmp_path: Path) -> None:
    """Each of them gets the pixels."""
    path = tmp_path / "image.png"
    path.write_bytes(content("png"))
    expected = np.asarray(Image.open(path)).tobytes()
    errors: list[str] = []
    for _ in range(30):
        lazy = Image.open(path).convert("RGB")
        barrier = threading.Barrier(4)

        def use(number: int, lazy: Any = lazy, barrier: Any = barrier) -> None:
            barrier.wait()
            operations: list[Any] = [lazy.tobytes, lazy.transpose, lazy.copy, lambda: np.asarray(lazy)]
            try:
                operations[number](*[0] * (number == 1))
                if lazy.tobytes() != expected:
                    errors.append("other pixels")
            except Exception as error:  # noqa: BLE001 - reported below
                errors.append(repr(error))

        threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


def test_a_hit_that_differs_is_an_error(tmp_path: Path) -> None:
    """With a share of 1, each hit is decoded again and compared; the error names the file."""
    path = tmp_path / "image.png"
    path.write_bytes(content("png"))
    store = DictStore()
    patches.meet()
    with DecodeCache(store, verify_share=1.0).active():
        for _ in range(3):
            np.asarray(Image.open(path))
        key, stored = next(iter(store.values.items()))
        store.values[key] = stored._replace(array=stored.array + np.uint8(1))
        with pytest.raises(DecodeMismatchError, match=r"image\.png"):
            np.asarray(Image.open(path))


def test_truncated_files_are_errors_each_time(active: DictStore, tmp_path: Path, monkeypatch: Any) -> None:
    """With LOAD_TRUNCATED_IMAGES their pixels are remembered, for this setting alone."""
    path = tmp_path / "image.jpg"
    path.write_bytes(content("jpeg")[:-60])
    for _ in range(2):
        with pytest.raises(OSError, match="truncated"):
            Image.open(path).convert("RGB")
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with inactive():
        expected = np.asarray(Image.open(path)).tobytes()
    assert [np.asarray(Image.open(path).convert("RGB")).tobytes() for _ in range(2)] == [expected] * 2
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", False)
    with pytest.raises(OSError, match="truncated"):
        Image.open(path).convert("RGB")


STEPS = st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=4)


@given(steps=STEPS, name=st.sampled_from(sorted(FILES)), keeps=st.booleans())
def test_operations_in_a_row_are_as_in_pillow(steps: list[str], name: str, keeps: bool) -> None:
    """On the opened image, or each on what the one before returned."""
    file = content(name)

    def run(image: Any) -> Any:
        results = []
        for step in steps:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    result = OPERATIONS[step](image)
                except Exception as error:  # noqa: BLE001 - compared with the other one's
                    results.append((type(error), str(error)))
                    continue
            if keeps or not isinstance(result, Image.Image):
                results.append(plain(result) if not isinstance(result, Image.Image) else result.size)
            else:
                image = result
        return results, outcome(lambda image: None, image)

    expected = run(Image.open(io.BytesIO(file)))
    for state in range(3):
        patches.meet()
        with DecodeCache(DictStore(), 0.0, resizes_in(state)).active():
            for _ in range(2):
                assert run(Image.open(io.BytesIO(file))) == expected


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A gray JPEG."""
    path = tmp_path / "photo.jpg"
    Image.new("RGB", (64, 64), (200, 200, 200)).save(path)
    return path


def _first(source: Any) -> int:
    with Image.open(source) as image:
        return int(np.asarray(image)[0, 0, 0])


class _Inverted(ImageFile.PyDecoder):
    """Decodes to other pixels."""

    def decode(self, buffer: bytes | Any) -> tuple[int, int]:
        self.set_as_raw(bytes([55]) * (3 * 64 * 64))
        return -1, 0


def test_an_image_within_bytes_is_read(store: DictStore, cache: DecodeCache) -> None:
    """Whoever calls Pillow's class begins anywhere; equal bytes are not equal images then."""
    contents = []
    for value in range(2):
        Image.new("RGB", (9, 9), (value, 0, 0)).save(file := io.BytesIO(), "WEBP", lossless=True)
        contents.append(file.getvalue())
    for start in (len(contents[0]), 0):
        file = io.BytesIO(b"".join(contents))
        file.seek(start)
        assert WebPImageFile(file).getpixel((0, 0))[0] == bool(start)  # type: ignore[index]
    assert len(store.values) == 1


def test_a_decoder_of_the_program_is_not_remembered(
    photo: Path, cache: DecodeCache, store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Pillow's own decoded is not found while it is registered, and what it decodes is not stored."""
    assert _first(photo) == 200
    num_stored = len(store.values)
    with monkeypatch.context() as registered:
        registered.setitem(Image.DECODERS, "jpeg", _Inverted)
        assert [_first(photo) for _ in range(2)] == [55, 55]
    assert len(store.values) == num_stored
    assert _first(photo) == 200


def test_another_file_of_an_opened_image_is_read(photo: Path, tmp_path: Path, cache: DecodeCache) -> None:
    """An image whose `fp` was set has the pixels of that file."""
    other = tmp_path / "other.jpg"
    Image.new("RGB", (64, 64), (100, 100, 100)).save(other)
    assert _first(photo) == 200
    with other.open("rb") as file:
        image = Image.open(photo)
        image.fp = file
        assert np.asarray(image)[0, 0, 0] == 100


def test_what_a_file_object_has_buffered_of_an_older_file_is_not_stored(
    photo: Path, cache: DecodeCache
) -> None:
    """A file that was written anew gives its own pixels to everybody who opens it."""
    with photo.open("rb") as held:
        assert _first(held) == 200
        Image.new("RGB", (64, 64), (100, 100, 100)).save(photo)
        held.seek(0)
        np.asarray(Image.open(held))
        with photo.open("rb") as fresh:
            assert _first(fresh) == 100
