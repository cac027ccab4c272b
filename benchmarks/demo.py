"""What `make demo` shows: the same folder of JPEGs and the same transform, loaded by torch and by fastload.

    python benchmarks/demo.py build/photos --chart build/demo.png

Four contenders run the same epochs over the same pictures, in turn, in several rounds:

* torch.utils.data.DataLoader over a dataset that decodes a JPEG and crops it at random,
* fastload.DataLoader over that very dataset: only the import changed,
* fastload.DataLoader over fastload.CachedDataset with cache=None: of each JPEG, only the crop is decoded,
* fastload.DataLoader over fastload.CachedDataset: each JPEG is decoded once, in the first epoch.

The workers of all of them persist. An epoch lasts from ``iter(loader)`` to its last batch, and the first one
includes the start of the workers. Each run of a contender has a fresh process, so none inherits another's
memory or warm-up. A figure is the median of the rounds; the lines on the chart's bars span the lowest and the
highest. Memory is that after the last epoch: of the cache, and the proportional set size (PSS) of the
consumer's process. The files come from the page cache: the demo waits for no disk. Nothing is trained, so the
figures are what a loader can deliver; a model that takes its batches more slowly hides the difference.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import albumentations as A
import matplotlib as mpl
import psutil
import torch
from harness import cpu_model, save
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset, Subset

import fastload

mpl.use("Agg")  # a file, no window

import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.connection import Connection

    import numpy as np
    import numpy.typing as npt

BATCH_SIZE = 64
CROP = (224, 224)
SOURCE_NOTE = (
    "Pictures: crops of the photographs shipped in scikit-image and scikit-learn, re-encoded as JPEGs."
)

console = Console()


@dataclass(frozen=True)
class Setting:
    """What all contenders share."""

    photos: Path
    count: int | None  # pictures to use, None for all
    epochs: int
    rounds: int
    workers: int
    start_method: str  # of the workers: the platform's default


@dataclass
class Result:
    """What one contender delivered, over all rounds."""

    label: str
    images: int = 0  # an epoch
    rounds_s: list[list[float]] = field(default_factory=list)  # the epochs of each round
    cache_bytes: int = 0  # after the last epoch, as below
    pss_bytes: int = 0  # of the consumer's process

    @property
    def first_rates(self) -> list[float]:
        """Images a second in the first epoch of each round."""
        return [self.images / epochs_s[0] for epochs_s in self.rounds_s]

    @property
    def later_rates(self) -> list[float]:
        """Images a second over the later epochs of each round."""
        return [self.images * (len(epochs_s) - 1) / sum(epochs_s[1:]) for epochs_s in self.rounds_s]

    @property
    def total_s(self) -> float:
        """Seconds of all epochs of a round."""
        return statistics.median(sum(epochs_s) for epochs_s in self.rounds_s)


RATES: dict[str, Callable[[Result], list[float]]] = {
    "first epoch": lambda result: result.first_rates,
    "later epochs": lambda result: result.later_rates,
}


class CroppedPhotos(Dataset[tuple["npt.NDArray[np.uint8]", int]]):
    """The user's dataset: decode, crop at random, return ``(224, 224, 3) uint8`` and the label."""

    def __init__(self, photos: Dataset[Any], transform: A.Compose) -> None:
        self.photos = photos
        self.transform = transform

    def __len__(self) -> int:
        return len(self.photos)  # type: ignore[arg-type]  # Dataset does not declare it

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        image, label = self.photos[index]
        return self.transform(image=image)["image"], label


def make_photos_dataset(setting: Setting) -> Dataset[Any]:
    folder = fastload.ImageFolder(setting.photos)
    if setting.count is None or setting.count >= len(folder):
        return folder
    step = len(folder) / setting.count  # some of every class
    return Subset(folder, [int(number * step) for number in range(setting.count)])


def make_transform() -> A.Compose:
    return A.Compose([A.RandomResizedCrop(CROP), A.HorizontalFlip(p=0.5)])


def torch_plain(setting: Setting) -> Iterable[Any]:
    return _over(DataLoader, CroppedPhotos(make_photos_dataset(setting), make_transform()), setting)


def fastload_plain(setting: Setting) -> Iterable[Any]:
    dataset = CroppedPhotos(make_photos_dataset(setting), make_transform())
    return _over(fastload.DataLoader, dataset, setting)


def fastload_crops(setting: Setting) -> Iterable[Any]:
    dataset = fastload.CachedDataset(make_photos_dataset(setting), transform=make_transform(), cache=None)
    return _over(fastload.DataLoader, dataset, setting)


def fastload_cached(setting: Setting) -> Iterable[Any]:
    dataset = fastload.CachedDataset(make_photos_dataset(setting), transform=make_transform(), cache="ram")
    return _over(fastload.DataLoader, dataset, setting)


def _over(loader: Callable[..., Any], dataset: Any, setting: Setting) -> Iterable[Any]:
    made: Iterable[Any] = loader(
        dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=setting.workers, persistent_workers=True
    )
    return made


CONTENDERS: list[tuple[str, Callable[[Setting], Iterable[Any]]]] = [
    ("torch DataLoader", torch_plain),
    ("fastload,\nonly import changed", fastload_plain),
    ("fastload, only\nthe crop decoded", fastload_crops),
    ("fastload,\ncached", fastload_cached),
]


def run_epochs(number: int, setting: Setting, results: Connection) -> None:
    """Run one contender and send (images, seconds) for each epoch, its memory at the end, or a traceback.

    Runs in a process of its own.
    """
    try:
        # A spawned process would spawn its own children too, and import torch anew in each.
        multiprocessing.set_start_method(setting.start_method, force=True)
        _, make_loader = CONTENDERS[number]
        loader = make_loader(setting)
        for _ in range(setting.epochs):
            images = 0
            started = time.perf_counter()
            for _batch, labels in loader:
                images += len(labels)
            results.send((images, time.perf_counter() - started))
        cached = isinstance(loader.dataset, fastload.CachedDataset)
        cache_bytes = loader.dataset.cache_info().nbytes if cached else 0
        results.send({"cache": cache_bytes, "pss": psutil.Process().memory_full_info().pss})
    except Exception:  # noqa: BLE001  # whatever it is, the parent prints it
        results.send(traceback.format_exc())
        raise SystemExit(1) from None


def measure(result: Result, number: int, setting: Setting, on_epoch: Callable[[int], None]) -> None:
    """Run one round of a contender in a fresh process and add it to its result."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=run_epochs, args=(number, setting, sender))
    process.start()
    sender.close()  # the child has its own: its death ends the pipe
    epochs_s: list[float] = []
    is_finished = False
    try:
        while not is_finished:
            message = receiver.recv()
            if isinstance(message, str):
                msg = f"{result.label!r} failed:\n{message}"
                raise RuntimeError(msg)
            if isinstance(message, dict):
                result.cache_bytes, result.pss_bytes = message["cache"], message["pss"]
                is_finished = True
                continue
            result.images, seconds = message
            epochs_s.append(seconds)
            on_epoch(len(epochs_s))
    except EOFError:
        process.join()
        msg = f"{result.label!r} died with exit code {process.exitcode}"
        raise RuntimeError(msg) from None
    finally:
        receiver.close()
        if process.is_alive() and not is_finished:
            process.terminate()
        process.join()
    result.rounds_s.append(epochs_s)


def show_table(results: list[Result]) -> None:
    jobs = f"{results[0].images:,} JPEGs, RandomResizedCrop({CROP[0]}) and a flip, batches of {BATCH_SIZE}"
    table = Table(title=f"{jobs}; medians of {len(results[0].rounds_s)} rounds")
    table.add_column("loader")
    headings = ("first epoch\nimages/s", "later epochs\nimages/s", "all\ns", "cache\nMB", "PSS\nMB")
    for heading in headings:
        table.add_column(heading, justify="right")
    base = results[0]
    for result in results:
        first, later = statistics.median(result.first_rates), statistics.median(result.later_rates)
        table.add_row(
            result.label,
            f"{first:,.0f} ({first / statistics.median(base.first_rates):.1f}x)",
            f"{later:,.0f} ({later / statistics.median(base.later_rates):.1f}x)",
            f"{result.total_s:.1f}",
            f"{result.cache_bytes / 1e6:,.0f}" if result.cache_bytes else "",
            f"{result.pss_bytes / 1e6:,.0f}",
        )
    console.print(table)


def machine_note(setting: Setting) -> str:
    cores = len(os.sched_getaffinity(0))
    gpu = f"{torch.cuda.get_device_name()}, not used here" if torch.cuda.is_available() else "no GPU"
    workers = f"{setting.workers} workers by {setting.start_method}"
    return f"{cores} cores ({cpu_model()}), {workers}, {gpu}: batches stay on the host."


def draw_chart(results: list[Result], path: Path, machine: str) -> None:
    """Two bars for each contender, images a second in the first and in later epochs, with their spread."""
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    colours = ("#9aa5b1", "#2f6fb3")
    for position, ((name, rates_of), colour) in enumerate(zip(RATES.items(), colours, strict=True)):
        left = [number + 0.4 * (position - 0.5) for number in range(len(results))]
        rates = [rates_of(result) for result in results]
        heights = [statistics.median(some) for some in rates]
        below = [height - min(some) for height, some in zip(heights, rates, strict=True)]
        above = [max(some) - height for height, some in zip(heights, rates, strict=True)]
        bars = axes.bar(left, heights, 0.38, label=name, color=colour, yerr=(below, above), capsize=3)
        ratios = [f"{height:,.0f}\n{height / heights[0]:.1f}x" for height in heights]
        axes.bar_label(bars, ratios, padding=2)
    axes.set_xticks(range(len(results)), [result.label for result in results])
    axes.set_ylabel("images/s")
    axes.set_title(f"{results[0].images:,} JPEGs, RandomResizedCrop({CROP[0]}) and a flip")
    axes.margins(y=0.18)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    note = f"Nothing is trained. Medians of {len(results[0].rounds_s)} rounds, the lines span all of them."
    figure.supxlabel(f"{note}\n{SOURCE_NOTE}\n{machine}", fontsize="small", color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("photos", type=Path, help="a folder made by benchmarks/photos.py")
    parser.add_argument("--chart", type=Path, default=Path("demo.png"), help="the PNG to write")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--count", type=int, help="use only so many pictures")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/demo.json")
    args = parser.parse_args()
    if args.epochs < 2:
        parser.error("--epochs must be at least 2: the first one and a later one are compared")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    start_method = multiprocessing.get_start_method()
    setting = Setting(args.photos, args.count, args.epochs, args.rounds, args.workers, start_method)

    machine = machine_note(setting)
    console.print(SOURCE_NOTE, machine, sep="\n", soft_wrap=True)
    results = [Result(label) for label, _ in CONTENDERS]
    with console.status("starts") as status:
        for round_number in range(setting.rounds):
            # Another contender begins each round, because each leaves memory behind that the next one reuses.
            for place in range(len(results)):
                number = (round_number + place) % len(results)
                result = results[number]
                title = f"round {round_number + 1} of {setting.rounds}, {result.label}"
                show = functools.partial(_show_progress, status.update, title, setting.epochs)
                show(0)
                measure(result, number, setting, show)
    show_table(results)
    draw_chart(results, args.chart, machine)
    console.print("Nothing was trained: these are the rates that a loader can deliver.", soft_wrap=True)
    console.print(f"Chart written to {args.chart.resolve()}", soft_wrap=True)
    if args.save:
        save("demo", f"python benchmarks/demo.py PHOTOS --rounds {args.rounds} --save", questions(results))


def questions(results: list[Result]) -> list[dict[str, Any]]:
    """The results as plain data."""
    answers = []
    for name, rates_of in RATES.items():
        rates = [rates_of(result) for result in results]
        base, *others = (statistics.median(some) for some in rates)
        labels = [result.label.replace("\n", " ") for result in results]
        answers.append(
            {
                "title": f"{results[0].images:,} JPEGs, RandomResizedCrop({CROP[0]}) and a flip, {name}",
                "unit": "images/s",
                "rows": {
                    label: {"median": statistics.median(some), "figures": some}
                    for label, some in zip(labels, rates, strict=True)
                },
                "ratios": {
                    f"{label} / torch": {"value": other / base}
                    for label, other in zip(labels[1:], others, strict=True)
                },
            }
        )
    return answers


def _show_progress(update: Callable[[str], None], label: str, epochs: int, done: int) -> None:
    update(f"{label.replace(chr(10), ' ')}: epoch {min(done + 1, epochs)} of {epochs}")


if __name__ == "__main__":
    main()
