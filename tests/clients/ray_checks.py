"""What `test_ray_workers` runs in the environment of Ray: each function named `check_` is one check.

A check raises if its claim does not hold. `main` runs all of them on one cluster, whose start takes seconds;
the environment variable ONLY names one.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
import types
from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import ray
import torch
from ray._private import state as ray_state
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import fastload
from fastload.errors import LoaderClosedError, WorkerDiedError, WorkerStartError
from tests.clients.in_rank import FOLDER
from tests.kit.batches import assert_same_batches
from tests.kit.datasets import Made, Point, killed

if TYPE_CHECKING:
    from pathlib import Path

loader_of = functools.partial(fastload.DataLoader, worker_type="ray")
NODE = {"include_dashboard": False, "object_store_memory": 80_000_000}


class Numbered(Dataset):
    """Samples of one shape."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 8), index), index


class Mixed(Numbered):
    """Dicts, strings, namedtuples, arrays; random numbers of all generators."""

    def __init__(self) -> None:
        self.table = np.arange(50_000)  # large enough for the object store
        self.list = fastload.SharedList(range(100, 124))  # travels as a copy: its memory stays on its machine
        self.flip = A.Compose([A.RandomBrightnessContrast(p=1.0)])

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return {
            "pair": Point(torch.rand(2, 3), f"sample {index}"),
            "array": self.table[index : index + 4] * self.list[index],
            "draws": (random.random(), float(np.random.rand()), info.id, info.num_workers, info.seed),
            "image": self.flip(image=np.full((16, 16, 3), 100 + index, np.uint8))["image"],
        }


def as_list(samples: list[Any]) -> Any:
    return {"samples": samples, "flat": torch.cat([tensor for tensor, _ in samples])}


class Stream(IterableDataset):
    """Each worker gives its share, and keeps its position."""

    next = 0

    def state_dict(self) -> Any:
        return {"next": self.next}

    def load_state_dict(self, state: Any) -> None:
        self.next = state["next"]

    def __iter__(self) -> Any:
        info: Any = get_worker_info()
        start, self.next = self.next, 0
        for number in range(start, 11):
            self.next = number + 1
            yield torch.tensor([info.id, number])


class DiesOnce(Numbered):
    """The same samples; sample 9 ends its process, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        if index == 9 and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def failing(index: int) -> int:
    if index == 5:
        raise ValueError(f"sample {index}")
    return index


class Held(Numbered):
    """Samples that wait while a file is there, and note each process that reads them."""

    def __init__(self, folder: Path, only: int | None = None) -> None:
        self.folder, self.only = folder, only

    def __getitem__(self, index: int) -> Any:
        with (self.folder / f"reads-{index}").open("a") as file:
            file.write(f"{os.getpid()} ")
        while self.only in (None, index) and (self.folder / "hold").exists():
            time.sleep(0.02)  # a check removes the file, or ends this process
        return index


def batches(dataset: Any, kind: str = "ray", **options: Any) -> list[Any]:
    torch.manual_seed(7)
    options = {"batch_size": 4, "num_workers": 2, **options}
    if not isinstance(dataset, IterableDataset):
        options.setdefault("shuffle", True)
    with loader_of(dataset, worker_type=kind, **options) as loader:
        return list(loader)


def two_nodes(cpus: int, cpus_of_second: int, **second: Any) -> tuple[Any, Any]:
    """A cluster on this machine, and its second node."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": cpus})
    node = cluster.add_node(**NODE, num_cpus=cpus_of_second, **second)
    cluster.wait_for_nodes()
    return cluster, node


def raised(kind: Any, function: Any) -> str:
    try:
        function()
    except kind as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    raise AssertionError(f"no {kind} was raised")


def wait_until(is_true: Any, what: str) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def actors() -> list[Any]:
    """The actors of workers that are not dead."""
    every = ray_state.actors().values()
    return [one for one in every if one["State"] != "DEAD" and one["ActorClassName"] == "RayWorker"]


def references() -> int:
    """How many objects of the store this process keeps alive."""
    gc.collect()
    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def nothing_is_left() -> None:
    wait_until(lambda: not actors(), "actors are left")
    wait_until(lambda: references() == 0, "objects are left")


def folder_of(name: str, *, hold: bool = False) -> Path:
    (folder := FOLDER / name).mkdir()
    if hold:
        (folder / "hold").touch()
    return folder


def check_batches_are_those_of_processes() -> None:
    """Bit for bit and type for type, with all random numbers; on a device; with replaced samples."""
    for dataset, options in (
        (Mixed(), {}),
        (Mixed(), {"seeding": "sample"}),
        (Made(lambda i: (torch.full((1 + i % 5,), i), "x" * i), 24), {"collate_fn": as_list}),
        (Numbered(), {"batch_size": None, "num_workers": 3}),
        (Numbered(), {"pin_memory": True, "drop_last": True, "batch_size": 7}),
        (Numbered(), {"device": "cpu", "device_transform": lambda batch: [batch[0] + 1, batch[1]]}),
        (Numbered(), {"batch_size": 1}),  # all are kept: more than there are slots
        (Made(failing, 24), {"on_error": "replace", "max_errors": 3}),
        (Stream(), {}),
    ):
        assert_same_batches(batches(dataset, "process", **options), batches(dataset, **options))
    alone = batches(Numbered(), "process", seeding="sample", num_workers=0)
    assert_same_batches(alone, batches(Numbered(), seeding="sample", num_workers=1))


def check_worker_init_fn_runs_in_the_actor() -> None:
    """A lambda, too: Ray pickles it."""
    pid = os.getpid()

    def init(worker_id: int) -> None:
        info: Any = get_worker_info()
        assert info.id == worker_id
        assert os.getpid() != pid
        info.dataset.offset = 100

    class Moved(Numbered):
        offset = 0

        def __getitem__(self, index: int) -> Any:
            return index + self.offset

    assert torch.cat(batches(Moved(), worker_init_fn=init, shuffle=False)).tolist() == list(range(100, 124))


def check_errors_keep_their_class_and_place() -> None:
    """Of the script's own classes, too."""

    class OwnError(Exception):
        pass

    def broken(index: int) -> Any:
        raise OwnError("mine") if index == 9 else ValueError("other")

    for number, kind in ((9, OwnError), (1, ValueError)):
        text = raised(kind, lambda number=number: batches(Made(broken), sampler=[number], shuffle=None))
        assert f"worker 0, dataset index {number}" in text, text


def check_a_wait_that_ends_loses_no_batch() -> None:
    """After a time-out, with torch's text, and after Ctrl-C the next call waits for the same batch."""
    for name in ("timeout", "interrupt"):
        place = folder_of(name, hold=True)
        timeout = 3 if name == "timeout" else 0
        with loader_of(Held(place), num_workers=1, timeout=timeout, batch_size=2) as loader:
            iterator = iter(loader)
            wait_until(lambda: (place / "reads-0").exists(), "no sample is read")  # noqa: B023
            if timeout:
                assert "timed out after 3 seconds" in raised(RuntimeError, lambda: next(iterator))  # noqa: B023
            else:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
                raised(KeyboardInterrupt, lambda: next(iterator))  # noqa: B023
            (place / "hold").unlink()
            assert next(iterator).tolist() == [0, 1]
            assert len(list(iterator)) == 11
        nothing_is_left()


def check_persistent_workers_stay() -> None:
    """The same processes serve all epochs, also after an epoch that was left in the middle."""
    dataset = Made(lambda index: (index, os.getpid()), 24)
    with loader_of(dataset, num_workers=2, batch_size=4, persistent_workers=True) as loader:
        epochs = [list(itertools.islice(loader, number)) for number in (6, 2, 6)]
        indices = [torch.cat([one for one, _ in epoch]).tolist() for epoch in epochs]
        assert indices == [list(range(number)) for number in (24, 8, 24)]
        pids = [set(torch.cat([owners for _, owners in epoch]).tolist()) for epoch in epochs]
        assert pids[0] == pids[1] == pids[2]
        assert len(pids[0]) == len(actors()) == 2


def check_a_state_resumes_with_other_workers() -> None:
    """To Ray and back, with a different number of workers; map-style with seeding="sample", and streams."""
    for dataset, before, after in (
        (Mixed(), ("process", 2), ("ray", 3)),
        (Mixed(), ("ray", 3), ("process", 1)),
        (Stream(), ("process", 2), ("ray", 2)),
        (Stream(), ("ray", 2), ("process", 2)),
    ):
        options: Any = {"batch_size": 2}
        if isinstance(dataset, Mixed):
            options |= {"seeding": "sample", "shuffle": True}
        torch.manual_seed(5)
        with loader_of(dataset, worker_type=before[0], num_workers=before[1], **options) as loader:
            iterator = iter(loader)
            for _ in range(3):
                next(iterator)
            state = loader.state_dict()
            whole = list(iterator)
        with loader_of(dataset, worker_type=after[0], num_workers=after[1], **options) as loader:
            loader.load_state_dict(state)
            rest = list(loader)
        if isinstance(dataset, Mixed):
            for batch in [*rest, *whole]:
                del batch["draws"]  # the number of the worker is among them
        assert len(rest) == (len(whole) if isinstance(dataset, IterableDataset) else 9)
        assert_same_batches(whole, rest)


def check_a_cache_is_shared_by_the_node() -> None:
    """Each sample is read once by all workers of two epochs, and this process sees what they stored."""
    place = folder_of("cache")
    cached = fastload.CachedDataset(Held(place))
    with loader_of(cached, batch_size=4, num_workers=3, persistent_workers=True) as loader:
        for _ in range(2):
            assert torch.cat(list(loader)).tolist() == list(range(24))
    assert cached.cache_info().num_cached == 24
    reads = [len((place / f"reads-{index}").read_text().split()) for index in range(24)]
    twice = {0, 12, 23}  # this process has compared two readings of these, and stored them
    assert reads == [1 + (index in twice) for index in range(24)], reads


def check_large_batches_pass_a_small_store() -> None:
    """2 x 3 batches of 12 MB are in flight, in stores of 80 MB, while the caller is slow."""
    dataset, most = Made(lambda index: torch.full((3_000_000,), index, dtype=torch.uint8), 40), 0
    with loader_of(dataset, num_workers=3, batch_size=4, prefetch_factor=2) as loader:
        for number, batch in enumerate(loader):
            assert batch.shape == (4, 3_000_000)
            assert batch[:, 0].tolist() == batch[:, -1].tolist() == list(range(4 * number, 4 * number + 4))
            most = max(most, references())
        # The tasks of the workers, and for each the reference of its exit; the job.
        assert most <= 3 * 2 + 3 + 1, most


def check_close_in_any_state_leaves_nothing() -> None:
    """Before the actors run, in the middle, with a held sample, at the end, twice, and without close()."""
    place = folder_of("close")
    for stage in ("at once", "middle", "held", "end", "dropped", "thread"):
        held = stage in ("held", "thread")
        if held:
            (place / "hold").touch()
        loader = loader_of(Held(place), num_workers=2, batch_size=2)
        iterator = iter(loader)
        if stage in ("middle", "dropped"):
            assert next(iterator).tolist() == [0, 1]
        elif stage == "end":
            assert len(list(iterator)) == 12
        elif held:
            wait_until(lambda: (place / "reads-0").exists(), "no sample is read")
        if stage == "dropped":
            del iterator, loader
            gc.collect()
        elif stage == "thread":
            closing = threading.Timer(0.5, loader.close)
            closing.start()
            raised(LoaderClosedError, lambda: next(iterator))  # noqa: B023  # called here
            closing.join()
        else:
            loader.close()
            loader.close()
            if stage != "end":
                raised(LoaderClosedError, lambda: next(iterator))  # noqa: B023  # called here
        nothing_is_left()
        for path in place.iterdir():
            path.unlink()


def check_a_dead_actor_is_an_error_or_is_replaced() -> None:
    """It names the worker, the machine and the batch; or its batches come."""
    text = raised(WorkerDiedError, lambda: batches(Made(killed, 24), shuffle=False))
    assert "worker 1 ended: " in text, text
    # The process can be gone before its answer to batch 1 has left it.
    assert re.search(r"It was working on batch (1, index \[4, 5, 6, 7\]|3, index \[12, 13, )", text), text
    nothing_is_left()
    options: Any = {"shuffle": False, "batch_size": 2}
    got = batches(DiesOnce(folder_of("died")), max_worker_restarts=1, **options)
    assert_same_batches(batches(Numbered(), "process", **options), got)


def seen_by(make: Any, **options: Any) -> set[Any]:
    """What all samples are."""
    return {sample for batch in batches(Made(make, 24), collate_fn=list, **options) for sample in batch}


def check_actors_run_where_they_shall() -> None:
    """Over both nodes; where Ray's own options say."""

    def node(_: int = 0) -> Any:
        return ray.get_runtime_context().get_node_id()

    assert len(seen_by(node, num_workers=4)) == 2
    workers = fastload.RayWorkers(label_selector={"ray.io/node-id": f"!{node()}"})
    away = seen_by(node, kind=workers)
    assert len(away) == 1
    assert node() not in away

    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}], strategy="PACK")
    ray.get(group.ready())
    workers = fastload.RayWorkers(scheduling_strategy=PlacementGroupSchedulingStrategy(group))
    found = seen_by(lambda _: ray.util.get_current_placement_group().id.hex(), kind=workers)
    assert found == {group.id.hex()}
    ray.util.remove_placement_group(group)


def check_without_free_cpus_the_loader_waits() -> None:
    """Its timeout ends the wait, and nothing is left of the actor that never started."""
    options = {"num_workers": 1, "timeout": 2, "kind": fastload.RayWorkers(num_cpus=64)}
    assert "timed out" in raised(RuntimeError, lambda: batches(Numbered(), **options))
    nothing_is_left()


def check_mistakes_are_named() -> None:
    """An attribute that cannot be pickled; a module that workers lack."""

    class Locked(Numbered):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    text = raised(Exception, lambda: batches(Locked()))
    assert "cannot pickle '_thread.lock' object" in text, text
    nothing_is_left()

    module = types.ModuleType("only_here")
    exec("class Far:\n def __len__(self): return 4\n def __getitem__(self, i): return i", vars(module))
    sys.modules["only_here"] = module
    text = raised(WorkerStartError, lambda: batches(module.Far()))
    assert "No module named 'only_here'" in text, text
    assert "working_dir" in text, text


def main() -> None:
    """Run all checks on one cluster; the status is 1 if one has failed."""
    cluster, _ = two_nodes(4, 4)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    num_failed = 0
    for name, function in list(globals().items()):
        if not name.startswith("check_" + os.environ.get("ONLY", "")):
            continue
        began_s, result = time.monotonic(), "ok"
        try:
            function()
        except BaseException:  # noqa: BLE001  # the test shows it
            num_failed, result = num_failed + 1, traceback.format_exc()
        print(f"{name} {time.monotonic() - began_s:.1f} s {result}", flush=True)  # noqa: T201  # for the test
    ray.shutdown()
    cluster.shutdown()
    sys.exit(num_failed)
