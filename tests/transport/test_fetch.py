"""How the samples of a batch are read, also where the dataset collates or reads in bulk; and their errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.utils.data as tud

import fastload
from tests.kit import datasets
from tests.kit.batches import assert_same_batches
from tests.transport import fetch_zoo

WORKERS: list[Any] = [{}, {"num_workers": 1}, {"num_workers": 1, "worker_type": "thread"}]

# --- samples that the dataset makes with default_collate -------------------------------------------------


@pytest.mark.parametrize(
    ("make", "num_workers"),
    [(fetch_zoo.views, 1), (fetch_zoo.views_of_a_loader, 0), (fetch_zoo.views_of_a_loader, 1)],
)
def test_a_sample_made_by_default_collate_keeps_its_values(make: Any, num_workers: int) -> None:
    """The rows of a batch start anew when the shape changes, and no sample lies under them."""
    dataset = datasets.Made(make, 16)

    batches = list(fastload.DataLoader(dataset, 4, num_workers=num_workers))

    assert_same_batches(list(tud.DataLoader(dataset, 4)), batches)


def test_a_thread_of_the_dataset_may_collate_while_the_worker_does() -> None:
    """Only the thread that makes the batch stacks into the slot."""
    dataset = datasets.Made(fetch_zoo.plain, 64)
    loader = fastload.DataLoader(dataset, 4, num_workers=1, collate_fn=fetch_zoo.collate_in_two_threads)

    for number, (batch, others) in enumerate(loader):
        assert batch[:, 0].tolist() == list(range(number * 4, number * 4 + 4))
        assert [other[:, 0].tolist() for other in others] == [[-1] * 4] * 8


def test_a_batch_that_the_collate_function_keeps_is_never_written_again() -> None:
    """What user code in a worker holds is checked by it at every later batch."""
    dataset = datasets.Made(fetch_zoo.plain, 80)
    loader = fastload.DataLoader(dataset, 4, num_workers=1, collate_fn=fetch_zoo.KeepsBatches())

    batches = list(loader)

    assert [changed for _, changed in batches] == [0] * 20
    assert [batch[0, 0].item() for batch, _ in batches] == list(range(0, 80, 4))


# --- datasets that read in their own way -----------------------------------------------------------------


@pytest.mark.parametrize("kind", fetch_zoo.OWN_READERS)
@pytest.mark.parametrize(("is_subset", "num_workers"), [(False, 0), (True, 1)])
def test_a_subclass_of_cached_dataset_reads_as_it_says(kind: Any, is_subset: bool, num_workers: int) -> None:
    """The gather serves the original methods alone."""
    dataset = kind(datasets.Made(fetch_zoo.array, 8))
    loader = fastload.DataLoader(
        tud.Subset(dataset, range(8)) if is_subset else dataset, 4, num_workers=num_workers
    )
    for _ in range(2):  # from the source, then from the cache
        assert [batch[:, 0].tolist() for batch in loader] == [[0, 100, 200, 300], [400, 500, 600, 700]]


# --- errors name the sample ------------------------------------------------------------------------------


def _fails(loader: Any, error: Any) -> Any:
    with pytest.raises(error) as caught:
        list(loader)
    return caught.value


RAISES = datasets.Made(datasets.raises, 8)
MISSING = datasets.Made(fetch_zoo.missing_file, 8)
CACHED = fastload.CachedDataset(datasets.Made(fetch_zoo.array, 8), transform=fetch_zoo.fails_at_one)


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
def test_an_error_names_batch_index_and_path_of_its_sample(
    dataset: Any, options: dict[str, Any], error: Any, note: str
) -> None:
    """And no other index of the batch."""
    found = _fails(fastload.DataLoader(dataset, 4, **options), error)

    assert re.fullmatch(f"fastload: {note}", found.__notes__[-1])


def test_an_error_that_cannot_be_pickled_comes_with_its_text_and_costs_its_batch_alone() -> None:
    """Its class, its message and its traceback are in the text; the batch behind it comes."""
    loader = fastload.DataLoader(datasets.Made(fetch_zoo.raises_what_cannot_be_pickled, 4), num_workers=1)
    iterator = iter(loader)
    before = [next(iterator).tolist(), next(iterator).tolist()]

    with pytest.raises(RuntimeError, match="LocalError: no such sample") as caught:
        next(iterator)

    assert "in DataLoader worker process 0" in str(caught.value)
    assert "the exception itself could not be pickled" in str(caught.value)
    assert (before, next(iterator).tolist()) == ([[0], [1]], [3])


@pytest.mark.parametrize("options", WORKERS, ids=str)
@pytest.mark.parametrize("where", ["dataset", "collate_fn"])
def test_an_error_that_cannot_be_described_or_noted_is_still_the_error(
    options: dict[str, Any], where: str
) -> None:
    """The error's class takes no notes, its path is no path, and the repr of the index raises."""
    get, collate_fn = fetch_zoo.raises_frozen, None
    if where == "collate_fn":
        get, collate_fn = fetch_zoo.Silent, get
    dataset, batches = datasets.Made(get, 4), [[fetch_zoo.Silent(0)], [fetch_zoo.Silent(1)]]
    iterator = iter(fastload.DataLoader(dataset, batch_sampler=batches, collate_fn=collate_fn, **options))
    for _ in batches:
        with pytest.raises(fetch_zoo.FrozenError):
            next(iterator)
    assert list(iterator) == []


@pytest.mark.parametrize(
    ("name", "collate_fn", "num_workers"),
    [
        *((name, fn, 0) for name in fetch_zoo.NOT_COLLATED for fn in (None, fetch_zoo.collates_as_torch)),
        ("shapes", fetch_zoo.collates_as_torch, 1),
    ],
)
def test_an_error_of_default_collate_names_the_field(name: str, collate_fn: Any, num_workers: int) -> None:
    """Its place in a sample, what is wrong there, and what to do; also within a collate_fn of the user's."""
    get, told = fetch_zoo.NOT_COLLATED[name]
    dataset = datasets.Made(get, 12)
    loader = fastload.DataLoader(dataset, 12, num_workers=num_workers, collate_fn=collate_fn)

    note = _fails(loader, (TypeError, RuntimeError, KeyError, AttributeError)).__notes__[0]
    assert note.startswith(f"fastload: {told}")
    assert name == "undecoded" or note.endswith(", or give the loader a collate_fn.")
    assert name != "two sizes" or "size=(256, 256)" in note


def test_a_transform_that_returns_an_image_is_told_what_a_dataset_is_told() -> None:
    """The path of the image and what to return instead."""
    pictures = datasets.Made(fetch_zoo.picture, 4)
    with pytest.raises(fastload.errors.UnsupportedSampleError) as refused:
        fastload.CachedDataset(pictures)
    cached = fastload.CachedDataset(datasets.Made(fetch_zoo.array, 4), transform=fetch_zoo.paints)
    with pytest.raises(TypeError, match="default_collate") as caught:
        list(fastload.DataLoader(cached, 4))

    cure = 'return numpy.asarray(image.convert("RGB")), or numpy.asarray(image) for a mask. Change it in the '
    for text in (str(refused.value), caught.value.__notes__[0]):
        assert "$[0]" in text
        assert "PIL.Image.Image" in text
        assert cure in text


def test_an_error_of_the_users_collate_fn_has_no_note_about_the_samples() -> None:
    """Samples of several shapes are what it is for."""
    get, _ = fetch_zoo.NOT_COLLATED["shapes"]
    loader = fastload.DataLoader(datasets.Made(get, 4), 4, collate_fn=fetch_zoo.fails_to_collate)

    assert _fails(loader, TypeError).__notes__ == ["fastload: batch 0, dataset index [0, 1, 2, 3]"]
