"""The speed switches: set inside, as they were outside, in either of torch's two ways to write them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastload.training import backends
from fastload.training.backends import tune_backends

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKENDS: Any = torch.backends
HAS_FIELDS = hasattr(torch.backends, "fp32_precision")

needs_fields = pytest.mark.skipif(not HAS_FIELDS, reason="this torch has the older switches only")


def read(function: Any) -> Any:
    try:
        return function()
    except RuntimeError:
        return "torch refuses: older switch and newer field disagree"


def state() -> dict[str, Any]:
    """All that can be read of the switches."""
    found = {
        "benchmark": BACKENDS.cudnn.benchmark,
        "matmul allow": read(lambda: BACKENDS.cuda.matmul.allow_tf32),
        "cudnn allow": read(lambda: BACKENDS.cudnn.allow_tf32),
        "matmul precision": read(torch.get_float32_matmul_precision),
    }
    if HAS_FIELDS:
        found |= {
            "generic": BACKENDS.fp32_precision,
            "cudnn": BACKENDS.cudnn.fp32_precision,
            "matmul": BACKENDS.cuda.matmul.fp32_precision,
            "conv": BACKENDS.cudnn.conv.fp32_precision,
            "rnn": BACKENDS.cudnn.rnn.fp32_precision,
            "cpu matmul": BACKENDS.mkldnn.matmul.fp32_precision,
        }
    return found


def reset() -> None:
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    BACKENDS.cudnn.benchmark = False
    if HAS_FIELDS:
        BACKENDS.fp32_precision = "none"
        BACKENDS.cudnn.fp32_precision = "none"
        BACKENDS.cuda.matmul.fp32_precision = "none"
        BACKENDS.mkldnn.matmul.fp32_precision = "none"
        BACKENDS.cudnn.conv.fp32_precision = "tf32"
        BACKENDS.cudnn.rnn.fp32_precision = "tf32"


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """Every test starts and ends with torch's defaults."""
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
if HAS_FIELDS:
    STEPS |= {
        "matmul tf32": lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
        "matmul ieee": lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "ieee"),
        "conv ieee": lambda: setattr(BACKENDS.cudnn.conv, "fp32_precision", "ieee"),
        "rnn ieee": lambda: setattr(BACKENDS.cudnn.rnn, "fp32_precision", "ieee"),
        "all tf32": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
        "all ieee": lambda: setattr(BACKENDS, "fp32_precision", "ieee"),
    }

SWITCHES = st.sampled_from([None, True, False])


@pytest.mark.slow
@given(steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=4), tf32=SWITCHES, benchmark=SWITCHES)
def test_everything_reads_the_same_afterwards(
    steps: list[str], tf32: bool | None, benchmark: bool | None
) -> None:
    """Whatever was set before is there again after the block, which may raise; None leaves a switch alone.

    Inside, products and convolutions use TF32, or do not. Where torch's function for precisions was used, the
    older switches, which torch's own compiler reads, say the same.
    """
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
    if HAS_FIELDS and tf32 is not None:
        assert {inside[name] for name in ("matmul", "conv", "rnn")} == {"tf32" if tf32 else "ieee"}
    if tf32 is not None and set(steps) <= {"older medium", "older high", "benchmark"}:
        assert (inside["matmul allow"], inside["cudnn allow"]) == (tf32, tf32)
        assert inside["matmul precision"] == ("high" if tf32 else "highest")
    if tf32 is None:
        assert inside == before | ({} if benchmark is None else {"benchmark": benchmark})


def test_a_torch_without_fields_is_served_by_the_older_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.9 there is nothing else to set, and what is set is put back."""
    older_torch = SimpleNamespace(
        backends=SimpleNamespace(cudnn=torch.backends.cudnn),  # no fp32_precision, and nothing that has one
        get_float32_matmul_precision=torch.get_float32_matmul_precision,
        set_float32_matmul_precision=torch.set_float32_matmul_precision,
    )
    monkeypatch.setattr(backends, "torch", older_torch)
    older = ("matmul allow", "cudnn allow", "matmul precision")
    before = state()
    with tune_backends(tf32=True):
        inside = state()
    after = state()
    assert [inside[name] for name in older] == [True, True, "high"]
    assert [after[name] for name in older] == [before[name] for name in older]


def test_it_decorates_a_function_for_each_of_its_calls() -> None:
    """A decorated function runs with the switches set, every time."""

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


@needs_fields
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("before", ["none", "ieee", "tf32", "bf16"])
def test_products_on_the_cpu_keep_their_precision(before: str, tf32: bool) -> None:
    """But where torch could not read its older switch then: those go by it, to the more exact side."""
    torch.set_float32_matmul_precision("medium" if before == "bf16" else "high")
    BACKENDS.mkldnn.matmul.fp32_precision = before
    with tune_backends(tf32=tf32):
        inside = state()
    expected = before
    if before in ("tf32", "bf16"):
        expected = "tf32" if tf32 else "ieee"
    assert inside["cpu matmul"] == expected
    assert inside["matmul precision"] == ("high" if tf32 else "highest")
    assert state()["cpu matmul"] == before
