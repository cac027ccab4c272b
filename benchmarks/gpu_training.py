"""Training a ResNet-50 from a cache in RAM, against the same training on data that never leaves the device.

Question: what does feeding cost? Three sources for one network, bfloat16, channels-last, batch 256: a batch
that lies on the device; fastload from a RAM cache with `device=` and Normalize; torch's DataLoader over the
same images with pin_memory, non_blocking copies, and the same Normalize. Reported for each: images a second,
the step's time, the share of the time that the device waited for data (by events), and CPU seconds of this
process and its workers.

Held out: decoding, augmentation, the disk. Part of benchmarks/gpu_checks.py; its command runs this.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
import torch.utils.data
from gpu_tools import check, sized
from torch import nn

import fastload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

NORMALIZE = fastload.transforms.Normalize(
    (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), dtype=torch.bfloat16, memory_format=torch.channels_last
)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 (with the stride), 1 x 1, around a shortcut: He et al., 2015, in the variant "v1.5"."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, channels_out, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(channels_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, C, H, W)` to `(B, 4 width, H / stride, W / stride)`."""
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, num_classes: int = 1000) -> nn.Module:
    """ResNet-50 by default; `(B, 3, H, W)` to `(B, num_classes)`."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            stride = 2 if stage and not number else 1
            layers.append(Bottleneck(channels, width << stage, stride))
            channels = 4 * (width << stage)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
    return nn.Sequential(*layers, *head).to(memory_format=torch.channels_last)


class Images(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Decoded images in one array: what a user writes to be fast."""

    def __init__(self, num_images: int, side: int) -> None:
        self.images = np.random.default_rng(0).integers(0, 256, (num_images, side, side, 3), np.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], int]:
        """``(side, side, 3) uint8`` and a label."""
        return self.images[index], index % 1000


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one source costs.

    Attributes:
        images_per_s: Over all measured steps.
        step_ms: From the end of one step to the end of the next.
        wait_share: Of the time in which the device had nothing to do but wait for a batch; None on the CPU.
        cpu_s: Of this process and its workers.
        losses: Whether they were finite.
    """

    images_per_s: float
    step_ms: float
    wait_share: float | None
    cpu_s: float
    losses: bool


def cpu_s() -> float:
    """CPU seconds that this process and its living children have used."""
    own = psutil.Process()
    times = [process.cpu_times() for process in [own, *own.children(recursive=True)]]
    return sum(each.user + each.system for each in times)


def train(batches: Iterator[Any], network: nn.Module, num_steps: int, num_warm: int) -> Figures:
    """Take steps, measure all but the first ones."""
    device = next(network.parameters()).device
    on_cuda = device.type == "cuda"
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, fused=on_cuda)
    events: list[tuple[Any, Any]] = []
    total = torch.zeros((), device=device)
    num_images, start_s, start_cpu_s = 0, 0.0, 0.0
    for step, (images, labels) in enumerate(itertools.islice(batches, num_steps)):
        if step == num_warm:
            _finish(on_cuda)
            num_images, start_s, start_cpu_s = 0, time.perf_counter(), cpu_s()
            events.clear()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if on_cuda else (None, None)
        if on_cuda:
            begin.record()  # behind the wait for the batch's copy
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        if on_cuda:
            end.record()
        events.append((begin, end))
        num_images += len(labels)
    _finish(on_cuda)
    elapsed_s = time.perf_counter() - start_s
    wait_share = None
    if on_cuda:
        gaps_ms = [before[1].elapsed_time(after[0]) for before, after in itertools.pairwise(events)]
        wait_share = sum(gaps_ms) / (events[0][0].elapsed_time(events[-1][1]))
    return Figures(
        num_images / elapsed_s,
        1000 * elapsed_s / (num_steps - num_warm),
        wait_share,
        cpu_s() - start_cpu_s,
        bool(total.isfinite()),
    )


def _finish(on_cuda: bool) -> None:
    if on_cuda:
        torch.cuda.synchronize()


def forever(epochs: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from epochs()


def compare(
    device: str,
    network: Callable[[], nn.Module],
    *,
    num_images: int,
    side: int,
    batch_size: int,
    num_steps: int,
    num_workers: int,
    runs: int,
) -> dict[str, Any]:
    """All sources in turn, `runs` times; medians of what they cost, and ratios of these."""
    dataset = Images(num_images, side)
    cached = fastload.CachedDataset(dataset, cache="ram", cache_key=f"gpu training {num_images} {side}")
    cached.fill(num_workers=0, progress=False)
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": True,
        "drop_last": True,
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
    }
    ours = fastload.DataLoader(cached, device=device, device_transform=NORMALIZE, **options)
    theirs = torch.utils.data.DataLoader(dataset, pin_memory=device == "cuda", **options)

    def moved() -> Iterator[Any]:
        for images, labels in theirs:
            on_device = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            yield NORMALIZE(on_device[0]), on_device[1]

    resident = next(iter(ours))
    sources: dict[str, Callable[[], Iterable[Any]]] = {
        "resident": lambda: itertools.repeat(resident),
        "fastload": lambda: ours,
        "torch": moved,
    }
    figures: dict[str, list[Figures]] = {name: [] for name in sources}
    for _ in range(runs):
        for name, epochs in sources.items():
            figures[name].append(train(forever(epochs), network().to(device), num_steps, num_steps // 4))
    ours.close()
    theirs._iterator = None

    def median(name: str, what: str) -> float:
        return float(np.median([getattr(each, what) for each in figures[name]]))

    return {
        "figures": {name: [dataclasses.asdict(each) for each in found] for name, found in figures.items()},
        "fastload / resident (step)": median("fastload", "step_ms") / median("resident", "step_ms"),
        "fastload / torch (images/s)": median("fastload", "images_per_s") / median("torch", "images_per_s"),
        "fastload / torch (CPU seconds)": median("fastload", "cpu_s") / median("torch", "cpu_s"),
        "targets": {"fastload / resident (step)": 1.02, "wait_share of fastload": 0.01},
    }


@check
def resnet_50_from_a_cache() -> dict[str, Any]:
    """On the current device, eight workers."""
    torch.backends.cudnn.benchmark = True
    if sized(0, 1):
        few = {"num_images": 24, "side": 32, "batch_size": 4, "num_steps": 8, "num_workers": 1, "runs": 1}
        return compare("cuda", lambda: resnet((1, 1), width=4), **few)
    return compare(
        "cuda", resnet, num_images=6144, side=224, batch_size=256, num_steps=40, num_workers=8, runs=2
    )
