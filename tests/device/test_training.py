"""Helpers for training: out of memory, the memory report, and the speed switches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import weakref
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from fastload.memory.segment import Segment, populate
from fastload.training import oom, report
from fastload.training.backends import tune_backends
from fastload.training.oom import find_batch_size, retry_on_oom, split_batch
from fastload.training.report import memory_report
from tests.device.conftest import CUDA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 2**20


class OutOfMemoryAbove:
    """A step that runs out of memory for parts of more than so many samples."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.sizes: list[int] = []
        self.weights: list[float] = []

    def __call__(self, part: Any, weight: float = 1.0) -> list[int]:
        self.sizes.append(len(part))
        if len(part) > self.num_samples:
            raise torch.OutOfMemoryError(f"tried to allocate for {len(part)}")
        self.weights.append(weight)
        return part.tolist()


def numbered(num_samples: int) -> torch.Tensor:
    return torch.arange(num_samples)


def free_nothing() -> None:
    """In the place of the clean-up where a test goes through hundreds of failures: each takes 10 ms."""


# --- parts and weights ------------------------------------------------------------------------------------


@mock.patch.object(oom, "_free_cached_memory", free_nothing)
@given(num_samples=st.integers(1, 70), fits=st.integers(1, 70), min_size=st.integers(1, 5))
@example(num_samples=8, fits=1, min_size=2)
def test_every_sample_is_in_one_part(num_samples: int, fits: int, min_size: int) -> None:
    """Even halves, in order, of weights that add up to 1; the error comes out at min_size, and says so."""
    step, batch = OutOfMemoryAbove(fits), numbered(num_samples)
    max_parts = max(num_samples // min_size, 1)
    if -(-num_samples // max_parts) > fits:
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate for") as caught:
            retry_on_oom(step, batch, model=None, min_size=min_size)
        tried = sorted({min(2**doublings, max_parts) for doublings in range(8)})
        sizes = ", ".join(str(-(-num_samples // parts)) for parts in tried)
        assert f"parts of {sizes} samples, and min_size={min_size}" in caught.value.__notes__[0]
    else:
        for _ in range(2):
            step.sizes.clear(), step.weights.clear()
            results = retry_on_oom(step, batch, model=None, min_size=min_size)
            lengths = [len(result) for result in results]
            weights = step.weights[-len(results) :]
            assert [number for result in results for number in result] == list(range(num_samples))
            assert max(lengths) - min(lengths) <= 1
            assert weights == [length / num_samples for length in lengths]
            assert sum(weights) == pytest.approx(1.0)
            assert step.sizes[0] == num_samples
    assert min(step.sizes) >= min(min_size, num_samples)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), KeyboardInterrupt()])
def test_other_errors_pass_through_at_once(error: BaseException) -> None:
    """Only torch.OutOfMemoryError leads to a second try; gradients stay as the step left them."""
    sizes, parameter = [], nn.Parameter(torch.ones(1))

    def step(part: Any, weight: float = 1.0) -> None:
        sizes.append(len(part))
        (parameter * 3).sum().backward()
        raise error

    with pytest.raises(type(error)) as caught:
        retry_on_oom(step, numbered(8), model=[parameter])
    assert caught.value is error
    assert sizes == [8]
    assert parameter.grad == torch.tensor([3.0])
    with pytest.raises(type(error)):
        find_batch_size(step, numbered)


# --- gradients --------------------------------------------------------------------------------------------


def small_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


@pytest.mark.parametrize(("fits", "has_gradients"), [(1, True), (4, False), (5, True), (9, False)])
def test_gradients_are_those_of_the_whole_batch(fits: int, has_gradients: bool) -> None:
    """Weighted means of the parts add up, on top of gradients that were there, whichever try failed when."""
    inputs = torch.randn(9, 3, dtype=torch.float64)
    expected, model = small_model(), small_model()
    for each in (expected, model):
        if has_gradients:
            each(inputs).sum().backward()
    expected(inputs).square().mean().backward()

    def step(part: torch.Tensor, weight: float) -> float:
        loss = model(part).square().mean()
        (loss * weight).backward()
        if len(part) > fits:
            raise torch.OutOfMemoryError("after backward")
        return loss.item() * weight

    losses = retry_on_oom(step, inputs, model=model)
    assert sum(losses) == pytest.approx(expected(inputs).square().mean().item())
    for ours, whole in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours.grad, whole.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("give", [lambda model: model, lambda model: model.parameters(), list])
def test_gradients_are_put_back_as_they_were(give: Any) -> None:
    """After the last failure values, identity and absence of gradients are those of the entry."""
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(3)])
    at_entry = [torch.tensor([5.0, 6.0]), torch.tensor([7.0, 8.0]), None]
    for parameter, gradient in zip(model, at_entry, strict=True):
        parameter.grad = gradient

    def step(part: torch.Tensor, weight: float) -> None:
        sum((parameter * 2).sum() for parameter in model).backward()  # type: ignore[union-attr]
        model[1].grad = None
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        retry_on_oom(step, numbered(4), model=give(model))
    assert all(p.grad is g for p, g in zip(model, at_entry, strict=True))
    assert [g.tolist() for g in at_entry[:2]] == [[5.0, 6.0], [7.0, 8.0]]  # type: ignore[union-attr]


@pytest.mark.parametrize("has_cycle", [False, True])
def test_the_failed_steps_tensors_are_dead_when_the_next_try_starts(has_cycle: bool) -> None:
    """Nothing keeps the frame of a failed try, even if it is part of a reference cycle."""
    watched: list[Any] = []
    alive: list[list[bool]] = []

    def step(part: torch.Tensor, weight: float) -> torch.Tensor:
        alive.append([tensor() is not None for tensor in watched])
        activation = torch.zeros(len(part), 10)
        watched.append(weakref.ref(activation))
        keeps = [activation]
        if has_cycle:
            keeps.append(keeps)  # type: ignore[arg-type]
        if len(part) in (9, 5):
            raise torch.OutOfMemoryError
        return activation  # also for the first of two parts, of 4: it is dropped as well

    gc.disable()
    try:
        retry_on_oom(step, numbered(9), model=None, min_size=2)
    finally:
        gc.enable()
    assert len(alive) == 7  # 9; 4, 5; and the four parts that fit
    assert alive[1] == [False]
    assert alive[3] == [False, False, False]


@pytest.mark.parametrize("in_use", [True, False])
def test_the_caches_are_emptied_where_cuda_is_used(in_use: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's cached blocks go back to the device, once per failure and at the end of a search."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    retry_on_oom(OutOfMemoryAbove(2), numbered(8), model=None)
    assert len(calls) == 2 * in_use
    step = OutOfMemoryAbove(5)
    find_batch_size(step, numbered)
    assert len(calls) == in_use * (2 + sum(size > 5 for size in step.sizes) + 1)


@pytest.mark.parametrize("device", [CUDA])
def test_a_real_lack_of_memory_is_survived(device: str) -> None:
    """Parts that would take twice the device's memory are halved until they take half of it."""
    total_bytes = torch.cuda.get_device_properties(device).total_memory

    def step(part: torch.Tensor, weight: float) -> int:
        return torch.empty(len(part) * (total_bytes // 4), dtype=torch.uint8, device=device).numel()

    results = retry_on_oom(step, numbered(8), model=None)
    torch.cuda.empty_cache()
    assert results == [2 * (total_bytes // 4)] * 4


def test_nests_are_split_along_the_first_dimension() -> None:
    """Tensors, per-sample lists and tuples of names are cut; sizes, scalars and other things are shared."""
    sample, array = dataclasses.make_dataclass("Sample", ["image", "paths"]), np.arange(4)
    batch = {
        "image": torch.arange(12).reshape(4, 3),
        "both": [torch.arange(4), (torch.arange(4) + 4,)],
        "names": ("a", "b", "c", "d"),
        "captions": [["1"], ["2", "2"], [], ["4"]],
        "size": (224, 224, 3, 1),
        "temperature": torch.tensor(0.5),
        "box": array,
        "sample": sample(torch.arange(4), ["e", "f", "g", "h"]),
    }
    (first, first_size), (last, last_size) = split_batch(batch, 2)
    assert (first_size, last_size) == (2, 2)
    assert first["image"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert last["image"].data_ptr() == batch["image"][2].data_ptr()
    assert [t.tolist() for t in (last["both"][0], last["both"][1][0])] == [[2, 3], [6, 7]]
    assert (first["names"], last["names"]) == (("a", "b"), ("c", "d"))
    assert (last["captions"], last["size"]) == ([[], ["4"]], (224, 224, 3, 1))
    assert last["temperature"] is batch["temperature"]
    assert first["box"] is last["box"] is array
    assert (last["sample"].image.tolist(), last["sample"].paths) == ([2, 3], ["g", "h"])
    assert len(batch["names"]) == 4


TWO, MODEL = numbered(2), small_model()
NO_MODEL = "model should be a module, its parameters, or None.*got "
PACKED = nn.utils.rnn.pack_sequence([torch.zeros(2)] * 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"min_size": 0}, ValueError, "min_size should be at least 1 sample, but got 0"),
        ({"min_size": "2"}, TypeError, "min_size should be an int, a number of samples, but got '2'"),
        ({"start": 0, "limit": 4}, ValueError, "start should be"),
        ({"start": 5, "limit": 4}, ValueError, "start should be"),
        ({"start": 1.5}, TypeError, "start should be an int, a number of samples, but got"),
        ({"limit": True}, TypeError, "limit should be an int, a number of samples, but got"),
        ({"model": [MODEL]}, TypeError, f"{NO_MODEL}Sequential"),
        ({"model": 3}, TypeError, f"{NO_MODEL}int"),
        ({"model": MODEL.named_parameters()}, TypeError, f"{NO_MODEL}tuple"),
        ({"model": MODEL[0].weight}, TypeError, f"{NO_MODEL}Parameter"),
        ({"batch": {"names": ["a"]}}, TypeError, "dict without any: pass the tensors alone"),
        ({"batch": torch.tensor(1)}, TypeError, "Tensor without any"),
        (
            {"batch": (torch.zeros(4, 2), torch.zeros(3))},
            ValueError,
            r"agree on its size, but have the shapes \(4, 2\), \(3,\)",
        ),
        (
            {"batch": (torch.zeros(2), PACKED)},
            TypeError,
            "tuple with a PackedSequence: .* divide the batch yourself",
        ),
    ],
)
def test_what_cannot_work_is_refused(arguments: Any, error: type[Exception], message: str) -> None:
    """Before the step is called: the error says what was expected and what kind of thing came."""
    step = OutOfMemoryAbove(100)
    way: Any = find_batch_size if {"start", "limit"} & set(arguments) else retry_on_oom
    data = {"model": None, "batch": TWO} if way is retry_on_oom else {"make_batch": numbered}
    with pytest.raises(error, match=f"(?s){message}"):
        way(step, **data | arguments)
    assert step.sizes == []


@mock.patch.object(oom, "_free_cached_memory", free_nothing)
@given(fits=st.integers(1, 300), start=st.integers(1, 300), limit=st.integers(1, 300))
def test_the_largest_size_that_fits_is_found(fits: int, start: int, limit: int) -> None:
    """The answer fits, one more does not or is past the limit, whatever the start."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        find_batch_size(OutOfMemoryAbove(0), numbered, start=start, limit=max(start, limit))
    assert "one sample does not fit" in caught.value.__notes__[0]
    step = OutOfMemoryAbove(fits)
    start = min(start, limit)
    assert find_batch_size(step, numbered, start=start, limit=limit) == min(fits, limit)
    made = find_batch_size(lambda _: None, lambda size: step(numbered(size)), start=start, limit=limit)
    assert made == min(fits, limit)
    tried = step.sizes[: len(step.sizes) // 2]
    assert len(tried) <= 2 * limit.bit_length() + 1
    assert len(set(tried)) == len(tried)


# --- the memory report ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_segments_are_counted_by_the_pages_they_have() -> None:
    """Each kind grows by its taken pages, once, while a descriptor or a mapping is there."""

    def figures() -> Any:
        found = memory_report()
        return np.array([found.cache_bytes, found.prefetch_bytes, found.other_segment_bytes]) // MIB

    names = ["fastload-cache", "fastload-slot", "fastload-message", "somebody-else"]
    before = figures()
    segments = [Segment.create(number * MIB, name=name) for number, name in enumerate(names, start=1)]
    seconds = [Segment.attach(os.dup(segment.fd)) for segment in segments]
    mappings = [[segment.map(writable=True) for segment in each] for each in (segments, seconds)]
    grown = [figures() - before]
    for mapping in mappings[1]:
        populate(mapping)
    for parts in (seconds, segments, *mappings):
        grown.append(figures() - before)
        for part in parts:
            part.close()
    grown.append(figures() - before)
    assert np.array_equal(grown, [[0, 0, 0], *[[1, 2, 3]] * 4, [0, 0, 0]])


def test_without_proc_figures_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system tells less, the report has None and its table says unknown."""
    monkeypatch.setattr(report, "read_text", lambda path: "")
    monkeypatch.setattr(report, "resource", None)
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    found = memory_report()
    assert (found.process_rss_bytes, found.process_pss_bytes, found.locked_bytes) == (None, None, None)
    assert found.locked_limit_bytes is None
    assert found.prefetch_bytes == 0
    assert str(found).count("unknown") == 3


def test_devices_with_a_context_are_read_and_others_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where this process has a context already is anything asked, or reset; as text and JSON too."""
    has_context, resets = [False, True, True], []

    def figure(number: int) -> Callable[[int], int]:
        def read(index: int) -> int:
            assert has_context[index], "reading would make a context"
            return (index + 1) * number * MIB

        return read

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", has_context.__getitem__, raising=False)
    names = ["memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"]
    for number, name in enumerate(names, start=1):
        monkeypatch.setattr(torch.cuda, name, figure(number))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (figure(5)(index), figure(60_000)(index)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    found = memory_report()
    found.reset_peak()
    assert resets == [1, 2]
    first = found.devices[0]
    assert [device.index for device in found.devices] == [1, 2]
    assert found.devices_note == ""
    assert (first.name, first.allocated_bytes, first.reserved_bytes) == ("GPU 1", 2 * MIB, 4 * MIB)
    assert (first.peak_allocated_bytes, first.peak_reserved_bytes) == (6 * MIB, 8 * MIB)
    assert (first.free_bytes, first.total_bytes) == (10 * MIB, 120_000 * MIB)
    words, plain = [line.split() for line in str(found).splitlines()], found.as_dict()
    assert ["name", "GPU", "1"] in words
    assert ["total", "117.19", "GiB"] in words
    assert json.loads(json.dumps(plain)) == plain
    assert plain["devices"][0]["total_bytes"] == 120_000 * MIB
    assert 0 < plain["host_available_bytes"] <= plain["host_total_bytes"] == found.host_total_bytes
    assert 0 < found.process_rss_bytes < found.host_total_bytes
    assert found.process_pss_bytes is None or 0 < found.process_pss_bytes <= 2 * found.process_rss_bytes


@pytest.mark.parametrize(("is_built", "note"), [(False, "built without CUDA"), (True, "no context yet")])
def test_a_report_without_a_context(monkeypatch: pytest.MonkeyPatch, is_built: bool, note: str) -> None:
    """No devices, and the reason. The driver is not asked: is_available can break a later fork."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("is_available", "device_count", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, None)
    found = memory_report()
    found.reset_peak()
    assert found.devices == []
    assert note in found.devices_note
    assert note in str(found)


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


# --- the speed switches -----------------------------------------------------------------------------------

BACKENDS: Any = torch.backends
FIELDS: dict[str, Any] = {}
if hasattr(torch.backends, "fp32_precision"):  # not before torch 2.9, which has the older switches only
    FIELDS = {
        "generic": BACKENDS,
        "cudnn": BACKENDS.cudnn,
        "matmul": BACKENDS.cuda.matmul,
        "conv": BACKENDS.cudnn.conv,
        "rnn": BACKENDS.cudnn.rnn,
        "cpu matmul": BACKENDS.mkldnn.matmul,
    }


def read(function: Any) -> Any:
    try:
        return function()
    except RuntimeError:
        return "torch refuses: older switch and newer field disagree"


def state() -> dict[str, Any]:
    """All that can be read of the switches."""
    return {
        "benchmark": BACKENDS.cudnn.benchmark,
        "matmul allow": read(lambda: BACKENDS.cuda.matmul.allow_tf32),
        "cudnn allow": read(lambda: BACKENDS.cudnn.allow_tf32),
        "matmul precision": read(torch.get_float32_matmul_precision),
        **{name: owner.fp32_precision for name, owner in FIELDS.items()},
    }


def reset() -> None:
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    BACKENDS.cudnn.benchmark = False
    for name, owner in FIELDS.items():
        owner.fp32_precision = "tf32" if name in ("conv", "rnn") else "none"


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """The test starts and ends with torch's defaults."""
    reset()
    yield
    reset()


STEPS: dict[str, Any] = {
    "older matmul on": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
    "older matmul off": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", False),
    "older cudnn off": lambda: setattr(BACKENDS.cudnn, "allow_tf32", False),
    "older medium": lambda: torch.set_float32_matmul_precision("medium"),
    "older high": lambda: torch.set_float32_matmul_precision("high"),
    "benchmark": lambda: setattr(BACKENDS.cudnn, "benchmark", True),
}
for name in set(FIELDS) & {"generic", "matmul", "conv", "rnn"}:
    for value in ("tf32", "ieee"):
        STEPS[f"{name} {value}"] = functools.partial(setattr, FIELDS[name], "fp32_precision", value)

SWITCHES = st.sampled_from([None, True, False])


@pytest.mark.slow
@given(steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=4), tf32=SWITCHES, benchmark=SWITCHES)
def test_switches_are_put_back(steps: list[str], tf32: bool | None, benchmark: bool | None) -> None:
    """Also after an error. Inside, what GPU and compiler read is TF32, or not; None changes nothing."""
    reset()
    for step in steps:
        STEPS[step]()
    before = state()
    block = tune_backends(tf32=tf32, cudnn_benchmark=benchmark)
    assert state() == before
    with contextlib.suppress(KeyError), block:
        inside = state()
        raise KeyError
    assert state() == before
    if FIELDS and tf32 is not None:
        assert {inside[name] for name in ("matmul", "conv", "rnn")} == {"tf32" if tf32 else "ieee"}
    if tf32 is not None and set(steps) <= {"older medium", "older high", "benchmark"}:
        assert (inside["matmul allow"], inside["cudnn allow"]) == (tf32, tf32)
        assert inside["matmul precision"] == ("high" if tf32 else "highest")
    if tf32 is None:
        assert inside == before | ({} if benchmark is None else {"benchmark": benchmark})


def test_it_decorates_a_function_for_each_of_its_calls() -> None:
    """The switches are set every time."""

    @tune_backends(cudnn_benchmark=True)
    def train() -> bool:
        return bool(BACKENDS.cudnn.benchmark)

    assert [train(), BACKENDS.cudnn.benchmark, train()] == [True, False, True]


@pytest.mark.parametrize("name", ["tf32", "cudnn_benchmark"])
def test_what_is_no_switch_is_refused(name: str) -> None:
    """A value that is neither a bool nor None is named at the call, before any `with`."""
    before = state()
    with pytest.raises(TypeError, match=f"{name} should be True, False or None"):
        tune_backends(**{name: 1})  # type: ignore[arg-type]
    assert state() == before


@pytest.mark.skipif(not FIELDS, reason="this torch has the older switches only")
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("before", ["none", "ieee", "tf32", "bf16"])
def test_products_on_the_cpu_keep_their_precision(before: str, tf32: bool) -> None:
    """But where torch could not read its older switch then: those go by it, to the more exact side."""
    torch.set_float32_matmul_precision("medium" if before == "bf16" else "high")
    BACKENDS.mkldnn.matmul.fp32_precision = before
    with tune_backends(tf32=tf32):
        inside = state()
    assert inside["cpu matmul"] == (before if before in ("none", "ieee") else "tf32" if tf32 else "ieee")
    assert inside["matmul precision"] == ("high" if tf32 else "highest")
    assert state()["cpu matmul"] == before
