"""Ranks of real launchers share caches of a user's own dataset, which has neither a fingerprint nor a key.

tests/cache/test_launch.py has the ranks that must not share.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fastload.cache.likeness import probed_indices
from tests.distributed import sharing_zoo
from tests.distributed.test_torchrun import torchrun

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.kit.processes import Interpreter

pytestmark = pytest.mark.timeout(300)  # each rank imports torch, which takes long on a busy machine

EXEC = "import os, sys\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
SPAWN = """
import sys
from pathlib import Path
from torch.multiprocessing import spawn
from tests.distributed.sharing_zoo import spawned

if __name__ == "__main__":
    spawn(spawned, (Path(sys.argv[1]),), nprocs=2)
"""
LIGHTNING = """
import json, os, sys
from pathlib import Path
import lightning as L
import torch
from fastload import DataLoader
from tests.distributed.sharing_zoo import cached

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
quiet = {name: False for name in ("logger", "enable_progress_bar", "enable_model_summary")}
trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, enable_checkpointing=False, **quiet
)
model = Model()
trainer.fit(model)
found = {"pid": os.getpid(), "why": model.dataset.explain(), "is_right": True}
(folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))
trainer.strategy.barrier()
"""


def assert_shared(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    """Each sample was read once on the host, but for those that both ranks compared."""
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert all(rank["is_right"] for rank in ranks)
    assert ["shared as cache 1 of" in rank["why"] for rank in ranks] == [True, True]
    reads = np.bincount(np.fromfile(folder / "reads", "<u4"), minlength=sharing_zoo.LENGTH)
    assert set(np.flatnonzero(reads != 1)) == set(probed_indices(sharing_zoo.LENGTH))


def environment(folder: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FASTLOAD_RUNTIME_DIR": str(folder / "runtime"),
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.thorough)])
def test_ranks_of_torchrun_share(when: str, interpreter: Interpreter, tmp_path: Path) -> None:
    """Whether they make the cache before or after they join the process group."""
    assert_shared(torchrun(interpreter, tmp_path, when, script=sharing_zoo.__file__), tmp_path)


def test_ranks_that_torch_multiprocessing_spawns_share(interpreter: Interpreter, tmp_path: Path) -> None:
    """Once they have joined their process group: nothing else tells that they are ranks."""
    script = tmp_path / "script.py"
    script.write_text(SPAWN)
    done = interpreter.run(EXEC, str(script), str(tmp_path), environment=environment(tmp_path), limit_s=250)

    assert_shared(done, tmp_path)


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.thorough), "after"])
def test_ranks_of_lightning_share(when: str, interpreter: Interpreter, tmp_path: Path) -> None:
    """Whether the script makes the cache before Lightning starts the other rank, or a hook makes it."""
    pytest.importorskip("lightning")
    script = tmp_path / "script.py"
    script.write_text(LIGHTNING)
    arguments = str(script), str(tmp_path), when
    done = interpreter.run(EXEC, *arguments, environment=environment(tmp_path), limit_s=250)

    assert_shared(done, tmp_path)
