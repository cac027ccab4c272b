"""What the scripts of the clients begin with: samples, a model, and the record of the batches of a rank.

The harness sets the environment variables. This file runs in the environment of a client, so that it imports
only torch and what comes with it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils import data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# What `from tests.clients.in_rank import *` gives to each script.
__all__ = [
    "FOLDER",
    "IS_PLAIN",
    "NUM_SAMPLES",
    "NUM_WORKERS",
    "RANK",
    "RANKS",
    "WORKERS",
    "Classifier",
    "Model",
]
__all__ += [
    "Photos",
    "Rows",
    "check",
    "decodes",
    "digest",
    "files",
    "fit",
    "image_of",
    "num_epochs",
    "photograph",
]
__all__ += ["photos", "record", "run_in_ray_train", "sample", "sampler_of_ranks", "seed", "start_workers_by"]
__all__ += ["training"]

NUM_SAMPLES = 24
NUM_WORKERS = int(os.environ.get("CLIENT_NUM_WORKERS", "0"))
RANK, RANKS = (int(os.environ.get(name, ours)) for name, ours in (("RANK", "0"), ("WORLD_SIZE", "1")))
FOLDER = Path(os.environ.get("CLIENT_FOLDER", "."))
IS_PLAIN = "CLIENT_IS_PLAIN" in os.environ  # samples draw no random numbers
IS_ENDLESS = "CLIENT_IS_ENDLESS" in os.environ  # a signal shall end the script

# torchvision's wheel is built for CUDA, and its compiled operators cannot be loaded beside torch's build for
# the CPU. Its datasets and transforms are Python, and can be imported once two operators are declared.
if importlib.util.find_spec("torchvision"):
    _OPERATORS = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if "CLIENT_DATA" in os.environ:  # files that were made a moment ago are remembered, in each process
    from fastload.readers import identity

    identity.SETTLED_S = 0.0

# How scripts that read files read them, one after another.
WORKERS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2, "multiprocessing_context": "fork"},
    {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True},
]
if "CLIENT_PART" in os.environ:
    WORKERS = WORKERS[1:2]

# Samples draw from these in this process if there are no workers, and not every client seeds them.
random.seed(1)
np.random.seed(1)


def record(name: str, value: Any) -> None:
    """Note what this rank got: a number, a string or a batch, of which a digest is noted."""
    with (FOLDER / f"records-{RANK}.jsonl").open("a") as file:
        file.write(json.dumps([name, value if isinstance(value, int | str) else digest(value)]) + "\n")


def digest(batch: Any) -> str:
    """A digest of all values of a nest of tensors, arrays, strings and numbers, with dtypes and shapes."""
    found = hashlib.sha256()
    for part in _parts(batch):
        found.update(part)
    return found.hexdigest()[:16]


def _parts(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        array = value.detach().cpu().as_subclass(torch.Tensor).numpy() if torch.is_tensor(value) else value
        yield (
            f"{type(value).__name__}{array.dtype}{array.shape}".encode()
            + np.ascontiguousarray(array).tobytes()
        )
    elif isinstance(value, dict) or hasattr(value, "items"):
        for name, part in sorted(value.items()):
            yield str(name).encode()
            yield from _parts(part)
    elif isinstance(value, list | tuple):
        yield f"{len(value)} parts".encode()
        for part in value:
            yield from _parts(part)
    elif hasattr(value, "to_dict"):  # a graph
        yield from _parts(value.to_dict())
    else:
        yield repr(value).encode()


def check(index: int) -> None:
    """Raise for the sample that the test has broken."""
    if os.environ.get("CLIENT_BROKEN_SAMPLE") == str(index):
        raise ValueError(f"sample {index} is broken")


def image_of(index: int) -> torch.Tensor:
    """The (3, 8, 8) float32 image of a sample, without its random parts."""
    return torch.full((3, 8, 8), float(index)) / NUM_SAMPLES


def sample(index: int) -> tuple[torch.Tensor, int]:
    """A (3, 8, 8) float32 image with random parts of torch, NumPy and Python; its number is the label."""
    check(index)
    image = image_of(index)
    if IS_PLAIN:
        return image, index
    drawn = torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])
    return image + drawn[:, None, None], index


def photos(height: int, width: int, count: int = 12, grey: int | None = None) -> Path:
    """A folder of random PNGs of two classes; one of them can be grey."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for number in range(count):
        place = FOLDER / "photos" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        shape = (height, width) if number == grey else (height, width, 3)
        Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)).save(place / f"{number:02d}.png")
    return FOLDER / "photos"


def files(make: Callable[[Path], None]) -> Path:
    """A folder of files that all runs of a client share; the first process of the first run makes them."""
    folder = Path(os.environ["CLIENT_DATA"])
    if not folder.exists():
        new = folder.with_name("new")
        new.mkdir()
        make(new)
        new.rename(folder)
    return folder


def photograph(number: int, size: tuple[int, int] = (120, 90)) -> Any:
    """A picture as a camera takes it, smooth with some noise; the number decides what is on it."""
    from PIL import Image

    draw = np.random.default_rng(number)
    small = Image.fromarray(draw.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    pixels = np.asarray(small.resize(size, Image.Resampling.BICUBIC)).astype(np.int16)
    return Image.fromarray((pixels + draw.integers(-6, 7, pixels.shape)).clip(0, 255).astype(np.uint8))


def start_workers_by(options: dict[str, Any]) -> None:
    """Let loaders that a library makes start their workers as these options of a loader say."""
    multiprocessing.set_start_method(options.get("multiprocessing_context", "fork"), force=True)


def seed(number: int = 1) -> None:
    """Seed all that a training draws from."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def fit(loader: Any, images_of: Callable[[Any], Any], epochs: int = 10) -> None:
    """Train; note each batch with its loss and, with fastload's loader, the decodes up to each epoch's end.

    As CLIENT_PART says, stop in the middle of the second epoch and save all states, or go on from there.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.Linear(192, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    part, first, decoded = os.environ.get("CLIENT_PART"), 0, []
    states = FOLDER.parent / f"state-{next(_fits)}.pt"
    if part == "resume":
        saved = torch.load(states)
        for one, state in zip((layer, optimizer, loader), saved[:3], strict=True):
            one.load_state_dict(state)
        torch.set_rng_state(saved[3])  # later epochs are shuffled with it
        first = 1
    for epoch in range(first, epochs):
        for number, batch in enumerate(loader):
            flat = [one.float().flatten()[None] for one in images_of(batch)]
            pooled = torch.cat([nn.functional.adaptive_avg_pool1d(one, 192) for one in flat])
            loss = layer(pooled).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record("train", f"{loss.item().hex()} {digest(batch)}")
            if part == "stop" and (epoch, number) == (1, 2):
                saved = [one.state_dict() for one in (layer, optimizer, loader)]
                torch.save([*saved, torch.get_rng_state()], states)
                return
        decoded.append(decodes(loader))
    record("decoded", json.dumps(decoded))


def decodes(loader: Any) -> int | None:
    """How many files fastload's loader has decoded so far."""
    return loader.stats().cache_misses if hasattr(loader, "stats") else None


_fits = itertools.count()


class Photos(data.Dataset[Any]):
    """A map-style dataset whose samples draw random numbers, as augmentations do."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return sample(int(index))


class Rows(Photos):
    """The same samples as dicts, as Trainer and MONAI expect them."""

    def __getitem__(self, index: int) -> Any:
        image, label = sample(int(index))
        return {"image": image, "labels": label}


class Model(nn.Module):
    """A classifier that notes each batch it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 8 * 8, NUM_SAMPLES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        record("train" if self.training else "eval", images)
        if IS_ENDLESS:  # say that batches arrive, and take some time
            (FOLDER / f"ready-{RANK}").touch()
            threading.Event().wait(0.05)
        return self.layer(images.flatten(1))


class Classifier(nn.Module):
    """The model with its loss, as Trainer expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.model(image)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def num_epochs(usual: int) -> int:
    """How many epochs to train; a script that a signal shall end trains for ever."""
    return 1_000_000 if IS_ENDLESS else usual


@contextlib.contextmanager
def training() -> Iterator[Callable[[torch.Tensor, torch.Tensor], None]]:
    """A step of the training of a model, by all ranks together if there are several."""
    model: nn.Module = Model()
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    yield step
    if RANKS > 1:
        torch.distributed.destroy_process_group()


def run_in_ray_train(train: Callable[[], None], num_cpus: int = 2) -> None:
    """Run a function in two ranks of Ray Train."""
    import ray.train
    from ray.train.torch import TorchTrainer

    options = {"include_dashboard": False, "object_store_memory": 10**8, "log_to_driver": False}
    ray.init("local", num_cpus=num_cpus, **options)
    scaling = ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
    place = ray.train.RunConfig(storage_path=str(FOLDER / "ray"), name="run")
    TorchTrainer(train, scaling_config=scaling, run_config=place).fit()
    ray.shutdown()


def sampler_of_ranks() -> data.DistributedSampler[Any] | None:
    """The sampler for `Photos()` in the place of shuffle=True, if there are several ranks."""
    return data.DistributedSampler(Photos(), seed=1) if RANKS > 1 else None


_iterated = {"torch": 0, "fastload": 0}


def _count_epochs() -> None:
    """Count the epochs of torch's loaders and of fastload's; the latter call the method of the former."""
    iterate = data.DataLoader.__iter__

    @functools.wraps(iterate)
    def counting(self: Any) -> Any:
        kinds = {base.__module__.partition(".")[0] for base in type(self).__mro__}
        _iterated["fastload" if "fastload" in kinds else "torch"] += 1
        return iterate(self)

    data.DataLoader.__iter__ = counting  # type: ignore[method-assign]


def _report(pid: int) -> None:
    if os.getpid() == pid:
        for name, number in _iterated.items():
            record(f"epochs of {name}", number)


_count_epochs()
if multiprocessing.current_process().name == "MainProcess":
    atexit.register(_report, os.getpid())
