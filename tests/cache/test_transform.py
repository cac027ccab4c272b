"""The transform: private copies, albumentations' conventions, errors, threads, read-only memory."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from albumentations.pytorch import ToTensor3D, ToTensorV2

from fastload import DataLoader
from fastload.cache.dataset import CachedDataset
from fastload.cache.transform import TransformCaller
from fastload.cache.zero_copy import keeps_read_only
from tests.cache.zoo import BareImages, FloatImages, Images, Pair
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from tests.kit.processes import Interpreter


def test_a_function_gets_private_copies() -> None:
    """A function may keep and change the array that it is given, on a miss as on a hit."""
    given: list[Any] = []

    def keep(sample: Any) -> Any:
        given.append(sample[0])
        sample[0][:] = len(given)
        return 0

    dataset = Images(6)
    ds = CachedDataset(dataset, keep)
    for _ in range(20):
        ds[3]

    assert [int(array.min()) for array in given] == [int(array.max()) for array in given] == [*range(1, 21)]
    assert all(array.flags.writeable and array.flags.c_contiguous for array in given)
    assert_same_samples(ds._view(3), dataset.sample(3))


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy, lambda a: torch.from_numpy(a.view())])
def test_alias_is_copied(wrap: Any) -> None:
    """A transform that returns its input, as array or tensor, hands out private memory, strides kept."""
    dataset = Images(3)
    ds = CachedDataset(dataset, lambda sample: {"a": [wrap(sample[0][2:5, ::2])], "label": sample[1]})
    for index in [0, 1, 2] * 3:
        output = ds[index]["a"][0]
        np.testing.assert_array_equal(np.asarray(output), dataset.sample(index)[0][2:5, ::2])
        output[:] = 0
        assert_same_samples(ds._view(index), dataset.sample(index))
    transposed = CachedDataset(BareImages(3), lambda image: image.transpose(2, 0, 1))
    assert {transposed[1].strides for _ in range(5)} == {(1, 72, 3)}


@pytest.mark.parametrize("pipeline", [A.NoOp(), A.Compose([A.HorizontalFlip(p=0), ToTensorV2()])])
def test_alias_of_a_pipeline_is_copied(pipeline: Any) -> None:
    """A pipeline that changes nothing hands out private memory, as an array or as a tensor."""
    dataset = Images(6)
    ds = CachedDataset(dataset, pipeline)
    for index in range(6):
        ds[index][0][...] = 0

        assert_same_samples(ds._view(index), dataset.sample(index))


def draw(image: np.ndarray[Any, Any]) -> Any:
    return cv2.rectangle(image, (1, 1), (5, 5), (255, 0, 0))


def add(image: np.ndarray[Any, Any]) -> Any:
    image += 1
    return image


def add_with_torch(image: np.ndarray[Any, Any]) -> Any:
    return torch.from_numpy(image).add_(1).numpy().copy()


@pytest.mark.parametrize("write", [draw, add, add_with_torch])
def test_a_transform_may_write_to_its_input(write: Any) -> None:
    """OpenCV, NumPy and torch may write to what a function was given; torch does not warn."""
    dataset = BareImages(6)
    ds = CachedDataset(dataset, write)
    for index in list(range(6)) * 5:
        assert_same_samples(ds[index], write(dataset.sample(index).copy()))

    for index in range(6):
        assert_same_samples(ds._view(index), dataset.sample(index))


def test_a_transform_that_writes_rarely_ends_no_process(interpreter: Interpreter) -> None:
    """A torch operation in place in every 12th call neither ends the process nor changes the cache."""
    program = """
from tests.cache.test_transform import RareWriter
from tests.cache.zoo import BareImages
from fastload import CachedDataset, DataLoader

dataset = BareImages(64)
ds = CachedDataset(dataset, RareWriter())
ds.fill(num_workers=0, progress=False)
for num_workers in (0, 1):
    for batch in DataLoader(ds, 4, num_workers=num_workers):
        pass
assert all((ds._view(index) == dataset.sample(index)).all() for index in range(64))
print("alive")
"""
    done = interpreter.run(program)

    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


class RareWriter:
    """Writes with torch in every 12th call of its process."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, image: Any) -> Any:
        self.num_calls += 1
        if self.num_calls % 12 == 0:
            torch.from_numpy(image).add_(1)
        return image.copy()


def test_other_errors_pass_through() -> None:
    """An error that says nothing of read-only memory is the user's, and the transform is not run twice."""
    calls: list[int] = []

    def fail(image: Any) -> Any:
        calls.append(1)
        raise ValueError("of my own")

    ds = CachedDataset(BareImages(6), fail)
    with pytest.raises(ValueError, match="of my own"):
        ds[0]

    assert len(calls) == 1


# --- conventions -----------------------------------------------------------------------------------------


class Shaped(Images):
    """Gives what it was told to make of image and label."""

    def __init__(self, make: Any) -> None:
        super().__init__(4)
        self.make = make

    def sample(self, index: int) -> Any:
        return self.make(*super().sample(index))


FLIP = A.Compose([A.HorizontalFlip(p=1)])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda image, label: image, lambda image, label: image[:, ::-1]),
        (lambda image, label: (image, label), lambda image, label: (image[:, ::-1], label)),
        (lambda image, label: [image, "x"], lambda image, label: [image[:, ::-1], "x"]),
        (lambda image, label: Pair(image, label), lambda image, label: Pair(image[:, ::-1], label)),
        (lambda image, label: (image[..., 0], np.zeros(3)), lambda i, label: (i[:, ::-1, 0], np.zeros(3))),
        (
            lambda image, label: {"image": image, "mask": image[..., 0], "label": label},
            lambda image, label: {"image": image[:, ::-1], "mask": image[:, ::-1, 0], "label": label},
        ),
    ],
)
def test_albumentations_conventions(make: Any, expected: Any) -> None:
    """An array, a sequence that starts with one and a dict of targets are transformed as documented."""
    ds = CachedDataset(Shaped(make), FLIP)

    assert_same_samples(ds[1], expected(*Images(4).sample(1)))


def test_bare_transform_is_taken() -> None:
    """A transform without Compose, and a user's subclass of one, follow the same conventions."""

    class Invert(A.ImageOnlyTransform):
        def apply(self, img: Any, **params: Any) -> Any:
            return 255 - img

    image, label = Images(4).sample(1)

    assert_same_samples(CachedDataset(Images(4), A.HorizontalFlip(p=1))[1], (image[:, ::-1], label))
    assert_same_samples(CachedDataset(Images(4), Invert(p=1))[1], (255 - image, label))


def test_mask_in_a_tuple_is_refused() -> None:
    """An array of the image's size beside it would miss the transform: a dict is asked for."""
    ds = CachedDataset(Shaped(lambda image, label: (image, label, image[..., 0])), FLIP)

    with pytest.raises(TypeError, match=r"element 2 .*\"mask\""):
        ds[0]


@pytest.mark.parametrize(
    "make", [lambda i, n: n, lambda i, n: (n, i), lambda i, n: (torch.from_numpy(i), n), lambda i, n: ()]
)
def test_samples_without_an_image_are_refused(make: Any) -> None:
    """A sample that albumentations could make nothing of raises, saying what came."""
    with pytest.raises(TypeError, match="the dataset returned a"):
        CachedDataset(Shaped(make), FLIP)[0]


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818
    """An error that takes no notes."""

    code: int


def test_an_error_that_takes_no_notes_stays_itself() -> None:
    """The user's error is raised, and not the error of adding a note to it."""

    def fails(sample: Any) -> Any:
        raise Frozen(3)

    dataset = CachedDataset(Images(4), transform=fails)

    with pytest.raises(Frozen) as caught:
        dataset[0]

    assert caught.value.code == 3


# --- what cannot be used, or raises ----------------------------------------------------------------------


class Named(Images):
    """Dicts under the keys that it was given; 4 samples.

    Args:
        keys: Of the image and of the label.
    """

    def __init__(self, *keys: str) -> None:
        super().__init__(4)
        self.keys = keys

    def sample(self, index: int) -> Any:
        return dict(zip(self.keys, super().sample(index), strict=True))


@pytest.mark.parametrize("role", ["transform", "prepare"])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "{}=5 is of type int, which is not callable: pass an albumentations pipeline, a function"),
        ("flip", "{}='flip' is of type str, which is not callable"),
        ([A.NoOp()], "is of type list, which is not callable"),
        (
            A.HorizontalFlip,
            r"{} is the class HorizontalFlip: pass an instance of it, such as {}=HorizontalFlip\(",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_at_once(role: str, value: Any, text: str) -> None:
    """transform= and prepare= are checked before the dataset is read, and the error says what to give."""
    dataset = Images(4)
    with pytest.raises(TypeError, match=text.replace("{}", role)):
        CachedDataset(dataset, **{role: value})
    assert sum(dataset.reads) == 0
    if role == "transform":  # set later, it is refused when it would run first
        later = CachedDataset(dataset)
        later.transform = value
        with pytest.raises(TypeError, match=text.replace("{}", role)):
            later[0]


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def image_only(image: Any) -> Any:
    return image[:8].astype(np.float32)


def test_a_function_of_an_image_is_told_of_the_whole_sample() -> None:
    """An image-only function over tuples fails with its own error, and a note that says what it was given."""
    ds = CachedDataset(Images(8), image_only)

    with pytest.raises(AttributeError) as caught:
        ds[5]

    assert notes(caught.value) == (
        "fastload calls the transform with the whole sample; sample 5 is a tuple of "
        "(array (32, 24, 3) uint8, int)"
    )
    with pytest.raises(AttributeError) as caught:
        CachedDataset(Images(8), prepare=image_only)
    assert "fastload calls the prepare with the whole sample; sample 0 is a tuple" in notes(caught.value)


@pytest.mark.parametrize("method", ["process", "thread"])
def test_the_note_comes_from_workers(method: Any) -> None:
    """The error that a worker sends carries the note."""
    loader = DataLoader(CachedDataset(Images(8), image_only), 4, num_workers=1, worker_type=method)

    with pytest.raises(AttributeError) as caught:
        next(iter(loader))

    assert "sample 0 is a tuple of (array (32, 24, 3) uint8, int)" in f"{caught.value}\n{notes(caught.value)}"


@pytest.mark.parametrize("role", ["transform", "prepare"])
def test_the_note_describes_the_sample_as_it_was(role: str) -> None:
    """A function that takes the sample apart before it fails is told what it was given, not what it left."""

    def take(sample: Any) -> Any:
        del sample["image"]
        raise KeyError("mask")

    with pytest.raises(KeyError) as caught:
        CachedDataset(Named("image", "label"), **{role: take})[0]

    assert "a dict of {'image': array (32, 24, 3) uint8, 'label': int}" in notes(caught.value)


@pytest.mark.parametrize("role", ["transform", "prepare"])
@pytest.mark.parametrize("p", [0, 1])
def test_a_dict_without_a_target_is_refused(role: str, p: float) -> None:
    """A pipeline that would change nothing of a dict raises; the error names both sides' keys."""
    flip = A.Compose([A.HorizontalFlip(p=p)])
    with pytest.raises(TypeError) as caught:
        CachedDataset(Named("img", "label"), **{role: flip})[2]

    assert "takes the keys ['bboxes', 'image', 'images', 'keypoints'," in str(caught.value)
    assert "the dataset returned a dict with ['img', 'label']: use those keys" in str(caught.value)
    assert "is a dict of {'img': array (32, 24, 3) uint8, 'label': int}" in notes(caught.value)


def test_an_image_under_another_key_beside_a_target_is_told() -> None:
    """Where albumentations misses an image, the note says which keys came; any target it knows is enough."""
    with pytest.raises(KeyError, match="images") as caught:
        CachedDataset(Named("img", "mask"), A.HorizontalFlip(p=1))[1]

    assert notes(caught.value) == (
        "fastload calls the transform with the image or the named targets of a sample; sample 1 is a dict of "
        "{'img': array (32, 24, 3) uint8, 'mask': int}"
    )
    volume = CachedDataset(Named("volume", "label"), A.HorizontalFlip(p=1))[1]["volume"]
    np.testing.assert_array_equal(volume, Images(4).sample(1)[0][:, :, ::-1])


@pytest.mark.parametrize("put", [lambda x: x, lambda x: (x, 1), lambda x: [x], lambda x: {"image": x}])
def test_a_tensor_for_albumentations_is_an_error_that_says_what_to_return(put: Any) -> None:
    """Whatever holds the image of the sample."""
    samples = [put(torch.arange(3 * 8 * 9, dtype=torch.float32).reshape(3, 8, 9) + i) for i in range(4)]
    with pytest.raises(TypeError, match=r"\(H, W, C\) uint8 or float32; the dataset returned .*ToTensorV2"):
        CachedDataset(samples, A.HorizontalFlip(p=1))[1]


@pytest.mark.parametrize(("shape", "is_chw"), [((3, 8, 9), True), ((8, 9, 3), False), ((4, 9, 3), False)])
def test_an_array_in_torch_s_layout_is_named_in_the_note(shape: Any, is_chw: bool) -> None:
    """On an error of the pipeline, which can also take such an array for an image of many channels."""
    samples = [np.arange(np.prod(shape), dtype=np.uint8).reshape(shape) + i for i in range(4)]
    with pytest.raises(Exception, match="exceeds image dimensions") as caught:
        CachedDataset(samples, A.RandomCrop(100, 100))[1]

    assert ("images should be (H, W, C): transpose them" in notes(caught.value)) is is_chw


# --- threads -------------------------------------------------------------------------------------------


def run_threads(*functions: Any) -> None:
    """Run functions at the same time, the first in a thread called "first", and raise what one raised."""
    errors: list[BaseException] = []

    def run(function: Any) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(function,), name="other" if number else "first")
        for number, function in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


def test_threads_leave_the_warning_filters_alone() -> None:
    """Two threads that leave the transform in the order in which they entered it change no filter."""
    entered, second_entered, left = threading.Event(), threading.Event(), threading.Event()
    filters = list(warnings.filters)

    def overlap(image: Any) -> Any:
        if threading.current_thread().name == "first":
            entered.set()
            assert second_entered.wait(30)
        else:
            second_entered.set()
            assert left.wait(30)
        return image

    ds = CachedDataset(BareImages(2), overlap)

    def first() -> None:
        ds[0]
        left.set()

    def second() -> None:
        assert entered.wait(30)
        ds[1]

    run_threads(first, second)

    assert warnings.filters == filters


def test_threads_share_a_cached_dataset() -> None:
    """Threads that are in the first call of a writing transform at once each get what they asked for."""
    barrier = threading.Barrier(8)

    def write(image: Any) -> Any:
        barrier.wait(30)
        torch.from_numpy(image).add_(1)
        barrier.wait(30)
        return image

    dataset = BareImages(8)
    ds = CachedDataset(dataset, write)
    found: dict[int, Any] = {}

    def get(index: int) -> None:
        found[index] = [ds[index] for _ in range(3)]

    run_threads(*(functools.partial(get, index) for index in range(8)))

    for index in range(8):
        for output in found[index]:
            assert_same_samples(output, dataset.sample(index) + 1)
        assert_same_samples(ds._view(index), dataset.sample(index))


def test_the_transform_may_be_replaced_while_threads_read() -> None:
    """A thread that replaces or removes the transform while another is in it makes no call fail."""
    inside, replaced = threading.Event(), threading.Event()

    def wait(image: Any) -> Any:
        inside.set()
        assert replaced.wait(30)
        return "old"

    ds = CachedDataset(BareImages(2), wait)
    found: list[Any] = []

    def replace() -> None:
        assert inside.wait(30)
        ds.transform = lambda image: "new"
        found.append(ds[0])
        ds.transform = None
        replaced.set()

    run_threads(lambda: found.append(ds[1]), replace)

    assert found == ["new", "old"]
    assert_same_samples(ds[1], BareImages(2).sample(1))


@pytest.mark.parametrize("normalization", ["min_max_per_channel", "standard"])
def test_worker_threads_transform_as_plain_code(normalization: Any) -> None:
    """worker_type="thread" gives what a pipeline gives on plain arrays, also if it refuses at first."""
    dataset = FloatImages(24)
    pipeline = A.Compose([A.Normalize(normalization=normalization), A.HorizontalFlip(p=1)])
    loader = DataLoader(
        CachedDataset(dataset, pipeline), batch_size=None, num_workers=3, worker_type="thread"
    )
    for _ in range(2):
        for index, image in enumerate(loader):
            assert_same_samples(np.asarray(image), pipeline(image=dataset.sample(index))["image"])


# --- cached memory that a transform is given -----------------------------------------------------------


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
    image = ds._view(1)
    seen: list[Any] = []
    caller._call = lambda sample, given, index, tail: seen.append(given)
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
    )
    last_lines = done.stderr[-2000:]
    assert done.returncode == 0, f"ended with {done.returncode} in the last of\n{last_lines}"
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)  # seconds of computation, which take minutes where other processes have the cores
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
