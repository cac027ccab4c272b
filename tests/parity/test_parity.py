"""The same arguments and seeds give the same epochs through torch's loader and through ours.

Axes: kinds of samples x workers; ways to draw indices x workers; loader options x workers; start methods.
Compared: values, types, dtypes, shapes, strides, order, errors with their text, and the states of all
generators afterwards. Not compared: is_shared(), and what docs/how-it-works.md lists.
"""

from __future__ import annotations

import itertools
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
RULES = tud._utils.collate.default_collate_fn_map
ONE_WORKER = pytest.param(1, marks=pytest.mark.thorough)


def compare(dataset: Any, batch_size: int = 4, *, epochs: int = 1, **options: Any) -> list[Any]:
    """The epochs of our loader, which are those of torch's."""
    return compare_with_torch(lambda loader: (loader(dataset, batch_size, **options), None), epochs)


@pytest.mark.parametrize("num_workers", [0, ONE_WORKER, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", SAMPLES)
def test_any_sample_collates_as_in_torch(name: str, num_workers: int) -> None:
    """Every kind of sample gives torch's batches, or torch's error, at torch's batch."""
    compare(datasets.Made(SAMPLES[name]), num_workers=num_workers)


def sample_of_kind(index: tuple[str, int]) -> Any:
    name, number = index
    return SAMPLES[name](number)


@pytest.mark.parametrize("part", range(6))
def test_any_samples_collate_as_in_torch_one_kind_after_another_in_a_worker(part: int) -> None:
    """As above, in slots that had batches of another kind."""
    names = sorted(SAMPLES, key="stops".__eq__)[part::6]  # that one ends an epoch
    batches = [[(name, i) for i in range(n, min(n + 4, 23))] for name in names for n in range(0, 23, 4)]

    (got,) = compare(datasets.Made(sample_of_kind), 1, batch_sampler=batches, num_workers=1)

    assert len(got) > len(batches) - 6


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
    for name in ("ROW_BYTES", "THREADS_PAY_BYTES", "WARM_BYTES"):
        monkeypatch.setattr(collate, name, 1)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1 if request.param == "rows" else 2)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("num_workers", [0, ONE_WORKER])
@pytest.mark.parametrize("name", SAMPLES)
def test_samples_collate_as_in_torch_in_any_way(name: str, num_workers: int, one_way: None) -> None:
    """The kinds above are small: here they go the ways of large ones, too."""
    compare(datasets.Made(SAMPLES[name]), num_workers=num_workers)


GIVEN: dict[str, Any] = {
    "iterator": iter,
    "tuple": tuple,
    "dict": dict.fromkeys,
    "array": datasets.as_array,
    "None": datasets.first_in_full,
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("collate_fn", [None, list, datasets.count_samples])
@pytest.mark.parametrize("given", GIVEN)
def test_whatever_a_dataset_gives_is_collated(given: str, collate_fn: Any, num_workers: int) -> None:
    """`__getitems__` may give no list: an iterator, a tuple, an array, None. Errors are torch's, too."""
    compare(datasets.InBulk(GIVEN[given]), num_workers=num_workers, collate_fn=collate_fn)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_rule_that_a_dataset_adds_at_its_first_sample_is_followed(num_workers: int) -> None:
    """As a module does that is imported late: torch's table of rules is looked at for each batch."""

    def make(loader: Any) -> Any:
        RULES.pop(datasets.Tagged, None)
        return loader(datasets.Made(datasets.tagged), 4, num_workers=num_workers), None

    try:
        batches = compare_with_torch(make, 1)
    finally:
        RULES.pop(datasets.Tagged, None)

    assert "tagged" in str(batches)


def test_changed_collate_rules_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch documents that default_collate_fn_map may be changed in place; then rows are not written."""
    monkeypatch.setitem(RULES, np.ndarray, lambda batch, collate_fn_map=None: len(batch))

    assert [next(iter(loader(IMAGES, batch_size=23)))[0] for loader in LOADERS] == [23, 23]


IMAGES = datasets.Made(datasets.image)
DRAWS = datasets.Made(datasets.draws)
NUMBERS = torch.arange(40).view(20, 2)


def options_of(generator: torch.Generator) -> dict[str, dict[str, Any]]:
    """Arguments beside a batch size of 4, some of which draw from a generator."""
    draws, images = {"dataset": DRAWS}, {"dataset": IMAGES}
    photos = {"dataset": datasets.Made(datasets.photo)}
    shuffled, single = draws | {"shuffle": True}, {"batch_size": None}
    uneven = {"dataset": datasets.Stream(22, uneven=True)}
    drawn, bulk = tud.RandomSampler(range(20), generator=generator), tud.TensorDataset(NUMBERS)
    replaced = tud.RandomSampler(DRAWS, replacement=True, num_samples=50, generator=generator)
    weighted = tud.WeightedRandomSampler([0.1, 0.9, 0.5], 17, generator=generator)
    return {
        "shuffled": shuffled,
        "shuffled by a generator": shuffled | {"generator": generator},
        "drop_last": shuffled | {"drop_last": True},
        "with replacement": draws | {"sampler": replaced},
        "subset sampler": draws | {"sampler": tud.SubsetRandomSampler([3, 1, 7, 8, 9])},
        "weighted sampler": draws | {"sampler": weighted},
        "distributed sampler": draws | {"sampler": tud.DistributedSampler(DRAWS, 3, 1, seed=5)},
        "batch sampler of tuples and tensors": images | {"batch_sampler": datasets.TupleBatches()},
        "sampler without a length": images | {"sampler": datasets.Endless(NotImplementedError())},
        "sampler of a huge length": images | {"sampler": datasets.Endless(10**20)},
        "dataset without a length": {"dataset": datasets.Words(), "batch_sampler": [["b", "a"], ["c"]]},
        "no batches": shuffled | single,
        "bulk idiom": single | {"dataset": bulk, "sampler": tud.BatchSampler(drawn, 6, False)},
        "getitems": {"dataset": datasets.Bulk(datasets.image)},
        "tensor dataset": {"dataset": tud.TensorDataset(NUMBERS / 3, torch.arange(20))},
        "concat of subsets": {"dataset": tud.ConcatDataset([tud.Subset(IMAGES, [4, 2]), IMAGES])},
        "a list": {"dataset": [1.5, 2.5, 3.5, 4.5, 5.5]},
        "an empty list": {"dataset": []},
        "an empty shuffled list": {"dataset": [], "shuffle": True},
        "an empty batch": images | {"batch_sampler": [[1, 2], [], [3]]},
        "out of range": {"dataset": [1, 2, 3], "sampler": [0, 9, 1], "batch_size": 1},
        "mixup": images | {"collate_fn": datasets.mixed_up},
        "arrays from collate": images | {"collate_fn": datasets.as_arrays},
        "objects from collate": photos | {"collate_fn": datasets.album},
        "objects without batches": photos | single,
        "ragged from collate": images | {"collate_fn": datasets.ragged},
        "batches of many sizes": {"dataset": datasets.Made(datasets.growing, 40)},
        "worker info": {"dataset": datasets.Made(datasets.info_of_worker)},
        "init function": draws | {"worker_init_fn": datasets.init},
        "stream": {"dataset": datasets.Stream(22)},
        "sharded stream": {"dataset": datasets.Stream(22, sharded=True)},
        "uneven stream": uneven,
        "stream, drop_last": uneven | {"drop_last": True},
        "stream without batches": uneven | single,
        "stream that begins anew": single | {"dataset": datasets.Anew()},
        "end in the collate function": {"dataset": datasets.Count(), "collate_fn": datasets.at_most_six},
        "indices of uint8": images | {"dataset": bulk, "sampler": torch.arange(3, dtype=torch.uint8)},
        "stream of wrong length": {"dataset": datasets.Stream(claimed=2)},
        "no batch size and drop_last": images | single | {"drop_last": True},
        "batch size 0": images | {"batch_size": 0},
        "sampler and shuffle": images | {"sampler": [1], "shuffle": True},
        "shuffled stream": {"dataset": datasets.Stream(22), "shuffle": True},
        "negative timeout": images | {"timeout": -1},
        "bad context": images | {"multiprocessing_context": "bogus"},
        "context of the wrong type": images | {"multiprocessing_context": 3},
        "a timeout": images | {"timeout": 60},
    }


def worker_options_of(generator: torch.Generator) -> dict[str, dict[str, Any]]:
    """Arguments that nobody gives without workers."""
    shuffled, persistent = {"dataset": DRAWS, "shuffle": True}, {"persistent_workers": True}
    return {
        "persistent": shuffled | persistent,
        "persistent, generator": shuffled | persistent | {"generator": generator},
        "persistent, worker info": persistent | {"dataset": datasets.Made(datasets.info_of_worker)},
        "persistent stream": persistent | {"dataset": datasets.Stream(22, uneven=True)},
        "prefetch 1": shuffled | {"prefetch_factor": 1},
        "prefetch 9": shuffled | {"prefetch_factor": 9},
        "not in order": {"dataset": DRAWS, "in_order": False},
    }


def compare_option(table: Any, name: str, num_workers: int, epochs: int) -> None:
    """The epochs and the generators are torch's."""

    def make(loader: Any) -> Any:
        generator = torch.Generator().manual_seed(7)
        options = {"batch_size": 4, "num_workers": num_workers} | table(generator)[name]
        if "batch_sampler" in options:
            del options["batch_size"]
        return loader(**options), generator

    compare_with_torch(make, epochs)


# Of the options whose epochs differ, one of each kind; workers know nothing of an earlier epoch.
WITH_TWO_EPOCHS = {
    *("shuffled", "shuffled by a generator", "distributed sampler", "no batches", "stream", "worker info")
}
# Of the options that work alike in each worker, some.
IN_TWO_WORKERS = WITH_TWO_EPOCHS | {"init function", "sharded stream", "uneven stream", "stream, drop_last"}


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [
        pytest.param(name, num, marks=[pytest.mark.thorough] if num == 2 - (name in IN_TWO_WORKERS) else [])
        for name, num in itertools.product(options_of(torch.Generator()), range(3))
    ],
)
def test_any_option_draws_and_gives_what_torch_does(name: str, num_workers: int) -> None:
    """Two epochs, or one with workers: same batches and errors; every generator ends in the same state."""
    epochs = 2 if num_workers == 0 or name in WITH_TWO_EPOCHS else 1
    compare_option(options_of, name, num_workers, epochs)


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("name", worker_options_of(torch.Generator()))
def test_any_worker_option_gives_what_torch_does(name: str, num_workers: int) -> None:
    """Three epochs with persistent workers; short and long prefetching."""
    if name == "not in order" and num_workers > 1:
        pytest.skip("torch's own order is not defined then")
    compare_option(worker_options_of, name, num_workers, 3 if name.startswith("persistent") else 1)


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
@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_other_start_methods_give_what_torch_gives(method: str) -> None:
    """A dataset that draws from all generators; under spawn each worker of either loader imports torch."""
    compare(DRAWS, shuffle=True, num_workers=1, multiprocessing_context=method)


def test_a_worker_init_function_that_raises_gives_its_error_for_every_batch() -> None:
    """Torch raises UnboundLocalError from the second batch on; here it is the first one's error again."""
    got = read_epoch(fastload.DataLoader(IMAGES, 12, num_workers=1, worker_init_fn=datasets.bad_init))

    assert len(got) == 2
    assert all(type(error) is ValueError and "init of worker 0" in str(error) for error in got)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_one_large_buffer_for_all_samples_gives_the_rows_that_were_meant(num_workers: int) -> None:
    """A documented difference: torch gives the last sample N times."""
    (batch,) = fastload.DataLoader(datasets.OneBuffer(), 8, num_workers=num_workers)

    assert batch[:, 0, 0, 0].tolist() == list(range(8))


def test_length_warning_of_an_iterable_dataset_is_torchs() -> None:
    """More batches than len() promised: torch's warning, from torch's own code."""
    loader = fastload.DataLoader(datasets.Stream(claimed=2), batch_size=3)
    len(loader)

    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        list(loader)
