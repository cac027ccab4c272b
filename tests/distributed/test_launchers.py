"""Ranks of real launchers: nodes with parts of their own, a rank that is killed, shared and own caches."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fastload import NodePartitionSampler
from tests.distributed import rank_zoo

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.processes import Interpreter

pytestmark = pytest.mark.timeout(300)  # ranks import torch, which takes long on a busy machine

# If ranks hang, the agent gets SIGTERM, and ends them.
TORCHRUN = """
import os, signal, sys
from torch.distributed.run import main
child = os.fork()
if child == 0:
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)
signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGTERM))
signal.alarm(200)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
# Torchrun's agent of each node, in a fork with a registry of caches of its own; its ranks are forks, too.
NODES = """
import os, sys
from pathlib import Path
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from tests.distributed import rank_zoo
children = []
for node in range(2):
    children.append(os.fork())
    if children[-1] == 0:
        os.environ["FASTLOAD_RUNTIME_DIR"] += f"/node{node}"
        os.makedirs(os.environ["FASTLOAD_RUNTIME_DIR"], mode=0o700)
        config = LaunchConfig(
            min_nodes=2, max_nodes=2, nproc_per_node=2, rdzv_endpoint=sys.argv[1], rdzv_backend="static",
            rdzv_configs={"rank": node, "timeout": 100}, max_restarts=0, monitor_interval=0.1,
            run_id="job", start_method="fork",
        )
        elastic_launch(config, rank_zoo.epochs)(Path(sys.argv[2]))
        sys.stderr.flush()
        os._exit(0)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


@pytest.fixture
def launch(interpreter: Interpreter, tmp_path: Path) -> Any:
    """Runs a launcher to its end, and gives its standard error."""

    def run(program: str, *arguments: str) -> str:
        environment = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "FASTLOAD_RUNTIME_DIR": str(tmp_path / "runtime"),
            "OMP_NUM_THREADS": "1",
            # Else torchrun's agent keeps its store, and gloo finds the addresses of ranks that have ended.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        done = interpreter.run(program, *arguments, environment=environment, limit_s=250)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run


def free_endpoint() -> str:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{some.getsockname()[1]}"


def read(folder: Path, name: str, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in range(num_ranks)]


def assert_own(folder: Path, errors: str) -> None:
    """Each rank got its own samples from each of its caches without a key, and was warned once."""
    for rank, found in enumerate(read(folder, "own", 2)):
        for number, labels in enumerate(found["labels"]):
            expected = list(range(rank_zoo.NUM_PHOTOS))
            expected[rank_zoo.CHANGED] = 1000 * rank + number
            assert labels == expected
    warnings = re.findall(r"cache: private .* pass cache_key='...'.* Each rank of this host decodes", errors)
    assert len(warnings) == 2


def test_two_nodes_cache_their_own_parts_and_see_every_sample(launch: Any, tmp_path: Path) -> None:
    """In each epoch, all ranks together see every sample; each node has cached its part and no more."""
    launch(NODES, free_endpoint(), str(tmp_path))
    ranks = read(tmp_path, "rank", 4)
    for epoch in range(2):
        counts = Counter(itertools.chain(*(rank["seen"][epoch] for rank in ranks)))
        assert sorted(counts) == list(range(rank_zoo.LENGTH))
        assert counts.total() == 64  # four ranks of 16: three samples come twice
    for rank in ranks:
        assert set(itertools.chain(*rank["seen"])) <= set(rank["part"])
        assert set(rank["part"]) <= set(rank["cached"])
        assert len(set(rank["cached"]) - set(rank["part"])) <= 3  # read when the cache was made
    assert [rank["node"] for rank in ranks] == [0, 0, 1, 1]


def test_ranks_of_torchrun_cache_and_go_on_after_a_kill(launch: Any, tmp_path: Path) -> None:
    """With a key they share a cache, without one each has its own; restarted ranks resume in mid-epoch."""
    options = ["--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1", "--local-addr=127.0.0.1"]
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={free_endpoint()}"]
    errors = launch(TORCHRUN, *options, *rendezvous, rank_zoo.__file__, str(tmp_path))
    assert "exitcode: -9" in errors
    assert_own(tmp_path, errors)
    assert all(rank["is_right"] for rank in read(tmp_path, "shared", 2))
    reads = np.bincount(np.fromfile(tmp_path / "reads", "<u4"), minlength=rank_zoo.NUM_PHOTOS)
    assert set(np.flatnonzero(reads != 1)) <= {0, rank_zoo.NUM_PHOTOS // 2, rank_zoo.NUM_PHOTOS - 1}
    for number, rank in enumerate(read(tmp_path, "rank", 2)):
        numbers = rank_zoo.Numbers()
        sampler = NodePartitionSampler(numbers, 2, number, num_nodes=1, seed=7)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            assert rank["seen"][epoch] == list(sampler)
