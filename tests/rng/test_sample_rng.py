"""seeding="sample": what sets random numbers, and whose generators they are; more in test_claims.py."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset

from fastload import CachedDataset, DataLoader
from fastload.rng.keys import SampleKey, index_bytes, occurrence_counter
from fastload.system.logs import say_once
from tests.kit import torchs_own
from tests.kit.datasets import Bulk, Made, Stream
from tests.resume.loaders import seeded
from tests.rng import draws_zoo as zoo
from tests.rng.draws_zoo import Alone, Chain, Dice, Drawing, Noise, run

TORCHS: dict[str, Any] = {"num_workers": 1, **torchs_own.FORK}
THREADS: dict[str, Any] = {"num_workers": 2, "worker_type": "thread"}


def read(dataset: Any, **options: Any) -> list[Any]:
    """The batches of an epoch, as lists."""
    return run(dataset, **{"seeding": "sample", **options})[0]  # type: ignore[no-any-return]


# --- what sets the numbers -------------------------------------------------------------------------------


def test_a_seed_given_to_compose_is_mixed_in() -> None:
    """A pipeline with a seed of its own crops elsewhere, and stays reproducible."""
    without, mixed, again = (read(Dice(seed=seed)) for seed in (None, 3, 3))

    assert mixed == again
    assert [row[-4] for batch in mixed for row in batch] != [row[-4] for batch in without for row in batch]


def test_the_libraries_generators_are_not_the_datasets() -> None:
    """Who keeps numpy's own RandomState in an attribute draws what numpy.random draws."""
    found = []
    for generator in (np.random.mtrand._rand, np.random):
        dataset = Made(functools.partial(lambda rng, index: rng.randint(1 << 30), generator))
        found.append(read(dataset))
    assert found[0] == found[1]


def test_torchs_own_workers_draw_the_same() -> None:
    """Where torch's loader must serve, its workers seed each sample, too."""
    assert read(Dice(), **TORCHS) == read(Dice())


def test_sample_rng_by_hand_follows_torchs_seed() -> None:
    """`dataset[i]` outside a loader draws from torch's default generator, anew at each call."""
    torch.manual_seed(1)
    first, second = zoo.draw_sample_rng(), zoo.draw_sample_rng()
    torch.manual_seed(1)

    assert zoo.draw_sample_rng() == first != second


KEYS = st.recursive(st.integers() | st.text(), lambda inner: st.lists(inner).map(tuple), max_leaves=6)


@pytest.mark.slow
@given(KEYS, KEYS)
def test_different_indices_have_different_keys(one: Any, other: Any) -> None:
    """No two indices share a key."""
    assert (index_bytes(one) == index_bytes(other)) == (one == other)


@given(st.lists(st.integers(-3, 12), max_size=40), st.integers(1, 5))
@settings(deadline=None)
def test_occurrences_are_counted_over_batches(indices: list[int], batch_size: int) -> None:
    """Each draw knows how often its index came before in the epoch, also outside the dataset's range."""
    kinds: list[Any] = [int, np.int64, torch.tensor]  # one index for all of them
    count = occurrence_counter(10, auto_collation=True)
    found = []
    for start in range(0, len(indices), batch_size):
        given: Any = [kinds[i % 3](i) for i in indices[start : start + batch_size]]
        batch, occurrences = count(iter(given) if start % 2 else given)  # some can be read only once
        found += occurrences or [0] * len(batch)

    assert found == [indices[:position].count(index) for position, index in enumerate(indices)]


def test_a_length_beyond_memory_costs_none() -> None:
    """Datasets that make their samples up may say any length."""
    count = occurrence_counter(10**12, auto_collation=True)

    assert count([3, 10**11, 3, 10**11])[1] == (0, 0, 1, 1)


def test_the_streams_are_fixed_for_ever() -> None:
    """These bytes are part of the release: another value is another run of every user."""
    assert SampleKey(1, 2, 3, 4).digest()[:8].hex() == "edeabf5d7b4de48e"


# --- the user's own generators ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, ArithmeticError, KeyboardInterrupt, "threads"])
def test_the_users_generators_are_as_they_were(error: Any) -> None:
    """Between batches, after an error in the middle of one, and in threads: every generator of the user's."""
    if error == "threads":
        dataset, drawing, options = Alone(), Drawing(shared=False), THREADS
    else:
        dataset, drawing, options = Dice(error=error), Drawing(), {}

    def stand() -> Any:
        crop = [*map(zoo.state_of, (drawing.crop.py_random, drawing.crop.random_generator, *drawing.own))]
        return dataset.stand(), crop, zoo.state_of_globals()

    for generator in (*dataset.own, *drawing.own):
        zoo.draw(generator)  # which leaves numbers behind
    before = stand()
    iterator = iter(
        DataLoader(dataset, 4, seeding="sample", collate_fn=drawing, generator=seeded(), **options)
    )
    if isinstance(error, type):
        with pytest.raises(error):
            next(iterator)
        assert stand() == before
    for _ in iterator:
        assert stand() == before


# --- errors and warnings ---------------------------------------------------------------------------------


REFUSED: list[tuple[Any, dict[str, Any], Any, str]] = [
    (Stream(), {}, ValueError, r'^seeding="sample" derives random streams .*, but a Stream has none'),
    (Bulk(int), {}, ValueError, r"Bulk\.__getitems__.*CachedDataset\(dataset, cache=None\)"),
    (Subset(Bulk(int), [1]), {}, ValueError, r"Bulk\.__getitems__"),
    (
        Dice(),
        {"seeding": "batch"},
        ValueError,
        '^seeding should be "worker", "sample" or "torch", but got \'batch\'$',
    ),
    *(
        (Made(str), {"batch_size": None, "sampler": [index]}, TypeError, rf"and tuples.* a {kind}\b")
        for index, kind in [(1.5, "float"), (None, "NoneType"), (("a", b"a"), "bytes")]
    ),
]


@pytest.mark.parametrize(("dataset", "options", "error", "text"), REFUSED)
def test_refused(dataset: Any, options: dict[str, Any], error: Any, text: str) -> None:
    """A stream, many samples at once, torch's workers, an unknown mode, an index without a stable digest."""
    with pytest.raises(error, match=text):
        read(dataset, **options)


def test_many_at_once_are_read_one_by_one_without_batches() -> None:
    """Then there is no call of __getitems__."""
    assert len(read(Bulk(int, 3), batch_size=None)) == 3
    assert sum(map(len, read(CachedDataset(Bulk(int, 3), cache=None)))) == 3  # as the error advises


class OwnBits(np.random.PCG64):
    """A bit generator that fastload does not know."""


def in_a_partial(bad: Any) -> Any:
    """A collate_fn that holds a generator in its arguments."""
    return functools.partial(lambda held, samples: len(held) + len(samples), {"key": [0, bad]})


def noise(generator: Any) -> Any:
    return Made(Chain(Noise(generator)), 12)


OF_COLLATE = r"seed collate_fn\.args\[0\]\['key'\]\[1\], <random\.SystemRandom "
# A dataset, options, and what the warning says; None: there is none.
WARNINGS: list[tuple[Any, dict[str, Any], str | None]] = [
    (noise(np.random.Generator(OwnBits(1))), {}, r"Generator\(OwnBits\) at "),
    (
        noise(np.random.RandomState(np.random.PCG64(1))),
        {},
        r"seed dataset\.make\.transforms\[0\]\.value, RandomState\(PCG64\) at .*fastload\.sample_rng\(\)",
    ),
    (noise(random.SystemRandom()), {"num_workers": 2}, ", <random.SystemRandom object at "),
    (Made(int, 12), {"collate_fn": in_a_partial(random.SystemRandom())}, OF_COLLATE),
    (Dice(), {}, None),
    (Alone(), THREADS, None),
]


def warned(caplog: Any, dataset: Any, **options: Any) -> list[str]:
    """What two epochs of two loaders log."""
    say_once.cache_clear()
    for _ in range(2):
        run(dataset, 2, seeding="sample", **options)
    return [record.getMessage() for record in caplog.records if record.name == "fastload"]


@pytest.mark.parametrize(("dataset", "options", "text"), WARNINGS)
def test_a_generator_that_is_not_seeded_is_warned_of(
    dataset: Any, options: Any, text: Any, caplog: Any
) -> None:
    """One, from the parent, names the attribute and says what to do; generators that are seeded get none."""
    texts = warned(caplog, dataset, **options)

    assert len(texts) == (text is not None)
    assert text is None or re.search(text, texts[0]), texts
