"""One run of one contender, in a process of its own environment.

The first epoch starts workers, compiles and fills caches; it is checked and not counted. Then epochs are run
until a given time is over; what is counted are all their images and all their time, from the first batch
asked for to the last one delivered. The answer is one line of JSON on standard output.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from common import Job


def checked(epochs: Any, job: Job) -> dict[str, Any]:
    """Run the epoch that is not counted, and say what it brought."""
    num_images, labels_sum, pixels_sum, kinds = 0, 0, 0, set()
    for images, labels in epochs:
        if not isinstance(images, torch.Tensor) or not isinstance(labels, torch.Tensor):
            raise TypeError(
                f"a batch is a {type(images).__name__} and a {type(labels).__name__}, not tensors"
            )
        num_images += len(images)
        labels_sum += int(labels.sum())
        pixels_sum += int(images.sum(dtype=torch.int64)) if not job.task.is_random else 0
        kinds.add((str(images.dtype), tuple(images.shape[1:])))
    if len(kinds) != 1:
        raise ValueError(f"batches are of several kinds: {sorted(kinds)}")
    dtype, shape = kinds.pop()
    return {
        "num_images": num_images,
        "labels_sum": labels_sum,
        "pixels_sum": pixels_sum,
        "dtype": dtype,
        "shape": list(shape),
    }


def timed(epochs: Any, seconds: float) -> float:
    """Images a second over whole epochs."""
    num_images = 0
    start_s = time.perf_counter()
    while True:
        for images, _ in epochs:
            num_images += len(images)
        elapsed_s = time.perf_counter() - start_s
        if elapsed_s >= seconds:
            return num_images / elapsed_s


def answer(module_name: str, variant: str, job: Job, seconds: float) -> dict[str, Any]:
    """What the process prints."""
    module = importlib.import_module(module_name)
    ready = job.work / ".ready"
    if hasattr(module, "prepare") and not ready.exists():
        module.prepare(job)
        ready.touch()
    if not seconds:
        return {}
    epochs = module.epochs(job, variant)
    result = checked(epochs, job)
    result["images_per_s"] = timed(epochs, seconds)
    result["version"] = importlib.metadata.version(module.PACKAGE)
    if hasattr(epochs, "close"):
        epochs.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("module")
    parser.add_argument("job", type=Path)
    parser.add_argument("--variant", default="")
    parser.add_argument("--seconds", type=float, default=0.0, help="0 only writes the contender's own files")
    args = parser.parse_args()
    try:
        result = answer(args.module, args.variant, Job.load(args.job), args.seconds)
    except Exception as error:  # noqa: BLE001 (whatever a contender raises becomes its row)
        traceback.print_exc()
        first_line = next(iter(str(error).strip().splitlines()), "")
        result = {"cannot": f"{type(error).__name__}: {first_line}"}
    sys.stdout.flush()
    print(f"\n{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
