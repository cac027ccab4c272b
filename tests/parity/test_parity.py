"""The same arguments and seeds give the same epochs through torch's loader and through ours.

Axes: kinds of samples x workers; ways to draw indices x workers; loader options x workers; start methods.
Compared: values, types, dtypes, shapes, strides, order, errors with their text, and the states of all
generators afterwards. Not compared: is_shared(), and what docs/differences.md lists.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.data as tud

import fastload
from fastload.batch import collate
from tests.kit import datasets
from tests.kit.batches import assert_same_batches, compare_with_torch, read_epoch
from tests.kit.datasets import SAMPLES

if TYPE_CHECKING:
    from collections.abc import Iterator

LOADERS = (tud.DataLoader, fastload.DataLoader)


@pytest.mark.parametrize("num_workers", [0, 1, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", SAMPLES)
def test_any_sample_collates_as_in_torch(name: str, num_workers: int) -> None:
    """Every kind of sample gives torch's batches, or torch's error, at torch's batch."""
    compare_with_torch(
        lambda loader: (loader(datasets.Made(SAMPLES[name]), batch_size=4, num_workers=num_workers), None), 1
    )


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"draws", "worker info"}))
def test_batches_of_worker_threads_are_those_without_workers(name: str) -> None:
    """Values, types, dtypes, shapes, strides, order and errors are those of torch's loader."""
    dataset = datasets.Made(SAMPLES[name])
    theirs = read_epoch(tud.DataLoader(dataset, 4))
    ours = read_epoch(fastload.DataLoader(dataset, 4, num_workers=2, worker_type="thread"))

    for one, other in zip(theirs, ours, strict=True):
        if isinstance(one, Exception):
            assert (type(one), str(one)) == (type(other), str(other))
        else:
            assert_same_batches(one, other)


@pytest.fixture(params=["rows", "warm memory"])
def one_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Samples of every size are written to rows, or kept and stacked in warm memory."""
    monkeypatch.setattr(collate, "ROW_TENSOR_BYTES", 1)
    monkeypatch.setattr(collate, "THREADS_PAY_BYTES", 1)
    monkeypatch.setattr(collate, "WARM_BYTES", 1)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1 if request.param == "rows" else 2)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", SAMPLES)
def test_samples_collate_as_in_torch_whatever_way_their_size_chooses(
    name: str, num_workers: int, one_way: None
) -> None:
    """The kinds above are small: here they go the ways of large ones, too."""
    compare_with_torch(
        lambda loader: (loader(datasets.Made(SAMPLES[name]), batch_size=4, num_workers=num_workers), None), 1
    )


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "collate_fn", [None, list, datasets.count_samples], ids=["default", "list", "counted"]
)
@pytest.mark.parametrize(
    "given",
    [iter, tuple, dict.fromkeys, datasets.as_array, datasets.first_in_full],
    ids=["iterator", "tuple", "dict", "array", "None"],
)
def test_what_a_dataset_gives_for_a_list_of_indices_goes_to_the_collate_function_as_it_is(
    given: Any, collate_fn: Any, num_workers: int
) -> None:
    """`__getitems__` may give no list: an iterator, a tuple, an array, None. Errors are torch's, too."""
    dataset = datasets.InBulk(given)
    compare_with_torch(lambda cls: (cls(dataset, 4, num_workers=num_workers, collate_fn=collate_fn), None), 1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_rule_that_a_dataset_adds_at_its_first_sample_is_followed(num_workers: int) -> None:
    """As a module does that is imported late: torch's table of rules is looked at for each batch."""
    rules = tud._utils.collate.default_collate_fn_map

    def make(cls: Any) -> Any:
        rules.pop(datasets.Tagged, None)
        return cls(datasets.Made(datasets.tagged), 4, num_workers=num_workers), None

    try:
        batches = compare_with_torch(make, 1)
    finally:
        rules.pop(datasets.Tagged, None)

    assert "tagged" in str(batches)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _loader(loader: Any, num_workers: int, make: Any) -> tuple[Any, Any]:
    generator = _generator()
    return loader(num_workers=num_workers, **make(generator)), generator


IMAGES = datasets.Made(datasets.image)
DRAWS = datasets.Made(datasets.draws)

OPTIONS: dict[str, Any] = {
    "shuffled": lambda g: {"dataset": DRAWS, "batch_size": 4, "shuffle": True},
    "shuffled by a generator": lambda g: {"dataset": DRAWS, "batch_size": 4, "shuffle": True, "generator": g},
    "drop_last": lambda g: {"dataset": DRAWS, "batch_size": 4, "drop_last": True, "shuffle": True},
    "with replacement": lambda g: {
        "dataset": DRAWS,
        "batch_size": 4,
        "sampler": tud.RandomSampler(DRAWS, replacement=True, num_samples=50, generator=g),
    },
    "subset sampler": lambda g: {
        "dataset": DRAWS,
        "batch_size": 4,
        "sampler": tud.SubsetRandomSampler([3, 1, 7, 8, 9]),
    },
    "weighted sampler": lambda g: {
        "dataset": DRAWS,
        "batch_size": 4,
        "sampler": tud.WeightedRandomSampler([0.1, 0.9, 0.5], 17, generator=g),
    },
    "distributed sampler": lambda g: {
        "dataset": DRAWS,
        "batch_size": 4,
        "sampler": tud.DistributedSampler(DRAWS, num_replicas=3, rank=1, seed=5),
    },
    "batch sampler of tuples and tensors": lambda g: {
        "dataset": IMAGES,
        "batch_sampler": datasets.TupleBatches(),
    },
    "sampler without a length": lambda g: {
        "dataset": IMAGES,
        "sampler": datasets.Endless(NotImplementedError()),
    },
    "sampler of a huge length": lambda g: {"dataset": IMAGES, "sampler": datasets.Endless(10**20)},
    "dataset without a length": lambda g: {"dataset": datasets.Words(), "batch_sampler": [["b", "a"], ["c"]]},
    "no batches": lambda g: {"dataset": datasets.Made(datasets.draws), "batch_size": None, "shuffle": True},
    "bulk idiom": lambda g: {
        "dataset": tud.TensorDataset(torch.arange(40).view(20, 2)),
        "batch_size": None,
        "sampler": tud.BatchSampler(tud.RandomSampler(range(20), generator=g), 6, False),
    },
    "getitems": lambda g: {"dataset": datasets.Bulk(datasets.image), "batch_size": 4},
    "tensor dataset": lambda g: {
        "dataset": tud.TensorDataset(torch.randn(9, 2), torch.arange(9)),
        "batch_size": 4,
    },
    "concat of subsets": lambda g: {
        "dataset": tud.ConcatDataset([tud.Subset(IMAGES, [4, 2]), IMAGES]),
        "batch_size": 4,
    },
    "a list": lambda g: {"dataset": [1.5, 2.5, 3.5], "batch_size": 2},
    "an empty list": lambda g: {"dataset": [], "batch_size": 2},
    "an empty shuffled list": lambda g: {"dataset": [], "batch_size": 2, "shuffle": True},
    "an empty batch": lambda g: {"dataset": IMAGES, "batch_sampler": [[1, 2], [], [3]]},
    "out of range": lambda g: {"dataset": [1, 2, 3], "sampler": [0, 9, 1]},
    "mixup": lambda g: {"dataset": IMAGES, "batch_size": 5, "collate_fn": datasets.mixed_up},
    "arrays from collate": lambda g: {"dataset": IMAGES, "batch_size": 5, "collate_fn": datasets.as_arrays},
    "objects from collate": lambda g: {
        "dataset": datasets.Made(datasets.photo),
        "batch_size": 5,
        "collate_fn": datasets.album,
    },
    "objects without batches": lambda g: {"dataset": datasets.Made(datasets.photo), "batch_size": None},
    "ragged from collate": lambda g: {"dataset": IMAGES, "batch_size": 5, "collate_fn": datasets.ragged},
    "batches of many sizes": lambda g: {"dataset": datasets.Made(datasets.growing, 40), "batch_size": 4},
    "init function": lambda g: {"dataset": DRAWS, "batch_size": 4, "worker_init_fn": datasets.init},
    "stream": lambda g: {"dataset": datasets.Stream(), "batch_size": 3},
    "sharded stream": lambda g: {"dataset": datasets.Stream(sharded=True), "batch_size": 3},
    "uneven stream": lambda g: {"dataset": datasets.Stream(uneven=True), "batch_size": 3},
    "stream, drop_last": lambda g: {
        "dataset": datasets.Stream(uneven=True),
        "batch_size": 3,
        "drop_last": True,
    },
    "stream without batches": lambda g: {"dataset": datasets.Stream(uneven=True), "batch_size": None},
    "stream of wrong length": lambda g: {"dataset": datasets.Stream(claimed=2), "batch_size": 3},
    "no batch size and drop_last": lambda g: {"dataset": IMAGES, "batch_size": None, "drop_last": True},
    "batch size 0": lambda g: {"dataset": IMAGES, "batch_size": 0},
    "sampler and shuffle": lambda g: {"dataset": IMAGES, "sampler": [1], "shuffle": True},
    "shuffled stream": lambda g: {"dataset": datasets.Stream(), "shuffle": True},
    "negative timeout": lambda g: {"dataset": IMAGES, "timeout": -1},
    "bad context": lambda g: {"dataset": IMAGES, "multiprocessing_context": "bogus"},
    "context of the wrong type": lambda g: {"dataset": IMAGES, "multiprocessing_context": 3},
    "a timeout": lambda g: {"dataset": IMAGES, "timeout": 60},
}


# Of the options whose epochs differ, one of each kind; workers know nothing of an earlier epoch.
WITH_TWO_EPOCHS = {"shuffled", "shuffled by a generator", "distributed sampler", "no batches", "stream"}


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.thorough), 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_any_option_draws_and_gives_what_torch_does(name: str, num_workers: int) -> None:
    """Two epochs, or one with workers: same batches and errors; every generator ends in the same state."""
    epochs = 2 if num_workers == 0 or name in WITH_TWO_EPOCHS else 1
    compare_with_torch(lambda loader: _loader(loader, num_workers, OPTIONS[name]), epochs)


WORKER_OPTIONS: dict[str, Any] = {
    "persistent": lambda g: {"dataset": DRAWS, "batch_size": 4, "shuffle": True, "persistent_workers": True},
    "persistent, generator": lambda g: {
        "dataset": DRAWS,
        "batch_size": 4,
        "shuffle": True,
        "persistent_workers": True,
        "generator": g,
    },
    "persistent stream": lambda g: {
        "dataset": datasets.Stream(uneven=True),
        "batch_size": 3,
        "persistent_workers": True,
    },
    "prefetch 1": lambda g: {"dataset": DRAWS, "batch_size": 4, "shuffle": True, "prefetch_factor": 1},
    "prefetch 9": lambda g: {"dataset": DRAWS, "batch_size": 4, "shuffle": True, "prefetch_factor": 9},
    "not in order": lambda g: {"dataset": DRAWS, "batch_size": 4, "in_order": False},
}


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("name", WORKER_OPTIONS)
def test_any_worker_option_gives_what_torch_does(name: str, num_workers: int) -> None:
    """Three epochs with persistent workers; short and long prefetching."""
    if name == "not in order" and num_workers > 1:
        pytest.skip("torch's own order is not defined then")
    epochs = 3 if name.startswith("persistent") else 1
    compare_with_torch(lambda loader: _loader(loader, num_workers, WORKER_OPTIONS[name]), epochs)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # __del__ of torch's iterator
@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": -1},
        {"prefetch_factor": 2},
        {"num_workers": 1, "prefetch_factor": -1},
        {"num_workers": 1, "prefetch_factor": 0},
        {"persistent_workers": True},
        {"multiprocessing_context": "fork"},
        {"timeout": 3},
    ],
    ids=str,
)
def test_refused_arguments_are_refused_in_torchs_words(arguments: dict[str, Any]) -> None:
    """Type and text of the error are torch's, at the same moment (constructor or iter)."""
    errors = []
    for loader_class in LOADERS:
        loader = None
        try:
            loader = loader_class([1, 2, 3], **arguments)
            iter(loader)
        except (ValueError, AssertionError) as error:
            errors.append((type(error), str(error), loader is None))

    assert len(errors) == 2
    (their_type, their_text, *theirs), (our_type, our_text, *ours) = errors
    assert (their_type, theirs) == (our_type, ours)
    assert their_text in ("", our_text)  # torch 2.6 asserts without a word


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_other_start_methods_give_what_torch_gives(method: str) -> None:
    """A dataset that draws from all generators, with workers that are started without fork.

    Under spawn one worker and one epoch: each worker of either loader imports torch.
    """
    options: dict[str, Any] = {"num_workers": 1 if method == "spawn" else 2, "shuffle": True}

    def make(loader: Any) -> Any:
        return loader(DRAWS, batch_size=4, multiprocessing_context=method, **options), None

    compare_with_torch(make, options["num_workers"])


def test_a_worker_init_function_that_raises_gives_its_error_for_every_batch() -> None:
    """Torch raises UnboundLocalError from the second batch on; here it is the first one's error again."""
    got = read_epoch(
        fastload.DataLoader(IMAGES, batch_size=12, num_workers=1, worker_init_fn=datasets.bad_init)
    )

    assert len(got) == 2
    assert all(type(error) is ValueError and "init of worker 0" in str(error) for error in got)


def test_one_large_buffer_for_all_samples_gives_the_rows_that_were_meant() -> None:
    """A documented difference: torch gives the last sample N times."""
    for num_workers in (0, 1):
        (batch,) = fastload.DataLoader(datasets.OneBuffer(), batch_size=8, num_workers=num_workers)

        assert batch[:, 0, 0, 0].tolist() == list(range(8))


def test_length_warning_of_an_iterable_dataset_is_torchs() -> None:
    """More batches than len() promised: torch's warning, from torch's own code."""
    loader = fastload.DataLoader(datasets.Stream(claimed=2), batch_size=3)
    len(loader)

    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        list(loader)


def test_changed_collate_rules_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch documents that default_collate_fn_map may be changed in place; then rows are not written."""
    rules = torch.utils.data._utils.collate.default_collate_fn_map
    monkeypatch.setitem(rules, np.ndarray, functools.partial(_count_arrays))

    assert [next(iter(loader(IMAGES, batch_size=23)))[0] for loader in LOADERS] == [23, 23]


def _count_arrays(batch: Any, *, collate_fn_map: Any = None) -> int:
    return len(batch)
