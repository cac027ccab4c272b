"""What draws is seeded, wherever it is kept; what draws outside of a loader is not."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import albumentations as A  # the name its own documentation uses
import numpy as np
import pytest
import torch.utils.data as tud

from fastload import CachedDataset, seed_worker
from fastload.rng.entry_points import seeded_by
from fastload.rng.seeding import WorkerStreams
from tests.kit.datasets import Made
from tests.resume.loaders import seeded
from tests.rng import elsewhere_zoo as zoo
from tests.rng.draws_zoo import POSITIONS, corner, run
from tests.rng.pipelines_zoo import Corners, crop

if TYPE_CHECKING:
    from tests.kit.processes import Interpreter

WORKERS: dict[str, Any] = {"num_workers": 2}
THREADS: dict[str, Any] = {"num_workers": 2, "worker_type": "thread"}
AS_THEY_COME: dict[str, Any] = {"num_workers": 2, "in_order": False}


def flat(epochs: list[Any]) -> list[Any]:
    """The samples of all epochs."""
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(epochs)))


@pytest.mark.parametrize("place", zoo.PLACES)
def test_workers_draw_different_numbers(place: str) -> None:
    """Two processes or threads repeat no crop, and two runs are the same."""
    for way in (WORKERS, THREADS):
        first, again = (run(zoo.PLACES[place](), **way) for _ in range(2))
        crops = [str(sample) for sample in flat(first)]
        assert len(set(crops)) == len(crops)
        assert first == again


@pytest.mark.parametrize("place", zoo.PLACES)
def test_a_sample_draws_the_same_in_any_worker(place: str) -> None:
    """With seeding="sample": without workers, in one, in two, in threads, and in any order."""
    expected = sorted(flat(run(zoo.PLACES[place](), seeding="sample")), key=str)
    for way in ({"num_workers": 1}, WORKERS, THREADS, AS_THEY_COME):
        assert sorted(flat(run(zoo.PLACES[place](), seeding="sample", **way)), key=str) == expected


@pytest.mark.parametrize("place", ["new for each sample", "two", "either", "shared"])
def test_no_worker_draws_what_one_worker_draws(place: str) -> None:
    """In two epochs, as with a pipeline in an attribute."""
    alone, in_worker = (run(zoo.PLACES[place](), 2, num_workers=number) for number in (0, 1))

    assert alone == in_worker
    assert alone[0] != alone[1]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_seed_worker_in_torchs_loader(method: str) -> None:
    """It seeds what is in other modules, too."""
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": method}
    loader: Any = tud.DataLoader(
        Made(zoo.of_registry, 12), None, worker_init_fn=seed_worker, generator=seeded(), **options
    )
    assert len(set(loader)) == 12


LATE = """
import sys, torch
from fastload import DataLoader


class Late(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        import albumentations as A
        import numpy as np

        pixels = np.arange(6400, dtype=np.float32).reshape(80, 80, 1)
        return float(A.Compose([A.RandomCrop(8, 8)])(image=pixels)["image"][0, 0, 0])


for num_workers in (2, 1, 0):
    options = dict(num_workers=num_workers, seeding="sample")
    assert "albumentations" not in sys.modules
    print([float(batch) for batch in DataLoader(Late(), 1, generator=torch.Generator(), **options)])
"""


def test_a_library_that_is_imported_late(interpreter: Interpreter) -> None:
    """While the first sample is read: this sample's draws are its own already."""
    done = interpreter.run(LATE)

    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert others == [first, first]


# --- pipelines -------------------------------------------------------------------------------------------


def test_streams_are_named_by_the_order_of_first_calls() -> None:
    """Whatever a pipeline is called between, and however often, it draws from its own stream."""
    with seeded_by(WorkerStreams(7, "process")):
        first, second = crop(), crop()
        alone = [corner(first) for _ in range(4)], [corner(second) for _ in range(4)]
    with seeded_by(WorkerStreams(7, "process")):
        first, second = crop(), crop()
        turns = [(corner(first), corner(second)) for _ in range(4)]

    assert tuple(map(list, zip(*turns, strict=True))) == alone
    assert alone[0] != alone[1]


def test_a_transform_in_two_pipelines_draws_from_the_one_that_calls_it() -> None:
    """And from a stream of its own if it is called alone."""
    part = A.RandomCrop(8, 8)
    with seeded_by(WorkerStreams(7, "process")):
        both = [corner(pipeline) for pipeline in (A.Compose([part]), A.Compose([part]), part)]
    with seeded_by(WorkerStreams(7, "process")):
        apart = [corner(pipeline) for pipeline in (crop(), crop(), A.RandomCrop(8, 8))]

    assert both == apart


def test_a_composition_with_a_call_of_its_own() -> None:
    """Also one whose class is made while samples are read."""
    with seeded_by(WorkerStreams(7, "process")):
        late = type(
            "Late", (zoo.OwnCall,), {"__call__": lambda self, **data: zoo.OwnCall.__call__(self, **data)}
        )
        drawn = [[corner(cls([A.RandomCrop(8, 8)])) for _ in range(2)] for cls in (zoo.OwnCall, late)]
    with seeded_by(WorkerStreams(7, "process")):
        apart = [[corner(A.RandomCrop(8, 8)) for _ in range(2)] for _ in range(2)]

    assert drawn == apart


class Mosaic:
    """Each sample: a random crop of an image that the pipeline reads from another, cached dataset."""

    def __init__(self, cached: Any) -> None:
        self.cached = cached
        self.pipeline = A.Compose([A.Lambda(image=self._read), A.RandomCrop(2, 2)])

    def _read(self, image: Any, **_: Any) -> Any:
        return self.cached[int(image[0, 0, 0])]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.pipeline(image=np.full((1, 1, 3), index, np.uint8))["image"]


@pytest.mark.filterwarnings("ignore:Using lambda")
def test_a_pipeline_draws_the_same_beside_an_empty_and_a_full_cache() -> None:
    """Where it reads from a cache, the draws of the cached dataset's own pipeline are not its draws."""
    always = A.Compose([A.Compose([A.Transpose(p=1)])])  # throws coins that decide nothing
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    empty, full = (CachedDataset(Made(lambda _: always(image=image)["image"], 8), cache="ram") for _ in "ab")
    full.fill(num_workers=0, progress=False)

    epochs = [run(Mosaic(cached)) for cached in (empty, full)]
    assert epochs[0] == epochs[1]


def test_a_replay_is_what_was_drawn() -> None:
    """ReplayCompose records the draws of the stream, and replays them without a draw."""
    pipeline = A.ReplayCompose([A.RandomCrop(8, 8, p=1)])
    with seeded_by(WorkerStreams(7, "process")):
        done = pipeline(image=POSITIONS)
        again = A.ReplayCompose.replay(done["replay"], image=POSITIONS)

    assert np.array_equal(done["image"], again["image"])


def test_a_pipeline_can_be_copied_while_it_is_called() -> None:
    """The transforms have their own generators all the time, which copies get."""
    pipeline = crop()
    before = dict(vars(pipeline))
    with seeded_by(WorkerStreams(7, "process")):
        corner(pipeline)
        assert pipeline.py_random is not before["py_random"]
        assert vars(pipeline)["py_random"] is before["py_random"]


# --- outside of a loader ---------------------------------------------------------------------------------

OUTSIDE = """
import sys
import albumentations as A
import numpy as np

pixels = np.arange(6400, dtype=np.float32).reshape(80, 80, 1)
pipeline = A.Compose([A.OneOf([A.RandomCrop(8, 8), A.RandomCrop(9, 9)], p=1), A.RandomCrop(4, 4)], seed=3)
if "fastload" in sys.argv:
    import fastload

    iterator = iter(fastload.DataLoader([1, 2, 3], num_workers=int(sys.argv[2])))
    next(iterator)
print([float(pipeline(image=pixels)["image"][0, 0, 0]) for _ in range(9)])
"""


def test_pipelines_outside_of_a_loader_are_untouched(interpreter: Interpreter) -> None:
    """They draw what they draw without fastload, also between two batches."""
    ways = ((), ("fastload", "0"), ("fastload", "2"))
    printed = [interpreter.run(OUTSIDE.replace("sys.argv", repr(["", *way]))).stdout for way in ways]

    assert printed[0].startswith("[")
    assert printed[0] == printed[1] == printed[2]


def test_another_thread_is_outside() -> None:
    """A thread of the user's draws from a pipeline's own generators while this thread reads samples."""
    pipeline, twin = crop(5), crop(5)
    drawn: list[int] = []

    def draw(index: int) -> int:
        other = threading.Thread(target=lambda: drawn.append(corner(pipeline)))
        other.start(), other.join()
        return corner(pipeline)

    (found,) = run(Made(draw, 4))
    assert drawn == [corner(twin) for _ in range(4)]
    assert not set(found[0]) & set(drawn)


def test_seeding_torch_seeds_nothing() -> None:
    """Pipelines draw from their own generators."""
    (found,) = run(Corners(seed=5), seeding="torch")
    twin = crop(5)
    assert flat([found]) == [corner(twin) for _ in range(12)]


# --- threads ---------------------------------------------------------------------------------------------


def test_threads_call_a_shared_pipeline_one_at_a_time() -> None:
    """Pipelines keep values of the current call in their attributes, such as the encoders of labels."""
    calls = zoo.Calls()
    pipeline = A.Compose([calls])
    run(
        Made(lambda index: int(pipeline(image=POSITIONS)["image"][0, 0, 0]), 40),
        num_workers=4,
        worker_type="thread",
    )

    assert calls.most == 1
