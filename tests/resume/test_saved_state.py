"""The dict that a loader's state is: plain, a snapshot, harmless to load, and checked when it comes back."""

from __future__ import annotations

import base64
import contextlib
import copy
import itertools
import os
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, IterableDataset

from fastload import DataLoader
from fastload.errors import ResumeError
from tests.resume.loaders import (
    LENGTH,
    SAMPLERS,
    labels,
    make,
    order_states,
    seeded,
    through_json,
    through_torch_save,
)
from tests.resume.stream_zoo import Stream
from tests.resume.zoo import Keeps, KeepsOrder, Numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Uncounted(IterableDataset[int]):
    """A stream without a state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


class Counted(Numbers):
    """Gives how many samples were read before, and keeps this number as its state."""

    def __getitem__(self, index: int) -> Any:
        number = self.reads
        return torch.cat([super().__getitem__(index), torch.tensor([number])])

    def state_dict(self) -> dict[str, int]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.reads = state["reads"]


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def state_after(loader: DataLoader, num_batches: int) -> dict[str, Any]:
    list(itertools.islice(loader, num_batches))
    state = loader.state_dict()
    loader.close()
    return state


# --- no code runs from it --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "wrap"), [(0, lambda data: data), (2, lambda data: {"progress": "begun", "state": data})]
)
def test_bytes_in_a_state_are_never_unpickled(num_workers: int, wrap: Any, tmp_path: Any) -> None:
    """A pickle in the place of a stream's state is refused, or is given to the dataset as the bytes it is."""
    marker = tmp_path / "unpickled"
    state = state_after(DataLoader(Keeps(), 4, num_workers=num_workers), 1)
    state["dataset_states"] = [wrap(pickle.dumps(Evil(str(marker)))) for _ in state["dataset_states"]]
    loader = DataLoader(Keeps(), 4, num_workers=num_workers)
    try:
        loader.load_state_dict(state)
        next(iter(loader))
    except (ResumeError, TypeError):
        pass  # the dataset finds no position in bytes
    loader.close()

    assert not marker.exists()


# --- a snapshot ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_stream_returned_is_a_snapshot(num_workers: int) -> None:
    """A stream that returns the dict that it goes on to change does not change a state that was taken."""
    loader = DataLoader(Keeps(), 4, num_workers=num_workers)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    before = copy.deepcopy(state)
    list(iterator)

    assert state == before
    assert state["dataset_states"][0]["state"]["position"] == 4 * max(1, num_workers)


def test_what_a_sampler_returned_is_a_snapshot() -> None:
    """A sampler that returns the dict that it goes on to change is resumed where it began its epoch."""
    loader = DataLoader(Numbers(LENGTH), 4, sampler=KeepsOrder(LENGTH))
    list(loader)
    iterator = iter(loader)
    seen = labels(itertools.islice(iterator, 3))
    state = loader.state_dict()
    rest = labels(iterator)
    resumed = DataLoader(Numbers(LENGTH), 4, sampler=KeepsOrder(LENGTH))
    resumed.load_state_dict(state)

    assert labels(resumed) == rest
    assert len(seen) + len(rest) == 13


def test_the_caller_may_change_a_state() -> None:
    """It is small and plain; the caller's changes reach neither the loader that gave it nor another one."""
    loader = DataLoader(Numbers(LENGTH), 4, sampler=KeepsOrder(LENGTH))
    state = state_after(loader, 3)
    again = loader.state_dict()
    resumed = DataLoader(Numbers(LENGTH), 4, sampler=KeepsOrder(LENGTH))
    resumed.load_state_dict(state)
    for part in (state["samplers"]["sampler"], state["samplers"], state["generators"], state):
        part.clear()

    assert loader.state_dict() == again
    assert resumed.state_dict() == again
    assert len(pickle.dumps(again)) < 20_000
    assert through_json(again) == through_torch_save(again) == again
    given = resumed.state_dict()
    given["samplers"]["sampler"]["round"] = 99
    assert len(labels(resumed)) == 10


# --- through files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SAMPLERS)
def test_every_loader_resumes_from_a_file_of_torch_s(kind: str) -> None:
    """With a worker, in the second epoch, after torch.load(weights_only=True)."""
    torch.manual_seed(11)
    with make(kind, 1) as loader:
        list(loader)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        state = through_torch_save(loader.state_dict())
        rest = labels(iterator)
    with make(kind, 1) as resumed:
        resumed.load_state_dict(state)

        assert labels(resumed) == rest


def test_numbers_of_other_libraries_do_not_reach_a_state() -> None:
    """An epoch that was set as a NumPy int is an int in the state."""
    loader = DataLoader(Numbers(8), 4, sampler=DistributedSampler(range(8), 2, 0))
    loader.set_epoch(np.int64(3))
    list(loader)

    assert through_json(loader.state_dict())["epoch"] == 3
    with pytest.raises(TypeError, match="float"):
        loader.set_epoch(1.5)  # type: ignore[arg-type]


# --- damaged states --------------------------------------------------------------------------------------


def _states() -> list[Any]:
    """Loaders of all kinds, each with a state of one like it: before, within, at the end of an epoch."""
    makers: list[Any] = [
        lambda: make("shuffle, generator"),
        lambda: make("shuffle"),
        lambda: make("eager draws"),
        lambda: make("distributed"),
        lambda: make("sampler's own generator"),
        lambda: make("stateful"),
        lambda: DataLoader(Stream(), 3),
        lambda: DataLoader(Uncounted(), 3),
        lambda: DataLoader(Counted(LENGTH), 4),
    ]
    found = []
    for maker in makers:
        for num_batches in ((), (0,), (2,), (99,), (99, 0), (99, 3)):  # of each epoch
            loader = maker()
            for count in num_batches:
                list(itertools.islice(loader, count))
            found.append((maker, through_json(loader.state_dict())))
    return found


STATES = _states()
WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**25), 10**25),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.lists(st.integers(-3, 3), max_size=3),
    st.dictionaries(st.text(max_size=3) | st.integers(0, 3), st.integers(-3, 3), max_size=2),
)


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


def _refusal(step: Callable[[], Any]) -> str | None:
    """The text of the ResumeError that it raises, if it does."""
    try:
        step()
    except ResumeError as error:
        return str(error)
    return None


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
        refusal = _refusal(step)
        if refusal is not None:
            assert len(refusal.split()) > 5
            assert (loader.state_dict(), *order_states(loader)) == before
            return
    expected, found = _two_epochs(maker(), real), _two_epochs(maker(), state)
    num_more = real["_num_yielded"] - state["_num_yielded"] if path == ("_num_yielded",) else 0
    if num_more and len(found[0]) == len(expected[0]) + num_more:
        found[0] = found[0][num_more:]
        # A dataset that counts its reads has read the batches that come again.
        is_meant = is_meant or real["dataset_states"] is not None
    assert is_meant or found == expected


@pytest.mark.parametrize(
    ("num_batches", "change", "text"),
    [
        (3, {"iterator_kind": None}, "an epoch has begun, but 'iterator_kind' is None"),
        (3, {"_iterator_finished": True}, r"it is between epochs, but 'generators' \['default', 'loader'\]"),
        (99, {"_iterator_finished": False}, r"it is within epochs, but 'generators' \['loader'\]"),
        (99, {"iterator_kind": None}, "an epoch has begun, but 'iterator_kind' is None"),
        (3, {"_num_yielded": 4}, "'_num_yielded' is 4, but 'checksum' counts 3"),
        (3, {"next_worker": 1}, "'next_worker' is 1 of 0"),
        (3, {"dataset_states": [{"progress": "begun", "num_batches": 2}]}, "have read fewer batches than 3"),
        (0, {"iterator_kind": "again"}, "its generators do not produce its 'base_seed'"),
        (0, {"iterator_kind": "local", "base_seed": 5}, "its generators do not produce its 'base_seed'"),
        (99, {"generators": {}}, r"the state lacks generators\['loader'\], which determines"),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(num_batches: int, change: Any, text: str) -> None:
    """Values that no loader saves together; the error names both, and nothing has changed."""
    state = state_after(make("shuffle, generator"), num_batches) | change
    loader = make("shuffle, generator")
    before = order_states(loader)

    def load() -> None:
        loader.load_state_dict(state)
        iter(loader)

    with pytest.raises(ResumeError, match=text):
        load()
    assert order_states(loader) == before


def test_a_rank_beyond_the_number_of_ranks_is_refused() -> None:
    """The order of a state says among how many ranks the dataset was split."""
    state = state_after(make("distributed"), 2) | {"rank": 3}

    with pytest.raises(ResumeError, match="'rank' is 3 of 3"):
        make("distributed").load_state_dict(state)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", None),
        ("epoch", True),
        ("_num_yielded", -1),
        ("_iterator_finished", 0),
        ("iterator_kind", []),
        ("base_seed", -5),
        ("sample_seed", 1 << 64),
        ("checksum", [1]),
        ("checksum", [2, 1 << 32]),
        ("generators", {"default": "QUJD\n"}),
        ("samplers", {"sampler": lambda: 0}),
        ("obstacle", 3),
        ("dataset_states", [{"progress": "begun"}]),
        ("next_worker", -1),
        ("version", 3.0),
        ("version", 4),
        ("rank", "0"),
        ("order", {"seed": 1}),
    ],
)
def test_the_error_names_what_is_wrong(key: str, value: Any) -> None:
    """The key, and why its value cannot be read; nothing has changed."""
    state = state_after(make("shuffle, generator"), 2) | {key: value}
    loader = make("shuffle, generator")
    before = loader.state_dict()

    with pytest.raises(ResumeError, match=f"or it is damaged: '{key}'"):
        loader.load_state_dict(state)
    for other in (None, {}, 3):
        with pytest.raises(ResumeError, match=r"not a state of a fastload\.DataLoader"):
            loader.load_state_dict(other)  # type: ignore[arg-type]
    assert loader.state_dict() == before


def test_numbers_that_cannot_be_written() -> None:
    """Python writes no int of 5,000 digits; the error says its type."""
    state = state_after(make("shuffle"), 2)
    for key in ("version", "epoch"):
        with pytest.raises(ResumeError, match=f"{key}.*<int, whose repr"):
            make("shuffle").load_state_dict(state | {key: 10**5000})


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
    options: dict[str, Any] = SAMPLERS["stateful"]()
    fresh = DataLoader(Numbers(LENGTH), 4, generator=seeded(), **options)
    state["generators"] = fresh.state_dict()["generators"]
    before = *order_states(fresh), fresh.state_dict()

    with pytest.raises(KeyError, match="round") as caught:
        fresh.load_state_dict(state)
    assert "raised by the sampler when it got its part" in caught.value.__notes__[0]
    assert (*order_states(fresh), fresh.state_dict()) == before


def test_a_sampler_that_is_missing_within_an_epoch() -> None:
    """A state of a loader with a stateful sampler is none for a loader without, even before a first batch."""
    loader = make("stateful")
    iter(loader)
    resumed = make("in order")
    resumed.load_state_dict(loader.state_dict())

    with pytest.raises(ResumeError, match="has 'sampler', but this loader has no such sampler"):
        iter(resumed)
