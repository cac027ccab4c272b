"""benchmarks/photos.py: the same arguments make the same pictures, of the promised size."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fastload.images.folder import ImageFolder

if TYPE_CHECKING:
    from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def photos() -> ModuleType:
    """The script as a module; it is no part of a package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("photos")


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.glob("*/*"))}


@pytest.mark.slow
def test_the_same_arguments_make_the_same_pictures(photos: ModuleType, tmp_path: Path) -> None:
    """About 500 x 375 pixels, 60-120 KB; a second call writes what is missing, another leaves no old ones."""
    first, second = tmp_path / "first", tmp_path / "second"
    paths = photos.make_photos(first, 4, classes=4, processes=1)
    photos.make_photos(second, 4, classes=4, processes=1)
    folder = ImageFolder(first)
    assert [path for path, _ in folder.samples] == [str(path) for path in paths]
    assert folder.targets == list(range(4))
    for (image, _), path in zip(folder, paths, strict=True):  # type: ignore[call-overload]
        assert 60_000 <= path.stat().st_size <= 120_000
        assert abs(image.shape[0] - 375) <= 15
        assert abs(image.shape[1] - 500) <= 20
    times = [path.stat().st_mtime_ns for path in paths]
    paths[1].unlink()
    photos.make_photos(first, 4, classes=4, processes=1)
    same = [path.stat().st_mtime_ns == time for path, time in zip(paths, times, strict=True)]
    assert same == [True, False, True, True]
    before = contents(first)
    assert before == contents(second)
    photos.make_photos(first, 1, classes=1, seed=1, processes=1)
    assert list(contents(first)) == ["astronaut/00000.jpg"]
    assert not set(contents(first).values()) & set(before.values())


def test_what_cannot_be_made_is_refused(photos: ModuleType, tmp_path: Path) -> None:
    """More classes than photographs, or than pictures; a folder of somebody else's pictures is left alone."""
    for count, classes, named in [(1, 2, "count"), (10, 0, "classes"), (100, 13, "classes")]:
        with pytest.raises(ValueError, match=f": {named} must be "):
            photos.make_photos(tmp_path / "new", count, classes=classes)
    (tmp_path / "holidays").mkdir()
    with pytest.raises(FileExistsError, match="did not make"):
        photos.make_photos(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["holidays"]
