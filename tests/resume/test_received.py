"""A batch counts as received when nothing can keep it from the caller any more, and not before."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import Sampler, default_collate

from fastload import DataLoader
from fastload.cache import file_cache
from fastload.device import pinning
from fastload.errors import TooManyFailuresError
from tests.faults import test_signals
from tests.kit import torchs_own
from tests.resume.loaders import labels, make
from tests.resume.zoo import Numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

WHOLE = [[first, first**2, first + 1, (first + 1) ** 2] for first in range(0, 48, 2)]
BAD = 21  # the sample at which something fails; it lies in the batch of number 10
BROKEN = BAD // 2

MODES: dict[str, dict[str, Any]] = {
    "no workers": {},
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "worker_type": "thread"},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "device": {"device": "cuda"},
    "device, workers": {"device": "cuda", "num_workers": 2},
    "cpu": {"device": "cpu", "device_transform": torch.nn.Identity()},
}
BY_MODE = pytest.mark.parametrize("mode", MODES)


class UserError(Exception):
    """What code of the user raises."""


class Order(Sampler[int]):
    """All indices; where it is told to, an index is an error."""

    def __init__(self, error: Any = None) -> None:
        self.error = error

    def __iter__(self) -> Iterator[int]:
        return map(self._index, range(48))

    def _index(self, number: int) -> int:
        if self.error is not None and number == BAD + 16:  # drawn while earlier batches are made
            raise self.error
        return number


class Fails(Numbers):
    """Fails at one sample."""

    def __init__(self, error: Any = UserError, bad: tuple[int, ...] = (BAD,)) -> None:
        super().__init__(48)
        self.error = error
        self.bad = bad

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise self.error
        return super().__getitem__(index)


def collate(samples: Any) -> Any:
    batch = default_collate(samples)
    _fail_at(batch)
    return batch


def _fail_at(batch: torch.Tensor) -> torch.Tensor:
    if BAD in batch[:, 0]:
        raise UserError
    return batch


FAULTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sampler": (UserError, {"sampler": Order(UserError)}),
    "dataset": (UserError, {"dataset": Fails()}),
    "collate_fn": (UserError, {"collate_fn": collate}),
    "batch_transform": (UserError, {"batch_transform": _fail_at}),
    "max_errors": (
        TooManyFailuresError,
        {"dataset": Fails(OSError, (BAD,)), "on_error": "replace", "max_errors": 0},
    ),
}


def loader_of(mode: str, **options: Any) -> DataLoader:
    usual: dict[str, Any] = {"dataset": Numbers(48), "batch_size": 2, "sampler": Order()}
    return DataLoader(**usual | MODES[mode] | options)


pytestmark = pytest.mark.usefixtures("fake")


def taken_until_error(iterator: Any, error: Any) -> list[Any]:
    """The batches up to the error."""
    taken: list[Any] = []
    with pytest.raises(error):
        taken.extend(iterator)  # keeps those before the error
    return taken


def rest_of(mode: str, state: Any, **options: Any) -> list[Any]:
    with loader_of(mode, **options) as resumed:
        resumed.load_state_dict(state)
        return list(resumed)


def assert_each_once(fake: Any, *parts: Any) -> None:
    fake.drain()
    assert sorted(labels(itertools.chain(*parts))) == WHOLE


@BY_MODE
@pytest.mark.parametrize("fault", FAULTS)
def test_a_state_in_the_handler_repeats_what_was_not_received(mode: str, fault: str, fake: Any) -> None:
    """What came before the error, and what comes after a resume without its cause, is the whole epoch."""
    error, options = FAULTS[fault]
    with loader_of(mode, **options) as loader:
        taken = taken_until_error(iter(loader), error)
        state = loader.state_dict()

    assert state["_num_yielded"] == len(taken) > 0
    assert_each_once(fake, taken, rest_of(mode, state))


@BY_MODE
def test_a_caller_who_goes_on_has_had_the_batch_with_the_error(mode: str, fake: Any) -> None:
    """With the next batch it counts: a state of then does not repeat it, and neither does one at the end."""
    with loader_of(mode, dataset=Fails()) as loader:
        iterator = iter(loader)
        taken_until_error(iterator, UserError)
        next(iterator)
        later = loader.state_dict()
        list(iterator)
        end = loader.state_dict()
    rest = labels(rest_of(mode, later))
    fake.drain()

    assert WHOLE[BROKEN] not in rest
    assert later["_num_yielded"] + len(rest) == 24
    assert (end["_num_yielded"], end["_iterator_finished"]) == (24, True)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_in_a_stream(num_workers: int, *, persistent: bool) -> None:
    """The stream is read again from where it stood before the batch with the error."""
    options = {"num_workers": num_workers, "persistent": persistent}
    with make("Stream", **options) as plain:
        whole = labels(plain)
    with make("Stream", collate_fn=_fails_at_21, **options) as loader:
        taken = taken_until_error(iter(loader), UserError)
        state = loader.state_dict()
    with make("Stream", **options) as resumed:
        resumed.load_state_dict(state)

        assert labels(taken) + labels(resumed) == whole


def _fails_at_21(samples: list[int]) -> Any:
    if BAD in samples:
        raise UserError
    return default_collate(samples)


@pytest.mark.filterwarnings("ignore:.pin_memory.")
@pytest.mark.parametrize("mode", ["no workers", "processes", "threads"])
def test_memory_that_cannot_be_pinned(
    mode: str, fake: Any, monkeypatch: Any, pretend_accelerator: Any
) -> None:
    """The batch is repeated that could not be copied to pinned memory."""
    pretend_accelerator()
    monkeypatch.setattr(pinning, "pin_memory", lambda batch, device: _fail_at(batch))
    with loader_of(mode, pin_memory=True) as loader:
        taken = taken_until_error(iter(loader), UserError)
        state = loader.state_dict()
    monkeypatch.undo()

    assert len(taken) == BROKEN
    assert_each_once(fake, taken, rest_of(mode, state))


@pytest.mark.parametrize("mode", ["device", "device, workers", "cpu"])
def test_a_transform_on_the_device_that_fails(mode: str, fake: Any) -> None:
    """The batch is repeated whose transform raised, also if later ones were prefetched."""
    with loader_of(mode, device_transform=_fail_at) as loader:
        iterator = iter(loader)
        fake.drain()
        taken = taken_until_error(iterator, UserError)
        state = loader.state_dict()

    assert len(taken) == BROKEN
    assert_each_once(fake, taken, rest_of(mode, state))


def test_a_device_without_memory_keeps_its_batch(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state in the handler repeats the batch, and so does the next call."""
    real = fake.allocate

    def full(*args: Any) -> Any:
        if is_full:
            raise torch.OutOfMemoryError
        return real(*args)

    monkeypatch.setattr(fake, "allocate", full)
    is_full = False
    with loader_of("device") as loader:
        iterator = iter(loader)
        taken = list(itertools.islice(iterator, 5))
        is_full = True
        taken += taken_until_error(iterator, torch.OutOfMemoryError)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            next(iterator)
        state = loader.state_dict()
        is_full = False
        taken.append(next(iterator))
        later = loader.state_dict()

    assert "tries the same batch again" in caught.value.__notes__[0]
    assert (state["_num_yielded"], later["_num_yielded"]) == (len(taken) - 1, len(taken))
    assert_each_once(fake, taken, rest_of("device", later))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_torchs_own_iterators_count_the_same_way(num_workers: int) -> None:
    """Neither the batch with an error is counted, nor what a transform in this process refuses."""
    for options in ({"dataset": Fails()}, {"batch_transform": _fail_at}):
        workers: dict[str, Any] = {"num_workers": 1, **torchs_own.FORK} if num_workers else {}
        with loader_of("no workers", **workers, **options) as loader:
            iterator = iter(loader)
            taken_until_error(iterator, UserError)
            state = loader.state_dict()
            next(iterator)

            assert state["_num_yielded"] == BROKEN
            assert loader.state_dict()["_num_yielded"] == BROKEN + 2


# --- interruptions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "fault"), [("no workers", "dataset"), ("processes", "sampler")])
def test_ctrl_c_in_the_users_code(mode: str, fault: str, fake: Any) -> None:
    """The batch is repeated at which the user pressed it."""
    options: dict[str, Any] = {"dataset": {"dataset": Fails(KeyboardInterrupt)}}.get(fault, {})
    sampler = Order(KeyboardInterrupt if fault == "sampler" else None)
    with loader_of(mode, sampler=sampler, **options) as loader:
        taken = taken_until_error(iter(loader), KeyboardInterrupt)
        state = loader.state_dict()

    assert taken
    assert_each_once(fake, taken, rest_of(mode, state))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("mode", ["no workers", "processes", "threads", "device"])
def test_ctrl_c_anywhere_in_fastload(mode: str, step: int, fake: Any, monkeypatch: Any) -> None:
    """Wherever it comes in next(): the state has the batches that the caller has, and can be loaded.

    Between the count and the return of a batch is one call, which releases a lock; it is left out.
    """
    monkeypatch.setattr(test_signals, "HAND_OVER", {*test_signals.HAND_OVER, "EpochIterator.__next__"})
    other = loader_of(mode)
    with loader_of(mode) as loader:
        iterator = iter(loader)
        place, num_taken, was_reached = 0, 0, True
        while was_reached:
            place += step
            injection = test_signals.Injection(place, KeyboardInterrupt)
            try:
                with injection:
                    batch = next(iterator)
            except KeyboardInterrupt:
                state = loader.state_dict()
                other.load_state_dict(state)
                assert state["_num_yielded"] == num_taken
                iterator, num_taken = iter(loader), 0
                fake.drain()
            else:
                was_reached = injection.left <= 0
                fake.drain()
                assert labels([batch]) == [WHOLE[num_taken]]
                num_taken += 1
                assert loader.state_dict()["_num_yielded"] == num_taken
        del iterator, batch

    assert place > 20  # or the places were not found


# --- two threads -----------------------------------------------------------------------------------------


class Meanwhile(Sampler[int]):
    """Is asked for its state when an epoch begins; the first time, another thread begins one meanwhile."""

    def __init__(self) -> None:
        self.loader: Any = None
        self.other: Any = None
        self.thread = threading.Thread(target=self._begin)

    def _begin(self) -> None:
        self.other = iter(self.loader)

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def state_dict(self) -> dict[str, int]:
        if self.loader is not None and self.thread.ident is None:
            self.thread.start()
            self.thread.join(0.3)  # it ends now, unless it has to wait
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_two_threads_that_begin_an_epoch_share_nothing(monkeypatch: Any, tmp_path: Any) -> None:
    """They get two epochs of one loader, buffers of their own, and one cache between them."""
    opened = []
    real = file_cache.open_file_cache
    monkeypatch.setattr(file_cache, "open_file_cache", lambda cache: opened.append(cache) or real(cache))
    sampler = Meanwhile()
    with DataLoader(Numbers(8), 2, sampler=sampler, cache=f"lmdb:{tmp_path / 'cache'}") as loader:
        list(loader)
        loader.close()  # the next epoch opens the cache again
        opened.clear()
        sampler.loader = loader
        first = iter(loader)
        sampler.thread.join(30)

        assert len(opened) == 1
        assert {first.position.epoch, sampler.other.position.epoch} == {1, 2}
        assert loader.state_dict()["epoch"] == 2
        assert first._pool._buffers is not sampler.other._pool._buffers
    sampler.loader = sampler.other = None
