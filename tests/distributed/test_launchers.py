"""Ranks of real launchers: nodes with parts of their own, a rank that is killed, caches that ranks share.

tests/cache/test_launch.py has the ranks that must not share.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fastload import NodePartitionSampler
from fastload.cache.likeness import probed_indices
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
SPAWN = """
import sys
from pathlib import Path
from torch.multiprocessing import spawn
from tests.distributed.rank_zoo import spawned
spawn(spawned, (Path(sys.argv[1]),), nprocs=2)
"""
EXEC = "import os, sys\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
LIGHTNING = """
import json, sys
from pathlib import Path
import lightning as L
import torch
from fastload import DataLoader
from tests.distributed.rank_zoo import cached

folder, when = Path(sys.argv[1]), sys.argv[2]


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, _):
        images, labels = batch
        assert (images == labels[:, None, None, None]).all()
        return self.layer(labels[:, None].float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        self.dataset = dataset or cached(folder)
        return DataLoader(self.dataset, 4, num_workers=1, shuffle=True)


dataset = cached(folder) if when == "before" else None
off = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, **dict.fromkeys(off, False))
model = Model()
trainer.fit(model)
found = {"why": model.dataset.explain(), "is_right": True}
(folder / f"shared{trainer.global_rank}.json").write_text(json.dumps(found))
trainer.strategy.barrier()
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


def assert_shared(folder: Path) -> None:
    """Each sample was read once on the host, but for those that both ranks compared."""
    ranks = read(folder, "shared", 2)
    assert all(rank["is_right"] for rank in ranks)
    assert ["shared as cache 1 of" in rank["why"] for rank in ranks] == [True, True]
    reads = np.bincount(np.fromfile(folder / "reads", "<u4"), minlength=rank_zoo.NUM_PHOTOS)
    assert set(np.flatnonzero(reads != 1)) == set(probed_indices(rank_zoo.NUM_PHOTOS))


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


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.thorough)])
def test_ranks_of_torchrun_share_and_go_on_after_a_kill(when: str, launch: Any, tmp_path: Path) -> None:
    """Made before or after they join the group, without a key; restarted ranks resume in mid-epoch."""
    options = ["--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1", "--local-addr=127.0.0.1"]
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={free_endpoint()}"]
    errors = launch(TORCHRUN, *options, *rendezvous, rank_zoo.__file__, when, str(tmp_path))
    assert "exitcode: -9" in errors
    assert_shared(tmp_path)
    for number, rank in enumerate(read(tmp_path, "rank", 2)):
        numbers = rank_zoo.Numbers()
        sampler = NodePartitionSampler(numbers, 2, number, num_nodes=1, seed=7)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            assert rank["seen"][epoch] == list(sampler)


def test_ranks_that_torch_multiprocessing_spawns_share(launch: Any, tmp_path: Path) -> None:
    """Once they have joined their process group: nothing else tells that they are ranks."""
    launch(SPAWN, str(tmp_path))
    assert_shared(tmp_path)


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.thorough), "after"])
def test_ranks_of_lightning_share(when: str, launch: Any, tmp_path: Path) -> None:
    """Whether the script makes the cache before Lightning starts the other rank, or a hook makes it."""
    pytest.importorskip("lightning")
    (tmp_path / "script.py").write_text(LIGHTNING)
    launch(EXEC, str(tmp_path / "script.py"), str(tmp_path), when)
    assert_shared(tmp_path)
