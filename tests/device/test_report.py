"""The memory report: figures that move with what is taken, no CUDA context made, devices by a fake."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fastload.memory.segment import Segment, populate
from fastload.training import report
from fastload.training.report import MemoryReport, memory_report
from tests.device.conftest import CUDA

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 2**20


def bytes_of(kind: str, found: MemoryReport) -> int:
    return {
        "fastload-cache": found.cache_bytes,
        "fastload-slot": found.prefetch_bytes,
        "fastload-message": found.other_segment_bytes,
        "fastload": found.other_segment_bytes,
    }[kind]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fastload-cache", "fastload-slot", "fastload-message"])
def test_segments_are_counted_by_the_pages_they_have(name: str) -> None:
    """Each kind grows by its taken pages, once, while a descriptor or a mapping is there."""
    before = memory_report()
    segment, foreign = Segment.create(3 * MIB, name=name), Segment.create(MIB, name="somebody-else")
    second = Segment.attach(os.dup(segment.fd))
    mappings = [each.map(writable=True) for each in (segment, second, foreign)]
    grown = [bytes_of(name, memory_report()) - bytes_of(name, before)]
    for mapping in mappings[1:]:
        populate(mapping)
    for part in (second, segment, *mappings):
        grown.append(bytes_of(name, memory_report()) - bytes_of(name, before))
        part.close()
    foreign.close()
    after = bytes_of(name, memory_report())
    assert grown == [0, 3 * MIB, 3 * MIB, 3 * MIB, 3 * MIB, 0]
    assert after == bytes_of(name, before)


def test_without_proc_figures_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system tells less, the report has None and its table says unknown."""
    monkeypatch.setattr(report, "read_text", lambda path: "")
    monkeypatch.setattr(report, "resource", None)
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    found = memory_report()
    assert (found.process_pss_bytes, found.locked_bytes, found.locked_limit_bytes) == (None, None, None)
    assert found.prefetch_bytes == 0
    assert str(found).count("unknown") == 2


# --- devices ----------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[bool]], list[int]]:
    """Make torch.cuda say that these devices exist, with or without a context; gives the list of resets."""

    def pretend(has_context: list[bool]) -> list[int]:
        resets: list[int] = []

        def of_device_with_context(number: int) -> Callable[[int], int]:
            def read(index: int) -> int:
                assert has_context[index], "reading would make a context"
                return (index + 1) * number * MIB

            return read

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(has_context))
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", has_context.__getitem__, raising=False)
        names = ["memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"]
        for number, name in enumerate(names, start=1):
            monkeypatch.setattr(torch.cuda, name, of_device_with_context(number))
        free, total = of_device_with_context(5), of_device_with_context(60_000)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free(index), total(index)))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
        return resets

    return pretend


def test_devices_with_a_context_are_read_and_others_left_alone(cuda: Any) -> None:
    """Only where this process has a context already is anything asked, or reset."""
    resets = cuda([False, True, True])
    found = memory_report()
    found.reset_peak()
    assert resets == [1, 2]
    first = found.devices[0]
    assert [device.index for device in found.devices] == [1, 2]
    assert found.devices_note == ""
    assert (first.name, first.allocated_bytes, first.reserved_bytes) == ("GPU 1", 2 * MIB, 4 * MIB)
    assert (first.peak_allocated_bytes, first.peak_reserved_bytes) == (6 * MIB, 8 * MIB)
    assert (first.free_bytes, first.total_bytes) == (10 * MIB, 120_000 * MIB)


@pytest.mark.parametrize(("is_built", "note"), [(False, "built without"), (True, "no context yet")])
def test_without_a_context_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch, is_built: bool, note: str
) -> None:
    """No devices, and the reason. The driver is not asked: is_available can break a later fork."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("is_available", "device_count", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, None)
    found = memory_report()
    found.reset_peak()
    assert found.devices == ()
    assert note in found.devices_note
    assert note in str(found)


# --- as text and as data ----------------------------------------------------------------------------------


def test_the_report_is_ready_for_json(cuda: Any) -> None:
    """as_dict() has every field and survives a round trip; so does the text."""
    cuda([True])
    found = memory_report()
    plain = found.as_dict()
    words = [line.split() for line in str(found).splitlines()]
    assert ["name", "GPU", "0"] in words
    assert ["total", "58.59", "GiB"] in words
    assert 0 < found.host_available_bytes <= found.host_total_bytes
    assert 0 < found.process_rss_bytes < found.host_total_bytes
    assert found.process_pss_bytes is None or 0 < found.process_pss_bytes <= 2 * found.process_rss_bytes
    assert json.loads(json.dumps(plain)) == plain
    assert plain["devices"][0]["total_bytes"] == 60_000 * MIB
    assert plain["host_total_bytes"] == found.host_total_bytes


@pytest.mark.parametrize("device", [CUDA])
def test_the_figures_of_a_gpu_follow_the_allocator(device: str) -> None:
    """A tensor shows in allocated and peak; when it is gone the peak stays until it is reset."""
    tensor = torch.zeros(8 * MIB, dtype=torch.uint8, device=device)
    with_tensor = memory_report()
    del tensor
    without = memory_report().devices[0]
    with_tensor.reset_peak()
    after_reset = memory_report().devices[0]
    assert with_tensor.devices[0].index == 0
    assert with_tensor.devices[0].allocated_bytes - without.allocated_bytes == 8 * MIB
    assert without.peak_allocated_bytes >= with_tensor.devices[0].allocated_bytes
    assert after_reset.peak_allocated_bytes == after_reset.allocated_bytes
    assert 0 < after_reset.free_bytes <= after_reset.total_bytes
