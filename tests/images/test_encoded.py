"""Claims of EncodedImage: a box has the pixels of the whole image, and a bad file the same error."""

from __future__ import annotations

import functools
import importlib
import io
import os
import pickle
import sys
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastload.errors import ImageReadError
from fastload.images import regions
from fastload.images.decode import decode, read_image
from fastload.images.encoded import EncodedImage
from fastload.images.jpeg import parse_jpeg

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ORIENTATION = 0x0112
KINDS = ["4:4:4", "4:2:2", "4:2:0", "progressive", "restarts", "optimized", "rgb", "grey", "cmyk"]
OTHERS = ["png", "webp", "tiff", "gif"]


def noise(height: int, width: int) -> np.ndarray:
    """A picture of waves with noise, in which neighbouring pixels differ."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 7), np.cos(y / 5), np.sin((x + y) / 11)], axis=-1)
    return (
        (127 + 100 * waves + np.random.default_rng(0).normal(0, 12, waves.shape))
        .clip(0, 255)
        .astype(np.uint8)
    )


@functools.cache
def image_file(kind: str, height: int = 61, width: int = 83, orientation: int = 1) -> bytes:
    """The content of a file of this kind; height and width are those of the stored image."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    options: dict[str, Any] = {"exif": exif} if orientation != 1 else {}
    modes = {"grey": "L", "cmyk": "CMYK", "gif": "P"}
    image = Image.fromarray(noise(height, width)).convert(modes.get(kind, "RGB"))
    special: dict[str, dict[str, Any]] = {
        "progressive": {"progressive": True},
        "restarts": {"restart_marker_rows": 1},
        "optimized": {"optimize": True, "quality": 40},
        "rgb": {"keep_rgb": True},
    }
    options |= special.get(kind, {"subsampling": kind} if ":" in kind else {})
    file = io.BytesIO()
    image.save(file, kind if kind in OTHERS else "jpeg", **options)
    return file.getvalue()


def random_box(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    y_min, x_min = (int(rng.integers(0, side)) for side in shape[:2])
    y_max, x_max = int(rng.integers(y_min + 1, shape[0] + 1)), int(rng.integers(x_min + 1, shape[1] + 1))
    return x_min, y_min, x_max, y_max


def assert_boxes_are_parts(content: bytes, count: int) -> None:
    """Random boxes of a file have the pixels of the whole image."""
    whole = decode(content, "whole")
    rng = np.random.default_rng(1)
    image = EncodedImage(content)
    assert image.shape == whole.shape
    for _ in range(count):
        box = x_min, y_min, x_max, y_max = random_box(rng, whole.shape)
        np.testing.assert_array_equal(image.decode(box), whole[y_min:y_max, x_min:x_max], err_msg=str(box))


class TestBoxes:
    @pytest.mark.parametrize("kind", KINDS + OTHERS)
    @pytest.mark.parametrize(("height", "width"), [(61, 83), (64, 96), (17, 130)])
    def test_a_box_has_the_pixels_of_the_whole_image(self, kind: str, height: int, width: int) -> None:
        """decode(box) equals that box of read_image for files of every kind."""
        assert_boxes_are_parts(image_file(kind, height, width), 60)

    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("kind", ["4:2:0", "grey", "png"])
    def test_boxes_of_turned_images(self, kind: str, orientation: int) -> None:
        """Boxes are those of the image as a viewer shows it, for each EXIF orientation."""
        assert_boxes_are_parts(image_file(kind, 43, 57, orientation), 40)

    @pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 9), (9, 1), (2, 3), (8, 8), (16, 17)])
    @pytest.mark.parametrize("kind", ["4:2:0", "4:2:2", "png"])
    def test_boxes_of_very_small_images(self, kind: str, height: int, width: int) -> None:
        """Images smaller than a block of JPEG are decoded too, and so is every single pixel."""
        content = image_file(kind, height, width)
        whole = decode(content, "whole")
        for y in range(height):
            for x in range(width):
                pixel = EncodedImage(content).decode((x, y, x + 1, y + 1))
                np.testing.assert_array_equal(pixel, whole[y : y + 1, x : x + 1])

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("width", [64, 65, 66])
    def test_narrow_and_flat_boxes(self, kind: str, width: int) -> None:
        """Boxes of one to five columns or rows, at every place, have the pixels of the whole image."""
        content = image_file(kind, 40, width)
        whole = decode(content, "whole")
        image = EncodedImage(content)
        rng = np.random.default_rng(2)
        for side in range(1, 6):
            for x in range(width - side + 1):
                y = int(rng.integers(0, 40))
                part = image.decode((x, y, x + side, 40))
                np.testing.assert_array_equal(part, whole[y:, x : x + side], err_msg=f"column {x}, {side}")
            for y in range(40 - side + 1):
                x = int(rng.integers(0, width))
                part = image.decode((x, y, width, y + side))
                np.testing.assert_array_equal(part, whole[y : y + side, x:], err_msg=f"row {y}, {side}")

    def test_exif_behind_the_frame_turns_the_image(self) -> None:
        """EXIF between the frame's segment and the compressed data is applied, as read_image applies it."""
        plain, turned = image_file("4:2:0"), image_file("4:2:0", orientation=6)
        start = turned.index(b"\xff\xe1")
        exif = turned[start : start + 2 + int.from_bytes(turned[start + 2 : start + 4], "big")]
        scan = plain.index(b"\xff\xda")

        assert_boxes_are_parts(plain[:scan] + exif + plain[scan:], 10)

    @pytest.mark.parametrize("tail", [b"\0" * 20, b"\0" * 100, b"padding of a camera" * 9])
    def test_bytes_behind_the_image(self, tail: bytes) -> None:
        """Bytes after the end of the image change nothing."""
        assert_boxes_are_parts(image_file("4:2:0") + tail, 5)

    def test_the_first_picture_of_several(self) -> None:
        """A file of several JPEGs (MPO) is its first picture."""
        file = io.BytesIO()
        pictures = [Image.fromarray(noise(40, 50)[::step]) for step in (1, -1)]
        pictures[0].save(file, "MPO", save_all=True, append_images=pictures[1:])

        assert_boxes_are_parts(file.getvalue(), 10)

    @pytest.mark.parametrize("orientation", [1, 6])
    def test_the_array_is_the_callers(self, orientation: int) -> None:
        """The array is C-contiguous, writable and new at each call."""
        image = EncodedImage(image_file("4:2:0", orientation=orientation))
        for box in (None, (3, 4, 30, 40)):
            first = image.decode(box)
            expected = first.copy()
            first[:] = 0

            assert first.flags.c_contiguous
            np.testing.assert_array_equal(image.decode(box), expected)

    @pytest.mark.parametrize("kind", ["4:2:0", "png"])
    @pytest.mark.parametrize(
        "box", [(0, 0, 0, 5), (5, 5, 5, 9), (9, 0, 5, 5), (-1, 0, 5, 5), (0, 0, 84, 5), (0, 0, 5, 62)]
    )
    def test_a_box_must_lie_in_the_image(self, kind: str, box: tuple[int, int, int, int]) -> None:
        """An empty box and one that exceeds the image raise ValueError with the image's size."""
        image = EncodedImage(image_file(kind))
        for decode_box in (image.decode, lambda box: image.decode_reduced(box, (1, 1)).pixels):
            with pytest.raises(ValueError, match="61 x 83 pixels"):
                decode_box(box)

    @pytest.mark.parametrize("kind", ["4:2:0", "grey", "png"])
    def test_the_same_pixels_without_a_decoder_of_regions(
        self, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without nvImageCodec, Pillow decodes the same pixels."""
        monkeypatch.setattr(regions, "_codec", lambda: None)

        assert regions.name_of_decoder() is None
        assert_boxes_are_parts(image_file(kind, orientation=8), 10)


class TestReduced:
    @pytest.mark.slow
    @settings(max_examples=60, deadline=None)
    @given(
        height=st.integers(8, 150),
        width=st.integers(8, 150),
        orientation=st.integers(1, 8),
        scale=st.sampled_from([4, 8]),
        data=st.data(),
    )
    def test_a_reduced_region_shows_the_box(
        self, height: int, width: int, orientation: int, scale: int, data: st.DataObject
    ) -> None:
        """A region at a quarter or an eighth covers its box: the values of a smooth image fit."""
        y, x = np.mgrid[:height, :width]
        ramps = np.stack([255 * x / width, 255 * y / height, 0 * x], -1).astype(np.uint8)
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        file = io.BytesIO()
        Image.fromarray(ramps).save(file, "jpeg", quality=98, subsampling="4:4:4", exif=exif)
        image = EncodedImage(file.getvalue())
        rows, columns = image.shape[:2]
        y_min = data.draw(st.integers(0, max(0, rows - scale)))
        x_min = data.draw(st.integers(0, max(0, columns - scale)))
        y_max = data.draw(st.integers(min(rows, y_min + scale), rows))
        x_max = data.draw(st.integers(min(columns, x_min + scale), columns))
        box, least = (x_min, y_min, x_max, y_max), ((y_max - y_min) // scale, (x_max - x_min) // scale)
        if min(least) < 1 or min(least) >= 2 * scale:
            return
        with mock.patch.object(
            regions, "name_of_decoder", return_value=None
        ):  # never the region at full size
            found = image.decode_reduced(box, least).pixels.astype(int)
        exact = image.decode(box).astype(int)

        assert found.shape[0] <= -(-exact.shape[0] // 4) + 1
        assert found.shape[1] <= -(-exact.shape[1] // 4) + 1
        # A reduced pixel of a border lies up to its own size outside the box.
        slack = 6 + 2 * 255 * 8 / min(height, width)
        assert abs(found[0, 0] - exact[0, 0]).max() <= slack
        assert abs(found[-1, -1] - exact[-1, -1]).max() <= slack

    @pytest.mark.parametrize("scale", [2, 4, 8])
    @pytest.mark.parametrize(("height", "width"), [(999, 777), (515, 513), (15, 17), (640, 8)])
    def test_every_size_is_decoded_at_the_fraction(self, scale: int, height: int, width: int) -> None:
        """A JPEG of any size is decoded at exactly the asked fraction, with sides rounded up."""
        file = io.BytesIO()
        Image.new("RGB", (width, height)).save(file, "jpeg")

        assert decode(file.getvalue(), "x", scale=scale).shape == (-(-height // scale), -(-width // scale), 3)

    @pytest.mark.parametrize("orientation", [1, 3, 6])
    def test_a_small_region_at_the_top_is_decoded_at_full_size(self, orientation: int) -> None:
        """The cheaper way is taken: all rows up to a region's lower edge, in the file, must be read."""
        image = EncodedImage(image_file("4:2:0", 400, 400, orientation))
        top = {1: (0, 0, 80, 80), 3: (320, 320, 400, 400), 6: (320, 0, 400, 80)}[orientation]

        assert image.decode_reduced(top, (40, 40)).pixels.shape == (80, 80, 3)
        assert image.decode_reduced((0, 0, 400, 400), (200, 200)).pixels.shape == (200, 200, 3)

    def test_other_formats_keep_their_size(self) -> None:
        """A PNG is never reduced."""
        image = EncodedImage(image_file("png"))

        np.testing.assert_array_equal(
            image.decode_reduced((0, 0, 80, 60), (1, 1)).pixels, image.decode((0, 0, 80, 60))
        )


class TestHeader:
    @settings(max_examples=60, deadline=None)
    @given(
        kind=st.sampled_from(KINDS),
        height=st.integers(1, 70),
        width=st.integers(1, 70),
        orientation=st.integers(1, 8),
    )
    def test_shapes_are_those_of_the_decoded_image(
        self, kind: str, height: int, width: int, orientation: int
    ) -> None:
        """The shape without decoding is the decoded shape."""
        content = image_file.__wrapped__(kind, height, width, orientation)

        assert EncodedImage(content).shape == decode(content, "x").shape

    def test_plain_files_are_read_without_pillow(self) -> None:
        """The quick reading of headers answers for ordinary JPEGs."""
        for kind in ("4:4:4", "4:2:0", "progressive", "restarts", "grey"):
            header = parse_jpeg(memoryview(image_file(kind)))

            assert header is not None
            assert (header.height, header.width, header.tags_at) == (61, 83, [])

    @pytest.mark.slow
    @settings(max_examples=400, deadline=None)
    @given(
        kind=st.sampled_from(["4:2:0", "progressive", "grey", "cmyk", "rgb"]),
        orientation=st.sampled_from([1, 6]),
        edits=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=3),
        doubled=st.sampled_from([None, b"\xff\xc0", b"\xff\xc4", b"\xff\xe0", b"\xff\xe1"]),
    )
    def test_a_mutated_header_is_never_read_differently(
        self, kind: str, orientation: int, edits: list[tuple[int, int]], doubled: bytes | None
    ) -> None:
        """The quick reading of a damaged header gives Pillow's size, or leaves it to Pillow."""
        content = bytearray(image_file(kind, orientation=orientation))
        scan = content.index(b"\xff\xda")
        if doubled is not None and doubled in content[:scan]:
            start = content.index(doubled)
            segment = content[start : start + 2 + int.from_bytes(content[start + 2 : start + 4], "big")]
            content[scan:scan] = segment
            scan += len(segment)
        for place, value in edits:
            content[place % (scan + 14)] = value
        header = parse_jpeg(memoryview(bytes(content)))
        if header is None or header.tags_at:
            return
        try:
            expected = decode(bytes(content), "x").shape
        except ImageReadError:
            return
        assert (header.height, header.width, 3) == expected


def outcome(read: Callable[[], Any]) -> str:
    """`"read"`, or the text of the ImageReadError."""
    try:
        read()
    except ImageReadError as error:
        return str(error)
    return "read"


class TestBadFiles:
    @pytest.mark.parametrize("kind", ["4:2:0", "progressive", "restarts", "png", "webp"])
    def test_a_file_cut_anywhere(self, kind: str, tmp_path: Path) -> None:
        """A truncated file raises ImageReadError exactly where read_image raises it, with the path in it."""
        content = image_file(kind)
        path = tmp_path / "cut.jpg"
        failures = 0
        for end in {0, 1, 2, 3, 20, *range(30, len(content), len(content) // 40), len(content) - 1}:
            path.write_bytes(content[:end])
            expected = outcome(lambda: read_image(path))
            found = outcome(lambda: EncodedImage(path).decode((1, 1, 9, 9)))
            failures += expected != "read"

            assert (found == "read") == (expected == "read"), end
            assert found == "read" or str(path) in found

        assert failures >= 40

    def test_what_is_no_image(self, tmp_path: Path) -> None:
        """Missing and empty files, directories, texts and null bytes raise read_image's error."""
        (tmp_path / "empty.jpg").touch()
        (tmp_path / "text.jpg").write_text("not an image " * 9)
        (tmp_path / "folder.jpg").mkdir()
        for name in ("missing.jpg", "empty.jpg", "text.jpg", "folder.jpg"):
            path = tmp_path / name
            expected = outcome(lambda path=path: read_image(path))

            assert str(path) in expected
            assert outcome(EncodedImage(path).decode) == expected
            assert outcome(lambda path=path: EncodedImage(path).shape) == expected
        assert "null" in outcome(EncodedImage("a\0b").decode)

    def test_content_without_a_path(self) -> None:
        """The error about bytes says that they are bytes."""
        with pytest.raises(ImageReadError, match="<bytes>"):
            EncodedImage(b"nothing").decode()

    @pytest.mark.parametrize("source", [None, 3, np.zeros((4, 4, 3), np.uint8), ["a.jpg"]])
    def test_sources_of_other_types(self, source: Any) -> None:
        """A source that is neither a path nor bytes is refused when the object is made."""
        with pytest.raises(TypeError, match="path of an image file, or its content as bytes"):
            EncodedImage(source)


class TestObject:
    @pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
    def test_pickled_content(self, wrap: Any) -> None:
        """A pickled object of bytes has the same pixels."""
        image = EncodedImage(wrap(image_file("4:2:0")))
        copy = pickle.loads(pickle.dumps(image))

        np.testing.assert_array_equal(copy.decode(), image.decode())

    def test_pickled_path(self, tmp_path: Path) -> None:
        """An object of a path pickles as the path, also after its file was read."""
        path = tmp_path / "a.jpg"
        path.write_bytes(image_file("4:2:0"))
        image = EncodedImage(path)
        image.decode()
        data = pickle.dumps(image)

        assert len(data) < 500
        assert pickle.loads(data).path == str(path)
        np.testing.assert_array_equal(pickle.loads(data).decode(), image.decode())

    def test_pickled_content_with_a_path(self) -> None:
        """Content that came from a cache keeps its path, for errors."""
        copy = pickle.loads(pickle.dumps(EncodedImage.of(memoryview(b"damaged"), "/photos/a.jpg")))

        with pytest.raises(ImageReadError, match=r"/photos/a\.jpg"):
            copy.decode()

    @pytest.mark.parametrize("is_shared", [True, False])
    def test_threads(self, is_shared: bool) -> None:
        """Four threads decode boxes of one object, or of their own, to the right pixels."""
        content = image_file("4:2:0", 200, 300)
        whole = decode(content, "x")
        shared = EncodedImage(content)
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(40):
                    image = shared if is_shared else EncodedImage(content)
                    box = x_min, y_min, x_max, y_max = random_box(rng, whole.shape)
                    np.testing.assert_array_equal(image.decode(box), whole[y_min:y_max, x_min:x_max])
            except BaseException as error:  # noqa: BLE001 - reported by the test
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert not errors

    def test_after_fork(self) -> None:
        """A forked child decodes regions although its parent has a decoder already."""
        content = image_file("4:2:0")
        expected = EncodedImage(content).decode((5, 5, 60, 50))
        pid = os.fork()
        if pid == 0:
            try:
                found = EncodedImage(content).decode((5, 5, 60, 50))
                os._exit(0 if np.array_equal(found, expected) else 1)
            finally:
                os._exit(2)

        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_concurrent_imports_leave_standard_error_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that need the decoder at the same time each find it, and standard error where it was."""
    (tmp_path / "noisy_codec.py").write_text("import os\nos.write(2, b'nvjpeg not found\\n')\nNAME = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = os.fstat(2).st_ino, os.fstat(2).st_dev
    kept = os.dup(2)
    # If nothing keeps them apart: the second thread begins in the middle of the first one, and ends last.
    taken, begun, restored = threading.Event(), threading.Event(), threading.Event()
    threads_seen: list[int] = []  # one entry for each call of dup2
    real_dup, real_dup2 = os.dup, os.dup2

    def dup(fd: int) -> int:
        is_second = taken.is_set()
        copy = real_dup(fd)
        if is_second:
            begun.set()
        elif not is_first_seen.acquire(blocking=False):
            taken.wait()
            os.close(copy)
            copy = real_dup(fd)
            begun.set()
        return copy

    def dup2(fd: int, other: int) -> int:
        me = threading.get_ident()
        is_first, is_restoring = me == (threads_seen or [me])[0], me in threads_seen
        threads_seen.append(me)
        if is_restoring and not is_first:
            restored.wait()
        found = real_dup2(fd, other)
        if is_restoring and is_first:
            restored.set()
        elif is_first:
            taken.set()
            begun.wait(0.2)
        return found

    is_first_seen = threading.Lock()
    monkeypatch.setattr(regions.os, "dup", dup)
    monkeypatch.setattr(regions.os, "dup2", dup2)
    real_import = regions._import_quietly
    monkeypatch.setattr(regions, "_import_quietly", lambda _: real_import("noisy_codec"))
    regions._codec.cache_clear()
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(regions._codec().NAME)) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        regions._codec.cache_clear()
        sys.modules.pop("noisy_codec", None)
        after = os.fstat(2).st_ino, os.fstat(2).st_dev
        real_dup2(kept, 2)
        os.close(kept)

    assert found == [1, 1]
    assert after == before


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_the_import_is_quiet(
    stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The codec's lines about GPUs are left out, lines of others are not; sys.stderr may be None."""
    text = "import os\nos.write(2, b'nvImageCodec: no nvjpeg\\nof another thread\\n')\n"
    (tmp_path / "noisy_codec.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "stderr", stream)
    importlib.invalidate_caches()
    try:
        regions._import_quietly("noisy_codec")
    finally:
        sys.modules.pop("noisy_codec", None)

    assert capfd.readouterr().err == "of another thread\n"


def test_an_image_of_a_path_keeps_no_content(tmp_path: Path) -> None:
    """A dataset may keep objects for all of its files; each use reads the file again."""
    path = tmp_path / "image.jpg"
    path.write_bytes(image_file("4:2:0"))
    image = EncodedImage(path)
    before = image.decode((0, 0, 20, 20))

    path.write_bytes(image_file("grey"))

    assert not np.array_equal(image.decode((0, 0, 20, 20)), before)
    kept = image.opened()
    path.unlink()
    assert kept.decode().shape == (61, 83, 3)
    with pytest.raises(ImageReadError, match=r"image\.jpg"):
        image.content()


def test_a_box_of_floats_is_refused() -> None:
    """Coordinates are ints; NumPy's ints are ints too."""
    image = EncodedImage(image_file("4:2:0"))

    with pytest.raises(TypeError, match="four ints"):
        image.decode((0.0, 0.0, 10.0, 10.0))  # type: ignore[arg-type]
    assert image.decode(tuple(np.array([1, 2, 30, 40]))).shape == (38, 29, 3)
