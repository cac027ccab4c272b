"""Runs every transform of albumentations on sealed memory; a program of its own, because a write ends it.

With the word "thorough", for each choice of each argument, and on every kind of sample.

It prints a JSON object: for each transform that `only_reads` accepts how often it ran, and the cases in
which its output differs from that on private copies. Its name goes to standard error before it runs.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import mmap
import os
import random
import sys
import typing
import warnings
from typing import Any

import albumentations as A
import cv2
import numpy as np

from fastload.augmentation.albumentations.pipelines import only_reads
from fastload.cache.transform import TransformCaller
from fastload.nested.tree import leaves

H, W = 24, 20
IS_THOROUGH = "thorough" in sys.argv
BOXES = A.BboxParams("pascal_voc", label_fields=["labels"])
POINTS = A.KeypointParams("xyas", label_fields=["names"])
_rng = np.random.RandomState(0)


def _pixels(*shape: int) -> Any:
    return _rng.randint(0, 256, shape, np.uint8)


def _mask(*shape: int) -> Any:
    return (_pixels(*shape) > 128).astype(np.uint8)


SAMPLES: dict[str, dict[str, Any]] = {
    "colour": {"image": _pixels(H, W, 3)},
    "one value": {"image": np.full((H, W, 3), 77, np.uint8)},
    "grayscale": {"image": _pixels(H, W)},
    "one channel": {"image": _pixels(H, W, 1)},
    "five channels": {"image": _pixels(H, W, 5)},
    "floats": {"image": _rng.rand(H, W, 3).astype(np.float32)},
    "gray floats": {"image": _rng.rand(H, W).astype(np.float32)},
    "targets": {
        "image": _pixels(H, W, 3),
        "mask": _mask(H, W),
        "masks": [_mask(H, W), _mask(H, W)],
        "bboxes": np.array([[2, 3, 10, 12], [5, 6, 19, 20]], np.float32),
        "keypoints": np.array([[4, 5, 0.1, 1], [15, 18, 0.2, 2]], np.float32),
        "labels": np.array([1, 2]),
        "names": ["a", "b"],
        "cropping_bbox": [4, 4, 12, 12],
    },
    "references": {
        "image": _pixels(H, W, 3),
        "mask": _mask(H, W),
        "fda_metadata": [_pixels(H, W, 3)],
        "hm_metadata": [_pixels(H, W, 3)],
        "pda_metadata": [_pixels(H, W, 3)],
        "mosaic_metadata": [{"image": _pixels(H, W, 3), "mask": _mask(H, W)} for _ in range(3)],
        "overlay_metadata": [{"image": _pixels(6, 8, 3), "bbox": [0.1, 0.2, 0.5, 0.6]}],
        "textimage_metadata": [{"text": "some text", "bbox": (0.1, 0.1, 0.9, 0.4)}],
    },
    "images": {"images": _pixels(3, H, W, 3)},
    "volume": {"volume": _pixels(5, H, W, 1), "mask3d": _mask(5, H, W)},
}

SMALLER, SAME = {"height": 16, "width": 16}, {"height": H, "width": W}
# For transforms that cannot be made without arguments, or that do nothing, or take long, with their defaults.
RECIPES: dict[str, list[dict[str, Any]]] = {
    "Affine": [{}, {"scale": 1, "translate_px": 0, "rotate": 0, "shear": 0}],
    "AtLeastOneBBoxRandomCrop": [SMALLER],
    "CenterCrop": [SMALLER, SAME],
    "CenterCrop3D": [{"size": (3, 16, 16)}, {"size": (5, H, W)}],
    "Crop": [{"x_min": 2, "y_min": 2, "x_max": 12, "y_max": 12}],
    "CropAndPad": [{"px": 3}, {"px": -3}, {"px": 0}],
    "CropNonEmptyMaskIfExists": [SMALLER],
    "FrequencyMasking": [{"freq_mask_param": 4}],
    "GridElasticDeform": [{"num_grid_xy": (4, 4), "magnitude": 4}],
    "LongestMaxSize": [{"max_size": 16}, {"max_size": H}],
    "Mosaic": [{"target_size": (H, W), "cell_shape": (H, W)}],
    "Pad": [{"padding": 3}, {"padding": 0}],
    "Pad3D": [{"padding": 2}, {"padding": 0}],
    "PadIfNeeded": [{"min_height": 32, "min_width": 32}, {"min_height": 8, "min_width": 8}],
    "PadIfNeeded3D": [{"min_zyx": (8, 30, 30)}, {"min_zyx": (1, 1, 1)}],
    "PiecewiseAffine": [{"nb_rows": 2, "nb_cols": 2}],
    "RandomCrop": [SMALLER, SAME],
    "RandomCrop3D": [{"size": (3, 16, 16)}],
    "RandomResizedCrop": [{"size": (16, 16)}],
    "RandomSizedBBoxSafeCrop": [SMALLER],
    "RandomSizedCrop": [{"min_max_height": (8, 16), "size": (16, 16)}],
    "Resize": [SMALLER, SAME],
    "SmallestMaxSize": [{"max_size": 16}, {"max_size": W}],
    "Superpixels": [{"n_segments": 5, "max_size": 16}],
    "TimeMasking": [{"time_mask_param": 4}],
}
if importlib.util.find_spec("matplotlib") is not None:
    import matplotlib as mpl

    RECIPES["TextImage"] = [{"font_path": f"{mpl.get_data_path()}/fonts/ttf/DejaVuSans.ttf"}]
# These take ten times as long as the others, and run with their first recipe alone.
SLOW = {"PiecewiseAffine", "Superpixels"}
# These do nothing themselves.
BASES = {"BasicTransform", "DualTransform", "ImageOnlyTransform", "Transform3D"}


def classes() -> dict[str, type]:
    """Every public transform of albumentations."""
    found = {name: value for name, value in vars(A).items() if inspect.isclass(value) and name not in BASES}
    return {name: value for name, value in found.items() if issubclass(value, A.BasicTransform)}


def recipes(name: str, cls: Any) -> list[dict[str, Any]]:
    """Arguments to make a transform with: those above, and each choice that the type of an argument lists."""
    found = list(RECIPES.get(name, [{}]))
    if name in SLOW or not IS_THOROUGH:
        return found
    for argument, field in cls.InitSchema.model_fields.items():
        if argument not in ("p", "strict", "mask_interpolation"):
            found += [{**found[0], argument: choice} for choice in _choices(field.annotation)]
    return found


def _choices(annotation: Any) -> list[Any]:
    if annotation is bool:
        return [False, True]
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [choice for part in typing.get_args(annotation) for choice in _choices(part)]


def pipelines(name: str, cls: Any) -> list[tuple[str, Any, Any]]:
    """For each valid recipe a title, and the transform in a pipeline without and with boxes and keypoints.

    None at all if the transform is not given cached memory.
    """
    found = []
    for recipe in recipes(name, cls):
        try:
            transform = cls(**recipe, p=1)
        except ValueError:
            continue  # these arguments exclude each other
        try:
            with_boxes = A.Compose([cls(**recipe, p=1)], bbox_params=BOXES, keypoint_params=POINTS)
        except ValueError:
            with_boxes = None  # the transform does not take boxes
        plain = A.Compose([transform])
        if only_reads(plain):
            found.append((f"{name}{recipe!r:.60}", plain, with_boxes))
    return found


def sealed(array: Any) -> Any:
    """A copy in memory that ends the process when it is written to."""
    with os.fdopen(os.memfd_create("sealed"), "wb", buffering=0) as file:
        file.write(array.tobytes())
        mapping = mmap.mmap(file.fileno(), array.nbytes, prot=mmap.PROT_READ)
    return np.frombuffer(mapping, array.dtype).reshape(array.shape)


def copied(nest: Any, copy: Any) -> Any:
    """The nest with every array replaced by a copy of it; every container is a new one."""
    if isinstance(nest, dict):
        return {key: copied(value, copy) for key, value in nest.items()}
    if isinstance(nest, list):
        return [copied(value, copy) for value in nest]
    return copy(nest) if isinstance(nest, np.ndarray) else nest


def seed_all(pipeline: Any) -> None:
    pipeline.set_random_seed(0)
    random.seed(0)
    np.random.seed(0)
    cv2.setRNGSeed(0)


def equal(one: Any, other: Any) -> bool:
    ours, theirs = list(leaves(one)), list(leaves(other))
    return len(ours) == len(theirs) and all(
        np.array_equal(left, right, equal_nan=getattr(left, "dtype", np.dtype("O")).kind == "f")
        for left, right in zip(ours, theirs, strict=True)
    )


def run(title: str, pipeline: Any, sample: dict[str, Any], found: dict[str, Any]) -> None:
    """Compare the pipeline's output on sealed memory with that on private copies."""
    if sample.keys().isdisjoint(pipeline.available_keys):
        return
    given = copied(sample, sealed)
    caller = TransformCaller(pipeline)
    seed_all(pipeline)
    try:
        expected = pipeline(**copied(sample, np.copy))
    except Exception:  # noqa: BLE001  # whatever it raises on plain arrays is not the question
        return  # this kind of sample, or this argument, is not for the transform
    found["runs"] += 1
    seed_all(pipeline)
    output = caller(lambda _: copied(given, lambda array: array), 0)
    if not equal(output, expected):
        found["differences"].append(title)
    for leaf in leaves(output):
        if isinstance(leaf, np.ndarray):
            leaf[...] = 0
    if not equal(given, sample):
        found["differences"].append(f"{title} wrote to its input")


def main() -> None:
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    cv2.setNumThreads(0)
    results = {}
    for name, cls in sorted(classes().items()):
        found: dict[str, Any] = {"runs": 0, "differences": []}
        for number, (title, plain, with_boxes) in enumerate(pipelines(name, cls)):
            for kind, sample in SAMPLES.items():
                if number and not IS_THOROUGH and kind not in ("colour", "targets", "volume"):
                    continue
                pipeline = with_boxes if kind == "targets" else plain
                if pipeline is not None:
                    sys.stderr.write(f"{title} on {kind}\n")
                    run(title, pipeline, sample, found)
        results[name] = found
    json.dump(results, sys.stdout)
