"""Random datasets: image files of all kinds, and classes that read, change and return them in many forms.

A `Recipe` is drawn from a seed; `Generated(recipe, folder)` is the dataset. Nothing in it knows of a cache.
Its samples are what `frozen` makes comparable: every bit, and types, layouts and errors.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import os
import pickle
import random
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import albumentations as A
import cv2
import imageio.v3
import numpy as np
import skimage.io
import tifffile
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageOps, features
from PIL.PngImagePlugin import PngInfo
from torch.utils.data import Dataset

from tests.kit.torchvision import without_operators

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

without_operators()  # before a worker unpickles a transform
NUM_FILES = 12
MODES = {
    ".jpg": ("RGB", "L", "CMYK"),
    ".png": ("RGB", "L", "RGBA", "LA", "P", "1", "I;16"),
    ".webp": ("RGB", "RGBA"),
    ".bmp": ("RGB", "L", "P", "1"),
    ".tif": ("RGB", "L", "CMYK", "P", "1", "I;16", "F"),
    ".gif": ("P",),
    **({".avif": ("RGB",)} if "avif" in features.get_supported() else {}),
    ".mpo": ("RGB",),
}


def write_files(folder: Path, rng: random.Random) -> None:
    """Write NUM_FILES images of random kinds, with a copy of each in an archive."""
    for number in range(NUM_FILES):
        write_image(folder / f"{number:02}", rng)
    pixels = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 999, (NUM_FILES, 3, 20, 30), np.uint16)
    for number in range(NUM_FILES):
        layout = np.asfortranarray(pixels[number]) if rng.random() < 0.5 else pixels[number]
        np.savez_compressed(folder / f"{number:02}.npz", image=layout, label=np.array(number))
        compression: Any = rng.choice([None, "zlib"])
        tifffile.imwrite(folder / f"{number:02}.bands", pixels[number], compression=compression)
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        for path in sorted(folder.glob("??")):
            archive.write(path, path.name)


def write_image(path: Path, rng: random.Random) -> None:
    """Write an image of a random format, mode and size; now and then a damaged one."""
    suffix = rng.choice([".jpg", ".jpg", ".png", *MODES])
    mode = rng.choice(MODES[suffix])
    width, height = rng.choice([(1, 1), (17, 9), (48, 40), (64, 48), (40, 64), (130, 70)])
    seed = np.random.default_rng(rng.randrange(1 << 30))
    small = seed.integers(0, 256, (3, 4, 3), dtype=np.uint8)
    image = Image.fromarray(cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC))
    options: dict[str, Any] = {}
    if mode == "I;16":
        image = Image.fromarray(seed.integers(0, 65536, (height, width), dtype=np.uint16))
    elif mode == "P" and suffix == ".png" and rng.random() < 0.5:
        image, options["transparency"] = image.quantize(16), rng.randrange(4)
    else:
        image = image.convert(mode)
    if suffix in (".jpg", ".png", ".webp") and rng.random() < 0.3:
        exif = Image.Exif()
        exif[0x0112] = rng.randrange(1, 9)
        options["exif"] = exif
    if suffix == ".jpg":
        options.update(quality=rng.choice([40, 90]), progressive=rng.random() < 0.3)
    if suffix == ".png" and rng.random() < 0.3:
        options["pnginfo"] = PngInfo()
        options["pnginfo"].add_text("title", "words")
    if suffix == ".gif" or (suffix in (".webp", ".png", ".mpo", ".tif") and rng.random() < 0.3):
        options.update(save_all=True, append_images=[image.rotate(180)])
    buffer = io.BytesIO()
    image.save(buffer, {".jpg": "JPEG", ".tif": "TIFF"}.get(suffix, suffix[1:].upper()), **options)
    content = buffer.getvalue()
    if rng.random() < 0.06:
        content = content[: rng.randrange(len(content))]
    path.write_bytes(content)


# How an image is opened. A reader gets the folder and the number of a file.
def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:02}"


def _member(folder: Path, number: int) -> Any:
    with zipfile.ZipFile(folder / "all.zip") as archive, archive.open(f"{number:02}") as member:
        image = Image.open(member)
        image.load()
        return image


def _in_context(folder: Path, number: int) -> Any:
    with Image.open(_path(folder, number)) as image:
        return image.convert(image.mode)


def _from_file(folder: Path, number: int) -> Any:
    with _path(folder, number).open("rb") as file:
        return Image.open(file).convert("RGB")


def _verified(folder: Path, number: int) -> Any:
    with Image.open(_path(folder, number)) as image:
        image.verify()
    return Image.open(_path(folder, number))


def _draft(folder: Path, number: int) -> Any:
    image = Image.open(_path(folder, number))
    image.draft("L", (20, 20))
    return image


def _last_frame(folder: Path, number: int) -> Any:
    image = Image.open(_path(folder, number))
    image.seek(getattr(image, "n_frames", 1) - 1)
    return image


def _from_npz(folder: Path, number: int) -> Any:
    with np.load(folder / f"{number:02}.npz") as archive:
        return archive["image"] + archive["label"]


def _by_pages(folder: Path, number: int) -> Any:
    with tifffile.TiffFile(folder / f"{number:02}.bands") as tiff:
        return np.stack([tiff.asarray(key=0), tiff.asarray()[1]])


FLAGS = [1, 1, 0, -1, 2, 6, 17, 129]  # of cv2.imread
READERS: dict[str, Callable[[Path, int], Any]] = {
    "open": lambda folder, number: Image.open(_path(folder, number)),
    "open text": lambda folder, number: Image.open(str(_path(folder, number))),
    "open bytes": lambda folder, number: Image.open(io.BytesIO(_path(folder, number).read_bytes())),
    "open file": _from_file,
    "open member": _member,
    "context": _in_context,
    "verified": _verified,
    "draft": _draft,
    "last frame": _last_frame,
    "convert": lambda folder, number: Image.open(_path(folder, number)).convert("RGB"),
    "exif": lambda folder, number: ImageOps.exif_transpose(Image.open(_path(folder, number))),
    "asarray": lambda folder, number: np.asarray(Image.open(_path(folder, number))),
    "array": lambda folder, number: np.array(Image.open(_path(folder, number)).convert("RGB")),
    "imread": lambda folder, number: cv2.imread(str(_path(folder, number))),
    "imread flags": lambda folder, number: cv2.imread(str(_path(folder, number)), FLAGS[number % len(FLAGS)]),
    "imdecode": lambda folder, number: cv2.imdecode(np.fromfile(_path(folder, number), np.uint8), 1),
    "imageio": lambda folder, number: imageio.v3.imread(_path(folder, number)),
    "skimage": lambda folder, number: skimage.io.imread(_path(folder, number)),
    "tifffile": lambda folder, number: tifffile.imread(folder / f"{number:02}.bands"),
    "pages": _by_pages,
    "npz": _from_npz,
}


# What is done to a Pillow image before the transforms.
def _pasted(image: Any) -> Any:
    image.paste(0, (0, 0, 5, 5))
    return image


def _written(image: Any) -> Any:
    image.load()[0, 0] = image.getpixel((image.width - 1, 0))
    return image


def _drawn(image: Any) -> Any:
    ImageDraw.Draw(image).line((0, 0, 9, 9), fill=1 if image.mode in "1LPI" else None)
    return image


def _thumbnail(image: Any) -> Any:
    image.thumbnail((30, 30))
    return image


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "same": lambda image: image.convert(image.mode),
    "rgb": lambda image: image.convert("RGB"),
    "grey": lambda image: image.convert("L"),
    "copy": lambda image: image.copy(),
    "crop": lambda image: image.crop((1, 1, max(2, image.width // 2), max(2, image.height // 2))),
    "crop beyond": lambda image: image.crop((-3, -2, 9, 9)),
    "crop all": lambda image: image.crop(),
    "resize": lambda image: image.resize((24, 18)),
    "resize box": lambda image: image.resize((9, 9), Image.Resampling.BICUBIC, (0, 0, image.width, 1)),
    "numpy resize": lambda image: image.resize(np.array([20, 22])),
    "thumbnail": _thumbnail,
    "reduce": lambda image: image.reduce(2),
    "flip": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "rotate": lambda image: image.rotate(30, expand=True),
    "exif": ImageOps.exif_transpose,
    "blur": lambda image: image.filter(ImageFilter.BLUR),
    "point": lambda image: image.point(lambda value: 255 - value),
    "channels": lambda image: image.getchannel(0),
    "merge": lambda image: Image.merge(image.mode, image.split()),
    "paste": _pasted,
    "write": _written,
    "draw": _drawn,
    "pickle": lambda image: pickle.loads(pickle.dumps(image)),
    "deepcopy": copy.deepcopy,
    "shallow": copy.copy,
    "quantize": lambda image: image.quantize(8),
    "from array": lambda image: Image.fromarray(np.asarray(image)),
    "invert": ImageOps.invert,
    "loaded": lambda image: [image.load(), image][1],
    "extrema": lambda image: [image.getextrema(), image.histogram(), image][2],
}


def _albumentations(rng: random.Random) -> Any:
    steps = rng.sample(
        [
            A.HorizontalFlip(),
            A.RandomBrightnessContrast(),
            A.Rotate(30),
            A.GaussianBlur(),
            A.CoarseDropout(),
            A.ShiftScaleRotate(),
            A.HueSaturationValue(),
            A.ToGray(),
        ],
        k=rng.randrange(1, 4),
    )
    steps = [A.Resize(24, 30), *steps] if rng.random() < 0.7 else steps
    steps += rng.choice([[], [A.Normalize()], [A.Normalize(), A.ToTensorV2()]])
    return A.Compose(steps, seed=rng.randrange(99))


def _torchvision(rng: random.Random, version: str) -> Any:
    import torchvision.transforms as v1
    from torchvision.transforms import v2

    t: Any = {"v1": v1, "v2": v2}[version]
    choices = [
        *(t.RandomHorizontalFlip(), t.RandomVerticalFlip(), t.RandomRotation(20), t.ColorJitter(0.4, 0.4)),
        *(t.RandomGrayscale(), t.RandomPerspective(), t.GaussianBlur(3), t.RandomAffine(10, (0.1, 0.1))),
        *(t.Pad(3), t.RandomPosterize(4), t.RandomAutocontrast(), t.RandAugment(), t.RandomEqualize()),
    ]
    front = rng.choice(
        [
            *([], [t.Resize(30)], [t.Resize((20, 24))], [t.CenterCrop(16)], [t.RandomResizedCrop(20)]),
            *([t.Resize(32), t.RandomCrop(24)], [t.RandomCrop(20, pad_if_needed=True)]),
        ]
    )
    end = _end(rng, version)
    end = [*end, t.RandomErasing()] if end and rng.random() < 0.3 else end
    as_tensor = [v2.ToImage()] if version == "v2" and rng.random() < 0.3 else []
    steps = [*as_tensor, *front, *rng.sample(choices, k=rng.randrange(3)), *end]
    return t.Compose(steps or [choices[0]])


def _end(rng: random.Random, version: str) -> list[Any]:
    """The steps that make a tensor, now and then those of the other version."""
    import torchvision.transforms as v1
    from torchvision.transforms import v2

    t: Any = {"v1": v1, "v2": v2}[version if rng.random() < 0.9 else rng.choice(["v1", "v2"])]
    scaled = [[t.PILToTensor(), t.ConvertImageDtype(torch.float32)]]
    if t is v2:
        scaled += [[v2.ToImage(), v2.ToDtype(torch.float32, scale=rng.random() < 0.9)]] * 3
    else:
        scaled += [[v1.ToTensor()]] * 3
    tensor = rng.choice(scaled)
    num_channels, inplace = rng.choice([1, 3, 3]), rng.random() < 0.2
    mean, std = [[rng.choice([0.5, rng.random()]) for _ in range(num_channels)] for _ in range(2)]
    normalize = t.Normalize(mean, rng.choice([tuple, list])(std), inplace=inplace)
    pure = [v2.ToPureTensor()] if version == "v2" and rng.random() < 0.3 else []
    return rng.choice([[], [t.PILToTensor()], tensor, [*tensor, normalize, *pure], [*tensor, normalize]])


TRANSFORMS = ("none", "albumentations")
if importlib.util.find_spec("torchvision") is not None:
    TRANSFORMS += "v1", "v2"


def _make_transform(kind: str, seed: int) -> Any:
    rng = random.Random(seed)
    if kind == "none":
        return None
    if kind == "arrays":
        from torchvision.transforms import v2

        version = rng.choice(["v1", "v2"])
        return v2.Compose(_end(rng, version) or [v2.ToImage()])
    return _albumentations(rng) if kind == "albumentations" else _torchvision(rng, kind)


@dataclass(frozen=True)
class Recipe:
    """What decides a dataset, beside its files.

    Attributes:
        form: How a sample is made, a name in FORMS.
        reader: How a file is read, a name in READERS.
        operations: What is done to Pillow images, names in OPERATIONS.
        transform: Of which library, a name in TRANSFORMS.
        seed: Of the transform.
    """

    form: str
    reader: str
    operations: tuple[str, ...]
    transform: str
    seed: int


def draw_recipe(rng: random.Random) -> Recipe:
    """A recipe."""
    operations = tuple(rng.choices([*OPERATIONS], k=rng.choice([0, 0, 1, 1, 2, 3])))
    transform = rng.choice(TRANSFORMS)
    return Recipe(rng.choice([*FORMS]), rng.choice([*READERS]), operations, transform, rng.randrange(1 << 30))


class Generated(Dataset[Any]):
    """A dataset that reads the files of a folder as a recipe says.

    Args:
        recipe: See there.
        folder: With the files of `write_files`.
    """

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        self.transform = _make_transform(recipe.transform, recipe.seed)
        if recipe.transform in ("v1", "v2"):  # without torchvision, recipes name neither
            self.end_of_arrays = _make_transform("arrays", recipe.seed)
        self.memo: dict[int, Any] = {}
        self.num_read = 0
        self.imread = cv2.imread  # taken before any patch

    def __len__(self) -> int:
        return NUM_FILES

    def read(self, number: int) -> Any:
        """A file, read and changed."""
        self.num_read += 1
        image = READERS[self.recipe.reader](self.folder, number % NUM_FILES)
        if isinstance(image, Image.Image):
            for name in self.recipe.operations:
                image = OPERATIONS[name](image)
        elif image is not None and self.recipe.operations:
            image[image > 99] = 7  # writes to what was read, if that can be written
        return image

    def finish(self, image: Any) -> Any:
        """The image, transformed."""
        if self.transform is None or image is None:
            return image
        if self.recipe.transform == "albumentations":
            return self.transform(image=np.array(image))["image"]
        if isinstance(image, np.ndarray):
            if image.dtype == np.uint8 and self.recipe.seed % 2:
                return self.end_of_arrays(image)
            image = torch.from_numpy(np.ascontiguousarray(image).astype(np.float32))
            return image.clamp_(0, 99).sqrt_()
        return self.transform(image)

    def __getitem__(self, index: int) -> Any:
        try:
            return frozen(FORMS[self.recipe.form](self, index))
        except Exception as error:  # noqa: BLE001  # errors are samples, too
            return "error", type(error).__name__, re.sub(r"0x\w+|/[\w/.-]+", "...", str(error))


def _masked(dataset: Generated, index: int) -> Any:
    mask = torch.from_numpy(np.array(dataset.read(index)))
    mask[mask == mask.max()] = 0
    return dataset.finish(dataset.read(index + 1)), mask


def _in_place(dataset: Generated, index: int) -> Any:
    pixels = np.asarray(dataset.read(index))
    before = pixels.copy()
    with contextlib.suppress(ValueError):  # what Pillow returns is read-only
        pixels[:] = 0
    return before, pixels


def _mosaic(dataset: Generated, index: int) -> Any:
    canvas = np.full((40, 40, 3), 114, np.uint8)
    for k, number in enumerate([index, *(random.randrange(NUM_FILES) for _ in range(3))]):
        pixels = np.array(dataset.read(number))
        pixels = np.atleast_3d(pixels)[:20, :20, :3]
        canvas[20 * (k // 2) :, 20 * (k % 2) :][: pixels.shape[0], : pixels.shape[1]] = pixels
    return canvas if random.random() < 0.5 else canvas[:, ::-1].copy()


def _retry(dataset: Generated, index: int) -> Any:
    for number in range(index, index + 4):
        try:
            return dataset.finish(dataset.read(number)), number
        except Exception:  # noqa: BLE001  # as in the wild
            continue
    return None


def _memo(dataset: Generated, index: int) -> Any:
    if index not in dataset.memo:
        dataset.memo[index] = dataset.read(index)
    return dataset.finish(dataset.memo[index])


def _opened_before(dataset: Generated, index: int) -> Any:
    image, dataset.memo[0] = dataset.memo.get(0), dataset.read(index)  # read at the next sample
    return None if image is None else dataset.finish(image)


def _threads(dataset: Generated, index: int) -> Any:
    with ThreadPoolExecutor(2) as pool:
        images = list(pool.map(dataset.read, [index, index + 1]))
        one = dataset.read(index)  # used by four threads; an image that is not loaded can be used by one
        one = one.copy() if isinstance(one, Image.Image) else one
        if one is None:  # the bytes of its array are an address, another one in each spawned process
            return images
        texts = list(pool.map(lambda _: np.asarray(one).tobytes(), range(4)))
    return [*map(dataset.finish, images), texts]


def _with_target(dataset: Generated, index: int) -> Any:
    image = dataset.read(index)
    if dataset.recipe.transform != "v2" or not isinstance(image, Image.Image):
        return dataset.finish(image), index
    from torchvision import tv_tensors

    mask = tv_tensors.Mask(torch.full((1, image.height, image.width), index, dtype=torch.uint8))
    target = {"mask": mask, "labels": torch.arange(index), "name": str(index)}
    return dataset.transform(image, target) if index % 2 else dataset.transform([image, target])


def _seeded(dataset: Generated, index: int) -> Any:
    random.seed(index)
    np.random.seed(index)
    torch.manual_seed(index)
    return dataset.finish(dataset.read(random.randrange(NUM_FILES)))


FORMS: dict[str, Callable[[Generated, int], Any]] = {
    "plain": lambda dataset, index: (dataset.finish(dataset.read(index)), index % 3),
    "dict": lambda dataset, index: {"image": dataset.finish(dataset.read(index)), "mask": None},
    "target": _with_target,
    "raw": lambda dataset, index: [dataset.read(index), {"other": (dataset.read(index + 1),)}],
    "branch": lambda dataset, index: (
        dataset.finish(dataset.read(index + random.randrange(2))) if np.random.rand() < 0.7 else index
    ),
    "mask": _masked,
    "in place": _in_place,
    "mosaic": _mosaic,
    "frames": lambda dataset, index: np.stack(
        [np.asarray(dataset.finish(dataset.read(index)))[:1, :1] for _ in range(3)]
    ),
    "retry": _retry,
    "memo": _memo,
    "opened before": _opened_before,
    "threads": _threads,
    "seeded": _seeded,
    "counted": lambda dataset, index: (dataset.finish(dataset.read(index)), dataset.num_read),
    "kept function": lambda dataset, index: dataset.imread(os.fspath(_path(dataset.folder, index))),
    "size alone": lambda dataset, index: getattr(READERS["open"](dataset.folder, index), "size", None),
    "itself": lambda dataset, index: pickle.loads(pickle.dumps(dataset)).read(index),
}


def frozen(sample: Any) -> Any:
    """A sample, as plain values that are equal for equal samples alone."""
    if isinstance(sample, Image.Image):
        names = ("format", "mode", "size", "readonly", "is_animated", "text")
        attributes = [getattr(sample, name, None) for name in names]
        info = sorted((repr(name), repr(value)) for name, value in sample.info.items())
        content = sample.tobytes()
        return type(sample).__name__, attributes, info, content, sample.getpalette(), dict(sample.getexif())
    if isinstance(sample, torch.Tensor):
        kind = type(sample).__name__, str(sample.dtype), tuple(sample.shape), sample.stride()
        return *kind, sample.detach().contiguous().numpy().tobytes()
    if isinstance(sample, np.ndarray):
        flags = sample.flags.writeable, sample.flags.c_contiguous, sample.flags.f_contiguous
        return sample.dtype.str, sample.shape, flags, sample.tobytes()
    if isinstance(sample, dict):
        return {name: frozen(value) for name, value in sample.items()}
    if isinstance(sample, (list, tuple)):
        return [type(sample).__name__, *map(frozen, sample)]
    return type(sample).__name__, repr(sample)
