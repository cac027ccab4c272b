"""AlbumentationsX, by duck typing: its own seeding is respected; in an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

from tests.clients import contract
from tests.clients.harness import ENVIRONMENTS, ROOT, run

if TYPE_CHECKING:
    from pathlib import Path

PHOTOS = """
import importlib.metadata
import albumentations as A
import numpy as np
from torch.utils.data import DataLoader

assert importlib.metadata.version("albumentationsx")
PIXELS = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)  # crops show what was drawn
record("transforms", A.RandomCrop.__module__)


class Photos(Photos):
    def __init__(self):
        super().__init__()
        self.augment = A.Compose([A.RandomCrop(8, 8), A.RandomBrightnessContrast(p=0.5)], SEED)

    def __getitem__(self, index):
        return np.ascontiguousarray(self.augment(image=PIXELS)["image"]), index
"""
TRAIN = """
torch.manual_seed(1)
loader = DataLoader(Photos(), batch_size=2, shuffle=True, num_workers=NUM_WORKERS)
record("number of batches", len(loader))
for epoch in range(2):
    for images, labels in loader:
        record("labels", labels)
        if NUM_WORKERS or IS_SEEDED:  # without workers and without a seed, it draws from the system's entropy
            record("train", images)
"""


class TestWithoutSeed(contract.Batches):
    script = PHOTOS.replace("SEED", "seed=None") + TRAIN.replace("IS_SEEDED", "False")
    environment = "albumentationsx"


class TestWithSeed(contract.Batches):
    script = PHOTOS.replace("SEED", "seed=7") + TRAIN.replace("IS_SEEDED", "True")
    environment = "albumentationsx"


def test_what_is_drawn_in_workers(tmp_path: Path) -> None:
    """Each worker and epoch draws its own; a sample's pixels depend on no worker with `seeding="sample"`."""
    script = f"""{PHOTOS.replace("SEED", "seed=None")}
import fastload


class Plain(Photos):
    def __getitem__(self, index):
        return PIXELS, index


class Augment:  # in an attribute, so that each thread can have its own
    def __init__(self):
        self.pipeline = Photos().augment

    def __call__(self, sample):
        return np.ascontiguousarray(self.pipeline(image=sample[0])["image"]), sample[1]


torch.manual_seed(1)
loader = fastload.DataLoader(Photos(), batch_size=12, num_workers=2)  # one batch for each worker
record("drawn", len(set(digest(images) for epoch in range(2) for images, labels in loader)))
ways = [dict(), dict(num_workers=1), dict(num_workers=2), dict(num_workers=2, worker_type="thread")]
for dataset in (Photos(), fastload.CachedDataset(Plain(), transform=Augment(), cache="ram")):
    found = set()
    for way in ways:
        generator = torch.Generator().manual_seed(3)
        loader = fastload.DataLoader(dataset, 4, shuffle=True, seeding="sample", generator=generator, **way)
        found.add(tuple(digest(batch) for epoch in range(2) for batch in loader))
    record("drawn", len(found))
"""
    ended = run(script, tmp_path, "torch", environment="albumentationsx").check()

    assert ended.ranks[0].got("drawn") == [4, 1, 1]


# The tests of tests/rng, written for albumentations 2.0.8, whose claims are other ones for AlbumentationsX; a
# name without a case stands for all of its cases. The numbers in test_recorded.py are those of 2.0.8.
OTHER_CLAIMS = {
    'with seeding="worker" it seeds itself, and fastload sets none of its generators': """
        test_claims.py::test_pipelines_draw_the_same_without_workers_as_with_one
        test_entry_points.py::test_a_composition_with_a_call_of_its_own
        test_entry_points.py::test_a_pipeline_draws_the_same_beside_an_empty_and_a_full_cache
        test_entry_points.py::test_a_transform_in_two_pipelines_draws_from_the_one_that_calls_it
        test_entry_points.py::test_another_thread_is_outside
        test_entry_points.py::test_no_worker_draws_what_one_worker_draws
        test_entry_points.py::test_streams_are_named_by_the_order_of_first_calls
        test_seeding.py::test_a_stream_follows_from_the_worker_s_seed_and_the_user_s
        test_seeding.py::test_no_worker_draws_what_one_worker_draws
        test_seeding.py::test_the_loader_s_seed_decides
        test_seeding.py::test_the_user_s_pipelines_have_their_own_generators_between_batches[another dataset]
        test_seeding.py::test_the_user_s_pipelines_have_their_own_generators_between_batches[error]
        test_seeding.py::test_the_user_s_pipelines_have_their_own_generators_between_batches[inner loader by sample]
        test_seeding.py::test_two_iterators_at_once
        test_seeding.py::test_two_workers_draw_different_numbers
        test_seeding.py::test_workers_of_the_fork_server
    """,  # noqa: E501
    "so two equal pipelines draw the same in one worker process": """
        test_entry_points.py::test_workers_draw_different_numbers[either]
        test_entry_points.py::test_workers_draw_different_numbers[new for each sample]
        test_entry_points.py::test_workers_draw_different_numbers[two]
        test_seeding.py::test_pipelines_of_the_dataset_and_the_collate_fn_differ
    """,
    "a worker thread is no worker to it, so fastload seeds it there alone": """
        test_seeding.py::test_threads_share_a_pipeline_that_is_not_in_an_attribute
    """,
    'with seeding="worker" it adds the seed of a worker process to the seed of the user': """
        test_seeding.py::test_what_a_worker_init_fn_seeds_is_the_user_s[way0]
        test_seeding.py::test_what_the_dataset_seeds_for_a_sample_is_the_user_s[worker]
    """,
    "they state what albumentations 2.0.8 does in torch's loader, or where it keeps its generators": """
        test_entry_points.py::test_a_pipeline_can_be_copied_while_it_is_called
        test_seeding.py::test_all_parts_of_a_pipeline_share_one_pair
        test_seeding.py::test_seed_worker_gives_each_worker_its_own_crops
    """,
}


def test_all_other_claims_about_random_numbers_hold() -> None:
    """Of tests/rng, those tests fail in its environment that are listed here with a reason, and no other."""
    done = subprocess.run(
        [
            str(ENVIRONMENTS / "albumentationsx" / "bin" / "python"),
            *("-m", "pytest", "tests/rng", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"),
            "--ignore=tests/rng/test_recorded.py",
            *("--numprocesses", "2", "--dist", "loadfile"),
        ],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    failed = re.findall(r"^(?:FAILED|ERROR) tests/rng/(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    listed = {name.strip() for names in OTHER_CLAIMS.values() for name in names.strip().splitlines()}

    assert {case if case in listed else case.partition("[")[0] for case in failed} == listed, done.stdout
    assert re.search(r"\d{3} passed", done.stdout), done.stdout
