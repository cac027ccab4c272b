"""How many bytes a source takes, and the code that fits this machine, for `fastload doctor SOURCE`.

A few samples are read, and of undecoded images only the headers: bytes are estimates. Nothing is written.
"""

from __future__ import annotations

import os
import shutil
import statistics
from math import prod
from typing import Any

import PIL.Image

from fastload.augmentation.encoded import EncodedImage
from fastload.batch.access import expect
from fastload.cache.random_check import probe, spread_indices
from fastload.cache.sources import encoded_source
from fastload.errors import ImageReadError, NondeterministicDatasetError, UnsupportedSampleError
from fastload.nested.tree import leaves
from fastload.system.budget import parse_memory
from fastload.system.humanize import readable_size
from fastload.system.notes import add_note

_MAX_SAMPLES = 100
_NUMBER_BYTES = 8


def source_report(dataset: Any, code: str) -> tuple[dict[str, Any], list[str]]:
    """What a source takes and the line of code to use: as plain data, ready for JSON, and as lines of text.

    Args:
        dataset: Map-style.
        code: Python that stands for it.

    Raises:
        UnsupportedSampleError: It is empty.
        Exception: The error of the first sample, if none can be read.
    """
    if not (num_samples := len(dataset)):
        raise UnsupportedSampleError("the source has no samples")
    source, chosen = encoded_source(dataset), spread_indices(num_samples, _MAX_SAMPLES)
    expect(source, chosen)
    sizes: dict[int, tuple[int, int]] = {}
    errors: list[Exception] = []
    for index in chosen:
        try:
            sizes[index] = _sizes(source[index])
        except Exception as error:  # noqa: BLE001 - of a file or of the user's code; it is reported
            add_note(error, f"in sample {index} of the dataset")
            errors.append(error)
    if not sizes:
        raise errors[0]
    decoded, files = (
        round(statistics.mean(each) * num_samples) for each in zip(*sizes.values(), strict=True)
    )
    ram, disk = parse_memory("auto"), shutil.disk_usage(os.getcwd()).free
    of_pixels = '"ram"' if decoded <= ram else '"lmdb:PATH"' if decoded <= disk else ""
    problem = ""
    try:
        if source is dataset:  # the images of a folder are never random
            probe(dataset, indices=[min(sizes)])
    except (NondeterministicDatasetError, UnsupportedSampleError) as error:
        problem = str(error)
    cache = of_pixels if of_pixels and not problem else "None"
    report = {
        "num_samples": num_samples,
        "num_read": len(chosen),
        "num_unreadable": len(errors),
        "first_error": f"{type(errors[0]).__name__}: {errors[0]}" if errors else "",
        "decoded_bytes": decoded,
        "file_bytes": files or None,
        "ram_bytes": ram,
        "disk_bytes": disk,
        "problem": problem,
        "use": f"fastload.CachedDataset({code}, transform, cache={cache})",
        "loader": of_pixels and f"fastload.DataLoader(dataset, ..., cache={of_pixels})",  # random ones, too
    }
    lines = [f"use {report['loader' if problem and of_pixels else 'use']}"]
    if of_pixels and not problem:
        lines.append(f"or keep your own dataset, such as torchvision's: {report['loader']}")
    how = f"{f'{readable_size(files)} as files, ' if files else ''}estimated from {len(chosen):,}"
    form = "decoded" if files else "as the dataset returns them"  # by file, a cache holds the images before
    lines.append(f"{num_samples:,} samples take {readable_size(decoded)} {form}, {how}")
    lines.append(f"{readable_size(ram)} of RAM and {readable_size(disk)} of disk can be used")
    if errors:
        lines.append(f"{len(errors):,} of {len(chosen):,} cannot be read; the first: {report['first_error']}")
    return report, [*lines, *([f"no cache can hold these samples: {problem}"] if problem else [])]


def _sizes(sample: Any) -> tuple[int, int]:
    """The bytes of a sample with its image decoded, and those of its image's file if it is not."""
    values = leaves(sample)
    image = next((leaf for leaf in values if type(leaf) is EncodedImage), None)
    if image is None:
        return sum(map(_nbytes, values)), 0
    if os.path.exists(image.path) and not os.path.isfile(image.path):
        raise ImageReadError(image.path, "it is not a regular file")  # reading a pipe would not end
    return prod(image.shape) + _NUMBER_BYTES, len(image.content)


def _nbytes(leaf: Any) -> int:
    """The bytes of a value in a cache; of an image of Pillow, those of its pixels."""
    if isinstance(leaf, PIL.Image.Image):
        return leaf.width * leaf.height * len(leaf.getbands())
    return len(leaf) if isinstance(leaf, (bytes, str)) else getattr(leaf, "nbytes", _NUMBER_BYTES)
