"""Datasets, transforms and collate functions whose samples are their draws; started workers import them."""

from __future__ import annotations

import os
import random
import sys
import types
from typing import TYPE_CHECKING, Any

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # its import would ask the network for a newer version

import albumentations as A  # the name its own documentation uses
import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

import fastload

if TYPE_CHECKING:
    from collections.abc import Iterator

# A crop of a picture whose pixels are their own positions tells where it was taken.
POSITIONS = np.arange(1 << 16, dtype=np.int32).reshape(256, 256, 1).astype(np.float32)


def every_kind() -> list[Any]:
    """A generator of every kind that seeding="sample" seeds."""
    bits = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
    others = np.random.RandomState(1), random.Random(1), torch.Generator().manual_seed(1)
    return [*(np.random.Generator(kind(1)) for kind in bits), *others]


def draw(generator: Any) -> int:
    """A number of 31 bits; the normal draw first leaves numbers behind in generators that keep some."""
    if isinstance(generator, torch.Generator):
        torch.randn(1, generator=generator)
        return int(torch.randint(1 << 31, (), generator=generator))
    if isinstance(generator, random.Random):
        generator.gauss()
        return generator.getrandbits(31)
    generator.normal()
    return int(generator.bytes(4).hex(), 16) >> 1


def draw_globals() -> list[int]:
    """A number of 40 bits of each of the libraries' own generators."""
    return [random.getrandbits(40), int(np.random.randint(1 << 40)), int(torch.randint(1 << 40, ()))]


def draw_sample_rng() -> int:
    return int(fastload.sample_rng().integers(1 << 40))


def corner(pipeline: Any) -> int:
    """Where one random crop begins."""
    return int(pipeline(image=POSITIONS)["image"][0, 0, 0])


def run(dataset: Any, epochs: int = 1, cls: Any = fastload.DataLoader, **options: Any) -> list[Any]:
    """What each epoch brings, as lists; in their order, or sorted if batches come as they are made."""
    loader = cls(dataset, **{"batch_size": 4, "generator": fastload.seed_everything(7), **options})
    found = [[plain(batch) for batch in loader] for _ in range(epochs)]
    loader._iterator = None
    return found if options.get("in_order", True) else [sorted(epoch, key=repr) for epoch in found]


def plain(batch: Any) -> Any:
    """A nest with lists and numbers in place of tensors and arrays."""
    return tree_map(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, batch)


class Randomizable:
    """What MONAI's class of this name is for seeding; the real one is not needed here."""

    R: np.random.RandomState = np.random.RandomState(7)

    def set_random_state(self, seed: int | None = None, state: Any = None) -> Randomizable:
        self.R = np.random.RandomState(seed) if state is None else state
        return self


# Stands for MONAI's module, which is not installed.
monai = types.ModuleType("monai.transforms.transform")
monai.Randomizable = Randomizable  # type: ignore[attr-defined]
sys.modules.setdefault(monai.__name__, monai)


class Composed(Randomizable):
    """As MONAI's Compose: its parts get seeds that it draws."""

    def __init__(self, *parts: Randomizable) -> None:
        self.parts = list(parts)

    def set_random_state(self, seed: int | None = None, state: Any = None) -> Composed:
        super().set_random_state(seed, state)
        for part in self.parts:
            part.set_random_state(self.R.randint(1 << 32))
        return self


class Alone:
    """Each sample: its index, and draws from all that a thread has for itself, its `own` generators too."""

    def __init__(self, length: int = 24, seed: int | None = None, own: list[Any] | None = None) -> None:
        self.length = length
        self.crop = A.Compose([A.OneOf([A.RandomCrop(8, 8)], p=1), A.HorizontalFlip(p=0.5)], seed=seed)
        self.second = A.RandomCrop(4, 4)
        self.part = Randomizable()
        self.composed = Composed(self.part)
        self.own = every_kind() if own is None else own

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor([int(index), *self.wide(), *self.narrow()])

    def wide(self) -> list[int]:
        """Draws of 31 bits or more."""
        return [draw_sample_rng(), draw_sample_rng(), *(draw(one) for one in (*self.own, *self.own))]

    def narrow(self) -> list[int]:
        crops = corner(self.crop), corner(self.second)
        return [*crops, int(self.part.R.randint(1 << 30)), int(self.composed.R.randint(1 << 30))]

    def stand(self) -> Any:
        kept = [self.part.R, self.composed.R]
        return stand_of([self.crop, self.second], kept), list(map(state_of, self.own))


def walk(pipelines: Any) -> Iterator[Any]:
    """The pipelines, and all transforms in their lists."""
    for pipeline in pipelines:
        yield pipeline
        yield from walk(getattr(pipeline, "transforms", ()))


def stand_of(pipelines: list[Any], kept: Any = ()) -> Any:
    """Which generators the pipelines have, and where they stand; and the same of others that are kept."""
    kept = [*kept, *(one for part in walk(pipelines) for one in (part.py_random, part.random_generator))]
    return list(map(id, kept)), list(map(state_of, kept))


def state_of(generator: Any) -> str:
    """All that decides the next draws."""
    if isinstance(generator, random.Random):
        return str(generator.getstate())
    if isinstance(generator, np.random.Generator):
        return str(generator.bit_generator.state)
    state = generator.get_state()
    return str(state.tolist() if isinstance(state, torch.Tensor) else state)


def state_of_globals() -> list[str]:
    return [str(random.getstate()), str(np.random.get_state()), str(torch.get_rng_state().tolist())]


class Dice(Alone):
    """Draws from the libraries' own generators, too, and from a set; sample 2 raises the error once."""

    def __init__(self, *args: Any, error: type[BaseException] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.error = error

    def __getitem__(self, index: Any) -> Any:
        row = super().__getitem__(index)
        if index == 2 and self.error is not None:
            error, self.error = self.error, None
            raise error
        return row

    def wide(self) -> list[int]:
        return [*draw_globals(), *super().wide()]


class Unreadable(Dice):
    """Draws, and then fails to read the last sample of every batch of four."""

    def __getitem__(self, index: Any) -> Any:
        row = super().__getitem__(index)
        if index % 4 == 3:
            raise OSError(f"sample {index} cannot be read")
        return row


class Pictures:
    """Pictures whose pixels are their positions, and that draw on the way, from generators that they seed."""

    def __init__(self, length: int = 24, own: Any = None) -> None:
        self.length = length
        self.own = [] if own is None else [own]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        random.seed(index), np.random.seed(index), torch.manual_seed(index)
        for generator in self.own:
            generator.bit_generator.state = np.random.PCG64(index).state
        draw_globals(), list(map(draw, self.own))
        return POSITIONS[:64, :64] + index, index


def resize() -> A.Compose:
    """A deterministic pipeline that draws all the same: albumentations tosses a coin for p=1, too."""
    return A.Compose([A.Resize(64, 64, p=1)])


class Jitter:
    """A transform that draws, also from a generator of its own, and then writes to its input."""

    def __init__(self, own: Any = None, *, shared: bool = True) -> None:
        self.options = {"rng": np.random.default_rng(1) if own is None else own}
        self.shared = shared

    def __call__(self, sample: Any) -> Any:
        image, label = sample
        image[0, 0, 0] = 1.0
        numbers = [draw_sample_rng(), draw(self.options["rng"])]
        return numbers + draw_globals() if self.shared else numbers, label


def around(dataset: Any, index: int) -> Any:
    """Draws before and after it asks a dataset."""
    before = random.getrandbits(40), draw_sample_rng()
    sample = dataset[index]
    return before, sample, random.getrandbits(40), draw_sample_rng()


class Noise:
    """A transform that adds a draw to the sample."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, sample: Any) -> Any:
        return sample, draw(self.value)


class Chain:
    """As torchvision's Compose."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = transforms

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class Drawing:
    """A collate_fn that returns the batch, and draws from every kind of generator, shared ones or not."""

    def __init__(self, *, shared: bool = True, own: list[Any] | None = None) -> None:
        self.shared = shared
        self.crop = A.Compose([A.RandomCrop(8, 8)])
        self.own = every_kind() if own is None else own

    def __call__(self, samples: Any) -> Any:
        wide = [draw_sample_rng(), *map(draw, self.own), *(draw_globals() if self.shared else ())]
        batch = default_collate(samples) if type(samples) is list else samples
        return batch, wide, [corner(self.crop) for _ in range(4)]


def keyed(key: Any) -> Any:
    """The sample of a name, a tuple or a number."""
    return str(key), random.getrandbits(40)
