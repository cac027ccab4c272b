"""Lossy codecs are for photographs: masks, label maps and ids that share a sample with one stay exact."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import skimage.data as photographs
import torch

from fastload.cache.build.build import build_lmdb
from fastload.cache.build.on_executor import build_on
from fastload.cache.dataset import CachedDataset
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheMismatchError
from tests.cache.build_zoo import BrokenImages
from tests.cache.test_on_executor import OneByOne
from tests.cache.zoo import Images, Made
from tests.test_cli import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("needs_lmdb")

COLORS = np.array([[128, 64, 128], [244, 35, 232], [70, 70, 70], [0, 0, 142]], np.uint8)  # one of each class
LOSSY = [("jpeg", 95), ("webp", 95), ("webp", 99)]


def photo(index: int) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(np.roll(photographs.astronaut()[:300, :280], 9 * index, axis=0))


def mask(index: int) -> np.ndarray[Any, Any]:
    """Classes in their colors, `(300, 280, 3)`."""
    classes = np.kron(np.random.default_rng(index).integers(0, 4, (15, 14)), np.ones((20, 20), int))
    return COLORS[classes]


class Pair(NamedTuple):
    mask: Any
    image: Any


FORMS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "dict": (lambda image, mask: {"image": image, "mask": mask, "ids": mask[:, :, 0]}, "image"),
    "mask first": (lambda image, mask: {"mask": mask, "image": image, "label": 3}, "image"),
    "tuple": (lambda image, mask: (image, mask), "0"),
    "list": (lambda image, mask: [mask, 3, image], "2"),
    "namedtuple": (lambda image, mask: Pair(mask, image), "1"),
    "nested": (lambda image, mask: {"target": [mask, mask[:, :, 1]], "inputs": {"rgb": image}}, "inputs.rgb"),
    "a dot": (lambda image, mask: {"a.b": image, "mask": mask}, "a.b"),
}


def of(form: str, image: Callable[[int], Any] = photo, number: int = 4) -> Made:
    make = FORMS[form][0]
    return Made(lambda index: make(image(index), mask(index)), number)


class Stopping(Made):
    """Samples with a mask first; Ctrl-C comes at one of them."""

    def __init__(self, stop: int) -> None:
        super().__init__(of("mask first").make, 4)
        self.stop = stop

    def sample(self, index: int) -> Any:
        if index == self.stop:
            raise KeyboardInterrupt
        return super().sample(index)


def arrays(sample: Any) -> list[Any]:
    """The arrays of three channels in a sample, image first."""
    if isinstance(sample, dict) and "target" in sample:
        return [sample["inputs"]["rgb"], sample["target"][0]]
    values = [*sample.values()] if isinstance(sample, dict) else [*sample]
    found = [value for value in values if isinstance(value, np.ndarray) and value.ndim == 3]
    return sorted(found, key=lambda array: len(np.unique(array)), reverse=True)


def check_exact_but_for_the_image(cache: LMDBCache, source: Any) -> None:
    for index in range(len(source)):
        (image, exact), (was, expected) = arrays(cache.get(index)), arrays(source[index])
        np.testing.assert_array_equal(exact, expected)
        assert 0 < np.abs(image.astype(int) - was).mean() < 5


@pytest.mark.parametrize("codec", LOSSY, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_named_image_alone_changes(form: str, codec: Any, tmp_path: Path) -> None:
    """In any order of leaves, in any nest; the mask beside it keeps every pixel, decoded or not."""
    source, options = of(form), {"codec": codec[0], "quality": codec[1], "lossy_leaf": FORMS[form][1]}
    build_lmdb(source, tmp_path / "a", num_workers=0, **options).close()
    cache = LMDBCache(tmp_path / "a")
    check_exact_but_for_the_image(cache, source)
    ds = CachedDataset.from_cache(tmp_path / "a")
    np.testing.assert_array_equal(arrays(ds[1])[1], mask(1))
    assert cache.nbytes < 4 * 300 * 280 * 3


@pytest.mark.parametrize("form", FORMS)
def test_one_of_several_images_is_named(form: str, tmp_path: Path) -> None:
    """By the name of the leaf or by its path; without it the error lists the leaves, and nothing is left."""
    source, name = of(form), FORMS[form][1]
    with pytest.raises(ValueError, match="lossy_leaf=") as caught:
        build_lmdb(source, tmp_path / "a", codec="jpeg", num_workers=0)
    assert name in str(caught.value)
    assert "(300, 280, 3)" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    build_lmdb(source, tmp_path / "a", codec="jpeg", lossy_leaf=name, num_workers=0).close()
    path = LMDBCache(tmp_path / "a").description.lossy_leaf
    assert build_lmdb(source, tmp_path / "a", codec="jpeg", lossy_leaf=path).num_cached == 4


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda index: {"left": photo(index), "right": photo(index + 1)},
            r"left of .*right of .*'left' or lossy_leaf='right' [(]",
        ),
        (
            lambda index: {"mask": mask(index)[:, :, 0], "image": photo(index)},
            r"are: mask of shape \(300, 280\), image of .* with lossy_leaf='image' [(]",
        ),
        (lambda index: (torch.zeros(3, 300, 280), mask(index)), r"0 of .*1 of .* with lossy_leaf='1' [(]"),
        (
            lambda index: {"depth": np.ones((300, 280), np.float32), "rgb": photo(index)},
            " with lossy_leaf='rgb' [(]",
        ),
    ],
    ids=["two photographs", "an image and a mask", "a tensor and a mask", "an image and its depth"],
)
def test_what_is_not_clear_is_an_error(make: Any, said: str, tmp_path: Path) -> None:
    """Two leaves that can be images, of any dtype; the error says which the codec can change."""
    with pytest.raises(ValueError, match=said):
        build_lmdb(Made(make, 3), tmp_path / "a", codec="webp", num_workers=0)


BOXES = np.arange(80, dtype=np.float32).reshape(20, 4)


@pytest.mark.parametrize(
    ("make", "image_of"),
    [
        (photo, lambda sample: sample),
        (lambda index: (photo(index), index), lambda sample: sample[0]),
        (lambda index: {"boxes": BOXES, "image": photo(index), "name": "a"}, lambda sample: sample["image"]),
        (lambda index: (photo(index) if index else mask(0)[:, :, 0], index), lambda sample: sample[0]),
    ],
    ids=["bare", "with a label", "with boxes", "gray in sample 0"],
)
def test_the_only_image_needs_no_name(make: Any, image_of: Any, tmp_path: Path) -> None:
    """Beside labels, boxes and texts, which are no images."""
    cache = build_lmdb(Made(make, 3), tmp_path / "a", codec="jpeg", num_workers=0)
    assert 0 < np.abs(image_of(cache.get(1)).astype(int) - photo(1)).mean() < 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"codec": "jpeg", "lossy_leaf": "images"}, "'images' names no image"),
        ({"codec": "jpeg", "lossy_leaf": "ids"}, "names no image"),
        ({"codec": "png", "lossy_leaf": "image"}, "png"),
        ({"lossy_leaf": "image"}, "raw"),
        ({"codec": "webp", "quality": 100, "lossy_leaf": "image"}, "quality 100"),
    ],
)
def test_a_leaf_that_cannot_be_lossy_is_an_error(options: Any, said: str, tmp_path: Path) -> None:
    """A name that no leaf has, a leaf of another kind, a codec that changes no pixel."""
    with pytest.raises(ValueError, match=said):
        build_lmdb(of("dict"), tmp_path / "a", num_workers=0, **options)


@pytest.mark.parametrize("codec", [("png", None), ("webp", 100), ("raw", None)], ids=str)
def test_exact_codecs_need_no_leaf(codec: Any, tmp_path: Path) -> None:
    """And apply to all images."""
    source = Made(lambda index: {"left": photo(index), "right": mask(index)}, 3)
    cache = build_lmdb(source, tmp_path / "a", codec=codec[0], quality=codec[1], num_workers=0)
    for name in ("left", "right"):
        np.testing.assert_array_equal(cache.get(2)[name], source[2][name])


def test_samples_without_the_leaf_are_exact(tmp_path: Path) -> None:
    """Samples can differ in structure."""
    source = Made(lambda index: {"image": photo(index)} if index % 2 == 0 else {"other": mask(index)}, 4)
    cache = build_lmdb(source, tmp_path / "a", codec="jpeg", num_workers=0)
    np.testing.assert_array_equal(cache.get(1)["other"], mask(1))


def test_other_ways_to_build_agree(tmp_path: Path) -> None:
    """Workers, tasks on an executor, a build that another one continues; another leaf is another cache."""
    source = of("mask first")
    options: dict[str, Any] = {"codec": "jpeg", "lossy_leaf": "image"}
    kwargs: dict[str, Any] = {"num_workers": 2, "shards": 2, **options}
    build_lmdb(source, tmp_path / "a", **kwargs).close()
    check_exact_but_for_the_image(LMDBCache(tmp_path / "a"), source)
    with OneByOne() as executor:
        build_on(executor, partial(of, "mask first"), tmp_path / "b", num_cpus=1, shards=2, **options).close()
    check_exact_but_for_the_image(LMDBCache(tmp_path / "b"), source)
    with pytest.raises(KeyboardInterrupt):
        build_lmdb(Stopping(1), tmp_path / "c", num_workers=0, shards=4, **options)
    build_lmdb(Stopping(-1), tmp_path / "c", num_workers=0).close()
    check_exact_but_for_the_image(LMDBCache(tmp_path / "c"), source)
    with pytest.raises(CacheMismatchError, match="lossy leaf"):
        build_lmdb(source, tmp_path / "a", codec="jpeg", lossy_leaf="mask")


def test_a_damaged_first_sample_does_not_decide(tmp_path: Path) -> None:
    """The next one is looked at."""
    cache = build_lmdb(
        BrokenImages(bad=[0]), tmp_path / "b", codec="jpeg", num_workers=0, on_error="skip", max_errors=1
    )
    assert np.abs(cache.get(1)[0].astype(int) - Images().sample(1)[0]).max() > 0


def test_the_command_line_names_the_leaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--lossy-leaf, and a line that says what to write without it."""
    (tmp_path / "lossy_data.py").write_text(
        "import tests.cache.test_lossy as t, numpy as np\n"
        "train = t.of('dict', lambda index: np.full((96, 96, 3), 40 * index, np.uint8))\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ("--codec", "jpeg", "--num-workers", "0", "--quiet")
    command = ("build", "lossy_data:train", tmp_path / "a", *options)
    unclear = run(*command)
    assert unclear.exit_code == 2
    assert "lossy_leaf='image' or lossy_leaf='mask' (--lossy-leaf on the command line)" in unclear.stderr
    assert run(*command, "--lossy-leaf", "image").exit_code == 0
    assert LMDBCache(tmp_path / "a").description.lossy_leaf == '$["image"]'
    assert run("build", "lossy_data:train", tmp_path / "b", "--lossy-leaf", "image").exit_code == 2
