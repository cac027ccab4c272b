"""What does remembering decoded files bring torchvision's ImageFolder, without a change of the dataset?

Question: two workers of each loader read ImageFolder with an ordinary pipeline: torch's, fastload's with
only the import changed, and fastload's with `cache="ram"`. How many images a second do they give in steady
epochs? The batches of the three are compared first: they are equal, bit for bit.

Each contender keeps its own two workers; all take turns, and the others' workers are idle meanwhile. The
first, uncounted run of a contender fills its memory. The first epoch, which does so, is a question of its
own: each loader reads it in a process of its own, and the start of its workers counts.

Held out: disk (the files come from the page cache) and the GPU.

Needs torchvision, whose Python part is enough: pip install --no-deps torchvision==0.28.0

Command: python benchmarks/any_dataset.py [--runs 5] [--save]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import multiprocessing
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import torch
from decode import SIZES, Size, make_images
from first_epoch import in_own_process
from harness import Contender, contender, images_per_s, interleave, report, save

import fastload
from fastload.cache.file_cache import forget_stores

BATCH_SIZE, NUM_WORKERS = 16, 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
START_METHOD = "fork"
SETTLED_S = 3  # files that were just written are not remembered


def import_torchvision() -> Any:
    """Its datasets and transforms; its compiled part may have been built for another torch."""
    name = "torchvision._meta_registrations"
    sys.modules.setdefault(name, types.ModuleType(name))
    return importlib.import_module("torchvision")


def pipelines() -> dict[str, Any]:
    """What training scripts begin with."""
    transforms = import_torchvision().transforms
    v2 = importlib.import_module("torchvision.transforms.v2")
    end = [transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return {
        "RandomResizedCrop(224), v1": transforms.Compose([transforms.RandomResizedCrop(224), *end]),
        "RandomResizedCrop(224), v2": v2.Compose(
            [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), *to_tensor]
        ),
        "Resize(256), RandomCrop(224), v1": transforms.Compose(
            [transforms.Resize(256), transforms.RandomCrop(224), *end]
        ),
    }


def loaders(folder: str, pipeline: Any) -> dict[str, Any]:
    """How each loader is made."""
    dataset = import_torchvision().datasets.ImageFolder(folder, pipeline)
    loading = {"shuffle": True, "num_workers": NUM_WORKERS, "persistent_workers": True}
    return {
        "torch": lambda: torch.utils.data.DataLoader(dataset, BATCH_SIZE, **loading),
        "import only": lambda: fastload.DataLoader(dataset, BATCH_SIZE, **loading),
        'cache="ram"': lambda: fastload.DataLoader(dataset, BATCH_SIZE, cache="ram", **loading),
    }


def check_equal(makers: dict[str, Any]) -> None:
    """Compare two epochs of all loaders."""
    sums = []
    for make in makers.values():
        loader = make()
        torch.manual_seed(0)
        sums.append([batch.double().sum().item() for _ in range(2) for batch, _ in loader])
        if hasattr(loader, "close"):
            loader.close()
    if any(other != sums[0] for other in sums):
        raise RuntimeError("the loaders give different batches")


def send_first_epoch(folder: str, name: str, label: str, num_images: int, results: Any) -> None:
    """Read one epoch through a new loader and send its rate; runs in a process of its own."""
    multiprocessing.set_start_method(START_METHOD, force=True)  # a spawned process would spawn workers
    loader = loaders(folder, pipelines()[name])[label]()
    results.put(images_per_s(loader, num_images))


def first_epoch(folder: str, name: str, label: str, num_images: int) -> Contender:
    """A loader that is made anew for each run, in a new process, which frees its memory at the end."""

    def run() -> float:
        results: Any = multiprocessing.get_context("spawn").SimpleQueue()
        in_own_process(send_first_epoch, folder, name, label, num_images, results)
        return float(results.get())

    return Contender(label, label, run)


def question(size: Size, name: str, pipeline: Any, runs: int) -> list[dict[str, Any]]:
    """One size and pipeline: steady epochs, and the first one."""
    size = dataclasses.replace(size, num_files=size.num_images)
    with tempfile.TemporaryDirectory() as work:
        in_own_process(make_images, Path(work), size)
        time.sleep(SETTLED_S)
        makers = loaders(work, pipeline)
        # First, while no process holds a store in which the others would find the files.
        first = [first_epoch(work, name, label, size.num_images) for label in makers]
        interleave(first, runs)
        check_equal(makers)
        rows: list[Contender] = [
            contender(label, label, make, size.num_images) for label, make in makers.items()
        ]
        interleave(rows, runs)
        forget_stores()
    title = f"ImageFolder, JPEGs of {size.title}, {name}"
    return [
        report(title, "images/s", rows, ratios_of(rows, 1.0)),
        report(f"{title}, the first epoch", "images/s", first, ratios_of(first, 0.8)),
    ]


def ratios_of(rows: list[Contender], target: float) -> dict[str, tuple[float, float]]:
    """How many times as fast as torch's loader each of the others is."""
    base, *others = rows
    return {f"{row.label} / torch": (row.median / base.median, target) for row in others}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    sizes = (SIZES[0], SIZES[2])
    questions = [
        answer
        for size in sizes
        for name, pipeline in pipelines().items()
        for answer in question(size, name, pipeline, arguments.runs)
    ]
    if arguments.save:
        save("any_dataset", f"python benchmarks/any_dataset.py --runs {arguments.runs}", questions)


if __name__ == "__main__":
    main()
