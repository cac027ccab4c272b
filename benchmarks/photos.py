"""Make a folder of JPEGs that a loader can be timed on, without a network.

    python benchmarks/photos.py build/photos --count 2000

writes ``build/photos/astronaut/00000.jpg`` and so on: a folder for each source photograph, pictures of about
500 x 375 pixels and 60-120 KB, the size of a typical ImageNet file. Each is a random crop of a photograph,
scaled, perhaps mirrored, given a little sensor grain and encoded at the quality that reaches its size.
Width and height vary by a few percent, because a real folder's do.

The sources are the photographs inside the scikit-image and scikit-learn wheels. Their terms, as those
packages state them, are in ``SOURCES`` below and are written to ``README.txt`` beside the pictures.

Rules:
1. The same arguments give the same pictures: picture k of a class depends on (seed, class, k) alone.
2. A finished folder is left alone, an interrupted one is completed, and one made with other arguments is
   made anew. Files appear under their name only when they are whole.
3. A folder that this script did not make is never written to.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import json
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

MANIFEST = "photos.json"
RECIPE = 1  # raise it when the same arguments give other pictures
MIN_BYTES, MAX_BYTES = 68_000, 120_000  # targets; a step of quality is up to 8 KB, so files have 60-120 KB
QUALITIES = range(60, 97)  # below lies visible damage, above it bytes that no camera writes
SIZE_JITTER = 0.04  # width and height each differ from the nominal ones by up to this share
CROP_SHARE = (0.6, 1.0)  # of the largest crop with the right aspect
GRAIN = (2.0, 5.0)  # standard deviation of the sensor grain, in levels of 255
JOB_PHOTOS = 25  # photos a job: long enough to hide its dispatch, short enough to share evenly


@dataclass(frozen=True)
class Source:
    """A photograph inside an installed package, and the terms under which that package ships it."""

    name: str  # the class folder
    package: str
    file: str
    terms: str


SOURCES = (
    Source("astronaut", "skimage", "data/astronaut.png", "NASA, Great Images; public domain"),
    Source("camera", "skimage", "data/camera.png", "Lav Varshney; CC0"),
    Source("chelsea", "skimage", "data/chelsea.png", "Stefan van der Walt; CC0"),
    Source("china", "sklearn", "datasets/images/china.jpg", "danielbuechele, flickr; CC BY 2.0"),
    Source("coffee", "skimage", "data/coffee.png", "Rachel Michetti; CC0"),
    Source("flower", "sklearn", "datasets/images/flower.jpg", "vultilion, flickr; CC BY 2.0"),
    Source("grass", "skimage", "data/grass.png", "CC0Textures; CC0"),
    Source("hubble", "skimage", "data/hubble_deep_field.jpg", "NASA, HubbleSite; public domain"),
    Source("retina", "skimage", "data/retina.jpg", "Mikael Haggstrom; CC0"),
    Source("rocket", "skimage", "data/rocket.jpg", "SpaceX; public domain"),
    Source("brick", "skimage", "data/brick.png", "CC0Textures; CC0"),
    Source("gravel", "skimage", "data/gravel.png", "CC0Textures; CC0"),
)
PACKAGE_NAMES = {"skimage": "scikit-image", "sklearn": "scikit-learn"}


@dataclass(frozen=True)
class Recipe:
    """All that the pictures depend on."""

    count: int
    classes: int
    seed: int
    width: int
    height: int
    version: int = RECIPE


def make_photos(
    dest: str | os.PathLike[str],
    count: int,
    *,
    classes: int = 10,
    seed: int = 0,
    size: tuple[int, int] = (500, 375),
    processes: int | None = None,
) -> list[Path]:
    """Write ``count`` JPEGs below ``dest``, shared evenly between ``classes`` folders.

    Args:
        dest: An empty or missing folder, or one that an earlier call made.
        count: Photos in all.
        classes: Source photographs to draw on, one folder each.
        seed: Chooses the crops.
        size: Nominal (width, height) in pixels.
        processes: Started by spawn; 1 works in this process, None takes one for each core.

    Returns:
        The photos' paths, sorted.

    Raises:
        ValueError: for a number out of range.
        FileExistsError: if ``dest`` holds folders that this function did not make.
    """
    if not 1 <= classes <= len(SOURCES):
        msg = (
            f"there are {len(SOURCES)} source photographs: classes must be 1 to {len(SOURCES)}, got {classes}"
        )
        raise ValueError(msg)
    if count < classes:
        msg = f"every class needs a photo: count must be at least {classes}, got {count}"
        raise ValueError(msg)
    recipe = Recipe(count, classes, seed, *size)
    root = Path(dest)
    paths = _paths(root, recipe)
    _open_folder(root, recipe)
    missing = {path for path in paths if not path.exists()}
    jobs = [
        (root, recipe, label, numbers)
        for label in range(classes)
        for numbers in _chunks([k for k in range(count) if k % classes == label], JOB_PHOTOS)
        if any(_path(root, k, recipe) in missing for k in numbers)
    ]
    workers = min(processes or len(os.sched_getaffinity(0)), len(jobs))
    if workers <= 1:
        for job in jobs:
            _make_job(job)
    else:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
            list(pool.map(_make_job, jobs))  # list() raises what a job raised
    return paths


def _path(root: Path, number: int, recipe: Recipe) -> Path:
    return root / SOURCES[number % recipe.classes].name / f"{number // recipe.classes:05d}.jpg"


def _paths(root: Path, recipe: Recipe) -> list[Path]:
    return sorted(_path(root, number, recipe) for number in range(recipe.count))


def _chunks(numbers: list[int], length: int) -> list[list[int]]:
    return [numbers[start : start + length] for start in range(0, len(numbers), length)]


def _open_folder(root: Path, recipe: Recipe) -> None:
    """Make ``root`` ready for this recipe: new, resumed, or emptied of our own photos of another recipe."""
    root.mkdir(parents=True, exist_ok=True)
    manifest = root / MANIFEST
    if not manifest.exists():
        if any(entry.is_dir() for entry in root.iterdir()):
            msg = f"{root} holds folders that this script did not make; name an empty or a new folder"
            raise FileExistsError(msg)
    elif json.loads(manifest.read_text()) != asdict(recipe):
        _remove_photos(root)
    for source in SOURCES[: recipe.classes]:
        (root / source.name).mkdir(exist_ok=True)
    _write_whole(root / "README.txt", _credits(recipe.classes).encode())
    _write_whole(manifest, json.dumps(asdict(recipe), indent=1).encode())


def _remove_photos(root: Path) -> None:
    for folder in (root / source.name for source in SOURCES):
        for photo in folder.glob("[0-9]*.jpg"):
            photo.unlink()
        if folder.is_dir():
            folder.rmdir()  # raises, as it should, if somebody put something else in


def _credits(classes: int) -> str:
    lines = [
        "Crops of photographs that ship with scikit-image and scikit-learn, encoded by benchmarks/photos.py."
    ]
    lines += [f"{s.name}: {PACKAGE_NAMES[s.package]}, {s.file}: {s.terms}" for s in SOURCES[:classes]]
    return "\n".join(lines) + "\n"


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears under its name only when it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(data)
    partial.replace(path)


def _make_job(job: tuple[Path, Recipe, int, list[int]]) -> None:
    """Write some photos of one class; runs in a spawned process or in the caller's."""
    root, recipe, label, numbers = job
    for number in numbers:
        path = _path(root, number, recipe)
        if not path.exists():
            _write_whole(path, make_photo(SOURCES[label], recipe, number))


@functools.lru_cache(maxsize=2)
def load_photo(source: Source) -> Image.Image:
    spec = importlib.util.find_spec(source.package)
    if spec is None or not spec.submodule_search_locations:
        msg = f"{PACKAGE_NAMES[source.package]} is not installed; the photograph {source.file} ships with it"
        raise ModuleNotFoundError(msg)
    with Image.open(Path(spec.submodule_search_locations[0]) / source.file) as image:
        return image.convert("RGB")


def make_photo(source: Source, recipe: Recipe, number: int) -> bytes:
    """Photo ``number`` of a recipe as the bytes of a JPEG."""
    rng = np.random.default_rng([recipe.seed, number])
    photo = load_photo(source)
    width, height = (
        round(side * (1 + rng.uniform(-SIZE_JITTER, SIZE_JITTER))) for side in (recipe.width, recipe.height)
    )
    scale = min(photo.width / width, photo.height / height) * rng.uniform(*CROP_SHARE)
    crop_width, crop_height = width * scale, height * scale
    left = rng.uniform(0, photo.width - crop_width)
    top = rng.uniform(0, photo.height - crop_height)
    box = (left, top, left + crop_width, top + crop_height)
    crop = photo.resize((width, height), Image.Resampling.BICUBIC, box=box)
    if rng.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    # Grain also gives smooth pictures (a night sky, a retina) the bytes that a real camera's file has.
    grain = rng.standard_normal((height, width, 1), dtype=np.float32) * rng.uniform(*GRAIN)
    pixels = (np.asarray(crop) + grain).round().clip(0, 255).astype(np.uint8)
    return _encode(Image.fromarray(pixels), target_bytes=int(rng.integers(MIN_BYTES, MAX_BYTES)))


def _encode(image: Image.Image, target_bytes: int) -> bytes:
    """The best JPEG of at most ``target_bytes``: the highest quality that fits, found by bisection."""
    low, high = QUALITIES[0], QUALITIES[-1]
    best = encode_jpeg(image, low)
    while low < high:
        middle = (low + high + 1) // 2
        data = encode_jpeg(image, middle)
        if len(data) <= target_bytes:
            low, best = middle, data
        else:
            high = middle - 1
    return best


def encode_jpeg(image: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dest", type=Path, help="folder to write to")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", default="500x375", metavar="WIDTHxHEIGHT")
    args = parser.parse_args()
    width, height = (int(side) for side in args.size.split("x"))
    started = time.monotonic()
    paths = make_photos(args.dest, args.count, classes=args.classes, seed=args.seed, size=(width, height))
    sizes_kb = [path.stat().st_size / 1000 for path in paths]
    print(
        f"{len(paths)} photos in {args.classes} folders below {args.dest}: "
        f"{statistics.mean(sizes_kb):.0f} KB on average, {min(sizes_kb):.0f} to {max(sizes_kb):.0f} KB "
        f"({time.monotonic() - started:.1f} s). Crops of the photographs in scikit-image and scikit-learn."
    )


if __name__ == "__main__":
    main()
