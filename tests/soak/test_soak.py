"""The soak finds planted faults, and runs each case again from its seed."""

from __future__ import annotations

import shlex
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.soak import __main__ as command
from tests.soak import datasets, order
from tests.soak.case import Case, draw, settled
from tests.soak.compare import SoakError
from tests.soak.run import consume

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.processes import Interpreter


@settings(max_examples=100)
@given(st.integers(0, 2**62))
def test_a_case_follows_from_its_seed_and_its_settings_go_together(seed: int) -> None:
    """The same seed gives the same case, and settling it again changes nothing."""
    case = draw(seed)

    assert case == draw(seed)
    assert case == settled(case)
    # What is printed of a case can be given to --with in a shell.
    assert Case(seed).changed(shlex.split(case.settings())) == case


def _one_value_wrong(samples: list[Any]) -> Any:
    images, labels = datasets.default_collate(samples)
    images[-1, 0, 0, 0] += labels[-1].item() == 7
    return [images, labels]


_last: list[Any] = []


def _writes_into_the_batch_before(samples: list[Any]) -> Any:
    for images, _ in _last:
        images[0] = 0
    _last[:] = [datasets.default_collate(samples)]
    return _last[0]


def _another_dtype(samples: list[Any]) -> Any:
    images, labels = datasets.default_collate(samples)
    return [images.to(torch.int16), labels]


# By name: a wrong collate function, or indices that are not due, or no error where one is; and the message.
PLANTED: dict[str, tuple[Any, str]] = {
    "value": (
        _one_value_wrong,
        r"batch 1 of .*, indices \(4, 5, 6, 7\), is wrong when it came: batch\[0\]: 1 of",
    ),
    "held": (
        _writes_into_the_batch_before,
        r"batch \d of .* is wrong (while it was held|after the epoch): batch\[0\]",
    ),
    "dtype": (_another_dtype, "expected torch.uint8 .*, got torch.int16"),
    "order": ([0, 1, 2, 3, 5, 4, *range(6, 12)], "batch 1 of epoch 1, .* is wrong when it came"),
    "too few": (list(range(8)), "epoch 1 ended 1 batches early"),
    "too many": (list(range(13)), "batch 3 of epoch 1 came after the end"),
    "no error": (None, "came where the error of sample 4 was expected"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which batch is wrong, when and where, or what is missing."""
    planted, message = PLANTED[name]
    if planted is None:
        monkeypatch.setattr(datasets, "raises_at", lambda index: False)
    elif callable(planted):
        collate = datasets.COLLATES["default"]._replace(given=planted)
        monkeypatch.setitem(datasets.COLLATES, "default", collate)
    else:
        due = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        monkeypatch.setattr(order, "sampling", lambda case, generator: {"batch_size": 4, "sampler": planted})
        monkeypatch.setattr(order, "_drawn", lambda case, given, epoch: due)
        read = lambda self, index: datasets.known_sample(self.case, index)  # noqa: E731
        monkeypatch.setattr(datasets.Samples, "__getitem__", read)

    with pytest.raises(SoakError, match=message):
        consume(Case(3, raises=planted is None), tmp_path)
    _last.clear()


def test_a_failure_prints_the_case_and_how_to_run_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    """The output has the settings, the difference and the command, and the exit code is 1."""
    soak: Any = Namespace(run=lambda case: "SoakError: it was wrong" if case.seed == 12 else None)

    assert command.run_cases(soak, map(draw, range(12, 20)), 0.01) == 1
    out = capsys.readouterr().out
    assert f"FAILED {draw(12)}" in out
    assert "SoakError: it was wrong\nreplay: " in out
    assert "-m tests.soak --case 12\n" in out
    assert command.run_cases(soak, [draw(13)]) == 0


_COMMAND = 'import runpy\nrunpy.run_module("tests.soak", run_name="__main__", alter_sys=True)\n'


def test_a_case_that_hangs_ends_with_all_stacks(interpreter: Interpreter) -> None:
    """The command shows the stacks of its process and of the worker, and ends both."""
    changes = ["mode=reads", "source=plain", "num_workers=1", "delay_ms=100000"]

    done = interpreter.run(_COMMAND, "--case", "3", "--limit", "3", "--with", *changes)

    assert done.returncode == 1
    assert "no end after 3 s" in done.stderr
    assert "in consume" in done.stderr
    assert "Fatal Python error: Aborted" in done.stderr  # the worker's stack
    assert "in __getitem__" in done.stderr
    assert "replay: " in done.stderr
    assert "source=plain delay_ms=100000 num_workers=1" in done.stderr


_LEAKS = """
import os, subprocess, threading
from fastload.memory.segment import create_slot_segment
from tests.kit import leaks
from tests.soak import run
from tests.soak.case import Case

leaks.GRACE_S = 0.1
gate, children, kept = threading.Event(), [], []

def keep(segment, mapping):
    segment.close()
    kept.append(mapping)

leaks = {
    "threads": lambda *_: threading.Thread(target=gate.wait, daemon=True).start(),
    "descriptors": lambda *_: os.dup(0),
    "child processes": lambda *_: children.append(subprocess.Popen(["sleep", "100"])),
    "shared memory": lambda *_: keep(*create_slot_segment(1 << 20)),
}
told = {}
soak = run.Soak(60)
try:
    for name, leak in leaks.items():
        run._ALL_MODES["reads"] = leak
        told[name] = soak.run(Case(3))
finally:
    soak.close()
    for child in children:
        child.kill()
for name in leaks:
    assert "left behind: " in told[name] and f"'{name}': " in told[name], told
"""


def test_what_a_case_leaves_behind_is_found(interpreter: Interpreter) -> None:
    """The soak reports a thread, a descriptor, a child process, and the shared memory of a batch."""
    done = interpreter.run(_LEAKS)

    assert done.returncode == 0, done.stderr
