"""A clock for verdicts that rest on times."""

from __future__ import annotations

import time

import pytest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes in sleeps, and by a microsecond at each look at a clock, however busy the machine is."""
    now_ns = 0

    def look() -> int:
        nonlocal now_ns
        now_ns += 1000
        return now_ns

    def sleep(seconds: float) -> None:
        nonlocal now_ns
        now_ns += round(seconds * 1e9)

    for name in ("perf_counter_ns", "thread_time_ns", "process_time_ns"):
        monkeypatch.setattr(time, name, look)
    monkeypatch.setattr(time, "perf_counter", lambda: look() / 1e9)
    monkeypatch.setattr(time, "sleep", sleep)
