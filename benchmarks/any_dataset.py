"""What does remembering decoded files bring a user's own dataset, without a change of it?

Question: two workers of each loader read torchvision's ImageFolder with an ordinary pipeline, and classes as
users write them: torch's loader, fastload's with only the import changed, with `cache="ram"`, and with
`cache="lmdb:PATH"`. How many images a second do they give in steady epochs? The batches of an epoch are
compared first: they are equal, bit for bit. A class that decodes and crops is compared with the
`CachedDataset` that replaces it and decodes only the crop, too (its draws differ).

Each contender keeps its own two workers; all take turns, and the others' workers are idle meanwhile. The
first, uncounted run of a contender fills its memory. The first epoch of ImageFolder, which does so, is a
question of its own: each loader reads it in a process of its own, and the start of its workers counts.

Held out: disk (the files and the cache on disk come from the page cache) and the GPU.

Needs torchvision, whose Python part is enough: pip install --no-deps torchvision==0.28.0

Command: python benchmarks/any_dataset.py [--only TEXT] [--runs 5] [--save]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import multiprocessing
import random
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import albumentations as A
import cv2
import numpy as np
import torch
from albumentations.pytorch import ToTensorV2
from harness import Contender, contender, images_per_s, in_own_process, interleave, report, save
from jpegs import LARGE, SMALL, Size, make_images
from PIL import Image

import fastload

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH_SIZE = 16
LOADING = {"shuffle": True, "num_workers": 2, "persistent_workers": True}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
START_METHOD = "fork"
SETTLED_S = 3  # files that were just written are not remembered
TORCH, CROP_ONLY = "torch", "CachedDataset, cache=None"


# --- datasets --------------------------------------------------------------------------------------------


def import_torchvision() -> Any:
    """Its datasets and transforms; its compiled part may have been built for another torch."""
    name = "torchvision._meta_registrations"
    sys.modules.setdefault(name, types.ModuleType(name))
    return importlib.import_module("torchvision")


def pipeline(first: str, version: str) -> Any:
    """The transforms that training scripts begin with."""
    vision = import_torchvision()
    transforms = (
        vision.transforms if version == "v1" else importlib.import_module("torchvision.transforms.v2")
    )
    if version == "v1":
        end = [transforms.ToTensor()]
    else:
        end = [transforms.ToImage(), transforms.ToDtype(torch.float32, scale=True)]
    begin = {
        "RandomResizedCrop(224)": [transforms.RandomResizedCrop(224)],
        "Resize(256), RandomCrop(224)": [transforms.Resize(256), transforms.RandomCrop(224)],
    }[first]
    flip, normalize = transforms.RandomHorizontalFlip(), transforms.Normalize(MEAN, STD)
    return transforms.Compose([*begin, flip, *end, normalize])


def image_folder(first: str, version: str, folder: str) -> Any:
    """ImageFolder with such transforms."""
    return import_torchvision().datasets.ImageFolder(folder, pipeline(first, version))


class OwnFiles(torch.utils.data.Dataset[Any]):
    """What the classes below share: the files of a folder for each class, and albumentations' crop."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(str(path) for path in Path(folder).glob("*/*.jpg"))
        self.labels = [Path(path).parent.name for path in self.paths]
        self.classes = sorted(set(self.labels))
        self.crop = A.Compose(
            [A.RandomResizedCrop((224, 224)), A.HorizontalFlip(p=0.5), A.Normalize(MEAN, STD), ToTensorV2()]
        )

    def __len__(self) -> int:
        return len(self.paths)


class OpenCVPhotos(OwnFiles):
    """An image and its label, by OpenCV and albumentations."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = cv2.imread(self.paths[index], cv2.IMREAD_COLOR_RGB)
        return self.crop(image=image)["image"], self.classes.index(self.labels[index])


class PillowPhotos(OwnFiles):
    """An image and its label, by the calls that an ImageFolder and torchvision's first transforms make.

    For gate_rows.py, where torchvision is not installed.

    Args:
        folder: Holds a folder for each class.
        is_resized: Whether images are resized to 256 and cut at random, instead of cut and resized.
    """

    def __init__(self, folder: str, *, is_resized: bool) -> None:
        super().__init__(folder)
        self.is_resized = is_resized

    def begin(self, image: Image.Image) -> Image.Image:
        """The pixels of 224 x 224 that are kept."""
        width, height = image.size
        bilinear = Image.Resampling.BILINEAR
        if self.is_resized:
            short = min(width, height)
            image = image.resize((256 * width // short, 256 * height // short), bilinear)
            left, top = drawn_to(image.width - 224), drawn_to(image.height - 224)
            return image.crop((left, top, left + 224, top + 224))
        share, log_ratio = torch.empty(1).uniform_(0.08, 1), torch.empty(1).uniform_(-0.2877, 0.2877)
        area, ratio = width * height * share.item(), torch.exp(log_ratio).item()
        w, h = min(width, round((area * ratio) ** 0.5)), min(height, round((area / ratio) ** 0.5))
        left, top = drawn_to(width - w), drawn_to(height - h)
        return image.crop((left, top, left + w, top + h)).resize((224, 224), bilinear)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with open(self.paths[index], "rb") as file:
            image = self.begin(Image.open(file).convert("RGB"))
        if torch.rand(1) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image, np.uint8, copy=True)).permute((2, 0, 1)).contiguous()
        mean, std = torch.as_tensor(MEAN).view(-1, 1, 1), torch.as_tensor(STD).view(-1, 1, 1)
        floats = pixels.to(torch.float32).div(255)
        return floats.sub_(mean).div_(std), self.classes.index(self.labels[index])


def drawn_to(end: int) -> int:
    """A number of 0 to ``end``, as torchvision draws it."""
    return int(torch.randint(0, end + 1, size=(1,)))


class Masked(OwnFiles):
    """An image and its mask, which lies beside it as a PNG."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = cv2.imread(self.paths[index], cv2.IMREAD_COLOR_RGB)
        mask = cv2.imread(self.paths[index].replace(".jpg", ".png"), cv2.IMREAD_GRAYSCALE)
        both = self.crop(image=image, mask=mask)
        return both["image"], both["mask"]


class Triplets(OwnFiles):
    """An anchor, another image of its class, and one of another class; by Pillow and torchvision."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        transforms = import_torchvision().transforms
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def read(self, index: int) -> Any:
        """One of the three."""
        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB"))

    def __getitem__(self, index: int) -> tuple[Any, Any, Any]:
        label = self.labels[index]
        same = [other for other, name in enumerate(self.labels) if name == label]
        others = [other for other, name in enumerate(self.labels) if name != label]
        return self.read(index), self.read(random.choice(same)), self.read(random.choice(others))


class Mosaics(OwnFiles):
    """Four images, three of them drawn, in the quarters of one that is cropped then."""

    def __getitem__(self, index: int) -> Any:
        canvas = np.empty((640, 640, 3), np.uint8)
        drawn = [index, *(random.randrange(len(self)) for _ in range(3))]
        for place, number in enumerate(drawn):
            image = cv2.imread(self.paths[number], cv2.IMREAD_COLOR_RGB)
            top, left = 320 * (place // 2), 320 * (place % 2)
            canvas[top : top + 320, left : left + 320] = cv2.resize(image, (320, 320))
        return self.crop(image=canvas)["image"]


def make_masks(folder: Path, size: Size) -> None:
    """JPEGs, and beside each one a mask of two levels, as large as the image."""
    make_images(folder, size)
    for path in folder.glob("*/*.jpg"):
        gray = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
        cv2.imwrite(str(path.with_suffix(".png")), (cv2.blur(gray, (9, 9)) > 127).astype(np.uint8))


# --- contenders ------------------------------------------------------------------------------------------


def loaders(make_dataset: Callable[[str], Any], folder: str, cache: str) -> dict[str, Any]:
    """How each loader is made; ``cache`` is a folder for the cache on disk."""
    dataset = make_dataset(folder)
    # With torch's seeds in albumentations, too, so that the batches can be compared.
    ours = {**LOADING, "seeding": "torch"}
    return {
        TORCH: lambda: torch.utils.data.DataLoader(dataset, BATCH_SIZE, **LOADING),
        "import only": lambda: fastload.DataLoader(dataset, BATCH_SIZE, **ours),
        'cache="ram"': lambda: fastload.DataLoader(dataset, BATCH_SIZE, cache="ram", **ours),
        "cache=lmdb": lambda: fastload.DataLoader(dataset, BATCH_SIZE, cache=f"lmdb:{cache}/files", **ours),
    }


def crop_only(folder: str) -> dict[str, Any]:
    """The same crops through a CachedDataset that keeps nothing."""
    crop = OwnFiles(folder).crop

    def make() -> Any:
        dataset = fastload.CachedDataset(fastload.ImageFolder(folder), transform=crop, cache=None)
        return fastload.DataLoader(dataset, BATCH_SIZE, **LOADING)

    return {CROP_ONLY: make}


def check_equal(makers: dict[str, Any]) -> None:
    """Compare two epochs of all loaders."""
    sums = []
    for make in makers.values():
        loader = make()
        torch.manual_seed(0)
        sums.append([sum_of(batch) for _ in range(2) for batch in loader])
        if hasattr(loader, "close"):
            loader.close()
    if any(other != sums[0] for other in sums):
        raise RuntimeError("the loaders give different batches")


def sum_of(batch: Any) -> float:
    """Of all numbers in a batch."""
    parts = batch if isinstance(batch, (list, tuple)) else [batch]
    return sum(part.double().sum().item() for part in parts)


def send_first_epoch(case: str, folder: str, label: str, num_images: int, results: Any) -> None:
    """Read one epoch through a new loader and send its rate; runs in a process of its own."""
    multiprocessing.set_start_method(START_METHOD, force=True)  # a spawned process would spawn workers
    with tempfile.TemporaryDirectory() as cache:
        loader = loaders(CASES[case][0], folder, cache)[label]()
        results.put(images_per_s(loader, num_images))


def first_epoch(case: str, folder: str, label: str, num_images: int) -> Contender:
    """A loader that is made anew for each run, in a new process, which frees its memory at the end."""

    def run() -> float:
        results: Any = multiprocessing.get_context("spawn").SimpleQueue()
        in_own_process(send_first_epoch, case, folder, label, num_images, results)
        return float(results.get())

    return Contender(label, label, run)


FOLDERS = {
    f"ImageFolder, {first}, {version}": functools.partial(image_folder, first, version)
    for first, version in (
        ("RandomResizedCrop(224)", "v1"),
        ("RandomResizedCrop(224)", "v2"),
        ("Resize(256), RandomCrop(224)", "v1"),
    )
}
CASES: dict[str, tuple[Callable[[str], Any], tuple[Size, ...]]] = {
    **{name: (make, (SMALL, LARGE)) for name, make in FOLDERS.items()},
    "own class, OpenCV, albumentations' RandomResizedCrop(224)": (OpenCVPhotos, (SMALL, LARGE)),
    "own class, image and mask": (Masked, (SMALL,)),
    "own class, triplets with random partners": (Triplets, (SMALL,)),
    "own class, mosaics of four": (Mosaics, (SMALL,)),
}


def question(case: str, size: Size, runs: int) -> list[dict[str, Any]]:
    """One dataset and size: steady epochs, and for ImageFolder the first one."""
    from fastload.cache.file_cache import forget_stores  # here: gate_rows.py needs public names alone

    make_dataset, _ = CASES[case]
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as cache:
        in_own_process(make_masks if make_dataset is Masked else make_images, Path(work), size)
        time.sleep(SETTLED_S)
        makers = loaders(make_dataset, work, cache)
        first: list[Contender] = []
        if (
            case in FOLDERS
        ):  # at once, while no process holds a store in which the others would find the files
            first = [first_epoch(case, work, label, size.num_images) for label in makers]
            interleave(first, runs)
        check_equal(makers)
        if make_dataset is OpenCVPhotos:
            makers |= crop_only(work)
        rows: list[Contender] = [
            contender(label, label, make, size.num_images) for label, make in makers.items()
        ]
        interleave(rows, runs)
        forget_stores()
    title = f"{case}, JPEGs of {size.title}"
    answers = [report(title, "images/s", rows, ratios_of(rows, 1.0))]
    if first:
        answers.append(report(f"{title}, the first epoch", "images/s", first, ratios_of(first, 0.9)))
    return answers


def ratios_of(rows: list[Contender], target: float) -> dict[str, tuple[float, float]]:
    """How many times as fast as torch's loader each of the others is."""
    base, *others = rows
    return {f"{row.label} / torch": (row.median / base.median, target) for row in others}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    questions = [
        answer
        for case, (_, sizes) in CASES.items()
        if arguments.only in case
        for size in sizes
        for answer in question(case, size, arguments.runs)
    ]
    if arguments.save:
        save("any_dataset", f"python benchmarks/any_dataset.py --runs {arguments.runs} --save", questions)


if __name__ == "__main__":
    main()
