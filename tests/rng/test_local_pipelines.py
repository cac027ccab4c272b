"""Pipelines without workers: they draw what worker 0 would draw, and stay the user's own between batches."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset
from torch.utils.data.datapipes.iter import IterableWrapper

import fastload
from fastload import CachedDataset, DataLoader
from fastload.rng import takeover as module
from fastload.rng.takeover import Takeover
from tests.rng import pipelines_zoo as zoo
from tests.rng.draws_zoo import Pictures, plain

if TYPE_CHECKING:
    from tests.kit.processes import Interpreter


def run(dataset: Any, num_workers: int, epochs: int = 2, **options: Any) -> list[Any]:
    """What each epoch brings, as lists."""
    options = {"batch_size": 4, "generator": fastload.seed_everything(7), **options}
    with DataLoader(dataset, num_workers=num_workers, **options) as loader:
        return [[plain(batch) for batch in loader] for _ in range(epochs)]


DATASETS: dict[str, Any] = {
    "one pipeline": lambda: (zoo.Corners(), {"shuffle": True, "collate_fn": torch.tensor}),
    "many at once": lambda: (zoo.CornersAtOnce(), {}),
    "single samples of a subset": lambda: (Subset(zoo.Corners(), range(10)), {"batch_size": None}),
    "two pipelines, one in the other": lambda: (zoo.ManyCorners(), {}),
    "a pipeline with a seed": lambda: (zoo.Corners(seed=5), {}),
    "a stream": lambda: (zoo.CornerStream(), {}),
    "a stream that draws in iter()": lambda: (zoo.EagerCornerStream(), {}),
    "a cached dataset": lambda: (CachedDataset(Pictures(), transform=zoo.corner_of_sample), {}),
    "a dataset that iterates a loader": lambda: (zoo.InnerLoader(), {}),
}


class TestStreams:
    @pytest.mark.parametrize("kind", DATASETS)
    def test_no_worker_draws_what_one_worker_draws(self, kind: str) -> None:
        """In two epochs, with the same generator: bit for bit."""
        dataset, options = DATASETS[kind]()
        alone = run(dataset, 0, **options)
        dataset, options = DATASETS[kind]()

        assert alone == run(dataset, 1, **options)
        assert alone[0] != alone[1]

    def test_datapipes_too(self) -> None:
        """Through torch's own iterator, in the first epoch: for the next one torch draws other base seeds."""
        runs = [
            run(IterableWrapper(range(8)).map(zoo.CornerOf()), num_workers, 1) for num_workers in (0, 0, 1)
        ]

        assert runs[0] == runs[1] == runs[2]

    def test_the_loader_s_seed_decides(self) -> None:
        """The same generator gives the same pixels, another one others, and so does the next epoch."""
        first, again, other = (
            run(zoo.Corners(), 0, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)
        )

        assert first == again
        assert len({str(epoch) for epoch in (*first, *other)}) == 4

    def test_a_resumed_epoch_begins_its_streams_anew(self) -> None:
        """The base seed is the interrupted epoch's: so are the first draws of its pipelines."""
        loader = DataLoader(zoo.Corners(), 4, generator=torch.Generator().manual_seed(1))
        first = plain(next(iter(loader)))
        state = loader.state_dict()
        resumed = DataLoader(zoo.Corners(), 4, generator=torch.Generator().manual_seed(2))
        resumed.load_state_dict(state)

        assert plain(next(iter(resumed))) == first

    def test_seed_albumentations_false_leaves_them_alone(self) -> None:
        """As in torch: they draw from what they have, and use it up."""
        dataset, twin = zoo.Corners(seed=5), zoo.Corners(seed=5)
        found = [
            value for batch in DataLoader(dataset, 4, seed_albumentations=False) for value in batch.tolist()
        ]

        assert found == [twin[index] for index in range(len(twin))]

    def test_the_libraries_generators_are_torch_s(self) -> None:
        """What the dataset draws from random, numpy and torch is what it draws in torch's loader."""
        runs = []
        for cls in (torch.utils.data.DataLoader, DataLoader):
            fastload.seed_everything(1)
            runs.append([plain(batch) for batch in cls(zoo.DrawsAndCrops(), 2)])

        assert runs[0] == runs[1]


class TestTheUsersOwn:
    """A pipeline in the user's own process has its own generators whenever the user's code looks at it."""

    @pytest.mark.parametrize(("rng", "error"), [("worker", ArithmeticError), ("sample", KeyboardInterrupt)])
    def test_after_an_error(self, rng: Any, error: Any) -> None:
        """An error in the middle of a batch, or Ctrl-C, and the streams go on with the next batch."""
        dataset = zoo.FailsOnce(error)
        before = dataset.stand()
        iterator = iter(DataLoader(dataset, 4, rng=rng))
        with pytest.raises(error):
            next(iterator)
        assert dataset.stand() == before
        next(iterator)

        assert dataset.stand() == before

    def test_after_a_pipeline_that_cannot_be_set(self) -> None:
        """A transform whose set_random_state() raises is put back, too."""
        dataset = zoo.Corners()
        dataset.other = zoo.Stubborn()
        before = dataset.stand()
        for rng in ("worker", "sample"):
            with pytest.raises(ZeroDivisionError):
                next(iter(DataLoader(dataset, 4, rng=rng)))  # type: ignore[arg-type]
            assert dataset.stand() == before

    def test_two_iterators_at_once(self) -> None:
        """Each has streams of its own: in turns they bring what they bring alone."""
        dataset = zoo.Corners()
        before = dataset.stand()

        def iterator(seed: int) -> Any:
            return map(plain, DataLoader(dataset, 4, generator=torch.Generator().manual_seed(seed)))

        alone = [list(iterator(seed)) for seed in (1, 2)]
        together = list(zip(iterator(1), iterator(2), strict=True))

        assert [list(part) for part in zip(*together, strict=True)] == alone
        assert dataset.stand() == before

    @pytest.mark.parametrize(("rng", "first_to_end"), [("worker", 0), ("worker", 1), ("sample", 0)])
    def test_two_threads(self, first_to_end: int, rng: Any) -> None:
        """Two threads in the middle of a batch of one dataset at once; whichever ends first."""
        dataset = zoo.Waits()
        before = dataset.stand()
        random_state = torch.get_rng_state()
        threads = [threading.Thread(target=self._first, args=(dataset, rng, n)) for n in range(2)]
        for number, thread in enumerate(threads):
            thread.start()
            assert dataset.is_in[number].wait(30)
        for number in (first_to_end, 1 - first_to_end):
            dataset.may_go[number].set()
            threads[number].join(30)

        assert dataset.stand() == before
        assert rng == "worker" or torch.equal(torch.get_rng_state(), random_state)

    @staticmethod
    def _first(dataset: Any, rng: Any, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        next(iter(DataLoader(dataset, 1, sampler=[number], rng=rng, generator=generator)))

    @pytest.mark.parametrize("rng", ["worker", "sample"])
    def test_a_dataset_that_iterates_a_loader_over_itself(self, rng: Any) -> None:
        """The inner loader's batches leave the outer batch's streams, and the user's own, as they were."""
        dataset = zoo.Recursive()
        before = dataset.stand()
        for _ in DataLoader(dataset, 2, rng=rng):
            assert dataset.stand() == before

    def test_a_child_that_was_forked_while_a_thread_held_the_lock(self) -> None:
        """The child waits for no lock, because no thread of its own holds it."""
        is_held, may_go = threading.Event(), threading.Event()

        def hold() -> None:
            with module._lock:
                is_held.set()
                may_go.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        assert is_held.wait(30)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            with Takeover(dict, lambda: None):
                pass
            os._exit(0)
        may_go.set()
        thread.join(30)

        assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_s_streams_outlive_an_inner_loader(num_workers: int) -> None:
    """With rng="sample" a dataset draws on from its sample's streams after it has iterated such a loader."""
    alone, around = (
        run(zoo.DrawsAroundALoader(iterates=iterates), num_workers, 1, rng="sample")
        for iterates in (False, True)
    )

    assert alone == around


class TestCost:
    def test_without_albumentations_there_is_no_search(self, interpreter: Interpreter) -> None:
        """A process that has not imported albumentations has no pipelines, and searches for none."""
        program = (
            "import sys, fastload\n"
            "from fastload.rng import takeover\n"
            "takeover.pipeline_streams = None\n"
            "assert len(list(fastload.DataLoader(range(8), 4))) == 2\n"
            "assert 'albumentations' not in sys.modules\n"
        )

        done = interpreter.run(program)

        assert done.returncode == 0, done.stderr


# --- takeovers -------------------------------------------------------------------------------------------

THINGS = "abc"


@pytest.mark.slow
@settings(deadline=None)
@given(st.data())
def test_takeovers_in_any_order(data: Any) -> None:
    """Each thing is what the latest open takeover made it; after all of them it is what it was."""
    values = dict.fromkeys(THINGS, "own")
    is_open: list[tuple[str, str, Takeover]] = []
    # What happens, as the number of the takeover that ends, or the things of a new one.
    steps = data.draw(st.lists(st.integers(0, 5) | st.sets(st.sampled_from(THINGS)), max_size=12))
    for number, step in enumerate(steps):
        if isinstance(step, set):
            is_open.append((f"number {number}", "".join(step), _taken(values, step, f"number {number}")))
        elif step < len(is_open):
            is_open.pop(step)[2].__exit__()
        for thing in THINGS:
            names = [name for name, things, _ in is_open if thing in things]
            assert values[thing] == (names[-1] if names else "own")
    for _, _, last in is_open:
        last.__exit__()

    assert values == dict.fromkeys(THINGS, "own")


def _taken(values: dict[str, str], things: set[str], name: str) -> Takeover:
    def find() -> Any:
        return {
            thing: lambda thing=thing, value=values[thing]: values.__setitem__(thing, value)
            for thing in things
        }

    takeover = Takeover(find, lambda: values.update(dict.fromkeys(things, name)))
    takeover.__enter__()
    return takeover
