"""Which cache fits a source on this machine, with bytes and images per second, for `fastload doctor SOURCE`.

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
from fastload.cache.encoded import decode_images, decoded_nbytes, encoded_source, tile_images
from fastload.cache.pushdown import Pushdown
from fastload.cache.random_check import probe
from fastload.errors import RandomDatasetError, UnsupportedSampleError
from fastload.images.encoded import EncodedImage
from fastload.nested.small_objects import CURE, find_small_objects
from fastload.nested.tree import leaves
from fastload.system.budget import available_bytes
from fastload.system.cpus import usable_cpus
from fastload.system.sizes import readable_size
from fastload.system.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_SAMPLES = 32
_MAX_TILED_BYTES = 4 << 20  # of files that are rewritten, which takes a second
_CROP_SIDE = 224
_RAM_SHARE = 0.8  # of the free memory, as max_memory="auto"


@dataclass(frozen=True)
class Option:
    """One way to keep the samples.

    Attributes:
        name: In words.
        how: The arguments of CachedDataset, or the command, to choose it.
        place: `"RAM"`, `"disk"`, or `""` if nothing is stored.
        needed_bytes: For all samples.
        fits: Whether that many bytes are free there.
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
        num_measured: Samples read.
        num_cpus: The usable CPUs.
        free_ram_bytes: Host memory that is free.
        free_disk_bytes: Free on the disk of the working directory.
        notes: What is decoded of an undecoded image, why no cache can hold the samples, what the rates leave
            out, and what workers copy of the dataset.
        options: The ways, fastest first.
    """

    num_samples: int
    num_measured: int
    num_cpus: int
    free_ram_bytes: int
    free_disk_bytes: int
    notes: list[str]
    options: list[Option]

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
        return "\n".join([f"{head}; {ram} of RAM and {disk} of disk are free", *table(rows), *self.notes])


def size_up(dataset: Any, source: str) -> Sizing:
    """Measure the ways to keep the samples of a dataset, which `--codec source` finds as SOURCE.

    Raises:
        UnsupportedSampleError: The dataset is empty, or its samples have no image.
        Exception: An error of the dataset.
    """
    num_samples = len(dataset)
    if not num_samples:
        raise UnsupportedSampleError(f"{source} has no samples")
    chosen = random.Random(0).sample(range(num_samples), min(num_samples, _MAX_SAMPLES))
    samples, read_s = _timed(lambda index: dataset[index], chosen)
    pixels = [decode_images(_image_of(sample)) for sample in samples]
    crop, _, explanation = _random_crop()
    _, crop_s = _timed(crop, pixels)
    _, copy_s = _timed(np.copy, pixels)
    decoded_bytes = statistics.mean(decoded_nbytes(sample) for sample in samples)
    notes = [f"images/s: after the first epoch, for a random crop to {_CROP_SIDE} x {_CROP_SIDE} and a flip"]
    ways = [
        ("decoded in RAM", 'cache="ram"', "RAM", decoded_bytes, crop_s),
        ("decoded in LMDB", 'cache="lmdb:PATH"', "disk", decoded_bytes, crop_s + copy_s),
    ]
    encoded = _encoded(dataset, chosen)
    if encoded:
        contents, read_s = _timed(lambda image: image.content(), encoded)
        _, crop_s = _timed(_random_crop()[1], encoded)
        file_bytes = statistics.mean(map(len, contents))
        command = f"fastload cache build {shlex.quote(source)} files.lmdb --codec source"
        ways.append(("files in RAM", 'cache="ram-encoded"', "RAM", file_bytes, crop_s))
        ways.append(("files in LMDB", command, "disk", file_bytes, crop_s + read_s))
        tiled, growth = _with_tiles(encoded, contents)
        if tiled:
            _, tiled_s = _timed(_random_crop()[1], tiled)  # the same crops
            command = f"fastload cache build {shlex.quote(source)} tiles.lmdb --codec tiles"
            ways.append(("files with tiles in LMDB", command, "disk", file_bytes * growth, tiled_s + read_s))
        notes.append(explanation)
    try:
        probe(dataset, [0], rechecked=[0])
    except (RandomDatasetError, UnsupportedSampleError) as error:
        notes.append(f"no cache can hold these samples: {error}")
        ways.clear()
    if reads_ahead(dataset):
        notes.append("the source is remote: without a cache, requests to it take longer than shown")
    notes += [f"each worker copies what it reads of {one}: {CURE}" for one in find_small_objects(dataset)]
    ways.append(("no cache", "cache=None", "", 0, read_s + crop_s))
    num_cpus = usable_cpus()
    free_bytes = {"RAM": available_bytes(), "disk": shutil.disk_usage(os.getcwd()).free}
    options = []
    for name, how, place, sample_bytes, each_s in ways:
        needed_bytes = round(sample_bytes * num_samples)
        fits = not place or needed_bytes <= free_bytes[place] * (_RAM_SHARE if place == "RAM" else 1)
        options.append(Option(name, how, place, needed_bytes, fits, num_cpus / each_s))
    return Sizing(
        num_samples=num_samples,
        num_measured=len(chosen),
        num_cpus=num_cpus,
        free_ram_bytes=free_bytes["RAM"],
        free_disk_bytes=free_bytes["disk"],
        notes=list(filter(None, notes)),
        options=sorted(options, key=lambda option: -option.images_per_s),
    )


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


def _encoded(dataset: Any, chosen: list[int]) -> list[EncodedImage]:
    """The undecoded images of these samples; empty if the dataset has none."""
    source = encoded_source(dataset, is_needed=False)
    images = [_image_of(source[index]) for index in chosen]
    return images if all(isinstance(image, EncodedImage) for image in images) else []


def _with_tiles(
    images: list[EncodedImage], contents: list[bytes | memoryview]
) -> tuple[list[EncodedImage], float]:
    """As many images, with restart markers, and how many times as large their files are.

    No images if no file changes. Of large files, some are rewritten and repeated.
    """
    tiled: list[EncodedImage] = []
    nbytes = new_nbytes = 0
    for image, content in zip(images, contents, strict=True):
        if nbytes > _MAX_TILED_BYTES:
            break
        tiled.append(tile_images(EncodedImage.of(content, image.path)))
        nbytes += len(content)
        new_nbytes += len(tiled[-1].content())
    if all(one.content() == content for one, content in zip(tiled, contents, strict=False)):
        return [], 1.0
    return (tiled * len(images))[: len(images)], new_nbytes / nbytes


def _random_crop() -> tuple[Callable[[Any], Any], Callable[[EncodedImage], Any], str]:
    """A random crop and a flip of pixels, the same of an undecoded image, and what the latter decodes.

    Without albumentations, pixels are only copied, and images only decoded.
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
