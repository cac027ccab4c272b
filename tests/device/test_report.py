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

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kit.processes import Interpreter

MIB = 2**20


def test_the_host_figures_are_plausible() -> None:
    """What is available fits into the machine, and this process has pages."""
    found = memory_report()

    assert 0 < found.host_available_bytes <= found.host_total_bytes
    assert 0 < found.process_rss_bytes < found.host_total_bytes
    assert found.process_pss_bytes is None or 0 < found.process_pss_bytes <= 2 * found.process_rss_bytes
    assert found.locked_bytes is not None


def bytes_of(kind: str, found: MemoryReport) -> int:
    return {
        "fastload-cache": found.cache_bytes,
        "fastload-slot": found.ring_bytes,
        "fastload-message": found.other_segment_bytes,
        "fastload": found.other_segment_bytes,
    }[kind]


@pytest.mark.parametrize("keeps_descriptor", [True, False])
@pytest.mark.parametrize("name", ["fastload-cache", "fastload-slot", "fastload-message", "fastload"])
def test_segments_are_counted_by_the_pages_they_have(name: str, keeps_descriptor: bool) -> None:
    """Each kind grows by its taken pages, while a descriptor or a mapping is there, and once for both."""
    before = memory_report()
    segment = Segment.create(3 * MIB, name=name)
    mapping = segment.map(writable=True)
    untouched = bytes_of(name, memory_report()) - bytes_of(name, before)
    populate(mapping)
    if not keeps_descriptor:
        segment.close()
    taken = bytes_of(name, memory_report()) - bytes_of(name, before)
    mapping.close()
    segment.close()
    after = bytes_of(name, memory_report())

    assert (untouched, taken) == (0, 3 * MIB)
    assert after == bytes_of(name, before)


def test_two_descriptors_and_two_mappings_count_once() -> None:
    """A segment is one piece of memory however often it is open."""
    before = memory_report().cache_bytes
    segment = Segment.create(2 * MIB, name="fastload-cache")
    second = Segment.attach(os.dup(segment.fd))
    mappings = [segment.map(writable=True), second.map(writable=True)]
    for mapping in mappings:
        populate(mapping)
    with_descriptors = memory_report().cache_bytes - before
    segment.close()
    second.close()
    with_mappings = memory_report().cache_bytes - before
    for mapping in mappings:
        mapping.close()

    assert (with_descriptors, with_mappings) == (2 * MIB, 2 * MIB)


def test_other_peoples_segments_are_not_ours() -> None:
    """A memfd of another library is not counted."""
    before = memory_report()
    segment = Segment.create(MIB, name="somebody-else")
    mapping = segment.map(writable=True)
    populate(mapping)
    now = memory_report()
    mapping.close()
    segment.close()

    assert [bytes_of(kind, now) for kind in ("fastload", "fastload-slot", "fastload-cache")] == [
        bytes_of(kind, before) for kind in ("fastload", "fastload-slot", "fastload-cache")
    ]


def test_without_proc_figures_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system tells less, the report has None and its table says unknown."""
    monkeypatch.setattr(report, "read_text", lambda path: "")
    monkeypatch.setattr(report, "resource", None)
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    found = memory_report()

    assert (found.process_pss_bytes, found.locked_bytes, found.locked_limit_bytes) == (None, None, None)
    assert found.ring_bytes == 0
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
    """Only where this process has a context already is anything asked."""
    cuda([False, True, True])
    found = memory_report()
    first = found.devices[0]

    assert [device.index for device in found.devices] == [1, 2]
    assert found.devices_note == ""
    assert (first.name, first.allocated_bytes, first.reserved_bytes) == ("GPU 1", 2 * MIB, 4 * MIB)
    assert (first.peak_allocated_bytes, first.peak_reserved_bytes) == (6 * MIB, 8 * MIB)
    assert (first.free_bytes, first.total_bytes) == (10 * MIB, 120_000 * MIB)


def test_reset_peak_resets_the_devices_with_a_context(cuda: Any) -> None:
    """Every device on which this process has a context by then, no other."""
    resets = cuda([True, False, True])
    memory_report().reset_peak()

    assert resets == [0, 2]


def test_reset_peak_without_a_context_does_nothing() -> None:
    """There are no peaks yet, and no context is made."""
    memory_report().reset_peak()

    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(("is_built", "note"), [(False, "built without"), (True, "no context yet")])
def test_without_a_context_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch, is_built: bool, note: str
) -> None:
    """No devices, and the reason."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    found = memory_report()

    assert found.devices == ()
    assert note in found.devices_note
    assert note in str(found)


def test_before_the_first_cuda_call_the_driver_is_not_asked(interpreter: Interpreter) -> None:
    """Neither is_available nor device_count is called: the first can break a later fork."""
    code = (
        "import torch; torch.backends.cuda.is_built = lambda: True; "
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda.mem_get_info = None; "
        "import fastload.training.report as r; found = r.memory_report(); found.reset_peak(); "
        "import sys; sys.exit(torch.cuda.is_initialized() or found.devices != ())"
    )

    assert interpreter.run(code).returncode == 0


# --- as text and as data ----------------------------------------------------------------------------------


def test_the_text_has_each_figure(cuda: Any) -> None:
    """Also those of each device, under its name."""
    cuda([True, True])
    words = [line.split() for line in str(memory_report()).splitlines()]

    assert ["name", "GPU", "1"] in words
    assert ["total", "117.19", "GiB"] in words


def test_the_report_is_ready_for_json(cuda: Any) -> None:
    """as_dict() has every field and survives a round trip."""
    cuda([True])
    found = memory_report()
    plain = found.as_dict()

    assert json.loads(json.dumps(plain)) == plain
    assert plain["devices"][0]["total_bytes"] == 60_000 * MIB
    assert plain["host_total_bytes"] == found.host_total_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_figures_follow_the_allocator() -> None:
    """A tensor shows in allocated and peak; when it is gone the peak stays until it is reset."""
    tensor = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda:0")
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
