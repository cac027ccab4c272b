"""What a new cache asks of its dataset: is it random, who vouches for it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset

from fastload.cache.dataset import CachedDataset
from fastload.cache.fingerprint import Fingerprint, digest_of, fingerprint_of
from fastload.errors import NondeterministicDatasetError, UnsupportedSampleError
from fastload.images.folder import ImageFolder
from fastload.nested.tree import first_difference
from tests.cache.zoo import Everything, Images, KnownImages, Made, RandomImages
from tests.kit.batches import assert_same_samples

pytestmark = pytest.mark.usefixtures("registry_folder")


class Augmented(Images):
    """Holds its own pipeline, as many datasets do."""

    def __init__(self, transform: Any) -> None:
        super().__init__(20)
        self.inner = {"transform": transform}

    def sample(self, index: int) -> Any:
        image, label = super().sample(index)
        return self.inner["transform"](image=image)["image"], label


BUFFER = np.zeros((8, 8, 3))


def in_one_buffer(index: int) -> Any:
    """Random, in memory that the next sample overwrites."""
    BUFFER[:] = np.random.rand()
    return BUFFER


FLIPPED = Augmented(A.Compose([A.HorizontalFlip(p=0.1)], seed=0))


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        *((RandomImages(way), r'Images\[0\].*sample\["meta"\]\[1\]') for way in ("random", "numpy", "torch")),
        (FLIPPED, r"CachedDataset\(dataset, transform\)"),
        (Augmented(A.Compose([A.HorizontalFlip(p=0.9)])), "Augmented"),
        (Subset(FLIPPED, range(10)), "Subset"),
        (Made(in_one_buffer), r"sample differs"),
    ],
)
def test_what_cannot_be_cached_is_refused_at_construction(dataset: Any, said: str) -> None:
    """Random samples, also by a pipeline inside or in reused memory, and other types; the leaf is named."""
    with pytest.raises(NondeterministicDatasetError, match=said):
        CachedDataset(dataset)
    with pytest.raises(UnsupportedSampleError, match=r'sample\["image"\]'):
        CachedDataset(Made(lambda index: {"image": {1, 2}}))


def test_random_state_is_put_back() -> None:
    """Making a cache, attaching to it, or a refusal leaves all generators as they were, a pipeline's too."""
    pipeline = A.Compose([A.Resize(8, 8), A.HorizontalFlip(p=1)], seed=3)
    dataset = Augmented(pipeline)
    generators = [pipeline, *pipeline.transforms]

    def states() -> bytes:
        own = [(g.py_random.getstate(), g.random_generator.bit_generator.state) for g in generators]
        return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy(), own))

    before = states()
    first, second = (CachedDataset(dataset, cache_key="flipped") for _ in range(2))
    assert first.cache.created_s == second.cache.created_s
    with pytest.raises(NondeterministicDatasetError):
        CachedDataset(RandomImages("random"))
    assert states() == before


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        (1, 1, None),
        *((one, other, "sample") for one, other in ((1, 1.0), (True, 1), ([1, 2], (1, 2)))),
        ({"a": 1}, {"b": 1}, 'sample["a"]'),
        ({"a": 1, "b": 2}, {"a": 1}, 'sample["b"]'),
        ([1], [1, 2], "sample[1]"),
        ((1, [2, {"x": 3}]), (1, [2, {"x": 4}]), 'sample[1][1]["x"]'),
        (np.zeros(3), np.zeros(3, np.float32), "sample"),
        (np.zeros((3, 1)), np.zeros((1, 3)), "sample"),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), None),
        (np.array([1.0, np.nan]), np.array([2.0, np.nan]), "sample"),
        (torch.zeros(2), torch.zeros(2), None),
        (torch.zeros(2), np.zeros(2, np.float32), "sample"),
        *((kind(float("nan")), kind(float("nan")), None) for kind in (float, np.float16, torch.tensor)),
    ],
)
def test_first_difference(one: Any, other: Any, path: str | None) -> None:
    """Samples are compared by type, dtype, shape and value, and the first leaf that differs is named."""
    assert first_difference(one, other) == path


@pytest.mark.skipif(np.finfo(np.longdouble).nmant != 63, reason="a long double has no padding here")
def test_padding_is_no_difference() -> None:
    """Six of the 16 bytes of a long double are whatever was in memory."""
    one, other = np.ones(3, np.longdouble), np.ones(3, np.longdouble)
    one.view(np.uint8).reshape(3, 16)[:, 10:] = 7
    assert first_difference(one, other) is None
    assert first_difference(one, other + 1) == "sample"


@pytest.mark.parametrize("num_samples", [1, 2, 3, 200])
def test_probing_reads_three_samples_twice(num_samples: int) -> None:
    """Construction reads each examined sample once, and once more, whatever the length."""
    dataset = Everything(num_samples)
    ds = CachedDataset(dataset)
    assert sum(dataset.reads) == 2 * min(3, num_samples)
    assert ds.cache_info().num_cached == min(3, num_samples)


class Halved:
    """Halves numbers in place when it is read: as it is, they are right only once."""

    def __init__(self, numbers: Any) -> None:
        self.numbers, self.reads, self.memo = numbers, 0, {}

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        row = self.numbers[0] if isinstance(self.numbers, tuple) else self.numbers
        row = row["rows"] if isinstance(row, dict) else row
        row[index][0] /= 2
        self.memo[index] = float(row[index][0])
        return np.zeros(3, np.uint8), self.memo[index]

    def __repr__(self) -> str:
        return repr((self.numbers, self.reads, self.memo))


@pytest.mark.parametrize("wrap", [lambda dataset: dataset, lambda dataset: Subset(dataset, range(40))])
def test_a_dataset_with_a_state_is_refused(wrap: Any) -> None:
    """What reading changes makes the second sample another one."""
    dataset = Halved(np.full((40, 2), 8.0))
    with pytest.raises(NondeterministicDatasetError, match=r"every access: sample\[1\] differs"):
        CachedDataset(wrap(dataset))
    assert (dataset.reads, dataset.memo) == (0, {})


def test_comparing_a_sample_changes_no_dataset(tmp_path: Any) -> None:
    """Also where a file, or the cache of another job, is compared with it."""

    class Counting(Images):
        num_read = 0

        def __getitem__(self, index: int) -> Any:
            self.num_read += 1
            return super().__getitem__(index)

    for cache in ("ram", f"lmdb:{tmp_path / 'cache'}"):
        first, second = Counting(8), Counting(8)
        ds = CachedDataset(first, cache=cache, cache_key="counted")
        CachedDataset(second, cache=cache, cache_key="counted")
        assert sum(second.reads) > 0
        assert second.num_read == 0
        ds.cache.close()


TEXTS = st.dictionaries(st.text(), st.text(), max_size=5)


def flip(image: Any, **_: Any) -> Any:
    return image[::-1]


def halve(sample: Any) -> Any:
    return sample[0][::2], sample[1]


@dataclasses.dataclass
class Halve:
    """A deterministic part that says what it is."""

    step: int

    def __call__(self, sample: Any) -> Any:
        return sample[0][:: self.step], sample[1]

    def fingerprint(self) -> str:
        return f"every {self.step}th row"


class Third(Halve):
    """Changes what it inherits a fingerprint for."""

    def __call__(self, sample: Any) -> Any:
        return sample[0][::3], sample[1]


class Moved(A.CenterCrop):
    """albumentations serializes neither its code nor its attribute."""

    def __init__(self, by: int) -> None:
        super().__init__(8, 8)
        self._by = by

    def apply(self, img: Any, **options: Any) -> Any:
        return super().apply(img, **options) + self._by


class Brighter(KnownImages):
    """Changes a helper of what it inherits a fingerprint for."""

    def sample(self, index: int) -> Any:
        image, label = super().sample(index)
        return image + 1, label


class PassedOn:
    """Has the attributes of another dataset, and samples of its own."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["dataset"], name)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index][0]


class FirstPart(Subset):
    """A subset with samples of its own."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


KNOWN = KnownImages(8)
PREPARED = A.Resize(8, 8), A.Compose([A.Resize(8, 8)]), A.Resize(8, 9), Halve(2), Halve(3)


@pytest.mark.parametrize(
    "parts",
    [
        [(KNOWN, {}), (KnownImages(9), {}), (KnownImages(8, version="2"), {})],
        [(Images(8), {"key": "photos"}), (Images(8), {"key": "pictures"})],
        [(Subset(KNOWN, part), {}) for part in ([1, 2], [2, 1])] + [(Subset(Subset(KNOWN, [1]), [0]), {})],
        [(KNOWN, {"pre_transform": part}) for part in PREPARED],
    ],
    ids=["dataset", "key", "subset", "pre_transform"],
)
def test_what_makes_the_samples_makes_the_name(parts: list[tuple[Any, dict[str, Any]]]) -> None:
    """Content, class and length; a key instead; the indices of a subset, in order; a deterministic part."""
    names = [fingerprint_of(dataset, **options).name for dataset, options in parts]
    assert len(set(names)) == len(parts)
    assert names == [fingerprint_of(copy.deepcopy(dataset), **options).name for dataset, options in parts]


def test_equal_parts_have_one_name() -> None:
    """Indices of a subset by their values; with a key the name is the key's, so other content is seen."""
    one, other = fingerprint_of(Images(8), key="photos"), fingerprint_of(Images(9), key="photos")
    assert fingerprint_of(Subset(KNOWN, [1, 2])).name == fingerprint_of(Subset(KNOWN, np.array([1, 2]))).name
    assert one.name == other.name
    assert one.differences(other) == ['num_samples is "8" here and "9" there']
    assert (
        fingerprint_of(KNOWN, pre_transform=halve, key="halves")
        .parts["pre_transform"]
        .endswith("test_guard.halve")
    )


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Images(8), {}),
        (Subset(Images(8), [0, 1]), {}),
        (KnownImages(8, version=None), {}),
        (Subset(KnownImages(8, version=None), [1, 2]), {}),
        (KNOWN, {"pre_transform": halve}),
        (KNOWN, {"pre_transform": A.Lambda(image=flip)}),
        (KNOWN, {"pre_transform": A.Lambda(image=flip, name="flip")}),
        (KNOWN, {"pre_transform": A.Compose([Moved(1)])}),
        (KNOWN, {"pre_transform": Third(2)}),
        (Brighter(8), {}),
        (Subset(Brighter(8), [0, 1]), {}),
        (PassedOn(KNOWN), {}),
        (FirstPart(KNOWN, [0, 1]), {}),
        (ConcatDataset([KNOWN, KNOWN]), {}),
    ],
)
def test_nobody_vouches_for_datasets_and_functions_that_say_nothing(dataset: Any, options: Any) -> None:
    """Then there is no fingerprint, unless the user gives a key; an inherited one says nothing."""
    assert fingerprint_of(dataset, **options) is None
    named = fingerprint_of(dataset, key="halves", **options)
    assert (named.key, named.needs_key) == ("halves", True)


@pytest.mark.parametrize(
    ("version", "key", "error", "said"),
    [
        *(("1", odd, TypeError, "^cache_key should be a str, but got") for odd in (3, b"a")),
        ("1", "", ValueError, "^cache_key is empty: pass"),
        *((odd, None, TypeError, r"Images\.fingerprint\(\) should") for odd in (3, {"a": 1}, {1: "a"})),
    ],
)
def test_odd_keys_and_fingerprints_are_refused(version: Any, key: Any, error: Any, said: str) -> None:
    """A name is a text that says something; a mistake does not wait for the day on which a cache is used."""
    with pytest.raises(error, match=said):
        CachedDataset(KnownImages(8, version=version), cache="ram" if key is None else None, cache_key=key)


@given(TEXTS, TEXTS)
def test_differences_are_all_and_only_those(here: dict[str, str], there: dict[str, str]) -> None:
    """Fingerprints without a key have one name exactly if no part differs; each that does is named once."""
    one, other = Fingerprint(here), Fingerprint(there)
    differing = [part for part in here.keys() | there.keys() if here.get(part) != there.get(part)]
    assert len(one.differences(other)) == len(differing)
    assert (one.name == other.name) is (not differing)
    assert digest_of(dict(reversed(here.items()))) == digest_of(here)  # their order does not matter


def test_a_folder_is_asked_for_its_fingerprint_once(photos: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """Each time takes a stat of every file: none without a cache, one for every other."""
    asked, digest, path = [], ImageFolder._local_digest, f"lmdb:{tmp_path / 'cache'}"
    monkeypatch.setattr(ImageFolder, "_local_digest", lambda folder: asked.append(1) or digest(folder))
    caches: Any = None, "ram", path
    for times, cache in enumerate(caches):
        dataset = CachedDataset(ImageFolder(photos), cache=cache, max_memory=1 << 22)
        assert dataset[0][1] == 0
        assert len(asked) == times


@pytest.mark.parametrize(
    ("dataset", "options", "said"),
    [
        (KnownImages(8), {"cache_key": "explained-v1"}, "cache_key: explained-v1"),
        *(
            (
                dataset,
                {},
                f"no fingerprint() covers all code and samples of {name}: add one, or pass cache_key=",
            )
            for dataset, name in [
                (KnownImages(8, version=None), "KnownImages"),
                (Images(8), "Images"),
                (Brighter(8), "Brighter"),
            ]
        ),
        (
            KnownImages(8),
            {"pre_transform": halve},
            "covers all code and samples of KnownImages and halve: add",
        ),
    ],
)
def test_a_cache_says_by_what_jobs_find_it_or_what_lacks(dataset: Any, options: Any, said: str) -> None:
    """The key, not the parts; else the user learns what needs a fingerprint()."""
    assert said in CachedDataset(dataset, **options).cache.explain()


class Opaque:
    """What no cache can hold."""


@pytest.mark.parametrize("draw", [lambda: random.randrange(2), lambda: int(torch.randint(2, ()))])
def test_a_random_sample_that_cannot_be_cached_is_random_first(draw: Any) -> None:
    """To make it something that can be cached would only lead to the next error."""
    with pytest.raises(NondeterministicDatasetError, match="drawn from"):
        CachedDataset(Made(lambda index: (Opaque(), draw())))
    with pytest.raises(UnsupportedSampleError, match=r"sample\[0\]"):
        CachedDataset(Made(lambda index: (Opaque(), index)))


@pytest.mark.parametrize("module", ["torchvision.transforms.transforms", "timm.data.transforms"])
def test_a_transform_for_one_image_gets_the_image_beside_labels(module: str) -> None:
    """As torchvision's datasets call it; in a pipeline of torchvision's, too."""
    crop: Any = type("Crop", (), {"__module__": module, "__call__": lambda _, image: image[:4]})
    pipeline: Any = type("Compose", (), {"__module__": "torchvision.transforms.transforms"})
    pipeline.__call__ = lambda self, image: self.transforms[0](image)
    pipeline.transforms = [crop()]
    for transform in (crop(), pipeline()):
        for sample in (
            (BUFFER, 1),
            [BUFFER, "a", None],
            (BUFFER, np.ones(3)),
            {"image": BUFFER, "id": 1},
        ):
            found = CachedDataset(Made(lambda _, sample=sample: sample), transform)[0]
            assert type(found) is type(sample)
            values = list(found.values() if isinstance(found, dict) else found)
            originals = list(sample.values() if isinstance(sample, dict) else sample)
            assert np.array_equal(values[0], BUFFER[:4])
            assert_same_samples(values[1:], originals[1:])
        assert np.array_equal(CachedDataset(Made(lambda _: BUFFER), transform)[0], BUFFER[:4])


def test_a_transform_for_one_image_fails_beside_what_it_would_leave_in_its_place() -> None:
    """A mask, boxes, and what the loader does not know: a note names v2, whose classes take whole samples."""

    def fail(_flip: Any, sample: Any) -> None:
        raise TypeError(f"img should be PIL Image. Got {type(sample)}")

    flip: Any = type("Flip", (), {"__module__": "torchvision.transforms.transforms", "__call__": fail})
    mask, boxes = np.zeros((4, 4), np.uint8), torch.zeros(2, 4)
    for other in (mask, boxes, {"boxes": [1, 2, 3, 4]}):
        for sample in ((BUFFER, other), {"image": BUFFER, "other": other}):
            dataset = CachedDataset(Made(lambda _, sample=sample: sample), flip())
            with pytest.raises(TypeError, match=f"Got .*{type(sample).__name__}") as caught:
                dataset[0]
            assert any("transforms.v2, which take" in note for note in caught.value.__notes__)
            assert "ToPILImage() at the beginning" in caught.value.__notes__[-1]


def test_a_pipeline_that_begins_with_the_users_own_step_gets_the_sample() -> None:
    """Also in torchvision's Compose, and a subclass of a transform of torchvision's."""
    crop: Any = type("Crop", (), {"__module__": "torchvision.transforms.transforms"})
    own: Any = type("Own", (crop,), {"__call__": lambda _, sample: type(sample)})
    pipeline: Any = type("Compose", (), {"__module__": "torchvision.transforms.transforms"})
    pipeline.__call__ = lambda self, sample: self.transforms[0](sample)
    pipeline.transforms = [own()]
    dataset = CachedDataset(Made(lambda index: (BUFFER, index)), own())
    assert dataset[0] is tuple
    dataset.transform = pipeline()
    assert dataset[0] is tuple
    pipeline.transforms = []
    empty: Any = pipeline()
    empty.__class__.__call__ = lambda self, sample: sample
    dataset.transform = empty
    assert dataset[1][1] == 1
