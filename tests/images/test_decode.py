"""Claims of read_image: every kind of file becomes the RGB that a viewer shows."""

from __future__ import annotations

import os
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image, ImageOps

from fastload.errors import ImageReadError
from fastload.images.decode import decode, read_image
from fastload.images.encoded import EncodedImage

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.processes import Interpreter

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def scene(height: int = 48, width: int = 64) -> np.ndarray:
    """A smooth picture without symmetry, which JPEG keeps well."""
    y, x = np.mgrid[:height, :width]
    channels = (255 * x / width, 255 * y / height, 255 * (x + 2 * y) / (width + 2 * height))
    return np.stack(channels, axis=-1).astype(np.uint8)


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """The mean distance in levels, after checking that the shapes agree."""
    assert got.shape == expected.shape
    return float(np.abs(got.astype(int) - expected.astype(int)).mean())


class TestArrays:
    @pytest.mark.parametrize(
        ("mode", "suffix"),
        [("RGB", "jpg"), ("RGB", "png"), ("L", "png"), ("CMYK", "jpg"), ("RGBA", "webp"), ("P", "png")],
    )
    def test_channels_last_for_albumentations(self, tmp_path: Path, mode: str, suffix: str) -> None:
        """Channels-last for albumentations: every kind of file gives C-contiguous HWC uint8 RGB."""
        path = tmp_path / f"a.{suffix}"
        Image.fromarray(scene()).convert(mode).save(path)

        image = read_image(path)

        assert image.shape == (48, 64, 3)
        assert image.dtype == np.uint8
        assert image.flags.c_contiguous
        assert image.strides == (64 * 3, 3, 1)

    def test_turned_images_are_contiguous_too(self, tmp_path: Path) -> None:
        """Turning by EXIF gives a C-contiguous array and not a view with odd strides."""
        path = tmp_path / "a.png"
        save_turned(path, 6)

        assert read_image(path).flags.c_contiguous

    def test_the_array_is_the_callers(self, tmp_path: Path) -> None:
        """The array is writable and new at each read."""
        path = tmp_path / "a.png"
        Image.fromarray(scene()).save(path)

        first = read_image(path)
        first[:] = 0

        assert np.array_equal(read_image(path), scene())

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(pixels=hnp.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3))))
    def test_png_round_trip(self, tmp_path: Path, pixels: np.ndarray) -> None:
        """Any RGB array saved as a PNG comes back exactly."""
        path = tmp_path / "a.png"
        Image.fromarray(pixels).save(path)

        assert np.array_equal(read_image(path), pixels)

    def test_no_file_stays_open(self, tmp_path: Path) -> None:
        """After a read, good or bad, no descriptor points to the file."""
        good, bad = tmp_path / "good.tif", tmp_path / "bad.jpg"
        Image.fromarray(scene()).save(good, save_all=True, append_images=[Image.fromarray(scene())])
        Image.fromarray(scene()).save(bad)
        bad.write_bytes(bad.read_bytes()[:-200])

        read_image(good)
        with pytest.raises(ImageReadError):
            read_image(bad)

        held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
        assert not [target for target in held if str(tmp_path) in target]


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")  # the listing's own descriptor is gone by now


class TestKinds:
    def test_jpeg(self, tmp_path: Path) -> None:
        """A JPEG is read as its codec decodes it."""
        path = tmp_path / "a.jpg"
        Image.fromarray(scene()).save(path, quality=95)

        assert difference(read_image(path), scene()) < 2

    @pytest.mark.parametrize("suffix", ["png", "ppm", "bmp", "tif", "webp"])
    def test_lossless_rgb(self, tmp_path: Path, suffix: str) -> None:
        """Formats that keep every bit are read exactly."""
        path = tmp_path / f"a.{suffix}"
        Image.fromarray(scene()).save(path, lossless=True)  # which only WebP needs to hear

        assert np.array_equal(read_image(path), scene())

    @pytest.mark.parametrize("suffix", ["png", "pgm", "tif", "bmp"])
    def test_grey(self, tmp_path: Path, suffix: str) -> None:
        """Grey becomes three equal channels."""
        path = tmp_path / f"a.{suffix}"
        grey = scene()[..., 0]
        Image.fromarray(grey).save(path)

        assert np.array_equal(read_image(path), np.stack([grey] * 3, axis=-1))

    def test_grey_jpeg(self, tmp_path: Path) -> None:
        """A grey JPEG becomes three equal channels."""
        path = tmp_path / "a.jpg"
        Image.fromarray(scene()[..., 0]).save(path)

        image = read_image(path)

        assert np.array_equal(image[..., 0], image[..., 2])
        assert difference(image[..., 0], scene()[..., 0]) < 2

    def test_one_bit(self, tmp_path: Path) -> None:
        """One bit becomes black and white."""
        path = tmp_path / "a.png"
        Image.fromarray(np.array([[True, False]])).save(path)

        assert read_image(path).tolist() == [[[255] * 3, [0] * 3]]

    @pytest.mark.parametrize("mode", ["RGBA", "LA"])
    def test_alpha_is_dropped(self, tmp_path: Path, mode: str) -> None:
        """Transparent pixels keep the colour that is stored under them."""
        path = tmp_path / "a.png"
        image = Image.fromarray(scene()).convert(mode)
        expected = np.asarray(image.convert("RGB"))
        image.putalpha(0)
        image.save(path)

        assert np.array_equal(read_image(path), expected)

    @pytest.mark.parametrize("options", [{}, {"transparency": 1}, {"transparency": bytes([255, 0, 128])}])
    def test_palette(self, tmp_path: Path, options: dict[str, Any]) -> None:
        """Palette indices become their colours, whether or not some of them are transparent."""
        path = tmp_path / "a.png"
        image = Image.fromarray(np.array([[0, 1, 2]], np.uint8)).convert("P")
        image.putpalette([*RED, *GREEN, *BLUE])
        image.save(path, **options)

        assert [tuple(pixel) for pixel in read_image(path)[0].tolist()] == [RED, GREEN, BLUE]

    @pytest.mark.parametrize("mode", ["L", "RGB"])
    def test_transparent_colour(self, tmp_path: Path, mode: str) -> None:
        """A colour declared transparent in a PNG without alpha is a colour like any other."""
        path = tmp_path / "a.png"
        image = Image.fromarray(scene()).convert(mode)
        image.save(path, transparency=0 if mode == "L" else (0, 0, 0))

        assert np.array_equal(read_image(path), np.asarray(image.convert("RGB")))

    @pytest.mark.parametrize("suffix", ["png", "tif"])
    def test_sixteen_bit_grey(self, tmp_path: Path, suffix: str) -> None:
        """16-bit grey keeps its high byte; it is not clipped at 255."""
        path = tmp_path / f"a.{suffix}"
        values = np.array([[0, 255, 256, 0x1234, 0x80FF, 65535]], np.uint16)
        Image.fromarray(values).save(path)

        assert read_image(path)[0, :, 0].tolist() == [0, 0, 1, 0x12, 0x80, 255]

    def test_sixteen_bit_pgm(self, tmp_path: Path) -> None:
        """A 16-bit PGM keeps its high byte too."""
        path = tmp_path / "a.pgm"
        path.write_bytes(b"P5 3 1 65535\n" + struct.pack(">3H", 0, 0x1234, 65535))

        assert read_image(path)[0, :, 1].tolist() == [0, 0x12, 255]

    def test_sixteen_bit_rgb(self, tmp_path: Path) -> None:
        """16-bit RGB keeps its high byte, as 16-bit grey does."""
        path = tmp_path / "a.png"
        path.write_bytes(
            png(
                width=2,
                height=1,
                bits=16,
                colour=2,
                row=struct.pack(">6H", 0, 0x1234, 65535, 255, 256, 0x80FF),
            )
        )

        assert read_image(path).tolist() == [[[0, 0x12, 255], [0, 1, 0x80]]]

    def test_cmyk_jpeg(self, tmp_path: Path) -> None:
        """A CMYK JPEG, stored inverted as Adobe does, has the colours of its inks."""
        path = tmp_path / "a.jpg"
        inks = Image.new("CMYK", (32, 16), (0, 255, 255, 0))  # magenta and yellow make red
        inks.save(path, quality=95)

        with Image.open(path) as image:
            assert image.mode == "CMYK"
        assert difference(read_image(path), np.full((16, 32, 3), RED)) < 3

    def test_animation(self, tmp_path: Path) -> None:
        """The first frame of an animation is read."""
        path = tmp_path / "a.webp"
        frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]
        frames[0].save(path, save_all=True, append_images=frames[1:], lossless=True, duration=50)

        assert np.array_equal(read_image(path), np.full((8, 8, 3), RED))

    def test_animated_gif(self, tmp_path: Path) -> None:
        """The first frame of a GIF is read, through its palette."""
        path = tmp_path / "a.gif"
        frames = [Image.new("RGB", (8, 8), colour) for colour in (GREEN, BLUE)]
        frames[0].save(path, save_all=True, append_images=frames[1:])

        assert np.array_equal(read_image(path), np.full((8, 8, 3), GREEN))


def png(width: int, height: int, bits: int, colour: int, row: bytes) -> bytes:
    """A PNG of equal rows, of a kind that Pillow reads and does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    pixels = zlib.compress((b"\0" + row) * height)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def save_turned(path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(scene()).save(path, exif=exif)


class TestOrientation:
    @pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
    def test_agrees_with_pillow(self, tmp_path: Path, suffix: str) -> None:
        """All eight EXIF orientations are applied as PIL.ImageOps.exif_transpose applies them."""
        path = tmp_path / f"a.{suffix}"
        for orientation in range(1, 9):
            save_turned(path, orientation)

            with Image.open(path) as image:
                expected = np.asarray(ImageOps.exif_transpose(image))
            assert expected.shape == ((48, 64, 3) if orientation < 5 else (64, 48, 3))
            assert np.array_equal(read_image(path), expected)

    @pytest.mark.parametrize("size", [20, (20, 30), (48, 64)])
    def test_size_is_that_of_the_turned_image(self, tmp_path: Path, size: int | tuple[int, int]) -> None:
        """``size`` means the picture as it is shown."""
        path, upright = tmp_path / "a.png", tmp_path / "upright.png"
        for orientation in range(1, 9):
            save_turned(path, orientation)
            Image.fromarray(read_image(path)).save(upright)

            assert difference(read_image(path, size), read_image(upright, size)) < 1

    def test_damaged_exif(self, tmp_path: Path) -> None:
        """Damaged EXIF data neither loses the picture nor warns."""
        path = tmp_path / "a.jpg"
        Image.fromarray(scene()).save(path, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x03\x01\x12\0\x03")

        assert read_image(path).shape == (48, 64, 3)


class TestSize:
    @pytest.mark.parametrize(("height", "width"), [(40, 60), (60, 40), (10, 33), (50, 50)])
    def test_shorter_side(self, tmp_path: Path, height: int, width: int) -> None:
        """An int is the shorter side; the longer one keeps the aspect, rounded down as torchvision does."""
        path = tmp_path / "a.png"
        Image.fromarray(scene(height, width)).save(path)
        for size in (1, 7, 20, 40, 64):
            got = read_image(path, size).shape[:2]

            long = int(size * max(height, width) / min(height, width))
            assert got == ((size, long) if height <= width else (long, size))

    @pytest.mark.parametrize("suffix", ["jpg", "png", "tif"])
    def test_height_and_width(self, tmp_path: Path, suffix: str) -> None:
        """(height, width) is kept exactly, larger or smaller."""
        path = tmp_path / f"a.{suffix}"
        Image.fromarray(scene(97, 131)).save(path)
        for size in [(5, 7), (7, 5), (100, 3), (333, 500)]:
            image = read_image(path, size)

            assert image.shape == (*size, 3)
            assert image.flags.c_contiguous

    def test_small_decoding_keeps_the_picture(self, tmp_path: Path) -> None:
        """A JPEG decoded at a fraction of its size differs by about a level from one resized in full."""
        path = tmp_path / "a.jpg"
        Image.fromarray(scene(375, 501)).save(path, quality=95)
        for size in (16, 37, (30, 90), (61, 41), 200):
            got = read_image(path, size)

            with Image.open(path) as image:
                full = image.resize((got.shape[1], got.shape[0]), Image.Resampling.BILINEAR)
            assert difference(got, np.asarray(full)) < 1.5

    def test_shape_does_not_depend_on_small_decoding(self, tmp_path: Path) -> None:
        """The longer side is computed from the file's size, not from the rounded one decoded to."""
        path = tmp_path / "a.jpg"
        Image.fromarray(scene(111, 1599)).save(path)

        assert read_image(path, 7).shape == (7, 7 * 1599 // 111, 3)

    def test_same_size_changes_nothing(self, tmp_path: Path) -> None:
        """Asking for the size that the file has gives its very pixels."""
        path = tmp_path / "a.jpg"
        Image.fromarray(scene()).save(path)

        assert np.array_equal(read_image(path, (48, 64)), read_image(path))

    def test_palette_is_resized_as_colours(self, tmp_path: Path) -> None:
        """A palette image is resized between colours, never between palette indices."""
        path = tmp_path / "a.png"
        image = Image.fromarray(np.array([[0, 2]], np.uint8)).convert("P")
        image.putpalette([*RED, *GREEN, *RED])
        image.save(path)

        assert np.array_equal(read_image(path, (4, 4)), np.full((4, 4, 3), RED))

    @pytest.mark.parametrize(
        ("error", "sizes"),
        [
            (ValueError, [0, -1, (4, 0)]),
            (TypeError, [2.5, "8", (1, 2, 3), (5,), (1.0, 2), ()]),
        ],
    )
    def test_impossible_sizes(self, tmp_path: Path, error: type[Exception], sizes: list[Any]) -> None:
        """A size that makes no sense is refused before the file is opened, and named."""
        for size in sizes:
            with pytest.raises(error, match="size must be"):
                read_image(tmp_path / "missing.jpg", size)


class TestScale:
    @pytest.mark.parametrize("scale", [2, 4, 8])
    @pytest.mark.parametrize("sides", [(375, 500), (384, 512), (377, 501), (9, 15), (8, 1023)])
    def test_sides_are_rounded_up(self, tmp_path: Path, sides: tuple[int, int], scale: int) -> None:
        """A JPEG decoded at a fraction of its size has sides that are divided by the scale and rounded up."""
        path = tmp_path / "a.jpg"
        Image.fromarray(scene(*sides)).save(path)

        image = decode(path, path, scale=scale)

        assert image.shape == (-(-sides[0] // scale), -(-sides[1] // scale), 3)

    @pytest.mark.parametrize("sides", [(375, 500), (384, 512), (389, 523)])
    def test_reduced_region_is_that_of_the_box(self, tmp_path: Path, sides: tuple[int, int]) -> None:
        """A reduced region shows the box that was asked for, whether or not the scale divides the sides."""
        path = tmp_path / "a.jpg"
        Image.fromarray(scene(*sides)).save(path, quality=95)
        image = EncodedImage(path)

        reduced = image.decode_reduced((64, 48, 384, 304), (32, 40)).pixels

        assert reduced.shape == (32, 40, 3)
        expected = image.decode((64, 48, 384, 304)).reshape(32, 8, 40, 8, 3).mean(axis=(1, 3))
        assert difference(reduced, expected) < 2


def test_import_brings_no_opencv(interpreter: Interpreter) -> None:
    """Reading images needs Pillow and numpy; OpenCV and torchvision are not imported."""
    code = "import sys, fastload.images.decode; print({'cv2', 'torchvision'} & set(sys.modules))"
    done = interpreter.run(code)

    assert done.stdout.strip() == "set()"
