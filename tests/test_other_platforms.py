"""Where the system lacks what our transport needs, everything still works, at torch's speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kit.processes import Interpreter

# What macOS and Windows lack, taken away before the import.
_TAKE_AWAY = """
import logging, mmap, os, select, socket, sys

logging.basicConfig(level=logging.WARNING, format="LOG %(message)s", stream=sys.stdout)
import torch.utils.data

del os.memfd_create, os.register_at_fork, os.pidfd_open
"""
_NO_POSIX = """
sys.modules["fcntl"] = None
for module, names in {
    select: ("POLLRDHUP",),
    socket: ("CMSG_SPACE", "SOCK_SEQPACKET", "SCM_RIGHTS"),
    mmap: ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_SHARED"),
}.items():
    for name in names:
        delattr(module, name)
"""
_USE = """
import numpy as np
import fastload

class Source:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return np.full((4, 4, 3), index, np.uint8)

cached = fastload.CachedDataset(Source(), cache="ram")
for num_workers in WORKERS:
    for dataset in (Source(), cached):
        batches = list(fastload.DataLoader(dataset, batch_size=4, num_workers=num_workers))
        first_values = [batch[:, 0, 0, 0].tolist() for batch in batches]
        assert first_values == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
"""


def _run(interpreter: Interpreter, program: str) -> list[str]:
    done = interpreter.run(program)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("LOG ")]


@pytest.mark.slow
def test_without_memfd_loader_and_cache_work_and_say_so_once_each(interpreter: Interpreter) -> None:
    """Without memfd the loader uses torch's iterator and the RAM cache is private: a warning for each."""
    warnings = _run(interpreter, _TAKE_AWAY + "WORKERS = (0, 1, 1)" + _USE)

    assert len(warnings) == 2, warnings
    assert any("workers use torch's own transport" in line for line in warnings)
    assert any("keeps its own copy" in line for line in warnings)


@pytest.mark.slow
def test_without_anything_of_linux_the_package_imports_and_works_in_this_process(
    interpreter: Interpreter,
) -> None:
    """On a system with neither descriptors over sockets nor private mappings, num_workers=0 works."""
    _run(interpreter, _TAKE_AWAY + _NO_POSIX + "WORKERS = (0,)" + _USE)


# Kernels for ARM can have pages of 64 KiB. Then the offset of a mapping and the start of madvise must be
# multiples of that, and segments have whole pages.
_LARGE_PAGES = """
import mmap, os
import numpy as np

PAGE_BYTES = mmap.PAGESIZE = mmap.ALLOCATIONGRANULARITY = 1 << 16
calls = []

class Mapping(mmap.mmap):
    def __new__(cls, fd, length, *args, offset=0, **options):
        assert offset % PAGE_BYTES == 0, offset
        calls.append("map")
        return super().__new__(cls, fd, length, *args, offset=offset, **options)

    def madvise(self, option, start=0, *length):
        assert start % PAGE_BYTES == 0, start
        calls.append("madvise")
        return super().madvise(option, start, *length)

mmap.mmap = Mapping
import fastload
from fastload.memory.segment import Segment
from tests.cache.zoo import Images, MixedImages, RaggedImages
from tests.kit.batches import assert_same_samples

assert Segment.create(1).nbytes == PAGE_BYTES
for kind in (Images, RaggedImages, MixedImages):
    for max_memory in ("auto", 5 * PAGE_BYTES):
        dataset = kind(40)
        cached = fastload.CachedDataset(dataset, max_memory=max_memory)
        for _ in range(2):
            for index in range(40):
                assert_same_samples(cached[index], dataset.sample(index))
        assert 0 < cached.cache_info().num_cached <= 40
        if max_memory == "auto":
            assert cached.cache_info().num_cached == 40
        else:
            assert cached.cache_info().nbytes <= max_memory

class Arrays:
    def __init__(self):
        self.values = np.arange(1 << 16).reshape(-1, 512)
        self.names = fastload.SharedList(map(str, range(len(self.values))))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index], int(self.names[index])

options = {"batch_size": 32, "num_workers": 1, "multiprocessing_context": "fork"}
found = [names.tolist() for _, names in fastload.DataLoader(Arrays(), **options)]
assert sum(found, []) == list(range(128))
assert {"map", "madvise"} <= set(calls)
"""


@pytest.mark.slow
def test_pages_of_64_kib_change_nothing(interpreter: Interpreter) -> None:
    """Caches, slots and lists are aligned to the system's pages, and caches stay within their limit."""
    _run(interpreter, _LARGE_PAGES)
