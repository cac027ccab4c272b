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
from tests.rng.draws_zoo import Composed, Dice, Kept, Randomizable, plain
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
    pytest.param(
        {"num_workers": 1, "multiprocessing_context": "forkserver"}, id="forkserver", marks=pytest.mark.slow
    ),
    pytest.param({"num_workers": 3, "worker_type": "thread"}, id="threads"),
    pytest.param({"num_workers": 2, "in_order": False}, id="torch's iterator"),
]


@pytest.fixture(autouse=True)
def _says_again() -> None:
    say_once.cache_clear()


def run(dataset: Any, epochs: int = 2, **options: Any) -> list[Any]:
    """All batches of some epochs, in the order of their indices."""
    options = {"batch_size": 3, "generator": torch.Generator().manual_seed(5), **options}
    with DataLoader(dataset, rng="sample", **options) as loader:
        found = [[plain(batch) for batch in loader] for _ in range(epochs)]
    return [sorted(batches, key=repr) for batches in found]


@pytest.mark.slow
@pytest.mark.parametrize("options", WORKERS)
def test_workers_draw_what_the_parent_draws(options: dict[str, Any], caplog: Any) -> None:
    """For every kind of generator, with workers of any kind, in two epochs; no warning is given."""
    dataset = Drawn(*every_kind())
    if "worker_type" not in options:  # threads share a set
        dataset.more = Holder({random.Random(1)})
    expected = run(dataset)

    assert run(dataset, **options) == expected
    assert "does not seed" not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_samples_epochs_generators_and_draws_differ(kind: str) -> None:
    """No two draws of two epochs and two generators are the same, although both have one seed."""
    found = run(Drawn(KINDS[kind](), KINDS[kind]()))
    numbers = torch.tensor([[batch[1] for batch in batches] for batches in found]).flatten().tolist()

    assert len(numbers) == len(set(numbers)) == 2 * 2 * NUM_SAMPLES * 2


def every_kind() -> list[Any]:
    """A generator of each kind."""
    return [make() for make in KINDS.values()]


def test_the_state_before_the_sample_does_not_matter() -> None:
    """Numbers that an earlier draw left behind are forgotten."""
    used = every_kind()
    for generator in used:
        draw(generator)

    assert run(Drawn(*used)) == run(Drawn(*every_kind()))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_rest_of_a_resumed_epoch(num_workers: int) -> None:
    """In mid-epoch, with another number of workers."""
    options: dict[str, Any] = {"batch_size": 3, "shuffle": True, "rng": "sample"}
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(Drawn(*every_kind()), num_workers=1, generator=generator, **options)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [plain(batch) for batch in iterator]
    again = DataLoader(Drawn(*every_kind()), num_workers=num_workers, generator=torch.Generator(), **options)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (subset, {"num_workers": 2, "in_order": False}),
        (concatenated, {"num_workers": 2}),
        (nested, {"num_workers": 2, "worker_type": "thread"}),
        (partial, {"num_workers": 2}),
        (cached, {"num_workers": 2, "worker_type": "thread"}),
    ],
)
def test_wherever_it_is_held(make: Any, options: dict[str, Any]) -> None:
    """In nested transforms, partials and wrapped datasets."""
    assert run(make(), **options) == run(make())


@pytest.mark.slow
@pytest.mark.parametrize("options", [way for way in WORKERS if way.id != "forkserver"])
def test_a_collate_fn_draws_anew_for_each_batch(options: dict[str, Any]) -> None:
    """The same number for a batch with workers of any kind, and another one for each batch."""
    expected = run(Arrays(), collate_fn=Mixing(np.random.default_rng(1)))
    numbers = [number for batches in expected for _, number in batches]

    assert run(Arrays(), collate_fn=Mixing(np.random.default_rng(1)), **options) == expected
    assert len(set(numbers)) == len(numbers) == 8


def test_a_generator_that_both_hold_is_one() -> None:
    """What the dataset and the collate_fn share is one object in threads, too."""
    results = []
    for options in ({}, {"num_workers": 2, "worker_type": "thread"}):
        shared = np.random.default_rng(1)
        results.append(run(Drawn(shared), collate_fn=Mixing(shared), **options))

    assert results[0] == results[1]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "worker_type": "thread"}], ids=str)
def test_the_users_generators_are_as_they_were(options: dict[str, Any]) -> None:
    """Between batches the user's own generators go on as if no sample had been read."""
    generators, twins = every_kind(), every_kind()
    loader = DataLoader(Drawn(*generators), batch_size=3, rng="sample", **options)
    drawn = [[draw(generator) for generator in generators] for _ in loader]

    assert drawn == [[draw(twin) for twin in twins] for _ in range(4)]


def test_also_after_an_error() -> None:
    """A sample that raises leaves the generators as they were."""
    generators = every_kind()

    class Fails(Drawn):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        next(iter(DataLoader(Fails(*generators), rng="sample")))

    assert [*map(draw, generators)] == [*map(draw, every_kind())]


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


@pytest.mark.parametrize("seed_albumentations", [True, False])
def test_the_generators_of_pipelines_are_theirs(seed_albumentations: bool) -> None:
    """Those of albumentations and MONAI are seeded by their own rule, and with False not at all."""
    found = Search(Dice(), Composed(Randomizable()))
    kept = Kept()
    before = kept.stand()
    for _ in DataLoader(kept, batch_size=4, rng="sample", seed_albumentations=seed_albumentations):
        pass

    assert found.of_dataset.generators == found.of_collate.generators == []
    assert (kept.stand() == before) is seed_albumentations


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


class TestWarnings:
    @staticmethod
    def warned(caplog: Any, dataset: Any, **options: Any) -> list[str]:
        """What two epochs of two loaders log."""
        for _ in range(2):
            run(dataset, **options)
        return [record.getMessage() for record in caplog.records if record.name == "fastload"]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("generator", "what", "num_workers"),
        [
            (np.random.Generator(OwnBits(1)), "Generator(OwnBits) at ", 0),
            (np.random.RandomState(np.random.PCG64(1)), "RandomState(PCG64) at ", 0),
            (random.SystemRandom(), "<random.SystemRandom object at ", 2),
        ],
        ids=["unknown bits", "other bits", "system"],
    )
    def test_what_cannot_be_seeded(self, generator: Any, what: str, num_workers: int, caplog: Any) -> None:
        """One warning, from the parent, names the attribute and says what to do."""
        (text,) = self.warned(caplog, Plain(Compose(Noise(generator))), num_workers=num_workers)

        assert text.startswith(f'rng="sample" does not seed dataset.transform.transforms[0].value, {what}')
        assert "fastload.sample_rng()" in text

    def test_what_threads_share(self, caplog: Any) -> None:
        """A generator that a method finds in its module cannot be copied for each thread."""
        options = {"num_workers": 2, "worker_type": "thread"}
        (text,) = self.warned(caplog, DrawsFromModule(), **options)

        assert text.startswith('rng="sample" does not seed dataset.__getitem__.module_generator, which all ')
        assert "<function DrawsFromModule.__getitem__" in text
        assert 'worker_type="process"' in text

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
        options = {"num_workers": 2, "worker_type": "thread"}

        assert self.warned(caplog, DrawsFromModule(), **options) == []
