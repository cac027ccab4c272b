"""How many bytes a source takes, and the code that fits this machine, for `fastload doctor SOURCE`.

A few samples are read, and of undecoded images only the headers: bytes are estimates. Nothing is written.
"""

from __future__ import annotations

import os
import shutil
import statistics
from math import prod
from typing import Any

from fastload.augmentation.encoded import EncodedImage
from fastload.batch.source import expect
from fastload.cache.build.random_check import probe, spread_indices
from fastload.cache.build.sources import encoded_source
from fastload.errors import ImageReadError, NondeterministicDatasetError, UnsupportedSampleError
from fastload.nested.tree import leaves
from fastload.system.budget import parse_memory
from fastload.system.humanize import readable_size, table

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
    num_samples = len(dataset)
    if not num_samples:
        raise UnsupportedSampleError("the source has no samples")
    source = encoded_source(dataset)
    chosen = spread_indices(num_samples, _MAX_SAMPLES)
    expect(source, chosen)
    sizes: dict[int, tuple[int, int]] = {}
    errors: list[Exception] = []
    for index in chosen:
        try:
            sizes[index] = _sizes(source[index])
        except Exception as error:  # noqa: BLE001 - of a file or of the user's code; it is reported
            errors.append(error)
    if not sizes:
        raise errors[0]
    means = (statistics.mean(each) for each in zip(*sizes.values(), strict=True))
    decoded, files = (round(mean * num_samples) for mean in means)
    ram, disk = parse_memory("auto"), shutil.disk_usage(os.getcwd()).free
    of_pixels = '"ram"' if decoded <= ram else '"lmdb:PATH"' if decoded <= disk else ""
    cache = of_pixels or "None"
    problem = ""
    try:
        if source is dataset:  # the images of a folder are never random
            probe(dataset, indices=[min(sizes)])
    except (NondeterministicDatasetError, UnsupportedSampleError) as error:
        cache, problem = "None", str(error)
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
    return report, _lines(report)


def _sizes(sample: Any) -> tuple[int, int]:
    """The bytes of a sample with its image decoded, and those of its image's file if it is not."""
    values = leaves(sample)
    image = next((leaf for leaf in values if type(leaf) is EncodedImage), None)
    if image is None:
        return sum(getattr(leaf, "nbytes", _NUMBER_BYTES) for leaf in values), 0
    if os.path.exists(image.path) and not os.path.isfile(image.path):
        raise ImageReadError(image.path, "it is not a regular file")  # reading a pipe would not end
    return prod(image.shape) + _NUMBER_BYTES, len(image.content)


def _lines(report: dict[str, Any]) -> list[str]:
    free = {"RAM": report["ram_bytes"], "disk": report["disk_bytes"]}
    rows = [
        ["", "about", *(f"{readable_size(nbytes)} of {where} can be used" for where, nbytes in free.items())]
    ]
    for name, nbytes in (("decoded", report["decoded_bytes"]), ("as files", report["file_bytes"])):
        if nbytes is not None:
            fits = ("fits" if nbytes <= limit else "does not fit" for limit in free.values())
            rows.append([name, readable_size(nbytes), *fits])
    how = "estimated from the headers of" if report["file_bytes"] else "estimated from"
    lines = [f"{report['num_samples']:,} samples, {how} {report['num_read']:,}", *table(rows)]
    if report["num_unreadable"]:
        count = f"{report['num_unreadable']:,} of these {report['num_read']:,}"
        lines.append(f"{count} cannot be read; the first one: {report['first_error']}")
    if report["problem"]:
        lines.append(f"no cache can hold these samples: {report['problem']}")
    if report["loader"]:
        lines.insert(0, f"or keep your own dataset, such as torchvision's: {report['loader']}")
    return [f"use {report['use']}", *lines]
