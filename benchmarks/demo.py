"""What `make demo` shows: the same folder of JPEGs and the same transform, loaded by torch and by fastload.

    python benchmarks/demo.py build/photos --chart build/demo.png

Three contenders run the same epochs over the same pictures, one after the other:

* torch.utils.data.DataLoader over a dataset that decodes a JPEG and crops it at random,
* fastload.DataLoader over that very dataset: only the import changed,
* fastload.DataLoader over fastload.CachedDataset: each JPEG is decoded once, in the first epoch.

An epoch lasts from ``iter(loader)`` to its last batch, with the start of its workers. Each contender runs in
a fresh process, so that none inherits another's memory or warm-up; this process only watches. Memory is the
largest sum of PSS (private pages, plus a fair share of shared ones) over that process and its workers,
looked at twice a second; a page of the cache counts once some process has read it. The files come from the
page cache: the demo waits for no disk. Nothing is trained, so the figures are what a loader can deliver; a
model that takes its batches more slowly hides the difference.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import albumentations as A
import matplotlib as mpl
import psutil
import torch
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

WATCH_S = 0.5  # between two looks at the memory
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
    workers: int
    start_method: str  # of the workers: the platform's default


@dataclass
class Result:
    """What one contender delivered."""

    label: str
    images: int = 0  # an epoch
    epoch_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def first_rate(self) -> float:
        """Images a second in the first epoch."""
        return self.images / self.epoch_s[0]

    @property
    def later_rate(self) -> float:
        """Images a second over all later epochs."""
        later = self.epoch_s[1:]
        return self.images * len(later) / sum(later)


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
    dataset = CroppedPhotos(make_photos_dataset(setting), make_transform())
    return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=setting.workers)


def fastload_plain(setting: Setting) -> Iterable[Any]:
    dataset = CroppedPhotos(make_photos_dataset(setting), make_transform())
    return fastload.DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=setting.workers)


def fastload_cached(setting: Setting) -> Iterable[Any]:
    dataset = fastload.CachedDataset(make_photos_dataset(setting), transform=make_transform(), cache="ram")
    return fastload.DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=setting.workers)


CONTENDERS: list[tuple[str, Callable[[Setting], Iterable[Any]]]] = [
    ("torch DataLoader", torch_plain),
    ("fastload DataLoader,\nonly import changed", fastload_plain),
    ("fastload DataLoader\nover CachedDataset", fastload_cached),
]


def run_epochs(number: int, setting: Setting, results: Connection) -> None:
    """Run one contender and send (images, seconds) for each epoch, or the traceback as a str.

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
        results.send(None)
    except Exception:  # noqa: BLE001  # whatever it is, the parent prints it
        results.send(traceback.format_exc())
        raise SystemExit(1) from None


def measure(number: int, setting: Setting, on_epoch: Callable[[int], None]) -> Result:
    """Run one contender in a fresh process and watch it."""
    result = Result(CONTENDERS[number][0])
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=run_epochs, args=(number, setting, sender))
    process.start()
    sender.close()  # the child has its own: its death ends the pipe
    try:
        while True:
            result.peak_bytes = max(result.peak_bytes, memory_bytes(process.pid))
            if not receiver.poll(WATCH_S):
                continue
            message = receiver.recv()
            if message is None:
                return result
            if isinstance(message, str):
                msg = f"{result.label!r} failed:\n{message}"
                raise RuntimeError(msg)
            images, seconds = message
            result.images = images
            result.epoch_s.append(seconds)
            on_epoch(len(result.epoch_s))
    except EOFError:
        process.join()
        msg = f"{result.label!r} died with exit code {process.exitcode}"
        raise RuntimeError(msg) from None
    finally:
        receiver.close()
        if process.is_alive() and len(result.epoch_s) < setting.epochs:
            process.terminate()
        process.join()


def memory_bytes(pid: int | None) -> int:
    """The proportional set size of a process and all below it."""
    total = 0
    try:
        top = psutil.Process(pid)
        family = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in family:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue  # it ended meanwhile
    return total


def show_table(results: list[Result]) -> None:
    table = Table(
        title=f"{results[0].images:,} JPEGs, RandomResizedCrop({CROP[0]}) and a flip, batches of {BATCH_SIZE}"
    )
    table.add_column("loader")
    for heading in (
        "images/s\nfirst epoch",
        "images/s\nlater",
        "against\ntorch",
        "peak\nMB",
        "total\ns",
    ):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result.label,
            f"{result.first_rate:,.0f}",
            f"{result.later_rate:,.0f}",
            f"{result.later_rate / results[0].later_rate:.1f}x",
            f"{result.peak_bytes / 1e6:,.0f}",
            f"{sum(result.epoch_s):.1f}",
        )
    console.print(table)


def machine_note(setting: Setting) -> str:
    cores = len(os.sched_getaffinity(0))
    gpu = f"{torch.cuda.get_device_name()}, not used here" if torch.cuda.is_available() else "no GPU"
    workers = f"{setting.workers} workers by {setting.start_method}"
    return f"{cores} cores, {workers}, {gpu}: batches stay on the host."


def draw_chart(results: list[Result], path: Path, machine: str) -> None:
    """Two bars for each contender, images a second in the first and in later epochs."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    series: list[tuple[str, str, Callable[[Result], float]]] = [
        ("first epoch", "#9aa5b1", lambda result: result.first_rate),
        ("later epochs", "#2f6fb3", lambda result: result.later_rate),
    ]
    for position, (name, colour, rate) in enumerate(series):
        left = [number + 0.4 * (position - 0.5) for number in range(len(results))]
        bars = axes.bar(left, [rate(result) for result in results], 0.38, label=name, color=colour)
        axes.bar_label(bars, fmt="{:,.0f}", padding=2)
    axes.set_xticks(range(len(results)), [f"{r.label}\n{r.peak_bytes / 1e9:.1f} GB peak" for r in results])
    axes.set_ylabel("images/s")
    axes.set_title(f"{results[0].images:,} JPEGs, RandomResizedCrop({CROP[0]}) and a flip")
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.supxlabel(f"{SOURCE_NOTE}\n{machine}", fontsize="small", color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("photos", type=Path, help="a folder made by benchmarks/photos.py")
    parser.add_argument("--chart", type=Path, default=Path("demo.png"), help="the PNG to write")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--count", type=int, help="use only so many pictures")
    args = parser.parse_args()
    if args.epochs < 2:
        parser.error("--epochs must be at least 2: the first one and a later one are compared")
    start_method = multiprocessing.get_start_method()
    setting = Setting(args.photos, args.count, args.epochs, args.workers, start_method)

    machine = machine_note(setting)
    console.print(SOURCE_NOTE, machine, sep="\n", soft_wrap=True)
    results = []
    with console.status("") as status:
        for number, (label, _) in enumerate(CONTENDERS):
            show = functools.partial(_show_progress, status.update, label, setting.epochs)
            show(0)
            results.append(measure(number, setting, show))
    show_table(results)
    draw_chart(results, args.chart, machine)
    console.print(f"Chart written to {args.chart.resolve()}", soft_wrap=True)


def _show_progress(update: Callable[[str], None], label: str, epochs: int, done: int) -> None:
    update(f"{label.replace(chr(10), ' ')}: epoch {min(done + 1, epochs)} of {epochs}")


if __name__ == "__main__":
    main()
