"""Seeds: torch's own for the libraries, independent streams for albumentations' pipelines."""

from __future__ import annotations

import collections
import functools
import pickle
import random
from typing import TYPE_CHECKING, Any

import albumentations as A  # the name its own documentation uses
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import fastload
from fastload.rng.seeding import seed_albumentations, seed_everything, seed_libraries, seed_worker
from tests.rng import pipelines_zoo as zoo

if TYPE_CHECKING:
    from tests.kit.processes import Interpreter


NUM_DRAWS = 2_000
CHI_SQUARE_LIMIT = 16.27  # 3 degrees of freedom, p = 0.001; the seeds are fixed, so no luck is involved

METHODS = ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.thorough)]


@pytest.fixture(autouse=True)
def keep_random_state() -> Any:
    """Tests that seed the libraries leave this process's streams as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def load(dataset: Any, method: str, **options: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(11)
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=2,
        multiprocessing_context=method,
        generator=generator,
        collate_fn=list,
        **options,
    )
    return list(loader)


@functools.cache
def crops(method: str, *, is_seeded: bool) -> list[tuple[int, int]]:
    """The samples of `zoo.Crops`; kept for the tests below."""
    return load(zoo.Crops(), method, worker_init_fn=seed_worker if is_seeded else None)


def crops_of(worker: int, samples: list[Any]) -> list[int]:
    return [position for where, position in samples if where == worker]


# --- the libraries ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("worker_id", [0, 3])
def test_libraries_draw_what_they_draw_in_torchs_worker(worker_id: int) -> None:
    """seed_libraries gives the streams of a real torch worker with the same base seed."""
    workers = worker_id + 1
    loader = DataLoader(
        zoo.Draws(),
        batch_size=None,
        num_workers=workers,
        generator=torch.Generator().manual_seed(3),
        multiprocessing_context="fork",
    )
    theirs = list(loader)[worker_id]
    base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(3)))

    seed = seed_libraries(base_seed, worker_id)

    assert seed == base_seed + worker_id
    assert torch.initial_seed() == seed
    assert theirs == pytest.approx(zoo.Draws()[0], abs=0)


def test_albumentations_is_not_imported(interpreter: Interpreter) -> None:
    """Neither importing this module nor searching a dataset imports albumentations."""
    code = (
        "import sys; from fastload.rng.pipelines import find_pipelines; "
        "assert find_pipelines({'a': [object()]}) == []; sys.exit('albumentations' in sys.modules)"
    )

    assert interpreter.run(code).returncode == 0


# --- in workers ------------------------------------------------------------------------------------------


def test_torchs_loader_repeats_crops_across_workers() -> None:
    """The fault that we mend: albumentations 2.0.8 draws the same crops in every worker of torch's loader."""
    samples = crops("fork", is_seeded=False)

    assert crops_of(0, samples) == crops_of(1, samples)


@pytest.mark.parametrize("method", METHODS)
def test_seed_worker_gives_each_worker_its_own_crops(method: str) -> None:
    """With seed_worker no crop of one worker is repeated by the other."""
    samples = crops(method, is_seeded=True)

    assert len(crops_of(0, samples)) == len(crops_of(1, samples)) == 8
    assert not set(crops_of(0, samples)) & set(crops_of(1, samples))


@pytest.mark.slow
def test_crops_are_the_same_for_the_same_base_seed_and_any_start_method() -> None:
    """The base seed alone decides the crops, whatever state the parent's pipeline is in."""
    used = zoo.Crops()
    zoo.corner(used.transform)

    samples = load(used, "fork", worker_init_fn=seed_worker)

    assert samples == crops("fork", is_seeded=True) == crops("forkserver", is_seeded=True)


@pytest.mark.slow
def test_torchs_own_streams_are_left_as_torch_seeded_them() -> None:
    """seed_worker draws nothing: the libraries' streams are those of a worker without it."""
    assert load(zoo.Draws(), "fork", worker_init_fn=seed_worker) == load(zoo.Draws(), "fork")


def test_then_calls_functions_in_order_after_seeding() -> None:
    """Functions added by then() run in the order given, each with freshly seeded streams before it."""
    chain = seed_worker.then(zoo.append_zero).then(zoo.append_one)

    (calls,) = load(zoo.Calls(), "fork", worker_init_fn=chain)

    base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(11)))
    expected = random.Random(base_seed)
    assert [tuple(call) for call in calls] == [("zero", expected.random()), ("one", expected.random())]


def test_then_refuses_what_cannot_be_called() -> None:
    """then() names what it was given when that is not a function."""
    with pytest.raises(TypeError, match=r"^then\(\) expects a function of the worker's id, got 3$"):
        seed_worker.then(3)  # type: ignore[arg-type]


def test_pickling_keeps_the_chain() -> None:
    """seed_worker and chains of it survive pickling, equal by value."""
    chain = seed_worker.then(zoo.append_zero)

    assert pickle.loads(pickle.dumps(seed_worker)) == seed_worker
    assert pickle.loads(pickle.dumps(chain)) == chain != seed_worker
    assert (chain.functions, seed_worker.functions) == ((zoo.append_zero,), ())


def test_outside_a_worker_it_says_where_it_belongs() -> None:
    """Called in the parent, seed_worker raises and tells how it is meant to be used."""
    with pytest.raises(RuntimeError, match="worker_init_fn=fastload"):
        seed_worker(0)


# --- independence ----------------------------------------------------------------------------------------


def flips(pipeline: A.Compose, num_draws: int) -> collections.Counter[tuple[bool, bool]]:
    """How often each of the four outcomes of a horizontal and a vertical flip came."""
    image = np.array([[0, 1], [2, 3]], np.uint8)[..., None]
    outcomes: collections.Counter[tuple[bool, bool]] = collections.Counter()
    for _ in range(num_draws):
        top_left = int(pipeline(image=image)["image"][0, 0, 0])
        outcomes[(top_left in (1, 3), top_left in (2, 3))] += 1
    return outcomes


def chi_square(counts: collections.Counter[tuple[bool, bool]]) -> float:
    """Against four equally likely outcomes."""
    expected = counts.total() / 4
    outcomes = [(a, b) for a in (False, True) for b in (False, True)]
    return sum((counts[outcome] - expected) ** 2 / expected for outcome in outcomes)


def two_flips() -> A.Compose:
    return A.Compose([A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)])


def test_two_flips_of_one_pipeline_are_independent() -> None:
    """After seed_albumentations all four outcomes of two p=0.5 flips come equally often."""
    pipeline = two_flips()
    seed_albumentations(pipeline, 7)

    assert chi_square(flips(pipeline, NUM_DRAWS)) < CHI_SQUARE_LIMIT


# --- what the stream depends on --------------------------------------------------------------------------


def stream(seed: int, user_seed: int | None = None) -> list[int]:
    pipeline = zoo.crop(user_seed)
    seed_albumentations(pipeline, seed)
    return [zoo.corner(pipeline) for _ in range(5)]


def test_the_same_seed_gives_the_same_stream() -> None:
    """seed_albumentations is a pure function of its seed, the pipelines and their seeds, called twice too."""
    pipeline = zoo.crop(5)
    seed_albumentations(pipeline, 7)
    seed_albumentations(pipeline, 7)

    assert [zoo.corner(pipeline) for _ in range(5)] == stream(7, 5) == stream(7, 5)


def test_every_seed_gives_another_stream() -> None:
    """Worker seeds and user seeds are mixed: each pair, None and 0 among them, has its own stream."""
    seeds = [0, 1, 1 << 32, (1 << 64) - 1]
    user_seeds = [None, 0, 1, 137, 1 << 32]

    streams = {tuple(stream(seed, user)) for seed in seeds for user in user_seeds}

    assert len(streams) == len(seeds) * len(user_seeds)


# --- what a pipeline is made of --------------------------------------------------------------------------


def test_all_parts_of_a_pipeline_share_one_pair() -> None:
    """The pair reaches OneOf, Sequential, SomeOf, ReplayCompose, an inner Compose and their transforms."""
    outer, parts = zoo.nested()
    seed_albumentations(outer, 7)

    assert all(part.random_generator is outer.random_generator for part in parts)
    assert all(part.py_random is outer.py_random for part in parts)


def test_no_part_keeps_a_generator_elsewhere() -> None:
    """Of albumentations 2.0.8: it keeps its generators in two attributes only, processors keep none."""
    outer, parts = zoo.nested()
    holders = [outer, *parts, *outer.processors.values()]
    kept = {
        name
        for holder in holders
        for name, value in vars(holder).items()
        if isinstance(value, (random.Random, np.random.Generator))
    }

    assert kept == {"random_generator", "py_random"}


def test_seed_everything_seeds_all_three() -> None:
    """After the same seed the three libraries and the returned generator draw the same again."""

    def draws() -> list[Any]:
        generator = seed_everything(2**40 + 3)
        return [
            random.random(),
            np.random.rand(),
            float(torch.rand(1)),
            float(torch.rand(1, generator=generator)),
        ]

    first = draws()
    assert first == draws()
    assert len(set(first[:3])) == 3


@pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (2**63, ValueError), (1.5, TypeError)])
def test_odd_seeds_are_refused(seed: Any, error: type[Exception]) -> None:
    """A seed is an int that all three libraries can take."""
    with pytest.raises(error):
        seed_everything(seed)


# --- pipelines that seed themselves ----------------------------------------------------------------------


class BaseCompose:
    """As in AlbumentationsX: `random_generator` is a property over other attributes."""

    def __init__(self) -> None:
        self._configured_random_generator = np.random.default_rng(0)
        self._configured_py_random = random.Random(0)
        self._manual_random_state = False

    @property
    def random_generator(self) -> np.random.Generator:
        return self._configured_random_generator

    @property
    def py_random(self) -> random.Random:
        return self._configured_py_random

    def set_random_state(self, random_generator: np.random.Generator, py_random: random.Random) -> None:
        self._configured_random_generator = random_generator
        self._configured_py_random = py_random
        self._manual_random_state = True

    def _get_effective_seed(self, base_seed: int | None) -> int | None:
        return base_seed


BaseCompose.__module__ = "albumentations.core.composition"


class Samples:
    """Whether the pipeline has been seeded by somebody else, and a draw."""

    def __init__(self) -> None:
        self.pipeline = BaseCompose()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        is_seeded = self.pipeline._manual_random_state
        return torch.tensor([is_seeded, self.pipeline.random_generator.integers(1 << 30)])


def load_all(dataset: Samples, num_workers: int, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    options = {"multiprocessing_context": "fork", **options} if num_workers else options
    with fastload.DataLoader(
        dataset, batch_size=2, num_workers=num_workers, generator=generator, **options
    ) as loader:
        return torch.cat(list(loader))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_they_keep_their_seeding(num_workers: int) -> None:
    """With rng="worker" fastload does not seed them, without workers and in worker processes."""
    assert not load_all(Samples(), num_workers)[:, 0].any()


def test_they_are_seeded_outside_of_worker_processes() -> None:
    """A worker thread is no worker to them, so that fastload seeds them there."""
    pipeline = BaseCompose()

    assert seed_albumentations(pipeline, 1) == 1
    assert pipeline._manual_random_state


def test_samples_have_streams_of_their_own() -> None:
    """With rng="sample" they draw the same for any number of workers."""
    first, second = load_all(Samples(), 0, rng="sample"), load_all(Samples(), 2, rng="sample")

    assert torch.equal(first, second)
    assert first[:, 0].all()


def test_they_are_restored_after_each_batch() -> None:
    """With rng="sample" and no workers the pipeline has its own generators again afterwards."""
    dataset = Samples()
    before = dict(vars(dataset.pipeline))
    load_all(dataset, 0, rng="sample")

    assert vars(dataset.pipeline) == before
