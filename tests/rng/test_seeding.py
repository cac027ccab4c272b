"""seeding="worker": torch's own seeds for the libraries, random streams for albumentations' pipelines."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from typing import Any

import albumentations as A  # the name its own documentation uses
import numpy as np
import pytest
import torch
import torch.utils.data as tud

import fastload
from fastload import DataLoader
from fastload.augmentation.albumentations.library import Albumentations
from fastload.rng import entry_points
from fastload.rng.entry_points import seeded_by
from fastload.rng.seeding import WorkerStreams, seed_everything, seed_worker
from tests.kit import datasets
from tests.resume.loaders import seeded
from tests.rng import pipelines_zoo as zoo
from tests.rng.draws_zoo import Composed, Randomizable, corner, plain, run, state_of_globals
from tests.rng.pipelines_zoo import Corners, CropsBatch, crop

THREADS: dict[str, Any] = {"num_workers": 2, "worker_type": "thread"}
PROCESSES: dict[str, Any] = {"num_workers": 2}
AS_THEY_COME: dict[str, Any] = {"num_workers": 2, "in_order": False}


# --- seeds -----------------------------------------------------------------------------------------------


def test_seed_everything_seeds_all_three() -> None:
    """The same seed gives the three libraries and the returned generator the same draws; odd seeds none."""
    states = [[*state_of_globals(), seed_everything(2**40 + 3).get_state().tolist()] for _ in range(2)]
    states.append(state_of_globals())
    seed_everything(5)

    assert states[1][:3] == states[2]
    assert states[0][3] == states[1][3]
    assert all(one != other for one, other in zip(states[2], state_of_globals(), strict=True))
    for seed, error in ((-1, ValueError), (2**63, ValueError), (1.5, TypeError)):
        with pytest.raises(error):
            seed_everything(seed)


def stream(seed: int, user_seed: int | None = None) -> list[int]:
    pipeline = crop(user_seed)
    with seeded_by(WorkerStreams(seed, "process")):
        return [corner(pipeline) for _ in range(5)]


def test_a_stream_follows_from_the_worker_s_seed_and_the_user_s() -> None:
    """Each pair, None and 0 among them, has its own stream."""
    seeds = [0, 1, 1 << 32, (1 << 64) - 1]
    user_seeds = [None, 0, 1, 137, 1 << 32]
    streams = {tuple(stream(seed, user)) for seed in seeds for user in user_seeds}

    assert len(streams) == len(seeds) * len(user_seeds)
    assert stream(7, 5) == stream(7, 5)


def test_all_parts_of_a_pipeline_share_one_pair() -> None:
    """While one is called, in all of its compositions and transforms; no part has a third generator."""
    flip, replay = A.VerticalFlip(), A.ReplayCompose([A.RandomCrop(2, 2)])
    one_of = A.OneOf([A.HorizontalFlip(), A.Sequential([flip])])
    some_of = A.SomeOf([A.Compose([A.Transpose()])], n=1)
    boxes = A.BboxParams("coco", label_fields=[])
    outer = A.Compose([one_of, replay, some_of], bbox_params=boxes, keypoint_params=A.KeypointParams("xy"))
    parts = [outer, *outer, *one_of, flip, *replay, *some_of, some_of[0][0]]
    kinds = (random.Random, np.random.Generator)
    holders = [*parts, *outer.processors.values()]
    kept = {name for one in holders for name, value in vars(one).items() if isinstance(value, kinds)}

    assert kept == {"random_generator", "py_random"}
    with seeded_by(WorkerStreams(7, "process")):
        entry_points.THREAD.drawing.root = outer  # as within its call
        assert all(part.random_generator is outer.random_generator for part in parts)
        assert all(part.py_random is outer.py_random for part in parts)


def test_two_flips_of_one_pipeline_are_independent() -> None:
    """All four outcomes of two p=0.5 flips come equally often (chi-square)."""
    pipeline = A.Compose([A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)])
    image = np.array([[0, 1], [2, 3]], np.uint8)[..., None]
    with seeded_by(WorkerStreams(7, "process")):
        counts = Counter(int(pipeline(image=image)["image"][0, 0, 0]) for _ in range(2_000))

    # 3 degrees of freedom, p = 0.001; the seed is fixed, so no luck is involved
    assert sum((counts[pixel] - 500) ** 2 / 500 for pixel in range(4)) < 16.27


# --- seed_worker, in torch's loader ----------------------------------------------------------------------


def torchs(dataset: Any, method: str = "fork", init: Any = seed_worker) -> list[Any]:
    """The samples from torch's loader."""
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": method, "worker_init_fn": init}
    return list(tud.DataLoader(dataset, None, generator=seeded(), collate_fn=plain, **options))


def of_worker(worker: int, samples: list[Any]) -> list[int]:
    return [position for where, position in samples if where == worker]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_seed_worker_gives_each_worker_its_own_crops(method: str) -> None:
    """From the base seed alone, with any start method; torch repeats crops. Its own streams are torch's."""
    without, samples = torchs(zoo.Crops(), init=None), torchs(zoo.Crops())
    used = zoo.Crops()
    corner(used.transform)

    assert of_worker(0, without) == of_worker(1, without)
    assert len(of_worker(0, samples)) == len(of_worker(1, samples)) == 8
    assert not set(of_worker(0, samples)) & set(of_worker(1, samples))
    assert samples == torchs(used) == torchs(zoo.Crops(), method)
    assert torchs(datasets.Made(datasets.draws, 4)) == torchs(datasets.Made(datasets.draws, 4), init=None)


def test_seed_worker_is_for_workers() -> None:
    """Elsewhere it says where to pass it."""
    with pytest.raises(RuntimeError, match="worker_init_fn=fastload"):
        seed_worker(0)


# --- streams of a loader ---------------------------------------------------------------------------------


def method_of_the_dataset() -> Any:
    dataset = zoo.CollatingCorners()
    return dataset, {"collate_fn": dataset.collate}


# Each makes a dataset and the options of its loader anew. The pipeline is the dataset's, or the collate_fn's.
# test_recorded.py has more kinds.
HELD: dict[str, Any] = {
    "many at once": lambda: (datasets.Bulk(zoo.CornerOf(), 12), {}),
    "single samples of a subset": lambda: (tud.Subset(Corners(), range(10)), {"batch_size": None}),
    "two pipelines, one in the other": lambda: (zoo.ManyCorners(), {}),
    "a stream that draws in iter()": lambda: (zoo.CornerStream(list), {}),
    "a dataset that iterates a loader": lambda: (zoo.InnerLoader(), {}),
    "attribute": lambda: (Corners(), {"collate_fn": CropsBatch()}),
    "method of the dataset": method_of_the_dataset,
}


def read(kind: str, epochs: int = 2, **more: Any) -> list[Any]:
    dataset, options = HELD[kind]()
    return run(dataset, epochs, **options, **more)


@pytest.mark.parametrize("kind", HELD)
def test_no_worker_draws_what_one_worker_draws(kind: str) -> None:
    """In two epochs, which differ, with the same generator: bit for bit."""
    alone = read(kind)

    assert alone == read(kind, num_workers=1)
    assert len(set(map(str, itertools.chain.from_iterable(alone)))) == sum(map(len, alone))


@pytest.mark.slow
def test_workers_of_the_fork_server() -> None:
    """They seed the copy of the collate_fn that collates."""
    from_server = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    assert read("attribute", 1, **from_server) == read("attribute", 1)


@pytest.mark.parametrize(
    "way", [PROCESSES, THREADS, AS_THEY_COME, {**AS_THEY_COME, "memory_format": torch.channels_last}]
)
def test_two_workers_draw_different_numbers(way: Any) -> None:
    """No crop of a collate_fn is repeated; the dataset's first ones are those that earlier releases drew."""
    (epoch,) = run(zoo.ManyCorners(), collate_fn=CropsBatch(), **way)
    crops = [crop for _, crops in epoch for crop in crops]

    assert len(set(crops)) == len(crops) == 6
    firsts = sorted(samples[0] for samples, _ in epoch)
    assert firsts == [[54393, 12924, 60567], [59242, 17339, 22850], [59759, 55143, 33146]]


def test_the_loader_s_seed_decides() -> None:
    """Another generator gives other pixels; a resumed epoch begins its streams anew, from its own seed."""
    first, other = (run(Corners(), 2, generator=seeded(seed)) for seed in (1, 2))
    assert len({str(epoch) for epoch in (*first, *other)}) == 4

    loader, resumed = (DataLoader(Corners(), 4, generator=seeded(seed)) for seed in (1, 2))
    next(iter(loader))
    resumed.load_state_dict(loader.state_dict())
    assert plain(next(iter(resumed))) == first[0][0]


def test_the_libraries_generators_are_torch_s() -> None:
    """With a pipeline, the dataset draws from random, numpy and torch what it draws in torch's loader."""
    runs, pipeline = [], crop()
    for cls in (tud.DataLoader, DataLoader):
        seed_everything(1)
        dataset: Any = datasets.Made(lambda index: (corner(pipeline), datasets.draws(index))[1], 4)
        runs.append([plain(batch) for batch in cls(dataset, 2)])

    assert runs[0] == runs[1]


def test_pipelines_of_the_dataset_and_the_collate_fn_differ() -> None:
    """Also equal ones; and a Compose of the collate_fn around the dataset's does not change its stream."""
    for seed in (None, 5):
        with seeded_by(WorkerStreams(7, "process")):
            drawn = [[corner(pipeline) for _ in range(5)] for pipeline in (crop(seed), crop(seed))]
        assert drawn[0] != drawn[1]
        assert drawn[0] == stream(7, seed)
    inner = crop()
    outer = A.Compose([inner])
    with seeded_by(WorkerStreams(7, "process")):
        first = corner(inner)
        corner(outer)
        assert [first, *(corner(inner) for _ in range(4))] == stream(7)


def test_objects_of_monai_differ_between_workers() -> None:
    """They share one stream in each worker; without workers they draw from their own."""
    one, other = Randomizable(), Randomizable().set_random_state(1)
    found = []
    for seed in (1, 2):
        with seeded_by(WorkerStreams(seed, "process")):
            assert one.R is other.R
            found.append(int(one.R.randint(1 << 30)))
    before = one.R, other.R
    with seeded_by(WorkerStreams(1, "local")):
        assert before == (one.R, other.R)

    assert found[0] != found[1]


class Drawn:
    """Each sample: what an object of MONAI draws."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(self.transform.R.randint(1 << 30))


SEEDED: dict[str, Any] = {
    "a transform": lambda: Randomizable().set_random_state(1),
    "a composition": lambda: Composed(Randomizable()).set_random_state(1),
    "a part": lambda: Composed(Randomizable().set_random_state(1)).parts[0],
}


@pytest.mark.parametrize("kind", SEEDED)
def test_objects_of_monai_that_the_user_seeds_draw_torchs_numbers_with_seeding_torch(kind: str) -> None:
    """And others in workers by default."""
    expected = run(Drawn(SEEDED[kind]()), cls=torch.utils.data.DataLoader, **PROCESSES)
    for workers in (PROCESSES, THREADS):
        assert run(Drawn(SEEDED[kind]()), **workers) != expected
    assert run(Drawn(SEEDED[kind]()), seeding="torch", **PROCESSES) == expected


# --- in threads ------------------------------------------------------------------------------------------


def test_each_thread_has_its_own_pipeline() -> None:
    """No two threads call the same pipeline, and none calls the user's; other objects stay shared."""
    batch = CropsBatch()
    run(Corners(), batch_size=1, collate_fn=batch, **THREADS)
    callers: dict[int, set[int]] = {}
    for info, pipeline in batch.calls:
        callers.setdefault(id(pipeline), set()).add(info.id)

    assert sorted(map(sorted, callers.values())) == [[0], [1]]
    assert id(batch.pipeline) not in callers


def test_threads_share_a_pipeline_that_is_not_in_an_attribute() -> None:
    """A function holds its globals and its closure for all threads; each thread has its own draws."""
    batch = CropsBatch()
    for function in (zoo.global_crops_batch, lambda samples: batch(samples)):
        (expected,) = run(Corners(), collate_fn=function, **PROCESSES)
        assert run(Corners(), collate_fn=function, **THREADS) == [expected]


# --- the user's own --------------------------------------------------------------------------------------


# The holder of the pipeline, a dataset if it is not the holder, and options.
BETWEEN: dict[str, Any] = {
    "error": lambda: (Corners(error=ArithmeticError), None, {}),
    "another dataset": lambda: (Corners(), Corners(), {}),
    "threads": lambda: (Corners(), Corners(), THREADS),
    "inner loader by sample": lambda: (zoo.InnerLoader("sample"), None, {}),
    "inner loader, by sample": lambda: (zoo.InnerLoader(), None, {"seeding": "sample"}),
}


@pytest.mark.parametrize("way", BETWEEN)
def test_the_user_s_pipelines_have_their_own_generators_between_batches(way: str) -> None:
    """Those of a collate_fn and of its dataset; also after an error, and around an inner loader."""
    held, dataset, options = BETWEEN[way]()
    before = held.stand()
    iterator = iter(DataLoader(dataset or held, 4, collate_fn=CropsBatch(held.transform), **options))
    if way == "error":
        with pytest.raises(ArithmeticError):
            next(iterator)
        assert held.stand() == before
    for _ in iterator:
        assert held.stand() == before


def test_two_iterators_at_once() -> None:
    """Each has streams of its own: in turns they bring what they bring alone."""
    dataset = Corners()

    def iterator(seed: int) -> Any:
        return map(plain, DataLoader(dataset, 4, generator=seeded(seed)))

    alone = [list(iterator(seed)) for seed in (1, 2)]
    together = list(zip(iterator(1), iterator(2), strict=True))
    assert [list(part) for part in zip(*together, strict=True)] == alone


def draws_around(num_inner: int, index: int) -> Any:
    """The sample's generator before and after a loader whose samples have their own."""
    before = int(fastload.sample_rng().integers(1 << 40))
    list(DataLoader(Corners(num_inner), None, seeding="sample"))
    return before, int(fastload.sample_rng().integers(1 << 40))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_s_streams_outlive_an_inner_loader(num_workers: int) -> None:
    """With seeding="sample" a dataset draws on from its sample's streams after such a loader."""
    alone, inside = (
        run(datasets.Made(functools.partial(draws_around, num)), num_workers=num_workers, seeding="sample")
        for num in (0, 2)
    )

    assert alone == inside


# --- pipelines that seed themselves ----------------------------------------------------------------------


class BaseCompose:
    """As in AlbumentationsX."""

    def __init__(self) -> None:
        self._own = np.random.default_rng(0), random.Random(0)
        self.seed = None

    @property
    def random_generator(self) -> np.random.Generator:
        return self._own[0]

    @property
    def py_random(self) -> random.Random:
        return self._own[1]

    def set_random_state(self, random_generator: np.random.Generator, py_random: random.Random) -> None:
        self._own = random_generator, py_random

    def set_random_seed(self, seed: int | None) -> None:
        self.set_random_state(np.random.default_rng(seed), random.Random(seed))

    def _get_effective_seed(self, base_seed: int | None) -> int | None:
        return base_seed

    def __call__(self) -> tuple[bool, int]:
        """Whether it draws from its own generators, and a draw."""
        return self.py_random is self._own[1], int(self.random_generator.integers(1 << 30))


entry_points._hook(Albumentations.random_classes[1], BaseCompose)


def of_itself(pipeline: BaseCompose, index: int) -> tuple[bool, int]:
    return pipeline()


def test_pipelines_that_seed_themselves() -> None:
    """With "worker" they keep their seeding; "sample" gives each sample its stream, and changes nothing else.

    A worker thread is no worker to them, so fastload seeds them there.
    """
    for seeding in ("worker", "sample"):
        pipeline = BaseCompose()
        before = dict(vars(pipeline))
        dataset: Any = datasets.Made(functools.partial(of_itself, pipeline), 8)
        alone, in_workers, in_threads = (
            run(dataset, seeding=seeding, **way) for way in ({}, PROCESSES, THREADS)
        )
        is_own = {is_own for batch in (*alone[0], *in_workers[0]) for is_own in batch[0]}
        assert is_own == {seeding == "worker"}
        assert not any(is_own for batch in in_threads[0] for is_own in batch[0])
        assert seeding == "worker" or alone == in_workers == in_threads
        assert vars(pipeline) == before


# --- the user's seeds ------------------------------------------------------------------------------------


def seeds_it(worker_id: int) -> None:
    """A worker_init_fn as albumentations' own pages show it."""
    info: Any = fastload.get_worker_info()
    info.dataset.transform.set_random_seed(100 + worker_id)


class SeedsEach(Corners):
    """Seeds its pipeline for each sample."""

    def __getitem__(self, index: int) -> Any:
        self.transform.set_random_seed(index)
        return corner(self.transform)


@pytest.mark.parametrize("way", [PROCESSES, THREADS])
def test_what_a_worker_init_fn_seeds_is_the_user_s(way: Any) -> None:
    """The pipeline draws from the user's generators, as in torch's loader."""
    (found,) = run(Corners(), worker_init_fn=seeds_it, **way)
    expected = []
    for worker in range(2):
        pipeline = crop(100 + worker)
        expected.append([corner(pipeline) for _ in range(8 - 4 * worker)])

    assert [*found[0], *found[2]] == expected[0]
    assert found[1] == expected[1]


@pytest.mark.parametrize("seeding", ["worker", "sample"])
def test_what_the_dataset_seeds_for_a_sample_is_the_user_s(seeding: Any) -> None:
    """With workers and without; seeding="sample" takes back over with the next sample."""
    expected = [corner(crop(index)) for index in range(12)]
    for way in ({}, PROCESSES):
        (found,) = run(SeedsEach(), seeding=seeding, **way)
        assert list(itertools.chain(*found)) == expected


def test_a_pipeline_made_with_a_seed_is_not_the_user_s_to_draw_from() -> None:
    """Compose(seed=5) says which stream, also if it is made while samples are read; its parts follow it."""
    with seeded_by(WorkerStreams(7, "process")):
        part = A.RandomCrop(8, 8)
        pipeline = A.Compose([part], seed=5)
        assert [corner(pipeline) for _ in range(5)] == stream(7, 5)
        assert "_fastload_is_set" not in {**vars(part), **vars(pipeline)}
