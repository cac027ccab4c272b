"""Samples and callers that are hard on the transport: torch's loader says what is right.

Every test here runs under the leak guard of conftest.py: no process, thread or descriptor remains.
"""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.utils.data as tud

import fastload
from tests.kit import datasets
from tests.kit.batches import assert_same_batches, compare_with_torch
from tests.survival import attack_zoo
from tests.survival.attack_zoo import assert_numbered

if TYPE_CHECKING:
    from collections.abc import Iterator

# --- shapes and sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "prefetch_memory"), [("fork", 1), pytest.param("forkserver", "20KB", marks=pytest.mark.slow)]
)
def test_nests_of_changing_shapes_are_torchs_whatever_is_held(method: str, prefetch_memory: Any) -> None:
    """Leaves without elements, strings and nests, in a ring that has room for next to nothing."""
    expected = list(tud.DataLoader(datasets.Made(attack_zoo.nest, 80), 4))
    rng = random.Random(0)
    held: dict[int, Any] = {}
    loader = fastload.DataLoader(
        datasets.Made(attack_zoo.nest, 80),
        4,
        num_workers=2,
        prefetch_memory=prefetch_memory,
        multiprocessing_context=method,
    )

    for number, batch in enumerate(loader):
        held[number] = batch
        for kept in rng.sample(sorted(held), rng.randrange(len(held) + 1)):
            del held[kept]
        for kept, other in held.items():
            assert_same_batches(expected[kept], other)

    assert number == 19


@pytest.mark.parametrize("batch_size", [None, 5])
def test_samples_larger_than_the_whole_ring_are_no_error(batch_size: int | None) -> None:
    """A slot of its own for each worker; what the caller holds is copied."""
    dataset = datasets.Made(attack_zoo.large, 20)

    batches = list(fastload.DataLoader(dataset, batch_size, num_workers=2, prefetch_memory="64KB"))

    for images, labels in batches:
        labels = torch.as_tensor(labels).reshape(-1)
        images = torch.as_tensor(images).reshape(-1, 300, 1000)
        assert (images == labels.to(torch.uint8)[:, None, None]).all()
    assert [int(i) for _, labels in batches for i in torch.as_tensor(labels).reshape(-1)] == list(range(20))


# --- several at once -------------------------------------------------------------------------------------


def test_two_loaders_interleaved_at_random_do_not_disturb_each_other() -> None:
    """Each started while the other holds batches; one of them is left before its end."""
    rng = random.Random(1)
    loaders = [
        fastload.DataLoader(
            datasets.Made(attack_zoo.numbered, 40 * batch_size),
            batch_size,
            num_workers=2,
            prefetch_memory=prefetch_memory,
        )
        for batch_size, prefetch_memory in ((3, 1), (5, "auto"))
    ]
    first = iter(loaders[0])
    held: list[tuple[int, int, Any]] = [(0, 3, next(first))]
    iterators = [first, iter(loaders[1])]
    done = [1, 0]

    while max(done) < 40:
        which = rng.randrange(2)
        size = (3, 5)[which]
        held.append((done[which] * size, (done[which] + 1) * size, next(iterators[which])))
        done[which] += 1
        if rng.random() < 0.5:
            held.pop(rng.randrange(len(held)))
        for start, stop, batch in held:
            assert_numbered(batch, start, stop)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_may_be_abandoned_by_a_thread_that_ends(persistent: bool) -> None:
    """Its batch stays as it is, its workers go with it, and the loader serves the next thread."""
    dataset = datasets.Made(attack_zoo.numbered, 40)
    loader = fastload.DataLoader(dataset, 4, num_workers=2, persistent_workers=persistent)
    held: list[Any] = []

    for _ in range(2):
        thread = threading.Thread(target=lambda: held.append(next(iter(loader))))
        thread.start()
        thread.join()
    batches = list(loader)
    loader.close()

    assert len(batches) == 10
    for number, batch in enumerate([*held, *batches]):
        start = 4 * max(number - 2, 0)
        assert_numbered(batch, start, start + 4)


def test_an_iterator_may_be_handed_from_thread_to_thread() -> None:
    """Workers live as long as the process, not as long as the thread that started them."""
    iterators: list[Any] = []
    loader = fastload.DataLoader(datasets.Made(attack_zoo.numbered, 40), 4, num_workers=2)
    thread = threading.Thread(target=lambda: iterators.append(iter(loader)))
    thread.start()
    thread.join()

    for number, batch in enumerate(iterators.pop()):
        assert_numbered(batch, 4 * number, 4 * number + 4)


def test_other_processes_may_be_started_while_iterating() -> None:
    """Run and fork between batches: none of them holds on to the workers' pipes or to what is lent."""
    held = []
    loader = fastload.DataLoader(datasets.Made(attack_zoo.numbered, 16), 4, num_workers=2)
    for number, batch in enumerate(loader):
        subprocess.run([sys.executable, "-S", "-c", ""], check=True, close_fds=number % 2 == 0)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        held.append(batch)
        for kept, other in enumerate(held):
            assert_numbered(other, 4 * kept, 4 * kept + 4)

    assert len(held) == 4


# --- without the garbage collector -----------------------------------------------------------------------


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("how", "pinned"),
    [
        *[("finished", False), ("left", False), ("after an error", False), ("after a death", False)],
        *[("left", True), ("after a death", True)],
    ],
)
def test_without_a_garbage_collector_an_iterator_goes_with_its_last_reference(
    no_gc: None, how: str, pinned: bool, pretend_accelerator: Any
) -> None:
    """No cycle keeps the workers, also not one through an error's traceback."""
    if pinned:
        pretend_accelerator()
    make = {"after an error": attack_zoo.bad_seventh, "after a death": datasets.killed}.get(
        how, attack_zoo.numbered
    )
    iterator = iter(fastload.DataLoader(datasets.Made(make), 4, num_workers=2))
    pids = [one.pid for one in iterator._workers]
    next(iterator)
    if how == "finished":
        assert len(list(iterator)) == 5
    elif how != "left":
        with pytest.raises((ValueError, fastload.errors.WorkerDiedError)):
            list(iterator)

    del iterator

    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_without_a_garbage_collector_an_error_of_a_thread_keeps_no_iterator(no_gc: None) -> None:
    """The error keeps its own traceback into the dataset, and the iterator goes all the same."""
    dataset = datasets.Made(attack_zoo.bad_seventh)
    iterator = iter(fastload.DataLoader(dataset, 4, num_workers=2, worker_type="thread"))
    alive = weakref.ref(iterator)
    with pytest.raises(ValueError, match="seven") as caught:
        list(iterator)
    frames = [entry.name for entry in caught.traceback]

    del iterator, caught

    assert frames[-1] == "bad_seventh"
    assert alive() is None


def test_without_a_garbage_collector_batches_are_returned(no_gc: None) -> None:
    """An epoch of many batches takes no more slots than a few."""
    loader = fastload.DataLoader(datasets.Made(attack_zoo.numbered, 400), 4, num_workers=1)
    iterator = iter(loader)
    for number, batch in enumerate(iterator):
        assert_numbered(batch, 4 * number, 4 * number + 4)
        num_slots = len(iterator._pool.ring.slots)

    assert number == 99
    assert num_slots <= 6


# --- samples of unknown kinds ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "num_workers": 1},
        {"batch_size": None},
        {"batch_size": None, "num_workers": 1},
        {"batch_size": 4, "collate_fn": attack_zoo.collate_records, "num_workers": 1},
    ],
    ids=["default", "single, local", "single", "custom"],
)
def test_dataclass_samples_are_treated_as_by_torch(options: dict[str, Any]) -> None:
    """Refused by the default collate function with torch's error, carried whole in every other case."""

    def make(loader_class: Any) -> Any:
        return _AsDict(loader_class(datasets.Made(attack_zoo.record, 12), **options)), None

    got = compare_with_torch(make, epochs=1)

    assert len(got[0]) == (3 if options["batch_size"] else 12)


class _AsDict:
    """A loader whose records are compared field by field."""

    _iterator = None

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Any:
        return _Fields(iter(self._loader))


class _Fields:
    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __next__(self) -> Any:
        record = next(self._iterator)
        assert type(record) is attack_zoo.Record
        return vars(record)
