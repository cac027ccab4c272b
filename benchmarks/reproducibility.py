"""What reproducibility costs: seeding each sample, and coming back to the middle of an epoch.

Questions: What does `seeding="sample"` add to a sample, and of which parts is that made? How long does a
loader take from load_state_dict() to its first batch, near the end of a million samples, for torch's
samplers?

Command: python benchmarks/reproducibility.py [--runs 7] [--save]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
import timeit
from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import torch
from harness import save
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset, RandomSampler, WeightedRandomSampler

import fastload
from fastload.rng.keys import SampleKey, occurrence_counter
from fastload.rng.sample_rng import SampleSeeder

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS = 5_000
MILLION = 1_000_000


class Numbers(Dataset):
    """A million samples that cost nothing."""

    def __len__(self) -> int:
        return MILLION

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Dataset):
    """Holds pipelines of so many transforms."""

    def __init__(self, num_transforms: int) -> None:
        self.transform = A.Compose([A.HorizontalFlip(p=0.5)] * num_transforms)


def microseconds(work: Callable[[], Any], runs: int) -> float:
    """The median over runs of one call's time."""
    return statistics.median(timeit.repeat(work, number=CALLS, repeat=runs)) / CALLS * 1e6


def parts(runs: int) -> dict[str, float]:
    """Microseconds of each part of seeding a sample, and of the whole."""
    key = SampleKey(1, 2, 12345, 0)
    word = int.from_bytes(key.digest()[:8], "little")
    bits, own = np.random.PCG64(0), random.Random()
    count = occurrence_counter(MILLION, auto_collation=True)
    batch = list(range(256))
    found = {
        "in the parent: count an index": microseconds(lambda: count(batch), runs) / len(batch),
        "digest": microseconds(key.digest, runs),
        "random": microseconds(lambda: random.seed(word), runs),
        "numpy.random": microseconds(lambda: np.random.seed(word & 0xFFFFFFFF), runs),
        "torch": microseconds(lambda: torch.default_generator.manual_seed(word), runs),
        "a random.Random for pipelines": microseconds(lambda: own.seed(word), runs),
        "a PCG64 for pipelines": microseconds(lambda: setattr(bits, "state", bits.state), runs),
    }
    for num_transforms in (0, 1, 100):
        seeder = SampleSeeder(Augmented(num_transforms), None, role="process")
        name = f"all, {num_transforms} transforms"
        found[name] = microseconds(lambda seeder=seeder: seeder.begin(key), runs)  # type: ignore[misc]
        seeder.end()
    return found


def resume_s(sampler: Callable[[], dict[str, Any]], seeding: Any) -> float:
    """Seconds from load_state_dict() to the last whole batch of a million samples."""

    def make() -> fastload.DataLoader:
        options = {"batch_size": 256, "seeding": seeding, "generator": torch.Generator().manual_seed(1)}
        return fastload.DataLoader(Numbers(), **(options | sampler()))  # type: ignore[arg-type]

    loader = make()
    iterator = iter(loader)
    for _ in range(MILLION // 256 - 1):
        next(iterator)
    state = loader.state_dict()
    again = make()
    start_s = time.perf_counter()
    again.load_state_dict(state)
    first = next(iter(again))
    elapsed_s = time.perf_counter() - start_s
    if not torch.equal(first, next(iterator)):
        raise RuntimeError("the resumed loader has another batch")
    return elapsed_s


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffle=True": lambda: {"shuffle": True},
    "RandomSampler with replacement": lambda: {"sampler": RandomSampler(range(MILLION), replacement=True)},
    "WeightedRandomSampler": lambda: {"sampler": WeightedRandomSampler(torch.ones(MILLION), MILLION)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/reproducibility.json")
    args = parser.parse_args()
    questions = []
    costs = parts(args.runs)
    figures = {
        name: {"value": value, "unit": "us", "target": 20.0}
        for name, value in costs.items()
        if name.startswith("all")
    }
    questions.append({"title": 'seeding="sample", for each sample', "ratios": figures, "parts_us": costs})
    for seeding in ("worker", "sample"):
        ratios = {}
        for name, sampler in SAMPLERS.items():
            runs = [resume_s(sampler, seeding) for _ in range(max(3, args.runs // 2))]
            ratios[name] = {"value": statistics.median(runs), "unit": "s", "target": 1.0, "figures": runs}
        title = f'come back to the end of 1,000,000 samples, seeding="{seeding}"'
        questions.append({"title": title, "ratios": ratios})
    console = Console()
    for question in questions:
        table = Table(title=str(question["title"]))
        for column in ("what", "figure", "target"):
            table.add_column(column)
        shown: Any = question["ratios"]
        for name, value in costs.items() if "parts_us" in question else ():
            if name not in shown:
                table.add_row(name, f"{value:.2f} us", "")
        for name, figure in shown.items():
            table.add_row(name, f"{figure['value']:.2f} {figure['unit']}", f"{figure['target']:g}")
        console.print(table)
    if args.save:
        save("reproducibility", f"python benchmarks/reproducibility.py --runs {args.runs} --save", questions)


if __name__ == "__main__":
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    main()
