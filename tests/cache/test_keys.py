"""Files of caches and `cache_key`: a key that was changed is a statement that the samples have changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Subset

import fastload
from fastload.cache.random_check import probe
from fastload.errors import CacheMismatchError, NondeterministicDatasetError

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("lmdb")


class Keyed:
    """Samples of a class without a fingerprint."""

    def __init__(self, offset: int = 0, *, side: int = 4) -> None:
        self.offset, self.side = offset, side

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return np.full((self.side, self.side, 3), index + self.offset, np.uint8)


def test_a_file_opens_under_its_own_key_alone(tmp_path: Path, caplog: Any) -> None:
    """Another key is refused, and so is another sample 0, also under the same key."""
    path = str(tmp_path / "values.lmdb")
    fastload.CachedDataset.build(Keyed(), path, cache_key="v1", num_workers=0, progress=False).close()
    cache = f"lmdb:{path}"

    for other, key, said in [
        (Keyed(7), "v2", 'cache_key is "v2" here and "v1" there'),
        (Keyed(side=5), "v1", "sample 0 of the dataset differs"),
        (Keyed(7), "v1", "sample 0 of the dataset differs"),
        (Keyed(7), None, "sample 0 of the dataset differs"),
    ]:
        with pytest.raises(CacheMismatchError, match=said):
            fastload.CachedDataset(other, cache=cache, cache_key=key)
    assert fastload.CachedDataset(Keyed(), cache=cache, cache_key="v1")[5].max() == 5
    assert not caplog.records


@pytest.mark.parametrize("options", [{}, {"pre_transform": np.negative}], ids=str)
def test_a_file_of_samples_without_a_key_says_what_was_not_compared(
    options: Any, tmp_path: Path, caplog: Any
) -> None:
    """One line when it is opened, none when it is built or has a key; an edited sample is the old one."""

    class Edited(Keyed):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index) + (index == 5)

    for key, times in (("v1", 0), (None, 1)):
        cache = f"lmdb:{tmp_path / str(key)}"
        assert fastload.CachedDataset(Keyed(), cache=cache, cache_key=key, **options)[5].max() in (5, 251)
        assert not caplog.records
        for _ in range(2):
            ds = fastload.CachedDataset(Edited(), cache=cache, cache_key=key, **options)
            assert ds[5].max() in (5, 251)
        lines = [line for line in caplog.messages if "edited labels" in line]
        assert len(lines) == times
        assert all(str(tmp_path / str(key)) in line for line in lines)


def test_a_key_is_compared_if_the_source_has_gone(tmp_path: Path) -> None:
    """A file under its key opens although no sample can be read any more."""

    class Gone(Keyed):
        def __getitem__(self, index: int) -> Any:
            raise FileNotFoundError(index)

    path = str(tmp_path / "values.lmdb")
    fastload.CachedDataset.build(Keyed(), path, cache_key="v1", num_workers=0, progress=False).close()
    assert fastload.CachedDataset(Gone(), cache=f"lmdb:{path}", cache_key="v1")[5].max() == 5
    with pytest.raises(CacheMismatchError, match="cache_key"):
        fastload.CachedDataset(Gone(), cache=f"lmdb:{path}", cache_key="v2")


def test_a_folder_s_own_fingerprint_needs_no_key_on_both_sides(tmp_path: Path) -> None:
    """A file of an ImageFolder that was built without a key opens with one, and the other way round."""
    (tmp_path / "photos" / "a").mkdir(parents=True)
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "photos" / "a" / "0.png")
    photos = fastload.ImageFolder(tmp_path / "photos")
    for number, (first, second) in enumerate([(None, "key"), ("key", None), ("key", "key")]):
        path = f"lmdb:{tmp_path}/{number}.lmdb"
        fastload.CachedDataset(photos, cache=path, cache_key=first)
        assert fastload.CachedDataset(photos, cache=path, cache_key=second)[0][1] == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "photos" / "a").mkdir(parents=True)
    for number in range(4):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / f"photos/a/{number}.png")
    return tmp_path / "photos"


class Crops(fastload.ImageFolder):
    """A subclass with an attribute that the inherited fingerprint does not cover."""

    margin = 2

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image[: self.margin, : self.margin], label


def test_a_subclass_does_not_get_the_samples_of_another_by_an_inherited_fingerprint(
    folder: Path, tmp_path: Path
) -> None:
    """Also inside torch's Subset."""
    for number, wrap in enumerate([lambda dataset: dataset, lambda dataset: Subset(dataset, range(4))]):
        path = f"lmdb:{tmp_path}/{number}.lmdb"
        crops = Crops(folder)
        fastload.CachedDataset(wrap(crops), cache=path).cache.close()
        crops.margin = 4
        with pytest.raises(CacheMismatchError, match="sample 0 of the dataset differs"):
            fastload.CachedDataset(wrap(crops), cache=path)


def test_a_fingerprint_that_covers_all_code_needs_no_sample(folder: Path, tmp_path: Path) -> None:
    """A file that has both its own fingerprint and a key opens without reading a sample."""

    class Photos(fastload.ImageFolder):
        reads = 0

        def fingerprint(self) -> Any:
            return super().fingerprint()

        def __getitem__(self, index: int) -> Any:
            type(self).reads += 1
            return super().__getitem__(index)

    path = f"lmdb:{tmp_path / 'photos.lmdb'}"
    fastload.CachedDataset(Photos(folder), cache=path, cache_key="v1").cache.close()
    before = Photos.reads
    fastload.CachedDataset(Photos(folder), cache=path, cache_key="v1").cache.close()
    assert Photos.reads == before > 0


def test_a_random_subclass_of_a_folder_is_not_built(folder: Path) -> None:
    """Only an ImageFolder itself is known to return the same samples."""

    class Flipped(fastload.ImageFolder):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image + np.random.randint(9), label

    probe(fastload.ImageFolder(folder))
    with pytest.raises(NondeterministicDatasetError):
        probe(Flipped(folder))
