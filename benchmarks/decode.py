"""How fast large JPEGs become small crops, if only a part of each image is decoded.

Questions: how many images a second come out of a folder of JPEGs through RandomResizedCrop(224) and a flip,
for images of several sizes? The contenders are torch's loader over a user's own dataset that decodes with
OpenCV, fastload's loader over the same dataset, and `CachedDataset` with whole images, with the regions of
`decode="exact"`, with the reduced sizes of `decode="fast"`, and with the files in RAM. NVIDIA DALI decodes
regions, too, and FFCV decodes whole JPEGs from its own format; both run on the CPU, in environments of their
own (`make bench-peers` makes them). Further questions: the usual path of validation, the memory of each
cache, and a slow disk, which sleeps for 5 ms before each file.

"Whole images, Pillow" is what `CachedDataset(cache=None)` does for samples that are decoded already, and what
it did before it decoded regions. "Whole images, nvImageCodec" calls the same pipeline inside a function, so
no crop is decoded alone.

Held out: the disk, except in the question about it: all files lie in the page cache. The images are crops of
the photographs in scikit-image and scikit-learn, scaled to the size and encoded at quality 90; large ones get
the grain of a sensor. There are fewer files than images: the same file appears under several names. All
contenders have two workers, processes or threads, and batches of 64; nobody reads the batches. An own run
takes whole epochs for a second at least, with workers that are up; a run of another library is a process of
its own, whose first epoch does not count.

Command: python benchmarks/decode.py [--only TEXT ...] [--runs 5] [--save]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import shutil
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
from PIL import Image
from torch.utils.data import Dataset

import fastload
from fastload.cache.build.build import build_lmdb
from fastload.cache.build.sources import encoded_source

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from common import CROP_SIDE, NUM_CLASSES, NUM_WORKERS, Job, Task
from harness import RESULTS, Contender, interleave, report, save
from photos import SOURCES, encode_jpeg, load_photo
from run import Peer, ask, bring_into_page_cache, objection

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH_SIZE = 64
QUALITY = 90
RUN_S = 1.0  # how long an own run takes at least
PEER_RUN_S = 1.5
SLOW_DISK_S = 0.005
CROP_SHARE = (0.6, 1.0)  # of the largest crop of a photograph with the right aspect


@dataclass(frozen=True)
class Size:
    """Images of one size.

    Attributes:
        width: In pixels.
        height: In pixels.
        num_images: In an epoch; two workers get equal shares of whole batches.
        num_files: That differ.
        grain: Standard deviation of the sensor's grain, in grey levels.
        max_runs: Slow sizes are measured less often.
        has_peers: Whether DALI and FFCV take part.
    """

    width: int
    height: int
    num_images: int
    num_files: int
    grain: float
    max_runs: int
    has_peers: bool

    @property
    def name(self) -> str:
        """As the command line has it."""
        return f"{self.width}x{self.height}"

    @property
    def title(self) -> str:
        """As the tables have it."""
        return f"{self.width} x {self.height}"


SIZES = (
    Size(500, 375, 768, 384, 0.0, 9, True),
    Size(1024, 768, 256, 128, 3.0, 9, False),
    Size(2048, 1536, 128, 48, 3.0, 3, True),
    Size(4000, 3000, 128, 8, 3.0, 3, True),
)
PEERS = (
    Peer("DALI, region, CPU", "DALI", "dali_loader", "dali"),
    Peer("FFCV, JPEG", "FFCV", "ffcv_loader", "ffcv"),
)
TORCH, IMPORT_ONLY = "torch, OpenCV", "fastload, OpenCV, import only"
WHOLE, WHOLE_REGIONS = "whole images, Pillow", "whole images, nvImageCodec"
EXACT, FAST, IN_RAM = 'decode="exact"', 'decode="fast"', 'cache="ram-encoded", decode="exact"'
# The target ratios, by size: numerator, denominator and target.
TARGETS: dict[str, list[tuple[str, str, float]]] = {
    "500x375": [
        (EXACT, WHOLE, 1.2),
        (EXACT, TORCH, 1.5),
        (EXACT, "DALI, region, CPU", 1.4),
        (EXACT, "FFCV, JPEG", 1.5),
        (IN_RAM, EXACT, 1.0),
    ],
    "1024x768": [(EXACT, TORCH, 1.5), (FAST, TORCH, 1.5)],
    "2048x1536": [(EXACT, TORCH, 1.5), (FAST, TORCH, 2.5), (FAST, "DALI, region, CPU", 1.4)],
    "4000x3000": [(EXACT, TORCH, 1.5), (FAST, TORCH, 4.0), (FAST, "DALI, region, CPU", 1.4)],
}


# --- images ----------------------------------------------------------------------------------------------


def make_images(folder: Path, size: Size) -> list[Path]:
    """JPEGs of this size below ``folder``, in a folder for each of ten photographs; all their paths."""
    files = []
    for number in range(size.num_files):
        source = SOURCES[number % NUM_CLASSES]
        path = folder / source.name / f"{number:05d}-0.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_image(load_photo(source), size, number))
        files.append(path)
    paths = list(files)
    for number in range(size.num_files, size.num_images):
        path = files[number % size.num_files]
        link = path.with_name(f"{path.stem[:5]}-{number // size.num_files}.jpg")
        link.hardlink_to(path)
        paths.append(link)
    return paths


def make_image(photo: Image.Image, size: Size, number: int) -> bytes:
    """A random crop of a photograph, scaled and encoded; it depends on the size and on ``number`` alone."""
    rng = np.random.default_rng([size.width, number])
    scale = min(photo.width / size.width, photo.height / size.height) * rng.uniform(*CROP_SHARE)
    width, height = size.width * scale, size.height * scale
    left, top = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
    box = (left, top, left + width, top + height)
    image = photo.resize((size.width, size.height), Image.Resampling.LANCZOS, box=box)
    if size.grain:
        grain = rng.standard_normal((size.height, size.width, 1), dtype=np.float32) * size.grain
        image = Image.fromarray((np.asarray(image) + grain).round().clip(0, 255).astype(np.uint8))
    return encode_jpeg(image, QUALITY)


# --- datasets and pipelines ------------------------------------------------------------------------------


def training_pipeline() -> A.Compose:
    return A.Compose([A.RandomResizedCrop((CROP_SIDE, CROP_SIDE)), A.HorizontalFlip(p=0.5)])


def validation_pipeline() -> A.Compose:
    return A.Compose([A.SmallestMaxSize(256), A.CenterCrop(CROP_SIDE, CROP_SIDE)])


class OwnDataset(Dataset[Any]):
    """A user's own dataset: OpenCV decodes, albumentations transforms."""

    def __init__(self, folder: fastload.ImageFolder, transform: Any, wait_s: float = 0.0) -> None:
        self.files = list(folder.samples)
        self.transform = transform
        self.wait_s = wait_s

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.files[index]
        if self.wait_s:
            time.sleep(self.wait_s)
        image = cv2.imread(path, cv2.IMREAD_COLOR_RGB)
        return self.transform(image=image)["image"], label


class WholeImages(Dataset[Any]):
    """The samples of an image folder, and no way to get them undecoded."""

    def __init__(self, folder: fastload.ImageFolder) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.folder[index]


class SlowDisk(Dataset[Any]):
    """Undecoded images that come from a disk of long latency."""

    def __init__(self, folder: fastload.ImageFolder) -> None:
        self.files = list(folder.samples)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.files[index]
        time.sleep(SLOW_DISK_S)
        return fastload.EncodedImage(Path(path).read_bytes()), label


class InAFunction:
    """A pipeline that cannot be seen from outside."""

    def __init__(self, pipeline: A.Compose) -> None:
        self.pipeline = pipeline

    def __call__(self, sample: tuple[Any, int]) -> tuple[Any, int]:
        """The transformed sample."""
        image, label = sample
        return self.pipeline(image=image)["image"], label


# --- contenders ------------------------------------------------------------------------------------------


def row(label: str, cls: Any, make: Callable[[], Any], num_images: int) -> Contender:
    """A loader over the dataset that ``make`` gives, made at the first run and kept."""

    def epochs_s(loader: Any, count: int) -> float:
        began_s = time.perf_counter()
        seen = sum(len(images) for _ in range(count) for images, _ in loader)
        if seen != count * num_images:
            raise RuntimeError(f"{label}: expected {count * num_images} images, got {seen}")
        return time.perf_counter() - began_s

    @functools.cache
    def ready() -> tuple[Any, int]:
        """The loader with its workers up, and how many epochs a run has."""
        loader = cls(make(), BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS, persistent_workers=True)
        first_s = epochs_s(loader, 1)  # with the start of the workers
        return loader, 1 if first_s > 3 * RUN_S else math.ceil(RUN_S / epochs_s(loader, 1))

    def run() -> float:
        is_warm_up = not ready.cache_info().currsize
        loader, count = ready()
        return 0.0 if is_warm_up else count * num_images / epochs_s(loader, count)

    def close() -> None:
        loader, _ = ready()
        ready.cache_clear()
        if hasattr(loader, "close"):
            loader.close()
        loader._iterator = None  # torch's workers end with it

    return Contender(label, label, run, close)


def filled(dataset: Any, transform: Any) -> fastload.CachedDataset:
    """The files of a dataset in RAM."""
    cached = fastload.CachedDataset(dataset, transform, cache="ram-encoded")
    cached.fill(progress=False)
    return cached


def own_rows(folder: fastload.ImageFolder, pipeline: Callable[[], A.Compose]) -> list[Contender]:
    """All contenders of this process's environment."""
    cached = functools.partial(fastload.CachedDataset, cache=None)
    makers: dict[str, tuple[Any, Callable[[], Any]]] = {
        TORCH: (torch.utils.data.DataLoader, lambda: OwnDataset(folder, pipeline())),
        IMPORT_ONLY: (fastload.DataLoader, lambda: OwnDataset(folder, pipeline())),
        WHOLE: (fastload.DataLoader, lambda: cached(WholeImages(folder), pipeline())),
        WHOLE_REGIONS: (fastload.DataLoader, lambda: cached(folder, InAFunction(pipeline()))),
        EXACT: (fastload.DataLoader, lambda: cached(folder, pipeline())),
        FAST: (fastload.DataLoader, lambda: cached(folder, pipeline(), decode="fast")),
        IN_RAM: (fastload.DataLoader, lambda: filled(folder, pipeline())),
    }
    return [row(label, cls, make, len(folder)) for label, (cls, make) in makers.items()]


def peer_rows(folder: fastload.ImageFolder, size: Size, work: Path) -> tuple[list[Contender], dict[str, str]]:
    """The other libraries, and why some of them cannot take part."""
    task = Task(f"decode_{size.name}", size.title, len(folder), 0, BATCH_SIZE, True, QUALITY)
    photos = list(folder.samples)
    work.mkdir()
    job = Job(task, work / "no images", photos, work)
    rows, unable = [], {}

    def run(peer: Peer) -> float:
        bring_into_page_cache(job, peer.module)
        answer = ask(peer, job, PEER_RUN_S)
        failure = objection(answer, job)
        if failure:
            raise RuntimeError(f"{peer.label}: {failure}")
        return float(answer["images_per_s"])

    for peer in PEERS:
        failure = str(ask(peer, job, 0).get("cannot", ""))  # converts, where nothing is timed
        if failure:
            unable[peer.label] = failure
        else:
            rows.append(Contender(peer.label, peer.label, but_the_first(functools.partial(run, peer))))
    return rows, unable


def but_the_first(run: Callable[[], float]) -> Callable[[], float]:
    """Without the run that does not count, because each run of another library has a warm-up of its own."""
    calls = itertools.count()
    return lambda: run() if next(calls) else 0.0


# --- questions -------------------------------------------------------------------------------------------


def answer(
    title: str, rows: list[Contender], targets: list[tuple[str, str, float]], runs: int
) -> dict[str, Any]:
    """Measure these rows in turn and print their table."""
    interleave(rows, runs)
    medians = {row.label: row.median for row in rows}
    ratios = {
        f"{above} / {below}": (medians[above] / medians[below], target)
        for above, below, target in targets
        if above in medians and below in medians
    }
    return report(title, "images/s", rows, ratios)


def training(folder: fastload.ImageFolder, size: Size, work: Path, runs: int) -> dict[str, Any]:
    """RandomResizedCrop and a flip."""
    rows, unable = own_rows(folder, training_pipeline), {}
    if size.has_peers:
        others, unable = peer_rows(folder, size, work / "peers")
        rows += others
    targets = TARGETS[size.name]
    mean_kb = sum(Path(path).stat().st_size for path, _ in folder.samples) / len(folder) / 1e3
    title = (
        f"{size.title} JPEGs of {mean_kb:,.0f} kB, RandomResizedCrop({CROP_SIDE}) and a flip, "
        f"{NUM_WORKERS} workers"
    )
    found = answer(title, rows, targets, min(runs, size.max_runs))
    for label, reason in unable.items():
        print(f"  {label}: cannot: {reason}")
        found["rows"][label] = {"cannot": reason}
    found["cannot"] = unable
    return found


def validation(folder: fastload.ImageFolder, size: Size, work: Path, runs: int) -> dict[str, Any]:
    """The usual path of validation: the shorter side to 256, then the centre."""
    rows = [row for row in own_rows(folder, validation_pipeline) if row.label in (TORCH, EXACT, FAST)]
    targets = [(EXACT, TORCH, 1.0), (FAST, TORCH, 1.0)]
    title = f"{size.title} JPEGs, SmallestMaxSize(256) and CenterCrop({CROP_SIDE}), {NUM_WORKERS} workers"
    return answer(title, rows, targets, min(runs, size.max_runs))


def slow_disk(folder: fastload.ImageFolder, size: Size, work: Path, runs: int) -> dict[str, Any]:
    """Files that take 5 ms to come, and the same files in RAM."""
    pipeline, cached = training_pipeline, functools.partial(fastload.CachedDataset, cache=None)
    torch_slow, from_disk, in_ram = "torch, OpenCV, slow disk", "cache=None, slow disk", "the files in RAM"
    own = functools.partial(OwnDataset, folder, wait_s=SLOW_DISK_S)
    rows = [
        row(torch_slow, torch.utils.data.DataLoader, lambda: own(pipeline()), len(folder)),
        row(from_disk, fastload.DataLoader, lambda: cached(SlowDisk(folder), pipeline()), len(folder)),
        row(in_ram, fastload.DataLoader, lambda: filled(SlowDisk(folder), pipeline()), len(folder)),
    ]
    targets = [(in_ram, from_disk, 1.5), (in_ram, torch_slow, 1.5)]
    title = f"{size.title} JPEGs from a disk that waits {SLOW_DISK_S * 1e3:g} ms before each file"
    return answer(title, rows, targets, runs)


def memory(folder: fastload.ImageFolder, size: Size, work: Path, runs: int) -> dict[str, Any]:
    """Bytes of each cache of the same images; they do not vary."""
    encoded = fastload.CachedDataset(folder, cache="ram-encoded")
    decoded = fastload.CachedDataset(folder, cache="ram")
    for cached in (encoded, decoded):
        cached.fill(progress=False)
    path = work / "cache.lmdb"
    build_lmdb(encoded_source(folder), path, num_workers=0, progress=False, codec="source").close()
    kb = {
        'cache="ram"': decoded.cache_info().nbytes / len(folder) / 1e3,
        'cache="ram-encoded"': encoded.cache_info().nbytes / len(folder) / 1e3,
        'LMDB, codec="source"': path.stat().st_size / len(folder) / 1e3,
    }
    path.unlink()
    for cached in (encoded, decoded):
        cached.cache.close()
    rows = [Contender(label, label, lambda: 0.0, figures=[value]) for label, value in kb.items()]
    ratio = kb['cache="ram"'] / kb['cache="ram-encoded"']
    ratios = {'cache="ram" / cache="ram-encoded"': (ratio, 5.0)}
    return report(f"Memory of the caches of {size.title} JPEGs", "kB an image", rows, ratios, digits=1)


QUESTIONS: list[tuple[str, Size, Callable[..., dict[str, Any]]]] = [
    *((f"train {size.name}", size, training) for size in SIZES),
    *((f"validate {size.name}", size, validation) for size in (SIZES[0], SIZES[2])),
    (f"slow disk {SIZES[0].name}", SIZES[0], slow_disk),
    *((f"memory {size.name}", size, memory) for size in (SIZES[0], SIZES[2])),
]


def merged(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """These answers, and those of questions that were not asked now, from the results file."""
    path = RESULTS / "decode.json"
    kept = json.loads(path.read_text())["questions"] if path.exists() else []
    answers = {question["name"]: question for question in kept} | found
    return [answers[name] for name, _, _ in QUESTIONS if name in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = ", ".join(name for name, _, _ in QUESTIONS)
    parser.add_argument("--only", nargs="+", default=[""], help=f"questions that contain a text: {names}")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write these answers into results/decode.json")
    args = parser.parse_args()
    cv2.setNumThreads(0)  # as albumentations advises beside workers
    directory = Path(tempfile.mkdtemp(prefix="fastload-decode-"))
    found: dict[str, dict[str, Any]] = {}
    try:
        for name, size, ask_question in QUESTIONS:
            if not any(text in name for text in args.only):
                continue
            photos = directory / size.name
            if not photos.exists():
                make_images(photos, size)
            work = Path(tempfile.mkdtemp(dir=directory))
            folder = fastload.ImageFolder(photos)
            found[name] = {"name": name, **ask_question(folder, size, work, args.runs)}
            shutil.rmtree(work)
            if args.save:
                save("decode", f"python benchmarks/decode.py --runs {args.runs} --save", merged(found))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
