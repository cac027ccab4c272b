"""How much `decode="fast"` changes crops, and whether the accuracy of a training changes.

Questions: how near are the crops of `decode="exact"` and of `decode="fast"` to crops that are resized by
area, where each pixel is the mean of the pixels that it covers? And how accurate is a small network after a
training with either of them?

Held out: speed. All ways draw the same boxes. The PSNR of a crop is 10 log10(255^2 / mean squared
difference). `decode="fast"` reduces an image only if its crop becomes at least 4 times smaller in both
directions (2 times without a decoder of regions); other crops are equal to those of `decode="exact"`, and are
counted apart.

The training has ten classes, one for each of ten photographs of scikit-image and scikit-learn. A sample is a
gray piece of 500 x 375 pixels, turned by a multiple of 90 degrees, with changed contrast and with grain. The
network learns from crops of 32 pixels, which `decode="fast"` nearly always reduces by 4 or 8. Both ways get
the same seeds, and thus the same boxes, order and first weights.

Command: python benchmarks/decode_quality.py [--only psnr|training] [--runs 3] [--save]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import albumentations as A
import cv2
import numpy as np
import torch
from harness import Contender, report, save
from jpegs import HUGE, LARGE, QUALITY, SMALL, make_image
from photos import SOURCES, encode_jpeg, load_photo
from PIL import Image

import fastload
from fastload.augmentation.albumentations.crop import CropInDecoder

EXACT, FAST = 'decode="exact"', 'decode="fast"'
AREAS = ((SMALL, 32, 20, 300), (LARGE, 224, 12, 120), (HUGE, 224, 6, 60))
NUM_CLASSES = 10
SIDE = 32
NUM_TRAIN, NUM_TEST = 800, 400
NUM_EPOCHS = 12
PIECE_SHARE = (0.3, 0.6)
GRAIN = 20.0


# --- pixels ----------------------------------------------------------------------------------------------


def crop_pipeline(side: int, interpolation: int) -> A.Compose:
    return A.Compose([A.RandomResizedCrop((side, side), interpolation=interpolation)], seed=0)


def psnr(some: Any, other: Any) -> float:
    """In decibels; 99 if both are equal."""
    error = float(np.mean((some.astype(np.float32) - other.astype(np.float32)) ** 2))
    return min(99.0, 10 * np.log10(255**2 / error)) if error else 99.0


def fidelity(size: Any, side: int, num_files: int, num_crops: int) -> dict[str, Any]:
    """The PSNR of crops against those that are resized by area."""
    files = [make_image(load_photo(SOURCES[n % NUM_CLASSES]), size, n) for n in range(num_files)]
    area = crop_pipeline(side, cv2.INTER_AREA)
    plain = crop_pipeline(side, cv2.INTER_LINEAR)
    exact = CropInDecoder(crop_pipeline(side, cv2.INTER_LINEAR), reduces=False)
    fast = CropInDecoder(crop_pipeline(side, cv2.INTER_LINEAR), reduces=True)
    found: dict[str, list[float]] = {EXACT: [], FAST: [], "fast against exact": []}
    num_equal = 0
    for content in files:
        whole = fastload.EncodedImage(content).decode()
        for _ in range(num_crops // num_files):
            wanted, linear = area(image=whole)["image"], plain(image=whole)["image"]
            crops = [way(image=fastload.EncodedImage(content))["image"] for way in (exact, fast)]
            if not np.array_equal(crops[0], linear):
                raise RuntimeError("decode='exact' differs from the same crop of the whole image")
            if np.array_equal(*crops):
                num_equal += 1
                continue
            for label, crop in zip((EXACT, FAST), crops, strict=True):
                found[label].append(psnr(crop, wanted))
            found["fast against exact"].append(psnr(*crops))
    rows = [Contender(label, label, lambda: 0.0, figures=figures) for label, figures in found.items()]
    num_reduced = len(found[FAST])
    title = (
        f"{size.title}, RandomResizedCrop({side}), against resizing by area: {num_reduced} crops of reduced "
        f"images ({num_equal} others are equal)"
    )
    answer = report(title, "dB", rows, {}, digits=1)
    answer["ratios"] = {"fast - exact": {"value": rows[1].median - rows[0].median, "unit": "dB"}}
    return answer


# --- training --------------------------------------------------------------------------------------------


def make_pieces(folder: Path, count: int, seed: int) -> None:
    """Gray pieces of ten photographs, a folder for each."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        source = SOURCES[number % NUM_CLASSES]
        photo = load_photo(source).convert("L")
        scale = min(photo.width / 500, photo.height / 375) * rng.uniform(*PIECE_SHARE)
        width, height = 500 * scale, 375 * scale
        left, top = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
        box = (left, top, left + width, top + height)
        piece = np.asarray(photo.resize((500, 375), Image.Resampling.BICUBIC, box=box)).astype(np.float32)
        piece = np.rot90(piece, rng.integers(4))
        piece = 128 + (piece - piece.mean()) * rng.uniform(0.4, 1.0) + rng.normal(0, GRAIN, piece.shape)
        path = folder / source.name / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(piece.round().clip(0, 255).astype(np.uint8)).convert("RGB")
        path.write_bytes(encode_jpeg(image, QUALITY))


def network() -> torch.nn.Module:
    """Three convolutions and a linear layer."""
    layers: list[torch.nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [
            torch.nn.Conv2d(before, after, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(after),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
        ]
    return torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10)
    )


def batches(folder: Path, decode: Any, seed: int, *, trains: bool) -> Any:
    """A loader over the pieces, which are decoded on every access."""
    first = A.RandomResizedCrop((SIDE, SIDE), scale=(0.3, 1.0)) if trains else A.Resize(SIDE, SIDE)
    pipeline = A.Compose([first, *([A.HorizontalFlip(p=0.5)] if trains else [])])
    dataset = fastload.CachedDataset(
        fastload.ImageFolder(folder), pipeline, cache="ram-encoded", decode=decode
    )
    generator = torch.Generator().manual_seed(seed)
    return fastload.DataLoader(
        dataset, 64, shuffle=trains, num_workers=1, generator=generator, persistent_workers=True
    )


def pixels(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 3, 1, 2).float().sub(128).div(64)


def trained(folder: Path, decode: Any, seed: int) -> torch.nn.Module:
    """A network after all epochs."""
    torch.manual_seed(seed)
    model = network()
    loader = batches(folder, decode, seed, trains=True)
    num_steps = NUM_EPOCHS * len(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=num_steps)
    for _ in range(NUM_EPOCHS):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(pixels(images)), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    loader.close()
    return model.eval()


def accuracy(model: torch.nn.Module, folder: Path, decode: Any) -> float:
    """The share of the test pieces that the network names correctly, in percent."""
    loader = batches(folder, decode, 0, trains=False)
    with torch.no_grad():
        right = sum(int((model(pixels(images)).argmax(1) == labels).sum()) for images, labels in loader)
    loader.close()
    return 100 * right / NUM_TEST


def training(runs: int) -> dict[str, Any]:
    """The accuracy after trainings from several seeds."""
    rows = {
        name: Contender(name, name, lambda: 0.0)
        for name in ("trained and tested exact", "trained and tested fast", "trained fast, tested exact")
    }
    with tempfile.TemporaryDirectory(prefix="fastload-quality-") as directory:
        learnt, tested = Path(directory, "train"), Path(directory, "test")
        make_pieces(learnt, NUM_TRAIN, 1)
        make_pieces(tested, NUM_TEST, 2)
        for seed in range(runs):
            exact, fast = (trained(learnt, decode, seed) for decode in ("exact", "fast"))
            rows["trained and tested exact"].figures.append(accuracy(exact, tested, "exact"))
            rows["trained and tested fast"].figures.append(accuracy(fast, tested, "fast"))
            rows["trained fast, tested exact"].figures.append(accuracy(fast, tested, "exact"))
    title = f"Accuracy of a small network on {NUM_TEST} pieces of ten photographs, {runs} seeds"
    answer = report(title, "%", list(rows.values()), {}, digits=1)
    exact_row, fast_row, _ = rows.values()
    difference = float(np.mean(fast_row.figures) - np.mean(exact_row.figures))
    answer["ratios"] = {"fast - exact, mean of all seeds": {"value": difference, "unit": "percentage points"}}
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["psnr", "training"])
    parser.add_argument("--runs", type=int, default=3, help="trainings with each way")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/decode_quality.json")
    args = parser.parse_args()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    answers = []
    if args.only != "training":
        answers += [fidelity(*case) for case in AREAS]
    if args.only != "psnr":
        answers.append(training(args.runs))
    if args.save:
        save("decode_quality", f"python benchmarks/decode_quality.py --runs {args.runs} --save", answers)


if __name__ == "__main__":
    main()
