"""Workers keep memory that they free, within limits, unless the user has set glibc's thresholds."""

from __future__ import annotations

import ctypes
import platform
import resource
import statistics
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fastload
from fastload.system import worker_memory
from fastload.system.worker_memory import keep_freed_memory
from tests.kit.datasets import Made

MIB = 1 << 20
IMAGE_BYTES = 40 * MIB  # above 32 MiB, which glibc maps and unmaps each time unless it is told otherwise
FEW, MANY = 5, 15  # page faults; huge pages of 2 MiB take 20 for an image, others 10,000


def decode(_: int) -> int:
    """The number of page faults of making and freeing an image."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.full(IMAGE_BYTES, 1, np.uint8)  # of malloc, as a decoder's; bytes need not be, without the GIL
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize(
    ("num_workers", "has_thresholds", "keeps"), [(1, False, True), (1, True, False), (0, False, False)]
)
def test_a_worker_faults_in_the_memory_of_an_image_once(
    num_workers: int, has_thresholds: bool, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of the first serve the others; not with the user's thresholds, nor without workers."""
    if has_thresholds:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    options: Any = {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None}
    first, *others = (int(batch) for batch in fastload.DataLoader(Made(decode, 6), 1, **options))
    assert first >= MANY or not keeps
    assert min(others) <= FEW if keeps else statistics.median(others) >= MANY, others


# What page faults cost samples of 40 MB together, before and after a batch had memory, in a new process.
_SAMPLES = """
import resource
import numpy as np
from fastload.memory.lease import BufferPool

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    samples = [np.full(100_000, 1, np.uint8) for _ in range(400)]
    samples.clear()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(), print(faults())
BufferPool(1 << 30).array((40 << 20,), np.uint8)
faults(), print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that keeps freed memory")
def test_without_workers_samples_are_faulted_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch in memory of our own teaches glibc what one that torch frees teaches it."""
    for name in worker_memory._OWN_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    ended = subprocess.run([sys.executable, "-c", _SAMPLES], stdout=subprocess.PIPE, check=True, timeout=60)
    before, after = map(int, ended.stdout.split())
    assert before > 1000
    assert after <= FEW


@pytest.mark.parametrize(
    ("largest", "free_bytes", "num_workers", "variables", "mapped", "kept"),
    [
        (1 << 30, 1 << 40, 4, {}, 64 * MIB, 128 * MIB),
        (32 * MIB, 1 << 40, 4, {}, 32 * MIB, 128 * MIB),  # older releases of glibc refuse more
        (1 << 30, 4 << 30, 8, {}, 32 * MIB, 32 * MIB),  # all together, a sixteenth of the free memory
        (1 << 30, 100 * MIB, 16, {}, 0, 0),
        (1 << 20, 1 << 40, 16, {}, 0, 0),
        (None, 1 << 40, 16, {}, 0, 0),  # another library
        (1 << 30, 1 << 40, 1, {"MALLOC_MMAP_THRESHOLD_": "1"}, 0, 0),
        (1 << 30, 1 << 40, 1, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}, 0, 0),
    ],
)
def test_the_largest_threshold_that_the_library_accepts_is_set(
    largest: Any, free_bytes: int, num_workers: int, variables: Any, mapped: int, kept: int, monkeypatch: Any
) -> None:
    """Where memory is short, the library is another, or the environment has settings, nothing changes."""
    calls: list[tuple[int, int]] = []

    def mallopt(name: int, value: int) -> int:
        if name == -3 and value > largest:
            return 0
        calls.append((name, value))
        return 1

    library: Any = object() if largest is None else SimpleNamespace(mallopt=mallopt)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(worker_memory, "available_bytes", lambda: free_bytes)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert keep_freed_memory(num_workers) == kept
    assert calls == ([(-3, mapped), (-1, kept)] if kept else [])
