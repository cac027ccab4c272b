"""Where the system lacks what our transport needs, everything still works, at torch's speed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.kit.processes import Interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator

# What systems lack, taken away before the import of fastload; torch has its own ideas of some of these names.
ABSENT = {
    "memfd": "lacks(os, 'memfd_create')",
    "pidfd": "lacks(os, 'pidfd_open'); lacks(signal, 'pidfd_send_signal')",
    "SCM_RIGHTS": "lacks(socket, 'CMSG_SPACE', 'SCM_RIGHTS')",
    "SOCK_SEQPACKET": "lacks(socket, 'SOCK_SEQPACKET')",
    "/proc": "hide_proc() or sys.exit(77)",
    "flock": "refuse('flock', errno.ENOSYS)",
    "fcntl": "sys.modules['fcntl'] = sys.modules['resource'] = None",
    "fork": "lacks(os, 'fork', 'register_at_fork')",
    "affinity": "lacks(os, 'sched_getaffinity')",
    "madvise": "refuse('madvise', errno.EINVAL)",
    "POLLRDHUP": "lacks(select, 'POLLRDHUP')",
    "MAP_SHARED": "lacks(mmap, 'MAP_PRIVATE', 'MAP_ANONYMOUS', 'MAP_SHARED')",
    "user ids": "lacks(os, 'getuid', 'geteuid')",
}
MACOS = ["memfd", "pidfd", "SOCK_SEQPACKET", "/proc", "affinity", "POLLRDHUP"]
WINDOWS = [*MACOS, "SCM_RIGHTS", "fcntl", "fork", "MAP_SHARED", "user ids"]
SYSTEMS = {
    **{f"no {name}": [name] for name in ABSENT if name != "MAP_SHARED"},
    "an old kernel": ["pidfd", "madvise"],
    "gVisor": ["pidfd", "madvise", "affinity"],
    "macOS": MACOS,
    "Windows": WINDOWS,
}
TORCHS_TRANSPORT = "workers use torch's own transport"
NO_CACHE = "cache: none in RAM, because shared memory is not available"
OWN_WORKERS = {"no user ids", "no /proc", "no flock", "no affinity", "no madvise", "no POLLRDHUP"}
SHARED_CACHES = OWN_WORKERS | {"no pidfd", "no SCM_RIGHTS", "no SOCK_SEQPACKET", "no fork"}
SHARED_CACHES |= {"an old kernel", "gVisor"}

_SHARED = """
import errno, json, mmap, os, select, signal, socket, sys, tempfile
import lmdb, psutil, torch.utils.data
from tests.kit.faults import hide_proc, log_lines, refuse

lines = log_lines()

def lacks(module, *names):
    for name in names:
        delattr(module, name)
"""
_CONTRACT = """
import numpy as np
import torch
import fastload
from tests.kit.datasets import Made

source = Made(lambda index: (np.full((4, 4, 3), index, np.uint8), index, torch.tensor([index, 0.5])), 22)

def made(kind, dataset, **options):
    torch.manual_seed(3)
    return kind(dataset, 4, shuffle=True, **options)

def plain(batch):
    return [part.tolist() for part in batch]

found = {}
expected = [plain(batch) for batch in made(torch.utils.data.DataLoader, source)]
caches = {"none": source, "ram": fastload.CachedDataset(source)}
try:
    path = tempfile.mkdtemp() + "/x.lmdb"
    file = fastload.CachedDataset.build(source, path, num_workers=0, progress=False)
    caches["file"] = fastload.CachedDataset(source, cache=file)
except fastload.errors.CacheError as error:
    found["no file"] = str(error)
found["layouts"] = {name: dataset.cache_info().layout for name, dataset in caches.items() if name != "none"}
for num_workers in WORKERS:
    for name, dataset in caches.items():
        for epoch in range(2):  # the second one from the cache
            batches = [plain(batch) for batch in made(fastload.DataLoader, dataset, num_workers=num_workers)]
            assert batches == expected, (name, num_workers, epoch)
    first = made(fastload.DataLoader, source, num_workers=num_workers)
    iterator = iter(first)
    taken = [plain(next(iterator)) for _ in range(2)]
    state = json.loads(json.dumps(first.state_dict()))
    del iterator
    second = made(fastload.DataLoader, source, num_workers=num_workers)
    second.load_state_dict(state)
    try:
        assert taken + [plain(batch) for batch in second] == expected
    except fastload.errors.ResumeError as error:
        assert num_workers
        found["not resumed"] = str(error)
threads = {"num_workers": 1, "worker_type": "thread", "device": "cpu"}
for options in (threads, {"num_workers": "auto" if 1 in WORKERS else 0}):
    assert [plain(batch) for batch in made(fastload.DataLoader, caches["ram"], **options)] == expected
assert fastload.memory_report()
print(json.dumps([found, lines]))
"""


@pytest.fixture(scope="module")
def programs() -> Iterator[Interpreter]:
    """Runs programs that can take parts away."""
    with Interpreter(_SHARED) as interpreter:
        yield interpreter


@pytest.mark.slow
@pytest.mark.parametrize(
    "system",
    [pytest.param(name, marks=[pytest.mark.thorough] * (len(SYSTEMS[name]) == 1)) for name in SYSTEMS],
)
def test_the_public_contract_holds_whatever_a_system_lacks(system: str, programs: Interpreter) -> None:
    """Batches are torch's, from caches too; loaders resume; each loss of speed is told once."""
    names = SYSTEMS[system]
    # torch's own workers need both.
    workers = "(0, 1)" if not {"fork", "SCM_RIGHTS"} & set(names) else "(0,)"
    removed = "\n".join(ABSENT[name] for name in names)
    done = programs.run(f"WORKERS = {workers}\n{removed}\n{_CONTRACT}", exits=False)
    if done.returncode == 77:
        pytest.skip("this user may not change what is mounted")
    assert done.returncode == 0, done.stderr
    found, lines = json.loads(done.stdout)

    assert found["layouts"]["ram"] == ("uniform" if system in SHARED_CACHES else "none")
    needed = {"/proc", "flock", "fcntl"}  # by caches on disk
    assert found["layouts"].get("file") == (None if needed & set(names) else "lmdb")
    assert ("no file" in found) == bool(needed & set(names)), found
    told = [sum(text in line for line in lines) for text in (TORCHS_TRANSPORT, NO_CACHE)]
    is_slow = system not in OWN_WORKERS and not {"fork", "SCM_RIGHTS"} & set(SYSTEMS[system])
    assert told == [is_slow, system not in SHARED_CACHES]
    assert ("not resumed" in found) == is_slow
    assert not is_slow or "cannot be resumed at batch 2: this " in found["not resumed"]


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
from tests.kit.datasets import Made

assert Segment.create(1).nbytes == PAGE_BYTES
for kind in (Images, RaggedImages, MixedImages):
    for max_memory in ("auto", f"{5 * PAGE_BYTES}B"):
        dataset = kind(40)
        cached = fastload.CachedDataset(dataset, max_memory=max_memory)
        for _ in range(2):
            for index in range(40):
                assert_same_samples(cached[index], dataset.sample(index))
        info = cached.cache_info()
        assert info.num_cached == 40 if max_memory == "auto" else 0 < info.nbytes <= 5 * PAGE_BYTES

values, names = np.arange(1 << 16).reshape(-1, 512), fastload.SharedList(map(str, range(128)))
arrays = Made(lambda index: (values[index], int(names[index])), 128)
options = {"batch_size": 32, "num_workers": 1, "multiprocessing_context": "fork"}
found = [numbers.tolist() for _, numbers in fastload.DataLoader(arrays, **options)]
assert sum(found, []) == list(range(128))
assert {"map", "madvise"} <= set(calls)
"""


@pytest.mark.slow
def test_pages_of_64_kib_change_nothing(interpreter: Interpreter) -> None:
    """Caches, slots and lists are aligned to the system's pages, and caches stay within their limit."""
    done = interpreter.run(_LARGE_PAGES)
    assert done.returncode == 0, done.stderr
