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
