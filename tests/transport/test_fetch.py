"""How the samples of a batch are read, also where the dataset collates or reads in bulk; and their errors."""

from __future__ import annotations

import dataclasses
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as tud
from PIL import Image
from torch.utils.data import default_collate

import fastload
from tests.kit import datasets
from tests.kit.batches import assert_same_batches

WORKERS: list[Any] = [{}, {"num_workers": 1}, {"num_workers": 1, "worker_type": "thread"}]


def plain(index: int) -> torch.Tensor:
    return torch.full((1000,), index)


def array(index: int) -> Any:
    return np.full(3, index)


def missing_file(index: int) -> Any:
    if index == 5:
        raise FileNotFoundError(2, "No such file or directory", f"/nowhere/{index}.jpg")
    return index


def raises_what_cannot_be_pickled(index: int) -> Any:
    class LocalError(ValueError):
        """No other process can find this class."""

    if index == 2:
        raise LocalError("no such sample")
    return index


def fails_at_one(sample: Any) -> Any:
    if sample[0] == 1:
        raise ValueError("one")
    return sample


def picture(index: int) -> Any:
    return Image.new("RGB", (4, 4)), index


def collates_as_torch(samples: Any) -> Any:
    return default_collate([sample for sample in samples if sample is not missing_file])


def fails_to_collate(samples: Any) -> Any:
    raise TypeError("of the user")


_CANNOT = "which default_collate cannot batch: return"
_DIFFERS = "in the first sample of the batch and"
# A function of the index, and how the note on default_collate's error begins.
NOT_COLLATED: dict[str, tuple[Any, str]] = {
    "shapes": (
        lambda i: (np.zeros((4, 4, 3), np.uint8), {"boxes": torch.zeros(i + 1, 4), "label": i}),
        f"sample[1]['boxes'] is a tensor (1, 4) float32 {_DIFFERS} a tensor (2, 4) float32 in sample 1",
    ),
    "image": (picture, f"sample[0] is an Image, {_CANNOT} numpy."),
    "object": (lambda i: [i, object()], f"sample[1] is an object, {_CANNOT} arrays"),
    "array of objects": (lambda i: np.array([None]), f"sample is an array (1,) object, {_CANNOT} arrays"),
    "nothing": (lambda i: {"a": None}, f"sample['a'] is a NoneType, {_CANNOT} arrays"),
    "one is nothing": (
        lambda i: (i, None if i == 2 else i),
        f"sample[1] is an int {_DIFFERS} a NoneType in sample 2",
    ),
    "two sizes": (
        datasets.images_of_two_sizes,
        f"sample is an array (4, 4) uint8 {_DIFFERS} an array (4, 5) uint8 in sample 10",
    ),
    "images": (
        lambda i: np.zeros((4 + i, 4, 3), np.uint8),
        f"sample is an array (4, 4, 3) uint8 {_DIFFERS} an array (5, 4, 3) uint8 in sample 1",
    ),
    "tensors": (
        lambda i: torch.zeros(3, 4 + i, 4),
        f"sample is a tensor (3, 4, 4) float32 {_DIFFERS} a tensor (3, 5, 4) float32 in sample 1",
    ),
    "types": (
        lambda i: np.zeros(3) if i == 1 else torch.zeros(3),
        f"sample is a tensor (3,) float32 {_DIFFERS} an array (3,) float64 in sample 1",
    ),
    "keys": (
        lambda i: {"a": 1} if i == 2 else {"a": 1, "b": 2},
        f"sample is a dict of {{'a': int, 'b': int}} {_DIFFERS} a dict of {{'a': int}} in sample 2",
    ),
    "lengths": (
        lambda i: {"a": [1] * (i + 2)},
        f"sample['a'] is a list of [int, int] {_DIFFERS} a list of [int, int, int] in sample 1",
    ),
    "containers": (
        lambda i: [1] if i == 0 else 1,
        f"sample is a list of [int] {_DIFFERS} an int in sample 1",
    ),
}


def _parts(index: int) -> list[Any]:
    size = 3 + index // 4  # each batch of 4 has a shape of its own
    return [
        {"b": torch.full((size,), 10 * index + view), "a": torch.full((size,), 1000 + 10 * index + view)}
        for view in range(2)
    ]


def views(index: int) -> Any:
    """Two views of one thing, stacked by the dataset."""
    made = default_collate(_parts(index))
    return {"a": made["a"], "b": made["b"]}


def views_of_a_loader(index: int) -> Any:
    """The same, by a loader within the dataset."""
    made = next(iter(tud.DataLoader(_parts(index), 2)))
    return {"a": made["a"], "b": made["b"]}


def collate_in_two_threads(samples: Any) -> Any:
    """The batch, and what another thread collates at the same time."""
    others: list[Any] = []
    begun = threading.Event()

    def collate_others() -> None:
        for _ in range(8):
            others.append(default_collate([torch.full((1000,), -1)] * 4))
            begun.set()

    thread = threading.Thread(target=collate_others)
    thread.start()
    begun.wait()
    batch = default_collate(samples)
    thread.join()
    return batch, others


class KeepsBatches:
    """Keeps every batch, and counts at each later one how many of them have changed."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, Any]] = []

    def __call__(self, samples: Any) -> Any:
        batch = default_collate(samples)
        self.kept.append((batch, batch.tolist()))
        return batch, sum(kept.tolist() != values for kept, values in self.kept)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """An error whose attributes cannot be set, with a path that is none."""

    value: Any = None

    @property
    def path(self) -> Any:
        return np.zeros(3)

    @property
    def filename(self) -> Any:
        raise KeyError("filename")


def raises_frozen(_: Any) -> Any:
    raise FrozenError("the real error")


@pytest.mark.parametrize(
    ("make", "num_workers"), [(views, 1), (views_of_a_loader, 0), (views_of_a_loader, 1)]
)
def test_a_sample_made_by_default_collate_keeps_its_values(make: Any, num_workers: int) -> None:
    """The rows of a batch start anew when the shape changes, and no sample lies under them."""
    dataset = datasets.Made(make, 16)

    batches = list(fastload.DataLoader(dataset, 4, num_workers=num_workers))

    assert_same_batches(list(tud.DataLoader(dataset, 4)), batches)


PAIRS: list[Any] = [  # of arrays that are written to rows, and of what torch can collate with them or not
    (np.full((112, 112, 3), 1, np.uint8), 1),
    (np.full((112, 112, 3), 2, np.uint8)[::-1].copy(), 1 << 62),
    (np.full((224, 112, 3), 3, np.uint8)[::2], 2),
    (np.full((112, 3, 112), 4, np.uint8).transpose(0, 2, 1), 2),
    (np.full((112, 112, 3), 5, np.int16), 3),
    (np.full((112, 112, 3), 6, np.uint8), True),
    (np.full((112, 112, 3), 7, np.uint8), 0.5),
    (np.full((112, 112, 3), 8, np.uint8), 1 << 70),
    (np.full((112, 113, 3), 9, np.uint8), 4),
    [np.full((112, 112, 3), 10, np.uint8), 5],
    (np.full((112, 112, 3), 11, np.uint8), 6, 7),
]


def pair_of_pairs(index: int) -> Any:
    first, second = divmod(index // 3, len(PAIRS))
    return PAIRS[second if index % 3 == 1 else first]


def outcomes(loader: Any) -> list[Any]:
    batches, answers = iter(loader), []
    while True:
        try:
            answers.append(next(batches))
        except StopIteration:
            return answers
        except Exception as error:  # noqa: BLE001  # compared
            answers.append(type(error))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_image_and_a_label_of_another_kind_give_torchs_batch(num_workers: int) -> None:
    """Each kind of pair follows each other one in a batch: the batch, or the kind of error, is torch's."""
    dataset = datasets.Made(pair_of_pairs, 3 * len(PAIRS) ** 2)

    theirs = outcomes(tud.DataLoader(dataset, 3, num_workers=num_workers))

    assert_same_batches(theirs, outcomes(fastload.DataLoader(dataset, 3, num_workers=num_workers)))


def test_a_thread_of_the_dataset_may_collate_while_the_worker_does() -> None:
    """Only the thread that makes the batch stacks into the slot."""
    dataset = datasets.Made(plain, 64)
    loader = fastload.DataLoader(dataset, 4, num_workers=1, collate_fn=collate_in_two_threads)

    for number, (batch, others) in enumerate(loader):
        assert batch[:, 0].tolist() == list(range(number * 4, number * 4 + 4))
        assert [other[:, 0].tolist() for other in others] == [[-1] * 4] * 8


def test_a_batch_that_the_collate_function_keeps_is_never_written_again() -> None:
    """What user code in a worker holds is checked by it at every later batch."""
    dataset = datasets.Made(plain, 80)
    loader = fastload.DataLoader(dataset, 4, num_workers=1, collate_fn=KeepsBatches())

    batches = list(loader)

    assert [changed for _, changed in batches] == [0] * 20
    assert [batch[0, 0].item() for batch, _ in batches] == list(range(0, 80, 4))


def _fails(loader: Any, error: Any) -> Any:
    with pytest.raises(error) as caught:
        list(loader)
    return caught.value


RAISES = datasets.Made(datasets.raises, 8)
MISSING = datasets.Made(missing_file, 8)
CACHED = fastload.CachedDataset(datasets.Made(array, 8), transform=fails_at_one)


@pytest.mark.parametrize(
    ("dataset", "options", "error", "note"),
    [
        *(
            (RAISES, options, ValueError, "batch 1, .*dataset index 5")
            for options in (
                {},
                {"collate_fn": list},
                {"num_workers": 1},
                {"num_workers": 1, "collate_fn": list},
            )
        ),
        (MISSING, {"num_workers": 1}, FileNotFoundError, "batch 1, .*dataset index 5, /nowhere/5.jpg"),
        # Under a Subset, sample 1 of the cache is number 0 of the loader's own dataset.
        (tud.Subset(CACHED, [1, 6, 2]), {}, ValueError, "batch 0, dataset index 0"),
    ],
)
def test_an_error_names_its_sample(dataset: Any, options: dict[str, Any], error: Any, note: str) -> None:
    """And no other index of the batch."""
    found = _fails(fastload.DataLoader(dataset, 4, **options), error)

    assert re.fullmatch(f"fastload: {note}", found.__notes__[-1])


def ends(value: Any) -> Any:
    """What `next()` without a default raises: by a transform, or instead of a bad sample."""
    raise StopIteration


@pytest.mark.parametrize("options", WORKERS, ids=str)
@pytest.mark.parametrize(
    "calls",
    [{"batch_transform": ends}, {"device": "cpu", "device_transform": ends}, {"on_error": ends}],
    ids=",".join,
)
def test_what_ends_an_iterator_in_a_function_of_ours_is_an_error(options: Any, calls: Any) -> None:
    """For a loop over the loader, it would be the end of the epoch."""
    loader = fastload.DataLoader(datasets.Made(missing_file), 5, **options, **calls)
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(loader)


def test_an_error_that_cannot_be_pickled_comes_with_its_text_and_costs_its_batch_alone() -> None:
    """Its class, its message and its traceback are in the text; the batch behind it comes."""
    loader = fastload.DataLoader(datasets.Made(raises_what_cannot_be_pickled, 4), num_workers=1)
    iterator = iter(loader)
    before = [next(iterator).tolist(), next(iterator).tolist()]

    with pytest.raises(RuntimeError, match="LocalError: no such sample") as caught:
        next(iterator)

    assert "in DataLoader worker process 0" in str(caught.value)
    assert "the exception itself could not be pickled" in str(caught.value)
    assert (before, next(iterator).tolist()) == ([[0], [1]], [3])


@pytest.mark.parametrize("options", WORKERS, ids=str)
@pytest.mark.parametrize(
    "calls", [(raises_frozen, None), (int, raises_frozen)], ids=["dataset", "collate_fn"]
)
def test_an_error_that_cannot_be_noted_is_still_the_error(options: dict[str, Any], calls: Any) -> None:
    """Its class takes no notes, and its path is no path."""
    get, collate_fn = calls
    iterator = iter(fastload.DataLoader(datasets.Made(get, 4), 2, collate_fn=collate_fn, **options))
    for _ in range(2):
        with pytest.raises(FrozenError):
            next(iterator)
    assert list(iterator) == []


@pytest.mark.parametrize(
    ("name", "collate_fn", "num_workers"),
    [
        *((name, fn, 0) for name in NOT_COLLATED for fn in (None, collates_as_torch)),
        ("shapes", collates_as_torch, 1),
    ],
)
def test_an_error_of_default_collate_names_the_field(name: str, collate_fn: Any, num_workers: int) -> None:
    """Its place in a sample, what is wrong there, and what to do; also within a collate_fn of the user's."""
    get, told = NOT_COLLATED[name]
    dataset = datasets.Made(get, 12)
    loader = fastload.DataLoader(dataset, 12, num_workers=num_workers, collate_fn=collate_fn)

    note = _fails(loader, (TypeError, RuntimeError, KeyError, AttributeError)).__notes__[0]
    assert note.startswith(f"fastload: {told}")
    assert note.endswith(", or give the loader a collate_fn.")
    assert ("pad, resize or crop what differs" in note) == (_DIFFERS in told)


def test_a_transform_that_returns_an_image_is_told_what_a_dataset_is_told() -> None:
    """The path of the image and what to return instead."""
    with pytest.raises(TypeError, match="default_collate") as refused:
        list(fastload.DataLoader(datasets.Made(picture, 4), 4))
    cached = fastload.CachedDataset(datasets.Made(array, 4), transform=lambda one: picture(int(one[0])))
    with pytest.raises(TypeError, match="default_collate") as caught:
        list(fastload.DataLoader(cached, 4))

    cure = 'return numpy.asarray(image.convert("RGB")), or numpy.asarray(image) for a mask. Change it in the '
    for text in (refused.value.__notes__[0], caught.value.__notes__[0]):
        assert "sample[0] is an Image" in text
        assert cure in text


def test_an_error_of_the_users_collate_fn_has_no_note_about_the_samples() -> None:
    """Samples of several shapes are what it is for."""
    get, _ = NOT_COLLATED["shapes"]
    loader = fastload.DataLoader(datasets.Made(get, 4), 4, collate_fn=fails_to_collate)

    assert _fails(loader, TypeError).__notes__ == ["fastload: batch 0, dataset index [0, 1, 2, 3]"]


def test_the_indices_of_a_large_batch_are_abbreviated() -> None:
    """A note has the first ones, the last one and how many there are."""
    get, _ = NOT_COLLATED["shapes"]
    loader = fastload.DataLoader(datasets.Made(get, 64), 64, collate_fn=fails_to_collate)

    (note,) = _fails(loader, TypeError).__notes__
    assert note == "fastload: batch 0, dataset index [0, 1, 2, ..., 63] (64 in all)"
