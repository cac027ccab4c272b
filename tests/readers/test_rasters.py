"""rasterio: what it decodes is remembered, and equal in all that a caller can see."""

from __future__ import annotations

import os
import shutil
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fastload.readers import patches
from fastload.readers.decode_cache import DecodeCache, inactive
from tests.kit.decoding import check_three_rounds, outcome

rasterio = pytest.importorskip("rasterio")
from rasterio.enums import Resampling  # noqa: E402
from rasterio.io import DatasetReader, MemoryFile  # noqa: E402
from rasterio.windows import Window  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.kit.decoding import DictStore

_IGNORED = ("rasterio.errors.NotGeoreferencedWarning", "PendingDeprecationWarning")  # of rasterio's own code
pytestmark = [pytest.mark.filterwarnings(f"ignore::{one}") for one in _IGNORED]
BANDS = np.random.default_rng(0).integers(0, 9999, (3, 40, 50), dtype=np.uint16)


def save(path: Path, bands: Any = BANDS, **options: Any) -> None:
    """A raster; by default, a TIFF that is compressed."""
    size: Any = dict(zip(("count", "height", "width"), bands.shape, strict=True))
    if "driver" not in options:
        options = {"driver": "GTiff", "compress": "deflate", **options}
    with rasterio.open(path, "w", **size, dtype=bands.dtype, **options) as raster:
        raster.write(bands)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rasters of all kinds."""
    save(tmp_path / "a.tif", nodata=7)
    save(tmp_path / "plain.tif", compress=None)
    save(tmp_path / "a.png", driver="PNG")
    save(tmp_path / "overviews.tif")
    with rasterio.Env(TIFF_USE_OVR=True), rasterio.open(tmp_path / "overviews.tif", "r+") as raster:
        raster.build_overviews([2, 4], Resampling.average)
    assert (tmp_path / "overviews.tif.ovr").exists()
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(tmp_path / "a.tif", "a.tif")
    (tmp_path / "a.vrt").write_text(
        '<VRTDataset rasterXSize="50" rasterYSize="40"><VRTRasterBand dataType="UInt16" band="1">'
        '<SimpleSource><SourceFilename relativeToVRT="1">a.tif</SourceFilename><SourceBand>1</SourceBand>'
        "</SimpleSource></VRTRasterBand></VRTDataset>"
    )
    return tmp_path


@pytest.fixture(autouse=True)
def met(cache: DecodeCache) -> None:
    """The library is met."""
    assert not [name for name in patches.unmet() if name.startswith("DatasetReader")]


def read(path: Any, *args: Any, **kwargs: Any) -> Any:
    """As people read."""
    with rasterio.open(path) as raster:
        return raster.read(*args, **kwargs)


def _open_twice(path: Path) -> Any:
    with rasterio.open(path) as raster, rasterio.open(path, sharing=True) as shared:
        return raster.read(1), shared.read(1)


def _in_memory(path: Path) -> Any:
    with MemoryFile(path.read_bytes()) as memory, memory.open() as raster:
        return raster.read()


def _closed(path: Path) -> Any:
    raster = rasterio.open(path)
    raster.close()
    return raster.read()


def _of_a_class(path: Path) -> Any:
    class Own(DatasetReader):  # type: ignore[misc]
        def read(self, *args: Any, **kwargs: Any) -> Any:
            return super().read(*args, **kwargs) + 1

    with Own(str(path)) as raster:
        return raster.read(1)


def _in_an_environment(path: Path) -> Any:
    with rasterio.Env(GTIFF_IGNORE_READ_ERRORS=True):
        ignoring = read(path, 1)
    return ignoring, read(path, 1)


def _to_write(path: Path) -> Any:
    with rasterio.open(path, "r+") as raster:
        return raster.read(1)


# By title: a file, a function of its path, and how many of its results are stored.
CALLS: dict[str, tuple[str, Callable[[Path], Any], int]] = {
    "all": ("a.tif", read, 1),
    "by text": ("a.tif", lambda path: read(str(path)), 1),
    "band": ("a.tif", lambda path: read(path, 2), 1),
    "bands": ("a.tif", lambda path: read(path, [3, 1]), 1),
    "NumPy's number": ("a.tif", lambda path: read(path, np.int64(2)), 0),
    "window": ("a.tif", lambda path: read(path, 1, window=Window(3, 4, 20, 10)), 1),
    "windows": ("a.tif", lambda path: [read(path, 1, window=Window(n, 4, 20, 10)) for n in range(3)], 3),
    "slices": ("a.tif", lambda path: read(path, 1, window=((3, 9), (4, 30))), 1),
    "half pixels": ("a.tif", lambda path: read(path, 1, window=Window(0.5, 0.5, 20.5, 9.5)), 1),
    "beyond": ("a.tif", lambda path: read(path, window=Window(-9, -9, 30, 30), boundless=True), 1),
    "smaller": ("a.tif", lambda path: read(path, 1, out_shape=(10, 12)), 1),
    "resampled": (
        "a.tif",
        lambda path: [
            read(path, 1, out_shape=(10, 12), resampling=how)
            for how in (Resampling.nearest, Resampling.bilinear)
        ],
        2,
    ),
    "floats": ("a.tif", lambda path: read(path, out_dtype="float32"), 1),
    "type": ("a.tif", lambda path: read(path, out_dtype=np.float64), 1),
    "filled": ("a.tif", lambda path: read(path, fill_value=3), 1),
    "masked": ("a.tif", lambda path: read(path, masked=True).filled(1), 0),
    "into an array": ("a.tif", lambda path: read(path, 1, out=np.zeros((40, 50), np.uint16)), 0),
    "empty window": ("a.tif", lambda path: read(path, 1, window=Window(60, 60, 9, 9)), 0),
    "bad band": ("a.tif", lambda path: read(path, 9), 0),
    "bad argument": ("a.tif", lambda path: read(path, bands=1), 0),
    "closed": ("a.tif", _closed, 0),
    "png": ("a.png", read, 1),
    "shared": ("a.tif", _open_twice, 1),
    "environment": ("a.tif", _in_an_environment, 2),
    "subclass": ("a.tif", _of_a_class, 1),
    "not compressed": ("plain.tif", read, 0),
    "file beside it": ("overviews.tif", lambda path: read(path, 1, out_shape=(10, 12)), 0),
    "other files": ("a.vrt", read, 0),
    "archive": ("a.zip", lambda path: read(f"zip://{path}!a.tif"), 0),
    "memory": ("a.tif", _in_memory, 0),
    "file object": ("a.tif", lambda path: read(path.open("rb")), 0),
    "options": ("a.tif", lambda path: rasterio.open(path, num_threads=1).read(), 0),
    "to write": ("a.tif", _to_write, 0),
    "missing": ("b.tif", read, 0),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("title", CALLS)
def test_calls_have_the_same_results(title: str, folder: Path, store: DictStore) -> None:
    """Results and errors are the library's, in three rounds; what can be remembered is stored once."""
    name, call, num_stored = CALLS[title]
    check_three_rounds(store, num_stored, lambda: outcome(call, folder / name))


def test_files_that_changed_are_read_again(folder: Path) -> None:
    """Replaced, or rewritten in place with the old mtime, before it is opened and while it is open."""
    path, other = folder / "a.tif", folder / "other.tif"
    for number in range(4):
        raster, time_ns = rasterio.open(path), path.stat().st_mtime_ns
        assert np.array_equal(read(path), BANDS + number)
        save(other, BANDS + number + 1)
        if number % 2:
            other.replace(path)
        else:
            shutil.copyfile(other, path)
            os.utime(path, ns=(time_ns, time_ns))
        for _ in range(2):
            with inactive():
                expected = outcome(lambda _, raster=raster: raster.read(), path)
            assert outcome(lambda _, raster=raster: raster.read(), path) == expected
            assert np.array_equal(read(path), BANDS + number + 1)
        raster.close()


def test_a_dataset_that_was_opened_before_is_read_each_time(folder: Path, store: DictStore) -> None:
    """Nobody knows whether its file changed since."""
    with inactive():
        raster = rasterio.open(folder / "a.tif")
    for _ in range(2):
        assert np.array_equal(raster.read(), BANDS)
    assert not store.values
    raster.close()
