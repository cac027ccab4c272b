"""worker_type="thread": what differs from worker processes, and what each thread has a copy of."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import random
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset
from torch.utils.data import get_worker_info as torch_worker_info

import fastload
from fastload import CachedDataset, DataLoader
from fastload.rng.generators import Search
from fastload.workers.thread_pool import copies_for_threads
from tests.kit import datasets
from tests.rng.draws_zoo import Pictures
from tests.rng.pipelines_zoo import Crops, crop


def threads(dataset: Any, batch_size: int = 4, **options: Any) -> DataLoader:
    return DataLoader(dataset, batch_size, worker_type="thread", **{"num_workers": 2} | options)


class Squares(datasets.Made):
    """Sample i says in which thread and in which epoch it was made."""

    epoch = -1

    def __init__(self) -> None:
        super().__init__(self.tell, 20)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def tell(self, index: int) -> Any:
        info, theirs = fastload.get_worker_info(), torch_worker_info()
        assert info is not None
        told = [info.id, info.num_workers, info.method, None if theirs is None else theirs.id]
        return {"thread": threading.get_ident(), "epoch": self.epoch, "told": str(told)}


class CroppedSquares(Squares):
    """Has a pipeline, so that each thread has a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = crop()


@pytest.mark.parametrize("kind", [Squares, CroppedSquares])
def test_batches_go_round_persistent_threads_that_hear_of_the_epoch(kind: Any) -> None:
    """Batch k comes from thread k mod W, which our worker info names; torch's is None."""
    with threads(kind(), num_workers=3, persistent_workers=True) as loader:
        seen = []
        for epoch in (4, 7):
            loader.set_epoch(epoch)
            batches = list(loader)
            told = [set(batch["told"]) for batch in batches]
            assert told == [{f"[{worker}, 3, 'thread', None]"} for worker in (0, 1, 2, 0, 1)]
            assert {batch["epoch"][0].item() for batch in batches} == {epoch}
            seen.append({batch["thread"][0].item() for batch in batches})
    process = next(iter(DataLoader(Squares(), num_workers=1)))

    assert seen[0] == seen[1]
    assert len(seen[0] - {threading.get_ident()}) == 3
    assert process["told"] == ["[0, 1, 'process', 0]"]
    assert fastload.get_worker_info() is None


def test_a_process_that_a_thread_forks_is_not_that_thread() -> None:
    """A dataset that reads through worker processes of its own, of torch's loader or of fastload's."""

    def tell(index: int) -> Any:
        own: Any = fastload.get_worker_info()
        return [str(own), str(torch_worker_info().id)]  # type: ignore[union-attr]

    def read_through_processes(index: int) -> Any:
        told = []
        for loader_class in (DataLoader, torch.utils.data.DataLoader):
            loader = loader_class(datasets.Made(tell, 1), None, num_workers=1, multiprocessing_context="fork")
            told += list(loader)
        return told

    loader = threads(datasets.Made(read_through_processes, 2), None, collate_fn=list)
    for told in loader:
        assert [(own.count("method='process'"), id_of_torch) for own, id_of_torch in told] == [(1, "0")] * 2


def test_generators_and_torchs_number_of_threads_stay() -> None:
    """In threads, seed_worker seeds pipelines alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(5), random.seed(5)
        state = random.getstate()
        list(threads(Crops(), worker_init_fn=fastload.seed_worker))
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            seen = [torch.get_num_threads(), other.submit(torch.get_num_threads).result()]
    finally:
        torch.set_num_threads(before)

    assert random.getstate() == state
    assert seen == [2, 2]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration])
def test_what_ends_a_process_is_an_error_here(kind: type[BaseException]) -> None:
    """A dataset that exits ends neither the thread nor the program in silence."""

    def read(index: int) -> Any:
        raise kind("told to")

    with pytest.raises(kind, match="told to"):
        next(iter(threads(datasets.Made(read))))


@pytest.mark.parametrize("num_before", [0, 1])
def test_timeout(num_before: int) -> None:
    """A batch that takes too long is torch's error, also the first, which is fetched alone."""
    gate = threading.Semaphore(4 * num_before)
    dataset = datasets.Made(lambda index: gate.acquire() and index)
    iterator = iter(threads(dataset, num_workers=1, timeout=0.05))
    for _ in range(num_before):
        next(iterator)

    with pytest.raises(RuntimeError, match=r"timed out after 0\.05 seconds"):
        next(iterator)
    gate.release(100)


@pytest.mark.parametrize("num_batches", [4, 40])
def test_batches_that_wait_for_the_caller_leave_nothing_behind(num_batches: int) -> None:
    """What wakes the caller does not add up over an epoch in which the threads are always ahead."""
    loader = threads(datasets.Made(int, num_batches), 1, num_workers=1, prefetch_factor=num_batches)
    iterator: Any = iter(loader)
    worker = iterator._pool._workers[0]
    while not worker.background._calls.empty():
        worker.background.thread.join(0.01)

    for _ in iterator:
        assert iterator._pool._wakes._wakes.qsize() <= 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dataset": datasets.Stream()}, r"^worker_type=.thread. needs a map-style dataset, whose"),
        ({"multiprocessing_context": "spawn"}, "multiprocessing_context"),
    ],
)
def test_what_does_not_go_together_is_named(options: dict[str, Any], named: str) -> None:
    """An iterable-style dataset has one iterator, and threads have no context."""
    with pytest.raises(ValueError, match=named):
        iter(threads(**{"dataset": range(4)} | options))


def copy_for_thread(dataset: Any) -> Any:
    ((copied, _),) = copies_for_threads(dataset, None, 1, with_generators=True)
    return copied


class Held:
    """Images and whatever is random."""

    def __init__(self, value: Any) -> None:
        self.images = np.zeros((4, 8, 8, 3), np.uint8)
        self.value = value

    def apply(self, image: Any) -> Any:
        return image


class Slotted:
    __slots__ = ("empty", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    value: Any


class Listed(list[Any]):
    name = "a list with a name"


HOLDERS: dict[str, Any] = {
    "attribute": Held,
    "slot": Slotted,
    "frozen": Frozen,
    "named tuple": lambda p: Held(Pair(1, p)),
    "defaultdict": lambda p: Held(collections.defaultdict(list, {"a": p})),
    "deque": lambda p: Held(collections.deque([p], 4)),
    "list with attributes": lambda p: Held(Listed([p])),
    "partial": lambda p: Held(functools.partial(print, p, sep=p)),
    "method": lambda p: Held(Held(p).apply),
    "nested": lambda p: Held([{"a": (Held(Slotted(p)),)}]),
    "subset": lambda p: Subset(Held(p), [0]),
    "cached": lambda p: CachedDataset(Pictures(3), transform=p),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_the_copy_holds_another_pipeline(name: str) -> None:
    """However it is held, the copy's pipeline is another object of the same kind."""
    pipeline = crop()
    dataset = HOLDERS[name](pipeline)

    copied = copy_for_thread(dataset)

    assert type(copied) is type(dataset)
    found, *_ = Search(copied).transforms
    assert found is not pipeline
    assert repr(found) == repr(pipeline)
    assert Search(dataset).transforms[0] is pipeline


def test_images_are_shared() -> None:
    """Nothing that is not random takes memory twice; a cache stays the same cache."""
    alone = Held(None)
    assert copy_for_thread(alone) is alone
    dataset = CachedDataset(Held(crop()).images, transform=crop())
    copied = copy_for_thread(dataset)

    assert copied is not dataset
    assert copied.dataset is dataset.dataset
    assert copied.cache is dataset.cache


def test_what_is_held_twice_stays_one() -> None:
    """A pipeline of two holders has one copy for both, and a dataset that holds itself one that does so."""
    pipeline = crop()
    dataset = ConcatDataset([Subset(Held(part), [0]) for part in (pipeline, [pipeline])])
    second, third = copy_for_thread(dataset).datasets
    circle: Any = Held(crop())
    circle.images = {"owner": circle}
    copied = copy_for_thread(circle)

    assert second.dataset.value is third.dataset.value[0]
    assert second.dataset.value is not pipeline
    assert copied.images["owner"] is copied
    assert copied.value is not circle.value


HELD_FOR_ALL: list[Any] = [
    lambda pipeline: Held(lambda image: pipeline(image=image)),
    lambda pipeline: type("Owner", (Held,), {"transform": pipeline})(None),
    lambda pipeline: Held({pipeline}),
]


@pytest.mark.parametrize("hold", HELD_FOR_ALL, ids=["function", "class", "set"])
def test_what_cannot_be_replaced_is_shared(hold: Any) -> None:
    """A pipeline of a function, a class or a set is one for all threads, which call it one at a time."""
    dataset = hold(crop())
    assert copy_for_thread(dataset) is dataset
