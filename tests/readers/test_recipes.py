"""The recipes of docs/guides/frameworks.md for files that no reader knows: what they read is remembered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fastload.readers.decode_cache import DecodeCache, inactive
from tests.kit.decoding import check_three_rounds, outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kit.decoding import DictStore

h5py, nibabel, pydicom, rasterio = map(pytest.importorskip, ("h5py", "nibabel", "pydicom", "rasterio"))

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "frameworks.md"
VOXELS = np.random.default_rng(0).integers(0, 999, (12, 11, 10), dtype=np.uint16)


@pytest.fixture(scope="module")
def recipes() -> dict[str, Any]:
    """The functions of the section."""
    section = PAGE.read_text().split("\n## NIfTI, ")[1].split("\n## ")[0]
    (block,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "recipes"}
    exec(compile(block, "recipes.py", "exec"), names)
    return names


def save_nifti(path: Path, voxels: Any) -> None:
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), path)


def save_dicom(path: Path, voxels: Any) -> None:
    """A compressed slice."""
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, RLELossless

    dataset = pydicom.Dataset()
    dataset.file_meta = pydicom.dataset.FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = CTImageStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID = "1.2.3"
    dataset.Rows, dataset.Columns = voxels[0].shape
    dataset.BitsAllocated = dataset.BitsStored = 16
    dataset.HighBit, dataset.PixelRepresentation, dataset.SamplesPerPixel = 15, 0, 1
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.PixelData = voxels[0].tobytes()
    dataset.compress(RLELossless)
    dataset.save_as(path, enforce_file_format=True)


def save_hdf5(path: Path, voxels: Any) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("voxels", data=voxels, chunks=(3, 11, 10), compression="gzip")


def save_geotiff(path: Path, voxels: Any) -> None:
    size: Any = dict(zip(("count", "height", "width"), voxels.shape, strict=True))
    with rasterio.open(path, "w", driver="GTiff", compress="deflate", **size, dtype=voxels.dtype) as raster:
        raster.write(voxels)


# By function: the file, how it is written, further arguments, and what they select of the voxels.
RECIPES: dict[str, tuple[str, Callable[..., None], tuple[Any, ...], Callable[[Any], Any]]] = {
    "read_nifti": ("volume.nii.gz", save_nifti, (), lambda voxels: voxels),
    "read_dicom": ("slice.dcm", save_dicom, (), lambda voxels: voxels[0]),
    "read_hdf5": ("file.h5", save_hdf5, ("voxels", 3), lambda voxels: voxels[3]),
    "read_geotiff": ("bands.tif", save_geotiff, (2, 1, 5), lambda voxels: voxels[:, 1:6, 2:7]),
}


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_reads_each_file_once(
    name: str, recipes: dict[str, Any], tmp_path: Path, cache: DecodeCache, store: DictStore
) -> None:
    """Its results are the pixels, with strides and rights; they are stored once for each content."""
    file, save, arguments, select = RECIPES[name]
    path, read = tmp_path / file, recipes[name]
    save(path, VOXELS)
    assert np.array_equal(read(path, *arguments), select(VOXELS))
    check_three_rounds(store, 1, lambda: outcome(lambda path: read(path, *arguments), path))

    save(tmp_path / f"other-{file}", VOXELS[::-1].copy())
    (tmp_path / f"other-{file}").replace(path)
    with inactive():
        expected = read(path, *arguments)
    assert np.array_equal(read(path, *arguments), expected)
    assert np.array_equal(expected, select(VOXELS[::-1]))
    assert len(store.values) == 2
