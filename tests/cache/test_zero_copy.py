"""Which transforms run on the cache's own read-only memory, and that they do no harm there."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import pytest
from albumentations.pytorch import ToTensor3D, ToTensorV2

from fastload.cache.dataset import CachedDataset
from fastload.cache.transform import TransformCaller
from fastload.cache.zero_copy import keeps_read_only
from tests.cache.zoo import BareImages, FloatImages
from tests.kit.batches import assert_same_samples

ROOT = Path(__file__).parents[2]


class OwnFlip(A.HorizontalFlip):
    """A user's subclass; what it overrides may run any code."""


class OwnCompose(A.Compose):
    """A user's subclass."""


class OwnParams(A.BboxParams):
    """A user's subclass."""


def own_function(image: Any, **params: Any) -> Any:
    return image


def with_attribute(**values: Any) -> Any:
    transform = A.HorizontalFlip()
    vars(transform).update(values)
    return transform


KNOWN = {
    "single": A.HorizontalFlip(),
    "nested": A.Compose([A.OneOf([A.Sequential([A.SomeOf([A.Blur()])]), A.NoOp()])]),
    "replay": A.ReplayCompose([A.RandomCrop(8, 8)]),
    "functions of albumentations": A.Compose(
        [A.ColorJitter(), A.HistogramMatching(metadata_key="references")]
    ),
    "boxes": A.Compose([A.HorizontalFlip()], bbox_params=A.BboxParams("coco", label_fields=["labels"])),
}
UNKNOWN = {
    "function": own_function,
    "function of albumentations": A.to_dict,
    "subclass": OwnFlip(),
    "subclass inside": A.Compose([A.OneOf([A.NoOp(), OwnFlip()])]),
    "compose subclass": OwnCompose([A.HorizontalFlip()]),
    "params subclass": A.Compose([A.HorizontalFlip()], bbox_params=OwnParams("coco")),
    "lambda": A.Compose([A.Lambda(image=own_function)]),
    "reader": A.Compose([A.HistogramMatching(metadata_key="references", read_fn=own_function)]),
    "replaced method": with_attribute(apply=own_function),
    "partial": with_attribute(hook=functools.partial(own_function)),
    "callable class": with_attribute(hook=OwnFlip),
    "method": with_attribute(hook=OwnFlip().apply),
    "torch": A.Compose([A.HorizontalFlip(), ToTensorV2()]),
    "torch, 3D": ToTensor3D(),
    "stringzilla": A.Compose([A.OneOf([A.Equalize(), A.AutoContrast()])]),
}


@pytest.mark.parametrize(("name", "is_known"), [*((n, True) for n in KNOWN), *((n, False) for n in UNKNOWN)])
def test_albumentations_own_pipelines_need_no_copy(name: str, is_known: bool) -> None:
    """They are given the cached arrays; one in which code of the user's or of torch could run gets copies."""
    assert keeps_read_only({**KNOWN, **UNKNOWN}[name]) == is_known


def test_a_pipeline_that_was_used_is_still_known() -> None:
    """What a pipeline remembers of its last call, such as the labels' types, changes nothing."""
    pipeline = A.Compose(
        [A.HorizontalFlip(p=1)],
        bbox_params=A.BboxParams("pascal_voc", label_fields=["labels", "numbers"]),
        save_applied_params=True,
    )
    pipeline(
        image=np.zeros((8, 8, 3), np.uint8),
        bboxes=np.array([[1, 1, 5, 5]], np.float32),
        labels=["cat"],
        numbers=np.array([3]),
    )

    assert keeps_read_only(pipeline)


def test_a_circle_of_parts_is_walked_once() -> None:
    """Parts that hold each other end the search like any others."""
    parts: list[Any] = []
    parts.append(parts)

    assert keeps_read_only(with_attribute(parts=parts))


def test_another_release_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of a release that the tests did not run is not trusted with the cache's memory."""
    monkeypatch.setattr(A, "__version__", "2.0.9")

    assert not keeps_read_only(A.HorizontalFlip())


def test_known_pipelines_are_given_the_cached_memory() -> None:
    """The transforms of such a pipeline run on the cache's own array, and not on a copy."""
    ds = CachedDataset(BareImages(4), A.Compose([A.HorizontalFlip(p=1)]))
    caller = TransformCaller(ds.transform)
    image = ds.view(1)
    seen: list[Any] = []
    caller._call = lambda sample, given, index: seen.append(given)
    caller(lambda _: image, 1)

    assert seen[0] is image


@pytest.fixture(scope="module")
def sealed_runs(request: pytest.FixtureRequest) -> Any:
    """What `sealed_transforms` found, in a process of its own."""
    words = ["thorough"] if request.config.getoption("--thorough") else []
    done = subprocess.run(
        [sys.executable, "-m", "tests.cache.sealed_transforms", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=110,
    )
    last_lines = done.stderr[-2000:]
    assert done.returncode == 0, f"ended with {done.returncode} in the last of\n{last_lines}"
    return json.loads(done.stdout)


@pytest.mark.slow
def test_known_transforms_do_no_harm_on_sealed_memory(sealed_runs: Any) -> None:
    """Each transform gives on sealed memory what it gives on a private copy, and writes to none of it."""
    assert {name: found["differences"] for name, found in sealed_runs.items() if found["differences"]} == {}


@pytest.mark.slow
def test_every_transform_of_albumentations_was_run(sealed_runs: Any) -> None:
    """Those that were not run on sealed memory are exactly those that are never given any."""
    assert len(sealed_runs) > 100
    assert {name for name, found in sealed_runs.items() if not found["runs"]} <= {
        *("AutoContrast", "Equalize", "ToTensor3D", "ToTensorV2"),
        "TextImage",  # where no font is found
    }


def test_images_of_other_numbers_are_copied() -> None:
    """Normalize divides float32 images in place, which read-only memory refuses."""
    dataset = FloatImages(4)
    normalize = A.Normalize(normalization="min_max_per_channel")
    ds = CachedDataset(dataset, normalize)
    for index in (0, 1, 0):
        assert_same_samples(ds[index], normalize(image=dataset.sample(index))["image"])
