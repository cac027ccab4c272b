"""The dict that a loader's state is: plain, a snapshot, harmless to load, and checked when it comes back."""

from __future__ import annotations

import base64
import contextlib
import copy
import functools
import itertools
import os
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from fastload import DataLoader
from fastload.epochs import position
from fastload.errors import ResumeError
from tests.kit import datasets
from tests.resume.loaders import (
    LENGTH,
    distributed,
    labels,
    make,
    order_states,
    seeded,
    state_after,
    through_json,
    through_torch_save,
)
from tests.resume.zoo import Foreign, Keeps, Mute, Numbers

if TYPE_CHECKING:
    from pathlib import Path


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    ("num_workers", "wrap"),
    [(0, lambda data: data), (1, lambda data: {"num_batches": 1, "has_ended": False, "state": data})],
)
def test_bytes_in_a_state_are_never_unpickled(num_workers: int, wrap: Any, tmp_path: Path) -> None:
    """A pickle in the place of a stream's state is refused, or is given to the dataset as the bytes it is."""
    marker = tmp_path / "unpickled"
    state = state_after(DataLoader(Keeps(), 4, num_workers=num_workers), 1, dict)
    state["dataset_states"] = [wrap(pickle.dumps(Evil(str(marker))))]
    loader = DataLoader(Keeps(), 4, num_workers=num_workers)
    with loader, contextlib.suppress(ResumeError, TypeError):  # the dataset finds no position in bytes
        loader.load_state_dict(state)
        next(iter(loader))

    assert not marker.exists()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_stream_or_a_sampler_returned_is_a_snapshot(num_workers: int) -> None:
    """One that returns the dict that it goes on to change does not change a state that was taken."""
    for loader in (DataLoader(Keeps(), 4, num_workers=num_workers), make("stateful")):
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        before = copy.deepcopy(state)
        list(iterator)
        list(loader)

        assert state == before
        assert state["samplers"] or state["dataset_states"][0]["state"]["position"] == 4


@pytest.mark.parametrize("options", [{"batch_size": None}, {"drop_last": True}])
def test_a_stream_that_was_read_to_its_end_has_no_position(options: dict[str, Any]) -> None:
    """Also where the last batch does not show that nothing follows."""
    loader = make("Mute", **options)
    list(loader)

    assert loader.state_dict()["dataset_states"] == [{"num_batches": 0, "has_ended": True}]


def test_the_caller_may_change_a_state() -> None:
    """It is small and plain; the caller's changes reach neither the loader that gave it nor another one."""
    loader = make("stateful")
    list(itertools.islice(loader, 3))
    state, again = loader.state_dict(), loader.state_dict()
    resumed = make("stateful")
    resumed.load_state_dict(state)
    for part in (state["samplers"]["sampler"], state["samplers"], state["generators"], state):
        part.clear()

    assert loader.state_dict() == again
    assert resumed.state_dict() == again
    assert len(pickle.dumps(again)) < 20_000
    assert through_json(again) == through_torch_save(again) == again
    assert pickle.loads(pickle.dumps(loader)).state_dict()["_num_yielded"] == 0  # a copy shares no progress
    resumed.state_dict()["samplers"]["sampler"]["round"] = 99
    assert len(labels(resumed)) == 10


def test_numbers_of_other_libraries_do_not_reach_a_state() -> None:
    """An epoch that was set as a NumPy int is an int in the state."""
    loader = DataLoader(Numbers(8), 4, sampler=DistributedSampler(range(8), 2, 0))
    loader.set_epoch(np.int64(3))
    list(loader)

    assert through_json(loader.state_dict())["epoch"] == 3
    with pytest.raises(TypeError, match=r"epoch should be an int, but got 1.5"):
        loader.set_epoch(1.5)  # type: ignore[arg-type]


# --- states that do not fit ------------------------------------------------------------------------------


def by_keys(keys: list[Any]) -> DataLoader:
    return DataLoader(datasets.Made(lambda key: 1, len(keys)), 2, sampler=keys)


def foreign() -> DataLoader:
    return DataLoader(Numbers(LENGTH), 4, sampler=Foreign(LENGTH))


def ranked(num_ranks: int = 2, rank: int = 0, seed: int = 3) -> DataLoader:
    return distributed(40, 4, num_ranks, rank, seed)


# Of which loader, after how many batches; to which loader, and the error at its first batch.
MISFITS: list[tuple[DataLoader, int, DataLoader, str]] = [
    (foreign(), 3, foreign(), r"before batch 3.*attribute `generator`"),
    (
        make("in order"),
        10,
        make("in order", dataset=Numbers(8)),
        "at batch 10, but the sampler has only 2 now",
    ),
    (make("in order"), 2, make("in order", batch_size=5), r"batch_size was \d, and is 5"),
    (make("stateful"), 0, make("in order"), "has 'sampler', but this loader has no such"),
    (make("Mute"), 9, make("Mute", dataset=Mute(11)), "again, but it ended after 4"),
    (make("Mute", 2), 4, make("Mute", 1), "for each of 2 workers, but .* has 1"),
    (make("Mute"), 4, make("Mute", batch_size=4), "batch_size 3, but this loader has 4: give it 3"),
    (make("Stream"), 2, make("Mute"), "a Mute, has no state_dict"),
    (make("MakesSamples"), 2, make("Mute"), "a generator, has no state_dict"),
    (by_keys(list("abcd")), 1, by_keys(list("axcd")), "gave other indices"),
    (by_keys([object()] * 4), 1, by_keys([Ellipsis] * 4), "gave other indices"),
    (ranked(), 2, ranked(seed=4), "before batch 2, the sampler gave other"),
    (ranked(), 2, ranked(num_ranks=3), "before batch 2, the sampler gave other"),
]


@pytest.mark.parametrize(("saver", "num_batches", "resumed", "text"), MISFITS)
def test_a_state_that_does_not_fit_says_why(saver: Any, num_batches: int, resumed: Any, text: str) -> None:
    """It gives both values, and the state stays loaded."""
    state = state_after(saver, num_batches)
    resumed.load_state_dict(state)

    with resumed, pytest.raises(ResumeError, match=text):
        next(iter(resumed))
    assert resumed.state_dict() == state or "ended" in text  # an epoch that has begun is another state


def test_workers_do_not_know_whose_batches_a_framework_took_off() -> None:
    """A lower number of batches of several workers is an error."""
    loader = make("Mute", 2)
    loader.load_state_dict(state_after(make("Mute", 2), 5) | {"_num_yielded": 3})

    with pytest.raises(ResumeError, match="3 batches, but workers have read 5"):
        iter(loader)


def test_addresses_in_the_texts_of_keys_do_not_count() -> None:
    """The next process has other ones."""
    resumed = by_keys([object() for _ in range(4)])
    resumed.load_state_dict(state_after(by_keys([object() for _ in range(4)]), 1))

    assert len(list(resumed)) == 1


# --- damaged states --------------------------------------------------------------------------------------


def _states() -> list[Any]:
    """Loaders of all kinds, each with a state of one like it: before, within, at the end of an epoch."""
    kinds = ("shuffle, generator", "shuffle", "eager draws", "distributed", "sampler's own generator")
    kinds += ("stateful", "Stream", "Mute")
    found = []
    for maker in (functools.partial(make, kind) for kind in kinds):
        for num_batches in ((), (0,), (2,), (99,), (99, 0), (99, 3)):  # of each epoch
            loader = maker()
            for count in num_batches:
                list(itertools.islice(loader, count))
            found.append((maker, through_json(loader.state_dict())))
    return found


STATES = _states()
WRONG = st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
WRONG |= st.integers(-(10**25), 10**25) | st.lists(st.integers(-3, 3), max_size=3)
WRONG |= st.dictionaries(st.text(max_size=3) | st.integers(0, 3), st.integers(-3, 3), max_size=2)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values but those of the user's own states."""
    found = [path] if path else []
    is_of_user = "state" in path[-1:] or (len(path) == 2 and path[0] == "samplers")
    if isinstance(value, (dict, list)) and not is_of_user:
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in parts:
            found += _places(part, (*path, name))
    return found


def _part(state: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        state = state[name]
    return state


def _alike(maker: Any, path: tuple[Any, ...]) -> list[Any]:
    """The values at this place in all states of such a loader."""
    found = []
    for other, state in STATES:
        with contextlib.suppress(KeyError, IndexError, TypeError):
            if other is maker:
                found.append(copy.deepcopy(_part(state, path)))
    return found


def _two_epochs(loader: DataLoader, state: dict[str, Any]) -> list[Any]:
    """What is left of the epoch of a state, and the epoch after it; or the two epochs after it."""
    loader.load_state_dict(state)
    torch.manual_seed(77)
    return [[batch.flatten().tolist() for batch in loader] for _ in range(2)]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_damaged_state_is_refused_or_harmless(data: Any) -> None:
    """One value replaced or removed gives a ResumeError, with nothing changed, or else the same batches.

    Where batches differ, the new value says so: a lower count, or a valid state of a generator, a sampler or
    a dataset.
    """
    maker, real = data.draw(st.sampled_from(STATES))
    state = copy.deepcopy(real)
    path = data.draw(st.sampled_from(_places(state)))
    inner = _part(state, path[:-1])
    alike = _alike(maker, path)
    is_of_user = path[0] in ("samplers", "dataset_states") and len(path) > 1
    is_removed = data.draw(st.booleans())
    if is_removed:
        del inner[path[-1]]
    else:
        inner[path[-1]] = data.draw(st.sampled_from(alike) if is_of_user else st.sampled_from(alike) | WRONG)
    is_meant = not is_removed and path[0] in ("samplers", "dataset_states", "generators")
    loader = maker()
    for step in (lambda: loader.load_state_dict(state), lambda: iter(loader)):
        before = loader.state_dict(), *order_states(loader)
        refusal = None
        try:
            step()
        except ResumeError as error:
            refusal = str(error)
        if refusal is not None:
            assert len(refusal.split()) > 5
            assert (loader.state_dict(), *order_states(loader)) == before
            return
    expected, found = _two_epochs(maker(), real), _two_epochs(maker(), state)
    num_more = real["_num_yielded"] - state["_num_yielded"] if path == ("_num_yielded",) else 0
    if num_more and len(found[0]) == len(expected[0]) + num_more:
        found[0] = found[0][num_more:]
    assert is_meant or found == expected


@pytest.mark.parametrize(
    ("num_batches", "change"),
    [
        (3, {"kind": None}),
        (3, {"_num_yielded": 4}),
        (3, {"next_worker": 1}),
        (3, {"dataset_states": [{"num_batches": 2, "has_ended": False}]}),
        (3, {"base_seed": 5}),
        (3, {"samplers": {"sampler": {}}}),
        (99, {"generators": {}}),
        (99, {"batch_size": 1}),
        (99, {"epoch": "1"}),
        (99, {"checksum": None}),
        (99, {"version": 5.0}),
        (99, {"sample_seed": -1}),
    ],
)
def test_a_changed_state_is_refused(num_batches: int, change: Any) -> None:
    """But for what frameworks change, and for the states of samplers and datasets; nothing has changed."""
    state = state_after(make("shuffle, generator"), num_batches)
    loader = make("shuffle, generator")
    before = loader.state_dict(), *order_states(loader)

    for wrong in (state | change, {key: state[key] for key in state.keys() - change.keys()}):
        with pytest.raises(
            ResumeError, match=r"not a state of a fastload\.DataLoader( of this release, or it|, but a dict)"
        ):
            loader.load_state_dict(wrong)
        assert (loader.state_dict(), *order_states(loader)) == before


def test_a_state_without_a_generator_that_the_loader_has_is_refused() -> None:
    """The loader would go on from wherever this generator happens to be."""
    state = state_after(make("shuffle"), 99)
    loader = make("shuffle, generator")
    before = order_states(loader)

    with pytest.raises(ResumeError, match=r"the state lacks generators\['loader'\], which determines"):
        loader.load_state_dict(state)
    assert order_states(loader) == before


@pytest.mark.parametrize(
    "changed", [{"shuffle": True, "size": 999}, {"shuffle": False}, {"replacement": True}]
)
def test_another_order_of_torchs_samplers_is_found(changed: dict[str, Any]) -> None:
    """Another length, another sampler, and another way to draw give other indices where they are checked."""

    def loader(size: int = 1000, *, shuffle: bool = True, replacement: bool = False) -> DataLoader:
        numbers, drawn = range(size), torch.Generator().manual_seed(3)
        random = RandomSampler(numbers, replacement=replacement, generator=drawn)
        return DataLoader(numbers, 64, sampler=random if shuffle else SequentialSampler(numbers))

    other = loader(**changed)
    other.load_state_dict(state_after(loader(), 1))
    with pytest.raises(ResumeError):
        iter(other)


@pytest.mark.parametrize("text", ["QUJD", base64.b64encode(bytes(5056)).decode()])
def test_all_generators_are_set_or_none(text: str) -> None:
    """One that torch rejects is named; in a state between epochs the other one stays as it was."""

    def both() -> DataLoader:
        sampler = torch.utils.data.RandomSampler(range(8), generator=seeded(3))
        return DataLoader(Numbers(8), 4, sampler=sampler, generator=seeded(4))

    loader = both()
    list(loader)
    state = loader.state_dict()
    state["generators"]["sampler"] = text
    state["crc"] = position._crc_of(state)
    fresh = both()
    before = order_states(fresh)

    with pytest.raises(ResumeError, match="generator of the sampler is damaged: torch rejects"):
        fresh.load_state_dict(state)
    assert order_states(fresh) == before


def test_a_sampler_s_own_error_changes_nothing() -> None:
    """It keeps its type, gets a note that names the sampler, and what was set before it is put back."""
    loader = make("stateful")
    list(loader)
    state = loader.state_dict()
    state["samplers"]["sampler"] = {}
    fresh = make("stateful", generator=seeded())
    state["generators"] = fresh.state_dict()["generators"]
    state["crc"] = position._crc_of(state)
    before = *order_states(fresh), fresh.state_dict()

    with pytest.raises(KeyError, match="round") as caught:
        fresh.load_state_dict(state)
    assert "raised by the sampler when it got its part" in caught.value.__notes__[0]
    assert (*order_states(fresh), fresh.state_dict()) == before
