"""ImageFolder: torchvision's classes and order, compact lists, an honest fingerprint."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import fastload
from fastload.cache.fingerprint import fingerprint_of
from fastload.errors import ImageReadError
from fastload.images.folder import ImageFolder
from fastload.system.paths import local_path

PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def make(root: Path, *names: str) -> Path:
    """Write the same small PNG under each name below ``root``."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(PIXELS).save(path, "PNG")
    return root


def below(root: Path, folder: ImageFolder) -> list[str]:
    """The samples' paths below ``root``, in their order."""
    return [os.path.relpath(path, root) for path, _ in folder.samples]


# --- which files ------------------------------------------------------------------------------------------

names = st.sampled_from(["a", "B", "a-b", "é", "1", "10", "9"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(paths=st.sets(st.lists(names, min_size=2, max_size=4).map("/".join), min_size=1, max_size=12))
def test_any_tree_is_listed_as_os_walk_lists_it(tmp_path: Path, paths: set[str]) -> None:
    """Classes, order and labels are those of torchvision's algorithm; files at the root have no class."""
    root = tmp_path / "tree"
    shutil.rmtree(root, ignore_errors=True)
    for name in paths:
        path = root / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    classes = sorted(entry.name for entry in root.iterdir())
    (root / "stray.png").touch()
    expected = [
        (os.path.join(folder, file), label)
        for label, name in enumerate(classes)
        for folder, _, files in sorted(os.walk(root / name, followlinks=True))
        for file in sorted(files)
    ]
    found = ImageFolder(root)
    assert found.classes == classes
    assert found.class_to_idx == {name: label for label, name in enumerate(classes)}
    assert list(found.samples) == expected
    assert found.targets == [label for _, label in expected]


def test_extensions_count_in_any_case(tmp_path: Path) -> None:
    """Other files are passed over; given extensions replace the usual ones."""
    names = ["1.JPG", "2.jpeg", "3.Png", "4.ppm", "5.bmp", "6.pgm", "7.tif", "8.TIFF", "9.webp"]
    make(tmp_path, *(f"a/{name}" for name in [*names, "x.txt", "jpg", "y.jpg.bak", "2.tile"]))
    assert below(tmp_path, ImageFolder(tmp_path)) == [f"a/{name}" for name in names]
    assert below(tmp_path, ImageFolder(tmp_path, extensions=[".TILE"])) == ["a/2.tile"]
    with pytest.raises(TypeError, match="collection"):
        ImageFolder(tmp_path, extensions=".png")


def test_links_are_followed(tmp_path: Path) -> None:
    """Linked files, folders and classes are read like their originals; one that leads back up, once."""
    store = make(tmp_path / "store", "x/1.png", "y/2.png")
    root = make(tmp_path / "root", "a/0.png")
    (root / "a" / "file.png").symlink_to(store / "x" / "1.png")
    (root / "a" / "sub").symlink_to(store / "x")
    (root / "b").symlink_to(store / "y")
    (store / "y" / "loop").symlink_to(store / "y")
    assert below(root, ImageFolder(root)) == ["a/0.png", "a/file.png", "a/sub/1.png", "b/2.png"]


def test_links_that_lead_in_a_circle_end(tmp_path: Path) -> None:
    """Two folders that link to each other, a link to a class's parent, and a link to itself."""
    store = make(tmp_path / "store", "x/1.png", "y/2.png")
    (store / "x" / "to_y").symlink_to(store / "y")
    (store / "y" / "to_x").symlink_to(store / "x")
    root = make(tmp_path / "root", "a/0.png")
    (root / "a" / "x").symlink_to(store / "x")
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "self").symlink_to(root / "a" / "self")
    (root / "self").symlink_to(root / "self")
    assert below(root, ImageFolder(root)) == ["a/0.png", "a/x/1.png", "a/x/to_y/2.png"]


def test_folders_are_listed_without_a_call_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The types of entries come with their names; only links are resolved."""
    make(tmp_path, *(f"{label}/{number}/x.png" for label in "ab" for number in range(20)))
    (tmp_path / "a" / "link").symlink_to(tmp_path / "b" / "3")
    calls: list[Any] = []
    lstat, stat = os.lstat, os.stat

    def counting(call: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            calls.append(args)
            return call(*args, **options)

        return counted

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", counting(lstat))
        patch.setattr(os, "stat", counting(stat))
        folder = ImageFolder(tmp_path)
    assert len(folder) == 41
    assert len(calls) < 40  # of the root, and of the parents of one link


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torchvision; also in the paths of caches."""
    monkeypatch.setenv("HOME", str(tmp_path))
    make(tmp_path / "photos", "a/1.png")
    folder = ImageFolder("~/photos")
    assert folder.samples == [(str(tmp_path / "photos" / "a" / "1.png"), 0)]
    assert folder.root == str(tmp_path / "photos")
    assert local_path("file://~/x") == "~/x"


def test_odd_names_are_kept(tmp_path: Path) -> None:
    """Names in any script, with spaces or newlines, and names that are no text at all."""
    names = ["日本語/é ü.png", "a\nb/line\n.png", os.fsdecode(b"raw\xff/\xfe.png")]
    folder = ImageFolder(make(tmp_path, *names))
    assert sorted(below(tmp_path, folder)) == sorted(names)
    assert all(np.array_equal(image, PIXELS) for image, _ in folder)  # type: ignore[attr-defined]
    assert folder.fingerprint()


def test_a_folder_without_images_is_named(tmp_path: Path) -> None:
    """So is a root that is not there; classes without images are, with the extensions."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ImageFolder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=f"Couldn't find any class folder in {tmp_path}"):
        ImageFolder(tmp_path)
    make(tmp_path, "a/1.png", "b/readme.txt")
    (tmp_path / "c").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no valid file for the classes b, c .*\.jpg, \.jpeg"):
        ImageFolder(tmp_path)


def test_with_allow_empty_classes_without_images_keep_their_numbers(tmp_path: Path) -> None:
    """A dataset may hold nothing then."""
    for name in "ace":
        (tmp_path / name).mkdir()
    empty = ImageFolder(tmp_path, allow_empty=True)
    assert len(empty) == len(empty.samples) == len(empty.targets) == 0
    assert empty.fingerprint()
    folder = ImageFolder(make(tmp_path, "b/1.png", "d/1.png"), allow_empty=True)
    assert folder.classes == list("abcde")
    assert folder.targets == [1, 3]


def test_samples_are_those_of_read_image(tmp_path: Path) -> None:
    """Channels-last for albumentations, with an int label; `size` is read_image's."""
    make(tmp_path, "a/1.png", "b/1.png")
    image, label = ImageFolder(tmp_path)[1]
    assert np.array_equal(image, PIXELS)
    assert image.dtype == np.uint8
    assert image.flags.c_contiguous
    assert (label, type(label)) == (1, int)
    assert ImageFolder(tmp_path, size=8)[0][0].shape == (8, 12, 3)
    assert ImageFolder(tmp_path, size=(5, 7))[0][0].shape == (5, 7, 3)
    with pytest.raises(ValueError, match=r"^size should be at least 1 pixel, but got 0$"):
        ImageFolder(tmp_path, size=0)


@pytest.mark.parametrize("flip", [A.HorizontalFlip(p=1), np.fliplr])
def test_a_transform_gets_the_image(flip: Any, tmp_path: Path) -> None:
    """As in torchvision, also an albumentations pipeline; such a folder has no fingerprint."""
    folder = ImageFolder(make(tmp_path, "a/1.png"), flip)
    image, label = folder[0]
    assert np.array_equal(image, PIXELS[:, ::-1])
    assert label == 0
    assert folder.fingerprint() is None
    with pytest.raises(TypeError, match="transform should be a function of an image, but got 8; size= is"):
        ImageFolder(tmp_path, 8)  # type: ignore[arg-type]


def test_without_decoding_samples_are_the_bytes_of_the_files(tmp_path: Path) -> None:
    """As new arrays of the caller's, also of what is no image; they decode to the images."""
    make(tmp_path, "a/1.png", "b/1.png")
    folder, decoded = ImageFolder(tmp_path, decode=False), ImageFolder(tmp_path)
    data, label = folder[1]
    assert (data.dtype, data.ndim, label) == (np.uint8, 1, 1)
    assert data.tobytes() == (tmp_path / "b" / "1.png").read_bytes()
    assert np.array_equal(fastload.decode_image(data), decoded[1][0])
    data[:] = 0
    assert folder[1][0].any()
    assert ImageFolder(tmp_path, len, decode=False)[1][0] == len(data)
    assert folder.fingerprint() != decoded.fingerprint()
    (tmp_path / "a" / "1.png").write_bytes(b"no image")
    assert folder[0][0].tobytes() == b"no image"
    (tmp_path / "a" / "1.png").unlink()
    with pytest.raises(ImageReadError, match=r"a/1\.png.*No such file"):
        folder[0]
    with pytest.raises(ValueError, match=r"^size=8 resizes decoded images: omit it, or decode=False$"):
        ImageFolder(tmp_path, size=8, decode=False)


def test_an_unreadable_file_is_an_error_at_its_index(tmp_path: Path) -> None:
    """With its path; one that has gone is an error of the fingerprint."""
    make(tmp_path, "a/1.png", "a/2.png")
    (tmp_path / "a" / "2.png").write_bytes(b"no image")
    folder = ImageFolder(tmp_path)
    assert folder[0][1] == 0
    with pytest.raises(ImageReadError) as caught:
        folder[1]
    assert caught.value.path == str(tmp_path / "a" / "2.png")
    (tmp_path / "a" / "2.png").unlink()
    with pytest.raises(ImageReadError, match=r"2\.png.*No such file"):
        folder.fingerprint()


def test_views_behave_like_lists(tmp_path: Path) -> None:
    """They index, slice, compare and count as torchvision's do; labels become an array or a tensor."""
    folder = ImageFolder(make(tmp_path, "a/1.png", "a/2.png", "b/3.png", "c/4.png"))
    samples, targets = list(folder.samples), folder.targets
    assert folder.imgs == folder.samples == samples
    assert folder.samples[1:3] == samples[1:3]
    assert folder.samples[-4] == samples[0] == (str(tmp_path / "a" / "1.png"), 0)
    last: list[Any] = [-1, 3, np.int64(3), torch.tensor(3)]
    assert [folder[index][1] for index in last] == [2] * 4
    for index in (4, -5):
        with pytest.raises(IndexError, match="out of range: the dataset has 4 samples"):
            folder[index]
        with pytest.raises(IndexError):
            targets[index]
    assert [label for _, label in folder] == [0, 0, 1, 2]  # type: ignore[attr-defined]
    assert targets == [0, 0, 1, 2]
    assert targets != [0, 0, 1]
    assert (targets[::-1], targets.count(0)) == ([2, 1, 0, 0], 2)
    assert repr(targets) == "[0, 0, 1, ...] (4 in all)"
    assert np.asarray(targets).tolist() == torch.tensor(targets).tolist() == [0, 0, 1, 2]
    assert np.asarray(targets).dtype == np.int64
    assert np.asarray(targets, dtype=np.float32).dtype == np.float32


def test_samples_can_be_set(tmp_path: Path) -> None:
    """A selection, in any order and with other labels, files from elsewhere, and sums, as a list."""
    root = make(tmp_path / "root", "a/1.png", "a/2.png", "b/3.png")
    other = make(tmp_path / "other", "c/4.png")
    folder, size = ImageFolder(root), ImageFolder(root, size=(4, 3))
    before, elsewhere = list(folder.samples), ImageFolder(other).samples
    names = [folder.fingerprint()]
    folder.samples = before[::-2]
    assert folder.samples == [before[2], before[0]]
    assert (folder.targets, len(folder)) == ([1, 0], 2)
    assert [label for _, label in folder] == [1, 0]  # type: ignore[attr-defined]
    names.append(folder.fingerprint())
    folder.samples += elsewhere
    folder.imgs = folder.samples
    assert folder.samples == [before[2], before[0], (str(other / "c" / "4.png"), 0)]
    assert np.array_equal(folder[2][0], PIXELS)
    names.append(folder.fingerprint())
    folder.samples = [(path, 1) for path, _ in folder.samples]
    names.append(folder.fingerprint())
    assert np.asarray(folder.targets).tolist() == [1, 1, 1]
    assert elsewhere + before == [*elsewhere, *before]
    assert before + elsewhere == [*before, *elsewhere]
    assert len({str(name) for name in names}) == 4
    copy = pickle.loads(pickle.dumps(folder))
    assert (copy.samples, copy.fingerprint()) == (folder.samples, names[-1])
    size.samples = [(Path(before[0][0]), np.int64(1))]
    assert (size[0][0].shape, size[0][1]) == ((4, 3, 3), 1)
    size.samples = []
    assert (len(size), list(size.samples), list(size.targets)) == (0, [], [])


def test_targets_can_be_set(tmp_path: Path) -> None:
    """In either order with samples; alone they change no sample, as torchvision's."""
    folder = ImageFolder(make(tmp_path, "a/1.png", "b/2.png", "b/3.png"))
    folder.targets = [7]
    folder.samples = list(folder.samples)[:1]
    assert (folder.targets, folder[0][1]) == ([7], 0)
    folder.targets = []
    assert folder.targets == []


@pytest.mark.parametrize(
    ("samples", "error"),
    [
        *(([pair], TypeError) for pair in (("x.png", "cat"), ("x.png", 0.5), (3, 0))),
        *(([pair], ValueError) for pair in (("x.png", -1), ("x.png",))),
    ],
)
def test_other_samples_are_refused(samples: Any, error: type[Exception], tmp_path: Path) -> None:
    """The folder stays as it was."""
    folder = ImageFolder(make(tmp_path, "a/1.png"))
    with pytest.raises(error):
        folder.samples = samples
    assert len(folder) == 1


def test_a_pickle_is_small_and_the_same_dataset(tmp_path: Path) -> None:
    """It holds a path's bytes and eight more for each sample, the root only once."""
    make(tmp_path, "a/1.png", "b/1.png", "b/2.png")
    for folder in (ImageFolder(tmp_path), ImageFolder(tmp_path, size=8)):
        copy = pickle.loads(pickle.dumps(folder))
        assert copy.samples == folder.samples
        assert copy.fingerprint() == folder.fingerprint()
        size = "" if folder.size is None else "size=8, "
        assert repr(copy) == repr(folder) == f"ImageFolder({str(tmp_path)!r}, {size}3 images in 2 classes)"
    for number in range(1000):
        (tmp_path / "a" / f"{number:04}.png").touch()
    assert len(pickle.dumps(ImageFolder(tmp_path))) < 1000 * (len("a/0000.png") + 8) + 1500


def test_a_fingerprint_is_that_of_the_files(tmp_path: Path) -> None:
    """It is stable and survives a move; each change of a file, a name, a class or the size changes it."""
    root = make(tmp_path / "root", "a/1.png", "a/2.png", "b/3.png")
    first = ImageFolder(root).fingerprint()
    assert ImageFolder(str(root)).fingerprint() == first
    root = root.rename(tmp_path / "moved")
    seen = [ImageFolder(root, size=size).fingerprint() for size in (None, 8, 9, (8, 8), (8, 9))]
    assert seen[0] == first
    image = root / "a" / "1.png"
    for change in (
        lambda: os.utime(image, ns=(1, 1)),
        lambda: (image.write_bytes(image.read_bytes() + b"x"), os.utime(image, ns=(1, 1))),
        lambda: image.rename(root / "a" / "0.png"),
        lambda: make(root, "b/4.png"),
        lambda: ((root / "b" / "4.png").unlink(), (root / "0").mkdir()),
    ):
        change()
        seen.append(ImageFolder(root, allow_empty=True).fingerprint())
    assert all(one != other for one, other in itertools.combinations(seen, 2))


def test_a_subclass_makes_other_caches(tmp_path: Path) -> None:
    """It may give other samples."""
    subclass = type("Flipped", (ImageFolder,), {})
    root = make(tmp_path, "a/1.png")
    folder, other = fingerprint_of(ImageFolder(root)), fingerprint_of(subclass(root))
    assert folder is not None
    assert other is not None
    assert folder.name != other.name
