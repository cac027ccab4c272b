"""Whether changing the import ever costs speed: torch's loader and ours, over many kinds of samples.

Question: for each kind of sample, with 0, 1 and 2 workers, how long does torch's DataLoader take for an epoch
beside ours? Only the import differs. Above 1 our loader is faster; a ! marks kinds below 0.95.

Held out: what a dataset does to make a sample. These make theirs as fast as they can, so nothing but
the loader is left, which is the worst case for it. The consumer only takes the batches. Workers persist,
except in the rows named "start", where an epoch has few batches and what begins and ends it is measured.
`pin_memory=True` is emulated where there is no accelerator: pinning is a copy then.

Command: python benchmarks/zero_cost.py [--only TEXT ...] [--workers 0 1 2] [--runs 9] [--save]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
import warnings
from collections import namedtuple
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils.data
from harness import save
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

import fastload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LEAST = 0.95
RUN_S = 0.08  # how long a measured run of torch's takes at least

Point = namedtuple("Point", ["features", "label"])


class Made(Dataset):
    """Samples made by a function of the index."""

    def __init__(self, make: Callable[[int], Any], num_samples: int) -> None:
        self.make = make
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class InBulk(Made):
    """The same through torch's `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.make(index) for index in indices]


class Stream(IterableDataset):
    """The same without indices, shared out among workers."""

    def __init__(self, make: Callable[[int], Any], num_samples: int) -> None:
        self.make = make
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(self.make, range(first, self.num_samples, step))


# --- what makes samples: classes, so workers of every start method can have them ---------------------


@dataclass
class Held:
    """Samples that exist already: one of ``values``, perhaps with a label."""

    values: Any
    labelled: bool = False

    def __call__(self, index: int) -> Any:
        """The sample of an index."""
        value = self.values[index % len(self.values)]
        return (value, index % 10) if self.labelled else value


@dataclass
class Computed:
    """Samples that are made anew on every access."""

    compute: Callable[[int], Any]

    def __call__(self, index: int) -> Any:
        """The sample of an index."""
        return self.compute(index)


def tensors(shape: tuple[int, ...], dtype: torch.dtype, count: int = 64) -> list[torch.Tensor]:
    """Tensors that own their memory."""
    return [value.clone() for value in views(shape, dtype, count)]


def views(shape: tuple[int, ...], dtype: torch.dtype, count: int = 64) -> torch.Tensor:
    """One tensor of which samples are views."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, *shape), generator=generator).to(dtype)


def arrays(shape: tuple[int, ...], dtype: Any, count: int = 64) -> list[Any]:
    """NumPy arrays that own their memory."""
    return [np.random.default_rng(seed).integers(0, 256, shape).astype(dtype) for seed in range(count)]


def to_tensor(index: int) -> Any:
    """What ToTensor of torchvision makes of a picture, here of one that is made up."""
    picture = np.full((64, 64, 3), index % 256, np.uint8)
    return torch.from_numpy(picture).permute(2, 0, 1).contiguous().float().div(255)


def to_large_tensor(index: int) -> Any:
    """The same at the size of ImageNet's crops."""
    picture = np.full((224, 224, 3), index % 256, np.uint8)
    return torch.from_numpy(picture).permute(2, 0, 1).contiguous().float().div(255), index


def row_of_a_table(index: int) -> dict[str, Any]:
    """A row as pandas gives it: thirty scalars by name."""
    return {f"column{number}": (index + number) * 0.5 for number in range(30)}


class Detection:
    """An image, a mask, boxes and an id, as datasets for detection give them."""

    def __init__(self) -> None:
        self.images = tensors((3, 224, 224), torch.uint8, 16)
        self.masks = tensors((224, 224), torch.uint8, 16)
        self.boxes = tensors((5, 4), torch.float32, 16)

    def __call__(self, index: int) -> dict[str, Any]:
        """The sample of an index."""
        at = index % 16
        return {"image": self.images[at], "mask": self.masks[at], "boxes": self.boxes[at], "id": index}


class Fields:
    """A dict of many small tensors."""

    def __init__(self, count: int, size: int) -> None:
        self.values = {f"field{number}": torch.arange(size) + number for number in range(count)}

    def __call__(self, index: int) -> dict[str, Any]:
        """The sample of an index."""
        return dict(self.values)


class TwoDicts:
    """A list of two dicts of a tensor and a number."""

    def __init__(self) -> None:
        self.values = tensors((16,), torch.float32)

    def __call__(self, index: int) -> list[dict[str, Any]]:
        """The sample of an index."""
        return [{"x": self.values[index % 64], "y": index}, {"x": self.values[(index + 1) % 64], "y": -index}]


class Ragged:
    """Rows of several lengths."""

    def __init__(self) -> None:
        self.values = [torch.arange(size) for size in range(8, 72)]

    def __call__(self, index: int) -> Any:
        """The sample of an index."""
        return self.values[index % 64]


def pair_of_stacks(samples: list[Any]) -> tuple[Any, Any]:
    """A collate function as users write it."""
    return torch.stack([sample[0] for sample in samples]), torch.tensor([sample[1] for sample in samples])


# --- the matrix -------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One kind of sample, batch and loader.

    Attributes:
        name: What the table calls it.
        dataset: Makes the dataset.
        batch_size: As the loaders take it.
        options: Further arguments of both loaders.
        ours: Arguments of our loader alone.
        starts: Whether workers are started for each epoch.
        pins: Whether an accelerator is emulated.
    """

    name: str
    dataset: Callable[[], Any]
    batch_size: int | None = 256
    options: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    starts: bool = False
    pins: bool = False


def made(values: Any, num_samples: int, *, labelled: bool = False) -> Callable[[], Any]:
    """A dataset of samples that exist already."""
    return lambda: Made(Held(values() if callable(values) else values, labelled), num_samples)


def computed(compute: Callable[[int], Any], num_samples: int) -> Callable[[], Any]:
    """A dataset of samples made anew on every access."""
    return lambda: Made(Computed(compute), num_samples)


def rows() -> list[Row]:
    """All kinds."""
    u8, f32 = torch.uint8, torch.float32
    small = functools.partial(tensors, (32, 32, 3), u8)
    image = functools.partial(tensors, (3, 224, 224), u8)
    return [
        Row("dict of 20 tensors of 8", lambda: Made(Fields(20, 8), 4096), 64),
        Row("Subset of 32x32x3 uint8 tensors", lambda: Subset(made(small, 8192)(), range(8192))),
        Row("tensor 32x32x3 uint8 + label", made(small, 8192, labelled=True)),
        Row("iterable of tensor 32x32x3 uint8 + label", lambda: Stream(Held(small(), True), 8192)),
        Row("namedtuple of a tensor of 100 and an int", computed(PointOf(), 8192)),
        Row("TensorDataset, rows of 100 float32", lambda: TensorDataset(torch.rand(8192, 100))),
        Row("(int, int)", computed(pair_of_ints, 16384)),
        Row("int", computed(int, 16384)),
        Row("float", computed(float, 16384)),
        Row("str", computed(str, 16384)),
        Row("bytes", computed(str_bytes, 16384)),
        Row("0-d tensor", made(lambda: list(torch.rand(64)), 16384)),
        Row("tensor 3x32x32 float32", made(lambda: tensors((3, 32, 32), f32), 8192)),
        Row("tensor of 4 bytes", made(lambda: tensors((1,), f32), 8192)),
        Row("tensor of 400 bytes", made(lambda: tensors((100,), f32), 8192)),
        Row("tensor of 4 kB", made(lambda: tensors((1000,), f32), 8192)),
        Row("tensor of 12 kB", made(lambda: tensors((64, 64, 3), u8), 4096)),
        Row("tensor of 48 kB", made(lambda: tensors((128, 128, 3), u8), 2048)),
        Row("tensor 3x224x224 uint8", made(image, 1024, labelled=True), 64),
        Row("tensor 3x224x224 float32", made(lambda: tensors((3, 224, 224), f32, 16), 256), 32),
        Row("tensor of 4 MB", made(lambda: tensors((1000, 1000), f32, 8), 64), 8),
        Row("tensor of 40 MB", made(lambda: tensors((10_000_000,), f32, 2), 8), 2),
        Row("views of one tensor, 3x64x64 uint8", made(lambda: views((3, 64, 64), u8, 512), 4096)),
        Row("array of 4 bytes", made(lambda: arrays((1,), np.float32), 8192)),
        Row("array of 400 bytes", made(lambda: arrays((100,), np.float32), 8192)),
        Row("array 32x32x3 uint8 + label", made(lambda: arrays((32, 32, 3), np.uint8), 8192, labelled=True)),
        Row("array of 12 kB", made(lambda: arrays((64, 64, 3), np.uint8), 4096)),
        Row(
            "array 224x224x3 uint8 + label",
            made(lambda: arrays((224, 224, 3), np.uint8), 1024, labelled=True),
            64,
        ),
        Row("array of 4 MB", made(lambda: arrays((1000, 1000), np.float32, 8), 64), 8),
        Row("array of 40 MB", made(lambda: arrays((10_000_000,), np.float32, 2), 8), 2),
        Row("bfloat16 of 100", made(lambda: tensors((100,), torch.bfloat16), 8192)),
        Row("bfloat16 3x224x224", made(lambda: tensors((3, 224, 224), torch.bfloat16, 16), 512), 64),
        Row("dict of image, mask, boxes, id", lambda: Made(Detection(), 512), 32),
        Row("list of two dicts", lambda: Made(TwoDicts(), 8192)),
        Row("dict of 30 scalars", computed(row_of_a_table, 4096)),
        Row("fresh ToTensor 3x64x64 float32", computed(to_tensor, 2048)),
        Row("fresh ToTensor 3x224x224 float32 + label", computed(to_large_tensor, 256), 32),
        Row("__getitems__, 32x32x3 uint8 + label", lambda: InBulk(Held(small(), True), 8192)),
        Row(
            "ConcatDataset, 32x32x3 uint8", lambda: ConcatDataset([made(small, 4096)(), made(small, 4096)()])
        ),
        Row("batch_size=1, 32x32x3 uint8 + label", made(small, 2048, labelled=True), 1),
        Row("batch_size=1, 3x224x224 uint8 + label", made(image, 1024, labelled=True), 1),
        Row("batch_size=16, 32x32x3 uint8 + label", made(small, 8192, labelled=True), 16),
        Row("batch_size=4096, 32x32x3 uint8 + label", made(small, 16384, labelled=True), 4096),
        Row("batch_size=None, 32x32x3 uint8", made(small, 4096), None),
        Row("batch_size=None, 3x224x224 uint8", made(image, 1024), None),
        Row(
            "shuffled, tensor 32x32x3 uint8 + label", made(small, 8192, labelled=True), 256, {"shuffle": True}
        ),
        Row("ragged, collate_fn=list", lambda: Made(Ragged(), 8192), 256, {"collate_fn": list}),
        Row(
            "own collate_fn, 32x32x3 uint8",
            made(small, 8192, labelled=True),
            256,
            {"collate_fn": pair_of_stacks},
        ),
        Row(
            "own collate_fn, 3x224x224 uint8",
            made(image, 1024, labelled=True),
            64,
            {"collate_fn": pair_of_stacks},
        ),
        Row(
            "pin_memory, 32x32x3 uint8 + label",
            made(small, 8192, labelled=True),
            256,
            {"pin_memory": True},
            pins=True,
        ),
        Row(
            "pin_memory, 3x224x224 uint8",
            made(image, 1024, labelled=True),
            64,
            {"pin_memory": True},
            pins=True,
        ),
        *(
            Row(
                f"start: {count} batch{'es'[: 2 * (count > 1)]} of 32x32x3 uint8",
                made(small, 256 * count),
                starts=True,
            )
            for count in (1, 2, 3)
        ),
        Row("start: 2 batches of 3x224x224 uint8", made(image, 128, labelled=True), 64, starts=True),
        Row(
            'seeding="sample", 3x224x224 uint8 + label',
            made(image, 1024, labelled=True),
            64,
            ours={"seeding": "sample"},
        ),
    ]


def pair_of_ints(index: int) -> tuple[int, int]:
    """Two numbers."""
    return index, -index


def str_bytes(index: int) -> bytes:
    """A few bytes."""
    return b"%d" % index


class PointOf:
    """A namedtuple of a tensor and an int."""

    def __init__(self) -> None:
        self.values = tensors((100,), torch.float32)

    def __call__(self, index: int) -> Any:
        """The sample of an index."""
        return Point(self.values[index % 64], index)


# --- measuring --------------------------------------------------------------------------------------------


def epochs_s(loader: Any, count: int) -> float:
    """How long so many epochs take."""
    start_s = time.perf_counter()
    for _ in range(count):
        for _batch in loader:
            pass
    return time.perf_counter() - start_s


def make_loaders(row: Row, num_workers: int) -> list[Any]:
    """Both loaders, torch's first, over one dataset."""
    dataset = row.dataset()
    options = {
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0 and not row.starts,
        **row.options,
    }
    return [
        torch.utils.data.DataLoader(dataset, row.batch_size, **options),
        fastload.DataLoader(dataset, row.batch_size, **options, **row.ours),
    ]


def compare(row: Row, num_workers: int, runs: int) -> tuple[list[float], list[float]]:
    """Seconds of both loaders over the same number of epochs, in interleaved runs."""
    loaders = make_loaders(row, num_workers)
    for loader in loaders:
        epochs_s(loader, 1)
    count = max(1, round(RUN_S / epochs_s(loaders[0], 1)))
    times: tuple[list[float], list[float]] = ([], [])
    for run in range(runs):
        for side in (0, 1) if run % 2 else (1, 0):
            times[side].append(epochs_s(loaders[side], count))
    for loader in loaders:
        if isinstance(loader, fastload.DataLoader):
            loader.close()
        loader._iterator = None
    return times


@contextlib.contextmanager
def emulated_accelerator(wanted: bool) -> Iterator[None]:
    """Where there is no accelerator: let both loaders believe in one whose pinning is a copy."""
    if not wanted or torch.accelerator.is_available():
        yield
        return
    replaced: list[tuple[Any, str, Any]] = [
        (torch.accelerator, "is_available", lambda: True),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "set_device_index", lambda _index: None),
        (torch.accelerator, "current_accelerator", lambda **_: torch.device("cpu")),
        (torch.Tensor, "pin_memory", lambda tensor, _device=None: tensor.clone()),
    ]
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in replaced]
    for holder, name, value in replaced:
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=[""], nargs="+", help="rows whose names hold one of these texts")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/zero_cost.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of torch, about arrays that cannot be written to
    figures: dict[str, dict[str, Any]] = {}
    print(f"{'torch s / fastload s':46}" + "".join(f"{count:>9} w" for count in args.workers), flush=True)
    for row in rows():
        if not any(text in row.name for text in args.only):
            continue
        print(f"{row.name:46}", end="", flush=True)
        for num_workers in args.workers:
            with emulated_accelerator(row.pins):
                theirs, ours = compare(row, num_workers, args.runs)
            ratio = statistics.median(theirs) / statistics.median(ours)
            figures[f"{row.name}, {num_workers} workers"] = {
                "ratio": round(ratio, 3),
                "torch_s": theirs,
                "fastload_s": ours,
            }
            print(f"{ratio:>10.2f}{' ' if ratio >= LEAST else '!'}", end="", flush=True)
        print()
    ratios = summary(figures, args.workers)
    for name, ratio in ratios.items():
        print(f"{name}: {ratio['value']:.2f}")
    if args.save:
        question = {
            "title": f"{sum(any(text in row.name for text in args.only) for row in rows())} kinds of samples",
            "unit": "s",
            "rows": figures,
            "ratios": ratios,
        }
        only = " --only " + " ".join(f'"{text}"' for text in args.only) if any(args.only) else ""
        save("zero_cost", f"python benchmarks/zero_cost.py --runs {args.runs}{only} --save", [question])


def summary(figures: dict[str, dict[str, Any]], workers: list[int]) -> dict[str, dict[str, float]]:
    """The median and the lowest kind for each number of workers; what only our loader does, by itself."""
    ratios: dict[str, dict[str, float]] = {}
    extra = {row.name for row in rows() if row.ours}
    for count in workers:
        suffix = f", {count} workers"
        found = {
            name.removesuffix(suffix): cell["ratio"]
            for name, cell in figures.items()
            if name.endswith(suffix)
        }
        kinds = {name: ratio for name, ratio in found.items() if name not in extra}
        if kinds:
            lowest = min(kinds, key=lambda name: kinds[name])
            middle = statistics.median(kinds.values())
            ratios[f"{count} workers, the median kind"] = {"value": middle, "target": 1.0}
            ratios[f"{count} workers, the slowest kind: {lowest}"] = {"value": kinds[lowest], "target": LEAST}
        for name in extra & found.keys():
            ratios[f"{count} workers, {name}"] = {"value": found[name], "target": LEAST}
    return ratios


if __name__ == "__main__":
    main()
