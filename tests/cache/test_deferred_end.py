"""Normalize and ToTensorV2 at the end of a pipeline, deferred: same bits, same random numbers."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import pytest
import torch
from albumentations.pytorch import ToTensorV2
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload import CachedDataset, DataLoader, ImageFolder
from fastload.augmentation.albumentations.crop import CropInDecoder
from fastload.augmentation.albumentations.deferred_end import find_deferred_end
from fastload.augmentation.encoded import EncodedImage
from fastload.nested.deferred import DeferredImage, computed
from tests.augmentation.test_encoded import image_file
from tests.cache.test_crop_in_decoder import HEIGHT, WIDTH, states, targets
from tests.cache.test_crop_in_decoder import compose as with_targets
from tests.cache.zoo import Images, Made
from tests.kit.batches import assert_same_batches, assert_same_samples, read_epoch

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = (112, 120, 3)  # an image of more than 32 KiB
LAST = ToTensorV2()
STEPS: Any = [
    A.Normalize(),
    A.Normalize(mean=0.5, std=0.25),
    A.Normalize(mean=(0.1, 0.2, 0.3), std=(1, 2, 3), max_pixel_value=1.0),
    A.Normalize(mean=(0, 0, 0), std=(1, 1, 1)),
]
ENDS = st.sampled_from([[LAST], [LAST, LAST], *([step] for step in STEPS), *([step, LAST] for step in STEPS)])
IMAGES = [
    np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    for shape in [(140, 131, 3), (140, 131), (140, 131, 1), (140, 131, 4), (20, 30, 3)]
] + [np.random.default_rng(1).random((140, 131, 3), np.float32)]


def compose(*end: Any, p: float = 1.0) -> Any:
    return A.Compose([A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=0.5), *end], p=p, seed=3)


def outcome(call: Any, *args: Any, **data: Any) -> Any:
    try:
        return call(*args, **data)
    except Exception as error:  # noqa: BLE001  # compared
        return type(error), str(error)


@settings(max_examples=60)
@given(end=ENDS, image=st.sampled_from(IMAGES), p=st.sampled_from([1.0, 0.5]))
def test_computed_later_it_is_what_the_pipeline_returns(end: list[Any], image: Any, p: float) -> None:
    """The result, the other targets, the errors and the generators are the pipeline's; rows get its bits."""
    pipeline = compose(*copy.deepcopy(end), p=p)
    twin = copy.deepcopy(pipeline)
    end = find_deferred_end(twin)
    for _ in range(4):
        theirs = outcome(pipeline, image=image.copy(), mask=image[:, :, None])
        ours = outcome(end or twin, image=image.copy(), mask=image[:, :, None])
        if isinstance(ours, dict):
            check_rows(ours["image"])
            ours = {name: computed(value) for name, value in ours.items()}
        assert_same_samples(theirs, ours)
    assert states(pipeline) == states(twin)
    if image is IMAGES[0] and isinstance(ours, dict) and p == 1:
        assert end is not None
        assert type(end(image=image)["image"]) is DeferredImage


def check_rows(deferred: Any) -> None:
    """A deferred image writes what `value()` returns, as it says: in memory order C, and channels-last."""
    if type(deferred) is not DeferredImage:
        return
    value = deferred.value()
    assert (deferred.kind, deferred.shape, deferred.dtype) == (type(value), tuple(value.shape), value.dtype)
    array = np.asarray(value)
    rows = [np.zeros(array.shape, array.dtype)]
    if isinstance(value, torch.Tensor):
        rows.append(np.zeros(array.transpose(1, 2, 0).shape, array.dtype).transpose(2, 0, 1))
    for row in rows:
        deferred.write(row)
        assert row.tobytes() == array.tobytes()


def test_targets_beside_the_image_stay() -> None:
    """Boxes, keypoints and additional images are those of the pipeline, with crops from encoded files too."""
    crop = with_targets([A.RandomResizedCrop((112, 120))], [A.Normalize(), ToTensorV2()], seed=5)
    twin = copy.deepcopy(crop)
    encoded = EncodedImage("x", image_file("4:2:0", HEIGHT, WIDTH))
    end: Any = find_deferred_end(twin)
    through = end.through(CropInDecoder(twin))
    for _ in range(5):
        theirs, ours = crop(**targets(encoded.decode())), through(**targets(encoded))
        assert type(ours["image"]) is DeferredImage
        assert_same_samples(theirs, {name: computed(value) for name, value in ours.items()})
    assert states(crop) == states(twin)


@pytest.mark.parametrize(
    "end",
    [
        [A.Normalize(p=0.5)],
        [A.Normalize(normalization="image"), ToTensorV2(p=0.5)],
        [A.Normalize(normalization="min_max")],
        [ToTensorV2(), A.NoOp()],
        [ToTensorV2(), ToTensorV2()],
        [],
    ],
)
def test_other_ends_are_not_deferred(end: list[Any]) -> None:
    """A step that is random, depends on the image, or is not the last one runs in the pipeline."""
    assert find_deferred_end(compose(*end)) is None
    assert find_deferred_end(A.Normalize()) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda pipeline: pipeline.transforms.append(A.NoOp()),
        lambda pipeline: pipeline.transforms.pop(),
        lambda pipeline: setattr(pipeline.transforms[-2], "p", 0.0),
    ],
)
def test_a_pipeline_that_changed_runs_whole(change: Any, tmp_path: Path) -> None:
    """Programs drop or add transforms in later epochs, also the crop that is decoded alone."""
    pipeline = compose(A.Normalize(), ToTensorV2())
    dataset = Images(1, shape=SHAPE)
    cached = CachedDataset(dataset, pipeline)
    assert type(cached.defer(0)[0]) is DeferredImage
    change(pipeline)
    twin = copy.deepcopy(pipeline)
    assert_same_samples(computed(cached.defer(0)[0]), twin(image=dataset.sample(0)[0])["image"])

    pipeline = A.Compose([A.CenterCrop(160, 160), A.HorizontalFlip(p=1)])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.jpg").write_bytes(image_file("4:2:0", 720, 960))
    folder = ImageFolder(tmp_path)
    cached = CachedDataset(folder, pipeline, cache=None)
    assert cached[0][0].shape == (160, 160, 3)
    del pipeline.transforms[0]
    np.testing.assert_array_equal(cached[0][0], pipeline(image=folder[0][0])["image"])


IMAGES_OF_ONE_SIZE = Images(20, shape=SHAPE)


def mixed(index: int) -> Any:
    """A second array whose dtype changes in the middle, so its samples do not fit one plan."""
    extra = np.ones(9000, np.float32 if index < 5 else np.float64)
    return {"image": IMAGES_OF_ONE_SIZE.sample(index)[0], "extra": extra}


@pytest.mark.parametrize("dataset", [IMAGES_OF_ONE_SIZE, Made(mixed, 20)])
@pytest.mark.parametrize("options", [{}, {"memory_format": torch.channels_last}])
def test_batches_of_workers_are_those_of_single_samples(dataset: Any, options: Any, monkeypatch: Any) -> None:
    """Batches equal those of a dataset that calls `cached[index]`, bits and strides, in both epochs."""
    cached = CachedDataset(dataset, compose(A.Normalize(), ToTensorV2()))
    around = Made(cached.__getitem__, 20)
    epochs = []
    for source in (around, cached):
        torch.manual_seed(7)
        loader = DataLoader(source, 8, shuffle=True, num_workers=1, persistent_workers=True, **options)
        epochs.append([read_epoch(loader) for _ in range(2)])
        loader.close()
    for theirs, ours in zip(*epochs, strict=True):
        assert_same_batches(theirs, ours)
    if dataset is IMAGES_OF_ONE_SIZE:  # a worker writes the image itself, but for a dataset around it
        monkeypatch.setattr(DeferredImage, "write", lambda self, row: row.fill(99))
        for source, is_deferred in ((cached, True), (around, False)):
            images, _ = next(iter(DataLoader(source, 4, num_workers=1, multiprocessing_context="fork")))
            assert bool((images == 99).all()) is is_deferred


class IntoOneOutput(A.ImageOnlyTransform):
    """Writes each result into the same array, as OpenCV's functions do with `dst`."""

    def __init__(self) -> None:
        super().__init__(p=1.0)
        self.output = np.empty(SHAPE, np.uint8)

    def apply(self, img: Any, **params: Any) -> Any:
        np.copyto(self.output, img)
        return self.output


@pytest.mark.parametrize("end", [[A.Normalize(mean=0, std=1, max_pixel_value=1.0), LAST], [LAST]])
@pytest.mark.parametrize("dataset", [IMAGES_OF_ONE_SIZE, Made(mixed, 20)])
def test_a_transform_may_write_into_one_output(dataset: Any, end: Any) -> None:
    """A batch in the middle of which a dtype changes holds the pixels of its own samples, too."""
    cached = CachedDataset(dataset, A.Compose([IntoOneOutput(), *copy.deepcopy(end)]))
    with DataLoader(cached, 4, num_workers=1) as loader:
        batches = [batch["image"] if isinstance(batch, dict) else batch[0] for batch in loader]
    for index, image in enumerate(torch.cat(batches)):
        pixels = torch.from_numpy(IMAGES_OF_ONE_SIZE.sample(index)[0]).permute(2, 0, 1)
        assert torch.equal(image, pixels.to(image.dtype))
