"""What does a batch cost that comes from a Ray actor, beside one from a worker process?

Question: by the size of a batch, how many batches and megabytes a second come from two workers, how much CPU
does a batch cost the consumer's process, and when does the first batch arrive? Samples cost nothing, so the
transports are compared, not the work. The cluster has a node with the consumer and a node with the actors,
both on this machine: batches pass two object stores and the loopback interface, and all processes share its
cores, so the rates are lower bounds for machines that share nothing. The second part has a dataset that waits
and takes no CPU, with 64 workers on four nodes: beside as many batches as they can make.

Held out: a real network, and Ray's own processes, whose CPU is not the consumer's.

Command: python benchmarks/ray_workers.py [--runs 5] [--only transports|waiting] [--save]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from typing import Any

import ray
import torch
import torch.utils.data
from harness import RESULTS, Contender, report, save
from ray.cluster_utils import Cluster

import fastload

KB = 1000
BATCH_SIZE, SAMPLE_VALUES = 8, 1024  # of batches that take time, and no CPU
BATCH_KB = (10, 1_000, 10_000, 38_500)  # the last is 256 images of 224 x 224 x 3
SECONDS = 4.0
LINK_MB_PER_S = 25_000 / 8  # 25 Gbit/s
KINDS = ("process", "ray")
NODE = {"include_dashboard": False, "object_store_memory": 1_000_000_000, "num_cpus": 1}
WAITING_WORKERS, WAITING_NODES, WAIT_S = (4, 16, 64), 4, 1.0


class Made(torch.utils.data.Dataset[torch.Tensor]):
    """A batch is one array of bytes, which was made before: `(nbytes,) uint8`."""

    def __init__(self, nbytes: int, num_batches: int) -> None:
        self.nbytes, self.num_batches = nbytes, num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [torch.zeros(self.nbytes, dtype=torch.uint8)]


class Waits(torch.utils.data.Dataset[torch.Tensor]):
    """A batch takes its time, and no CPU: `(8, 1024) float32`."""

    def __init__(self, num_batches: int, wait_s: float) -> None:
        self.num_samples, self.wait_s = num_batches * BATCH_SIZE, wait_s

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(self.wait_s)
        return [torch.zeros(SAMPLE_VALUES) for _ in indices]


def start(num_nodes: int, num_cpus: int) -> Any:
    """A cluster whose first node is the consumer's, without CPUs for actors."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    for _ in range(num_nodes):
        cluster.add_node(**{**NODE, "num_cpus": num_cpus})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    return cluster


def loader_of(dataset: Any, kind: str, num_workers: int, batch_size: int = 1) -> Any:
    away = {"ray.io/node-id": f"!{ray.get_runtime_context().get_node_id()}"}
    worker_type: Any = fastload.RayWorkers(label_selector=away) if kind == "ray" else kind
    options = {"num_workers": num_workers, "persistent_workers": True, "worker_type": worker_type}
    return fastload.DataLoader(dataset, batch_size, **options)


def measure(loader: Any) -> tuple[float, float]:
    """Batches a second, and milliseconds of the consumer's CPU for each, in an epoch."""
    began_s, began_cpu_s, num_batches = time.perf_counter(), time.process_time(), 0
    for _ in loader:
        num_batches += 1
    cpu_s = time.process_time() - began_cpu_s
    return num_batches / (time.perf_counter() - began_s), cpu_s / num_batches * 1e3


def first_batch_s(kind: str) -> float:
    began_s = time.perf_counter()
    with loader_of(Made(10 * KB, 4), kind, 2) as loader:
        next(iter(loader))
        return time.perf_counter() - began_s


def transports(runs: int) -> list[dict[str, Any]]:
    """Rates and costs by size, each in turn; then the first batches."""
    rates, megabytes, costs, ratios, links = [], [], [], {}, {}
    for size_kb in BATCH_KB:
        label = f"{size_kb / KB:g} MB"
        loaders = {}
        for kind in KINDS:
            trial = loader_of(Made(size_kb * KB, 40), kind, 2)
            list(trial)  # starts the workers
            rate, _ = measure(trial)
            trial.close()
            loaders[kind] = loader_of(Made(size_kb * KB, max(40, int(rate * SECONDS))), kind, 2)
            next(iter(loaders[kind]))
        measured: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for _ in range(runs):
            for kind in KINDS:
                measured[kind].append(measure(loaders[kind]))
        rows = {}
        for kind in KINDS:
            loaders[kind].close()
            name = f"{kind}, {label}"
            found = measured[kind]
            rows[kind] = Contender(name, kind, float, figures=[rate for rate, _ in found])
            rates.append(rows[kind])
            megabytes.append(Contender(name, kind, float, figures=[rate * size_kb / KB for rate, _ in found]))
            costs.append(Contender(name, kind, float, figures=[cost for _, cost in found]))
        ratios[f"{label}: Ray's actors beside processes"] = rows["ray"].median / rows["process"].median, 1.0
        links[f"{label}: share of a link of 25 Gbit/s"] = megabytes[-1].median / LINK_MB_PER_S, 1.0
    latencies = [Contender(f"{kind}, 2 workers", kind, float) for kind in KINDS]
    for _ in range(runs):
        for row in latencies:
            row.figures.append(first_batch_s(row.group))
    return [
        report("batches of two workers", "batches/s", rates, ratios, digits=1),
        report("batches of two workers: bytes", "MB/s", megabytes, links),
        report("batches of two workers: the consumer's CPU", "ms/batch", costs, {}, digits=3),
        report("the first batch of an iterator", "s", latencies, {}, digits=2),
    ]


def waiting(runs: int) -> list[dict[str, Any]]:
    """A dataset that waits, on four nodes."""
    rows, shares = [], {}
    for num_workers in WAITING_WORKERS:
        with loader_of(Waits(20 * num_workers, WAIT_S), "ray", num_workers, BATCH_SIZE) as loader:
            list(loader)  # starts the workers
            label = f"{num_workers} workers"
            row = Contender(label, "ray", float, figures=[measure(loader)[0] for _ in range(min(runs, 3))])
        rows.append(row)
        shares[f"{label}: share of what they can make"] = row.median * WAIT_S / num_workers, 0.95
    title = f"batches that take {WAIT_S:g} s of waiting, on {WAITING_NODES} nodes"
    return [report(title, "batches/s", rows, shares, digits=2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/ray_workers.json")
    parser.add_argument("--only", choices=["transports", "waiting"], help="keep the other saved results")
    args = parser.parse_args()
    logging.getLogger("fastload").setLevel(logging.ERROR)
    path = RESULTS / "ray_workers.json"
    saved = json.loads(path.read_text())["questions"] if args.only else []
    answers: list[dict[str, Any]] = []
    for measured, num_nodes, num_cpus in ((transports, 1, 2), (waiting, WAITING_NODES, 16)):
        if args.only in (None, measured.__name__):
            load = os.getloadavg()[0]
            cluster = start(num_nodes, num_cpus)
            found = measured(args.runs)
            found[0]["load"] = {"before": load, "after": os.getloadavg()[0]}  # of other programs, too
            answers += found
            ray.shutdown()
            cluster.shutdown()
        else:
            answers += saved[:-1] if measured is transports else saved[-1:]
    if args.save:
        save("ray_workers", f"python benchmarks/ray_workers.py --runs {args.runs} --save", answers)


if __name__ == "__main__":
    main()
