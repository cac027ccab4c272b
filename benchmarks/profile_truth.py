"""Whether a profile tells the truth: ten scripts whose limit is known, and for each the cure and its gain.

Questions: is the verdict right, how many times as fast does the profile say that the loop would be and how
fast is it after the cure, how many bytes does it say that `cache="ram"` takes and how many are taken, and how
much slower is a loop that is profiled? The loops compute by waiting, as one that waits for a GPU does.

Each script runs in a process of its own. Runs of its loop, profiled, not profiled and cured, are interleaved;
a loop repeats epochs for some seconds, after one that does not count.

Held out: disk (files come from the page cache) and the GPU. Needs torchvision, whose Python part is enough:
pip install --no-deps torchvision==0.28.0

Command: python benchmarks/profile_truth.py [--seconds 2.0] [--runs 5] [--only NAME] [--save]
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import albumentations as A
import cv2
import numpy as np
import torch.utils.data
from any_dataset import SETTLED_S, pipeline
from harness import in_own_process, save
from PIL import Image
from rich.console import Console
from rich.table import Table

import fastload
from fastload.cache.file_cache import store_of_process

if TYPE_CHECKING:
    from collections.abc import Callable

CROP, RESIZE = "RandomResizedCrop(224)", "Resize(256), RandomCrop(224)"
TORCH, OURS = torch.utils.data.DataLoader, fastload.DataLoader
NUM_FILES, NUM_PHOTOS, BATCH = 320, 20, 16
STORAGE_S = 0.020  # of a file


# --- the scripts -----------------------------------------------------------------------------------------


class Files(torch.utils.data.Dataset[Any]):
    """Photographs of a folder, read by Pillow.

    Args:
        folder: Holds them.
        transform: Of an image.
        times: How often each of them is a sample.
    """

    def __init__(self, folder: str, transform: Any, times: int = 1) -> None:
        self.paths = sorted(map(str, Path(folder).glob("*.jpg"))) * times
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB")), index


class ByOpenCV(Files):
    """By OpenCV and albumentations."""

    def __getitem__(self, index: int) -> Any:
        image = cv2.imread(self.paths[index], cv2.IMREAD_COLOR_RGB)
        return self.transform(image=image)["image"], index


class WithMasks(Files):
    """With a mask of each photograph, cut by hand."""

    def __getitem__(self, index: int) -> Any:
        image = Image.open(self.paths[index]).convert("RGB")
        mask = Image.open(self.paths[index].replace(".jpg", ".png"))
        left, upper = (int(torch.randint(side - 224, (1,))) for side in image.size)
        box = left, upper, left + 224, upper + 224
        pixels = torch.from_numpy(np.array(image.crop(box))).permute(2, 0, 1).float().div(255)
        return pixels, torch.from_numpy(np.array(mask.crop(box))).long()


def by_hand(values: Any) -> int:
    """Slow Python of the user's own."""
    total = 0
    for value in values:
        total = (total * 31 + value) % 65_521
    return total


class OwnPython(torch.utils.data.Dataset[Any]):
    """Samples that a loop in Python makes."""

    def __init__(self, length: int = 60_000) -> None:
        self.values = list(range(length))

    def __len__(self) -> int:
        return NUM_FILES

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 64, 64), by_hand(self.values)), index


class SlowStorage(Files):
    """Files that take 20 ms to arrive."""

    def fetched(self, path: str) -> io.BytesIO:
        """The bytes of a file."""
        time.sleep(STORAGE_S)
        return io.BytesIO(Path(path).read_bytes())

    def __getitem__(self, index: int) -> Any:
        return self.transform(Image.open(self.fetched(self.paths[index])).convert("RGB")), index


class Waits(torch.utils.data.Dataset[Any]):
    """Samples that wait for a millisecond, as for a database."""

    def __len__(self) -> int:
        return 4 * NUM_FILES

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return torch.zeros(3, 64, 64), index


def albumentations() -> Any:
    """The usual training crop."""
    return A.Compose(
        [A.RandomResizedCrop((224, 224)), A.HorizontalFlip(p=0.5), A.Normalize(), A.ToTensorV2()]
    )


@dataclass(frozen=True)
class Script:
    """A script with a limit that is known.

    Attributes:
        limits: What the verdict may name.
        change: The suggestion that cures it; empty: there is none.
        dataset: Makes its dataset from a folder.
        num_workers: Of its loader.
        compute_s: What a step of its loop waits for "its GPU".
        cured: What the cure changes of the loader.
        says: What the verdict contains.
    """

    limits: tuple[str, ...]
    change: str
    dataset: Callable[[str], Any]
    num_workers: int
    compute_s: float
    cured: dict[str, Any]
    says: str = ""


CACHE: dict[str, Any] = {"cache": "ram"}
SCRIPTS = {
    "torchvision v1": Script(
        ("decode",), "cache", lambda folder: Files(folder, pipeline(CROP, "v1")), 1, 0.005, CACHE
    ),
    "torchvision v2": Script(
        ("decode", "transform"),
        "cache",
        lambda folder: Files(folder, pipeline(CROP, "v2")),
        1,
        0.005,
        CACHE,
    ),
    "Resize first": Script(
        ("decode", "resize"), "cache", lambda folder: Files(folder, pipeline(RESIZE, "v1")), 1, 0.005, CACHE
    ),
    "OpenCV and albumentations": Script(
        ("decode",), "cache", lambda folder: ByOpenCV(folder, albumentations()), 1, 0.005, CACHE
    ),
    "masks": Script(("decode",), "cache", lambda folder: WithMasks(folder, None), 1, 0.005, CACHE),
    "own slow Python": Script(
        ("code",), "code", lambda _: OwnPython(), 1, 0.010, {"dataset": OwnPython(1)}, "by_hand"
    ),
    "compute-bound": Script(
        ("",), "", lambda folder: ByOpenCV(folder, albumentations()), 2, 0.250, {}, "not your bottleneck"
    ),
    "storage-bound": Script(
        ("code", "read"),
        "workers",
        lambda folder: SlowStorage(folder, pipeline(CROP, "v1")),
        2,
        0.100,
        {},
        "waiting",
    ),
    "too few workers": Script(("code", "read"), "workers", lambda _: Waits(), 1, 0.010, {}, "waiting"),
    "too many workers": Script(
        ("cpus",),
        "cache",
        lambda folder: ByOpenCV(folder, albumentations(), 6),  # the starts of epochs are few
        4 * (os.cpu_count() or 1),
        0.005,
        CACHE,
        "share",
    ),
}


def make_photos(folder: str) -> None:
    """Files of 500 x 375 pixels and about 80 kB, with masks."""
    generator = np.random.default_rng(0)
    for number in range(NUM_PHOTOS):
        blocks = generator.integers(0, 256, (25, 33, 3), np.uint8)
        image = np.asarray(Image.fromarray(blocks).resize((500, 375), Image.Resampling.BICUBIC), np.int16)
        image = np.clip(image + generator.normal(0, 7, image.shape), 0, 255).astype(np.uint8)
        Image.fromarray(image).save(f"{folder}/{number:04}.jpg", quality=90)
        Image.fromarray(image).quantize(8).save(f"{folder}/{number:04}.png")
    for number in range(NUM_PHOTOS, NUM_FILES):
        for ending in ("jpg", "png"):
            shutil.copy(f"{folder}/{number % NUM_PHOTOS:04}.{ending}", f"{folder}/{number:04}.{ending}")
    time.sleep(SETTLED_S)


# --- measuring -------------------------------------------------------------------------------------------


def step_s(loader: Any, compute_s: float, seconds: float) -> float:
    """Seconds of a step: of epochs after the first one, and of steps after the first one of each."""
    spent_s, num_steps, end_s = 0.0, 0, None
    while end_s is None or time.perf_counter() < end_s:
        for number, _batch in enumerate(loader):
            if number == 0:
                start_s = time.perf_counter()
            time.sleep(compute_s)
        if end_s is not None:
            spent_s, num_steps = spent_s + time.perf_counter() - start_s, num_steps + number
        end_s = end_s or time.perf_counter() + seconds
    return spent_s / num_steps


def stop(loader: Any) -> None:
    """End the persistent workers."""
    if hasattr(loader, "close"):
        loader.close()
    loader._iterator = None


def ask(name: str, folder: str, seconds: float, runs: int, results: Any) -> None:
    """Sends what was found out about a script; runs in a process of its own."""
    multiprocessing.set_start_method("fork", force=True)
    torch.manual_seed(0)
    script = SCRIPTS[name]
    dataset = script.dataset(folder)
    kind: Any = OURS if script.change == "cache" else TORCH  # the cure changes nothing else

    def make(**changes: Any) -> Any:
        settings = {"num_workers": script.num_workers, "persistent_workers": True, "shuffle": True}
        return kind(**{"dataset": dataset, "batch_size": BATCH, **settings, **changes})

    found: dict[str, Any] = {"plain": [], "profiled": [], "cured": [], "predicted": [], "right": []}
    cured: Any = None
    for run in range(runs):
        for side in ("plain", "profiled") if run % 2 else ("profiled", "plain"):
            loader = make()
            if side == "plain":
                found[side].append(step_s(loader, script.compute_s, seconds))
            else:
                with fastload.profile(loader) as profile:
                    found[side].append(step_s(loader, script.compute_s, seconds))
                report = profile.report()
            stop(loader)
        (told,) = report.loaders
        found["right"].append(
            report.bottleneck(told) in script.limits and script.says in report.verdict(told)
        )
        advice = {one.change: one for one in report.suggestions(told)}
        found["verdict"], found["text"] = report.verdict(told), str(report)
        if not script.change:
            found["right"][-1] &= not advice
            continue
        if script.change not in advice:
            found["predicted"].append(float("nan"))
            continue
        one = advice[script.change]
        found["predicted"].append(one.gain)
        found["bytes"] = [(told.file_bytes or 0) / 1e6]
        changes = script.cured
        if script.change == "workers":
            found["num_workers"] = changes = {"num_workers": int(one.text.split()[0].partition("=")[2])}
        if cured is None:
            cured = make(**changes)
        found["cured"].append(step_s(cured, script.compute_s, seconds))
    if cured is not None:
        stop(cured)
    if "bytes" in found:
        found["bytes"].append(store_of_process("auto").nbytes / 1e6)
    results.put(found)


def main() -> None:
    """Measure, print, and with --save write results/profile_truth.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", choices=list(SCRIPTS))
    parser.add_argument("--text", action="store_true", help="print the reports")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    console, table = Console(width=150), Table(title="What a profile says, and what is true")
    for column in ("", "verdict", "predicted", "measured", "ratio", "MB predicted", "MB", "profiled / plain"):
        table.add_column(column)
    median = statistics.median
    gains: dict[str, Any] = {"rows": {}, "ratios": {}}
    costs: dict[str, Any] = {"rows": {}, "ratios": {}}
    sizes: dict[str, Any] = {"rows": {}, "ratios": {}}
    verdicts = {}
    with tempfile.TemporaryDirectory() as folder:
        make_photos(folder)
        for name in [args.only] if args.only else SCRIPTS:
            os.environ["FASTLOAD_RUNTIME_DIR"] = f"{folder}/{len(costs['rows'])}"
            results: Any = multiprocessing.get_context("spawn").SimpleQueue()
            in_own_process(ask, name, folder, args.seconds, args.runs, results)
            found = results.get()
            pairs = [a / b for a, b in zip(found["profiled"], found["plain"], strict=True)]
            verdicts[name] = sum(found["right"]) / len(found["right"])
            costs["rows"][name] = {"median": median(pairs), "figures": pairs}
            costs["ratios"][name] = {"value": median(pairs), "target": 1.03}
            row = [name, f"{verdicts[name]:.0%} right", "", "", "", "", ""]
            if found["cured"]:
                measured = [a / b for a, b in zip(found["plain"], found["cured"], strict=False)]
                for side, figures in ("predicted", found["predicted"]), ("measured", measured):
                    gains["rows"][f"{name}: {side}"] = {"median": median(figures), "figures": figures}
                ratio = median(found["predicted"]) / median(measured)
                gains["ratios"][name] = {"value": ratio, "target": 1.0}
                row[2:5] = [f"{median(found['predicted']):.2f}", f"{median(measured):.2f}", f"{ratio:.2f}"]
            if SCRIPTS[name].change == "cache" and "bytes" in found:
                for side, figure in zip(("predicted", "measured"), found["bytes"], strict=True):
                    sizes["rows"][f"{name}: {side}"] = {"median": figure, "figures": [figure]}
                sizes["ratios"][name] = {"value": found["bytes"][0] / found["bytes"][1], "target": 1.0}
                row[5:7] = [f"{figure:.1f}" for figure in found["bytes"]]
            table.add_row(*row, f"{median(pairs):.3f} ({min(pairs):.3f} to {max(pairs):.3f})")
            console.print(found["text"] if args.text else f"{name}: {found['verdict']}", highlight=False)
    console.print(table)
    if args.save:
        titles = {"Gains": ("times", gains), "Memory": ("MB", sizes), "Cost": ("times", costs)}
        questions = [{"title": title, "unit": unit, **rows} for title, (unit, rows) in titles.items()]
        questions[0]["verdicts"] = verdicts
        save("profile_truth", "python benchmarks/profile_truth.py", questions)


if __name__ == "__main__":
    sys.exit(main())
