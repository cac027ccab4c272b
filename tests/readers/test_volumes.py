"""nibabel, pydicom and h5py: what they decode is remembered, and equal in all that a caller can see."""

from __future__ import annotations

import gzip
import os
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fastload.readers import nest, patches
from fastload.readers.decode_cache import DecodeCache, inactive
from tests.kit.decoding import check_three_rounds, outcome

nibabel = pytest.importorskip("nibabel")
pydicom = pytest.importorskip("pydicom")
h5py = pytest.importorskip("h5py")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.kit.decoding import DictStore

RNG = np.random.default_rng(0)
VOXELS = RNG.integers(-99, 99, (12, 11, 10), dtype=np.int16)


def save_nifti(path: Path, voxels: Any = VOXELS) -> None:
    """A volume with a scale."""
    image = nibabel.Nifti1Image(voxels, np.eye(4))
    image.header.set_slope_inter(0.5, 3)
    nibabel.save(image, path)


def save_dicom(path: Path, pixels: Any, compress: bool = True) -> None:
    """A slice."""
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, RLELossless

    dataset = pydicom.Dataset()
    dataset.file_meta = pydicom.dataset.FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = CTImageStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID = "1.2.3"
    dataset.Rows, dataset.Columns = pixels.shape
    dataset.BitsAllocated = dataset.BitsStored = 16
    dataset.HighBit, dataset.PixelRepresentation, dataset.SamplesPerPixel = 15, 0, 1
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.PixelData = pixels.tobytes()
    if compress:
        dataset.compress(RLELossless)
    dataset.save_as(path, enforce_file_format=True)


def save_hdf5(path: Path, voxels: Any = VOXELS) -> None:
    """Datasets of many kinds."""
    with h5py.File(path, "w") as file:
        file.create_dataset("group/voxels", data=voxels, chunks=(3, 11, 10), compression="gzip")
        file.create_dataset("texts", data=["a", "b"], compression="gzip")
        file["raw"] = voxels
        file["link"] = h5py.SoftLink("/group/voxels")
        file["elsewhere"] = h5py.ExternalLink("other.h5", "group/voxels")
        layout = h5py.VirtualLayout(voxels.shape, voxels.dtype)
        layout[:] = h5py.VirtualSource("other.h5", "group/voxels", voxels.shape)
        file.create_virtual_dataset("virtual", layout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of all kinds."""
    save_nifti(tmp_path / "volume.nii.gz")
    save_nifti(tmp_path / "volume.nii")
    nibabel.save(nibabel.MGHImage(VOXELS.astype(np.float32), np.eye(4)), tmp_path / "volume.mgz")
    save_dicom(tmp_path / "slice.dcm", VOXELS[0].astype(np.uint16))
    save_dicom(tmp_path / "plain.dcm", VOXELS[0].astype(np.uint16), compress=False)
    save_hdf5(tmp_path / "file.h5")
    save_hdf5(tmp_path / "other.h5", VOXELS + 1)
    return tmp_path


@pytest.fixture(autouse=True)
def met(cache: DecodeCache) -> None:
    """The libraries are met."""
    assert not [name for name in patches.unmet() if name.startswith(("nibabel", "pydicom", "h5py"))]


def select(path: Path, name: str, *index: Any) -> Any:
    """A selection of a dataset."""
    with h5py.File(path) as file:
        return file[name][index]


def _changed_rows(path: Path) -> Any:
    dataset = pydicom.dcmread(path)
    first = dataset.pixel_array
    dataset.Rows, dataset.Columns = dataset.Columns, dataset.Rows
    return first, dataset.pixel_array


def _raw(path: Path) -> Any:
    dataset = pydicom.dcmread(path)
    dataset.pixel_array_options(raw=True)
    return dataset.pixel_array


def _dataobj(path: Path, index: Any) -> Any:
    return nibabel.load(path).dataobj[index]


# By title: a file, a function of its path, and how many of its results are stored.
CALLS: dict[str, tuple[str, Callable[[Path], Any], int]] = {
    "get_fdata": ("volume.nii.gz", lambda path: nibabel.load(path).get_fdata(), 1),
    "float32": ("volume.nii.gz", lambda path: nibabel.load(path).get_fdata(dtype=np.float32), 1),
    "dataobj": ("volume.nii.gz", lambda path: np.asarray(nibabel.load(path).dataobj), 1),
    "unscaled": ("volume.nii.gz", lambda path: nibabel.load(path).dataobj.get_unscaled(), 1),
    "one slice": ("volume.nii.gz", partial(_dataobj, index=(..., 3)), 1),
    "NumPy's number": ("volume.nii.gz", partial(_dataobj, index=(..., np.int64(3))), 1),
    "one voxel": ("volume.nii.gz", partial(_dataobj, index=(1, 2, 3)), 1),
    "backwards": ("volume.nii.gz", partial(_dataobj, index=slice(None, None, -1)), 1),
    "new axis": ("volume.nii.gz", partial(_dataobj, index=(None, ..., 2)), 1),
    "slicer": ("volume.nii.gz", lambda path: nibabel.load(path).slicer[:, :, 2:4].get_fdata(), 1),
    "bad index": ("volume.nii.gz", partial(_dataobj, index=(99,)), 0),
    "list": ("volume.nii.gz", partial(_dataobj, index=([1, 2],)), 0),
    "mgz": ("volume.mgz", lambda path: nibabel.load(path).get_fdata(), 1),
    "nii": ("volume.nii", lambda path: nibabel.load(path).get_fdata(), 0),
    "nii bytes": (
        "volume.nii.gz",
        lambda path: nibabel.Nifti1Image.from_bytes(gzip.decompress(path.read_bytes())).get_fdata(),
        0,
    ),
    "dicom": ("slice.dcm", lambda path: pydicom.dcmread(path).pixel_array, 1),
    "dicom by an open file": ("slice.dcm", lambda path: pydicom.dcmread(path.open("rb")).pixel_array, 1),
    "dicom raw": ("slice.dcm", _raw, 1),
    "dicom changed": ("slice.dcm", _changed_rows, 2),
    "dicom of a path": ("slice.dcm", lambda path: pydicom.pixels.pixel_array(path), 0),
    "plain dicom": ("plain.dcm", lambda path: pydicom.dcmread(path).pixel_array, 0),
    "hdf5": ("file.h5", lambda path: select(path, "group/voxels"), 1),
    "hdf5 row": ("file.h5", lambda path: select(path, "group/voxels", 3), 1),
    "hdf5 slices": ("file.h5", lambda path: select(path, "group/voxels", slice(2, 9, 3), ..., 4), 1),
    "hdf5 numbers": ("file.h5", lambda path: select(path, "group/voxels", 1, np.int64(2), 3), 1),
    "hdf5 list": ("file.h5", lambda path: select(path, "group/voxels", [1, 3, 4]), 1),
    "hdf5 mask": ("file.h5", lambda path: select(path, "group/voxels", np.arange(12) % 2 == 0), 0),
    "hdf5 nothing": ("file.h5", lambda path: select(path, "group/voxels", slice(3, 3)), 0),
    "hdf5 bad index": ("file.h5", lambda path: select(path, "group/voxels", 99), 0),
    "hdf5 new axis": ("file.h5", lambda path: select(path, "group/voxels", None), 0),
    "hdf5 link": ("file.h5", lambda path: select(path, "link", 3), 1),
    "hdf5 elsewhere": ("file.h5", lambda path: select(path, "elsewhere", 3), 0),
    "hdf5 virtual": ("file.h5", lambda path: select(path, "virtual", 3), 0),
    "hdf5 raw": ("file.h5", lambda path: select(path, "raw", 3), 0),
    "hdf5 texts": ("file.h5", lambda path: list(select(path, "texts")), 0),
    "hdf5 astype": ("file.h5", lambda path: h5py.File(path)["group/voxels"].astype("f4")[3], 0),
    "hdf5 fields": ("file.h5", lambda path: select(path, "group/voxels", "name"), 0),
    "hdf5 in memory": ("file.h5", lambda path: h5py.File(path, driver="core")["group/voxels"][3], 0),
    "hdf5 stream": ("file.h5", lambda path: h5py.File(path.open("rb"))["group/voxels"][3], 0),
    "hdf5 to write": ("file.h5", lambda path: h5py.File(path, "r+")["group/voxels"][3], 0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", CALLS)
def test_calls_have_the_same_results(title: str, folder: Path, store: DictStore) -> None:
    """Results and errors are the library's, in three rounds; what can be remembered is stored once."""
    name, call, num_stored = CALLS[title]
    check_three_rounds(store, num_stored, lambda: outcome(call, folder / name))


def test_one_volume_serves_every_dtype(folder: Path, store: DictStore) -> None:
    """Scaling is real, so floats of 4 and 8 bytes come from one entry."""
    for dtype in (np.float32, np.float64):
        assert nibabel.load(folder / "volume.nii.gz").get_fdata(dtype=dtype).dtype == dtype
    assert len(store.values) == 1


SELECTIONS: list[Any] = [(..., number) for number in range(4)]
SELECTIONS += [
    (3,),
    (1, 2, 3),
    (slice(None, None, -1),),
    (slice(1, 9, 3), ..., slice(0, 0)),
    (None, ..., 2),
    (),
]
SELECTIONS += [
    (slice(None), slice(2, 5)),
    ([1, 2],),
    (99,),
    (..., slice(9, 2, -2)),
    (slice(None), 4, slice(3)),
]


@pytest.mark.parametrize("name", ["volume.nii.gz", "volume.mgz"])
def test_different_slices_come_from_the_whole_volume(name: str, folder: Path, store: DictStore) -> None:
    """Each is nibabel's, with its strides and rights; the second selection of a file stores all of it."""
    for number, selection in enumerate(SELECTIONS * 2):
        call = partial(_dataobj, index=selection)
        with inactive():
            expected = outcome(call, folder / name)
        assert outcome(call, folder / name) == expected, selection
        assert len(store.values) == min(number + 1, 2)


def test_slices_of_a_volume_that_is_known_are_not_decoded(folder: Path, store: DictStore) -> None:
    """What `get_fdata` has stored serves them."""
    volume = nibabel.load(folder / "volume.nii.gz").get_fdata()
    for number in range(3):
        assert np.array_equal(_dataobj(folder / "volume.nii.gz", (..., number)), volume[..., number])
    assert len(store.values) == 1


def test_the_same_slice_of_each_volume_is_stored_alone(folder: Path, store: DictStore) -> None:
    """A dataset of middle slices needs no more memory than these."""
    for name in ("volume.nii.gz", "volume.mgz") * 3:
        _dataobj(folder / name, (..., 3))
    assert max(stored.array.nbytes for stored in store.values.values()) == 12 * 11 * 4


def test_slices_of_a_damaged_file_are_read_alone(folder: Path, store: DictStore) -> None:
    """Slices before the damage are read as without a cache."""
    path, content = folder / "volume.nii.gz", (folder / "volume.nii.gz").read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    for number in (0, 1, 2, 9, 0):
        with inactive():
            expected = outcome(partial(_dataobj, index=(..., number)), path)
        assert outcome(partial(_dataobj, index=(..., number)), path) == expected
    assert len(store.values) == 2


def test_a_full_store_costs_one_volume_of_a_hundred_slices(
    folder: Path, store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is stored, further slices are decompressed up to their end, as without a cache."""
    path, store.is_full = folder / "volume.nii.gz", True
    shapes: list[Any] = []
    pack = nest.pack
    monkeypatch.setattr(nest, "pack", lambda result: shapes.append(result.shape) or pack(result))
    for number in range(110):
        assert np.array_equal(_dataobj(path, (..., number % 10)), VOXELS[..., number % 10] * 0.5 + 3)
    assert [number for number, shape in enumerate(shapes) if shape == VOXELS.shape] == [1, 102]


SAVES = {
    "volume.nii.gz": (save_nifti, lambda path: nibabel.load(path).get_fdata()),
    "slice.dcm": (
        lambda path, voxels: save_dicom(path, voxels[0].astype(np.uint16)),
        lambda path: pydicom.dcmread(path).pixel_array,
    ),
    "file.h5": (save_hdf5, lambda path: select(path, "group/voxels", 3)),
}


@pytest.mark.parametrize("name", SAVES)
def test_files_that_changed_are_read_again(name: str, folder: Path, tmp_path: Path) -> None:
    """Replaced, rewritten in place with the old mtime, or behind a link that moved."""
    save, read = SAVES[name]
    path, link = folder / name, tmp_path / f"link-{name}"
    link.symlink_to(path)
    for number in range(6):
        time_ns = path.stat().st_mtime_ns
        other = tmp_path / f"{number}-{name}"
        save(other, VOXELS + number)
        if number % 3 == 0:
            other.replace(path)
        elif number % 3 == 1:
            shutil.copyfile(other, path)
            os.utime(path, ns=(time_ns, time_ns))
        else:
            (tmp_path / "new").symlink_to(other)
            (tmp_path / "new").replace(link)
        for place in (path, link):
            with inactive():
                expected = outcome(read, place)
            assert [outcome(read, place) for _ in range(2)] == [expected] * 2


def test_an_image_that_was_loaded_before_its_file_changed(folder: Path) -> None:
    """It reads the new file by the old header, whether the old one was remembered or not."""
    path = folder / "volume.nii.gz"
    image = nibabel.load(path)
    image.get_fdata(caching="unchanged")
    save_nifti(path, VOXELS[::-1].copy())
    with inactive():
        expected = image.get_fdata(caching="unchanged")
    for _ in range(2):
        assert np.array_equal(image.get_fdata(caching="unchanged"), expected)


def test_an_open_file_of_hdf5_keeps_to_what_it_has_read(folder: Path, store: DictStore) -> None:
    """A file that was replaced while it is open gives its old content; one that changed is not stored."""
    path = folder / "file.h5"
    with h5py.File(path) as file:
        assert np.array_equal(file["group/voxels"][3], VOXELS[3])
        save_hdf5(folder / "new.h5", VOXELS + 5)
        (folder / "new.h5").replace(path)
        for _ in range(2):
            assert np.array_equal(file["group/voxels"][3], VOXELS[3])
        assert np.array_equal(select(path, "group/voxels", 3), VOXELS[3] + 5)
        os.utime(file.filename)
    num_stored = len(store.values)
    with h5py.File(path) as file, h5py.File(path) as second:
        os.chmod(path, 0o600)  # a change, as far as anybody can see
        for one in (file, second):
            assert np.array_equal(one["group/voxels"][4], VOXELS[4] + 5)
    assert len(store.values) == num_stored


def test_a_file_that_was_opened_before_is_read_each_time(folder: Path, store: DictStore) -> None:
    """Nobody knows whether it changed since."""
    with inactive():
        file = h5py.File(folder / "file.h5")
        voxels = file["group/voxels"]
    for _ in range(2):
        assert np.array_equal(file["group/voxels"][3], VOXELS[3])
    assert not store.values
    assert file["group"].file == file
    assert np.array_equal(file["group/voxels"][3], VOXELS[3])
    assert not store.values
    file.close()
    with pytest.raises((ValueError, RuntimeError), match="not"):
        _ = voxels[3]


def test_a_slice_whose_pixel_data_was_changed_is_decoded_again(folder: Path) -> None:
    """A dataset is known by its content, not by its file."""
    dataset = pydicom.dcmread(folder / "slice.dcm")
    other = folder / "other.dcm"
    save_dicom(other, VOXELS[1].astype(np.uint16))
    first = dataset.pixel_array.copy()
    dataset.PixelData = pydicom.dcmread(other).PixelData
    assert np.array_equal(dataset.pixel_array, VOXELS[1].astype(np.uint16))
    assert np.array_equal(pydicom.dcmread(folder / "slice.dcm").pixel_array, first)
