"""How fast crops come out of JPEGs whose crops decode only their tiles.

Questions: how many images a second do RandomResizedCrop(224) and a flip give for JPEGs of several sizes, for
crops of 0.08 to 1 and of 0.25 to 1 of the area? The contenders are torch's loader over a user's own dataset
that decodes with OpenCV, fastload's loader over the same dataset, and `CachedDataset(cache=None)` over an
ImageFolder: of the files as they are, whose regions nvImageCodec decodes, and of the same files after
`fastload images tile`, without nvImageCodec and with it, and with `decode="fast"`. DALI decodes regions, too;
it takes part where its environment is there (`make bench-peers` makes it). Further questions: how much CPU
time the decoder alone takes, how much validation takes (the shorter side becomes 256 pixels, and the centre
is kept), how much the rewrite takes, and how many bytes of a file a crop needs.

Held out: the disk (all files lie in the page cache), and the rewrite, which is done once. Images are those
of `decode.py`. All contenders have two workers and batches of 64, and nobody reads the batches. A run takes
whole epochs for a second at least, with workers that are up.

The rewrite by jpegtran is measured where that program is installed.

Command: python benchmarks/tiles.py [--only TEXT ...] [--runs 5] [--save]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import albumentations as A
import cv2
import torch.utils.data
from decode import PEERS, OwnDataset, Size, answer, make_images, peer_rows, row, validation_pipeline
from first_epoch import in_own_process
from harness import RESULTS, Contender, interleave, report, save

import fastload
from fastload.cache.pushdown import Pushdown
from fastload.images import regions, tiled_folder
from fastload.images.encoded import EncodedImage
from fastload.images.tiled_folder import tile_file, tile_jpeg
from fastload.images.tiles import cut_jpeg
from fastload.system.worker_memory import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE = 224
SIZES = (
    Size(500, 375, 768, 384, 0.0, 9, True),
    Size(2048, 1536, 128, 48, 3.0, 5, True),
    Size(4000, 3000, 128, 8, 3.0, 3, True),
)
SCALES = ((0.08, 1.0), (0.25, 1.0))
NUM_BOXES = 4  # of each file, for the bytes and the CPU time
MAX_FILES = 40  # of them that are decoded and rewritten in this process
TORCH, IMPORT_ONLY = "torch, OpenCV", "fastload, OpenCV, import only"
REGIONS, TILES, BOTH = "regions, nvImageCodec", "tiles", "tiles, nvImageCodec"
FAST, FAST_TILES = 'regions, decode="fast"', 'tiles, decode="fast"'
TARGETS = {
    "500x375": [(TILES, TORCH, 1.9), (TILES, IMPORT_ONLY, 1.5), (BOTH, REGIONS, 1.0)],
    "2048x1536": [
        (TILES, TORCH, 2.5),
        (TILES, IMPORT_ONLY, 1.5),
        (BOTH, REGIONS, 1.0),
        (FAST_TILES, FAST, 1.0),
    ],
    "4000x3000": [
        (TILES, TORCH, 3.0),
        (TILES, IMPORT_ONLY, 1.5),
        (BOTH, REGIONS, 1.0),
        (FAST_TILES, FAST, 1.0),
    ],
}


class OpenCVAlone(torch.utils.data.Dataset[Any]):
    """A dataset in a process that seems not to have nvImageCodec."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        regions._codec = lambda: None  # in a worker process, which has no other dataset
        return self.dataset[index]


def tile(plain: Path, tiled: Path) -> None:
    """Rewrite a folder; a file with several names is rewritten once."""
    written: dict[int, Path] = {}
    for path in sorted(plain.rglob("*.jpg")):
        name, inode = path.relative_to(plain), path.stat().st_ino
        if inode in written:
            (tiled / name).hardlink_to(written[inode])
            continue
        made = tile_file(str(plain), str(tiled), str(name))
        if not made.is_tiled:
            raise RuntimeError(f"{path} has no tiles: {made.reason}")
        written[inode] = tiled / name


def pipeline(scale: tuple[float, float]) -> A.Compose:
    """The transform of all contenders."""
    return A.Compose([A.RandomResizedCrop((SIDE, SIDE), scale=scale), A.HorizontalFlip(p=0.5)])


def training(plain: Path, tiled: Path, size: Size, scale: tuple[float, float], runs: int) -> dict[str, Any]:
    """One size and one range of crops."""
    folder = fastload.ImageFolder(plain)

    def cached(root: Path, decode: str = "exact") -> Any:
        return fastload.CachedDataset(fastload.ImageFolder(root), pipeline(scale), cache=None, decode=decode)

    makers: dict[str, tuple[Any, Callable[[], Any]]] = {
        TORCH: (torch.utils.data.DataLoader, lambda: OwnDataset(folder, pipeline(scale))),
        IMPORT_ONLY: (fastload.DataLoader, lambda: OwnDataset(folder, pipeline(scale))),
        REGIONS: (fastload.DataLoader, lambda: cached(plain)),
        TILES: (fastload.DataLoader, lambda: OpenCVAlone(cached(tiled))),
        BOTH: (fastload.DataLoader, lambda: cached(tiled)),
        FAST: (fastload.DataLoader, lambda: cached(plain, "fast")),
        FAST_TILES: (fastload.DataLoader, lambda: cached(tiled, "fast")),
    }
    if size is SIZES[0]:  # crops of small images are seldom twice as large as the result
        del makers[FAST], makers[FAST_TILES]
    rows = [row(label, cls, make, len(folder)) for label, (cls, make) in makers.items()]
    with tempfile.TemporaryDirectory() as work:
        if scale == SCALES[0] and any(peer.python.exists() for peer in PEERS):
            rows += peer_rows(folder, size, Path(work) / "peers")[0]
        least, most = scale
        title = (
            f"{size.title} JPEGs, RandomResizedCrop({SIDE}) of {least:g} to {most:g} of the area and a flip"
        )
        return answer(title, rows, TARGETS[size.name], min(runs, size.max_runs))


def cpu_time(plain: Path, tiled: Path, size: Size, runs: int) -> dict[str, Any]:
    """Decoding of boxes in one process, from memory."""
    keep_freed_memory(1)  # as in a worker
    files = [(path.read_bytes(), (tiled / path.relative_to(plain)).read_bytes()) for path in _unique(plain)]
    crop = A.RandomResizedCrop((SIDE, SIDE))
    crop.set_random_seed(0)
    items = [(*pair, _box(crop, pair[0])) for pair in files for _ in range(NUM_BOXES)]
    min_size = (SIDE, SIDE)
    contender = functools.partial(_timed, items)
    rows = [
        contender("whole image, OpenCV", lambda old, _, box: EncodedImage(old).decode()),
        contender("whole image with tiles, OpenCV", lambda _, new, box: EncodedImage(new).decode()),
        contender("region, nvImageCodec", lambda old, _, box: EncodedImage(old).decode(box), has_codec=True),
        contender("tiles, OpenCV", lambda _, new, box: EncodedImage(new).decode(box)),
        contender("tiles, nvImageCodec", lambda _, new, box: EncodedImage(new).decode(box), has_codec=True),
        contender(
            'region, decode="fast"',
            lambda old, _, box: EncodedImage(old).decode_reduced(box, min_size),
            has_codec=True,
        ),
        contender(
            'tiles, decode="fast"',
            lambda _, new, box: EncodedImage(new).decode_reduced(box, min_size),
            has_codec=True,
        ),
    ]
    interleave(rows, min(runs, size.max_runs))
    ratios = {f"{row.label} / {rows[0].label}": (row.median / rows[0].median, 1.0) for row in rows[1:]}
    return report(f"CPU time of decoding a crop of {size.title} JPEGs", "us", rows, ratios)


def _timed(items: list[Any], label: str, decode: Callable[..., Any], *, has_codec: bool = False) -> Contender:
    """CPU time of decoding these items, in us."""

    def run() -> float:
        with mock.patch.object(regions, "_codec", regions._codec if has_codec else lambda: None):
            began_s = time.process_time()
            for item in items:
                decode(*item)
            return (time.process_time() - began_s) / len(items) * 1e6

    return Contender(label, label, run)


def validation(plain: Path, tiled: Path, size: Size, runs: int) -> dict[str, Any]:
    """Decoding and transforming for validation in one process, from memory."""
    keep_freed_memory(1)  # as in a worker
    files = [(path.read_bytes(), (tiled / path.relative_to(plain)).read_bytes()) for path in _unique(plain)]
    whole = validation_pipeline()
    exact, fast = (Pushdown(validation_pipeline(), reduces=reduces) for reduces in (False, True))
    contender = functools.partial(_timed, files)
    rows = [
        contender("whole image, OpenCV", lambda old, _: whole(image=EncodedImage(old).decode())),
        contender("whole image with tiles, OpenCV", lambda _, new: whole(image=EncodedImage(new).decode())),
        contender("region, nvImageCodec", lambda old, _: exact(image=EncodedImage(old)), has_codec=True),
        contender("tiles, OpenCV", lambda _, new: exact(image=EncodedImage(new))),
        contender('whole image, decode="fast"', lambda old, _: fast(image=EncodedImage(old))),
        contender('tiles, decode="fast"', lambda _, new: fast(image=EncodedImage(new))),
    ]
    interleave(rows, min(runs, size.max_runs))
    ratios = {f"{row.label} / {rows[0].label}": (row.median / rows[0].median, 1.0) for row in rows[1:]}
    return report(f"CPU time of validation with {size.title} JPEGs", "us", rows, ratios)


def rewriting(plain: Path, size: Size, runs: int) -> dict[str, Any]:
    """CPU time of a rewrite, with the comparison of all pixels."""
    contents = [path.read_bytes() for path in _unique(plain)]

    def contender(label: str, program: str | None) -> Contender:
        def run() -> float:
            with mock.patch.object(tiled_folder.shutil, "which", return_value=program):
                began_s = _cpu_s()
                for content in contents:
                    tile_jpeg(content, label)
                return (_cpu_s() - began_s) / len(contents) * 1e3

        return Contender(label, label, run)

    program = shutil.which("jpegtran")
    rows = [contender("Python", None), *([contender("jpegtran", program)] if program else [])]
    interleave(rows, 1 if size.width > SIZES[1].width else min(runs, 3))
    ratios = {f"{row.label} / Python": (row.median / rows[0].median, 0.3) for row in rows[1:]}
    return report(f"CPU time of rewriting {size.title} JPEGs", "ms an image", rows, ratios, digits=1)


def _cpu_s() -> float:
    """CPU time of this process and of programs that it ran."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both)


def _unique(folder: Path) -> list[Path]:
    """Some files that differ."""
    return list({os.stat(path).st_ino: path for path in sorted(folder.rglob("*.jpg"))}.values())[:MAX_FILES]


def _box(crop: Any, content: bytes) -> Any:
    """A random box in an image."""
    return crop.get_params_dependent_on_data({"shape": EncodedImage(content).shape}, {})["crop_coords"]


def bytes_read(plain: Path, tiled: Path, size: Size) -> dict[str, Any]:
    """What a crop needs of a file; it does not vary."""
    rows = []
    wholes = {
        label: _mean(root, lambda content: len(content))
        for label, root in (("file", plain), ("file with tiles", tiled))
    }
    for label, value in wholes.items():
        rows.append(Contender(label, label, lambda: 0.0, figures=[value]))
    for scale in SCALES:
        crop = A.RandomResizedCrop((SIDE, SIDE), scale=scale)
        crop.set_random_seed(0)
        label = f"tiles of a crop of {scale[0]:g} to {scale[1]:g} of the area"
        value = _mean(tiled, functools.partial(_bytes_of_tiles, crop))
        rows.append(Contender(label, label, lambda: 0.0, figures=[value]))
    ratios = {f"{one.label} / file": (one.median / rows[0].median, 1.0) for one in rows[1:]}
    return report(f"Bytes of {size.title} JPEGs", "kB an image", rows, ratios, digits=1)


def _mean(root: Path, nbytes: Callable[[bytes], float]) -> float:
    """The mean of a figure over the files that differ, in kB."""
    files = {os.stat(path).st_ino: path for path in root.rglob("*.jpg")}
    return sum(nbytes(path.read_bytes()) for path in files.values()) / len(files) / 1e3


def _bytes_of_tiles(crop: Any, content: bytes) -> float:
    """The mean number of bytes over a few boxes."""
    total = 0
    for _ in range(NUM_BOXES):
        cut = cut_jpeg(content, _box(crop, content))
        total += len(content) if cut is None else len(cut.content)
    return total / NUM_BOXES


QUESTIONS: list[tuple[str, Size, Callable[..., dict[str, Any]]]] = [
    *(
        (
            f"{size.name} {scale[0]:g}",
            size,
            lambda plain, tiled, size, runs, scale=scale: training(plain, tiled, size, scale, runs),
        )
        for size in SIZES
        for scale in SCALES
    ),
    *((f"CPU {size.name}", size, cpu_time) for size in SIZES),
    *((f"validation {size.name}", size, validation) for size in SIZES),
    *(
        (f"rewrite {size.name}", size, lambda plain, tiled, size, runs: rewriting(plain, size, runs))
        for size in SIZES
    ),
    *(
        (f"bytes {size.name}", size, lambda plain, tiled, size, runs: bytes_read(plain, tiled, size))
        for size in SIZES
    ),
]


def merged(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """These answers, and those of questions that were not asked now, from the results file."""
    path = RESULTS / "tiles.json"
    kept = json.loads(path.read_text())["questions"] if path.exists() else []
    answers = {question["name"]: question for question in kept} | found
    return [answers[name] for name, _, _ in QUESTIONS if name in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = ", ".join(name for name, _, _ in QUESTIONS)
    parser.add_argument("--only", nargs="+", default=[""], help=f"questions that contain a text: {names}")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write these answers into results/tiles.json")
    args = parser.parse_args()
    cv2.setNumThreads(0)  # as albumentations advises beside workers
    directory = Path(tempfile.mkdtemp(prefix="fastload-tiles-"))
    found: dict[str, dict[str, Any]] = {}
    try:
        for name, size, ask_question in QUESTIONS:
            if not any(text in name for text in args.only):
                continue
            plain, tiled = directory / size.name, directory / f"{size.name}-tiled"
            if not plain.exists():
                in_own_process(make_images, plain, size)  # see import_only.py
                in_own_process(tile, plain, tiled)
            found[name] = {"name": name, **ask_question(plain, tiled, size, args.runs)}
            if args.save:
                save("tiles", f"python benchmarks/tiles.py --runs {args.runs} --save", merged(found))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
