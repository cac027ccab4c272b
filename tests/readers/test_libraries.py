"""Libraries other than Pillow: what they decode is remembered, and equal in all that a caller can see."""

from __future__ import annotations

import gzip
import io
import os
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import cv2
import imageio.v3
import numpy as np
import pytest
import skimage.io
import tifffile
import torch
from PIL import Image
from tifffile import imread as imread_taken_before

from fastload.readers import opencv
from fastload.readers.decode_cache import DecodeCache, inactive
from fastload.readers.reasons import UNCOMPRESSED, UNUSUAL
from fastload.system.cache_counts import cache_counts
from tests.kit.decoding import check_three_rounds, outcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.kit.decoding import DictStore

RNG = np.random.default_rng(0)
PHOTO = cv2.resize(RNG.integers(0, 256, (6, 8, 3), dtype=np.uint8), (80, 60))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of many kinds."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(PHOTO)
    image.save(tmp_path / "photo.jpg", exif=exif)
    image.save(tmp_path / "écran.png")
    image.quantize(8).save(tmp_path / "palette.png", transparency=1)
    image.convert("1").save(tmp_path / "one.png")
    image.save(tmp_path / "photo.webp")
    image.save(tmp_path / "photo.bmp")
    image.save(tmp_path / "pages.tif", save_all=True, append_images=[image.rotate(9)], compression="tiff_lzw")
    cv2.imwrite(str(tmp_path / "deep.png"), RNG.integers(0, 65536, (9, 7), dtype=np.uint16))
    tifffile.imwrite(
        tmp_path / "bands.tif", RNG.integers(0, 99, (5, 8, 9), dtype=np.uint16), compression="zlib"
    )
    np.savez_compressed(tmp_path / "arrays.npz", a=PHOTO, f=np.asfortranarray(PHOTO / 3), s=np.array(3))
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "photo.jpg").read_bytes()[:700])
    (tmp_path / "empty.png").write_bytes(b"")
    return tmp_path


def _member(path: Path, name: str = "a") -> Any:
    with np.load(path) as archive:
        return archive[name]


def _from_buffer(path: Path, flags: int = 1) -> Any:
    return cv2.imdecode(np.fromfile(path, np.uint8), flags)


def _asarray(path: Path, **kwargs: Any) -> Any:
    with tifffile.TiffFile(path) as tiff:
        return tiff.asarray(**kwargs)


def _from_open_file(path: Path) -> Any:
    with path.open("rb") as file, np.load(file) as archive:
        return archive["a"]


# By title: a file, a function of its path, and how many of its results are stored.
IMAGES = [
    "photo.jpg",
    "écran.png",
    "palette.png",
    "one.png",
    "photo.webp",
    "photo.bmp",
    "deep.png",
    "cut.jpg",
]
CALLS: dict[str, tuple[str, Callable[[Path], Any], int]] = {
    **{f"imread {name}": (name, lambda path: cv2.imread(str(path)), 1) for name in IMAGES},
    **{f"imdecode {name}": (name, _from_buffer, 1) for name in IMAGES if name != "cut.jpg"},
    "imdecode cut.jpg": ("cut.jpg", _from_buffer, 0),
    "imdecode photo.bmp": ("photo.bmp", _from_buffer, 0),  # hashing it takes longer
    **{
        f"imread flags {flags}": (name, partial(lambda flags, path: cv2.imread(str(path), flags), flags), 1)
        for flags in (-1, 0, 1, 2, 4, 6, 17, 32, 64, 128, 129, 256)
        for name in ("photo.jpg",)
    },
    "imread keyword": ("photo.jpg", lambda path: cv2.imread(str(path), flags=0), 1),
    "imread all keywords": ("photo.jpg", lambda path: cv2.imread(filename=str(path), flags=0), 1),
    "imread path": ("photo.jpg", lambda path: cv2.imread(path), 1),
    "imread numpy string": ("photo.jpg", lambda path: cv2.imread(np.str_(path)), 1),
    "imread bytes": ("photo.jpg", lambda path: cv2.imread(os.fsencode(path)), 0),
    "imread numpy flags": ("photo.jpg", lambda path: cv2.imread(str(path), np.int64(0)), 0),
    "imread bad flags": ("photo.jpg", lambda path: cv2.imread(str(path), "x"), 0),
    # `imread(path, True)` has a `dst`; `imread(path, flags=True)` is an error.
    **{
        f"imread {title} {value!r}": ("empty.png", partial(call, value), 0)
        for value in (True, 1.0)
        for title, call in {
            "dst": lambda value, path: cv2.imread(str(path), value),
            "flags": lambda value, path: cv2.imread(filename=str(path), flags=value),
        }.items()
    },
    **{
        f"imdecode flags {flags!r}": ("photo.jpg", partial(_from_buffer, flags=flags), 0)
        for flags in (True, 1.0, "1", None, np.int64(1))
    },
    "imread nothing": ("photo.jpg", lambda path: cv2.imread(), 0),
    "imread missing": ("missing.jpg", lambda path: cv2.imread(str(path)), 0),
    "imread empty": ("empty.png", lambda path: cv2.imread(str(path)), 0),
    "imread directory": ("", lambda path: cv2.imread(str(path)), 0),
    "imdecode flags": ("photo.jpg", partial(_from_buffer, flags=-1), 1),
    "imdecode row": ("photo.jpg", lambda path: cv2.imdecode(np.fromfile(path, np.uint8)[None], 1), 1),
    "imdecode bytes": ("photo.jpg", lambda path: cv2.imdecode(path.read_bytes(), 1), 0),
    "imdecode no flags": ("photo.jpg", lambda path: cv2.imdecode(np.fromfile(path, np.uint8)), 0),
    "imdecode scattered": ("photo.jpg", lambda path: cv2.imdecode(np.fromfile(path, np.uint8)[::-1], 1), 0),
    "imdecode empty": ("empty.png", _from_buffer, 0),
    "imreadmulti": ("pages.tif", lambda path: list(cv2.imreadmulti(str(path))[1]), 0),
    "tifffile": ("bands.tif", tifffile.imread, 1),
    "tifffile taken before": ("bands.tif", imread_taken_before, 1),
    "tifffile page": ("bands.tif", lambda path: tifffile.imread(path, key=3), 1),
    "tifffile pages": ("bands.tif", lambda path: tifffile.imread(path, key=range(2)), 0),
    "tifffile squeeze": ("bands.tif", lambda path: tifffile.imread(path, squeeze=False), 1),
    "tifffile object": ("bands.tif", _asarray, 1),
    "tifffile series": ("bands.tif", partial(_asarray, series=0), 1),
    "tifffile mapped": ("bands.tif", lambda path: np.array(tifffile.imread(path, out="memmap")), 0),
    "tifffile options": ("bands.tif", lambda path: tifffile.imread(path, is_shaped=False), 0),
    "tifffile buffer": ("bands.tif", lambda path: tifffile.imread(io.BytesIO(path.read_bytes())), 0),
    "tifffile pattern": ("bands.tif", lambda path: tifffile.imread(f"{path.parent}/b*.tif"), 1),
    "tifffile list": ("bands.tif", lambda path: tifffile.imread([path, path]), 1),
    "tifffile no such page": ("bands.tif", lambda path: tifffile.imread(path, key=99), 0),
    "npz": ("arrays.npz", _member, 1),
    "npz transposed": ("arrays.npz", partial(_member, name="f"), 1),
    "npz scalar": ("arrays.npz", partial(_member, name="s"), 1),
    "npz file name": ("arrays.npz", partial(_member, name="a.npy"), 1),
    "npz missing": ("arrays.npz", partial(_member, name="b"), 0),
    "npz file": ("arrays.npz", _from_open_file, 1),
    "npz mapped": ("arrays.npz", lambda path: np.load(path, mmap_mode="r")["a"], 1),
    "npz bytes": ("arrays.npz", lambda path: np.load(io.BytesIO(path.read_bytes()))["a"], 0),
    "imageio": ("photo.jpg", imageio.v3.imread, 1),
    "imageio png": ("écran.png", imageio.v3.imread, 1),
    "imageio tiff": ("bands.tif", imageio.v3.imread, 1),
    "skimage": ("photo.jpg", skimage.io.imread, 1),
    "skimage tiff": ("bands.tif", skimage.io.imread, 1),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", CALLS)
def test_calls_have_the_same_results(title: str, folder: Path, cache: DecodeCache, store: DictStore) -> None:
    """Results and errors are the library's, in three rounds; what can be remembered is stored once."""
    name, call, num_stored = CALLS[title]
    check_three_rounds(store, num_stored, lambda: outcome(call, folder / name))


def test_opencv_without_optimizations_has_pixels_of_its_own(
    tmp_path: Path, cache: DecodeCache, store: DictStore
) -> None:
    """Floats differ in the last bit, so what one implementation decoded is not served for the other."""
    path = str(tmp_path / "sky.hdr")
    rng = np.random.default_rng(0)
    cv2.imwrite(path, rng.random((37, 53, 3), np.float32))
    try:
        for _ in range(2):
            for is_optimized in True, False:
                cv2.setUseOptimized(is_optimized)
                cv2.imread(path, cv2.IMREAD_ANYDEPTH)
    finally:
        cv2.setUseOptimized(True)
    assert len(store.values) == 2


def test_calls_with_odd_arguments_are_counted(folder: Path, cache: DecodeCache) -> None:
    """A report says that such calls are not remembered, rather than that nothing was decoded."""
    cache_counts.take_reasons()
    cv2.imread(str(folder / "empty.png"), flags=np.int64(1))
    cv2.imread(str(folder / "empty.png"), dst=None, flags=1)
    _from_buffer(folder / "photo.jpg", np.int64(1))  # type: ignore[arg-type]
    assert cache_counts.take_reasons() == {UNUSUAL: 3}


@pytest.mark.parametrize("name", ["photo.jpg", "écran.png"])
def test_imread_into_an_array_fills_the_array(name: str, folder: Path, cache: DecodeCache) -> None:
    """`cv2.imread(path, dst)` writes to the caller's array, before and after the file is remembered."""
    path = str(folder / name)
    expected = cv2.imread(path)
    for _ in range(2):
        target = np.zeros_like(expected)
        try:
            result = cv2.imread(path, target)
        except (cv2.error, TypeError):
            pytest.skip("this release has no such argument")
        assert np.array_equal(result, expected)
        assert np.array_equal(target, expected)


def test_settings_of_the_environment_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with other limits of OpenCV has other keys, and imread and imdecode differ."""
    kinds = {opencv._kind("imread"), opencv._kind("imdecode")}
    monkeypatch.setenv("OPENCV_IO_MAX_IMAGE_PIXELS", "10")
    assert len(kinds | {opencv._kind("imread")}) == 3


def test_a_build_that_reads_files_beside_the_image_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With GDAL, imread is not replaced."""
    assert [patch.name for patch in opencv.patches()] == ["imread", "imdecode"]
    monkeypatch.setattr(cv2, "getBuildInformation", lambda: "    GDAL:     YES (/usr/lib/libgdal.so)\n")
    assert [patch.name for patch in opencv.patches()] == ["imdecode"]


def test_imread_and_imdecode_do_not_mix(folder: Path, cache: DecodeCache, store: DictStore) -> None:
    """Flags, functions and contents have entries of their own."""
    path = folder / "photo.jpg"
    for flags in (0, 1):
        for call in (cv2.imread, lambda name, flags: _from_buffer(name, flags)):
            for _ in range(2):
                with inactive():
                    expected = call(str(path), flags)
                assert np.array_equal(call(str(path), flags), expected)
    assert len(store.values) == 4


def test_objects_in_archives_are_not_remembered(tmp_path: Path, cache: DecodeCache, store: DictStore) -> None:
    """Arrays of objects are unpickled each time, or refused as ever."""
    np.savez_compressed(
        tmp_path / "objects.npz", a=np.array([{"a": 1}, None], object), b=np.zeros(3, "i4,f8")
    )
    for _ in range(2):
        with np.load(tmp_path / "objects.npz", allow_pickle=True) as archive:
            assert archive["a"][0] == {"a": 1}
            assert archive["b"].dtype.names
        with np.load(tmp_path / "objects.npz") as archive, pytest.raises(ValueError, match="allow_pickle"):
            _ = archive["a"]
    assert not store.values


def test_archives_without_compression_are_read_each_time(
    tmp_path: Path, cache: DecodeCache, store: DictStore, counts: Any
) -> None:
    """They would be found no faster; the count says so."""
    cache_counts.take_reasons()
    np.savez(tmp_path / "plain.npz", a=PHOTO)
    tifffile.imwrite(tmp_path / "plain.tif", PHOTO)
    cv2.imwrite(str(tmp_path / "plain.bmp"), PHOTO)
    for _ in range(2):
        assert np.array_equal(_member(tmp_path / "plain.npz"), PHOTO)
        assert np.array_equal(tifffile.imread(tmp_path / "plain.tif"), PHOTO)
        with tifffile.TiffFile(tmp_path / "plain.tif") as tiff:
            assert np.array_equal(tiff.asarray(), PHOTO)
        assert np.array_equal(_from_buffer(tmp_path / "plain.bmp"), PHOTO)
        assert np.array_equal(
            np.asarray(Image.open(io.BytesIO((tmp_path / "plain.bmp").read_bytes()))), PHOTO[..., ::-1]
        )
    assert not store.values
    assert counts() == (0, 10)
    assert cache_counts.take_reasons() == {UNCOMPRESSED: 10}


def test_an_open_archive_keeps_to_what_it_has_read(tmp_path: Path, cache: DecodeCache) -> None:
    """An archive that is rewritten while it is open gives what NumPy gives; the new one is remembered."""
    path = tmp_path / "archive.npz"
    np.savez_compressed(path, a=np.zeros(50))
    with np.load(path) as held:
        assert not held["a"].any()
        np.savez_compressed(path, a=np.arange(50.0))
        assert np.array_equal(_member(path), np.arange(50.0))
        with inactive():
            expected = outcome(lambda _: held["a"], path)
        assert outcome(lambda _: held["a"], path) == expected
        assert _member(path)[49] == 49


def test_an_open_tiff_keeps_to_its_pages(tmp_path: Path, cache: DecodeCache, store: DictStore) -> None:
    """A file that is rewritten while its pages are known is not remembered through them."""
    path = tmp_path / "image.tif"
    tifffile.imwrite(path, np.zeros((40, 50), np.uint8), compression="zlib")
    with tifffile.TiffFile(path) as tiff:
        probe = tmp_path / "probe"
        shutil.copyfile(path, probe)
        while probe.stat().st_ctime_ns <= path.stat().st_ctime_ns:
            shutil.copyfile(path, probe)
        tifffile.imwrite(path, np.ones((40, 50), np.uint8), compression="zlib")
        outcome(lambda _: tiff.asarray(), path)
        assert not store.values
    for _ in range(2):
        assert (tifffile.imread(path) == 1).all()
    assert len(store.values) == 1


def test_a_tiff_inside_another_file_is_not_taken_for_it(
    folder: Path, tmp_path: Path, cache: DecodeCache, store: DictStore
) -> None:
    """A TIFF at an offset, or in a gzip file, is read each time."""
    content = (folder / "bands.tif").read_bytes()
    (tmp_path / "at offset").write_bytes(b"x" * 8 + content)
    with gzip.open(tmp_path / "zipped", "wb") as file:
        file.write(content)
    for _ in range(2):
        with (tmp_path / "at offset").open("rb") as file:
            file.seek(8)
            tifffile.imread(file)
        with gzip.open(tmp_path / "zipped") as file:
            tifffile.imread(file)
    assert not store.values


def test_ome_files_are_read_each_time(tmp_path: Path, cache: DecodeCache, store: DictStore) -> None:
    """An OME-TIFF can refer to other files."""
    pixels = RNG.integers(0, 99, (3, 8, 9), dtype=np.uint16)
    tifffile.imwrite(tmp_path / "image.ome.tif", pixels, compression="zlib", metadata={"axes": "ZYX"})
    for _ in range(2):
        assert np.array_equal(tifffile.imread(tmp_path / "image.ome.tif"), pixels)
    assert not store.values


class _Operators:
    """torchvision's decoders, by Pillow: the compiled ones need the torch that they were built for."""

    def __init__(self) -> None:
        self.library = torch.library.Library("image", "FRAGMENT")
        self.num_decodes = 0
        self.is_needed = not hasattr(torch.ops.image, "decode_image")
        if self.is_needed:
            self.library.define("decode_image(Tensor data, int mode, bool apply_exif) -> Tensor")
            self.library.impl("decode_image", self._decode, "CPU")

    def _decode(self, data: Any, mode: int, apply_exif: bool) -> Any:
        self.num_decodes += 1
        image = Image.open(io.BytesIO(bytes(data.numpy())))
        pixels = torch.from_numpy(np.atleast_3d(np.array(image.convert("L" if mode == 1 else "RGB"))))
        return pixels.clone().permute(2, 0, 1)


@pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")
def test_torchvision_is_met_at_its_operators(
    folder: Path, store: DictStore, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors have the strides of the decoder, memory of their own, and can be resized; names count not."""
    from fastload.readers import torchvision_io
    from tests.kit.torchvision import import_torchvision

    import_torchvision()
    import torchvision.io
    from torchvision.io import decode_image

    monkeypatch.setattr("torchvision.io.image._assert_has_image_ops", lambda: None)
    operators = _Operators()
    operator = torch.ops.image.decode_image
    met = [patch for patch in torchvision_io.patches() if patch.owner is operator]
    assert len(met) == 1
    data = torch.from_numpy(np.fromfile(folder / "photo.jpg", np.uint8))
    expected = {mode: decode_image(data, mode) for mode in ("RGB", "GRAY")}
    operators.num_decodes = 0
    try:
        for patch in met:
            patch.put()
        with DecodeCache(store, verify_share=0).active():
            for _ in range(3):
                for mode, pixels in expected.items():
                    result = decode_image(data, mode)
                    assert torch.equal(result, pixels)
                    assert result.stride() == pixels.stride()
                    assert result.is_contiguous() == pixels.is_contiguous()
                    result.zero_()
                    result.resize_(4, 1000, 1000)
            assert decode_image(data[None].squeeze(0), "RGB").any()
            torchvision.io.decode_image(data, mode="RGB", apply_exif_orientation=True)
    finally:
        for patch in met:
            patch.take_away()
    assert operators.num_decodes == (3 if operators.is_needed else 0)
