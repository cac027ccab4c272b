"""Whether `fastload.profile` is cheap, and whether the gains that it predicts come true.

Two questions. How much slower is an epoch while it is watched? And for planted problems, each with its cure:
how many times as fast does the profile of the problem say the loop would be, and how fast is it after the
cure? The loops compute by waiting, as one that waits for a GPU does, but for one that computes.

Held out: disk (the files come from the page cache) and the GPU. Runs of both sides are interleaved.

A third one, with --only files: what are the gain and the memory of `cache="ram"` that a profile of torch's
loader predicts for five kinds of scripts, and what are they? Each script runs in a process of its own. With
--only memory, times do not count, and the machine may be busy.

Command: python benchmarks/profiling.py PHOTOS [--runs 7] [--only files] [--save]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import albumentations as A
import cv2
import numpy as np
import torch.utils.data
from any_dataset import FOLDERS, SETTLED_S
from harness import in_own_process, save
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from training import Photos

import fastload
from fastload.cache.file_cache import store_of_process
from fastload.profiling.suggestions import suggest
from fastload.system.budget import available_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 32
NUM_JPEGS, NUM_FILES = 1_000, 400
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


class ByOpenCV(Dataset[Any]):
    """A class as many write it: OpenCV and albumentations."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.transform = crops(A.Normalize(), A.ToTensorV2())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = cv2.cvtColor(cv2.imread(self.paths[index]), cv2.COLOR_BGR2RGB)
        return self.transform(image=image)["image"], index


class WithMasks(Dataset[Any]):
    """Photographs with labels of their pixels, cropped by hand."""

    def __init__(self, paths: list[str], folder: str) -> None:
        self.paths, self.folder = paths, folder
        for number, path in enumerate(paths):
            Image.open(path).convert("RGB").quantize(21).save(f"{folder}/{number}.png")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = Image.open(self.paths[index]).convert("RGB")
        mask = Image.open(f"{self.folder}/{index}.png")
        left, upper = random.randint(0, image.width - 256), random.randint(0, image.height - 256)
        box = left, upper, left + 256, upper + 256
        image, mask = image.crop(box), mask.crop(box)
        if random.random() < 0.5:
            image, mask = (each.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for each in (image, mask))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return pixels.float().div(255), torch.from_numpy(np.array(mask)).long()


SCRIPTS = (*FOLDERS, "OpenCV and albumentations", "Pillow, with masks")


def measure_script(photos: str, name: str, runs: int, folder: str, results: Any) -> None:
    """Sends the predicted and the measured gain and bytes of a script; runs in a process of its own."""
    multiprocessing.set_start_method("fork", force=True)
    os.environ["FASTLOAD_RUNTIME_DIR"] = f"{folder}/runtime"  # no other process has files in this memory
    paths = sorted(map(str, Path(photos).rglob("*.jpg")))
    few = range(0, len(paths), max(1, len(paths) // NUM_FILES))
    if name in FOLDERS:
        dataset: Any = Subset(FOLDERS[name](photos), few)
    elif name == "OpenCV and albumentations":
        dataset = ByOpenCV([paths[index] for index in few])
    else:
        dataset = WithMasks([paths[index] for index in few], folder)
        time.sleep(SETTLED_S)
    predicted_bytes: list[int] = []

    def make(kind: Any, **settings: Any) -> Any:
        return kind(dataset, BATCH, shuffle=True, num_workers=2, persistent_workers=True, **settings)

    def note(suggestion: Any) -> None:
        predicted_bytes.append(suggestion.nbytes)

    case = Case(name, "files", lambda: make(TORCH), lambda: make(OURS, cache="ram"), 0.005)
    found = measure_case(case, runs, note)
    results.put({**found, "bytes": (predicted_bytes, [store_of_process("auto").nbytes])})


def ask_for_scripts(photos: str, runs: int) -> list[dict[str, Any]]:
    """The gain and the memory of each script: two questions."""
    gains: dict[str, tuple[list[float], list[float]]] = {}
    sizes: dict[str, tuple[list[float], list[float]]] = {}
    for name in SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            results: Any = multiprocessing.get_context("spawn").SimpleQueue()
            in_own_process(measure_script, photos, name, runs, folder, results)
            found = results.get()
        gains[name] = found["predicted"], found["measured"]
        sizes[name] = tuple([nbytes / 1e6 for nbytes in each] for each in found["bytes"])
    titles = ('The gain of cache="ram"', "times", gains), ('The memory of cache="ram"', "MB", sizes)
    return [compared(*each) for each in titles]


def compared(title: str, unit: str, found: dict[str, tuple[list[float], list[float]]]) -> dict[str, Any]:
    """Print what was predicted and measured, and give it as plain data."""
    table = Table("", "predicted", "measured", "predicted / measured", title=title)
    rows, ratios = {}, {}
    for label, (predicted, measured) in found.items():
        medians = statistics.median(predicted), statistics.median(measured)
        rows[f"{label}: predicted"] = {"median": medians[0], "figures": predicted}
        rows[f"{label}: measured"] = {"median": medians[1], "figures": measured}
        ratios[label] = {"value": medians[0] / medians[1], "target": 1.0}
        spread = f"{min(measured):.2f} to {max(measured):.2f}"
        ratio = f"{medians[0] / medians[1]:.2f}"
        table.add_row(label, f"{medians[0]:.2f}", f"{medians[1]:.2f} ({spread})", ratio)
    Console().print(table)
    return {"title": title, "unit": unit, "rows": rows, "ratios": ratios}


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


def measure_case(case: Case, runs: int, note: Callable[[Any], None] = lambda _: None) -> dict[str, Any]:
    """The predicted and the measured gain; calls ``note`` with each suggestion."""
    num_epochs = 3 if case.change == "persistent_workers" else 1
    before, after = case.before(), case.after()
    predicted = []
    for _ in range(3):
        with fastload.profile(before) as profile:
            for _ in range(num_epochs):
                for _batch in before:
                    time.sleep(case.compute_s)
        (timeline,) = profile._timelines
        found = {one.change: one for one in suggest(timeline, available_bytes())}
        predicted.append(found[case.change].gain if case.change in found else float("nan"))
        if case.change in found:
            note(found[case.change])
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
    parser.add_argument("--only", choices=["watching", "predictions", "files"])
    args = parser.parse_args()
    questions = []
    console = Console()
    if args.only == "files":
        questions = ask_for_scripts(args.photos, args.runs)
        if args.save:
            save("profiling_files", "python benchmarks/profiling.py PHOTOS --only files", questions)
        return
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
        gains = {}
        for case in cases(args.photos):
            found = measure_case(case, args.runs)
            gains[case.label] = found["predicted"], found["measured"]
        questions.append(compared("Predicted and measured gains", "times", gains))
    if args.save:
        save("profiling", "python benchmarks/profiling.py PHOTOS", questions)


if __name__ == "__main__":
    main()
