"""tests/kit: comparisons tell batches apart, and the leak guard sees all processes below this one."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import numpy as np
import pytest
import torch

from tests.kit import leaks
from tests.kit.batches import assert_same_batches, assert_same_samples
from tests.kit.datasets import Point

ROWS = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ROWS, ROWS + 1),
        (ROWS, ROWS.double()),
        (ROWS, ROWS.reshape(3, 2)),
        (ROWS, ROWS.numpy()),
        (ROWS, ROWS.clone().requires_grad_()),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (np.arange(3), np.arange(3, dtype=np.int32)),
        (np.array([None, 1]), np.array([None, 2])),
        (np.float32(1), np.float32(2)),
        ([1, 2], (1, 2)),
        ([1, 2], [1]),
        (Point(1, 2), (1, 2)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": [ROWS, 1]}, {"a": [ROWS, 2]}),
        (ValueError("one"), ValueError("two")),
        (1, True),
        (1.0, float("nan")),
    ],
    ids=str,
)
def test_what_differs_in_value_or_in_kind_is_told_apart(one: Any, other: Any) -> None:
    """By both comparisons, in either order."""
    for compare in (assert_same_batches, assert_same_samples):
        compare(one, one)
        for pair in ((one, other), (other, one)):
            with pytest.raises(AssertionError):
                compare(*pair)


@pytest.mark.parametrize("lists_children", [True, False], ids=["the kernel's list", "psutil"])
def test_children_of_children_are_seen(lists_children: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child and its own child, by either way to find them; a zombie is not one."""
    if lists_children and not leaks.LISTS_CHILDREN:
        pytest.skip("this kernel has no lists of children")
    monkeypatch.setattr(leaks, "LISTS_CHILDREN", lists_children)
    before = leaks.children()
    script = "sleep 100 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert leaks.children() - before == {child.pid, grandchild}
        os.kill(grandchild, signal.SIGKILL)
        child.wait()
        assert leaks.children() == before
