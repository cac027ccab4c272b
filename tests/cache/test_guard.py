"""What a new cache asks of its dataset: is it random, is it in memory already, who vouches for it."""

from __future__ import annotations

import copy
import logging
import pickle
import random
from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Subset

import fastload
from fastload.cache.dataset import CachedDataset
from fastload.cache.fingerprint import Fingerprint, digest_of, fingerprint_of
from fastload.errors import RandomDatasetError, UnsupportedSampleError
from fastload.images.folder import ImageFolder
from fastload.nested.tree import first_difference
from tests.cache.zoo import Everything, Images, KnownImages, Pair, RaggedImages, RandomImages

if TYPE_CHECKING:
    from pathlib import Path


class Augmented(Images):
    """Holds its own pipeline, as many datasets do."""

    def __init__(self, transform: Any) -> None:
        super().__init__(20)
        self.inner = {"transform": transform}

    def sample(self, index: int) -> Any:
        image, label = super().sample(index)
        return self.inner["transform"](image=image)["image"], label


class OneBuffer(Images):
    """Random, and hands out the same memory at every access."""

    buffer = np.zeros(4)

    def sample(self, index: int) -> Any:
        self.buffer[:] = np.random.rand()
        return self.buffer


class Strange(Images):
    """Returns a set."""

    def sample(self, index: int) -> Any:
        return {"image": {1, 2}}


FLIPPED = Augmented(A.Compose([A.HorizontalFlip(p=0.1)]))


@pytest.mark.parametrize(
    ("dataset", "error", "said"),
    [
        *(
            (RandomImages(way), RandomDatasetError, r'RandomImages\[0\].*\$\["meta"\]\[1\]')
            for way in ("random", "numpy", "torch")
        ),
        (FLIPPED, RandomDatasetError, r"CachedDataset\(dataset, transform\)"),
        (Augmented(A.Compose([A.HorizontalFlip(p=0.9)])), RandomDatasetError, "Augmented"),
        (Subset(FLIPPED, range(10)), RandomDatasetError, "Subset"),  # type: ignore[arg-type]
        (OneBuffer(4), RandomDatasetError, r"\$ differs"),
        (Strange(4), UnsupportedSampleError, r'\$\["image"\]'),
    ],
)
def test_what_cannot_be_cached_is_refused_at_construction(
    dataset: Any, error: type[Exception], said: str
) -> None:
    """Random samples, also by a pipeline inside or in reused memory, and other types; the leaf is named."""
    with pytest.raises(error, match=said):
        CachedDataset(dataset)


def test_random_state_is_put_back() -> None:
    """Construction, or a refusal, leaves every generator as it was, also those of a pipeline."""
    pipeline = A.Compose([A.Resize(8, 8), A.HorizontalFlip(p=1)], seed=3)
    dataset = Augmented(pipeline)
    generators = [pipeline, *pipeline.transforms]

    def states() -> bytes:
        own = [(g.py_random.getstate(), g.random_generator.bit_generator.state) for g in generators]
        return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy(), own))

    before = states()
    CachedDataset(dataset)
    with pytest.raises(RandomDatasetError):
        CachedDataset(RandomImages("random"))

    assert states() == before


class Nan(Images):
    """Always the same, and not a number."""

    def sample(self, index: int) -> Any:
        return np.full(3, np.nan), float("nan"), torch.full((2,), float("nan"), dtype=torch.bfloat16)


def test_nan_equals_nan() -> None:
    """Samples with NaN are no reason to refuse."""
    CachedDataset(Nan(3))


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        (1, 1, None),
        (1, 1.0, "$"),
        (True, 1, "$"),
        ([1, 2], (1, 2), "$"),
        ({"a": 1}, {"b": 1}, '$["a"]'),
        ({"a": 1, "b": 2}, {"a": 1}, '$["b"]'),
        ([1], [1, 2], "$[1]"),
        ((1, [2, {"x": 3}]), (1, [2, {"x": 4}]), '$[1][1]["x"]'),
        (np.zeros(3), np.zeros(3, np.float32), "$"),
        (np.zeros((3, 1)), np.zeros((1, 3)), "$"),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), None),
        (np.array([1.0, np.nan]), np.array([2.0, np.nan]), "$"),
        (torch.zeros(2), torch.zeros(2), None),
        (torch.zeros(2), np.zeros(2, np.float32), "$"),
        (Pair(1, 2), (1, 2), "$"),
        ([], (), "$"),
    ],
)
def test_first_difference(one: Any, other: Any, path: str | None) -> None:
    """Samples are compared by type, dtype, shape and value, and the first leaf that differs is named."""
    assert first_difference(one, other) == path


@pytest.mark.parametrize("num_samples", [1, 2, 3, 200])
def test_probing_costs_two_reads(num_samples: int) -> None:
    """Construction reads each examined sample once, and two of them once more."""
    dataset = Everything(num_samples)
    ds = CachedDataset(dataset)

    assert sum(dataset.reads) <= min(3, num_samples) + 2
    assert ds.cache_info().num_cached == min(3, num_samples)


# --- samples in memory ---------------------------------------------------------------------------------


NUM_SAMPLES = 50


class Rows:
    """Samples that are rows of one array."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {"label": index, "image": self.rows[index]}


class Buffer(Rows):
    """Samples that are made in one buffer, which the next one replaces."""

    def __getitem__(self, index: int) -> Any:
        self.rows[:] = index
        return {"label": index, "image": self.rows[:]}


def pixels() -> Any:
    return np.random.default_rng(0).integers(0, 256, (NUM_SAMPLES, 8, 8, 3), np.uint8)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [text for text in texts if "in memory already" in text]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "num_workers"), [(pixels(), 0), (pixels()[:, ::-1], 2)])
def test_an_array_in_memory_is_one_warning(rows: Any, num_workers: int, registry: Path, caplog: Any) -> None:
    """It names the memory and what to do; workers, epochs and processes that join do not repeat it."""
    with caplog.at_level(logging.WARNING, "fastload"):
        first, _ = (CachedDataset(Rows(rows), cache_key="in memory") for _ in range(2))
        for _ in range(2):
            for _ in fastload.DataLoader(first, 10, num_workers=num_workers):
                pass
    (text,) = warnings_of(caplog)

    assert "an array of 9.6 kB" in text
    assert "calls the transform itself" in text


OTHER_SAMPLES: dict[str, Any] = {
    "made": lambda path: Images(NUM_SAMPLES),
    "ragged": lambda path: RaggedImages(NUM_SAMPLES),
    "file": lambda path: Rows(np.load(path / "rows.npy", mmap_mode="r")),
    "torch's file": lambda path: Rows(torch.load(path / "rows.pt", mmap=True).numpy()),
    "buffer": lambda path: Buffer(np.zeros((8, 8, 3), np.uint8)),
    "cache on disk": lambda path: Rows(pixels()),
}


@pytest.mark.parametrize("kind", OTHER_SAMPLES)
def test_other_datasets_are_no_warning(kind: str, needs_lmdb: None, tmp_path: Path, caplog: Any) -> None:
    """Samples that are made, in a mapped file, or replaced in a buffer; caches on disk take no memory."""
    np.save(tmp_path / "rows.npy", pixels())
    torch.save(torch.from_numpy(pixels()), tmp_path / "rows.pt")
    cache = f"lmdb:{tmp_path / 'x'}" if kind == "cache on disk" else "ram"
    with caplog.at_level(logging.WARNING, "fastload"):
        CachedDataset(OTHER_SAMPLES[kind](tmp_path), cache=cache, num_workers=0, progress=False)

    assert warnings_of(caplog) == []


# --- fingerprints --------------------------------------------------------------------------------------


TEXTS = st.dictionaries(st.text(), st.text(), max_size=5)


def known(dataset: Any, **options: Any) -> Fingerprint:
    """A fingerprint that must be there."""
    fingerprint = fingerprint_of(dataset, **options)
    assert fingerprint is not None
    return fingerprint


def flip(image: Any, **_: Any) -> Any:
    return image[::-1]


def halve(sample: Any) -> Any:
    return sample[0][::2], sample[1]


class Halve:
    """A deterministic part that says what it is."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, sample: Any) -> Any:
        return sample[0][:: self.step], sample[1]

    def fingerprint(self) -> str:
        return f"every {self.step}th row"


def subset(dataset: Any, indices: Any) -> Any:
    return Subset(dataset, indices)


KNOWN = KnownImages(8)
PREPARED = A.Resize(8, 8), A.Compose([A.Resize(8, 8)]), A.Resize(8, 9), Halve(2), Halve(3)


@pytest.mark.parametrize(
    "parts",
    [
        [(KNOWN, {}), (KnownImages(9), {}), (KnownImages(8, version="2"), {})],
        [(Images(8), {"key": "photos"}), (Images(8), {"key": "pictures"})],
        [(subset(KNOWN, part), {}) for part in ([1, 2], [2, 1])] + [(subset(subset(KNOWN, [1]), [0]), {})],
        [(KNOWN, {"prepare": part}) for part in PREPARED],
    ],
    ids=["dataset", "key", "subset", "prepare"],
)
def test_what_makes_the_samples_makes_the_name(parts: list[tuple[Any, dict[str, Any]]]) -> None:
    """Content, class and length; a key instead; the indices of a subset, in order; a deterministic part."""
    names = [known(dataset, **options).name for dataset, options in parts]

    assert len(set(names)) == len(parts)
    assert names == [known(copy.deepcopy(dataset), **options).name for dataset, options in parts]


def test_equal_parts_have_one_name() -> None:
    """Indices of a subset by their values; with a key the name is the key's, so other content is seen."""
    one, other = known(Images(8), key="photos"), known(Images(9), key="photos")

    assert known(subset(KNOWN, [1, 2])).name == known(subset(KNOWN, np.array([1, 2]))).name
    assert one.name == other.name
    assert one.differences(other) == ['num_samples is "8" here and "9" there']


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Images(8), {}),
        (subset(Images(8), [0, 1]), {}),
        (KnownImages(8, version=None), {}),
        (subset(KnownImages(8, version=None), [1, 2]), {}),
        (KNOWN, {"prepare": halve}),
        (KNOWN, {"prepare": A.Lambda(image=flip)}),
    ],
)
def test_nobody_vouches_for_datasets_and_functions_that_say_nothing(dataset: Any, options: Any) -> None:
    """Then there is no fingerprint, unless the user gives a key."""
    assert fingerprint_of(dataset, **options) is None
    assert known(dataset, key="halves", **options).key == "halves"


@pytest.mark.parametrize(("given_key", "error"), [(3, TypeError), (b"a", TypeError), ("", ValueError)])
def test_odd_keys_are_refused(given_key: Any, error: type[Exception]) -> None:
    """A key is a text that says something; a mistake does not wait for the day on which a cache is used."""
    with pytest.raises(error, match=r"^cache_key (should be a str, but got|is empty: pass)"):
        CachedDataset(Images(8), cache=None, cache_key=given_key)


@pytest.mark.parametrize("said", [3, b"x", {"a": 1}, {1: "a"}])
def test_odd_fingerprints_are_refused(said: Any) -> None:
    """A fingerprint() that gives no text is an error that names the class and what it gave."""
    with pytest.raises(TypeError, match=r"KnownImages\.fingerprint\(\) should return"):
        fingerprint_of(KnownImages(8, version=said))


@given(TEXTS, TEXTS)
def test_differences_are_all_and_only_those(here: dict[str, str], there: dict[str, str]) -> None:
    """Fingerprints without a key have one name exactly if no part differs; each that does is named once."""
    one, other = Fingerprint(here), Fingerprint(there)
    differing = [part for part in here.keys() | there.keys() if here.get(part) != there.get(part)]

    assert len(one.differences(other)) == len(differing)
    assert (one.name == other.name) is (not differing)
    assert digest_of(dict(reversed(here.items()))) == digest_of(here)  # their order does not matter


@pytest.mark.parametrize(
    ("cache", "times"),
    [
        (None, 0),
        ("ram", 1),
        ("ram-encoded", 1),
        (["ram", "ram-encoded"], 1),
        ("lmdb", 1),
        ("ram, lmdb", 1),
    ],
)
def test_a_folder_is_asked_for_its_fingerprint_as_rarely_as_possible(
    cache: Any, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Path
) -> None:
    """Each time takes a stat of every file: none without a cache, one for every other."""
    (tmp_path / "photos/cat").mkdir(parents=True)
    Image.fromarray(np.zeros((5, 6, 3), np.uint8)).save(tmp_path / "photos/cat/0.png")
    asked = []
    digest = ImageFolder._local_digest
    monkeypatch.setattr(ImageFolder, "_local_digest", lambda folder: asked.append(1) or digest(folder))
    path = f"lmdb:{tmp_path / 'cache'}"
    cache = {"lmdb": path, "ram, lmdb": ["ram", path]}.get(str(cache), cache)

    dataset = CachedDataset(ImageFolder(tmp_path / "photos"), cache=cache, max_memory=1 << 20, progress=False)
    assert dataset[0][1] == 0

    assert len(asked) == times


def test_explain_names_the_key_that_jobs_share_or_what_lacks_one() -> None:
    """The key, not the parts, is what other jobs find the cache by."""
    nameless = CachedDataset(KnownImages(8, version=None))
    assert "the fingerprint() of KnownImages is None" in nameless.cache.explain()
    assert "cache_key: explained-v1" in CachedDataset(KnownImages(), cache_key="explained-v1").explain()
