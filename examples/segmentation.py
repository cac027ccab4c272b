"""Images with masks: albumentations crops and flips both alike, from a cache of undisturbed pairs.

    python examples/segmentation.py [PHOTOS]

Claim: after random crops, flips and turns every pixel of a mask still lies on its pixel of the image.
"""

from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import torch
from pictures import SIZE, photo_folder
from torch.utils.data import Dataset

import fastload

CLASSES = 3


def classify(pixels: Any) -> Any:
    """The class of each pixel from its value alone, dark to bright; for arrays and for tensors."""
    return pixels // (256 // CLASSES + 1)


class Scenes(Dataset):
    """Pictures and masks: a dict whose keys are the targets of albumentations.

    Yours reads the masks from files. These are made from the green channel, so that it can be checked at the
    end, from the batch alone, that each mask is where its image is.
    """

    def __init__(self, folder: Path) -> None:
        self.photos = fastload.ImageFolder(folder, size=SIZE)

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        image, _ = self.photos[index]
        return {"image": image, "mask": classify(image[..., 1])}  # (H, W, 3) uint8 and (H, W) uint8


def main() -> None:
    with photo_folder() as folder:
        transform = A.Compose([A.RandomCrop(80, 80), A.SquareSymmetry(p=1.0)])
        dataset = fastload.CachedDataset(Scenes(folder), transform=transform, cache="ram")
        loader = fastload.DataLoader(
            dataset, batch_size=8, shuffle=True, num_workers=2, memory_format=torch.channels_last
        )
        pixels = torch.zeros(CLASSES, dtype=torch.int64)
        for _ in range(2):  # the second epoch crops the cached pictures and masks anew
            for batch in loader:
                images, masks = batch["image"], batch["mask"]  # (B, 3, 80, 80) and (B, 80, 80), both uint8
                if not torch.equal(classify(images[:, 1]), masks):
                    raise SystemExit("a mask has moved against its image")
                pixels += torch.bincount(masks.flatten(), minlength=CLASSES)

        if not pixels.all():
            raise SystemExit(f"a class has no pixel, so nothing was checked: {pixels.tolist()}")
        print("share of each class:", " ".join(f"{share:.0%}" for share in (pixels / pixels.sum()).tolist()))
        print(f"2 x {len(dataset)} masks lie where their images do")


if __name__ == "__main__":
    main()
