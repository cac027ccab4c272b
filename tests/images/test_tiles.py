"""Tiles: a region of a JPEG with restart markers has the pixels of the whole; JPEGs get such markers."""

from __future__ import annotations

import io
import os
import re
from typing import TYPE_CHECKING, Any
from unittest import mock

import cv2
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from fastload.cli import main
from fastload.errors import ImageReadError
from fastload.images import jpeg, regions, tiled_folder, tiles
from fastload.images.decode import decode
from fastload.images.encoded import EncodedImage
from fastload.images.orientation import turned
from fastload.images.regions import decode_region
from fastload.images.restarts import INTERVALS, add_restarts
from fastload.images.tiled_folder import files_to_tile, tile_file, tile_files, tile_jpeg
from fastload.images.tiles import cut_jpeg
from tests.images.test_encoded import exif_of

if TYPE_CHECKING:
    from pathlib import Path

SAMPLINGS = [0x111111, 0x211111, 0x221111, 0x411111, 0x121111]
GREY = 0


def tiled_file(height: int, width: int, interval: int, sampling: int = 0x221111, *more: int) -> bytes:
    """A JPEG of noise with a restart marker every `interval` MCUs."""
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    options = [cv2.IMWRITE_JPEG_RST_INTERVAL, interval, *more]
    if sampling != GREY:
        options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling]
    return cv2.imencode(".jpg", noise if sampling != GREY else noise[..., 0], options)[1].tobytes()


def turned_file(content: bytes, orientation: int) -> bytes:
    """The same JPEG with an EXIF orientation."""
    tag = exif_of(orientation).tobytes()
    return content[:2] + b"\xff\xe1" + (len(tag) + 2).to_bytes(2, "big") + tag + content[2:]


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Pictures of all samplings and sizes: intervals that divide a row of MCUs, whole rows, and others."""
    height, width = draw(st.integers(1, 150)), draw(st.integers(1, 150))
    row = -(-width // 16)
    interval = draw(st.sampled_from([1, 2, 3, row, 2 * row, 3 * row]) | st.integers(1, 40))
    return tiled_file(height, width, interval, draw(st.sampled_from([*SAMPLINGS, GREY])))


def draw_box(data: st.DataObject, height: int, width: int) -> tuple[int, int, int, int]:
    x_min, y_min = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    return x_min, y_min, data.draw(st.integers(x_min + 1, width)), data.draw(st.integers(y_min + 1, height))


def assert_is_part(content: bytes, box: tuple[int, int, int, int], whole: np.ndarray) -> None:
    x_min, y_min, x_max, y_max = box
    region = decode_region(content, box, "x")
    if region is not None:
        np.testing.assert_array_equal(region, whole[y_min:y_max, x_min:x_max])


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["OpenCV", "Pillow", "nvImageCodec"])
@settings(max_examples=120, deadline=None)
@given(content=files(), orientation=st.integers(1, 8), data=st.data())
def test_tiles_are_parts(decoder: str, content: bytes, orientation: int, data: Any) -> None:
    """Regions of a cut file are parts of the whole as a viewer shows it, whichever decoder is there."""
    found = None if decoder == "Pillow" else jpeg._decoder()
    codec = regions._codec() if decoder == "nvImageCodec" else None
    with (
        mock.patch.object(jpeg, "_decoder", return_value=found),
        mock.patch.object(regions, "_codec", return_value=codec),
    ):
        image = EncodedImage(turned_file(content, orientation))
        whole = turned(decode(content, "x"), orientation)
        for _ in range(4):
            box = x_min, y_min, x_max, y_max = draw_box(data, *whole.shape[:2])
            np.testing.assert_array_equal(image.decode(box), whole[y_min:y_max, x_min:x_max])


@pytest.mark.parametrize("sampling", [*SAMPLINGS, GREY])
@pytest.mark.parametrize("width", [65, 66, 68, 69, 72])
@mock.patch.object(regions, "_codec", return_value=None)
def test_columns_at_the_edge(codec: Any, sampling: int, width: int) -> None:
    """libjpeg-turbo does not interpolate colours in pictures of four columns, which a tile may have."""
    content = tiled_file(40, width, 1, sampling)
    whole = decode(content, "x")
    for x_min in range(width - 6, width):
        assert cut_jpeg(content, (x_min, 3, width, 30)) is not None
        assert_is_part(content, (x_min, 3, width, 30), whole)


@pytest.mark.parametrize("sampling", [*SAMPLINGS, GREY])
@pytest.mark.parametrize(("interval", "share"), [(1, 0.35), (4, 0.4), (32, 0.6), (64, 0.8), (5, 0.9)])
def test_a_cut_is_a_part_of_the_file(sampling: int, interval: int, share: float) -> None:
    """The tiles in a region are kept: single ones, or whole rows if rows do not begin with markers."""
    content = tiled_file(512, 512, interval, sampling)
    cut = cut_jpeg(content, (200, 200, 300, 300))
    assert cut is not None
    assert len(cut.content) < share * len(content)
    assert_is_part(content, (200, 200, 300, 300), decode(content, "x"))


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(content=files(), orientation=st.integers(1, 8), scale=st.sampled_from([2, 4, 8]), data=st.data())
def test_reduced_tiles(content: bytes, orientation: int, scale: int, data: Any) -> None:
    """With decode="fast", a cut file gives the pixels and the box that the reduced whole picture gives."""
    content = turned_file(content, orientation)
    image = EncodedImage(content)
    height, width, _ = image.shape
    box = x_min, y_min, x_max, y_max = draw_box(data, height, width)
    least = (y_max - y_min) // scale, (x_max - x_min) // scale
    assume(min(least) > 0)
    with mock.patch.object(regions, "_codec", return_value=None):
        found = image.decode_reduced(box, least)
        with mock.patch.object(tiles, "cut_jpeg", return_value=None):
            expected = EncodedImage(content).decode_reduced(box, least)
    assert found.box == expected.box
    np.testing.assert_array_equal(found.pixels, expected.pixels)


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["OpenCV", "nvImageCodec"])
@settings(max_examples=250, deadline=None)
@given(content=files(), data=st.data())
def test_a_damaged_file_never_has_other_pixels(decoder: str, content: bytes, data: st.DataObject) -> None:
    """Bytes changed, removed and put in, tiles lost, doubled and exchanged, false sizes and intervals."""
    damaged = bytearray(content)
    scan = content.index(b"\xff\xda")
    for _ in range(data.draw(st.integers(1, 3))):
        places = [match.start() for match in re.finditer(rb"\xff[\xd0-\xd7]", damaged[scan:])]
        start = data.draw(st.integers(scan, len(damaged)))
        kind = data.draw(st.sampled_from(["bytes", "header", "interval", "marker", "tile"]))
        if kind == "bytes":
            damaged[start : start + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=3))
        elif kind == "header":
            damaged[data.draw(st.integers(2, scan - 1))] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "interval":
            damaged[content.index(b"\xff\xdd") + 5] = data.draw(st.integers(0, 40))
        elif kind == "marker":
            damaged[start:start] = bytes([0xFF, data.draw(st.integers(0xD0, 0xD9))])
        elif len(places) > 1:
            number = data.draw(st.integers(0, len(places) - 2))
            tile = slice(scan + places[number], scan + places[number + 1])
            damaged[tile] = damaged[tile] * data.draw(st.sampled_from([0, 2]))
    try:
        whole = decode(bytes(damaged), "x")
    except ImageReadError:
        whole = np.zeros((0, 0, 3), np.uint8)
    height, width = decode(content, "x").shape[:2] if whole.size == 0 else whole.shape[:2]
    box = draw_box(data, height, width)
    if cut_jpeg(bytes(damaged), box) is None:
        return
    codec = regions._codec() if decoder == "nvImageCodec" else None
    with mock.patch.object(regions, "_codec", return_value=codec):
        try:
            assert_is_part(bytes(damaged), box, whole)
        except ImageReadError:
            assert whole.size == 0


def saved(mode: str = "RGB", **options: Any) -> bytes:
    """A smooth picture, as Pillow saves it."""
    y, x = np.mgrid[:96, :128]
    waves = np.stack([np.sin(x / 7), np.cos(y / 5), np.sin((x + y) / 11)], -1)
    file = io.BytesIO()
    Image.fromarray((127 + 100 * waves).astype(np.uint8)).convert(mode).save(file, "jpeg", **options)
    return file.getvalue()


TILED = tiled_file(64, 64, 2)
UNCUT = {
    "missing": TILED.replace(b"\xff\xd1", b"", 1),
    "out of order": TILED.replace(b"\xff\xd2", b"\xff\xd3", 1),
    "too many": TILED.replace(b"\xff\xd2", b"\xff\xd2\xff\xd3", 1),
    "filled": TILED.replace(b"\xff\xd2", b"\xff\xff\xd2", 1),
    "end inside": TILED.replace(b"\xff\xd2", b"\xff\xd9", 1),
    "no end": TILED[:-2],
    "a false interval": TILED.replace(b"\xff\xdd\x00\x04\x00\x02", b"\xff\xdd\x00\x04\x00\x03"),
    "without markers": tiled_file(64, 64, 0),
    "progressive": tiled_file(64, 64, 2, 0x221111, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    "CMYK": saved("CMYK", restart_marker_blocks=2),
    "no picture": b"not a picture",
}


@pytest.mark.parametrize("name", UNCUT)
def test_other_files_are_not_cut(name: str) -> None:
    """Ones whose markers are not those of their header, other kinds, and where all tiles are needed."""
    assert cut_jpeg(TILED, (0, 0, 8, 8)) is not None
    assert UNCUT[name] != TILED
    assert cut_jpeg(UNCUT[name], (0, 0, 8, 8)) is None
    assert cut_jpeg(TILED, (0, 0, 64, 64)) is None


# --- adding markers ---------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    sides=st.tuples(st.integers(1, 120), st.integers(1, 120)),
    interval=st.sampled_from([0, 1, 5, 9, 40]),
    sampling=st.sampled_from([*SAMPLINGS, GREY]),
    quality=st.sampled_from([5, 75, 100]),
    optimized=st.booleans(),
)
def test_the_pixels_stay(sides: Any, interval: int, sampling: int, quality: int, optimized: bool) -> None:
    """All samplings and sizes, own Huffman tables, and files with markers at other places."""
    options = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_OPTIMIZE, int(optimized)]
    content = tiled_file(*sides, interval, sampling, *options)
    new = add_restarts(content)
    np.testing.assert_array_equal(decode(new, "new"), decode(content, "old"))
    header = jpeg.parse_jpeg(new)
    assert header is not None
    assert header.restart_interval in INTERVALS
    assert header.num_mcus[0] % header.restart_interval == 0


def test_the_result_can_be_cut_and_keeps_other_segments() -> None:
    """A region needs a part of the file; EXIF, profile, comment and bytes behind it stay; twice is once."""
    options: dict[str, Any] = {"exif": exif_of(6), "icc_profile": b"profile" * 50, "comment": b"a comment"}
    content = saved(**options) + b"of the camera"
    new = add_restarts(content)
    assert cut_jpeg(content, (0, 0, 8, 8)) is None
    assert cut_jpeg(new, (0, 0, 8, 8)) is not None
    assert len(new) < 1.1 * len(content)
    assert add_restarts(new) is new
    assert new.endswith(b"\xff\xd9of the camera")
    before, after = (Image.open(io.BytesIO(file)).info for file in (content, new))
    assert {name: before[name] for name in ("exif", "icc_profile", "comment")}.items() <= after.items()


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(2, 3000), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_damaged_file_is_a_value_error_or_keeps_its_size(edits: list[tuple[int, int]]) -> None:
    """Wrong bytes raise ValueError alone; what is rewritten nevertheless has a picture of the same shape."""
    content = bytearray(saved())
    for place, value in edits:
        content[place % len(content)] = value
    try:
        new = add_restarts(bytes(content))
        shape = decode(bytes(content), "old").shape
    except (ValueError, ImageReadError):
        return
    assert decode(new, "new").shape == shape


def too_many_codes() -> bytes:
    """Codes of one, two and three bits leave no bits for the last ones."""
    content = bytearray(saved())
    lengths = content.index(b"\xff\xc4") + 5
    assert content[lengths : lengths + 3] == bytes([0, 1, 5])
    content[lengths] = 1
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        *((content, "only non-progressive JPEGs") for content in (saved("CMYK"), b"\xff\xd8", b"a text")),
        (too_many_codes(), "damaged"),
    ],
)
def test_other_files_are_refused(content: bytes, why: str) -> None:
    """With a ValueError that says why."""
    with pytest.raises(ValueError, match=why):
        add_restarts(content)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with JPEGs, a progressive one, a damaged one, and a text."""
    root = tmp_path / "photos"
    (root / "cat").mkdir(parents=True)
    (root / "cat" / "a.jpg").write_bytes(saved())
    (root / "cat" / "b.JPEG").write_bytes(saved(quality=40, subsampling="4:4:4"))
    (root / "damaged.jpg").write_bytes(saved()[:-500])
    (root / "progressive.jpg").write_bytes(saved(progressive=True))
    (root / "notes.txt").write_text("a text")
    (root / "loop").symlink_to(root)
    monkeypatch.setattr(tiled_folder.shutil, "which", lambda _: None)
    return root


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_folder_is_copied_with_tiles(photos: Path, tmp_path: Path, num_workers: int) -> None:
    """JPEGs get markers, all other files are copied, and a reason names each JPEG that stays as it is."""
    source, dest = str(photos), str(tmp_path / "new")
    names = files_to_tile(source, dest)
    found = {file.name: file for file in tile_files(source, dest, names, num_workers)}
    assert list(found) == names == sorted(found)
    assert {name for name, file in found.items() if file.is_tiled} == {"cat/a.jpg", "cat/b.JPEG"}
    for name in names:
        old, new = photos / name, tmp_path / "new" / name
        assert found[name].new_nbytes == new.stat().st_size
        assert new.stat().st_mtime_ns == old.stat().st_mtime_ns
        if found[name].is_tiled:
            np.testing.assert_array_equal(decode(new.read_bytes(), name), decode(old.read_bytes(), name))
            assert cut_jpeg(new.read_bytes(), (0, 0, 8, 8)) is not None
        else:
            assert new.read_bytes() == old.read_bytes()
    assert found["notes.txt"].reason is None
    assert "progressive" in str(found["progressive.jpg"].reason)
    assert found["damaged.jpg"].reason is not None


def test_a_second_run_writes_what_is_missing(photos: Path, tmp_path: Path) -> None:
    """Files that are done are left alone; changed and unfinished ones are written. Folders must be apart."""
    source, dest = str(photos), str(tmp_path / "new")
    list(tile_files(source, dest, files_to_tile(source, dest), 0))
    assert files_to_tile(source, dest) == []
    os.utime(photos / "notes.txt", ns=(0, 0))
    (tmp_path / "new" / "cat" / "a.jpg").unlink()
    assert files_to_tile(source, dest) == ["cat/a.jpg", "notes.txt"]
    for inside in (photos, photos / "new", tmp_path):
        with pytest.raises(ValueError, match="outside"):
            files_to_tile(source, str(inside))


def test_other_pixels_do_not_count(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewritten file that decodes to them is not kept; one that cannot be finished leaves no part."""
    new = tmp_path / "new"
    monkeypatch.setattr(tiled_folder, "add_restarts", lambda _: saved(quality=10))
    assert "other pixels" in str(tile_file(str(photos), str(new), "cat/a.jpg").reason)
    assert (new / "cat" / "a.jpg").read_bytes() == saved()
    monkeypatch.setattr(tiled_folder.shutil, "copystat", mock.Mock(side_effect=OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        tile_file(str(photos), str(new), "cat/b.JPEG")
    assert [path.name for path in (new / "cat").iterdir()] == ["a.jpg"]


def test_jpegtran_rewrites_files(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progressive ones too, but none that hold more, which it would drop; where it fails, Python does it."""
    program, words, new = tmp_path / "jpegtran", tmp_path / "words", tmp_path / "new"
    (tmp_path / "sequential.jpg").write_bytes(saved())
    program.write_text(f"#!/bin/sh\necho $@ > {words}\nexec cat '{tmp_path}/sequential.jpg'\n")
    program.chmod(0o700)
    monkeypatch.setattr(tiled_folder.shutil, "which", lambda _: str(program))
    assert tile_jpeg(saved() + b"of the camera\xff\xd9", "x").endswith(b"of the camera\xff\xd9")
    assert not words.exists()
    for name in ("progressive.jpg", "cat/a.jpg"):
        assert tile_file(str(photos), str(new), name).is_tiled
        assert words.read_text() == "-copy all -optimize -restart 4B\n"
        assert cut_jpeg((new / name).read_bytes(), (0, 0, 8, 8)) is not None
        words.unlink()
    monkeypatch.setattr(tiled_folder.shutil, "which", lambda _: "/bin/false")
    assert tile_file(str(photos), str(new), "cat/a.jpg").is_tiled


def test_the_command_says_what_became_of_the_files(photos: Path, tmp_path: Path) -> None:
    """`fastload images tile`: how many have tiles, and which JPEGs were copied and why."""
    words = ["images", "tile", str(photos), str(tmp_path / "new"), "--workers", "0"]
    done = CliRunner().invoke(main.app, words)
    assert done.exit_code == 0, done.output
    for text in ("2 JPEGs with tiles", "3 files copied", "progressive.jpg was copied: "):
        assert text in done.output
    assert '"num_files": 0' in CliRunner().invoke(main.app, [*words, "--json"]).output
