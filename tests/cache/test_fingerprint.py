"""Fingerprints: who vouches for a dataset's samples, and what is said when two differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Subset

from fastload.cache.dataset import CachedDataset
from fastload.cache.fingerprint import Fingerprint, digest_of, fingerprint_of
from fastload.images.folder import ImageFolder
from tests.cache.zoo import Images, KnownImages

if TYPE_CHECKING:
    from pathlib import Path

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


def test_nobody_vouches_for_a_plain_dataset() -> None:
    """A dataset without fingerprint() has none, also under a Subset."""
    assert fingerprint_of(Images(8)) is None
    assert fingerprint_of(Subset(Images(8), [0, 1])) is None


def test_a_dataset_vouches_for_itself() -> None:
    """What fingerprint() says, the class and the number of samples make the name."""
    names = {
        known(dataset).name
        for dataset in (KnownImages(8), KnownImages(8), KnownImages(9), KnownImages(8, version="2"))
    }

    assert len(names) == 3


def test_a_key_is_the_name() -> None:
    """With a key the name is the key's alone, so that another content under it is seen and refused."""
    one, other = known(Images(8), key="photos"), known(Images(9), key="photos")

    assert one.name == other.name != known(Images(8), key="pictures").name
    assert one.differences(other) == ['num_samples is "8" here and "9" there']


def test_a_subset_is_its_indices() -> None:
    """Subsets of one dataset share if they have the same indices in the same order."""
    dataset = KnownImages(8)
    names = [
        known(subset).name
        for subset in (
            Subset(dataset, [1, 2]),
            Subset(dataset, np.array([1, 2])),
            Subset(dataset, [2, 1]),
            Subset(Subset(dataset, [1, 2]), [0, 1]),
        )
    ]

    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_the_deterministic_part_counts() -> None:
    """Pipelines of albumentations and objects with a fingerprint() tell themselves apart."""
    dataset = KnownImages(8)
    parts = [A.Resize(8, 8), A.Compose([A.Resize(8, 8)]), A.Compose([A.Resize(8, 9)]), Halve(2), Halve(3)]
    names = {known(dataset, prepare=part).name for part in parts}

    assert len(names) == 5
    assert known(dataset, prepare=A.Resize(8, 8)).name in names


def test_a_function_needs_a_key() -> None:
    """Of a function nobody knows what it does: with it a dataset is private, unless the user gives a key."""
    dataset = KnownImages(8)

    assert fingerprint_of(dataset, prepare=halve) is None
    assert fingerprint_of(dataset, prepare=A.Lambda(image=flip)) is None
    assert known(dataset, prepare=halve, key="halves").parts["prepare"].endswith("test_fingerprint.halve")


@pytest.mark.parametrize(("given_key", "error"), [(3, TypeError), (b"a", TypeError), ("", ValueError)])
def test_odd_keys_are_refused(given_key: Any, error: type[Exception]) -> None:
    """A key is a text that says something; a mistake does not wait for the day on which a cache is used."""
    with pytest.raises(error, match=r"^key (should be a str, but got|is empty: give)"):
        CachedDataset(Images(8), cache=None, key=given_key)


@pytest.mark.parametrize("said", [3, b"x", {"a": 1}, {1: "a"}])
def test_odd_fingerprints_are_refused(said: Any) -> None:
    """A fingerprint() that gives no text is an error that names the class and what it gave."""
    with pytest.raises(TypeError, match=r"KnownImages\.fingerprint\(\) should give"):
        fingerprint_of(KnownImages(8, version=said))


def test_a_dataset_may_not_know_its_fingerprint() -> None:
    """None means that there is none, also for a Subset; the log then names the dataset."""
    dataset = KnownImages(8, version=None)

    assert fingerprint_of(dataset) is None
    assert fingerprint_of(Subset(dataset, [1, 2])) is None
    assert "KnownImages has neither a fingerprint() nor a key" in CachedDataset(dataset).cache.explain()


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

    dataset = CachedDataset(ImageFolder(tmp_path / "photos"), cache=cache, budget=1 << 20, progress=False)
    assert dataset[0][1] == 0

    assert len(asked) == times
