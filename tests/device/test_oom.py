"""Out of memory: parts, weights, gradients and frames of a step that is tried again; the batch that fits."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from fastload.training import oom
from fastload.training.oom import find_batch_size, retry_on_oom, split_batch
from tests.device.conftest import CUDA


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
def test_every_sample_is_in_one_part_that_fits_or_the_error_comes_out(
    num_samples: int, fits: int, min_size: int
) -> None:
    """Parts are halved, even, in order, no smaller than min_size, and their weights add up to 1.

    Each call starts from the whole batch; at min_size torch's own error comes out, with a note of the sizes.
    """
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
    calls, parameter = [], nn.Parameter(torch.ones(1))

    def step(part: Any, weight: float = 1.0) -> None:
        calls.append(len(part))
        (parameter * 3).sum().backward()
        raise error

    with pytest.raises(type(error)) as caught:
        retry_on_oom(step, numbered(8), model=[parameter])
    assert caught.value is error
    assert calls == [8]
    assert parameter.grad is not None
    assert parameter.grad.item() == 3
    with pytest.raises(type(error)):
        find_batch_size(step, numbered)


# --- gradients --------------------------------------------------------------------------------------------


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


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
    for ours, whole in zip(gradients(model), gradients(expected), strict=True):
        assert torch.allclose(ours, whole)


@pytest.mark.parametrize("give", [lambda model: model, lambda model: model.parameters(), list])
def test_gradients_are_put_back_as_they_were(give: Any) -> None:
    """After the last failure values, identity and absence of gradients are those of the entry."""
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(3)])
    model[0].grad = torch.tensor([5.0, 6.0])
    model[1].grad = torch.tensor([7.0, 8.0])
    at_entry = [parameter.grad for parameter in model]

    def step(part: torch.Tensor, weight: float) -> None:
        sum((parameter * 2).sum() for parameter in model).backward()  # type: ignore[union-attr]
        model[1].grad = None
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        retry_on_oom(step, numbered(4), model=give(model))
    assert [parameter.grad for parameter in model][2] is None
    assert all(p.grad is g for p, g in zip(model, at_entry, strict=True))
    assert [g.tolist() for g in at_entry[:2]] == [[5.0, 6.0], [7.0, 8.0]]


# --- memory of the failed try -----------------------------------------------------------------------------


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


# --- splitting --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    image: Any
    paths: list[str]


def test_nests_are_split_along_the_first_dimension() -> None:
    """Tensors, per-sample lists and tuples of names are cut; sizes, scalars and other things are shared."""
    shared = object()
    batch = {
        "image": torch.arange(12).reshape(4, 3),
        "both": [torch.arange(4), (torch.arange(4) + 4,)],
        "names": ("a", "b", "c", "d"),
        "captions": [["1"], ["2", "2"], [], ["4"]],
        "size": (224, 224, 3, 1),
        "temperature": torch.tensor(0.5),
        "shared": shared,
        "box": (array := np.arange(4)),
        "sample": Sample(torch.arange(4), ["e", "f", "g", "h"]),
    }
    (first, first_size), (last, last_size) = split_batch(batch, 2)
    assert (first_size, last_size) == (2, 2)
    assert first["image"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert last["image"].data_ptr() == batch["image"][2].data_ptr()
    assert [t.tolist() for t in (last["both"][0], last["both"][1][0])] == [[2, 3], [6, 7]]
    assert (first["names"], last["names"]) == (("a", "b"), ("c", "d"))
    assert last["captions"] == [[], ["4"]]
    assert last["size"] == (224, 224, 3, 1)
    assert last["temperature"] is batch["temperature"]
    assert first["shared"] is shared
    assert first["box"] is last["box"] is array
    assert last["sample"].image.tolist() == [2, 3]
    assert last["sample"].paths == ["g", "h"]
    assert len(batch["names"]) == 4


def test_a_split_of_ones_own() -> None:
    """Batches of any kind can be retried by a function that divides them."""

    def split(text: str, num_parts: int) -> list[tuple[str, int]]:
        size = len(text) // num_parts
        return [(text[n : n + size], size) for n in range(0, len(text), size)]

    def step(part: str, weight: float) -> tuple[str, float]:
        if len(part) > 2:
            raise torch.OutOfMemoryError
        return part, weight

    results = retry_on_oom(step, "abcdefgh", model=None, split=split)
    assert results == [("ab", 0.25), ("cd", 0.25), ("ef", 0.25), ("gh", 0.25)]


# --- what is refused --------------------------------------------------------------------------------------

TWO, FOUR = numbered(2), torch.full((4, 2), 77.0)
NO_MODEL = "model should be a module, its parameters, or None.*got "
PACKED = nn.utils.rnn.pack_sequence([torch.zeros(2)] * 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"min_size": 0}, ValueError, "min_size should be at least 1 sample, but got 0"),
        ({"min_size": "2"}, TypeError, "min_size should be an int, a number of samples, but got '2'"),
        ({"min_size": True}, TypeError, "but got True"),
        ({"start": 0, "limit": 4}, ValueError, "start should be"),
        ({"start": 5, "limit": 4}, ValueError, "start should be"),
        ({"start": 1.5}, TypeError, "start should be an int, a number of samples, but got"),
        ({"limit": True}, TypeError, "limit should be an int, a number of samples, but got"),
        ({"model": lambda model: [model]}, TypeError, f"{NO_MODEL}Sequential"),
        ({"model": lambda model: torch.optim.SGD(model.parameters())}, TypeError, f"{NO_MODEL}SGD"),
        ({"model": lambda model: dict(model.named_parameters())}, TypeError, f"{NO_MODEL}str"),
        ({"model": lambda model: model.named_parameters()}, TypeError, f"{NO_MODEL}tuple"),
        ({"model": lambda model: model[0].weight}, TypeError, f"{NO_MODEL}Parameter"),
        ({"batch": {"names": ["a"]}}, TypeError, "dict without any.*split="),
        ({"batch": torch.tensor(1)}, TypeError, "without any.*split="),
        ({"batch": (torch.zeros(4, 2), torch.zeros(3))}, ValueError, r"\(4, 2\), \(3,\).*split="),
        ({"batch": (torch.zeros(2), PACKED)}, TypeError, "PackedSequence.*split="),
    ],
)
def test_what_cannot_work_is_refused(arguments: Any, error: type[Exception], message: str) -> None:
    """Before the step is called: the error says what was expected and what kind of thing came."""
    step = OutOfMemoryAbove(100)
    way: Any = find_batch_size if {"start", "limit"} & set(arguments) else retry_on_oom
    data = {"model": None, "batch": TWO} if way is retry_on_oom else {"make_batch": numbered}
    if "model" in arguments:
        arguments = {"model": arguments["model"](small_model())}
    with pytest.raises(error, match=f"(?s){message}"):
        way(step, **data | arguments)
    assert step.sizes == []


@pytest.mark.parametrize(
    ("split", "what"),
    [
        (lambda batch, _: [(batch, 4)], r"parts of \[4\] samples"),
        (lambda batch, n: [(batch[:1], 1)] * n if n > 1 else [(batch, 4)], r"parts of \[1, 1\] samples"),
        (lambda batch, n: [(batch, 4)] + [(batch[:0], 0)] * (n - 1), r"parts of \[4, 0\] samples"),
        (lambda batch, n: batch.chunk(n), "tuple"),
        (lambda batch, _: batch, "Tensor"),
        (lambda batch, _: None, "NoneType"),
    ],
    ids=["one", "samples lost", "empty", "no sizes", "the batch itself", "nothing"],
)
def test_a_split_that_does_not_divide_is_refused(split: Any, what: str) -> None:
    """The error says what a split should give and what kind of thing came, but no tensor's values."""
    with pytest.raises(ValueError, match=f"split should return [12] parts, .*but got {what}") as caught:
        retry_on_oom(OutOfMemoryAbove(1), FOUR, model=None, split=split)
    assert "77" not in str(caught.value)


# --- the batch size that fits -----------------------------------------------------------------------------


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
    while_made = find_batch_size(
        lambda size: None, lambda size: step(numbered(size)), start=start, limit=limit
    )
    assert while_made == min(fits, limit)
    tried = step.sizes[: len(step.sizes) // 2]
    assert len(tried) <= 2 * limit.bit_length() + 1
    assert len(set(tried)) == len(tried)
