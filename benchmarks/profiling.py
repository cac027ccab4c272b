"""Whether `fastload.profile` is cheap, and whether the gains that it predicts come true.

Two questions. How much slower is an epoch while it is watched? And for planted problems, each with its cure:
how many times as fast does the profile of the problem say the loop would be, and how fast is it after the
cure? The loops compute by waiting, as one that waits for a GPU does, but for one that computes.

Held out: disk (the files come from the page cache) and the GPU. Runs of both sides are interleaved.

Command: python benchmarks/profiling.py PHOTOS [--runs 7] [--save]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import torch.utils.data
from harness import save
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from training import Photos

import fastload
from fastload.profiling.suggestions import suggest
from fastload.system.budget import available_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 32
NUM_JPEGS = 1_000
TORCH, OURS = torch.utils.data.DataLoader, fastload.DataLoader


class Slow(Dataset[Any]):
    """224 px images that wait, compute, or do both for each sample."""

    def __init__(self, waits_s: float = 0.0, computes_s: float = 0.0, num_samples: int = 1_024) -> None:
        self.waits_s = waits_s
        self.computes_s = computes_s
        self.num_samples = num_samples
        self.image = np.zeros((224, 224, 3), np.uint8)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        if self.waits_s:
            time.sleep(self.waits_s)
        burn(self.computes_s)
        return self.image


class SlowBlur(A.ImageOnlyTransform):  # type: ignore[misc]  # untyped
    """Computes for a millisecond."""

    def apply(self, img: Any, **_params: Any) -> Any:
        """The image as it is."""
        burn(0.001)
        return img


def burn(duration_s: float) -> None:
    """Compute for so much CPU time."""
    end_s = time.thread_time() + duration_s
    while time.thread_time() < end_s:
        pass


def slow_collate(samples: Any) -> Any:
    """Collates, and computes for 10 ms."""
    burn(0.010)
    return default_collate(samples)


def crops(*extra: Any) -> Any:
    """The usual training crop."""
    return A.Compose([A.RandomResizedCrop((224, 224)), A.HorizontalFlip(p=0.5), *extra])


@dataclass(frozen=True)
class Case:
    """A problem and its cure.

    Attributes:
        label: What the table calls it.
        change: The suggestion whose gain is compared.
        before: Makes the loader with the problem.
        after: Makes the loader with the cure.
        compute_s: What a step of the loop waits for "its GPU".
    """

    label: str
    change: str
    before: Callable[[], Any]
    after: Callable[[], Any]
    compute_s: float


def cases(photos: str) -> list[Case]:
    """The problems."""
    folder = fastload.ImageFolder(photos)
    few = range(0, len(folder), max(1, len(folder) // NUM_JPEGS))

    def jpegs(transform: Any) -> Any:
        return Subset(Photos(folder, transform), few)

    def cached() -> Any:
        dataset = fastload.CachedDataset(folder, transform=crops(), cache="ram")
        for index in few:
            dataset[index]  # stores it
        return Subset(dataset, few)

    def loader(kind: Any, dataset: Any, num_workers: int, **settings: Any) -> Any:
        settings.setdefault("persistent_workers", num_workers > 0)
        return kind(dataset, batch_size=BATCH, num_workers=num_workers, shuffle=True, **settings)

    def make(kind: Any, dataset: Callable[[], Any], num_workers: int, **settings: Any) -> Callable[[], Any]:
        return lambda: loader(kind, dataset(), num_workers, **settings)

    waiting = functools.partial(Slow, 0.002)
    quick = functools.partial(Slow, 0.0, 0.0005)
    blurred = functools.partial(jpegs, crops(SlowBlur(p=1.0)))
    plain = functools.partial(jpegs, crops())
    return [
        Case(
            "JPEGs: a cache in RAM, torch's loader",
            "ram",
            make(TORCH, plain, 1),
            make(TORCH, cached, 1),
            0.010,
        ),
        Case("JPEGs: a cache in RAM, fastload's", "ram", make(OURS, plain, 1), make(OURS, cached, 1), 0.010),
        Case("JPEGs: 2 workers instead of 0", "workers", make(TORCH, plain, 0), make(TORCH, plain, 2), 0.010),
        Case(
            "slow storage: 8 workers instead of 2",
            "workers",
            make(OURS, waiting, 2),
            make(OURS, waiting, 8),
            0.001,
        ),
        Case(
            "slow storage: 8 workers, torch's",
            "workers",
            make(TORCH, waiting, 2),
            make(TORCH, waiting, 8),
            0.001,
        ),
        Case("a slow transform left out", "transform", make(OURS, blurred, 1), make(OURS, plain, 1), 0.005),
        Case(
            "a slow collate_fn left out",
            "collate",
            make(TORCH, quick, 1, collate_fn=slow_collate),
            make(TORCH, quick, 1),
            0.005,
        ),
        Case(
            "starting workers each epoch",
            "persistent_workers",
            make(TORCH, functools.partial(Slow, 0.0, 0.0, 512), 2, persistent_workers=False),
            make(TORCH, functools.partial(Slow, 0.0, 0.0, 512), 2),
            0.005,
        ),
        Case(
            "torch's transport of 19 MB batches",
            "fastload",
            make(TORCH, functools.partial(jpegs, crops(A.Normalize())), 1),
            make(OURS, functools.partial(jpegs, crops(A.Normalize())), 1),
            0.005,
        ),
    ]


def epoch_s(loader: Any, compute_s: float, num_epochs: int = 1) -> float:
    """Seconds of a loop, from its first batch on, or of whole epochs if there are several."""
    start_s = time.perf_counter()
    if num_epochs > 1:
        for _ in range(num_epochs):
            for _batch in loader:
                time.sleep(compute_s)
        return (time.perf_counter() - start_s) / num_epochs
    iterator = iter(loader)
    next(iterator)
    start_s = time.perf_counter()
    count = 0
    for count, _batch in enumerate(itertools.islice(iterator, 28), start=1):  # noqa: B007
        time.sleep(compute_s)
    elapsed_s = time.perf_counter() - start_s
    for _batch in iterator:
        pass
    return elapsed_s / count


def stop(loader: Any) -> None:
    """End the persistent workers."""
    if hasattr(loader, "close"):
        loader.close()
    loader._iterator = None


def measure_case(case: Case, runs: int) -> dict[str, Any]:
    """The predicted and the measured gain."""
    num_epochs = 3 if case.change == "persistent_workers" else 1
    before, after = case.before(), case.after()
    predicted = []
    for _ in range(3):
        with fastload.profile(before) as profile:
            for _ in range(num_epochs):
                for _batch in before:
                    time.sleep(case.compute_s)
        (timeline,) = profile._timelines
        found = {one.change: one.gain for one in suggest(timeline, available_bytes())}
        predicted.append(found.get(case.change, float("nan")))
        stop(before)
    sides: dict[str, list[float]] = {"before": [], "after": []}
    for run in range(runs + 1):
        for name, loader in (("before", before), ("after", after)):
            elapsed_s = epoch_s(loader, case.compute_s, num_epochs)
            if run:
                sides[name].append(elapsed_s)
    stop(before)
    stop(after)
    measured = [b / a for b, a in zip(sides["before"], sides["after"], strict=True)]
    return {"predicted": predicted, "measured": measured, **sides}


def watched_kinds(photos: str) -> dict[str, Callable[[], Any]]:
    """Loaders whose epochs are watched and not watched."""
    plain = Photos(fastload.ImageFolder(photos), crops())
    small = TensorDataset(torch.zeros(65_536, 3, 32, 32, dtype=torch.uint8), torch.zeros(65_536))
    memory = Slow(num_samples=4_096)
    return {
        "JPEGs, 0 workers, torch": lambda: TORCH(plain, BATCH),
        "JPEGs, 2 workers, torch": lambda: TORCH(plain, BATCH, num_workers=2, persistent_workers=True),
        "JPEGs, 2 workers, fastload": lambda: OURS(plain, BATCH, num_workers=2, persistent_workers=True),
        "224 px in memory, 2 workers, torch": lambda: TORCH(
            memory, BATCH, num_workers=2, persistent_workers=True
        ),
        "224 px in memory, 2 workers, fastload": lambda: OURS(
            memory, BATCH, num_workers=2, persistent_workers=True
        ),
        "32 px in memory, 0 workers, torch": lambda: TORCH(small, 256),
        "32 px in memory, 0 workers, fastload": lambda: OURS(small, 256),
        "32 px in memory, 2 workers, fastload": lambda: OURS(
            small, 256, num_workers=2, persistent_workers=True
        ),
    }


def measure_watching(make: Callable[[], Any], runs: int) -> dict[str, list[float]]:
    """Seconds of epochs that are watched and not watched; each side has its own workers."""
    sides: dict[str, list[float]] = {"watched": [], "plain": []}
    loaders = {name: make() for name in sides}
    with contextlib.ExitStack() as stack:
        for name, loader in loaders.items():
            stack.callback(stop, loader)
            profile = fastload.profile(loader)
            if name == "watched":
                stack.enter_context(profile)
            for _batch in loader:  # starts the workers, and finds what is to be watched
                pass
        for run in range(runs):
            for name in sorted(sides, reverse=bool(run % 2)):
                start_s = time.perf_counter()
                for _batch in loaders[name]:
                    pass
                sides[name].append(time.perf_counter() - start_s)
    return sides


def main() -> None:
    """Measure, print, and with --save write results/profiling.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("photos")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--only", choices=["watching", "predictions"])
    args = parser.parse_args()
    questions = []
    console = Console()
    if args.only != "predictions":
        table = Table("watched", "time / time unwatched", title="What watching costs")
        rows, ratios = {}, {}
        for label, make in watched_kinds(args.photos).items():
            sides = measure_watching(make, args.runs)
            ratio = statistics.median(sides["watched"]) / statistics.median(sides["plain"])
            rows[label] = {"median": statistics.median(sides["watched"]), "figures": sides["watched"]}
            ratios[label] = {"value": ratio, "target": 1.02}
            table.add_row(label, f"{ratio:.3f}")
        console.print(table)
        questions.append(
            {"title": "What watching costs", "unit": "s per epoch", "rows": rows, "ratios": ratios}
        )
    if args.only != "watching":
        table = Table("cure", "predicted", "measured", "predicted / measured", title="Predictions")
        rows, ratios = {}, {}
        for case in cases(args.photos):
            found = measure_case(case, args.runs)
            predicted, measured = (statistics.median(found[name]) for name in ("predicted", "measured"))
            rows[f"{case.label}: predicted"] = {"median": predicted, "figures": found["predicted"]}
            rows[f"{case.label}: measured"] = {"median": measured, "figures": found["measured"]}
            ratios[case.label] = {"value": predicted / measured, "target": 1.0}
            spread = f"{min(found['measured']):.2f} to {max(found['measured']):.2f}"
            table.add_row(
                case.label, f"{predicted:.2f}", f"{measured:.2f} ({spread})", f"{predicted / measured:.2f}"
            )
        console.print(table)
        questions.append(
            {"title": "Predicted and measured gains", "unit": "times", "rows": rows, "ratios": ratios}
        )
    if args.save:
        save("profiling", "python benchmarks/profiling.py PHOTOS", questions)


if __name__ == "__main__":
    main()
