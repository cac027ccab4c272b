"""Workers keep memory that they free, within limits, unless the user has set glibc's thresholds."""

from __future__ import annotations

import ctypes
import resource
import statistics
from typing import Any

import numpy as np
import pytest

import fastload
from fastload.system import worker_memory
from fastload.system.worker_memory import keep_freed_memory

MIB = 1 << 20
IMAGE_BYTES = 40 * MIB  # above 32 MiB, which glibc maps and unmaps each time unless it is told otherwise
FEW, MANY = 5, 15  # page faults; huge pages of 2 MiB take 20 for an image, others 10,000


class Decodes:
    """Sample i is the number of page faults of making and freeing an image."""

    nbytes = IMAGE_BYTES

    def __len__(self) -> int:
        return 6

    def __getitem__(self, _: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.full(self.nbytes, 1, np.uint8)  # of malloc, as a decoder's; bytes need not be, without the GIL
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def faults(**options: Any) -> list[int]:
    """Of the samples of one worker."""
    loader = fastload.DataLoader(Decodes(), 1, num_workers=1, **options)
    return [int(batch) for batch in loader]


def test_a_worker_faults_in_the_memory_of_an_image_once() -> None:
    """Another image of the same size finds the pages of the first one, unless the system has taken them."""
    first, *others = faults(multiprocessing_context="fork")

    assert first >= MANY
    assert min(others) <= FEW, others


def test_the_users_own_thresholds_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """With glibc's variable in the environment, each image is faulted in again."""
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")

    found = faults(multiprocessing_context="fork")

    assert statistics.median(found) >= MANY, found


def test_the_process_of_the_loader_is_unchanged() -> None:
    """Only workers keep freed memory: without them, each image is faulted in again."""
    found = [int(batch) for batch in fastload.DataLoader(Decodes(), 1)]

    assert statistics.median(found) >= MANY, found


class Library:
    """A C library that accepts thresholds up to a limit."""

    def __init__(self, largest_bytes: int) -> None:
        self.largest_bytes = largest_bytes
        self.calls: list[tuple[int, int]] = []

    def mallopt(self, name: int, value: int) -> int:
        """1 if the value is accepted."""
        if name == -3 and value > self.largest_bytes:
            return 0
        self.calls.append((name, value))
        return 1


def in_place_of_libc(monkeypatch: pytest.MonkeyPatch, library: Any, free_bytes: int = 1 << 40) -> None:
    """Let the module find this library, and this much free memory."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(worker_memory, "available_bytes", lambda: free_bytes)


@pytest.mark.parametrize(("largest", "mapped"), [(1 << 30, 64 * MIB), (32 * MIB, 32 * MIB)])
def test_the_largest_threshold_that_the_library_accepts_is_set(
    monkeypatch: pytest.MonkeyPatch, largest: int, mapped: int
) -> None:
    """Older releases of glibc refuse more than 32 MiB."""
    library = Library(largest)
    in_place_of_libc(monkeypatch, library)

    assert keep_freed_memory(4) == 128 * MIB
    assert library.calls == [(-3, mapped), (-1, 128 * MIB)]


def test_all_workers_together_keep_a_sixteenth_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 GiB free, eight workers keep 32 MiB each."""
    library = Library(1 << 30)
    in_place_of_libc(monkeypatch, library, 4 << 30)

    assert keep_freed_memory(8) == 32 * MIB
    assert library.calls == [(-3, 32 * MIB), (-1, 32 * MIB)]


@pytest.mark.parametrize(
    ("library", "free_bytes"),
    [(Library(1 << 30), 100 * MIB), (object(), 1 << 40), (Library(1 << 20), 1 << 40)],
    ids=["little memory", "another library", "refused"],
)
def test_otherwise_nothing_changes(monkeypatch: pytest.MonkeyPatch, library: Any, free_bytes: int) -> None:
    """Workers go on as before."""
    in_place_of_libc(monkeypatch, library, free_bytes)

    assert keep_freed_memory(16) == 0
    assert not getattr(library, "calls", [])


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_MMAP_THRESHOLD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")],
)
def test_settings_in_the_environment_count(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """The library is not called."""
    library = Library(1 << 30)
    in_place_of_libc(monkeypatch, library)
    monkeypatch.setenv(name, value)

    assert keep_freed_memory(1) == 0
    assert library.calls == []
