"""How fast crops come out of JPEGs whose crops decode only their tiles.

Questions: how many images a second do RandomResizedCrop(224) and a flip give for JPEGs of several sizes, for
crops of 0.08 to 1 and of 0.25 to 1 of the area? The contenders are torch's loader over a user's own dataset
that decodes with OpenCV, fastload's loader over the same dataset, and `CachedDataset(cache=None)` over an
ImageFolder: of the files as they are, whose regions nvImageCodec decodes, and of the same files after
`fastload images tile`, without nvImageCodec and with it, and with `decode="fast"`. DALI decodes regions, too;
it takes part where its environment is there (`make bench-peers` makes it). A further question: how many bytes
of a file a crop needs.

Held out: the disk (all files lie in the page cache), and the rewrite, which is done once. Images are those
of `decode.py`. All contenders have two workers and batches of 64, and nobody reads the batches. A run takes
whole epochs for a second at least, with workers that are up.

Command: python benchmarks/tiles.py [--only TEXT ...] [--runs 5] [--save]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import albumentations as A
import cv2
import torch.utils.data
from decode import PEERS, OwnDataset, Size, answer, make_images, peer_rows, row
from harness import RESULTS, Contender, report, save

import fastload
from fastload.images import regions
from fastload.images.tiled_folder import tile_file
from fastload.images.tiles import cut_jpeg

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE = 224
SIZES = (
    Size(500, 375, 768, 384, 0.0, 9, True),
    Size(2048, 1536, 128, 48, 3.0, 5, True),
    Size(4000, 3000, 128, 8, 3.0, 3, True),
)
SCALES = ((0.08, 1.0), (0.25, 1.0))
NUM_BOXES = 4  # of each file, for the bytes
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
    shape = fastload.EncodedImage(content).shape
    total = 0
    for _ in range(NUM_BOXES):
        box = crop.get_params_dependent_on_data({"shape": shape}, {})["crop_coords"]
        cut = cut_jpeg(content, box)
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
                make_images(plain, size)
                tile(plain, tiled)
            found[name] = {"name": name, **ask_question(plain, tiled, size, args.runs)}
            if args.save:
                save("tiles", f"python benchmarks/tiles.py --runs {args.runs} --save", merged(found))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
