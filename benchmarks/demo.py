"""What `make demo` shows: the same folder of JPEGs and the same transform, loaded by torch and by fastload.

    python benchmarks/demo.py build/photos [--chart build/demo.svg]

Five contenders run six epochs over the same pictures:

* torch.utils.data.DataLoader over a dataset that decodes a JPEG and crops it at random,
* fastload.DataLoader over that very dataset with cache="ram": each file is decoded once, in the first epoch,
* fastload.DataLoader over that very dataset: only the import changed,
* fastload.DataLoader over fastload.CachedDataset with cache=None: of each JPEG, only the crop is decoded,
* fastload.DataLoader over fastload.CachedDataset: each sample is read once, in the first epoch.

Each has a process of its own, so none inherits another's memory or warm-up, and workers that persist. The
contenders take turns: each runs its first epoch, then each its second one, and so on, so a machine that is
busy for a while slows all of them. An epoch lasts from ``iter(loader)`` to its last batch, and the first one
includes the start of the workers. The later epochs are all others. A figure is a median, and a ratio that of
two medians; the lines on the chart's bars span the lowest and the highest. The files come from the page
cache: the demo waits for no disk. Nothing is trained, so the figures are what a loader can deliver; a model
that takes its batches more slowly hides the difference.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import statistics
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import albumentations as A
import psutil
import torch
from harness import cpu_model, save
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.utils.data import DataLoader, Dataset, Subset

import fastload
from fastload.cache.ram.registry import live

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.connection import Connection

    import numpy as np
    import numpy.typing as npt

BATCH_SIZE = 64
CROP = (224, 224)
SOURCE_NOTE = (
    "Images: crops of the photographs shipped with scikit-image and scikit-learn, re-encoded as JPEGs."
)

GRAY = "#7d8590"
BUSY_PERCENT = 25  # of all CPUs, used by others before the demo begins
BUSY_S = 2.0
EPOCH_S = (1.5, 5.0)  # of 2,000 pictures with two workers, on a fast machine and on a slow one

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
    cache_bytes: int = 0  # after the last epoch

    @property
    def first_s(self) -> list[float]:
        """Seconds of the first epoch of each round."""
        return [epochs_s[0] for epochs_s in self.rounds_s]

    @property
    def later_s(self) -> list[float]:
        """Seconds of all other epochs."""
        return [seconds for epochs_s in self.rounds_s for seconds in epochs_s[1:]]

    @property
    def total_s(self) -> list[float]:
        """Seconds of all epochs of each round."""
        return [sum(epochs_s) for epochs_s in self.rounds_s]


FIGURES: dict[str, Callable[[Result], list[float]]] = {
    "first epoch": lambda result: result.first_s,
    "later epochs": lambda result: result.later_s,
    "total": lambda result: result.total_s,
}


def times_as_fast(base_s: Sequence[float], own_s: Sequence[float]) -> float:
    """The ratio of the medians of epochs, or of rounds."""
    return statistics.median(base_s) / statistics.median(own_s)


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


def fastload_files(setting: Setting) -> Iterable[Any]:
    dataset = CroppedPhotos(make_photos_dataset(setting), make_transform())
    return _over(fastload.DataLoader, dataset, setting, cache="ram")


def fastload_crops(setting: Setting) -> Iterable[Any]:
    dataset = fastload.CachedDataset(make_photos_dataset(setting), transform=make_transform(), cache=None)
    return _over(fastload.DataLoader, dataset, setting)


def fastload_cached(setting: Setting) -> Iterable[Any]:
    dataset = fastload.CachedDataset(make_photos_dataset(setting), transform=make_transform(), cache="ram")
    return _over(fastload.DataLoader, dataset, setting)


def _over(loader: Callable[..., Any], dataset: Any, setting: Setting, **options: Any) -> Iterable[Any]:
    workers = {"num_workers": setting.workers, "persistent_workers": True}
    made: Iterable[Any] = loader(dataset, batch_size=BATCH_SIZE, shuffle=True, **workers, **options)
    return made


CONTENDERS: list[tuple[str, Callable[[Setting], Iterable[Any]]]] = [
    ("torch DataLoader", torch_plain),
    ('fastload,\ncache="ram"', fastload_files),
    ("fastload,\nimport only", fastload_plain),
    ("fastload,\ncrop only", fastload_crops),
    ("fastload,\nCachedDataset", fastload_cached),
]


def run_epochs(number: int, setting: Setting, turns: Connection) -> None:
    """Run an epoch of one contender at each turn and answer (images, seconds); at the end, its cache's bytes.

    The first answer is that it is ready; a traceback is an answer, too. Runs in a process of its own.
    """
    try:
        # A spawned process would spawn its own children too, and import torch anew in each.
        multiprocessing.set_start_method(setting.start_method, force=True)
        _, make_loader = CONTENDERS[number]
        loader: Any = make_loader(setting)
        turns.send(True)
        while turns.recv():
            images = 0
            started = time.perf_counter()
            for _batch, labels in loader:
                images += len(labels)
            turns.send((images, time.perf_counter() - started))
        cache_bytes = 0
        if isinstance(loader.dataset, fastload.CachedDataset):
            cache_bytes = loader.dataset.cache_info().nbytes
        elif getattr(loader, "cache", None):
            cache_bytes = sum(cache["nbytes"] for cache in live() if cache["kind"] == "files")
        turns.send((cache_bytes,))
    except Exception:  # noqa: BLE001  # whatever it is, the parent prints it
        turns.send(traceback.format_exc())
        raise SystemExit(1) from None


class Runner:
    """The process of one contender, in one round."""

    def __init__(self, result: Result, number: int, setting: Setting) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.result = result
        self.turns, theirs = spawn.Pipe()
        self.process = spawn.Process(target=run_epochs, args=(number, setting, theirs))
        self.process.start()
        theirs.close()  # the child has its own: its death ends the pipe
        result.rounds_s.append([])

    def epoch(self) -> None:
        """Run one epoch and add it to the result."""
        self.result.images, seconds = self._ask(goes_on=True)
        self.result.rounds_s[-1].append(seconds)

    def finish(self) -> None:
        """Add the cache's memory to the result; the process then ends."""
        (self.result.cache_bytes,) = self._ask(goes_on=False)

    def close(self) -> None:
        """End the process, wherever it is."""
        self.turns.close()  # it ends when it waits for a turn
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()

    def answer(self) -> Any:
        """Wait for what the process says next."""
        answer = None
        with contextlib.suppress(EOFError, OSError):
            answer = self.turns.recv()
        if answer is None:
            self.process.join()
            msg = f"{self.result.label!r} died with exit code {self.process.exitcode}"
            raise RuntimeError(msg)
        if isinstance(answer, str):
            msg = f"{self.result.label!r} failed:\n{answer}"
            raise RuntimeError(msg)
        return answer

    def _ask(self, *, goes_on: bool) -> Any:
        with contextlib.suppress(OSError):  # it has died: `answer` says so
            self.turns.send(goes_on)
        return self.answer()


def measure(results: list[Result], setting: Setting) -> None:
    """Run all rounds, and show which epoch is running."""
    num_epochs = setting.rounds * setting.epochs * len(results)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=num_epochs)
        for number_of_round in range(1, setting.rounds + 1):
            round_text = f"round {number_of_round} of {setting.rounds}, " if setting.rounds > 1 else ""
            with contextlib.ExitStack() as running:
                runners = [Runner(result, number, setting) for number, result in enumerate(results)]
                for runner in runners:
                    running.callback(runner.close)
                for runner in runners:
                    runner.answer()  # none still imports while another one runs
                for epoch in range(setting.epochs):
                    # A different contender begins each turn, because each leaves memory to the next one.
                    first = (number_of_round + epoch) % len(runners)
                    for runner in (*runners[first:], *runners[:first]):
                        label = _in_a_line(runner.result.label)
                        text = f"{round_text}epoch {epoch + 1} of {setting.epochs}: {label}"
                        progress.update(bar, description=text)
                        if not console.is_terminal:  # which shows no bar
                            console.print(text, soft_wrap=True)
                        runner.epoch()
                        progress.advance(bar)
                for runner in runners:
                    runner.finish()


def show_table(results: list[Result]) -> None:
    jobs = f"{results[0].images:,} JPEGs, RandomResizedCrop({CROP[0]}) and a flip"
    table = Table(title=f"{jobs}: seconds (times as fast as torch)")
    table.add_column("loader", no_wrap=True)
    for heading in (*FIGURES, "cache, MB"):
        table.add_column(heading, justify="right")
    base = results[0]
    for result in results:
        cells = [
            f"{statistics.median(of(result)):.2f} ({times_as_fast(of(base), of(result)):.1f}x)"
            for of in FIGURES.values()
        ]
        table.add_row(
            _in_a_line(result.label),
            *cells,
            f"{result.cache_bytes / 1e6:,.0f}" if result.cache_bytes else "",
        )
    console.print(table)
    epochs = len(base.rounds_s[0])
    text = f"later epochs: the median of epochs 2 to {epochs}; total: all {epochs} epochs"
    console.print(text, soft_wrap=True)


def warn_if_busy() -> None:
    """Say so if other programs use the CPUs now."""
    busy_percent = psutil.cpu_percent(interval=BUSY_S)
    if busy_percent > BUSY_PERCENT:
        console.print(
            f"Warning: other programs use {busy_percent:.0f}% of the CPUs, and {load_note()}. Every epoch "
            "takes longer, and the ratios are less certain: run this on a quiet machine.",
            style="bold yellow",
            soft_wrap=True,
        )


def load_note() -> str:
    return f"the load average is {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"


def machine_note(setting: Setting) -> str:
    cores = len(os.sched_getaffinity(0))
    gpu = f"{torch.cuda.get_device_name()}, not used here" if torch.cuda.is_available() else "no GPU"
    workers = f"{setting.workers} workers by {setting.start_method}"
    return f"{cores} cores ({cpu_model()}), {workers}, {gpu}: batches stay in CPU memory; {load_note()}."


def new_figure(salt: str, *rows_and_columns: int) -> tuple[Any, Any]:
    """A figure without a background, in a gray that white and dark pages show, and its axes."""
    import matplotlib.pyplot as plt  # not among what the demo installs

    plt.switch_backend("Agg")  # a file, no window
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    plt.rcParams.update(dict.fromkeys(names, GRAY), **{"svg.hashsalt": salt})
    return plt.subplots(*rows_and_columns, figsize=(9, 5), layout="constrained")


def write_figure(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, transparent=True)


def draw_chart(results: list[Result], path: Path, machine: str) -> None:
    """Two bars for each contender, images a second in the first and in later epochs, with their spread."""
    figure, axes = new_figure("demo")
    colors = ("#9aa5b1", "#2f6fb3")
    for position, (name, color) in enumerate(zip(("first epoch", "later epochs"), colors, strict=True)):
        left = [number + 0.4 * (position - 0.5) for number in range(len(results))]
        seconds = [FIGURES[name](result) for result in results]
        rates = [[result.images / s for s in some] for result, some in zip(results, seconds, strict=True)]
        heights = [statistics.median(some) for some in rates]
        below = [height - min(some) for height, some in zip(heights, rates, strict=True)]
        above = [max(some) - height for height, some in zip(heights, rates, strict=True)]
        bars = axes.bar(
            left, heights, 0.38, label=name, color=color, yerr=(below, above), ecolor=GRAY, capsize=3
        )
        times = [times_as_fast(seconds[0], some) for some in seconds]
        texts = [f"{height:,.0f}\n{ratio:.1f}x" for height, ratio in zip(heights, times, strict=True)]
        axes.bar_label(bars, texts, padding=2)
    axes.set_xticks(range(len(results)), [result.label for result in results])
    axes.set_ylabel("images/s")
    axes.set_title(f"{results[0].images:,} JPEGs, RandomResizedCrop({CROP[0]}) and a flip")
    axes.margins(y=0.18)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    epochs = len(results[0].rounds_s[0])
    note = f"Nothing is trained. Medians; later epochs are epochs 2 to {epochs}. The lines span all epochs."
    figure.supxlabel(f"{note}\n{SOURCE_NOTE}\n{machine}", fontsize="small")
    write_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("photos", type=Path, help="a folder made by benchmarks/photos.py")
    parser.add_argument("--chart", type=Path, help="an SVG or PNG to write, with matplotlib")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--count", type=int, help="use only so many pictures")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/demo.json")
    args = parser.parse_args()
    if args.epochs < 2:
        parser.error("--epochs must be at least 2: the first one is compared with later ones")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    start_method = multiprocessing.get_start_method()
    setting = Setting(args.photos, args.count, args.epochs, args.rounds, args.workers, start_method)

    machine = machine_note(setting)
    console.print(SOURCE_NOTE, machine, sep="\n", soft_wrap=True)
    results = [Result(label) for label, _ in CONTENDERS]
    num_epochs = args.rounds * args.epochs * len(results)
    least, most = (math.ceil(num_epochs * seconds / 60) for seconds in EPOCH_S)
    work = f"{num_epochs} epochs over {num_read(setting):,} JPEGs"
    console.print(f"{work} take {least} to {most} minutes on a quiet machine.", soft_wrap=True)
    warn_if_busy()
    measure(results, setting)
    show_table(results)
    console.print("Nothing was trained: these are the rates that a loader can deliver.", soft_wrap=True)
    if args.chart is not None:
        draw_chart(results, args.chart, machine)
        console.print(f"Chart written to {args.chart.resolve()}", soft_wrap=True)
    if args.save:
        save("demo", f"python benchmarks/demo.py PHOTOS --rounds {args.rounds} --save", questions(results))


def num_read(setting: Setting) -> int:
    """Read all pictures into the page cache, for the first contender must not wait for the disk."""
    paths = list(setting.photos.rglob("*.jpg"))
    for path in paths:
        path.read_bytes()
    return len(paths)


def questions(results: list[Result]) -> list[dict[str, Any]]:
    """The results as plain data."""
    base, *others = results
    jobs = f"{base.images:,} JPEGs, RandomResizedCrop({CROP[0]}) and a flip"
    return [
        {
            "title": f"{jobs}, {name}",
            "unit": "s",
            "rows": {
                _in_a_line(result.label): {"median": statistics.median(of(result)), "figures": of(result)}
                for result in results
            },
            "ratios": {
                f"torch / {_in_a_line(result.label)}": {"value": times_as_fast(of(base), of(result))}
                for result in others
            },
        }
        for name, of in FIGURES.items()
    ]


def _in_a_line(label: str) -> str:
    return label.replace("\n", " ")


if __name__ == "__main__":
    main()
