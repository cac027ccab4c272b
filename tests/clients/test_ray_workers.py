"""`worker_type="ray"` with a real Ray: the promise of worker processes, on a cluster of nodes that die."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.harness import ROOT, Started, run

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 420.0

CHECKS = """
from tests.clients import ray_checks

if __name__ == "__main__":
    ray_checks.main()
"""

SETUP = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
import ray
import torch
from ray.cluster_utils import Cluster
import fastload
from fastload.errors import WorkerDiedError
from tests.clients.ray_checks import Held, NODE, Numbered, actors, nothing_is_left, raised, wait_until

FOLDER = Path(os.environ["CLIENT_FOLDER"])


def start(**options):
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 1})
    node = cluster.add_node(**{**NODE, "num_cpus": 2})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error", **options)
    return cluster, node
"""

# The node with both workers dies while one of them makes batch 2; finished batches of it are lost, too.
NODE_DIES = (
    SETUP
    + """
class Blocks(Held):
    def __getitem__(self, index):
        return torch.full((300_000,), super().__getitem__(index))


if __name__ == "__main__":
    cluster, node = start()
    options = {"num_workers": 2, "batch_size": 2, "worker_type": "ray"}
    options["ray_options"] = {"exclude_driver_node": True}
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
            (FOLDER / "error").write_text(text)
            (FOLDER / "seconds").write_text(str(time.monotonic() - began))
        node = cluster.add_node(**{**NODE, "num_cpus": 2})
        (place / "hold").unlink()
        if restarts:
            got += list(iterator)
            assert [int(row[0]) for batch in got for row in batch] == list(range(24)), got
        loader.close()
        nothing_is_left()
    ray.shutdown()
    cluster.shutdown()
"""
)

DRIVER_DIES = (
    SETUP
    + """
if __name__ == "__main__" and sys.argv[1:]:
    ray.init(address=sys.argv[1], log_to_driver=False)
    next(iter(fastload.DataLoader(Held(FOLDER), num_workers=2, worker_type="ray")))
elif __name__ == "__main__":
    cluster, node = start()
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
)

# The script's own classes; a cluster that RAY_ADDRESS starts; an end without close().
LOCAL = """
import os
from typing import NamedTuple
import torch
import fastload


class Sample(NamedTuple):
    image: torch.Tensor
    name: str


class OwnError(Exception):
    pass


class Photos(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 11:
            raise OwnError(index)
        return Sample(torch.full((3, 4), index), str(index))


if __name__ == "__main__":
    options = {"worker_type": "ray", "ray_options": {"address": "local", "num_cpus": 0}}
    loader = fastload.DataLoader(Photos(), batch_size=4, num_workers=2, **options)
    iterator = iter(loader)
    for number in range(2):
        batch = next(iterator)
        assert type(batch) is Sample, batch
        assert list(batch.name) == [str(4 * number + i) for i in range(4)], batch
    try:
        next(iterator)
    except OwnError as error:
        assert "OwnError" in str(error)
    else:
        raise AssertionError
    fresh = iter(loader)
    assert type(next(fresh)) is Sample
"""

TRAIN = """
import os
from pathlib import Path
import ray
import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
import fastload


class Photos(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return index, ray.get_runtime_context().get_job_id()


def train(config):
    loader = fastload.DataLoader(Photos(), batch_size=4, num_workers=1, worker_type="ray", collate_fn=list)
    from fastload.integrations.ray import prepare

    loader = prepare(loader)
    seen = [sample for batch in loader for sample in batch]
    assert {job for _, job in seen} == {ray.get_runtime_context().get_job_id()}
    rank = ray.train.get_context().get_world_rank()
    (config["folder"] / f"seen-{rank}").write_text(" ".join(str(index) for index, _ in seen))


if __name__ == "__main__":
    folder = Path(os.environ["CLIENT_FOLDER"])
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(folder / "ray"), name="run"),
    ).fit()
    ray.shutdown()
"""

NO_CLUSTER = """
import os
import torch
import fastload
from fastload.errors import WorkerStartError

if __name__ == "__main__":
    texts = []
    for address in (None, "127.0.0.1:1"):
        options = {} if address is None else {"address": address}
        loader = fastload.DataLoader(torch.arange(4), num_workers=1, worker_type="ray", ray_options=options)
        try:
            iter(loader)
        except WorkerStartError as error:
            texts.append(str(error))
    with open(os.path.join(os.environ["CLIENT_FOLDER"], "texts"), "w") as file:
        file.write("\\n".join(texts))
"""


def names_of_checks() -> list[str]:
    """The functions marked as checks; the file itself needs Ray."""
    text = (ROOT / "tests" / "clients" / "ray_checks.py").read_text()
    return [part.split("(")[0].removeprefix("def ") for part in text.split("\n@check\n")[1:]]


@pytest.fixture(scope="session")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each check raised, "ok" for nothing, and the run of all of them; one run for two processes."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ray-checks"
    try:
        shared.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + LIMIT_S
        while not (shared / "done").exists():
            assert time.monotonic() < deadline
            time.sleep(0.2)
    else:
        found = run(CHECKS, shared / "run", "torch", limit_s=LIMIT_S)
        end = [found.ranks[0].returncode, found.ranks[0].output[-5000:], found.left_behind]
        (shared / "done.new").write_text(json.dumps([end, dict(found.ranks[0].records)]))
        os.rename(shared / "done.new", shared / "done")
    return json.loads((shared / "done").read_text())


@pytest.mark.parametrize("name", names_of_checks())
def test_on_two_nodes(name: str, checked: Any) -> None:
    """The claim of each function in `ray_checks`."""
    end, results = checked
    assert results.get(name) == "ok", results.get(name, end)


def test_the_checks_leave_nothing(checked: Any) -> None:
    """No process, and no file in /dev/shm."""
    code, output, left_behind = checked[0]
    assert code == 0, output
    assert left_behind == []


def test_a_node_that_dies_is_an_error_or_its_batches_are_made_elsewhere(tmp_path: Path) -> None:
    """Within seconds, and the error names the machine; with restarts, all batches come in order."""
    run(NODE_DIES, tmp_path, "torch", limit_s=200).check_end()

    text = (tmp_path / "error").read_text()
    assert "DataLoader worker (Ray actor) exited unexpectedly: worker 0 on " in text
    assert float((tmp_path / "seconds").read_text()) < 60


@pytest.mark.parametrize("script", [DRIVER_DIES, LOCAL], ids=["a driver that dies", "its own cluster"])
def test_a_script_leaves_nothing(script: str, tmp_path: Path) -> None:
    """Ray ends the actors of a killed driver, in mid-sample; an own cluster needs no close()."""
    run(script, tmp_path, "torch", limit_s=200).check_end()


def test_the_example(tmp_path: Path) -> None:
    """Its batches are those of worker processes."""
    script = f"""
import runpy, sys
from tests.clients.in_rank import photos
sys.path.insert(0, {str(ROOT / "examples")!r})
if __name__ == "__main__":
    photos(64, 64, 24)
    runpy.run_path({str(ROOT / "examples" / "ray_workers.py")!r}, run_name="__main__")
"""
    folder = tmp_path / "photos"
    found = run(script, tmp_path, "torch", arguments=(str(folder),), limit_s=200).check_end()

    assert "ray 2.60.0: 3 of 3 batches are those of worker processes" in found.ranks[0].output


def test_inside_ray_train(tmp_path: Path) -> None:
    """The actors belong to the job of the trainer, and each rank gets its share."""
    run(TRAIN, tmp_path, "torch", limit_s=200).check_end()

    seen = [[int(word) for word in (tmp_path / f"seen-{rank}").read_text().split()] for rank in range(2)]
    assert seen == [list(range(0, 16, 2)), list(range(1, 16, 2))]


def test_without_a_cluster_an_error_says_how_to_start_one(tmp_path: Path) -> None:
    """If none was named, and if none is there."""
    run(NO_CLUSTER, tmp_path, "torch", limit_s=200).check_end()

    first, second = (tmp_path / "texts").read_text().splitlines()
    assert first.startswith('worker_type="ray" needs a Ray cluster, but none was named: start one with')
    assert second.startswith("there is no Ray cluster at '127.0.0.1:1': start one with")


def test_ctrl_c_at_a_terminal(tmp_path: Path) -> None:
    """The program ends, and its actors with it."""
    script = (
        SETUP
        + """
if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    (FOLDER / "hold").touch()
    try:
        list(fastload.DataLoader(Held(FOLDER), num_workers=2, worker_type="ray"))
    except KeyboardInterrupt:
        (FOLDER / "interrupted").touch()
    nothing_is_left()  # the error is gone, and with it the iterator
"""
    )
    started = Started("import tests.clients.in_rank\n" + script, tmp_path, "torch")
    os.symlink(tmp_path / "reads-0", tmp_path / "ready-0")  # ready when a worker reads
    started.signal_when_ready(2)
    started.end(150).check_end()

    assert (tmp_path / "interrupted").exists()
