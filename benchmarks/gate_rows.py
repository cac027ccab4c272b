"""The rows of the gate, and how each is measured: one process, one checkout of fastload, one program.

A program measures one to three rows with public names that every checkout has, and checks that it measured
what the row says: that samples came from the cache, or that none did.

`python benchmarks/gate_rows.py CHECKOUT PROGRAM SETTINGS` is what gate.py starts; it prints the figures as
JSON. A figure of a loader is that of its median epoch, after one that does not count.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import multiprocessing
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

FLOOR = 0.95
CROP = (224, 224)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LEAST_STORED = 0.99  # share of an epoch that comes from a full cache
MIN_EPOCHS = 3
PERSISTENT = {"num_workers": 2, "persistent_workers": True}


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
        photos: A folder of JPEGs that only the gate reads.
        num_photos: In this folder.
        scratch: An empty folder for this process, on disk.
        seconds: How long a loader's epochs are measured at least.
    """

    photos: str
    num_photos: int
    scratch: str
    seconds: float


@dataclass(frozen=True)
class Row:
    """One figure: the higher, the better.

    Attributes:
        name: What the table calls it.
        unit: Of the figure.
        floor: The least median, new / old, that passes.
    """

    name: str
    unit: str = "images/s"
    floor: float = FLOOR


@dataclass(frozen=True)
class Program:
    """What one process measures.

    Attributes:
        rows: One for each figure.
        measure: Gives the figures.
        needs_photos: Whether it reads the folder of JPEGs.
    """

    rows: tuple[Row, ...]
    measure: Callable[[Settings], list[float]]
    needs_photos: bool = False


class WrongMeasurementError(Exception):
    """What was measured is not what the row says."""


# --- measuring --------------------------------------------------------------------------------------------


def steady(rate: Callable[[], float], settings: Settings) -> float:
    """The median of a rate over epochs, after one that does not count."""
    rate()
    rates: list[float] = []
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < settings.seconds or len(rates) < MIN_EPOCHS:
        rates.append(rate())
    return statistics.median(rates)


def loader_of(dataset: Any, batch_size: int | None, **options: Any) -> Any:
    """The loader under test."""
    import fastload

    return fastload.DataLoader(dataset, batch_size, **options)


def images(loader: Any, settings: Settings) -> float:
    """Images a second in steady epochs; the loader is closed."""
    from harness import images_per_s

    rate = steady(functools.partial(images_per_s, loader, len(loader.dataset)), settings)
    loader.close()
    return rate


def share_of_hits(loader: Any) -> float:
    """The share of samples, of one file each if by file, that came from the cache since the last call."""
    stats = loader.stats(reset=True)
    return float((stats.cache_hits or 0) / stats.num_samples)


def cached_images(loader: Any, settings: Settings, epochs: int = 4) -> float:
    """Images a second in steady epochs that come from a full cache; the loader is closed.

    Args:
        loader: Of a dataset with a length.
        settings: How long they take.
        epochs: Before them: one fills the cache, and each worker meets its share of the records at random.
    """
    from harness import images_per_s

    for _ in range(epochs):
        images_per_s(loader, len(loader.dataset))
    share_of_hits(loader)
    rate = images(loader, settings)
    stored = share_of_hits(loader)
    if stored < LEAST_STORED:
        raise WrongMeasurementError(f"expected an epoch from the cache, got {stored:.1%} of it")
    return rate


# --- programs ---------------------------------------------------------------------------------------------


def in_memory(side: int) -> tuple[Any, int]:
    """Decoded images in one array, and the batch size for them."""
    from throughput import InMemory

    return (InMemory(1024, side), 64) if side > 32 else (InMemory(8192, side), 256)


def import_only(side: int, settings: Settings) -> list[float]:
    """Without workers, and with two."""
    dataset, batch_size = in_memory(side)
    workers: tuple[dict[str, Any], ...] = ({}, PERSISTENT)
    return [images(loader_of(dataset, batch_size, shuffle=True, **each), settings) for each in workers]


def crop(*end: Any) -> Any:
    """Albumentations' crop of training scripts."""
    import albumentations as A

    return A.Compose([A.RandomResizedCrop(CROP), A.HorizontalFlip(p=0.5), *end])


def crop_in_memory(settings: Settings) -> list[float]:
    """By the dataset."""
    from throughput import InMemory

    return [images(loader_of(InMemory(1024, 256, crop()), 64, shuffle=True, **PERSISTENT), settings)]


def decoded_folder(settings: Settings) -> list[float]:
    """Every image is decoded in every epoch."""
    from any_dataset import OpenCVPhotos
    from training import Photos

    import fastload

    folder = fastload.ImageFolder(settings.photos)
    datasets = (
        OpenCVPhotos(settings.photos),
        Photos(folder, crop()),
        fastload.CachedDataset(folder, transform=crop(), cache=None),
    )
    return [images(loader_of(dataset, 16, shuffle=True, **PERSISTENT), settings) for dataset in datasets]


def gather(side: int, store: str, settings: Settings) -> list[float]:
    """Samples of a cache by sample, without a transform."""
    import fastload

    source, batch_size = in_memory(side)
    cache = "ram" if store == "ram" else f"lmdb:{settings.scratch}/samples"
    dataset = fastload.CachedDataset(source, cache=cache)
    return [cached_images(loader_of(dataset, batch_size, shuffle=True, **PERSISTENT), settings)]


def cached_crop(settings: Settings) -> list[float]:
    """Crops of cached images: pixels, floats by albumentations, and floats by a batch transform."""
    import albumentations as A
    from albumentations.pytorch import ToTensorV2
    from throughput import InMemory

    import fastload
    from fastload.transforms import Normalize

    figures = []
    for transform, options in (
        (crop(), {}),
        (crop(A.Normalize(MEAN, STD), ToTensorV2()), {}),
        (crop(), {"batch_transform": Normalize(MEAN, STD)}),
    ):
        dataset = fastload.CachedDataset(InMemory(1024, 256), transform=transform, cache="ram")
        figures.append(cached_images(loader_of(dataset, 64, shuffle=True, **PERSISTENT, **options), settings))
    return figures


def opencv_photos(folder: str) -> Any:
    """OpenCV and albumentations."""
    from any_dataset import OpenCVPhotos

    return OpenCVPhotos(folder)


def torchvision_photos(first: str, folder: str) -> Any:
    """An ImageFolder with torchvision's first transforms; where it is not installed, what they call."""
    from any_dataset import PillowPhotos, image_folder

    if importlib.util.find_spec("torchvision") is not None:
        return image_folder(first, "v1", folder)
    return PillowPhotos(folder, is_resized=first.startswith("Resize"))


def by_file(make_dataset: Callable[[str], Any], store: str, settings: Settings) -> list[float]:
    """The first epoch with its start of workers, what it stored, and steady epochs."""
    from harness import images_per_s

    cache = "ram" if store == "ram" else f"lmdb:{settings.scratch}/files"
    loader = loader_of(make_dataset(settings.photos), 16, shuffle=True, cache=cache, **PERSISTENT)
    first = images_per_s(loader, settings.num_photos)
    found = share_of_hits(loader)
    if found:
        raise WrongMeasurementError(f"expected files that no cache has, but {found:.1%} were in one")
    images_per_s(loader, settings.num_photos)
    stored = share_of_hits(loader)
    return [first, stored, cached_images(loader, settings, epochs=1)]


def start_of_epoch(settings: Settings) -> list[float]:
    """Epochs of 16 small batches, with new workers and with those of the epoch before."""
    from workers import Blank
    from zero_cost import epochs_s

    figures = []
    for options in ({**PERSISTENT, "persistent_workers": False}, PERSISTENT):
        loader = loader_of(Blank(32), 256, **options)
        figures.append(steady(lambda loader=loader: 1 / epochs_s(loader, 1), settings))
        loader.close()
    return figures


def without_workers(settings: Settings) -> list[float]:
    """Kinds of zero_cost.py of which only the loader's own work is left."""
    from zero_cost import epochs_s, rows

    figures = []
    for name in ("dict of 20 tensors of 8", "(int, int)"):
        row = next(row for row in rows() if row.name == name)
        dataset = row.dataset()
        loader = loader_of(dataset, row.batch_size)
        figures.append(steady(lambda: len(dataset) / epochs_s(loader, 1), settings))  # noqa: B023
    return figures


# --- the rows ---------------------------------------------------------------------------------------------


def by_file_program(label: str, make_dataset: Callable[[str], Any], store: str) -> Program:
    """Three rows of a kind of dataset and a store.

    Floors below the common one are decided exceptions: what goes into one file of LMDB is committed in turns,
    and of the few photographs here, a noticeable share passes before it is known what their pipeline needs.
    """
    name = f"by file {'in RAM' if store == 'ram' else 'on disk'}, {label}"
    rows = (
        Row(f"{name}, first epoch", floor=FLOOR if store == "ram" else 0.70),
        Row(f"{name}, share stored by it", "of 1", floor=0.99 if make_dataset is opencv_photos else 0.80),
        Row(f"{name}, later epochs"),
    )
    return Program(rows, functools.partial(by_file, make_dataset, store), needs_photos=True)


PROGRAMS = (
    *(
        Program(
            tuple(Row(f"import only, {side} px, {count} workers") for count in (0, 2)),
            functools.partial(import_only, side),
        )
        for side in (224, 32)
    ),
    Program((Row("albumentations crop in memory"),), crop_in_memory),
    Program(
        (
            Row("JPEG folder, decoded by OpenCV"),
            Row("JPEG folder, decoded by ImageFolder", floor=0.90),  # its JPEG parser may cost this much
            Row("JPEG folder, CachedDataset(cache=None)", floor=0.90),  # the same
        ),
        decoded_folder,
        needs_photos=True,
    ),
    *(
        Program((Row(f"cached gather, {side} px"),), functools.partial(gather, side, "ram"))
        for side in (224, 32)
    ),
    Program(
        tuple(
            Row(f"cached crop, {end}") for end in ("pixels", "A.Normalize", "batch_transform=Normalize(...)")
        ),
        cached_crop,
    ),
    *(
        by_file_program(label, make_dataset, store)
        for store in ("ram", "lmdb")
        for label, make_dataset in (
            ("OpenCV and albumentations", opencv_photos),
            ("torchvision v1", functools.partial(torchvision_photos, "RandomResizedCrop(224)")),
            ("Resize(256) first", functools.partial(torchvision_photos, "Resize(256), RandomCrop(224)")),
        )
    ),
    Program((Row("by sample on disk, 224 px"),), functools.partial(gather, 224, "lmdb")),
    # Decided: LMDB is asked for each record, which small ones feel.
    Program((Row("by sample on disk, 32 px", floor=0.75),), functools.partial(gather, 32, "lmdb")),
    Program(
        (Row("start of an epoch, new workers", "epochs/s"), Row("start, persistent workers", "epochs/s")),
        start_of_epoch,
    ),
    Program(
        (
            Row("dict of 20 tensors, 0 workers", "samples/s"),
            Row("(int, int), 0 workers", "samples/s"),
        ),
        without_workers,
    ),
)


def foreign_modules(checkout: Path) -> list[str]:
    """The modules of fastload that this process imported from elsewhere."""
    names = [name for name in sys.modules if name.partition(".")[0] == "fastload"]
    files = {name: getattr(sys.modules[name], "__file__", None) for name in names}
    return [f"{name} ({file})" for name, file in files.items() if file and checkout not in Path(file).parents]


def main() -> None:
    checkout, number, settings = Path(sys.argv[1]), int(sys.argv[2]), Settings(**json.loads(sys.argv[3]))
    importlib.import_module("fastload")
    if foreign := foreign_modules(checkout):
        raise WrongMeasurementError(f"expected fastload from {checkout}, got {foreign[0]}")
    multiprocessing.set_start_method("fork")
    warnings.simplefilter("ignore")  # of torch, about arrays that cannot be written to
    figures = PROGRAMS[number].measure(settings)
    if foreign := foreign_modules(checkout):
        raise WrongMeasurementError(f"expected fastload from {checkout} alone, got {foreign[0]}, too")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
