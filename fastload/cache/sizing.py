"""Which cache fits a source on this machine, with bytes and images a second, for `fastload doctor SOURCE`.

It reads a few samples, and measures on one CPU. The rates are those of all usable CPUs, after the first
epoch, for a random crop to 224 x 224 pixels and a flip; transport and training cost more. It writes nothing.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.batch.read_ahead import reads_ahead
from fastload.cache.encoded import decoded_nbytes, encoded_source
from fastload.cache.pushdown import Pushdown
from fastload.cache.random_check import probe
from fastload.errors import RandomDatasetError, UnsupportedSampleError
from fastload.images.encoded import EncodedImage
from fastload.nested.tree import leaves
from fastload.system.budget import available_bytes
from fastload.system.cpus import usable_cpus
from fastload.system.sizes import readable_size
from fastload.system.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_SAMPLES = 32
_CROP_SIDE, _STORED_SIDE = 224, 256
_REMOTE = "the source is remote: the rate without a cache does not include the time of requests to it"
_RAM_SHARE = 0.8  # of the free memory, as the budget "auto" of a CachedDataset


@dataclass(frozen=True)
class Option:
    """One way to keep the samples.

    Attributes:
        name: In words.
        how: The arguments of CachedDataset, or the command, that choose it.
        place: `"RAM"`, `"disk"`, or `""` if nothing is stored.
        needed_bytes: For all samples.
        fits: Whether so many bytes are free there.
        images_per_s: By the measured times, on all usable CPUs.
    """

    name: str
    how: str
    place: str
    needed_bytes: int
    fits: bool
    images_per_s: float


@dataclass(frozen=True)
class Sizing:
    """The ways to keep a source's samples.

    Attributes:
        num_samples: Of the source.
        num_measured: Samples that were read.
        num_cpus: The usable CPUs.
        free_ram_bytes: Host memory that is free.
        free_disk_bytes: Free on the disk of the working directory.
        region: What is decoded of an undecoded image; "" if the source gives none.
        refusal: The error of a cache that refuses the samples; "" if they can be cached.
        is_remote: Whether the source is in an object store or on a server. The rates do not include the time
            of requests.
        options: The ways, fastest first.
    """

    num_samples: int
    num_measured: int
    num_cpus: int
    free_ram_bytes: int
    free_disk_bytes: int
    region: str
    refusal: str
    is_remote: bool
    options: tuple[Option, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        best = next((option for option in self.options if option.fits), None)
        rows = [["", "needs", "fits", "images/s", "how"]]
        for option in self.options:
            needs = f"{readable_size(option.needed_bytes)} of {option.place}" if option.place else "nothing"
            name = f"{'>' if option is best else ' '} {option.name}"
            fits = "yes" if option.fits else "no"
            rows.append([name, needs, fits, f"{option.images_per_s:,.0f}", option.how])
        ram, disk = readable_size(self.free_ram_bytes), readable_size(self.free_disk_bytes)
        head = f"{self.num_samples:,} samples, {self.num_measured} measured; {self.num_cpus} CPUs"
        foot = f"images/s: after the first epoch, for a random crop to {_CROP_SIDE} x {_CROP_SIDE} and a flip"
        lines = [
            f"{head}; {ram} of RAM and {disk} of disk are free",
            *table(rows),
            f"{foot}; the loader and the training take their part",
            self.region,
            f"no cache can hold these samples: {self.refusal}" if self.refusal else "",
            _REMOTE if self.is_remote else "",
        ]
        return "\n".join(filter(None, lines))


def size_up(dataset: Any, source: str) -> Sizing:
    """Measure the ways to keep the samples of a dataset, which `--codec source` finds as SOURCE.

    Raises:
        UnsupportedSampleError: The dataset is empty, or its samples have no image.
        Exception: An error of the dataset.
    """
    num_samples = len(dataset)
    if not num_samples:
        raise UnsupportedSampleError(f"{source} has no samples")
    chosen = random.Random(0).sample(range(num_samples), min(num_samples, _MOST_SAMPLES))
    samples, read_s = _timed(lambda index: dataset[index], chosen)
    images = [_image_of(sample) for sample in samples]
    pixels = [image.decode() if isinstance(image, EncodedImage) else image for image in images]
    crop, decode_and_crop, explanation = _random_crop()
    _, crop_s = _timed(crop, pixels)
    _, copy_s = _timed(np.copy, pixels)
    smaller = [_smaller(image) for image in pixels]
    _, small_s = _timed(crop, smaller)
    num_cpus, ram_bytes = usable_cpus(), available_bytes()
    disk_bytes = shutil.disk_usage(os.getcwd()).free
    found: list[Option] = []

    def add(name: str, how: str, place: str, sample_bytes: float, each_s: float) -> None:
        needed_bytes = round(sample_bytes * num_samples)
        free_bytes = {"RAM": _RAM_SHARE * ram_bytes, "disk": disk_bytes, "": float("inf")}[place]
        found.append(Option(name, how, place, needed_bytes, needed_bytes <= free_bytes, num_cpus / each_s))

    decoded_bytes = statistics.mean(decoded_nbytes(sample) for sample in samples)
    small_bytes = decoded_bytes + statistics.mean(
        few.nbytes - many.nbytes for few, many in zip(smaller, pixels, strict=True)
    )
    add("decoded in RAM", 'cache="ram"', "RAM", decoded_bytes, crop_s)
    add("decoded in LMDB", 'cache="lmdb:PATH"', "disk", decoded_bytes, crop_s + copy_s)
    if small_bytes < decoded_bytes:
        how = f'ImageFolder(root, size={_STORED_SIDE}), cache="ram"'
        add("smaller in RAM", how, "RAM", small_bytes, small_s)
    encoded = _encoded(dataset, chosen)
    if encoded is None:
        add("no cache", "cache=None", "", 0, read_s + crop_s)
    else:
        _, file_s = _timed(lambda image: image.content(), encoded)
        _, region_s = _timed(decode_and_crop, encoded)
        file_bytes = statistics.mean(len(image.content()) for image in encoded)
        add("files in RAM", 'cache="ram-encoded"', "RAM", file_bytes, region_s)
        command = f"fastload cache build {shlex.quote(source)} files.lmdb --codec source"
        add("files in LMDB", command, "disk", file_bytes, region_s + file_s)
        add("no cache", "cache=None", "", 0, region_s + file_s)
    refusal = _refusal(dataset)
    if refusal:
        found = [option for option in found if not option.place]
    options = tuple(sorted(found, key=lambda option: -option.images_per_s))
    return Sizing(
        num_samples=num_samples,
        num_measured=len(chosen),
        num_cpus=num_cpus,
        free_ram_bytes=ram_bytes,
        free_disk_bytes=disk_bytes,
        region="" if encoded is None else explanation,
        refusal=refusal,
        is_remote=reads_ahead(dataset),
        options=options,
    )


def _refusal(dataset: Any) -> str:
    """The error of a cache that would refuse the samples; empty if it would store them."""
    try:
        probe(dataset, [0], rechecked=[0])
    except (RandomDatasetError, UnsupportedSampleError) as error:
        return str(error)
    return ""


def _timed(function: Callable[[Any], Any], values: list[Any]) -> tuple[list[Any], float]:
    """The results, and the median time of a call in seconds."""
    results, times = [], []
    for value in values:
        started_s = time.perf_counter()
        results.append(function(value))
        times.append(time.perf_counter() - started_s)
    return results, max(statistics.median(times), 1e-9)


def _image_of(sample: Any) -> Any:
    for leaf in leaves(sample):
        if isinstance(leaf, EncodedImage) or (isinstance(leaf, np.ndarray) and leaf.ndim in (2, 3)):
            return leaf
    raise UnsupportedSampleError(
        "the samples of the source have no image: no array (H, W) or (H, W, C), no EncodedImage"
    )


def _encoded(dataset: Any, chosen: list[int]) -> list[EncodedImage] | None:
    """The undecoded images of these samples; None if the dataset has none."""
    source = encoded_source(dataset)
    try:
        images = [_image_of(source[index]) for index in chosen]
    except UnsupportedSampleError:  # an ImageFolder that resizes
        return None
    return images if all(isinstance(image, EncodedImage) for image in images) else None


def _random_crop() -> tuple[Callable[[Any], Any], Callable[[EncodedImage], Any], str]:
    """A random crop and a flip of pixels, the same of an undecoded image, and what the latter decodes.

    Without albumentations, pixels are only copied, and an image is only decoded.
    """
    try:
        import albumentations
    except ImportError:
        return np.array, EncodedImage.decode, ""
    crop = albumentations.RandomResizedCrop((_CROP_SIDE, _CROP_SIDE))
    pipeline = albumentations.Compose([crop, albumentations.HorizontalFlip()], seed=0)
    pushdown = Pushdown(pipeline, reduces=False)
    explanation = f"where images are not stored decoded, {pushdown.explain()}"
    return lambda image: pipeline(image=image), lambda image: pushdown(image=image), explanation


def _smaller(image: Any) -> Any:
    """The image with the shorter side that crops need."""
    from PIL import Image

    height, width = image.shape[:2]
    if min(height, width) <= _STORED_SIDE or image.dtype != np.uint8 or image.shape[2:] not in ((), (3,)):
        return image
    scale = _STORED_SIDE / min(height, width)
    return np.asarray(Image.fromarray(image).resize((round(width * scale), round(height * scale))))
