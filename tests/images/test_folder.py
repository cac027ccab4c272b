"""Claims of ImageFolder: torchvision's classes and order, compact lists, an honest fingerprint."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fastload.cache.fingerprint import fingerprint_of
from fastload.errors import ImageReadError
from fastload.images.folder import ImageFolder

if TYPE_CHECKING:
    from pathlib import Path

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


class TestConvention:
    def test_classes_are_sorted_folder_names(self, tmp_path: Path) -> None:
        """Classes are the folders' names in sorted order, capitals first, and labels count them."""
        make(tmp_path, "dog/1.png", "Zebra/1.png", "cat/1.png", "10/1.png", "9/1.png")

        folder = ImageFolder(tmp_path)

        assert folder.classes == ["10", "9", "Zebra", "cat", "dog"]
        assert folder.class_to_idx == {"10": 0, "9": 1, "Zebra": 2, "cat": 3, "dog": 4}
        assert folder.targets == [0, 1, 2, 3, 4]

    def test_files_at_the_root_belong_to_no_class(self, tmp_path: Path) -> None:
        """Pictures that lie beside the class folders are no samples."""
        make(tmp_path, "a/1.png", "stray.png")

        assert below(tmp_path, ImageFolder(tmp_path)) == ["a/1.png"]

    def test_order_is_by_folder_then_by_name(self, tmp_path: Path) -> None:
        """Within a class samples come folder by folder as sorted(os.walk()) gives them."""
        names = ["a/z.png", "a/b/2.png", "a/b/10.png", "a/b-c/1.png", "a/b/x/1.png", "b/1.png"]
        make(tmp_path, *names)

        expected = [
            os.path.relpath(os.path.join(folder, name), tmp_path)
            for label in ("a", "b")
            for folder, _, files in sorted(os.walk(tmp_path / label))
            for name in sorted(files)
        ]
        assert below(tmp_path, ImageFolder(tmp_path)) == expected
        assert expected[0] == "a/z.png"

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        names=st.sets(
            st.lists(st.sampled_from(["a", "B", "a-b", "é", "1"]), min_size=2, max_size=4).map("/".join),
            min_size=1,
            max_size=12,
        )
    )
    def test_any_tree_is_listed_as_os_walk_lists_it(self, tmp_path: Path, names: set[str]) -> None:
        """For any tree of folders, classes, order and labels are those of torchvision's algorithm."""
        root = tmp_path / "tree"
        shutil.rmtree(root, ignore_errors=True)
        for name in names:
            path = root / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

        classes = sorted(entry.name for entry in root.iterdir())
        expected = [
            (os.path.join(folder, file), label)
            for label, name in enumerate(classes)
            for folder, _, files in sorted(os.walk(root / name, followlinks=True))
            for file in sorted(files)
        ]
        folder_ = ImageFolder(root)
        assert folder_.classes == classes
        assert list(folder_.samples) == expected

    def test_extensions(self, tmp_path: Path) -> None:
        """Image extensions count in any case; other files are passed over."""
        names = ["1.JPG", "2.jpeg", "3.Png", "4.ppm", "5.bmp", "6.pgm", "7.tif", "8.TIFF", "9.webp"]
        make(tmp_path, *(f"a/{name}" for name in [*names, "x.txt", "jpg", "y.jpg.bak"]))

        assert below(tmp_path, ImageFolder(tmp_path)) == [f"a/{name}" for name in names]

    def test_own_extensions(self, tmp_path: Path) -> None:
        """Given extensions replace the usual ones."""
        make(tmp_path, "a/1.png", "a/2.tile")

        assert below(tmp_path, ImageFolder(tmp_path, extensions=[".TILE"])) == ["a/2.tile"]
        with pytest.raises(TypeError, match="collection"):
            ImageFolder(tmp_path, extensions=".png")

    def test_links_are_followed(self, tmp_path: Path) -> None:
        """Linked files, linked folders and linked classes are read like their originals."""
        store = make(tmp_path / "store", "x/1.png", "y/2.png")
        root = make(tmp_path / "root", "a/0.png")
        (root / "a" / "file.png").symlink_to(store / "x" / "1.png")
        (root / "a" / "sub").symlink_to(store / "x")
        (root / "b").symlink_to(store / "y")

        assert below(root, ImageFolder(root)) == ["a/0.png", "a/file.png", "a/sub/1.png", "b/2.png"]

    def test_link_to_a_parent(self, tmp_path: Path) -> None:
        """A link that leads back up is not followed for ever."""
        make(tmp_path, "a/b/1.png")
        (tmp_path / "a" / "b" / "loop").symlink_to(tmp_path / "a")

        assert below(tmp_path, ImageFolder(tmp_path)) == ["a/b/1.png"]

    def test_repr(self, tmp_path: Path) -> None:
        """One line with the folder, the size if there is one, and the counts."""
        make(tmp_path, "a/1.png", "b/1.png", "b/2.png")

        assert repr(ImageFolder(tmp_path)) == f"ImageFolder({str(tmp_path)!r}, 3 images in 2 classes)"
        assert (
            repr(ImageFolder(tmp_path, 8)) == f"ImageFolder({str(tmp_path)!r}, size=8, 3 images in 2 classes)"
        )


class TestSamples:
    def test_channels_last_for_albumentations(self, tmp_path: Path) -> None:
        """Channels-last for albumentations: samples are C-contiguous HWC uint8 arrays with an int label."""
        make(tmp_path, "a/1.png", "b/1.png")

        image, label = ImageFolder(tmp_path)[1]

        assert np.array_equal(image, PIXELS)
        assert image.dtype == np.uint8
        assert image.flags.c_contiguous
        assert (label, type(label)) == (1, int)

    def test_size(self, tmp_path: Path) -> None:
        """``size`` is read_image's."""
        make(tmp_path, "a/1.png")

        assert ImageFolder(tmp_path, 8)[0][0].shape == (8, 12, 3)
        assert ImageFolder(tmp_path, (5, 7))[0][0].shape == (5, 7, 3)
        with pytest.raises(ValueError, match=r"^size must be at least 1 pixel, got 0$"):
            ImageFolder(tmp_path, 0)

    def test_indices(self, tmp_path: Path) -> None:
        """Indices are a list's: negative ones count from the end, others raise IndexError."""
        folder = ImageFolder(make(tmp_path, "a/1.png", "b/2.png", "b/3.png"))

        last: list[Any] = [-1, 2, np.int64(2), torch.tensor(2)]
        assert [folder[index][1] for index in last] == [1] * 4
        assert folder.samples[-3] == (str(tmp_path / "a" / "1.png"), 0)
        for index in (3, -4):
            with pytest.raises(IndexError, match="out of range: the dataset has 3 samples"):
                folder[index]
            with pytest.raises(IndexError):
                folder.targets[index]

    def test_iteration_ends(self, tmp_path: Path) -> None:
        """The dataset can be iterated, as any sequence."""
        folder = ImageFolder(make(tmp_path, "a/1.png", "b/2.png"))

        assert [label for _, label in folder] == [0, 1]  # type: ignore[attr-defined]

    def test_unreadable_file(self, tmp_path: Path) -> None:
        """A file that is no image raises an error with its path, at its own index only."""
        make(tmp_path, "a/1.png", "a/2.png")
        (tmp_path / "a" / "2.png").write_bytes(b"no image")
        folder = ImageFolder(tmp_path)

        assert folder[0][1] == 0
        with pytest.raises(ImageReadError) as caught:
            folder[1]
        assert caught.value.path == str(tmp_path / "a" / "2.png")

    def test_odd_names(self, tmp_path: Path) -> None:
        """Names in any script, with spaces or newlines, and names that are no text at all, are kept."""
        names = ["日本語/é ü.png", "a\nb/line\n.png"]
        make(tmp_path, *names)
        raw = os.path.join(os.fsencode(tmp_path), b"raw\xff", b"\xfe.png")
        os.makedirs(os.path.dirname(raw))
        with open(tmp_path / names[0], "rb") as file, open(raw, "wb") as copy:
            copy.write(file.read())

        folder = ImageFolder(tmp_path)

        paths = [os.fsencode(path) for path, _ in folder.samples]
        assert sorted(paths) == sorted([raw, *(os.fsencode(tmp_path / name) for name in names)])
        assert all(np.array_equal(image, PIXELS) for image, _ in folder)  # type: ignore[attr-defined]
        assert folder.fingerprint()


class TestViews:
    def test_behave_like_lists(self, tmp_path: Path) -> None:
        """``samples``, ``imgs`` and ``targets`` index, slice, compare and count as torchvision's lists do."""
        folder = ImageFolder(make(tmp_path, "a/1.png", "a/2.png", "b/3.png", "c/4.png"))

        assert folder.imgs == folder.samples
        assert folder.samples == list(folder.samples)
        assert folder.samples[1:3] == list(folder.samples)[1:3]
        assert folder.targets == [0, 0, 1, 2]
        assert folder.targets[::-1] == [2, 1, 0, 0]
        assert folder.targets.count(0) == 2
        assert folder.targets != [0, 0, 1]
        assert repr(folder.targets) == "[0, 0, 1, ...] (4 in all)"

    def test_targets_as_arrays(self, tmp_path: Path) -> None:
        """Labels become a numpy array or a tensor in one call."""
        folder = ImageFolder(make(tmp_path, "a/1.png", "a/2.png", "c/3.png"))

        assert np.asarray(folder.targets).tolist() == [0, 0, 1]
        assert np.asarray(folder.targets).dtype == np.int64
        assert np.asarray(folder.targets, dtype=np.float32).dtype == np.float32
        assert torch.tensor(folder.targets).tolist() == [0, 0, 1]


class TestEmpty:
    def test_no_classes(self, tmp_path: Path) -> None:
        """A folder without class folders is an error that names it."""
        with pytest.raises(FileNotFoundError, match=f"Couldn't find any class folder in {tmp_path}"):
            ImageFolder(tmp_path)

    def test_no_root(self, tmp_path: Path) -> None:
        """A root that is not there is an error that names it."""
        with pytest.raises(FileNotFoundError, match="nowhere"):
            ImageFolder(tmp_path / "nowhere")

    def test_empty_class(self, tmp_path: Path) -> None:
        """Classes without images are named, with the extensions that were looked for."""
        make(tmp_path, "a/1.png", "b/readme.txt")
        (tmp_path / "c").mkdir()

        with pytest.raises(FileNotFoundError, match=r"no valid file for the classes b, c .*\.jpg, \.jpeg"):
            ImageFolder(tmp_path)

    def test_allow_empty(self, tmp_path: Path) -> None:
        """With allow_empty classes without images keep their numbers."""
        make(tmp_path, "b/1.png", "d/1.png")
        for name in "ace":
            (tmp_path / name).mkdir()

        folder = ImageFolder(tmp_path, allow_empty=True)

        assert folder.classes == list("abcde")
        assert folder.targets == [1, 3]
        assert np.asarray(folder.targets).tolist() == [1, 3]

    def test_all_empty(self, tmp_path: Path) -> None:
        """With allow_empty a dataset may hold nothing."""
        (tmp_path / "a").mkdir()

        folder = ImageFolder(tmp_path, allow_empty=True)

        assert len(folder) == len(folder.samples) == len(folder.targets) == 0
        assert folder.fingerprint()


class TestPickling:
    def test_round_trip(self, tmp_path: Path) -> None:
        """A pickled dataset is the same dataset."""
        folder = ImageFolder(make(tmp_path, "a/1.png", "b/2.png"), 8)

        copy = pickle.loads(pickle.dumps(folder))

        assert copy.samples == folder.samples
        assert copy.fingerprint() == folder.fingerprint()
        assert repr(copy) == repr(folder)

    def test_size_of_a_sample(self, tmp_path: Path) -> None:
        """A pickle holds a path's bytes and eight more for each sample, the root only once."""
        (tmp_path / "a").mkdir()
        for number in range(1000):
            (tmp_path / "a" / f"{number:04}.png").touch()

        small = len(pickle.dumps(ImageFolder(tmp_path)))

        assert small < 1000 * (len("a/0000.png") + 8) + 1500


class TestFingerprint:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return make(tmp_path / "root", "a/1.png", "a/2.png", "b/3.png")

    def test_is_stable(self, root: Path) -> None:
        """The same files give the same digest."""
        assert ImageFolder(root).fingerprint() == ImageFolder(str(root)).fingerprint()

    def test_survives_a_move(self, root: Path, tmp_path: Path) -> None:
        """Where the folder lies does not matter."""
        before = ImageFolder(root).fingerprint()

        root.rename(tmp_path / "moved")

        assert ImageFolder(tmp_path / "moved").fingerprint() == before

    def test_covers_size(self, root: Path) -> None:
        """Another ``size`` is another dataset."""
        sizes = [ImageFolder(root, size).fingerprint()["size"] for size in (None, 8, 9, (8, 8), (8, 9))]

        assert len(set(sizes)) == 5

    def test_covers_changes(self, root: Path) -> None:
        """A touched, a longer, a renamed, a new and a removed file and a new class each change it."""
        seen = [ImageFolder(root).fingerprint()]

        def note() -> None:
            seen.append(ImageFolder(root, allow_empty=True).fingerprint())

        os.utime(root / "a" / "1.png", ns=(1, 1))
        note()
        (root / "a" / "1.png").write_bytes((root / "a" / "1.png").read_bytes() + b"x")
        os.utime(root / "a" / "1.png", ns=(1, 1))
        note()
        (root / "a" / "1.png").rename(root / "a" / "0.png")
        note()
        make(root, "b/4.png")
        note()
        (root / "b" / "4.png").unlink()
        (root / "0").mkdir()
        note()

        assert all(one != other for one, other in itertools.combinations(seen, 2))

    def test_covers_subclass(self, root: Path) -> None:
        """A subclass, which may give other samples, makes other caches."""

        class Flipped(ImageFolder):
            pass

        folder, flipped = fingerprint_of(ImageFolder(root)), fingerprint_of(Flipped(root))

        assert folder is not None
        assert flipped is not None
        assert folder.name != flipped.name

    def test_missing_file(self, root: Path) -> None:
        """A file that has gone since is an error with its path."""
        folder = ImageFolder(root)
        (root / "a" / "2.png").unlink()

        with pytest.raises(ImageReadError, match=r"2\.png.*No such file"):
            folder.fingerprint()
