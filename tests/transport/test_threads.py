"""worker_type="thread": the batches of worker processes, from threads; what each thread has a copy of."""

from __future__ import annotations

import collections
import functools
import gc
import random
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from torch.utils.data import get_worker_info as torch_worker_info

import fastload
from fastload import CachedDataset, DataLoader
from fastload.errors import LoaderClosedError
from fastload.rng.pipelines import find_pipelines
from fastload.workers.threads import copies_for_threads
from tests.kit import datasets
from tests.kit.batches import assert_same_batches, read_epoch
from tests.kit.datasets import SAMPLES
from tests.rng.draws_zoo import Pictures
from tests.rng.pipelines_zoo import Crops, crop

if TYPE_CHECKING:
    from tests.kit.processes import Interpreter


def threads(dataset: Any, **options: Any) -> DataLoader:
    return DataLoader(dataset, worker_type="thread", **{"batch_size": 4, "num_workers": 2, **options})


def fastload_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("fastload")]


class Squares:
    """Small arrays; says in which thread each was made."""

    def __init__(self, length: int = 20) -> None:
        self.length = length
        self.epoch = -1

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        if index < 0:
            raise KeyError(f"no sample {index}")
        info = fastload.get_worker_info()
        return {
            "image": np.full((8, 8, 3), index % 256, np.uint8),
            "worker": -1 if info is None else info.id,
            "thread": threading.get_ident(),
            "epoch": self.epoch,
        }


class Gate(Squares):
    """Waits at each sample until it is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(1)

    def __getitem__(self, index: int) -> Any:
        self.gate.acquire()
        return super().__getitem__(index)


class TestBatches:
    @pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"draws", "worker info"}))
    def test_they_are_those_without_workers(self, name: str) -> None:
        """Values, types, dtypes, shapes, strides, order and errors are those of torch's loader."""
        theirs = read_epoch(torch.utils.data.DataLoader(datasets.Made(SAMPLES[name]), 4))
        ours = read_epoch(threads(datasets.Made(SAMPLES[name])))

        for one, other in zip(theirs, ours, strict=True):
            if isinstance(one, Exception):
                assert (type(one), str(one)) == (type(other), str(other))
            else:
                assert_same_batches(one, other)

    def test_work_is_spread_over_threads_of_this_process(self) -> None:
        """Batch k comes from thread k mod W."""
        batches = list(threads(Squares(), num_workers=3))

        assert [set(batch["worker"].tolist()) for batch in batches] == [{0}, {1}, {2}, {0}, {1}]
        assert len({batch["thread"][0].item() for batch in batches}) == 3
        assert threading.get_ident() not in {batch["thread"][0].item() for batch in batches}

    def test_a_held_batch_is_never_written_again(self) -> None:
        """Batches that are kept over an epoch of many keep their values."""
        loader = threads(Squares(200), persistent_workers=True)
        for _ in range(2):
            kept = [batch["image"] for batch in loader]
            assert [int(images[0, 0, 0, 0]) for images in kept] == list(range(0, 200, 4))
        loader.close()

    def test_memory_is_used_again(self) -> None:
        """A consumer that lets each batch go sees a few addresses only."""
        addresses = {batch["image"].data_ptr() for batch in threads(Squares(400))}

        assert len(addresses) <= 2 * (2 + 3)

    def test_a_cache_is_filled_and_read(self) -> None:
        """Many threads fill one cache, each sample once, and read it."""
        dataset = CachedDataset(Pictures(64), transform=crop_image)
        first, second = (list(threads(dataset, num_workers=4, rng="sample")) for _ in range(2))

        assert dataset.cache_info().num_cached == 64
        assert all(torch.equal(one[0], other[0]) for one, other in zip(first, second, strict=True))

    def test_persistent_threads_hear_of_the_epoch(self) -> None:
        """set_epoch() reaches the dataset, and a copy of it; threads stay the same."""
        for dataset in (Squares(), CroppedSquares()):
            with threads(dataset, persistent_workers=True) as loader:
                seen = []
                for epoch in (4, 7):
                    loader.set_epoch(epoch)
                    batches = list(loader)
                    seen.append({batch["thread"][0].item() for batch in batches})
                    assert {batch["epoch"][0].item() for batch in batches} == {epoch}

            assert seen[0] == seen[1]


def crop_image(sample: Any) -> Any:
    image, label = sample
    top = fastload.sample_rng().integers(32)
    return image[top : top + 8, :8], label


class CroppedSquares(Squares):
    """Has a pipeline, so that each thread has a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = crop()


class TestRandomNumbers:
    def test_worker_info(self) -> None:
        """Ours knows threads; torch's is None there, and in a process both say the same."""
        first, *_ = threads(Infos(), batch_size=None, collate_fn=list)
        process, *_ = DataLoader(Infos(), None, num_workers=1, collate_fn=list)

        assert first == [0, 2, "thread", None]
        assert process == [0, 1, "process", 0]
        assert fastload.get_worker_info() is None

    def test_seed_worker_seeds_pipelines_alone(self) -> None:
        """As a worker_init_fn it leaves the process's generators, and calls what was added to it."""
        torch.manual_seed(5), random.seed(5)
        state, called = random.getstate(), []
        list(threads(Crops(), worker_init_fn=fastload.seed_worker.then(called.append)))

        assert random.getstate() == state
        assert sorted(called) == [0, 1]


class Infos(Squares):
    def __getitem__(self, index: int) -> Any:
        info, theirs = fastload.get_worker_info(), torch_worker_info()
        assert info is not None
        return [info.id, info.num_workers, info.method, None if theirs is None else theirs.id]


class TestFaults:
    def test_an_error_comes_at_its_batch_and_the_rest_follows(self) -> None:
        """The dataset's own error is raised, with a note that names the batch; later batches come."""
        iterator = iter(threads(Squares(), sampler=[0, 1, -3, 2, 3], batch_size=1))
        next(iterator), next(iterator)

        with pytest.raises(KeyError, match="no sample -3") as caught:
            next(iterator)
        assert caught.value.__notes__ == ["fastload: batch 2, worker 0, dataset index -3"]
        assert [batch["image"][0, 0, 0, 0].item() for batch in iterator] == [2, 3]

    @pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration])
    def test_what_ends_a_process_is_an_error_here(self, kind: type[BaseException]) -> None:
        """A dataset that exits ends neither the thread nor the program in silence."""
        iterator = iter(threads(Raises(kind)))

        with pytest.raises(kind, match="told to"):
            next(iterator)

    @pytest.mark.parametrize("num_before", [0, 1])
    def test_timeout(self, num_before: int) -> None:
        """A batch that takes too long is torch's error, also the first, which is fetched alone."""
        dataset = Gate()
        for _ in range(4 * num_before):
            dataset.gate.release()
        iterator = iter(threads(dataset, num_workers=1, timeout=0.05))
        for _ in range(num_before):
            next(iterator)

        with pytest.raises(RuntimeError, match=r"timed out after 0\.05 seconds"):
            next(iterator)
        dataset.gate.release(100)

    @pytest.mark.parametrize("num_batches", [4, 40])
    def test_batches_that_wait_for_the_caller_leave_nothing_behind(self, num_batches: int) -> None:
        """What wakes the caller does not add up over an epoch in which the threads are always ahead."""
        loader = threads(Squares(num_batches * 4), num_workers=1, prefetch_factor=num_batches)
        iterator = iter(loader)
        worker = iterator._pool._workers[0]
        while not worker.tasks.empty():
            worker.thread.join(0.01)

        for _ in iterator:
            assert worker.wakes._wakes.qsize() <= 2

    def test_closing_ends_the_threads_and_keeps_batches(self) -> None:
        """After close() no thread is left, batches stay valid, and next() says why there is none."""
        loader = threads(Squares())
        iterator = iter(loader)
        batch = next(iterator)
        assert fastload_threads()

        loader.close()

        assert fastload_threads() == []
        assert batch["image"][:, 0, 0, 0].tolist() == [0, 1, 2, 3]
        with pytest.raises(LoaderClosedError):
            next(iterator)

    def test_an_interpreter_that_exits_with_a_live_iterator(self, interpreter: Interpreter) -> None:
        """Exit code 0, nothing on standard error."""
        program = (
            "import fastload\n"
            "class Data:\n"
            "    def __len__(self): return 1000\n"
            "    def __getitem__(self, index): return index\n"
            "iterator = iter(fastload.DataLoader(Data(), 4, num_workers=2, worker_type='thread'))\n"
            "next(iterator)\n"
        )
        done = interpreter.run(program)

        assert (done.returncode, done.stderr) == (0, "")

    def test_torchs_number_of_threads_stays(self) -> None:
        """Workers compute with one thread each; the training's own number is as it was."""
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            list(threads(Squares()))
            seen = []
            other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            other.start()
            other.join()
            assert [torch.get_num_threads(), *seen] == [2, 2]
        finally:
            torch.set_num_threads(before)


class Raises(Squares):
    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self.kind = kind

    def __getitem__(self, index: int) -> Any:
        raise self.kind("told to")


class TestRefusals:
    def test_streams(self) -> None:
        """An iterable-style dataset has one iterator, and torch's own iterator knows no threads."""

        class Stream(IterableDataset[int]):
            def __iter__(self) -> Any:
                return iter(())

        with pytest.raises(ValueError, match=r"^worker_type=.thread. needs a map-style dataset, whose"):
            threads(Stream())
        with pytest.raises(ValueError, match=r"worker_type=\"thread\".*in_order=False"):
            iter(threads(Squares(), in_order=False))

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"worker_type": "fiber"}, "'fiber'"),
            ({"multiprocessing_context": "spawn"}, "multiprocessing_context"),
        ],
    )
    def test_settings(self, options: dict[str, Any], named: str) -> None:
        """What does not go together is named."""
        with pytest.raises(ValueError, match=named):
            DataLoader(Squares(), **{"num_workers": 1, "worker_type": "thread", **options})


def test_persistent_threads_end_with_their_loader() -> None:
    """The threads do not keep the loader alive."""
    loader = fastload.DataLoader([1, 2, 3], num_workers=2, worker_type="thread", persistent_workers=True)
    assert len(list(loader)) == 3
    reference = weakref.ref(loader)
    del loader
    gc.collect()

    assert reference() is None


# --- copies of datasets for threads ----------------------------------------------------------------------


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
    (found,) = find_pipelines(copied)
    assert found is not pipeline
    assert repr(found) == repr(pipeline)
    assert find_pipelines(dataset) == [pipeline]


def test_images_are_shared() -> None:
    """Nothing that is not random takes memory twice; a cache stays the same cache."""
    alone = Held(None)
    assert copy_for_thread(alone) is alone
    dataset = CachedDataset(Held(crop()).images, transform=crop())

    copied = copy_for_thread(dataset)

    assert copied is not dataset
    assert copied.dataset is dataset.dataset
    assert copied.cache is dataset.cache


def test_one_pipeline_of_two_holders_stays_one() -> None:
    """Datasets that share a pipeline have copies that share its copy, and none keeps the original."""
    pipeline = crop()
    dataset = ConcatDataset(
        [Held(pipeline).images, Subset(Held(pipeline), [0]), Subset(Held([pipeline]), [0])]
    )

    _, second, third = copy_for_thread(dataset).datasets

    assert second.dataset.value is third.dataset.value[0]
    assert second.dataset.value is not pipeline


def test_a_circle_is_copied_once() -> None:
    """A dataset that holds itself has a copy that holds itself."""
    dataset = Held(crop())
    dataset.images = {"owner": dataset}

    copied = copy_for_thread(dataset)

    assert copied.images["owner"] is copied
    assert copied.value is not dataset.value


def _by_closure(pipeline: Any) -> Any:
    return Held(lambda image: pipeline(image=image))


def _by_class(pipeline: Any) -> Any:
    return type("Owner", (Held,), {"transform": pipeline})(None)


@pytest.mark.parametrize("hold", [_by_closure, _by_class, lambda p: Held({p})])
def test_what_cannot_be_replaced_is_refused(hold: Any) -> None:
    """A pipeline of a function, a class or a set is one for all threads: the error says where it is."""
    with pytest.raises(ValueError, match=r"(?s)held by .*attribute of the dataset"):
        copy_for_thread(hold(crop()))
