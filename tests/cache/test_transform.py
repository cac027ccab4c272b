"""The transform: private copies, albumentations' conventions, errors, threads, read-only memory."""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from albumentations.pytorch import ToTensor3D, ToTensorV2

from fastload import DataLoader
from fastload.augmentation.albumentations.pipelines import only_reads
from fastload.cache.dataset import CachedDataset
from fastload.cache.transform import TransformCaller
from fastload.nested.tree import leaves
from tests.cache.zoo import BareImages, Images, Made, Pair
from tests.kit.batches import assert_same_samples


def add_with_torch(image: Any) -> Any:
    return torch.from_numpy(image).add_(1).numpy().copy()


class Kept(list[Any]):
    """A transform that keeps what it was given, and writes to it; returns a new array."""

    def __call__(self, image: Any) -> Any:
        self.append(image)
        assert image.flags.c_contiguous
        image[:] = len(self)
        return np.zeros(1)


ON_ARRAYS: dict[str, Any] = {
    "as it is": np.asarray,
    "tensor": torch.from_numpy,
    "tensor of a view": lambda image: torch.from_numpy(image.view()),
    "slice in a nest": lambda image: {"a": [image[2:5, ::2]], "label": 1},
    "transposed": lambda image: image.transpose(2, 0, 1),
    "OpenCV writes": lambda image: cv2.rectangle(image, (1, 1), (5, 5), (255, 0, 0)),
    "NumPy writes": lambda image: np.add(image, 1, out=image),
    "torch writes": add_with_torch,
    "keeps": Kept(),
    "pipeline of nothing": A.NoOp(),
    "pipeline that does nothing": A.Compose([A.HorizontalFlip(p=0), ToTensorV2()]),
    "pipeline": A.HorizontalFlip(p=1),
}


@pytest.mark.parametrize("way", ON_ARRAYS)
def test_a_transform_gives_what_it_gives_on_a_private_copy(way: str) -> None:
    """Writing to its input or output changes nothing, on a miss as on a hit; strides are kept."""
    dataset, transform = BareImages(3), ON_ARRAYS[way]
    ds = CachedDataset(dataset, transform)
    for index in [0, 1, 2] * 3:
        given, output = dataset.sample(index), ds[index]
        expected = transform(image=given)["image"] if "pipeline" in way else transform(given)
        assert_same_samples(output, expected)
        for leaf, other in zip(leaves(output), leaves(expected), strict=True):
            if isinstance(leaf, (np.ndarray, torch.Tensor)):
                assert way != "transposed" or leaf.strides == other.strides
                leaf[...] = 0
        assert_same_samples(ds._view(index), dataset.sample(index))
    if isinstance(transform, Kept):
        assert [int(array.min()) for array in transform] == [*range(1, len(transform) + 1)]


def as_dict(*keys: str) -> Any:
    """Makes dicts of image and label under these keys."""
    return lambda *sample: dict(zip(keys, sample, strict=True))


def shaped(make: Any) -> Any:
    """Gives what it was told to make of image and label."""
    return Made(lambda index: make(*Images().sample(index)), 4)


FLIP = A.Compose([A.HorizontalFlip(p=1)])


def with_mask(image: Any, label: int) -> Any:
    return {"image": image, "mask": image[..., 0], "label": label}


class Invert(A.ImageOnlyTransform):
    """A user's subclass."""

    def apply(self, img: Any, **params: Any) -> Any:
        return 255 - img


@pytest.mark.parametrize(
    ("make", "expected", "pipeline"),
    [
        (lambda i, n: i, lambda i, n: i[:, ::-1], FLIP),
        (lambda i, n: (i, n), lambda i, n: (i[:, ::-1], n), A.HorizontalFlip(p=1)),
        (lambda i, n: (i, n), lambda i, n: (255 - i, n), Invert(p=1)),
        (lambda i, n: [i, "x"], lambda i, n: [i[:, ::-1], "x"], FLIP),
        (lambda i, n: (i[..., 0], np.zeros(3)), lambda i, n: (i[:, ::-1, 0], np.zeros(3)), FLIP),
        (with_mask, lambda i, n: with_mask(i[:, ::-1], n), FLIP),
        (lambda i, n: {"volume": i, "n": n}, lambda i, n: {"volume": i[:, :, ::-1], "n": n}, FLIP),
    ],
)
def test_albumentations_conventions(make: Any, expected: Any, pipeline: Any) -> None:
    """An array, a sequence that starts with one and a dict of targets are transformed as documented."""
    ds = CachedDataset(shaped(make), pipeline)
    assert_same_samples(ds[1], expected(*Images(4).sample(1)))


def test_a_namedtuple_stays_one_where_nothing_is_cached() -> None:
    """Its image is its first element."""
    image, label = Images(4).sample(1)
    ds = CachedDataset(shaped(Pair), FLIP, cache=None)
    assert_same_samples(ds[1], Pair(image[:, ::-1], label))


def take(sample: Any) -> Any:
    """Takes the sample apart before it fails."""
    del sample["image"]
    raise KeyError("mask")


def image_only(image: Any) -> Any:
    return image[:8].astype(np.float32)


A_TENSOR = r"\(H, W, C\) uint8 or float32; the dataset returned .*ToTensorV2"
A_TUPLE = "is a tuple of (array (32, 24, 3) uint8, int)"
NAMED = "a dict of {'image': array (32, 24, 3) uint8, 'label': int}"
NO_TARGET = r"takes the keys \['bboxes', 'image'.*returned a dict with \['img', 'label'\]: use those keys"
IMG = "is a dict of {'img': array (32, 24, 3) uint8, "


@pytest.mark.parametrize(
    ("make", "function", "said", "note"),
    [
        (lambda i, n: (i, n, i[..., 0]), FLIP, r"sample\[2\] .*\"mask\"", ""),  # it would miss the transform
        *((make, FLIP, "the dataset returned a", "") for make in (lambda i, n: n, lambda i, n: (n, i))),
        (lambda i, n: (), FLIP, "the dataset returned a", ""),
        *((lambda i, n, put=put: put(torch.from_numpy(i)), A.HorizontalFlip(p=1), A_TENSOR, "")
          for put in (lambda x: x, lambda x: (x, 1), lambda x: [x], lambda x: {"image": x})),
        (lambda *s: s, image_only, "list|tuple", f"sample; sample 1 {A_TUPLE}"),
        (as_dict("image", "label"), take, "mask", NAMED),
        *((as_dict("img", "label"), A.Compose([A.HorizontalFlip(p=p)]), NO_TARGET, f"{IMG}'label': int")
          for p in (0, 1)),
        (as_dict("img", "mask"), A.HorizontalFlip(p=1), "images", f"targets of a sample; sample 1 {IMG}"),
        (lambda i, n: i.transpose(2, 0, 1), A.RandomCrop(100, 100), "exceeds", "(H, W, C): transpose them"),
        (lambda i, n: i, A.RandomCrop(100, 100), "exceeds image", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", ["transform", "pre_transform"])
def test_what_fails_says_what_was_given(role: str, make: Any, function: Any, said: str, note: str) -> None:
    """As it was, not what the function left of it, and what to return instead."""
    with pytest.raises(Exception, match=said) as caught:
        CachedDataset(shaped(make), **{role: function})[1]
    found = "\n".join(getattr(caught.value, "__notes__", []))
    assert note.replace("sample 1", "sample 0" if role == "pre_transform" else "sample 1") in found
    assert ("transpose them" in found) == ("transpose them" in note)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818
    """An error that takes no notes."""

    code: int = 3


@pytest.mark.parametrize("error", [Frozen, ValueError])
def test_an_error_of_the_user_passes_through(error: type[Exception]) -> None:
    """It is raised, and not the error of adding a note to it; the transform is not run twice."""
    fails = mock.Mock(side_effect=error)
    with pytest.raises(error) as caught:
        CachedDataset(Images(4), transform=fails)[0]
    assert str(caught.value) == str(error())
    assert fails.call_count == 1


@pytest.mark.parametrize("role", ["transform", "pre_transform"])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            "flip",
            "{}='flip' is of type str, which is not callable: pass an albumentations pipeline, a function",
        ),
        ([A.NoOp()], "is of type list, which is not callable"),
        (A.NoOp, r"{} is the class NoOp: pass an instance of it, such as {}=NoOp\("),
        (type("Flip", (), {"__module__": "torchvision.transforms.v2._geometry"}), "is the class Flip: pass"),
    ],
)
def test_what_cannot_be_called_is_refused_at_once(role: str, value: Any, text: str) -> None:
    """Both are checked before the dataset is read, and the error says what to give."""
    dataset = Images(4)
    with pytest.raises(TypeError, match=text.replace("{}", role)):
        CachedDataset(dataset, **{role: value})
    assert sum(dataset.reads) == 0
    if role == "transform":  # set later, it is refused when it would run first
        later = CachedDataset(dataset)
        later.transform = value
        with pytest.raises(TypeError, match=text.replace("{}", role)):
            later[0]


@pytest.mark.parametrize("transform", [image_only, A.Compose([A.RandomCrop(5000, 5000)])])
def test_the_note_comes_from_workers(transform: Any) -> None:
    """The error that a worker sends carries the note, also where a pipeline gets the cached arrays."""
    with pytest.raises(Exception, match=r"sample|Crop size|attribute") as caught:
        next(iter(DataLoader(CachedDataset(Images(8), transform), 4, num_workers=1)))
    assert f"sample 0 {A_TUPLE}" in "\n".join([str(caught.value), *caught.value.__notes__])


def test_threads_share_a_cached_dataset() -> None:
    """Threads that are in the first call of a writing transform at once each get what they asked for."""
    barrier, dataset = threading.Barrier(8), BareImages(8)

    def write(image: Any) -> Any:
        barrier.wait(30)
        torch.from_numpy(image).add_(1)
        barrier.wait(30)
        return image

    ds = CachedDataset(dataset, write)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for index, output in enumerate(pool.map(ds.__getitem__, range(8))):
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
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(ds.__getitem__, 1)
        assert inside.wait(30)
        ds.transform = lambda image: "new"
        assert ds[0] == "new"
        ds.transform = None
        replaced.set()
        assert old.result() == "old"
    assert_same_samples(ds[1], BareImages(2).sample(1))


@pytest.mark.parametrize("normalization", ["min_max_per_channel", "standard"])
def test_worker_threads_transform_as_plain_code(normalization: Any) -> None:
    """Also what divides float32 images in place, which read-only memory refuses at first."""
    dataset = Made(lambda index: np.random.RandomState(index).rand(8, 6, 3).astype(np.float32))
    pipeline = A.Compose([A.Normalize(normalization=normalization), A.HorizontalFlip(p=1)])
    for options in ({"num_workers": 3, "worker_type": "thread"}, {}):
        loader = DataLoader(CachedDataset(dataset, pipeline), batch_size=None, **options)
        for _ in range(2):
            for index, image in enumerate(loader):
                assert_same_samples(np.asarray(image), pipeline(image=dataset.sample(index))["image"])


# Subclasses of a user, who may override anything.
OwnFlip, OwnCompose, OwnParams = (
    type("Own", (base,), {"__module__": __name__}) for base in (A.HorizontalFlip, A.Compose, A.BboxParams)
)


def own_function(image: Any, **params: Any) -> Any:
    return image


def with_attribute(**values: Any) -> Any:
    transform = A.HorizontalFlip()
    vars(transform).update(values)
    return transform


BOXES = A.BboxParams("pascal_voc", label_fields=["labels", "numbers"])
USED = A.Compose([A.HorizontalFlip(p=1)], bbox_params=BOXES, save_applied_params=True)
BOX, ZEROS = np.array([[1, 1, 5, 5]], np.float32), np.zeros((8, 8, 3), np.uint8)
USED(image=ZEROS, bboxes=BOX, labels=["cat"], numbers=np.array([3]))  # it remembers the types of labels
CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


KNOWN = {
    "single": A.HorizontalFlip(),
    "nested": A.Compose([A.OneOf([A.Sequential([A.SomeOf([A.Blur()])]), A.NoOp()])]),
    "replay": A.ReplayCompose([A.RandomCrop(8, 8)]),
    "its functions": A.Compose([A.ColorJitter(), A.HistogramMatching(metadata_key="references")]),
    "used, with boxes": USED,
    "circle": with_attribute(parts=CIRCLE),
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
def test_albumentations_own_pipelines_need_no_copy(name: str, is_known: bool, monkeypatch: Any) -> None:
    """They are given cached arrays; code of the user, of torch or of an unknown release gets copies."""
    assert only_reads({**KNOWN, **UNKNOWN}[name]) == is_known
    monkeypatch.setattr(A, "__version__", "2.0.9")
    assert not only_reads({**KNOWN, **UNKNOWN}[name])


def test_known_pipelines_are_given_the_cached_memory() -> None:
    """The transforms of such a pipeline run on the cache's own array, and not on a copy."""
    ds = CachedDataset(BareImages(4), A.Compose([A.HorizontalFlip(p=1)]))
    caller, image = TransformCaller(ds.transform), ds._view(1)
    seen: list[Any] = []
    caller.call = lambda sample, argument, index, end: seen.append(argument)  # type: ignore[method-assign]
    caller(lambda _: image, 1)
    assert seen[0] is image


@pytest.mark.slow
@pytest.mark.timeout(600)  # seconds of computation, which take minutes where other processes have the cores
def test_known_transforms_do_no_harm_on_sealed_memory(request: Any, interpreter: Any) -> None:
    """Each of albumentations' transforms gives what it gives on a private copy, and writes to none of it."""
    words = ["thorough"] if request.config.getoption("--thorough") else []
    program = "from tests.cache import sealed_transforms\nsealed_transforms.main()"
    done = interpreter.run(program, *words, limit_s=600, exits=False)
    assert done.returncode == 0, f"ended with {done.returncode} in the last of\n{done.stderr[-2000:]}"
    results = json.loads(done.stdout)
    assert {name: found["differences"] for name, found in results.items() if found["differences"]} == {}
    assert len(results) > 100
    never = {"AutoContrast", "Equalize", "ToTensor3D", "ToTensorV2"}  # are given none
    no_font = {"TextImage"}  # where no font is found
    assert {name for name, found in results.items() if not found["runs"]} <= never | no_font
