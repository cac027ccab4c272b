"""rng="sample": a sample's random numbers depend on seed, epoch, index and occurrence, on nothing else."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, Subset, WeightedRandomSampler

import fastload
from fastload import CachedDataset, DataLoader
from fastload.rng.sample_streams import StreamCounter, StreamOrigin, index_key, stream_bytes
from tests.rng.draws_zoo import (
    Alone,
    AtOnce,
    Dice,
    Drawing,
    Jitter,
    Kept,
    Keyed,
    Pictures,
    Unreadable,
    Wrapped,
    resize,
)


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def epochs(dataset: Any, count: int = 2, **options: Any) -> list[dict[int, list[int]]]:
    """What each sample drew, by its index, in each epoch."""
    options = {"batch_size": 4, "generator": seeded(), **options}
    with DataLoader(dataset, rng="sample", **options) as loader:
        return [{int(row[0]): row[1:].tolist() for batch in loader for row in batch} for _ in range(count)]


@pytest.fixture(scope="module")
def expected() -> list[dict[int, list[int]]]:
    """Two epochs of Dice, without workers, in order."""
    return epochs(Dice())


class TestSamePixels:
    @pytest.mark.parametrize("method", ["fork", "forkserver"])  # test_claims.py has spawn
    def test_any_start_method(self, method: str, expected: Any) -> None:
        """Workers draw what the parent draws, however they were started."""
        assert epochs(Dice(), num_workers=2, multiprocessing_context=method) == expected

    @pytest.mark.parametrize("num_workers", [1, 3, 8])
    def test_any_number_of_workers(self, num_workers: int, expected: Any) -> None:
        """1, 3 or 8 workers draw what none draws."""
        assert epochs(Dice(), num_workers=num_workers) == expected

    @pytest.mark.parametrize("num_workers", [1, 4])
    def test_threads(self, num_workers: int) -> None:
        """Worker threads give the pixels of processes and of none, to what draws from its own generators."""
        plain = epochs(Alone())

        assert epochs(Alone(), num_workers=num_workers, worker_method="thread") == plain
        assert epochs(Alone(), num_workers=2) == plain

    def test_any_prefetch_factor_and_persistent_workers(self, expected: Any) -> None:
        """How far workers run ahead, and how long they live, changes nothing."""
        assert epochs(Dice(), num_workers=2, prefetch_factor=5, persistent_workers=True) == expected

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_any_order_and_batch_size(self, num_workers: int, expected: Any) -> None:
        """Shuffling moves samples; each draws what it drew."""
        assert epochs(Dice(), shuffle=True, batch_size=5, num_workers=num_workers) == expected

    @pytest.mark.parametrize("persistent", [False, True])
    @pytest.mark.parametrize("batch_size", [4, None])
    def test_batches_as_they_come(self, batch_size: int | None, persistent: bool, expected: Any) -> None:
        """in_order=False, which torch's own iterator serves, moves batches and changes none."""
        options = {"num_workers": 2, "in_order": False, "persistent_workers": persistent}
        collate = {} if batch_size else {"collate_fn": lambda row: row[None]}

        assert epochs(Dice(), batch_size=batch_size, **options, **collate) == expected

    def test_torchs_own_iterator_keeps_the_dataset_in_reach(self) -> None:
        """A worker_init_fn finds the dataset's attributes, and its draws come before each sample's."""
        found = epochs(Dice(), 1, num_workers=2, in_order=False, worker_init_fn=_shorten)

        assert found == epochs(Dice(), 1)

    def test_any_collate_fn(self, expected: Any) -> None:
        """A collate_fn of the user's gets the same samples."""
        assert epochs(Dice(), collate_fn=torch.stack, num_workers=2) == expected

    def test_no_batches(self, expected: Any) -> None:
        """batch_size=None fetches single samples, with the same numbers."""
        with DataLoader(Dice(), batch_size=None, num_workers=2, rng="sample", generator=seeded()) as loader:
            found = [{int(row[0]): row[1:].tolist() for row in loader} for _ in range(2)]

        assert found == expected

    def test_a_batch_sampler_of_iterators(self, expected: Any) -> None:
        """Indices that can be read only once are counted and fetched."""
        batches = [iter(range(start, start + 4)) for start in range(0, 24, 4)]

        assert epochs(Dice(), 1, batch_size=1, batch_sampler=batches) == expected[:1]

    def test_what_was_drawn_elsewhere_does_not_matter(self, expected: Any) -> None:
        """Draws of the training loop between batches shift nothing."""
        loader = DataLoader(Dice(), batch_size=4, rng="sample", generator=seeded())
        found = {}
        for batch in loader:
            found |= {int(row[0]): row[1:].tolist() for row in batch}
            random.random(), np.random.rand(7), torch.rand(3)

        assert found == expected[0]

    def test_torchs_subset_draws_by_its_own_indices(self, expected: Any) -> None:
        """A Subset is asked sample by sample, though it has a `__getitems__`."""
        found = epochs(Subset(Dice(), range(24)), num_workers=2)

        assert found == expected


def _shorten(worker_id: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert info.dataset.length == 24
    random.random()


class TestDifferentPixels:
    def test_epochs_seeds_indices_and_generators_differ(self, expected: Any) -> None:
        """No two samples of two epochs and two seeds share a draw of 40 bits, nor do two generators."""
        other = epochs(Dice(), generator=seeded(6))
        wide = [row[:5] for epoch in expected + other for row in epoch.values()]
        numbers = list(itertools.chain.from_iterable(wide))

        assert len(set(numbers)) == len(numbers)

    def test_duplicates_of_a_sampler_differ(self) -> None:
        """The second draw of an index in an epoch is another one, with and without workers."""
        runs = []
        for num_workers in (0, 2):
            sampler = WeightedRandomSampler([1.0] * 6, 60, generator=seeded())
            loader = DataLoader(
                Dice(6), 4, sampler=sampler, num_workers=num_workers, rng="sample", generator=seeded()
            )
            runs.append([row.tolist() for batch in loader for row in batch])

        assert runs[0] == runs[1]
        assert len({tuple(row) for row in runs[0]}) == 60

    def test_duplicates_in_a_cache_differ(self) -> None:
        """A cached dataset's transform draws anew for the second occurrence of a sample in one batch."""
        dataset = CachedDataset(Pictures(4), transform=Jitter())
        loader = DataLoader(dataset, batch_sampler=[[0, 0, 1, 0]], rng="sample")
        (batch,) = loader

        assert len(set(batch[0].tolist())) == 4

    def test_a_seed_given_to_compose_is_mixed_in(self) -> None:
        """A pipeline with a seed of its own crops elsewhere, and stays reproducible."""
        plain, mixed, again = (epochs(Dice(seed=seed), 1)[0] for seed in (None, 3, 3))

        assert mixed == again
        assert [row[5] for row in mixed.values()] != [row[5] for row in plain.values()]

    def test_set_epoch_chooses_the_numbers(self, expected: Any) -> None:
        """The epoch that the user set decides, not how many iterators there were."""
        loader = DataLoader(Dice(), batch_size=4, rng="sample", generator=seeded())
        loader.set_epoch(1)
        found = {int(row[0]): row[1:].tolist() for batch in loader for row in batch}

        assert found == expected[1]


class TestCaches:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_hit_draws_what_a_miss_draws(self, num_workers: int) -> None:
        """A source that draws while it is read, and a prepare that does, shift nothing for the transform."""
        dataset = CachedDataset(Pictures(), prepare=resize(), transform=Jitter())
        runs = [list(self._run(dataset, num_workers)) for _ in range(2)]

        assert dataset.cache_info().num_cached == 24
        assert runs[0] == runs[1]

    def test_a_wrapper_that_draws_before_and_after(self) -> None:
        """What a wrapper of a cached dataset drew before is not drawn again after a miss."""
        dataset = Wrapped(CachedDataset(Pictures(), transform=Jitter()))
        runs = [list(self._run(dataset, 0)) for _ in range(2)]

        assert runs[0] == runs[1]
        assert len(set(np.ravel([[*before, after] for before, _, after, _ in runs[0]]))) == 3 * 24

    @staticmethod
    def _run(dataset: Any, num_workers: int) -> Any:
        loader = DataLoader(dataset, batch_size=None, num_workers=num_workers, rng="sample")
        for sample in loader:
            yield torch.utils._pytree.tree_map(
                lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, sample
            )


def collated(dataset: Any, epochs: int = 2, **options: Any) -> list[Any]:
    """All batches of some epochs, and what `Drawing` drew for each of them."""
    options = {"batch_size": 4, "collate_fn": Drawing(), "generator": seeded(), **options}
    with DataLoader(dataset, rng="sample", **options) as loader:
        return [(plain(batch), numbers) for _ in range(epochs) for batch, numbers in loader]


def plain(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, batch
    )


class TestCollate:
    """The draws of a collate_fn follow on those of the last sample of its batch."""

    def test_each_batch_has_its_own_draws(self) -> None:
        """No batch of two epochs repeats a draw of another, from any generator."""
        drawn = [numbers for _, numbers in collated(Dice())]

        assert all(len(set(column)) == 12 for column in list(zip(*drawn, strict=True))[:4])
        assert len({tuple(numbers[4:]) for numbers in drawn}) == 12

    @pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"batch_size": None}], ids=str)
    @pytest.mark.parametrize("num_workers", [1, 2])
    def test_any_number_of_workers(self, num_workers: int, options: dict[str, Any]) -> None:
        """1 or 2 workers draw what none draws."""
        assert collated(Dice(), num_workers=num_workers, **options) == collated(Dice(), **options)

    @pytest.mark.slow
    def test_any_start_method(self) -> None:
        """The pipeline of a collate_fn that was pickled is set too."""
        assert collated(Dice(), num_workers=2, multiprocessing_context="forkserver") == collated(Dice())

    @pytest.mark.parametrize("batch_size", [4, None])
    def test_batches_as_they_come(self, batch_size: int | None) -> None:
        """Workers of torch's own iterator (in_order=False) draw the same for each batch."""
        found = collated(Dice(), 1, batch_size=batch_size, num_workers=2, in_order=False)

        assert sorted(found) == sorted(collated(Dice(), 1, batch_size=batch_size))

    def test_threads(self) -> None:
        """Draws from sample_generator() are the same in threads, which share all other generators."""
        options = {"collate_fn": Drawing(shared=False)}

        assert collated(Alone(), num_workers=2, worker_method="thread", **options) == collated(
            Alone(), **options
        )

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_the_rest_of_a_resumed_epoch(self, num_workers: int) -> None:
        """In mid-epoch, with another number of workers."""
        expected = collated(Dice(), 1, shuffle=True)
        options: dict[str, Any] = {"shuffle": True, "collate_fn": Drawing(), "rng": "sample"}
        loader = DataLoader(Dice(), 4, num_workers=1, generator=seeded(), **options)
        iterator = iter(loader)
        next(iterator), next(iterator)
        state = loader.state_dict()
        again = DataLoader(Dice(), 4, num_workers=num_workers, generator=torch.Generator(), **options)
        again.load_state_dict(state)

        assert [(plain(batch), numbers) for batch, numbers in again] == expected[2:]

    @pytest.mark.parametrize("on_error", ["replace", lambda failed: torch.zeros(10, dtype=torch.long)])
    def test_a_batch_whose_last_sample_is_replaced(self, on_error: Any) -> None:
        """The draws follow on those of the replacement, or on those before the error."""
        options = {"on_error": on_error, "error_budget": 1.0}

        assert collated(Unreadable(), num_workers=2, **options) == collated(Unreadable(), **options)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_batch_from_the_cache(self, num_workers: int) -> None:
        """A hit and a miss leave the generators in the same state, with and without a transform."""
        for transform in (None, Jitter()):
            dataset = CachedDataset(Pictures(), transform=transform)
            runs = [collated(dataset, 1, num_workers=num_workers) for _ in range(2)]

            assert dataset.cache_info().num_cached == 24
            assert runs[0] == runs[1]

    def test_the_users_generators_are_as_they_were(self) -> None:
        """Without workers, each batch restores the collate_fn's pipeline and the global generators."""
        drawing = Drawing()
        parts = [drawing.crop, *drawing.crop.transforms]

        def states() -> list[Any]:
            return [random.getstate(), *[(id(part.py_random), part.py_random.getstate()) for part in parts]]

        before = states()
        for _ in DataLoader(Dice(), 4, rng="sample", collate_fn=drawing, generator=seeded()):
            assert states() == before


class TestParent:
    def test_the_users_generators_are_as_they_were(self) -> None:
        """Without workers the global generators go on after each batch as if nothing had been drawn."""
        loader = DataLoader(Dice(), batch_size=4, rng="sample", generator=seeded())
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        drawn = [(random.random(), np.random.rand(), torch.rand(()).item()) for _ in loader]
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        torch.empty((), dtype=torch.int64).random_(generator=seeded())
        alone = [(random.random(), np.random.rand(), torch.rand(()).item()) for _ in range(6)]

        assert drawn == alone

    def test_the_users_pipelines_are_as_they_were(self) -> None:
        """Each transform has the generators it had, in the state they had."""
        dataset = Kept()
        before = dataset.stand()
        for _ in DataLoader(dataset, batch_size=4, rng="sample"):
            assert dataset.stand() == before

    def test_also_after_an_error(self) -> None:
        """A sample that raises leaves nothing set."""
        torch.manual_seed(3)
        state = torch.default_generator.get_state()
        iterator = iter(DataLoader(_Fails(), batch_size=4, rng="sample", generator=seeded()))

        with pytest.raises(ArithmeticError):
            next(iterator)

        assert torch.equal(torch.default_generator.get_state(), state)

    def test_sample_generator_by_hand_follows_torchs_seed(self) -> None:
        """`dataset[i]` outside a loader draws from torch's default generator, anew at each call."""
        torch.manual_seed(1)
        first, second = (fastload.sample_generator().integers(1 << 40) for _ in range(2))
        torch.manual_seed(1)

        assert fastload.sample_generator().integers(1 << 40) == first != second

    def test_sample_generator_within_a_sample_is_one(self) -> None:
        """Calls for one sample share a stream: the second draw is not the first."""
        rows = epochs(Dice(), 1)[0].values()

        assert all(row[3] != row[4] for row in rows)


class _Fails(Dice):
    def __getitem__(self, index: Any) -> Any:
        random.random()
        raise ArithmeticError


class TestIndices:
    def test_names_and_tuples(self) -> None:
        """Strings, tuples and numpy's and torch's integers are indices, the same with workers."""
        keys = ["a", ("a", 1), 7, np.int64(7), torch.tensor(7), "7", ("a", (1, "b")), "a"]
        runs = [
            [number for _, number in DataLoader(Keyed(), None, sampler=keys, num_workers=n, rng="sample")]
            for n in (0, 2)
        ]

        assert runs[0] == runs[1]
        assert len(set(runs[0])) == len(keys)

    @pytest.mark.parametrize("index", [1.5, None, [1, 2], b"a", ("a", 1.5)])
    def test_others_are_refused(self, index: Any) -> None:
        """An index without a stable digest is an error that shows it."""
        with pytest.raises(TypeError, match=r"integers, strings, and tuples") as caught:
            list(DataLoader(Keyed(), None, sampler=[index], rng="sample"))

        assert type(index if not isinstance(index, tuple) else index[1]).__name__ in str(caught.value)

    keys = st.recursive(st.integers() | st.text(), lambda inner: st.lists(inner).map(tuple), max_leaves=6)

    @given(keys, keys)
    def test_different_indices_have_different_keys(self, one: Any, other: Any) -> None:
        """No two indices share a key."""
        assert (index_key(one) == index_key(other)) == (one == other)

    @given(st.lists(st.integers(-3, 12), max_size=40), st.integers(1, 5))
    @settings(deadline=None)
    def test_occurrences_are_counted_over_batches(self, indices: list[int], batch_size: int) -> None:
        """Each draw knows how often its index came before in the epoch, also outside the dataset's range."""
        draws = StreamCounter(1, 2, 10, auto_collation=True)
        found = []
        for start in range(0, len(indices), batch_size):
            batch, draw = draws.count(indices[start : start + batch_size])
            found += draw.occurrences or [0] * len(batch)

        assert found == [indices[:position].count(index) for position, index in enumerate(indices)]

    def test_the_streams_are_fixed_for_ever(self) -> None:
        """These bytes are part of the release: another value is another run of every user."""
        assert stream_bytes(StreamOrigin(1, 2, None), 3, 4)[:8].hex() == "edeabf5d7b4de48e"


class TestRefusals:
    def test_iterable_datasets(self) -> None:
        """A stream has no indices to derive numbers from."""

        class Stream(IterableDataset[int]):
            def __iter__(self) -> Any:
                return iter(())

        with pytest.raises(
            ValueError, match=r'^rng="sample" derives random streams from indices, but a Stream has none'
        ):
            DataLoader(Stream(), rng="sample")

    def test_getitems(self) -> None:
        """Many samples at once cannot be told apart; without batches there is no such call."""
        with pytest.raises(ValueError, match=r"AtOnce\.__getitems__"):
            DataLoader(AtOnce(), rng="sample")
        with pytest.raises(ValueError, match=r"AtOnce\.__getitems__"):
            DataLoader(Subset(AtOnce(), [1]), rng="sample")

        assert len(list(DataLoader(AtOnce(3), batch_size=None, rng="sample"))) == 3

    def test_other_words(self) -> None:
        """A mode that does not exist is named."""
        with pytest.raises(ValueError, match=r'^rng should be "worker" or "sample", but got \'batch\'$'):
            DataLoader(Dice(), rng="batch")  # type: ignore[arg-type]
