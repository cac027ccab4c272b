"""rng="sample": generators that a dataset or a collate_fn keeps are seeded for each sample."""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from fastload import CachedDataset, DataLoader
from fastload.rng.pipelines import Search
from fastload.rng.takeover import put_back
from fastload.system.logs import say_once
from tests.rng.draws_zoo import Composed, Dice, Kept, Randomizable
from tests.rng.generators_zoo import (
    KINDS,
    NUM_SAMPLES,
    Arrays,
    Compose,
    Drawn,
    DrawsFromModule,
    Holder,
    Mixing,
    Noise,
    OwnBits,
    Plain,
    WithNumber,
    draw,
)

WORKERS: list[Any] = [
    pytest.param({"num_workers": 2, "multiprocessing_context": "fork"}, id="fork"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "spawn"}, id="spawn", marks=pytest.mark.slow),
    pytest.param({"num_workers": 3, "worker_method": "thread"}, id="threads"),
    pytest.param({"num_workers": 2, "in_order": False}, id="torch's iterator"),
]


@pytest.fixture(autouse=True)
def _says_again() -> None:
    say_once.cache_clear()


def plain(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.tolist() if hasattr(x, "tolist") else x, batch)


def run(dataset: Any, epochs: int = 2, **options: Any) -> list[Any]:
    """All batches of some epochs, in the order of their indices."""
    options = {"batch_size": 3, "generator": torch.Generator().manual_seed(5), **options}
    with DataLoader(dataset, rng="sample", **options) as loader:
        found = [[plain(batch) for batch in loader] for _ in range(epochs)]
    return [sorted(batches, key=repr) for batches in found]


@pytest.mark.parametrize("options", WORKERS)
def test_workers_draw_what_the_parent_draws(options: dict[str, Any]) -> None:
    """For every kind of generator, with workers of any kind, in two epochs."""
    expected = run(Drawn(*[make() for make in KINDS.values()]))

    assert run(Drawn(*[make() for make in KINDS.values()]), **options) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_samples_epochs_and_draws_differ(kind: str) -> None:
    """No two draws of two epochs are the same, although the generator is the same."""
    found = run(Drawn(KINDS[kind]()))
    numbers = torch.tensor([[batch[1] for batch in batches] for batches in found]).flatten().tolist()

    assert len(numbers) == len(set(numbers)) == 2 * NUM_SAMPLES * 2


@pytest.mark.parametrize("kind", KINDS)
def test_two_generators_of_a_kind_differ(kind: str) -> None:
    """Each has a random stream of its own, even if the user gave both one seed."""
    ((batch, *_),) = run(Drawn(KINDS[kind](), KINDS[kind]()), epochs=1)
    first, second = batch[1]

    assert first != second


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_before_the_sample_does_not_matter(kind: str) -> None:
    """Numbers that an earlier draw left behind are forgotten."""
    used = KINDS[kind]()
    draw(used)

    assert run(Drawn(used)) == run(Drawn(KINDS[kind]()))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_a_resumed_epoch(kind: str, num_workers: int) -> None:
    """In mid-epoch, with another number of workers."""
    options: dict[str, Any] = {"batch_size": 3, "shuffle": True, "rng": "sample"}
    loader = DataLoader(
        Drawn(KINDS[kind]()), num_workers=1, generator=torch.Generator().manual_seed(1), **options
    )
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [plain(batch) for batch in iterator]
    again = DataLoader(Drawn(KINDS[kind]()), num_workers=num_workers, generator=torch.Generator(), **options)
    again.load_state_dict(state)

    assert [plain(batch) for batch in again] == rest


def subset() -> Any:
    return Subset(Drawn(random.Random(1)), range(6))


def concatenated() -> Any:
    return ConcatDataset([Drawn(random.Random(1)), Drawn(np.random.default_rng(1))])


def nested() -> Any:
    return Plain(Compose(Compose(Noise(random.Random(1))), Noise(torch.Generator())))


def partial() -> Any:
    return Plain(functools.partial(Noise.__call__, Noise(random.Random(1))))


def cached() -> Any:
    return CachedDataset(Arrays(), transform=WithNumber())


@pytest.mark.parametrize("options", [way for way in WORKERS if way.id != "spawn"])
@pytest.mark.parametrize("make", [subset, concatenated, nested, partial, cached])
def test_wherever_it_is_held(make: Any, options: dict[str, Any]) -> None:
    """In nested transforms, partials and wrapped datasets."""
    assert run(make(), **options) == run(make())


@pytest.mark.parametrize("options", WORKERS)
def test_a_collate_fn_draws_anew_for_each_batch(options: dict[str, Any]) -> None:
    """The same number for a batch with workers of any kind, and another one for each batch."""
    expected = run(Arrays(), collate_fn=Mixing(np.random.default_rng(1)))
    numbers = [number for batches in expected for _, number in batches]

    assert run(Arrays(), collate_fn=Mixing(np.random.default_rng(1)), **options) == expected
    assert len(set(numbers)) == len(numbers) == 8


def test_a_generator_of_the_collate_fn_shifts_nothing_in_the_dataset() -> None:
    """The dataset's generators draw the same with it and without it."""
    make = KINDS["Random"]
    with_one = run(Drawn(make()), collate_fn=Mixing(make()))

    assert [[batch for batch, _ in batches] for batches in with_one] == run(Drawn(make()))


def test_a_generator_that_both_hold_is_one() -> None:
    """What the dataset and the collate_fn share is one object in threads, too."""
    results = []
    for options in ({}, {"num_workers": 2, "worker_method": "thread"}):
        shared = np.random.default_rng(1)
        results.append(run(Drawn(shared), collate_fn=Mixing(shared), **options))

    assert results[0] == results[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "worker_method": "thread"}], ids=str)
def test_the_users_generators_are_as_they_were(kind: str, options: dict[str, Any]) -> None:
    """Between batches the user's own generator goes on as if no sample had been read."""
    generator, twin = KINDS[kind](), KINDS[kind]()
    drawn = [draw(generator) for _ in DataLoader(Drawn(generator), batch_size=3, rng="sample", **options)]

    assert drawn == [draw(twin) for _ in range(4)]


@pytest.mark.parametrize("kind", KINDS)
def test_also_after_an_error(kind: str) -> None:
    """A sample that raises leaves the generator as it was."""
    generator = KINDS[kind]()

    class Fails(Drawn):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        next(iter(DataLoader(Fails(generator), rng="sample")))

    assert draw(generator) == draw(KINDS[kind]())


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_is_put_back_draws_the_same(kind: str) -> None:
    """The numbers that a generator has left from its last draw are a part of its state."""
    generator = KINDS[kind]()
    draw(generator)
    restore = put_back(generator)
    first = [draw(generator) for _ in range(3)]
    restore()

    assert [draw(generator) for _ in range(3)] == first


def test_a_hit_draws_what_a_miss_draws() -> None:
    """A source that draws from the generator of its transform shifts nothing, once it is cached."""
    shared = np.random.default_rng(1)

    class Source(Arrays):
        rng = shared

        def __getitem__(self, index: int) -> Any:
            draw(self.rng)
            return super().__getitem__(index)

    dataset = CachedDataset(Source(), transform=WithNumber())
    dataset.transform.options["rng"] = shared
    miss, hit = run(dataset, epochs=1), run(dataset, epochs=1)

    assert dataset.cache_info().num_cached == NUM_SAMPLES
    assert miss == hit


@pytest.mark.parametrize("seed_pipelines", [True, False])
def test_the_generators_of_pipelines_are_theirs(seed_pipelines: bool) -> None:
    """Those of albumentations and MONAI are seeded by their own rule, and with False not at all."""
    found = Search(Dice(), Composed(Randomizable()))
    kept = Kept()
    before = kept.stand()
    for _ in DataLoader(kept, batch_size=4, rng="sample", seed_pipelines=seed_pipelines):
        pass

    assert found.of_dataset.generators == found.of_collate.generators == []
    assert (kept.stand() == before) is seed_pipelines


def test_the_libraries_generators_are_not_the_datasets() -> None:
    """Who keeps numpy's own RandomState in an attribute draws what numpy.random draws."""

    class FromNumpy(Arrays):
        rng = np.random.mtrand._rand

        def __getitem__(self, index: int) -> Any:
            return self.rng.randint(1 << 30)

    class FromModule(Arrays):
        def __getitem__(self, index: int) -> Any:
            return np.random.randint(1 << 30)

    assert run(FromNumpy()) == run(FromModule())


def test_workers_of_rng_worker_keep_their_generators() -> None:
    """The default leaves them as torch does: each worker goes on with its copy."""
    loader = DataLoader(Drawn(np.random.default_rng(1)), batch_size=3, num_workers=2)
    first, second, *_ = [plain(batch) for batch in loader]

    assert first[1] == second[1]


class TestWarnings:
    @staticmethod
    def warned(caplog: Any, dataset: Any, **options: Any) -> list[str]:
        """What two epochs of two loaders log."""
        for _ in range(2):
            run(dataset, **options)
        return [record.getMessage() for record in caplog.records if record.name == "fastload"]

    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize(
        ("generator", "what"),
        [
            (np.random.Generator(OwnBits(1)), "Generator(OwnBits) at "),
            (np.random.RandomState(np.random.PCG64(1)), "RandomState(PCG64) at "),
            (random.SystemRandom(), "<random.SystemRandom object at "),
        ],
        ids=["unknown bits", "other bits", "system"],
    )
    def test_what_cannot_be_seeded(self, generator: Any, what: str, num_workers: int, caplog: Any) -> None:
        """One warning, from the parent, names the attribute and says what to do."""
        (text,) = self.warned(caplog, Plain(Compose(Noise(generator))), num_workers=num_workers)

        assert text.startswith(f'rng="sample" does not seed dataset.transform.transforms[0].value, {what}')
        assert "fastload.sample_generator()" in text

    def test_what_threads_share(self, caplog: Any) -> None:
        """A generator that a method finds in its module cannot be copied for each thread."""
        options = {"num_workers": 2, "worker_method": "thread"}
        (text,) = self.warned(caplog, DrawsFromModule(), **options)

        assert text.startswith('rng="sample" does not seed dataset.__getitem__.module_generator, which all ')
        assert "<function DrawsFromModule.__getitem__" in text
        assert 'worker_method="process"' in text

    def test_processes_seed_what_threads_share(self, caplog: Any) -> None:
        """Workers that are processes have their own module, and there is nothing to warn of."""
        expected = run(DrawsFromModule())

        assert run(DrawsFromModule(), num_workers=2) == expected
        assert caplog.records == []

    def test_paths_name_every_kind_of_holder(self, caplog: Any) -> None:
        """Keys, positions, slots, closures and the arguments of partials."""
        bad = random.SystemRandom()
        inner = functools.partial(print, {"key": [0, bad]})

        def collate(samples: Any) -> Any:
            return inner is None

        (text,) = self.warned(caplog, Arrays(), collate_fn=collate)

        assert "seed collate_fn.inner.args[0]['key'][1], <random.SystemRandom " in text

    def test_the_modules_of_installed_packages_keep_theirs(self, caplog: Any, monkeypatch: Any) -> None:
        """A generator in the module of a library, which may name its files with it, is left alone."""
        module = sys.modules[DrawsFromModule.__module__]
        monkeypatch.setattr(module, "__file__", "/lib/python3/site-packages/library.py")
        options = {"num_workers": 2, "worker_method": "thread"}

        assert self.warned(caplog, DrawsFromModule(), **options) == []

    def test_nothing_is_said_of_what_is_seeded(self, caplog: Any) -> None:
        """Generators of every kind, a set of them included, in processes."""
        dataset = Holder({random.Random(1)})
        dataset_of_all = Drawn(*[make() for make in KINDS.values()])
        dataset_of_all.more = dataset

        assert self.warned(caplog, dataset_of_all) == []
