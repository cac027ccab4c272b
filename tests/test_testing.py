"""Claims of `fastload.testing`: each check fails where it should and nowhere else, and names the place."""

from __future__ import annotations

import random
from collections import namedtuple
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.data as tud
from PIL import Image

import fastload
from fastload.rng.generators import LIBRARY_GENERATORS
from fastload.rng.rng_scope import state_restorer
from fastload.testing import check_cached, check_deterministic, check_same_batches
from tests.cache.zoo import Everything, Images, KnownImages, Made, RandomImages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("generators_stay")


@pytest.fixture
def generators_stay() -> Iterator[None]:
    """No check changes the state of a generator."""
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    before = [repr(state_restorer(generator)) for generator in LIBRARY_GENERATORS]
    yield
    assert [repr(state_restorer(generator)) for generator in LIBRARY_GENERATORS] == before


@dataclass
class Graph:
    nodes: Any


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content


Point = namedtuple("Point", "x y")
SAMPLE: dict[str, Any] = {
    "image": np.arange(24, dtype=np.uint8).reshape(2, 4, 3),
    "pair": (torch.tensor([1.0, float("nan")]), [1, 2.5, "text", b"x", None, True]),
    "point": Point(np.float32(3), np.array(4)),
    "objects": [Graph(np.zeros(3)), Box([1, torch.zeros(2)]), Image.new("L", (3, 2)), {1, 2}],
    "odd": [torch.ones(2, 2).to_sparse(), np.array(["a", None], object), float("nan"), 0.0],
}


def changed(**parts: Any) -> dict[str, Any]:
    return {**SAMPLE, **parts}


def altered(array: Any, place: Any, value: Any) -> Any:
    copy = array.copy() if isinstance(array, np.ndarray) else array.clone()
    copy[place] = value
    return copy


# Another sample, and what is said of it.
DIFFERENT: list[tuple[Any, str]] = [
    (changed(image=altered(SAMPLE["image"], (1, 2, 0), 99)), r"\$\['image'\] is 99 at \(1, 2, 0\), not 18$"),
    (changed(image=SAMPLE["image"].astype(np.int16)), r"\$\['image'\] has the dtype int16, not uint8$"),
    (changed(image=SAMPLE["image"][:1]), r"\$\['image'\] has the shape \(1, 4, 3\), not \(2, 4, 3\)$"),
    (changed(image=torch.from_numpy(SAMPLE["image"])), r"\['image'\] is of type Tensor, not ndarray$"),
    (changed(pair=(altered(SAMPLE["pair"][0], 0, -1.0), SAMPLE["pair"][1])), r"\[0\] is .*-1.* at \(0,\)"),
    (changed(pair=(SAMPLE["pair"][0], SAMPLE["pair"][1][:5])), r"\['pair'\]\[1\] has 5 items, not 6$"),
    (changed(pair=(SAMPLE["pair"][0], [1, 2.5, "test", b"x", None, True])), r"\[2\] is 'test', not 'text'$"),
    (changed(pair=(SAMPLE["pair"][0], [1, 2.5, "text", b"x", None, 1])), r"\[5\] is of type int, not bool$"),
    (changed(point=Point(np.float32(3.5), np.array(4))), r"\['point'\]\[0\] is .*3.5.*, not .*3.0"),
    (changed(point=(np.float32(3), np.array(4))), r"\['point'\] is of type tuple, not Point$"),
    (changed(objects=[Graph(np.ones(3)), *SAMPLE["objects"][1:]]), r"\[0\]\['nodes'\] is .* at \(0,\)"),
    (changed(objects=[SAMPLE["objects"][0], Box([2, torch.zeros(2)])]), r"\['objects'\] has 2 items"),
    (
        changed(objects=[SAMPLE["objects"][0], Box([1, torch.ones(2)]), *SAMPLE["objects"][2:]]),
        r"\['objects'\]\[1\]\['content'\]\[1\] is .* at \(0,\)",
    ),
    (changed(objects=[*SAMPLE["objects"][:2], Image.new("L", (3, 2), 1), {1, 2}]), r"\[2\] is <PIL"),
    (changed(objects=[*SAMPLE["objects"][:3], {1, 3}]), r"\[3\] is \{1, 3\}, not \{1, 2\}$"),
    (changed(odd=[torch.zeros(2, 2).to_sparse(), *SAMPLE["odd"][1:]]), r"\['odd'\]\[0\] is .* at \(0, 0\)"),
    (changed(odd=[torch.ones(2, 2), *SAMPLE["odd"][1:]]), r"\['odd'\]\[0\] has the layout torch.strided"),
    (changed(odd=[SAMPLE["odd"][0], np.array(["a", 1], object), *SAMPLE["odd"][2:]]), r"\[1\]\[1\] is "),
    (changed(odd=[*SAMPLE["odd"][:3], -0.0]), r"\['odd'\]\[3\] is -0.0, not 0.0$"),
    ({**SAMPLE, "more": 1}, r"\$ has the keys \[.*'more'\], not "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("other", "said"), DIFFERENT, ids=lambda value: value[:40] if type(value) is str else ""
)
def test_each_difference_is_named(other: Any, said: str) -> None:
    """With its place in the batch; equal values of all kinds pass."""
    again = {
        **SAMPLE,
        "image": SAMPLE["image"].copy(),
        "objects": [Graph(np.zeros(3)), *SAMPLE["objects"][1:]],
    }
    check_same_batches([SAMPLE, SAMPLE], [SAMPLE, again])
    with pytest.raises(AssertionError, match=rf"^batch 1 of epoch 0 differs: in the other, .*{said}"):
        check_same_batches([SAMPLE, SAMPLE], [SAMPLE, other])


# --- datasets ---------------------------------------------------------------------------------------------


class Counting(Images):
    """Each sample depends on how many were read before."""

    num_read = 0

    def sample(self, index: int) -> Any:
        self.num_read += 1
        return np.zeros(3), self.num_read


class Reusing(Images):
    """Every sample is one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros(3)

    def sample(self, index: int) -> Any:
        self.buffer[:] = index
        return self.buffer


class WithGenerator(Images):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def sample(self, index: int) -> Any:
        return self.rng.random()


def self_seeding(index: int) -> Any:
    return np.random.RandomState(index).rand(3), random.Random(index).random(), Box(index)


@pytest.mark.parametrize(
    "dataset",
    [Images(), Everything(3), Made(self_seeding), Reusing(), fastload.CachedDataset([1, 2])],
    ids=lambda dataset: type(dataset).__name__,
)
def test_a_deterministic_dataset_passes(dataset: Any) -> None:
    """Whatever its samples are, and although it reuses a buffer."""
    check_deterministic(dataset)
    check_deterministic(dataset, range(len(dataset)))


RANDOM: list[tuple[Any, str]] = [
    (RandomImages("numpy"), r"^RandomImages\[\d+\] is .*\['meta'\]\[1\] is .*drew .* from numpy.random$"),
    (RandomImages("torch"), r"drew random numbers from torch's default generator$"),
    (RandomImages("random"), r"from random$"),
    (WithGenerator(), r"^WithGenerator\[0\] is not .*: on the second access, .* from dataset.rng$"),
    (Counting(), r"^Counting\[\d+\] is not deterministic: on the second access, \$\[1\] is \d+, not \d+$"),
    (Made(lambda index: random.random() < 2), r"^Made\[0\] is not .*: it drew random numbers from random$"),
]  # fmt: skip


@pytest.mark.parametrize(("dataset", "said"), RANDOM, ids=lambda value: type(value).__name__)
def test_a_dataset_that_is_not_deterministic_fails(dataset: Any, said: str) -> None:
    """By random numbers, also those that made no difference, or by what was read before."""
    with pytest.raises(AssertionError, match=said):
        check_deterministic(dataset)


def test_a_random_pipeline_in_a_dataset_fails() -> None:
    """Albumentations' transforms have generators of their own."""
    A = pytest.importorskip("albumentations")
    pipeline = A.Compose([A.RandomCrop(4, 4)])
    dataset = Made(lambda index: pipeline(image=np.arange(1200, dtype=np.uint8).reshape(20, 20, 3))["image"])
    with pytest.raises(AssertionError, match="drew random numbers from the transform"):
        check_deterministic(dataset)


def test_a_check_of_nothing_fails() -> None:
    """An empty dataset, no indices, no batch, or one loader beside itself."""
    for check in (
        lambda: check_deterministic([]),
        lambda: check_deterministic([1], []),
        lambda: check_same_batches([], []),
        lambda: check_same_batches([1], [1], num_epochs=0),
        lambda: check_same_batches(SAMPLE, SAMPLE),
        lambda: check_cached(fastload.CachedDataset([1, 2]), indices=[]),
    ):
        with pytest.raises(AssertionError, match=r"nothing was checked$"):
            check()


# --- loaders ----------------------------------------------------------------------------------------------


class Drawing(tud.Dataset[Any]):
    """Draws from all libraries, in the process that reads it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.rand(2), torch.rand(3)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_loader_and_ours_agree(num_workers: int) -> None:
    """Over two epochs in a random order, of a random dataset."""
    options: Any = {"batch_size": 5, "shuffle": True, "num_workers": num_workers}
    with fastload.DataLoader(Drawing(), **options) as ours:
        check_same_batches(tud.DataLoader(Drawing(), **options), ours, num_epochs=2, seed=3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shuffle": False}, r"^batch 0 of epoch 0 differs: in the other, \$\[0\] is .* at \(0,\)"),
        ({"batch_size": 4}, r"\$\[0\] has the shape torch.Size\(\[4\]\), not torch.Size\(\[5\]\)$"),
        ({"drop_last": True}, r"^in epoch 0, only the second loader ended after 2 batches$"),
        ({"seeding": "sample"}, r"^batch 0 of epoch 0 differs: in the other, \$\[1\] is "),
    ],
)
def test_loaders_that_differ_fail(options: Any, said: str) -> None:
    """In order, in size, in number, in random numbers; named by the batch and the leaf."""
    given: Any = {"batch_size": 5, "shuffle": True}
    loader = tud.DataLoader(Drawing(), **given)
    with pytest.raises(AssertionError, match=said):
        check_same_batches(loader, fastload.DataLoader(Drawing(), **(given | options)))


def test_a_later_epoch_is_compared() -> None:
    """A cache that is wrong shows when it is read."""
    epochs = iter([[1, 2], [1, 3]])

    class Loader:
        def __iter__(self) -> Iterator[int]:
            return iter(next(epochs))

    with pytest.raises(AssertionError, match=r"^batch 1 of epoch 1 differs: in the other, \$ is 3, not 2$"):
        check_same_batches([1, 2], Loader(), num_epochs=2)
    with pytest.raises(AssertionError, match=r"^in epoch 0, only the first loader ended after 0 batches$"):
        check_same_batches([], [1])


# --- caches -----------------------------------------------------------------------------------------------


def jitter(sample: Any) -> Any:
    image, label = sample
    return image.astype(np.float32) + np.random.rand(), label, random.random(), torch.rand(1)


class OpenedImages(Images):
    """Random crops of files, as images of Pillow."""

    def __init__(self, folder: Path) -> None:
        super().__init__(3)
        self.folder = folder
        for index in range(3):
            Image.fromarray(Images().sample(index)[0]).save(folder / f"{index}.png")

    def sample(self, index: int) -> Any:
        left = random.randrange(8)
        return Image.open(self.folder / f"{index}.png").convert("RGB").crop((left, 0, left + 8, 8)), index


@pytest.mark.parametrize(
    "options",
    [{}, {"transform": jitter}, {"pre_transform": lambda sample: sample[::-1]}],
    ids=("plain", "transform", "pre_transform"),
)
def test_a_cache_in_ram_passes(options: Any) -> None:
    """With a random transform, and with a pre_transform."""
    check_cached(fastload.CachedDataset(Images(), **options))


def test_a_cache_of_files_passes(tmp_path: Path) -> None:
    """Of a random dataset, whose samples are objects; with and without a transform."""
    dataset = OpenedImages(tmp_path)
    check_cached(fastload.CachedDataset(dataset, by="file"))
    check_cached(fastload.CachedDataset(dataset, lambda sample: (*sample, random.random()), by="file"))


@pytest.mark.usefixtures("needs_lmdb")
def test_a_cache_on_disk_is_compared_with_its_source(tmp_path: Path) -> None:
    """It passes if it is exact; with a lossy codec, or of another dataset, it fails."""
    from fastload.cache.build.build import build_lmdb

    build_lmdb(Images(), tmp_path / "raw", num_workers=0).close()
    build_lmdb(Images(shape=(64, 64, 3)), tmp_path / "jpeg", num_workers=0, codec="jpeg").close()
    raw = fastload.CachedDataset.from_cache(tmp_path / "raw")
    check_cached(raw, Images())
    check_cached(raw, Images(), [3, 4])
    with pytest.raises(TypeError, match="does not know its source: pass dataset="):
        check_cached(raw)
    with pytest.raises(AssertionError, match=r"^the cache has 20 samples, and the dataset 19$"):
        check_cached(raw, Images(19))
    lossy = fastload.CachedDataset.from_cache(tmp_path / "jpeg")
    said = r"^sample 0 differs from the dataset's when it is stored: \$\[0\] is \d+ at \(0, 0, \d\), not \d+$"
    with pytest.raises(AssertionError, match=said):
        check_cached(lossy, Images(shape=(64, 64, 3)))


def test_a_dataset_that_was_edited_under_one_key_fails() -> None:
    """The trap of `cache_key`: the cache has the samples of before."""
    before = fastload.CachedDataset(KnownImages(version="1"))
    assert len([*before]) == 20
    edited = fastload.CachedDataset(KnownImages(version="1"))

    edited.dataset.sample = lambda index: (Images().sample(index)[0], index + (index == 19))
    with pytest.raises(
        AssertionError, match=r"^sample 19 differs .* when it is stored: \$\[1\] is 19, not 20$"
    ):
        check_cached(edited)
    with pytest.raises(TypeError, match="cached should be a CachedDataset, but got KnownImages"):
        check_cached(KnownImages())  # type: ignore[arg-type]


def test_a_cache_that_returns_something_else_the_second_time_fails() -> None:
    """As one that gives out memory which is written to."""
    cached = fastload.CachedDataset(Images())
    real, hits = cached.cache.get, []

    def get(index: int) -> Any:
        hits.append(index)
        return None if len(hits) == 1 else (real(index)[0], -1)

    cached.cache.get = get
    with pytest.raises(
        AssertionError, match=r"^sample 0 differs .* when it comes from the cache: .* is -1, not 0$"
    ):
        check_cached(cached)
