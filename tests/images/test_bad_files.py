"""Claims of read_image about files that cannot be read, and about warnings."""

from __future__ import annotations

import pickle
import struct
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from fastload.errors import ImageReadError
from fastload.images.decode import read_image

if TYPE_CHECKING:
    from pathlib import Path

PIXELS = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)


class TestBadFiles:
    def check(self, path: Path, reason: str) -> ImageReadError:
        with pytest.raises(ImageReadError, match=reason) as caught:
            read_image(path)
        assert caught.value.path == str(path)
        assert str(path) in str(caught.value)
        assert caught.value.__cause__ is not None
        return caught.value

    def test_missing(self, tmp_path: Path) -> None:
        """A missing file is named."""
        self.check(tmp_path / "missing.jpg", "No such file")

    def test_directory(self, tmp_path: Path) -> None:
        """A folder is named."""
        self.check(tmp_path, "Is a directory")

    def test_empty(self, tmp_path: Path) -> None:
        """A file of no bytes is said to be empty."""
        (tmp_path / "a.jpg").touch()
        self.check(tmp_path / "a.jpg", "empty")

    def test_not_an_image(self, tmp_path: Path) -> None:
        """A text file is no image, whatever its name."""
        (tmp_path / "a.jpg").write_text("hello " * 100)
        self.check(tmp_path / "a.jpg", "not an image")

    @pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif", "bmp", "ppm"])
    def test_cut_short(self, tmp_path: Path, suffix: str) -> None:
        """A file that ends in the middle is an error, never a picture with a grey half."""
        path = tmp_path / f"a.{suffix}"
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

        self.check(path, ".")

    def test_damaged(self, tmp_path: Path) -> None:
        """What a codec raises on damaged data is wrapped, whatever its type."""
        path = tmp_path / "a.png"
        Image.fromarray(PIXELS).save(path)
        path.write_bytes(path.read_bytes().replace(b"IDAT", b"ID\0T"))

        self.check(path, ".")

    def test_decompression_bomb(self, tmp_path: Path) -> None:
        """A small file that promises 900 million pixels is refused before memory is taken for them."""
        path = tmp_path / "a.bmp"
        Image.fromarray(PIXELS).save(path)
        header = bytearray(path.read_bytes())
        struct.pack_into("<ii", header, 18, 30_000, 30_000)  # width, height
        path.write_bytes(header)

        self.check(path, "900000000 pixels")

    def test_large_images_are_read_quietly(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between Pillow's warning and its error a large image is read, without a warning."""
        path = tmp_path / "a.png"
        Image.fromarray(PIXELS).save(path)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 48 * 64 - 1)

        assert np.array_equal(read_image(path), PIXELS)

    @pytest.mark.parametrize("kind", [np.float32, np.int32])
    def test_numbers_without_a_range(self, tmp_path: Path, kind: type) -> None:
        """A TIFF of floats or 32-bit ints is refused: nobody knows which value is white."""
        path = tmp_path / "a.tif"
        Image.fromarray(np.ones((4, 4), kind)).save(path)

        self.check(path, "scale them to 8 bits")

    def test_null_in_path(self) -> None:
        """A path that no file can have is an ImageReadError like any other."""
        with pytest.raises(ImageReadError, match=r"embedded null byte$"):
            read_image("a\0b.jpg")

    def test_error_pickles(self, tmp_path: Path) -> None:
        """The error crosses a process border with its path and reason."""
        error = self.check(tmp_path / "missing.jpg", "No such file")

        copy = pickle.loads(pickle.dumps(error))

        assert (copy.path, copy.reason, str(copy)) == (error.path, error.reason, str(error))

    def test_out_of_memory_is_not_the_files_fault(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """MemoryError stays MemoryError."""
        path = tmp_path / "a.png"

        def fail(_image: Image.Image, _mode: str) -> None:
            raise MemoryError

        Image.fromarray(PIXELS).convert("L").save(path)
        monkeypatch.setattr(Image.Image, "convert", fail)

        with pytest.raises(MemoryError):
            read_image(path)

    def test_any_truncation_is_an_image_read_error(self, tmp_path: Path) -> None:
        """Wherever a JPEG is cut, the error is an ImageReadError."""
        path = tmp_path / "a.jpg"
        Image.fromarray(PIXELS).save(path)
        whole = path.read_bytes()

        for length in range(0, len(whole) - 50, 7):
            path.write_bytes(whole[:length])
            self.check(path, ".")


class TestWarnings:
    def test_filter_is_set_once(self, tmp_path: Path) -> None:
        """Reading many images adds one warning filter, so that "warn once" elsewhere keeps its memory."""
        path = tmp_path / "a.png"
        Image.fromarray(PIXELS).save(path)
        with warnings.catch_warnings():
            read_image(path)
            filters = list(warnings.filters)

            read_image(path)

            assert list(warnings.filters) == filters

    def test_other_warnings_pass(self, tmp_path: Path) -> None:
        """Only Pillow's own modules are silenced."""
        path = tmp_path / "a.png"
        Image.fromarray(PIXELS).save(path)
        read_image(path)

        with pytest.warns(UserWarning, match="mine"):
            warnings.warn("mine", stacklevel=1)
