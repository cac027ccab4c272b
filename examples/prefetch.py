"""One script with and without a GPU: batches are on the device when the loop asks for them.

    python examples/prefetch.py [FOLDER]

FOLDER holds a folder of images for each class.
"""

from pathlib import Path

import albumentations as A
import torch
from pictures import SIZE, photo_folder, small_network
from torch import nn

import fastload


def make_loader(folder: Path, device: str | None = "auto") -> fastload.DataLoader:
    """device="auto" is CUDA if it is available, and the CPU otherwise.

    Two batches are copied ahead on a side stream, from the memory that the workers write to. They travel as
    uint8, and Normalize makes floats of them on the device. pin_memory=True would add nothing.
    """
    photos = fastload.ImageFolder(folder, size=SIZE)
    transform = A.Compose([A.RandomCrop(80, 80), A.HorizontalFlip(p=0.5)])
    normalize = fastload.transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    return fastload.DataLoader(
        fastload.CachedDataset(photos, transform=transform, cache="ram"),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(0),
        device=device,
        device_transform=normalize if device else None,
    )


def train(folder: Path) -> None:
    with make_loader(folder) as loader:  # stops the workers at the end of the block
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = small_network(len(loader.dataset.classes)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for epoch in range(2):
            for images, labels in loader:  # (B, 3, 80, 80) float32 and (B,) int64: no .to() in the loop
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.3f}")  # .item() waits for the device: once an epoch


# --- The template ends here. The rest runs it, and compares its batches with DevicePrefetcher's. ------


def main() -> None:
    with photo_folder() as folder:
        train(folder)

        # DevicePrefetcher does the same for any iterable of batches, torch's own loader included.
        prefetcher = fastload.DevicePrefetcher(make_loader(folder, device=None), device="auto", depth=3)
        normalize = fastload.transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
        pairs = zip(make_loader(folder), prefetcher, strict=True)
        equal = [
            torch.equal(one[0], normalize(other[0])) and torch.equal(one[1], other[1]) for one, other in pairs
        ]
        print(f"{sum(equal)} of {len(equal)} batches on {prefetcher.device.type} are equal")


if __name__ == "__main__":
    main()
