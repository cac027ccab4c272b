"""An `iter(loader)` that fails changes nothing: the next one begins where that one should have begun."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fastload import DataLoader
from fastload.epochs import on_device
from fastload.errors import DeviceUnavailableError, ResumeError
from tests.device.fake import FakeBackend
from tests.resume.loaders import labels, order_states, seeded
from tests.resume.stream_zoo import Stream
from tests.resume.zoo import Faulty, Numbers
from tests.rng.draws_zoo import Dice

LENGTH = 24
CUT = 3


def make(**options: Any) -> DataLoader:
    """A loader whose order follows from a generator of its own and whose sampler can be told to fail."""
    sampler = Faulty(LENGTH, seeded(3))
    return DataLoader(Numbers(LENGTH), 4, sampler=sampler, generator=seeded(4), **options)


def stand(loader: DataLoader) -> Any:
    return loader.state_dict(), *order_states(loader)


def interrupted(**options: Any) -> tuple[dict[str, Any], list[list[int]]]:
    """The state in the middle of the second epoch, and what that epoch still brings."""
    with make(**options) as loader:
        list(loader)
        iterator = iter(loader)
        list(itertools.islice(iterator, CUT))
        return loader.state_dict(), labels(iterator)


class Fault:
    """Something that stops an `iter(loader)`, and how it is put right."""

    def __init__(self, error: Any, **broken: Any) -> None:
        self.error = error
        self.broken = broken

    def begin(self, loader: DataLoader) -> None:
        self._whole = {name: self._owner(loader, name).__dict__.get(name) for name in self.broken}
        self._set(loader, self.broken)

    def end(self, loader: DataLoader) -> None:
        self._set(loader, self._whole)

    def _set(self, loader: DataLoader, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._owner(loader, name), name, value)

    @staticmethod
    def _owner(loader: DataLoader, name: str) -> Any:
        return {"fault": loader.sampler, "hook": loader.dataset}.get(name, loader)


SAMPLERS = {
    "sampler, iter": Fault(ArithmeticError, fault="iter"),
    "sampler, interrupted": Fault(KeyboardInterrupt, fault="interrupt"),
    "sampler, other indices": Fault(ResumeError, fault="other"),
    "sampler, too short": Fault(ResumeError, fault="short"),
}
# Under spawn the dataset is pickled, and a lambda cannot be.
UNPICKLABLE: dict[str, Any] = {"hook": lambda: 0, "multiprocessing_context": "spawn"}
FAULTS: list[Any] = [
    *(pytest.param({}, fault, id=f"local, {name}") for name, fault in SAMPLERS.items()),
    *(
        pytest.param({"num_workers": 2, "worker_type": method}, SAMPLERS[f"sampler, {name}"])
        for method, name in [("process", "iter"), ("process", "other indices"), ("thread", "too short")]
    ),
    pytest.param({}, Fault(AssertionError, timeout=5), id="local, timeout"),
    pytest.param({"num_workers": 2}, Fault(ArithmeticError, fault="next"), id="workers, sampler, next"),
    pytest.param({"num_workers": 2}, Fault(AssertionError, prefetch_factor=0), id="workers, prefetch"),
    pytest.param({"num_workers": 1}, Fault(Exception, **UNPICKLABLE), id="a worker that cannot be started"),
    pytest.param({}, Fault(DeviceUnavailableError, device="cuda:99"), id="no such device"),
]


@pytest.mark.filterwarnings("ignore:'pin_memory'")
@pytest.mark.parametrize(("options", "fault"), FAULTS)
def test_a_loaded_state_stays_loaded(options: dict[str, Any], fault: Fault) -> None:
    """After the failure generators, samplers and state are as before, and the next iter() brings the rest."""
    state, rest = interrupted(**options)
    with make(**options) as loader:
        loader.load_state_dict(state)
        before = stand(loader)
        fault.begin(loader)
        for _ in range(2):
            with pytest.raises(fault.error):
                iter(loader)
            assert stand(loader) == before
        fault.end(loader)

        assert labels(loader) == rest
        assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        *(("process", fault) for fault in SAMPLERS.values()),
        *((method, Fault(ArithmeticError, fault="next")) for method in ("process", "thread")),
    ],
)
def test_persistent_workers_stay_where_they_were(method: Any, fault: Fault) -> None:
    """A failed reset of workers that persist changes nothing, and they serve the next iter()."""
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "worker_type": method}
    state, rest = interrupted(**options)
    with make(**options) as loader:
        list(loader)
        workers = loader._iterator
        loader.load_state_dict(state)
        before = stand(loader)
        fault.begin(loader)
        with pytest.raises(fault.error):
            iter(loader)
        assert stand(loader) == before
        fault.end(loader)

        assert labels(loader) == rest
        assert loader._iterator is workers


def test_an_epoch_that_is_under_way_outlives_a_state_that_does_not_fit() -> None:
    """With workers that persist, an older loop goes on after an iter() that ended in a ResumeError."""
    with make(num_workers=2, persistent_workers=True) as loader:
        whole = labels(loader)
    state, _ = interrupted()
    with make(num_workers=2, persistent_workers=True) as loader:
        iterator = iter(loader)
        seen = labels(itertools.islice(iterator, 2))
        loader.load_state_dict(state)
        loader.sampler.fault = "other"  # type: ignore[attr-defined]
        with pytest.raises(ResumeError):
            iter(loader)

        assert seen + labels(iterator) == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_a_state_the_epoch_is_not_counted(num_workers: int) -> None:
    """The epoch's number, from which rng="sample" draws, is that of the epochs that did begin."""
    options: dict[str, Any] = {"batch_size": None, "num_workers": num_workers, "rng": "sample"}
    expected = labels(DataLoader(Dice(8), sampler=Faulty(8, seeded()), generator=seeded(4), **options))
    loader = DataLoader(Dice(8), sampler=Faulty(8, seeded()), generator=seeded(4), **options)
    loader.sampler.fault = "iter"  # type: ignore[attr-defined]
    with pytest.raises(ArithmeticError):
        iter(loader)
    loader.sampler.fault = None  # type: ignore[attr-defined]

    assert loader.state_dict()["epoch"] == 0
    assert labels(loader) == expected


@pytest.mark.parametrize(
    ("options", "persistent"),
    [({"fault": "iter"}, True), ({"fault": "next"}, True), (UNPICKLABLE, False)],
    ids=["iter", "next", "start"],
)
def test_torch_s_own_iterators(options: dict[str, Any], persistent: bool) -> None:
    """A state between epochs stays loaded when torch's iterator cannot be made or begun again."""
    torchs: dict[str, Any] = {"num_workers": 1, "in_order": False, "persistent_workers": persistent}
    with make(**torchs) as loader:
        list(loader)
        state = loader.state_dict()
        expected = labels(loader)
    with make(**torchs) as loader:
        fault = Fault(Exception, **options)
        for _ in range(1 + persistent):
            loader.load_state_dict(state)
            before = stand(loader)
            fault.begin(loader)
            with pytest.raises(fault.error):
                iter(loader)
            assert stand(loader) == before
            fault.end(loader)
            assert labels(loader) == expected


def test_copies_ahead_that_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """With device= an error after the workers have begun leaves the state loaded, too."""
    fake = FakeBackend()
    monkeypatch.setattr(on_device, "choose_backend", lambda device, asker: fake)
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "device": "cuda"}
    state, rest = interrupted()
    with make(**options) as loader:
        list(loader)
        fake.drain()
        loader.load_state_dict(state)
        before = stand(loader)

        def fail(*args: Any) -> Any:
            raise ArithmeticError

        with monkeypatch.context() as patch:
            patch.setattr(on_device, "CopiesAhead", fail)
            with pytest.raises(ArithmeticError):
                iter(loader)
        assert stand(loader) == before
        batches = list(loader)
        fake.drain()

        assert labels(batches) == rest
        fake.check()


class Reluctant(Stream):
    """Refuses its state once."""

    refuses = True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            self.refuses = False
            raise ArithmeticError
        super().load_state_dict(state)


def test_a_stream_that_refuses_its_state() -> None:
    """Without workers its error comes from iter(), and the next iter() goes on where the state stands."""
    loader = DataLoader(Reluctant(), 3)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    resumed = DataLoader(Reluctant(), 3)
    resumed.load_state_dict(state)
    with pytest.raises(ArithmeticError):
        iter(resumed)

    assert [batch.tolist() for batch in resumed] == rest


def test_a_state_before_the_first_batch_through_torch_s_iterator() -> None:
    """An epoch that has brought nothing yet is begun again in the same order, also by torch's iterator."""
    options: dict[str, Any] = {"num_workers": 1, "in_order": False}
    with make(**options) as loader:
        iterator = iter(loader)
        state = loader.state_dict()
        expected = labels(iterator)
    with make(**options) as loader:
        loader.sampler.generator.manual_seed(99)
        loader.load_state_dict(state)

        assert labels(loader) == expected
