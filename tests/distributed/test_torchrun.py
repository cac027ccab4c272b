"""Ranks that torchrun starts on this machine: two nodes, a rank that is killed, ranks that disagree."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from fastload import NodePartitionSampler
from tests.distributed import rank_zoo

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.kit.processes import Interpreter

pytestmark = pytest.mark.timeout(300)  # each rank imports torch, which takes long on a busy machine

# Each node has an agent of its own, in a fork, and a registry of caches of its own. If ranks hang, the agents
# get SIGTERM, and end them.
TORCHRUN = """
import os, signal, sys
from torch.distributed.run import main
num_nodes, arguments = int(sys.argv[1]), sys.argv[2:]
children = []
for node in range(num_nodes):
    children.append(os.fork())
    if children[-1] == 0:
        os.environ["FASTLOAD_RUNTIME_DIR"] += f"/node{node}"
        os.makedirs(os.environ["FASTLOAD_RUNTIME_DIR"], mode=0o700)
        main([f"--nnodes={num_nodes}", f"--node-rank={node}", *arguments])
        sys.stderr.flush()
        os._exit(0)
signal.signal(signal.SIGALRM, lambda *_: [os.kill(child, signal.SIGTERM) for child in children])
signal.alarm(200)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(max(codes))
"""


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port: int = some.getsockname()[1]
        return port


def torchrun(
    interpreter: Interpreter,
    folder: Path,
    mode: str,
    *,
    num_nodes: int = 1,
    max_restarts: int = 0,
    script: str = rank_zoo.__file__,
) -> subprocess.CompletedProcess[str]:
    """Run a mode of a zoo with two ranks on each node."""
    port = free_port()
    rendezvous = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    if max_restarts:
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    return interpreter.run(
        TORCHRUN,
        str(num_nodes),
        "--nproc-per-node=2",
        *rendezvous,
        f"--max-restarts={max_restarts}",
        "--monitor-interval=0.1",
        script,
        mode,
        str(folder),
        environment={
            "PYTHONPATH": os.pathsep.join(sys.path),
            "FASTLOAD_RUNTIME_DIR": str(folder / "runtime"),
            "OMP_NUM_THREADS": "1",
            # Else the agent keeps its store, and gloo finds the addresses of ranks that have ended.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        limit_s=250,
    )


def read(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def test_two_nodes_cache_their_own_parts_and_see_every_sample(
    interpreter: Interpreter, tmp_path: Path
) -> None:
    """In each epoch, all ranks together see every sample; each node has cached its part and no more."""
    done = torchrun(interpreter, tmp_path, "epochs", num_nodes=2)

    assert done.returncode == 0, done.stderr
    ranks = read(tmp_path, 4)
    for epoch in range(2):
        counts = Counter(itertools.chain(*(rank["seen"][epoch] for rank in ranks)))
        assert sorted(counts) == list(range(rank_zoo.LENGTH))
        assert counts.total() == 64  # four ranks of 16: three samples come twice
    for rank in ranks:
        assert set(itertools.chain(*rank["seen"])) <= set(rank["part"])
        others = set(rank["cached"]) - set(rank["part"])
        assert set(rank["part"]) <= set(rank["cached"])
        assert len(others) <= 3  # read when the cache was made
    assert [rank["node"] for rank in ranks] == [0, 0, 1, 1]


def test_ranks_go_on_with_the_same_samples_after_one_was_killed(
    interpreter: Interpreter, tmp_path: Path
) -> None:
    """The agent starts the ranks again, and they resume in mid-epoch from their states."""
    done = torchrun(interpreter, tmp_path, "killed", max_restarts=1)

    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    for number, rank in enumerate(read(tmp_path, 2)):
        sampler = NodePartitionSampler(
            rank_zoo.Numbers(), 2, number, num_nodes=1, seed=7, epochs_per_partition=2
        )
        for epoch in range(2):
            sampler.set_epoch(epoch)
            assert rank["seen"][epoch] == list(sampler)
