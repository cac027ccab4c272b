"""Whom the host waits for, the data or the device, on the virtual clock of a device that only takes time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import fastload
from fastload import DataLoader
from fastload.device import stream_prefetcher
from fastload.device.stream_prefetcher import StreamPrefetcher
from fastload.epochs import iterator, on_device, stats
from fastload.profiling import recorder
from tests.device.timed import MS, Clock, TimedBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (stream_prefetcher, iterator, stats, recorder):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def timed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> TimedBackend:
    """The device of every loader with device="cuda"."""
    backend = TimedBackend(clock)
    monkeypatch.setattr(on_device, "choose_backend", lambda device, _: backend)
    return backend


class Takes(torch.utils.data.Dataset[int]):
    """Samples that take milliseconds of the host."""

    def __init__(self, clock: Clock, sample_ms: Callable[[int], float], length: int = 60) -> None:
        self.clock, self.sample_ms, self.length = clock, sample_ms, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.clock.now_ns += round(self.sample_ms(index) * MS)
        return index


def steps(batches: Any, backend: TimedBackend, step_ms: float, host_ms: float) -> int:
    """An epoch: the host works, and launches one kernel, for each batch; returns how many there were."""
    number = 0
    for _ in batches:
        backend.clock.now_ns += round(host_ms * MS)
        backend.kernel(step_ms)
        number += 1
    return number


def test_a_device_that_is_never_idle_waits_for_no_data(timed: TimedBackend) -> None:
    """What the host is held up by the device in next() is a figure of its own; wait_share stays at 0."""
    with DataLoader(Takes(timed.clock, lambda _: 0.5), 1, device="cuda") as loader:
        steps(loader, timed, step_ms=50, host_ms=5)
        found = loader.stats()
    assert timed.idle_ns == 0
    assert found.wait_share is not None
    assert found.wait_share < 0.02
    assert found.device_wait_s > 0.8 * found.step_total_s > 0


def test_a_device_that_waits_for_data_is_said_to(timed: TimedBackend) -> None:
    """The reverse: slow samples are waits, and none of them is counted as the device's."""
    with DataLoader(Takes(timed.clock, lambda _: 20), 1, device="cuda") as loader:
        steps(loader, timed, step_ms=5, host_ms=1)
        found = loader.stats()
    assert found.device_wait_s == 0
    assert found.wait_share == pytest.approx(20 / 21, abs=0.05)


def test_the_profile_blames_no_loader_for_a_busy_device(timed: TimedBackend) -> None:
    """The waits that it sums up are those for data."""
    with (
        fastload.profile() as profile,
        DataLoader(Takes(timed.clock, lambda _: 0.5), 1, device="cuda") as loader,
    ):
        steps(loader, timed, step_ms=50, host_ms=5)
        (record,) = profile._records.values()
    waited_ns = sum(step.end_ns - step.start_ns for step in list(record.steps)[3:])
    assert waited_ns < 0.02 * timed.clock.now_ns


def test_ready_batches_are_handed_over_without_waiting_for_the_next(clock: Clock) -> None:
    """The first batch waits for no other, where the source can say that it would have to wait."""
    backend, pulled = TimedBackend(clock), []

    def source() -> Iterator[torch.Tensor]:
        for number in range(3):
            pulled.append(number)
            yield torch.tensor([number])

    copies_ahead = StreamPrefetcher(source(), backend, backend.make_stream(), 2, poll=lambda: None)
    assert int(next(copies_ahead)) == 0
    assert pulled == [0]
    assert [int(batch) for batch in copies_ahead] == [1, 2]


class Moves:
    """A leaf that moves itself, at hand-over."""

    def to(self, device: torch.device) -> Moves:
        return self


def test_leaves_that_move_late_do_not_shorten_the_lead(clock: Clock) -> None:
    """The host may be as many steps ahead of its device as with other batches."""
    leads = []
    for batch in (torch.zeros(3), [torch.zeros(3), Moves()]):
        clock.now_ns = 0
        backend = TimedBackend(clock)
        lead = 0
        for _ in StreamPrefetcher(iter([batch] * 20), backend, backend.make_stream(), 2):
            backend.kernel(50)
            lead += clock.now_ns < 40 * MS  # before the first kernel has ended
        leads.append(lead)
    assert leads[0] == leads[1] > 1
