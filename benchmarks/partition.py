"""What `NodePartitionSampler` changes in a training: who is in a batch with whom, and the accuracy.

Questions: how many pairs of samples come together in a batch within ten epochs, and how many of a sample's
mates are its mates again in the next epoch? And how accurate is a small network after a training with parts?

Held out: speed, and reading. The first part counts pairs among 8,192 samples on nodes of two ranks, with
eight samples in each rank's batch. "No parts" is torch's DistributedSampler.

1. A global batch holds the batches of all ranks, whose gradients are averaged. The share of all pairs of
   samples that were in one global batch at least once within ten epochs is compared with the share for
   independent uniform permutations.
2. BatchNorm (if it is not synchronized) sees a rank's batch, and so does a loss that compares samples. The
   mates of a sample are the other samples of its rank's batch. The figure is the share of them that were its
   mates in the epoch before too.

The network and the images are those of pieces.py, made smaller: ten classes, 800 pieces of photographs. Two
nodes of two ranks are simulated in one process: each of the four batches of 16 passes through the network by
itself, with statistics of its own in BatchNorm, and the four gradients are averaged. All ways get the same
seeds, and thus the same first weights.

Command: python benchmarks/partition.py [--only pairs|training] [--runs 3] [--save]
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import albumentations as A
import cv2
import numpy as np
import torch
from harness import Contender, report, save
from pieces import make_pieces, network, pixels
from torch.utils.data import DistributedSampler

import fastload

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_SAMPLES = 8192
RANKS_PER_NODE = 2
RANK_BATCH = 8
EPOCHS = 10
NODES = (2, 8, 64)
WAYS = {"no parts": False, "a part per node": True}

SIDE = 32
NUM_TRAIN, NUM_TEST = 800, 400
NUM_EPOCHS = 12
TRAINED_RANKS = 4
TRAINED_BATCH = 16
SIZE = (96, 128)


def samplers(length: int, num_nodes: int, per_node: int, has_parts: bool, seed: int) -> list[Any]:
    """The samplers of all ranks."""
    dataset: Any = range(length)
    num_ranks = num_nodes * per_node
    if not has_parts:
        return [
            DistributedSampler(dataset, num_ranks, rank, seed=1000 * seed)  # its seed and epoch are added
            for rank in range(num_ranks)
        ]
    return [
        fastload.NodePartitionSampler(dataset, num_ranks, rank, seed=seed, num_nodes=num_nodes)
        for rank in range(num_ranks)
    ]


def rank_batches(ranks: list[Any], epoch: int, batch_size: int) -> Any:
    """The indices of an epoch, by step, rank and place in the batch; without a smaller last batch."""
    orders = []
    for sampler in ranks:
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    num_steps = len(orders[0]) // batch_size
    order = np.array(orders)[:, : num_steps * batch_size]
    return order.reshape(len(ranks), num_steps, batch_size).swapaxes(0, 1)


# --- pairs -----------------------------------------------------------------------------------------------


def mark_pairs(pairs: Any, batches: Any) -> None:
    """Mark each pair of samples that is in one row of ``batches``."""
    for batch in batches:
        pairs[np.ix_(batch, batch)] = True


def counted(num_nodes: int, has_parts: bool, seed: int) -> tuple[float, float]:
    """Both shares in percent; see the questions."""
    ranks = samplers(NUM_SAMPLES, num_nodes, RANKS_PER_NODE, has_parts, seed)
    met = np.zeros((NUM_SAMPLES, NUM_SAMPLES), bool)
    before: Any = None
    num_again, num_mates = 0, 0
    for epoch in range(EPOCHS):
        batches = rank_batches(ranks, epoch, RANK_BATCH)
        mark_pairs(met, batches.reshape(len(batches), -1))
        mates = np.zeros_like(met)
        mark_pairs(mates, batches.reshape(-1, RANK_BATCH))
        np.fill_diagonal(mates, False)
        if before is not None:
            num_again += int((mates & before).sum())
            num_mates += int(mates.sum())
        before = mates
    np.fill_diagonal(met, False)
    all_pairs = NUM_SAMPLES * (NUM_SAMPLES - 1)
    return 100 * met.sum() / all_pairs, 100 * num_again / num_mates


def pairs(runs: int) -> list[dict[str, Any]]:
    """Both measures, a table for each."""
    met, again = [], []
    expected: dict[str, float] = {}
    for num_nodes in NODES:
        chance = (num_nodes * RANKS_PER_NODE * RANK_BATCH - 1) / (NUM_SAMPLES - 1)
        expected[f"{num_nodes} nodes"] = 100 * (1 - (1 - chance) ** EPOCHS)
        for name, has_parts in WAYS.items():
            label = f"{num_nodes} nodes, {name}"
            met.append(Contender(label, f"{num_nodes} nodes", lambda: 0.0))
            again.append(Contender(label, f"{num_nodes} nodes", lambda: 0.0))
            for seed in range(runs):
                shares = counted(num_nodes, has_parts, seed)
                met[-1].figures.append(shares[0])
                again[-1].figures.append(shares[1])
    first = report(f"Pairs that met in a global batch within {EPOCHS} epochs", "% of all", met, {}, digits=2)
    first["ratios"] = {
        f"{row.label} / uniform permutations": {"value": row.median / expected[row.group], "unit": "x"}
        for row in met
    }
    second = report(
        "Mates in a rank's batch that were mates in the epoch before too", "%", again, {}, digits=2
    )
    uniform = 100 * (RANK_BATCH - 1) / (NUM_SAMPLES - 1)
    second["ratios"] = {"uniform permutations, computed": {"value": uniform, "unit": "%"}}
    return [first, second]


# --- training --------------------------------------------------------------------------------------------


class Steps:
    """A batch sampler: a step has the batches of all ranks, one after another."""

    def __init__(self, has_parts: bool, seed: int) -> None:
        self.ranks = samplers(NUM_TRAIN, 2, TRAINED_RANKS // 2, has_parts, seed)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """As a sampler's; the loader calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.ranks[0]) // TRAINED_BATCH

    def __iter__(self) -> Iterator[list[int]]:
        for step in rank_batches(self.ranks, self.epoch, TRAINED_BATCH):
            yield step.ravel().tolist()


def dataset_of(folder: Path, *transforms: Any) -> fastload.CachedDataset:
    return fastload.CachedDataset(fastload.ImageFolder(folder, size=SIZE), A.Compose([*transforms]))


def trained(dataset: fastload.CachedDataset, has_parts: bool, seed: int) -> torch.nn.Module:
    """A network after all epochs."""
    torch.manual_seed(seed)
    model = network()
    steps = Steps(has_parts, seed)
    loader = fastload.DataLoader(
        dataset, batch_sampler=steps, generator=torch.Generator().manual_seed(seed), seeding="sample"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=NUM_EPOCHS * len(steps))
    for epoch in range(NUM_EPOCHS):
        loader.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            for of_rank in zip(images.split(TRAINED_BATCH), labels.split(TRAINED_BATCH), strict=True):
                loss = torch.nn.functional.cross_entropy(model(pixels(of_rank[0])), of_rank[1])
                (loss / TRAINED_RANKS).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def accuracy(model: torch.nn.Module, dataset: fastload.CachedDataset) -> float:
    """The share of the test pieces that the network names correctly, in percent."""
    with torch.no_grad():
        right = sum(
            int((model(pixels(images)).argmax(1) == labels).sum())
            for images, labels in fastload.DataLoader(dataset, 100)
        )
    return 100 * right / NUM_TEST


def training(runs: int) -> dict[str, Any]:
    """The accuracy after trainings from several seeds."""
    rows = {name: Contender(name, name, lambda: 0.0) for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="fastload-partition-") as directory:
        learnt, tested = Path(directory, "train"), Path(directory, "test")
        make_pieces(learnt, NUM_TRAIN, 1)
        make_pieces(tested, NUM_TEST, 2)
        crop = A.RandomResizedCrop((SIDE, SIDE), scale=(0.3, 1.0))
        train_set = dataset_of(learnt, crop, A.HorizontalFlip(p=0.5))
        test_set = dataset_of(tested, A.Resize(SIDE, SIDE))
        for seed, (name, has_parts) in itertools.product(range(runs), WAYS.items()):
            rows[name].figures.append(accuracy(trained(train_set, has_parts, seed), test_set))
    title = f"Accuracy after {NUM_EPOCHS} epochs, 2 nodes of 2 ranks, {runs} seeds"
    answer = report(title, "%", list(rows.values()), {}, digits=1)
    means = {name: float(np.mean(row.figures)) for name, row in rows.items()}
    answer["ratios"] = {
        f"{name} - no parts, mean of all seeds": {
            "value": means[name] - means["no parts"],
            "unit": "percentage points",
        }
        for name in list(WAYS)[1:]
    }
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["pairs", "training"])
    parser.add_argument("--runs", type=int, default=3, help="seeds of each way")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/partition.json")
    args = parser.parse_args()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    answers = []
    if args.only != "training":
        answers += pairs(args.runs)
    if args.only != "pairs":
        answers.append(training(args.runs))
    if args.save:
        save("partition", f"python benchmarks/partition.py --runs {args.runs} --save", answers)


if __name__ == "__main__":
    main()
