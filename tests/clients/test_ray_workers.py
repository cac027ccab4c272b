"""`worker_type="ray"` with a real Ray: the promise of worker processes, on a cluster of nodes that die."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.clients.harness import FIRST_LINES, ROOT, Started, run

if TYPE_CHECKING:
    from pathlib import Path

SETUP = """
import os, signal, subprocess, sys, threading, time
import ray
import fastload
from fastload.errors import WorkerDiedError, WorkerStartError
from tests.clients.ray_checks import Held, NODE, actors, nothing_is_left, raised, two_nodes, wait_until
"""

# The node with both workers dies while one of them makes batch 2; finished batches of it are lost, too.
NODE_DIES = """
class Blocks(Held):
    def __getitem__(self, index):
        return torch.full((300_000,), super().__getitem__(index))


if __name__ == "__main__":
    cluster, node = two_nodes(1, 2)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    own = ray.get_runtime_context().get_node_id()
    workers = fastload.RayWorkers(label_selector={"ray.io/node-id": f"!{own}"})
    options = {"num_workers": 2, "batch_size": 2, "worker_type": workers}
    for name, restarts in (("raised", 0), ("replaced", 4)):
        place = FOLDER / name
        place.mkdir()
        (place / "hold").touch()
        loader = fastload.DataLoader(Blocks(place, only=4), max_worker_restarts=restarts, **options)
        iterator = iter(loader)
        got = [next(iterator), next(iterator)]
        wait_until(lambda: (place / "reads-4").exists(), "nothing is read")
        began = time.monotonic()
        cluster.remove_node(node, allow_graceful=False)
        if not restarts:
            text = raised(WorkerDiedError, lambda: list(iterator))
            assert time.monotonic() - began < 60
            assert "DataLoader worker (Ray actor) exited unexpectedly: worker 0 ended: " in text, text
        node = cluster.add_node(**NODE, num_cpus=2)
        (place / "hold").unlink()
        if restarts:
            got += list(iterator)
            assert [int(row[0]) for batch in got for row in batch] == list(range(24)), got
        loader.close()
        nothing_is_left()
    ray.shutdown()
    cluster.shutdown()
"""

DRIVER_DIES = """
if __name__ == "__main__" and sys.argv[1:]:
    ray.init(address=sys.argv[1], log_to_driver=False)
    next(iter(fastload.DataLoader(Held(FOLDER), num_workers=2, worker_type="ray")))
elif __name__ == "__main__":
    cluster, node = two_nodes(1, 2)
    ray.init(address=cluster.address, log_to_driver=False)
    (FOLDER / "hold").touch()
    driver = subprocess.Popen([sys.executable, sys.argv[0], cluster.address])
    wait_until(lambda: (FOLDER / "reads-0").exists() and (FOLDER / "reads-1").exists(), "nothing is read")
    held = [int((FOLDER / f"reads-{index}").read_text()) for index in range(2)]
    assert len(actors()) == 2
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_until(lambda: not actors(), "actors are left")
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in held), "processes are left")
    ray.shutdown()
    cluster.shutdown()
"""

# The script's own classes; no cluster, and one of this machine; an end without close().
LOCAL = """
from typing import NamedTuple


class Sample(NamedTuple):
    image: torch.Tensor
    name: str


class OwnError(Exception):
    pass


class Named(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 11:
            raise OwnError(index)
        return Sample(torch.full((3, 4), index), str(index))


if __name__ == "__main__":
    workers = fastload.RayWorkers(num_cpus=0)
    loader = fastload.DataLoader(Named(), batch_size=4, num_workers=2, worker_type=workers)
    text = raised(WorkerStartError, lambda: iter(loader))
    assert "found no Ray cluster: start one with" in text, text
    ray.init("local", include_dashboard=False, log_to_driver=False)
    iterator = iter(loader)
    for number in range(2):
        batch = next(iterator)
        assert type(batch) is Sample, batch
        assert list(batch.name) == [str(4 * number + i) for i in range(4)], batch
    assert "OwnError" in raised(OwnError, lambda: next(iterator))
    fresh = iter(loader)
    assert type(next(fresh)) is Sample
"""

TRAIN = """
import ray.train.torch
from tests.kit.datasets import Made


def train():
    dataset = Made(lambda index: (index, ray.get_runtime_context().get_job_id()), 16)
    options = {"batch_size": 4, "num_workers": 1, "collate_fn": list}
    fastload.patch_torch()
    loader = fastload.DataLoader(dataset, worker_type="ray", **options)
    loader = ray.train.torch.prepare_data_loader(loader, move_to_device=False)
    seen = [sample for batch in loader for sample in batch]
    assert {job for _, job in seen} == {ray.get_runtime_context().get_job_id()}
    rank = ray.train.get_context().get_world_rank()
    (FOLDER / f"seen-{rank}").write_text(" ".join(str(index) for index, _ in seen))


if __name__ == "__main__":
    run_in_ray_train(train, num_cpus=4)
"""

CTRL_C = """
if __name__ == "__main__":
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
    (FOLDER / "hold").touch()
    try:
        list(fastload.DataLoader(Held(FOLDER), num_workers=2, worker_type="ray"))
    except KeyboardInterrupt:
        (FOLDER / "interrupted").touch()
    nothing_is_left()  # the error is gone, and with it the iterator
"""


def test_on_two_nodes(tmp_path: Path) -> None:
    """The claim of each function in `ray_checks`; its output says which one does not hold."""
    script = 'from tests.clients import ray_checks\nif __name__ == "__main__":\n    ray_checks.main()\n'
    ended = run(script, tmp_path, "torch", limit_s=1_200.0).check()
    assert " s ok\n" in ended.ranks[0].output


SCRIPTS = {"a node that dies": NODE_DIES, "a driver that dies": DRIVER_DIES, "its own cluster": LOCAL}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_leaves_nothing(name: str, tmp_path: Path) -> None:
    """A dead node is an error or is replaced; the actors of a dead driver end; a cluster needs no close()."""
    run(SETUP + SCRIPTS[name], tmp_path, "torch", limit_s=200).check()


def test_the_example(tmp_path: Path) -> None:
    """Its batches are those of worker processes."""
    script = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT / "examples")!r})
if __name__ == "__main__":
    photos(64, 64, 24)
    runpy.run_path({str(ROOT / "examples" / "ray_workers.py")!r}, run_name="__main__")
"""
    folder = tmp_path / "photos"
    found = run(script, tmp_path, "torch", arguments=(str(folder),), limit_s=200).check()

    assert "ray 2.60.0: 3 of 3 batches are those of worker processes" in found.ranks[0].output


def test_inside_ray_train(tmp_path: Path) -> None:
    """The actors belong to the job of the trainer, and each rank gets its share."""
    run(SETUP + TRAIN, tmp_path, "torch", limit_s=200).check()

    seen = [[int(word) for word in (tmp_path / f"seen-{rank}").read_text().split()] for rank in range(2)]
    assert seen == [list(range(0, 16, 2)), list(range(1, 16, 2))]


def test_ctrl_c_at_a_terminal(tmp_path: Path) -> None:
    """The program ends, and its actors with it."""
    started = Started(FIRST_LINES + SETUP + CTRL_C, tmp_path)
    os.symlink(tmp_path / "reads-0", tmp_path / "ready-0")  # ready when a worker reads
    started.signal_when_ready(2)
    started.end(150).check()

    assert (tmp_path / "interrupted").exists()
