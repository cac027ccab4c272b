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
from torch.utils.data import IterableDataset, Subset

import fastload
from fastload import CachedDataset, DataLoader
from fastload.rng.sample_streams import StreamCounter, StreamOrigin, index_key, stream_bytes
from tests.rng.draws_zoo import (
    AtOnce,
    Dice,
    Drawing,
    Jitter,
    Keyed,
    Pictures,
    Unreadable,
    Wrapped,
    plain,
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
    @pytest.mark.slow
    def test_workers(self, expected: Any) -> None:
        """Three workers draw what none draws; test_claims.py has other numbers, start methods and threads."""
        options: dict[str, Any] = {"num_workers": 3, "prefetch_factor": 3, "persistent_workers": True}
        assert epochs(Dice(), **options, collate_fn=torch.stack) == expected

    def test_any_order_and_batch_size(self, expected: Any) -> None:
        """Shuffling moves samples; each draws what it drew."""
        assert epochs(Dice(), shuffle=True, batch_size=5) == expected

    @pytest.mark.slow
    @pytest.mark.parametrize(("batch_size", "persistent"), [(4, True), (None, False)])
    def test_batches_as_they_come(self, batch_size: int | None, persistent: bool, expected: Any) -> None:
        """in_order=False, which torch's own iterator serves, moves batches and changes none."""
        options = {"num_workers": 2, "in_order": False, "persistent_workers": persistent}
        collate = {} if batch_size else {"collate_fn": lambda row: row[None]}

        assert epochs(Dice(), batch_size=batch_size, **options, **collate) == expected

    def test_torchs_own_iterator_keeps_the_dataset_in_reach(self) -> None:
        """A worker_init_fn finds the dataset's attributes, and its draws come before each sample's."""
        found = epochs(Dice(), 1, num_workers=2, in_order=False, worker_init_fn=_shorten)

        assert found == epochs(Dice(), 1)

    def test_a_batch_sampler_of_iterators(self, expected: Any) -> None:
        """Indices that can be read only once are counted and fetched."""
        batches = [iter(range(start, start + 4)) for start in range(0, 24, 4)]

        assert epochs(Dice(), 1, batch_size=1, batch_sampler=batches) == expected[:1]

    @pytest.mark.slow
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

    def test_a_seed_given_to_compose_is_mixed_in(self) -> None:
        """A pipeline with a seed of its own crops elsewhere, and stays reproducible."""
        plain, mixed, again = (epochs(Dice(seed=seed), 1)[0] for seed in (None, 3, 3))

        assert mixed == again
        assert [row[5] for row in mixed.values()] != [row[5] for row in plain.values()]


class TestCaches:
    def test_a_hit_draws_what_a_miss_draws(self) -> None:
        """A source that draws while it is read, and a prepare that does, shift nothing for the transform."""
        dataset = CachedDataset(Pictures(), prepare=resize(), transform=Jitter())
        runs = [list(self._run(dataset)) for _ in range(2)]

        assert dataset.cache_info().num_cached == 24
        assert runs[0] == runs[1]

    def test_a_wrapper_that_draws_before_and_after(self) -> None:
        """What a wrapper of a cached dataset drew before is not drawn again after a miss."""
        dataset = Wrapped(CachedDataset(Pictures(), transform=Jitter()))
        runs = [list(self._run(dataset)) for _ in range(2)]

        assert runs[0] == runs[1]
        assert len(set(np.ravel([[*before, after] for before, _, after, _ in runs[0]]))) == 3 * 24

    @staticmethod
    def _run(dataset: Any) -> Any:
        loader = DataLoader(dataset, batch_size=None, rng="sample")
        for sample in loader:
            yield plain(sample)


def collated(dataset: Any, epochs: int = 2, **options: Any) -> list[Any]:
    """All batches of some epochs, and what `Drawing` drew for each of them."""
    options = {"batch_size": 4, "collate_fn": Drawing(), "generator": seeded(), **options}
    with DataLoader(dataset, rng="sample", **options) as loader:
        return [(plain(batch), numbers) for _ in range(epochs) for batch, numbers in loader]


class TestCollate:
    """The draws of a collate_fn follow on those of the last sample of its batch."""

    def test_each_batch_has_its_own_draws(self) -> None:
        """No batch of two epochs repeats a draw of another, from any generator."""
        drawn = [numbers for _, numbers in collated(Dice())]

        assert all(len(set(column)) == 12 for column in list(zip(*drawn, strict=True))[:4])
        assert len({tuple(numbers[4:]) for numbers in drawn}) == 12

    @pytest.mark.slow
    @pytest.mark.parametrize("batch_size", [4, None])
    def test_batches_as_they_come(self, batch_size: int | None) -> None:
        """Workers of torch's own iterator (in_order=False) draw the same for each batch."""
        found = collated(Dice(), 1, batch_size=batch_size, num_workers=2, in_order=False)

        assert sorted(found) == sorted(collated(Dice(), 1, batch_size=batch_size))

    @pytest.mark.slow
    def test_a_batch_whose_last_sample_is_made_up(self) -> None:
        """The draws follow on those before the error."""

        def replace(failed: Any) -> torch.Tensor:
            return torch.zeros(10, dtype=torch.long)

        options = {"on_error": replace, "max_errors": 1.0}
        assert collated(Unreadable(), num_workers=2, **options) == collated(Unreadable(), **options)

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

    def test_also_after_an_error(self) -> None:
        """A sample that raises leaves nothing set."""
        torch.manual_seed(3)
        state = torch.default_generator.get_state()
        iterator = iter(DataLoader(_Fails(), batch_size=4, rng="sample", generator=seeded()))

        with pytest.raises(ArithmeticError):
            next(iterator)

        assert torch.equal(torch.default_generator.get_state(), state)

    def test_sample_rng_by_hand_follows_torchs_seed(self) -> None:
        """`dataset[i]` outside a loader draws from torch's default generator, anew at each call."""
        torch.manual_seed(1)
        first, second = (fastload.sample_rng().integers(1 << 40) for _ in range(2))
        torch.manual_seed(1)

        assert fastload.sample_rng().integers(1 << 40) == first != second


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

    @pytest.mark.slow
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
