"""Pipelines of a collate_fn with rng="worker": random streams of their own, after those of the dataset."""

from __future__ import annotations

import functools
from typing import Any

import albumentations as A  # the name its own documentation uses
import pytest
import torch

import fastload
from fastload import DataLoader
from fastload.rng.seeding import seed_albumentations
from tests.rng import pipelines_zoo as zoo
from tests.rng.draws_zoo import Randomizable

WAYS: dict[str, Any] = {
    "workers": {"num_workers": 2},
    "threads": {"num_workers": 2, "worker_type": "thread"},
    "torch's workers": {"num_workers": 2, "in_order": False},
    "torch's workers, channels last": {
        "num_workers": 2,
        "in_order": False,
        "memory_format": torch.channels_last,
    },
}

COLLATES: dict[str, Any] = {
    "attribute": zoo.CropsBatch,
    "partial": lambda: functools.partial(zoo.crops_batch, batch=zoo.crop()),
    "global": lambda: zoo.global_crops_batch,
    "closure": zoo.closed_crops_batch,
    "method": lambda: zoo.CropsBatch().__call__,
}


def run(dataset: Any, collate_fn: Any, epochs: int = 1, **options: Any) -> list[Any]:
    """The batches of some epochs; those of two workers in the order of the workers."""
    options = {"batch_size": 4, "generator": torch.Generator().manual_seed(7), **options}
    with DataLoader(dataset, collate_fn=collate_fn, **options) as loader:
        found = [batch for _ in range(epochs) for batch in loader]
    return found if options.get("in_order", True) else sorted(found)


def crops_of(worker: int, batches: list[Any]) -> list[int]:
    return [crop for where, _, crops in batches if where == worker for crop in crops]


class TestStreams:
    @pytest.mark.parametrize("way", WAYS)
    def test_two_workers_draw_different_numbers(self, way: str) -> None:
        """No crop of one worker's batches is repeated by the other's."""
        batches = run(zoo.Corners(), zoo.CropsBatch(), **WAYS[way], batch_size=1)

        crops = crops_of(0, batches), crops_of(1, batches)
        assert all(crops)
        assert len(crops[0]) + len(crops[1]) == 24
        assert not set(crops[0]) & set(crops[1])

    @pytest.mark.slow
    def test_workers_of_the_fork_server(self) -> None:
        """They seed the copy of the collate_fn that collates."""
        found = run(zoo.Corners(), zoo.CropsBatch(), num_workers=1, multiprocessing_context="forkserver")

        assert found == run(zoo.Corners(), zoo.CropsBatch(), num_workers=1)

    @pytest.mark.parametrize("kind", COLLATES)
    def test_no_worker_draws_what_one_worker_draws(self, kind: str) -> None:
        """However the pipeline is held; in two epochs, with the same generator: bit for bit."""
        alone = run(zoo.Corners(), COLLATES[kind](), 2)
        in_worker = run(zoo.Corners(), COLLATES[kind](), 2, num_workers=1)

        assert [batch[1:] for batch in alone] == [batch[1:] for batch in in_worker]
        assert len({str(batch) for batch in alone}) == 6

    def test_no_worker_through_torch_s_iterator(self) -> None:
        """A datapipe's collate_fn follows from the loader's generator, too."""
        pipe = functools.partial(torch.utils.data.datapipes.iter.IterableWrapper, range(12))

        assert run(pipe(), zoo.CropsBatch()) == run(pipe(), zoo.CropsBatch())

    def test_pipelines_of_the_dataset_and_the_collate_fn_differ(self) -> None:
        """Equal pipelines on both sides, with and without a seed, draw from different streams."""
        for seed in (None, 5):
            dataset, batch = zoo.Corners(seed=seed), zoo.CropsBatch(zoo.crop(seed))
            seed_albumentations(dataset, 7, batch)

            assert [zoo.corner(dataset.transform) for _ in range(5)] != [
                zoo.corner(batch.pipeline) for _ in range(5)
            ]

    def test_objects_of_monai_differ_between_workers(self) -> None:
        """Those of a collate_fn only: MONAI's own worker_init_fn seeds those of a dataset."""
        shared, own, of_dataset = Randomizable(), Randomizable(), Randomizable()
        before = of_dataset.R
        draws = set()
        for seed in (1, 2):
            seed_albumentations([of_dataset, shared], seed, [own, shared])
            draws.add(int(own.R.randint(1 << 30)))

        assert len(draws) == 2
        assert of_dataset.R is shared.R is before


class TestTheDatasetsStreams:
    """They are the same with and without a collate_fn that holds pipelines: those of earlier releases."""

    @pytest.mark.parametrize("way", ["none", "workers", "torch's workers"])
    def test_they_are_fixed(self, way: str) -> None:
        """The first samples of each worker, as numbers that must never change."""
        batches = run(zoo.ManyCorners(), zoo.CropsBatch(), **WAYS.get(way, {}))

        assert sorted(samples[0] for _, samples, _ in batches) == sorted(
            [
                [54393, 12924, 60567],
                [57779, 35388, 56309] if way == "none" else [59759, 55143, 33146],
                [59242, 17339, 22850],
            ]
        )

    def test_a_pipeline_of_both_draws_as_the_dataset_s(self) -> None:
        """A collate_fn that is a method of the dataset continues the dataset's streams."""
        dataset = zoo.CollatingCorners()

        assert run(dataset, dataset.collate) == [
            (-1, [59242, 42062, 12234, 14395], [54393, 47618]),
            (-1, [28359, 9902, 57779, 60831], [54448, 61157]),
            (-1, [22663, 47245, 62177, 36625], [10641, 12179]),
        ]

    @pytest.mark.parametrize("others", [[], [zoo.crop()]], ids=["alone", "with another pipeline"])
    def test_a_pipeline_inside_one_of_the_collate_fn(self, others: list[Any]) -> None:
        """The collate_fn's Compose around the dataset's pipeline does not change the dataset's stream."""
        alone, dataset = zoo.crop(), zoo.crop()
        seed_albumentations(alone, 7)
        seed_albumentations(dataset, 7, [A.Compose([dataset]), *others])

        assert [zoo.corner(dataset) for _ in range(5)] == [zoo.corner(alone) for _ in range(5)]


class TestTheUsersOwn:
    @pytest.mark.parametrize("way", ["none", "threads", "datapipe"])
    def test_between_batches_and_after_them(self, way: str) -> None:
        """In the consumer's process, the pipeline has its own generators whenever a batch is done."""
        held = zoo.Corners()
        before = held.stand()
        dataset: Any = torch.utils.data.datapipes.iter.IterableWrapper(range(8))
        for _ in DataLoader(
            dataset if way == "datapipe" else zoo.Corners(),
            4,
            collate_fn=zoo.CropsBatch(held.transform),
            **(WAYS["threads"] if way == "threads" else {}),
        ):
            assert held.stand() == before


class TestThreads:
    @pytest.mark.parametrize("rng", ["worker", "sample"])
    def test_each_thread_has_its_own_pipeline(self, rng: Any) -> None:
        """No two threads call the same pipeline, and none calls the user's; other objects stay shared."""
        batch = Noting()
        list(DataLoader(zoo.Corners(), 1, num_workers=2, worker_type="thread", collate_fn=batch, rng=rng))

        callers: dict[int, set[int]] = {}
        for worker, pipeline in batch.calls:
            callers.setdefault(id(pipeline), set()).add(worker)
        assert sorted(map(sorted, callers.values())) == [[0], [1]]
        assert id(batch.pipeline) not in callers

    def test_a_method_of_the_dataset_uses_its_thread_s_dataset(self) -> None:
        """The copy of dataset.collate belongs to the thread's copy of the dataset, as in processes."""
        dataset = zoo.CollatingCorners()

        assert run(dataset, dataset.collate, **WAYS["threads"]) == run(
            dataset, dataset.collate, **WAYS["workers"]
        )

    @pytest.mark.parametrize("kind", ["global", "closure"])
    def test_one_that_cannot_be_copied_is_refused(self, kind: str) -> None:
        """A function holds its globals and its closure where no thread can have another object."""
        with pytest.raises(ValueError, match=r"(?s)held by <function .*of an object that is the collate_fn"):
            run(zoo.Corners(), COLLATES[kind](), **WAYS["threads"])

    def test_an_attribute_with_the_name_of_a_global_pipeline_is_copied(self) -> None:
        """The pipelines of `self._of_batch` are copied; the global of that name is not used by the method."""
        batch = zoo.AttributeOfTheName()

        assert run(zoo.Corners(), batch, **WAYS["threads"]) == run(zoo.Corners(), batch, **WAYS["workers"])


class Noting:
    """A collate_fn that notes which worker called which pipeline."""

    def __init__(self) -> None:
        self.pipeline = zoo.crop()
        self.calls: list[tuple[int, Any]] = []

    def __call__(self, samples: Any) -> Any:
        info = fastload.get_worker_info()
        assert info is not None
        self.calls.append((info.id, self.pipeline))
        zoo.corner(self.pipeline)
        return samples
